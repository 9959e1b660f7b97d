"""Compare losses and gradients with Genentech/SCBD."""

from __future__ import annotations

import pytest
import torch
from helpers.known_answers import known_answers

from scbd.nn import invariance_loss, supervised_contrastive_loss

CASES = range(10)
FORMS = {"supcon_y": "y", "supcon_ye": "ye", "invariance_e": "e"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_values_and_gradients_are_equal_to_original(case, form):
    known = known_answers("scbd_losses")
    *_, n_environments, temperature = known["loss_cases"][case]
    source = 2 if case in (3, 4, 5) else case  # the same cells at other temperatures
    z = known.tensor(f"loss{source}_z").requires_grad_()
    y, e = (known.tensor(f"loss{source}_{name}") for name in "ye")
    labels = {"y": y, "e": e, "ye": y * int(n_environments) + e}[FORMS[form]]
    loss = invariance_loss if form == "invariance_e" else supervised_contrastive_loss
    found = loss(z, labels, temperature=float(temperature))
    torch.testing.assert_close(found.detach(), known.tensor(f"loss{case}_{form}"), rtol=1e-5, atol=1e-6)
    name = f"loss{case}_{form}_grad"
    if name in known:
        (gradient,) = torch.autograd.grad(found, z)
        torch.testing.assert_close(gradient, known.tensor(name), rtol=0, atol=2e-6)


def test_invariance_loss_34_wells_is_large():
    known = known_answers("scbd_losses")
    found = invariance_loss(known.tensor("loss6_z"), known.tensor("loss6_e"), temperature=0.1)
    assert float(found) == pytest.approx(9.3005, abs=5e-4)
