from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import losses as naive

from scbd.nn import invariance_loss, log_normaliser, supervised_contrastive_loss

UNKNOWN: Any = "all"
FORMS = ["listing", "formula", "mean", "mass"]


def unit(n: int, d: int = 5, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Few labels or many, balanced or not, anchors without positives and duplicated examples among them."""
    n = draw(st.integers(2, 12))
    labels = torch.tensor(draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=n, max_size=n)))
    z = unit(n, draw(st.integers(1, 6)), draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        z[1] = z[0]
    return z, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9])
@given(batches(), st.floats(0.05, 2), st.booleans())
def test_supervised_equals_the_double_loop(smoothing, batch, temperature, include_self):
    z, labels = batch
    kwargs: dict[str, Any] = {"temperature": temperature, "include_self": include_self, "smoothing": smoothing}
    expected = torch.stack(naive.supervised(z, labels, **kwargs))
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        ours = supervised_contrastive_loss(z, labels, **kwargs | {"reduction": reduction})
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
@given(batches(), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=50)
def test_positives_of_other_environments_equal_the_double_loop(smoothing, batch, random, include_self):
    z, labels = batch
    e = torch.tensor([random.randrange(3) for _ in labels])
    kwargs: dict[str, Any] = {"environments": e, "include_self": include_self, "smoothing": smoothing}
    expected = torch.stack(naive.supervised(z, labels, temperature=0.2, **kwargs))
    z = z.requires_grad_()
    ours = supervised_contrastive_loss(z, labels, temperature=0.2, **kwargs)
    torch.testing.assert_close(ours, expected.mean(), rtol=1e-9, atol=1e-9)
    ours.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_with_a_cell_of_each_environment_all_positives_are_of_others():
    z, labels = unit(12), torch.arange(12) % 3
    everyone = supervised_contrastive_loss(z, labels)
    torch.testing.assert_close(supervised_contrastive_loss(z, labels, environments=torch.arange(12)), everyone)


def test_what_the_cells_of_one_environment_share_is_worth_nothing():
    label, well = torch.arange(8) % 2, torch.arange(8) // 4
    corners = F.one_hot(2 * label + well, 4).double()  # one for each pair, as far from its label's as from any other
    point = corners[:1].expand(8, 4)
    form: dict[str, Any] = {"temperature": 1.0, "include_self": False}
    assert supervised_contrastive_loss(corners, label, **form) < supervised_contrastive_loss(point, label, **form) - 0.1
    for z in (corners, point):
        cost = supervised_contrastive_loss(z, label, environments=well, **form)
        torch.testing.assert_close(cost, torch.tensor(math.log(6), dtype=torch.float64))


@pytest.mark.parametrize("reduction", FORMS)
@given(batches(), st.floats(0.05, 2), st.booleans())
@settings(max_examples=50)
def test_invariance_equals_the_double_loop(reduction, batch, temperature, include_self):
    z, e = batch
    ours = invariance_loss(z, e, temperature=temperature, include_self=include_self, reduction=reduction)
    expected = naive.invariance(z, e, temperature, include_self, reduction)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n_labels", [2, 7, 34])
def test_defaults_are_the_published_listing(n_labels):
    z = unit(200, 16).requires_grad_()
    u = torch.arange(200) % n_labels
    for ours, theirs in (
        (supervised_contrastive_loss(z, u), naive.listing_supervised(z, u, 0.1)),
        (invariance_loss(z, u), naive.listing_invariance(z, u, 0.1)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("include_self", [True, False])
def test_gradients(include_self):
    z = unit(9, 4).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])  # the last anchor has no partner
    assert torch.autograd.gradcheck(lambda z: supervised_contrastive_loss(z, labels, include_self=include_self), z)
    for reduction in FORMS:
        assert torch.autograd.gradcheck(
            lambda z, r=reduction: invariance_loss(z, labels, include_self=include_self, reduction=r), z
        )


@pytest.mark.parametrize("reduction", ["mean", "mass"])
def test_a_batch_of_one_environment_costs_nothing(reduction):
    z = unit(6).requires_grad_()
    loss = invariance_loss(z, torch.zeros(6, dtype=torch.long), reduction=reduction)
    loss.backward()
    assert loss == 0
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_a_batch_of_one_environment_costs_what_the_listing_says():
    z, e = unit(6), torch.zeros(6, dtype=torch.long)
    loss = invariance_loss(z, e)
    assert loss > 0
    torch.testing.assert_close(loss, naive.listing_invariance(z, e, 0.1))


@pytest.mark.parametrize("reduction", FORMS)
def test_an_environment_of_its_own_for_every_cell_has_finite_gradients(reduction):
    z = unit(6).requires_grad_()
    invariance_loss(z, torch.arange(6), reduction=reduction).backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_anchors_without_positives_count_as_zero_in_the_mean():
    z = unit(4)
    labels = torch.tensor([0, 0, 1, 2])
    pair = naive.supervised(z, labels, 0.1, True)
    torch.testing.assert_close(supervised_contrastive_loss(z, labels), (pair[0] + pair[1]) / 4)
    assert supervised_contrastive_loss(z, torch.arange(4)) == 0
    # nor does smoothing ask anything of them: without partners to match, it would only pull all cells together
    pair = naive.supervised(z, labels, 0.1, True, smoothing=0.5)
    torch.testing.assert_close(supervised_contrastive_loss(z, labels, smoothing=0.5), (pair[0] + pair[1]) / 4)
    assert supervised_contrastive_loss(z, torch.arange(4), smoothing=0.5) == 0


@pytest.mark.parametrize("reduction", ["mean", "mass"])
def test_sound_forms_vanish_where_environments_are_mixed_and_unbalanced(reduction):
    """The same points occur in each of three unequal environments: nothing tells environments apart."""
    points = unit(5, 4)
    z = torch.cat([points] * 6)
    e = torch.repeat_interleave(torch.tensor([0, 1, 1, 2, 2, 2]), 5)
    mixed = invariance_loss(z, e, reduction=reduction)
    # an anchor's own environment lacks the anchor itself: a finite-sample remainder, far below that of real structure
    apart = invariance_loss(torch.cat([unit(5, 4, s) for s in (1, 2, 2, 3, 3, 3)]), e, reduction=reduction)
    assert mixed < 0.6 * apart
    # where the listing's sums cannot agree, however well mixed
    assert invariance_loss(z, e, reduction="formula") > 100 * mixed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    z, labels = unit(64, 8).to(dtype), torch.arange(64) % 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = supervised_contrastive_loss(z, labels)
        mixed = invariance_loss(z, labels)
    assert loss.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(loss, supervised_contrastive_loss(z.float(), labels), rtol=0, atol=0)
    torch.testing.assert_close(mixed, invariance_loss(z.float(), labels), rtol=0, atol=0)


def test_float32_stays_close_to_float64():
    z, labels = unit(512, 64), torch.arange(512) % 20
    for loss in (supervised_contrastive_loss, invariance_loss):
        np.testing.assert_allclose(float(loss(z.float(), labels)), float(loss(z, labels)), rtol=2e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: supervised_contrastive_loss(unit(3), torch.zeros(2)), r"z must be \(B, D\) and labels \(B,\)"),
        (lambda: supervised_contrastive_loss(unit(1), torch.zeros(1)), "give it at least 2"),
        (
            lambda: supervised_contrastive_loss(unit(3), torch.zeros(3), temperature=0),
            "temperature must be a number above 0.0029",
        ),
        (lambda: invariance_loss(unit(3) * 2, torch.zeros(3)), "row . is 2: use torch.nn.functional.normalize"),
        (lambda: log_normaliser(unit(3)[0]), r"z must be \(B, D\), got \(5,\)"),
        (lambda: supervised_contrastive_loss(unit(3), torch.zeros(3), reduction=UNKNOWN), "use 'mean'"),
        (lambda: invariance_loss(unit(3), torch.zeros(3, 1)), r"environments \(B,\)"),
        (
            lambda: supervised_contrastive_loss(unit(3), torch.zeros(3), environments=torch.zeros(2)),
            r"environments \(B,\)",
        ),
        (lambda: log_normaliser(unit(3), without=torch.zeros(2)), r"without \(B,\)"),
        (
            lambda: invariance_loss(unit(3), torch.zeros(3), reduction=UNKNOWN),
            "use one of listing, formula, mean, mass",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("off", [-1.0, -0.5, -0.011, 0.011, 1.0])
def test_vectors_that_are_too_short_or_too_long_are_refused(off):
    z, labels = unit(6), torch.arange(6) % 2
    z[4] *= 1 + off
    said = f"that of row 4 is {1 + off:.3g}: use torch.nn.functional.normalize"
    for loss in (lambda: log_normaliser(z), lambda: supervised_contrastive_loss(z, labels)):
        with pytest.raises(ValueError, match=said):
            loss()
    with pytest.raises(ValueError, match=said):
        invariance_loss(z, labels)


@pytest.mark.parametrize("factor", [0.991, 1.009])
def test_rounding_is_no_mistake(factor):
    assert torch.isfinite(supervised_contrastive_loss(unit(6) * factor, torch.arange(6) % 2))
    for dtype in (torch.bfloat16, torch.float16):
        for width in (1, 3, 64, 2048):
            assert torch.isfinite(log_normaliser(unit(200, width).to(dtype))).all()


def test_of_what_is_not_a_number_the_loss_is_none():
    """Training looks for that, and knows what to say."""
    z = unit(6)
    z[2] = torch.nan
    assert torch.isnan(supervised_contrastive_loss(z, torch.arange(6) % 2))
