"""Compare objectives and their gradients with the systems of DomainBed and WILDS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.known_answers import Known, known_answers, put
from torch import Tensor, nn
from torch.nn import functional as F

from scbd.baselines._classifiers import (
    ClassifierModule,
    ClassifierOutputs,
    CORALModule,
    DANNModule,
    GroupDROModule,
    IRMModule,
    IRMPlan,
)
from scbd.nn import FeatureScaling

TOLERANCE = 2e-6


def outputs(known: Known) -> ClassifierOutputs:
    """Return cells ordered by their three environments; features and logits require gradients."""
    e = torch.arange(3).repeat_interleave(12)
    features, logits = (known.tensor(name).flatten(0, 1).requires_grad_() for name in ("features", "logits"))
    return ClassifierOutputs(features, logits, known.tensor("labels").flatten(), e)


def permuted(known: Known) -> ClassifierOutputs:
    order = known.tensor("wilds_permutation")
    return ClassifierOutputs(*(part[order] for part in outputs(known)))


def module(kind: type[ClassifierModule], n_environments: int = 3, **settings: Any) -> Any:
    scaling = FeatureScaling(6, standardize=False, clip=None)
    return kind(scaling, encoder=nn.Linear(6, 10), n_labels=4, n_environments=n_environments, **settings).train()


def test_coral_module_penalty_and_gradient_are_equal_to_originals():
    known = known_answers("domain_generalization")
    batch = outputs(known)
    penalty = module(CORALModule, penalty=2.0).penalise(batch)
    torch.testing.assert_close(penalty.detach(), known.tensor("coral_penalty"), rtol=0, atol=TOLERANCE)
    (gradient,) = torch.autograd.grad(penalty, batch.features)
    expected = known.tensor("coral_penalty_grad").flatten(0, 1)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=TOLERANCE)
    pairs = [module(CORALModule, penalty=2.0).penalise(part) for part in pairs_of(batch)]
    torch.testing.assert_close(torch.stack(pairs).detach(), known.tensor("coral_pairs"), rtol=0, atol=TOLERANCE)
    wilds = module(CORALModule, penalty=2.0).objective(permuted(known), 1.0).loss
    assert float(wilds.detach()) == pytest.approx(float(known["wilds_coral_objective_weight2"][0]), abs=TOLERANCE)


def pairs_of(batch: ClassifierOutputs) -> list[ClassifierOutputs]:
    """Return the cells of each pair of environments."""
    without = [batch.e != left_out for left_out in (2, 1, 0)]
    return [ClassifierOutputs(*(part[rows] for part in batch)) for rows in without]


def test_irm_module_penalty_and_objective_are_equal_to_originals():
    known = known_answers("domain_generalization")
    batch = outputs(known)
    irm = module(IRMModule, penalty=50.0)
    each = torch.stack([irm.penalise(part) for part in batch.by_environment()])
    torch.testing.assert_close(
        each.detach(), known.tensor("irm_penalty_by_environment"), rtol=0, atol=TOLERANCE, check_dtype=False
    )
    (gradient,) = torch.autograd.grad(irm.penalise(batch), batch.logits)
    torch.testing.assert_close(gradient, known.tensor("irm_penalty_grad").flatten(0, 1), rtol=0, atol=TOLERANCE)
    plan = IRMPlan(irm, anneal_steps=2)
    wilds = torch.stack([irm.objective(permuted(known), plan.ramp(step)).loss for step in range(4)])
    expected = known.tensor("wilds_irm_objective_at_update_0123")
    torch.testing.assert_close(wilds.detach(), expected, rtol=2e-7, atol=TOLERANCE)


def test_group_dro_module_absent_groups_objective_equals_wilds():
    known = known_answers("domain_generalization")
    batch = permuted(known)
    dro = module(GroupDROModule, n_environments=5, step_size=0.5)
    for i, scale in enumerate((1.0, 1.5, 2.0)):
        loss = dro.objective(batch._replace(logits=scale * batch.logits), 1.0).loss
        expected = known["wilds_groupdro_objective_3updates_5groups_2absent"][i]
        assert float(loss.detach()) == pytest.approx(float(expected), abs=TOLERANCE)
        torch.testing.assert_close(dro.weights, known.tensor("wilds_groupdro_weights")[i], rtol=0, atol=TOLERANCE)


def dann(known: Known) -> tuple[DANNModule, Tensor, Tensor, Tensor]:
    """Return a DANN module with the weights of WILDS, and the cells of WILDS."""
    found = module(DANNModule, penalty=float(known["dann_wilds_penalty_weight"]))
    found.content.encoder = nn.Linear(6, 8)
    found.head = nn.Linear(8, 4)
    wide = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()]
    found.discriminator = nn.Sequential(*wide, nn.Linear(16, 3))
    parts = {"featurizer": found.content.encoder, "classifier": found.head, "discriminator": found.discriminator}
    for name, part in parts.items():
        put(known.tensors(f"dann_wilds_init.{name}.").values(), part.state_dict().values())
    order = known.tensor("wilds_permutation")
    x, y = known.tensor("x")[0].flatten(0, 1)[order], known.tensor("y")[0].flatten()[order]
    return found, x, y, torch.arange(3).repeat_interleave(12)[order]


def test_dann_module_gradients_equal_wilds_except_for_penalty_weight():
    known = known_answers("domain_generalization")
    found, x, y, e = dann(known)
    losses = found(x, y, e)
    for part, name in (("cross_entropy", "ce_label"), ("discriminator", "ce_domain")):
        assert float(losses.parts[part].detach()) == pytest.approx(float(known[f"dann_wilds_{name}"]), abs=TOLERANCE)
    losses.loss.backward()
    weights = {"featurizer": 1.0, "classifier": 1.0, "discriminator": float(known["dann_wilds_penalty_weight"])}
    parts = {"featurizer": found.content.encoder, "classifier": found.head, "discriminator": found.discriminator}
    for name, part in parts.items():
        expected = known.tensors(f"dann_wilds_grad.{name}.").values()
        for p, gradient in zip(part.parameters(), expected, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(weights[name] * p.grad, gradient, rtol=1e-6, atol=TOLERANCE)


def test_by_environment_cross_entropies_are_equal_to_domainbed():
    known = known_answers("domain_generalization")
    each = torch.stack([F.cross_entropy(part.logits, part.y) for part in outputs(known).by_environment()])
    torch.testing.assert_close(each.detach(), known.tensor("ce_by_environment"), rtol=0, atol=TOLERANCE)
