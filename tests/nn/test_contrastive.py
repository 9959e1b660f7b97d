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
from torch.utils._python_dispatch import TorchDispatchMode

from scbd.data import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.nn import (
    Groups,
    effective_rank,
    explained_variance,
    invariance_loss,
    invariance_statistic,
    log_normaliser,
    supervised_contrastive_loss,
)
from scbd.nn._contrastive import collapsed_loss, normalised_supervised_information, total_variance
from scbd.nn._log_sum_exp import log_sum_exp

UNKNOWN: Any = "all"
FORMS = ["listing", "formula"]


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
def test_supervised_contrastive_loss_equals_double_loop(smoothing, batch, temperature, include_self):
    z, labels = batch
    kwargs: dict[str, Any] = {"temperature": temperature, "include_self": include_self, "smoothing": smoothing}
    expected = torch.stack(naive.supervised(z, labels, **kwargs))
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        ours = supervised_contrastive_loss(z, labels, **kwargs | {"reduction": reduction})
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reduction", FORMS)
@given(batches(), st.floats(0.05, 2), st.booleans())
@settings(max_examples=50)
def test_invariance_loss_equals_double_loop(reduction, batch, temperature, include_self):
    z, e = batch
    ours = invariance_loss(z, e, temperature=temperature, include_self=include_self, reduction=reduction)
    expected = naive.invariance(z, e, temperature, include_self, reduction)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n_labels", [2, 7, 34])
def test_losses_default_arguments_equal_published_listing(n_labels):
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
def test_losses_gradients_equal_finite_differences(include_self):
    z = unit(9, 4).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])  # the last anchor has no partner
    assert torch.autograd.gradcheck(lambda z: supervised_contrastive_loss(z, labels, include_self=include_self), z)
    for reduction in FORMS:
        assert torch.autograd.gradcheck(
            lambda z, r=reduction: invariance_loss(z, labels, include_self=include_self, reduction=r), z
        )


def test_invariance_loss_single_environment_equals_published_listing():
    z, e = unit(6), torch.zeros(6, dtype=torch.long)
    loss = invariance_loss(z, e)
    assert loss > 0
    torch.testing.assert_close(loss, naive.listing_invariance(z, e, 0.1))


@pytest.mark.parametrize("reduction", FORMS)
def test_invariance_loss_one_cell_per_environment_has_finite_gradients(reduction):
    z = unit(6).requires_grad_()
    invariance_loss(z, torch.arange(6), reduction=reduction).backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_supervised_contrastive_loss_anchor_without_positives_counts_as_zero():
    z = unit(4)
    labels = torch.tensor([0, 0, 1, 2])
    pair = naive.supervised(z, labels, 0.1, True)
    torch.testing.assert_close(supervised_contrastive_loss(z, labels), (pair[0] + pair[1]) / 4)
    assert supervised_contrastive_loss(z, torch.arange(4)) == 0
    # nor does smoothing ask anything of them: without partners to match, it would only pull all cells together
    pair = naive.supervised(z, labels, 0.1, True, smoothing=0.5)
    torch.testing.assert_close(supervised_contrastive_loss(z, labels, smoothing=0.5), (pair[0] + pair[1]) / 4)
    assert supervised_contrastive_loss(z, torch.arange(4), smoothing=0.5) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_half_precision_are_computed_in_float32(dtype):
    z, labels = unit(64, 8).to(dtype), torch.arange(64) % 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = supervised_contrastive_loss(z, labels)
        mixed = invariance_loss(z, labels)
    assert loss.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(loss, supervised_contrastive_loss(z.float(), labels), rtol=0, atol=0)
    torch.testing.assert_close(mixed, invariance_loss(z.float(), labels), rtol=0, atol=0)


def test_losses_float32_equal_float64_approximately():
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
        (lambda: invariance_loss(unit(3), torch.zeros(3), reduction=UNKNOWN), "use 'listing', 'formula'"),
    ],
)
def test_losses_invalid_arguments_raise(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("off", [-1.0, -0.5, -0.011, 0.011, 1.0])
def test_losses_vectors_not_of_unit_length_raise(off):
    z, labels = unit(6), torch.arange(6) % 2
    z[4] *= 1 + off
    said = f"that of row 4 is {1 + off:.3g}: use torch.nn.functional.normalize"
    for loss in (lambda: log_normaliser(z), lambda: supervised_contrastive_loss(z, labels)):
        with pytest.raises(ValueError, match=said):
            loss()
    with pytest.raises(ValueError, match=said):
        invariance_loss(z, labels)


@pytest.mark.parametrize("factor", [0.991, 1.009])
def test_losses_rounded_lengths_are_accepted(factor):
    assert torch.isfinite(supervised_contrastive_loss(unit(6) * factor, torch.arange(6) % 2))
    for dtype in (torch.bfloat16, torch.float16):
        for width in (1, 3, 64, 2048):
            assert torch.isfinite(log_normaliser(unit(200, width).to(dtype))).all()


def test_supervised_contrastive_loss_nan_embedding_gives_nan():
    """Training looks for that, and knows what to say."""
    z = unit(6)
    z[2] = torch.nan
    assert torch.isnan(supervised_contrastive_loss(z, torch.arange(6) % 2))


@pytest.mark.parametrize("include_self", [True, False])
def test_supervised_contrastive_loss_collapsed_embedding_equals_collapsed_loss(include_self):
    z = unit(1).expand(32, -1)
    labels = torch.arange(32) % 4
    loss = supervised_contrastive_loss(z, labels, include_self=include_self)
    assert float(loss) == pytest.approx(collapsed_loss(32, include_self=include_self))
    assert collapsed_loss(32) == pytest.approx(math.log(32))


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 2 / 3])
@pytest.mark.parametrize("include_self", [True, False])
def test_normalised_supervised_information_is_0_if_collapsed_and_1_at_best(smoothing, include_self):
    labels = torch.tensor([0] * 200 + [1] * 200)
    settings: dict[str, Any] = {"smoothing": smoothing, "include_self": include_self}

    def share(z: torch.Tensor, temperature: float) -> float:
        loss = supervised_contrastive_loss(z, labels, temperature=temperature, **settings)
        return float(normalised_supervised_information(loss, labels, **settings))

    point, apart = (
        F.normalize(torch.ones(400, 4, dtype=torch.float64), dim=1),
        torch.eye(4, dtype=torch.float64)[labels],
    )
    assert share(point, 0.1) == pytest.approx(0, abs=1e-5)
    # labels in places of their own; a temperature can suit the smoothing of two equally frequent ones exactly
    best = max(share(apart, temperature) for temperature in np.geomspace(0.03, 3, 200))
    assert 0.999 < best <= 1 + 1e-6
    # random directions tell less than nothing
    assert share(unit(400, 4), 0.1) < 0


def test_normalised_supervised_information_with_anchors_is_of_anchors_only():
    """Most cells are of one label that z does not tell from noise: what the others tell is asked of them."""
    labels = torch.arange(200).clamp(max=60) // 15
    anchors = labels < 4
    z = F.normalize(4 * torch.eye(8, dtype=torch.float64)[labels] * anchors[:, None] + unit(200, 8), dim=1)

    def share(z: torch.Tensor, **how: Any) -> float:
        return float(normalised_supervised_information(supervised_contrastive_loss(z, labels, **how), labels, **how))

    assert share(z, anchors=anchors) > 0.5 > 0 > share(z)
    point = F.normalize(torch.ones(200, 8, dtype=torch.float64), dim=1)
    assert share(point, anchors=anchors) == pytest.approx(0, abs=1e-5)
    assert share(z, anchors=torch.zeros(200, dtype=torch.bool)) == 0
    for smoothing in (0.0, 0.5):
        every = [
            supervised_contrastive_loss(z, labels, smoothing=smoothing, anchors=torch.arange(200) == i)
            for i in range(60)
        ]
        loss = supervised_contrastive_loss(z, labels, smoothing=smoothing, anchors=anchors)
        torch.testing.assert_close(loss, torch.stack(every).mean())


def test_normalised_supervised_information_is_relative_to_label_entropy():
    labels = torch.tensor([0, 0, 0, 1])
    # by hand: the entropy of the labels, without smoothing; the last has no partner, and says nothing
    entropy = -0.75 * math.log(0.75)
    assert float(normalised_supervised_information(torch.tensor(0.9), labels)) == pytest.approx(
        (0.75 * math.log(4) - 0.9) / entropy
    )
    # the one without a partner is asked nothing with smoothing either
    asked, frequency = 0.5 + 0.5 * 2 / 3, 2 / 3
    divergence = asked * math.log(asked / frequency) + (1 - asked) * math.log((1 - asked) / (1 - frequency))
    found = normalised_supervised_information(torch.tensor(0.9), labels, smoothing=0.5, include_self=False)
    assert float(found) == pytest.approx((0.75 * math.log(3) - 0.9) / (0.75 * divergence))
    for nothing in (torch.zeros(4, dtype=torch.long), torch.arange(4)):
        assert float(normalised_supervised_information(torch.tensor(1.0), nothing)) == 0


def share_of_batches(n_labels: int, batch_size: int, cells_per_label: int | None) -> float:
    """Of one noisy embedding in batches that are shuffled, or hold so many cells of a label."""
    labels = torch.arange(n_labels).repeat(max(16, 20_000 // n_labels))
    middle, noise = F.one_hot(torch.tensor(0), 32), 0.3 * torch.randn(len(labels), 32, generator=torch.manual_seed(0))
    z = F.normalize(middle + 0.8 * unit(n_labels, 32)[labels] + noise / math.sqrt(32), dim=1)
    rows = np.arange(len(labels))
    if cells_per_label is None:
        batches: BatchSampler = ShuffleSampler(rows, batch_size, n_steps=5)
    else:
        per_batch, codes = batch_size // cells_per_label, labels.numpy()
        batches = PerturbationSampler(
            rows, per_batch * cells_per_label, labels=codes, perturbations_per_batch=per_batch, n_steps=5
        )
    shares = []
    for batch in batches:
        of_batch, smoothing = labels[batch], 2 / 3
        loss = supervised_contrastive_loss(z[batch], of_batch, smoothing=smoothing)
        shares.append(float(normalised_supervised_information(loss, of_batch, smoothing=smoothing)))
    return float(np.mean(shares))


@pytest.mark.parametrize(
    ("n_labels", "batch_size", "as_rare"),
    # cells of a label in a batch, of labels that have two
    [(200, 400, 3), (500, 400, 2), (1000, 400, 2), (5000, 400, 2), (200, 2048, 11), (500, 2048, 5), (5000, 2048, 2)],
)
def test_normalised_supervised_information_equally_rare_labels_gives_equal_value(n_labels, batch_size, as_rare):
    """However many cells of a shuffled batch have no partner."""
    shuffled, drawn = (share_of_batches(n_labels, batch_size, of_label) for of_label in (None, as_rare))
    assert 0.4 < drawn < 0.8
    assert shuffled == pytest.approx(drawn, rel=0.03)


def test_normalised_supervised_information_rarer_labels_equals_formula():
    """By hand, of labels in corners: a cell of its own is matched ``odds`` times as readily as another."""
    temperature, smoothing, odds = 0.5, 0.5, math.exp(2)
    for n_labels in (4, 40):
        labels = torch.arange(400) % n_labels
        z = F.one_hot(labels, 40).double()
        settings: dict[str, Any] = {"smoothing": smoothing}
        loss = supervised_contrastive_loss(z, labels, temperature=temperature, **settings)
        asked, frequency = 0.5 + 0.5 * (400 / n_labels - 1) / 399, 1 / n_labels
        found = odds * frequency / (1 + (odds - 1) * frequency)

        def apart(q: float, p: float = asked) -> float:
            return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

        expected = 1 - apart(found) / apart(frequency)
        assert float(normalised_supervised_information(loss, labels, **settings)) == pytest.approx(expected, rel=1e-6)


def masked_sums(z: torch.Tensor, temperature: float, include_self: bool = False) -> torch.Tensor:
    """The whole matrix, masked, row by row."""
    similarities = z @ z.T / temperature
    return torch.logsumexp(similarities if include_self else similarities.fill_diagonal_(-torch.inf), 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, tuple[int, int], int]:
    """Batches smaller than a tile, of whole tiles and of torn ones; nothing, some or all kept for the way back."""
    tile = draw(st.tuples(st.integers(1, 9), st.integers(1, 12)).filter(lambda t: t[1] >= t[0]))
    return draw(st.integers(2, 40)), tile, draw(st.sampled_from([0, 500, 10**6]))


@given(tilings(), st.integers(0, 1000), st.booleans())
def test_log_sum_exp_any_tile_shape_equals_whole_matrix(tiling, seed, include_self):
    n, tile, kept = tiling
    z = unit(n, 3, seed).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scbd.nn._log_sum_exp._TILE_SHAPE_BY_DEVICE", {"cpu": tile})
        patch.setattr("scbd.nn._log_sum_exp._CACHED_EXPONENTIALS_BYTES_BY_DEVICE", {"cpu": kept})
        ours, expected = (form(z, 0.1, include_self) for form in (log_sum_exp, masked_sums))
        weights = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        gradients = [torch.autograd.grad(found @ weights, z)[0] for found in (ours, expected)]
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.1, 0.026, 0.024, 0.011, 0.004])
def test_losses_low_temperature_keep_precision(temperature):
    """Opposite vectors are exp(-500) of equal ones at 0.004; exp(90) of equal ones at 0.011 is beyond float32."""
    z = unit(5, 4, 0)
    z = torch.cat([z, z[:1], -z[:1]]).float()
    ours, expected = log_sum_exp(z, temperature), masked_sums(z.double(), temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-5)


def test_log_sum_exp_opposite_points_at_lowest_temperature_is_finite():
    z = torch.tensor([[1.0], [-1.0]])
    ours = log_sum_exp(z, 0.003)
    torch.testing.assert_close(ours, torch.full((2,), -1 / 0.003))


def test_log_sum_exp_memory_is_linear_in_batch_size():
    """Neither pass allocates anything near B × B, whichever of its tensors one looks at."""
    z = unit(3000, 8, 0).float().requires_grad_()
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    with Watch():
        log_normaliser(z).sum().backward()
    assert max(largest) <= 128 * 2048


@pytest.mark.parametrize("include_self", [True, False])
def test_losses_given_log_normaliser_equal_losses_without(include_self):
    z, y, e = unit(50, 8, 0).requires_grad_(), torch.arange(50) % 7, torch.arange(50) % 3
    shared = log_normaliser(z, include_self=include_self)
    together = supervised_contrastive_loss(z, y, include_self=include_self, log_normaliser=shared)
    together = together + 3 * invariance_loss(z, e, include_self=include_self, log_normaliser=shared)
    apart = supervised_contrastive_loss(z, y, include_self=include_self)
    apart = apart + 3 * invariance_loss(z, e, include_self=include_self)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (together, apart)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_log_sum_exp_second_derivative_raises():
    z = unit(6, 3, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(log_normaliser(z).sum(), z, create_graph=True)


codes = st.lists(st.integers(-3, 5), min_size=1, max_size=12)


@given(codes)
def test_groups_sums_and_counts_equal_loop_over_cells(labels):
    values = torch.arange(2.0 * len(labels)).view(-1, 2)
    groups = Groups(torch.tensor(labels))
    for i, label in enumerate(labels):
        same = [j for j, other in enumerate(labels) if other == label]
        assert groups.n_others[i] == len(same) - 1
        torch.testing.assert_close(groups.sums(values)[i], values[same].sum(0))


@given(codes, st.randoms())
def test_groups_cross_joins_cells_that_share_both_labels(labels, random):
    environments = [random.randint(-2, 3) for _ in labels]
    pairs = Groups(torch.tensor(labels)).cross(Groups(torch.tensor(environments))).labels.tolist()
    both = list(zip(labels, environments, strict=True))
    for i, one in enumerate(both):
        for j, other in enumerate(both):
            assert (pairs[i] == pairs[j]) == (one == other)


@given(st.data())
def test_groups_cross_narrow_integers_equals_int64(data):
    """As the codes of few categories are in pandas: their pairs are more than there are numbers."""
    labels, others = (data.draw(st.lists(st.integers(0, 120), min_size=60, max_size=60)) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32]))
    wide, narrow = (
        Groups(torch.tensor(labels, dtype=kind)).cross(Groups(torch.tensor(others, dtype=kind)))
        for kind in (torch.int64, dtype)
    )
    assert torch.equal(narrow.n_others, wide.n_others)
    assert torch.equal(narrow.labels, wide.labels)


class ChoosesByMask(TorchDispatchMode):
    """Counts where a tensor is asked for the rows of a mask: how many there are, the processor must wait for."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.n += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.n += func in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
        return func(*args, **kwargs or {})


def test_losses_with_anchors_select_no_rows_by_mask():
    labels, anchors = Groups(torch.arange(12) % 4), torch.arange(12) % 3 > 0
    z = F.normalize(torch.randn(12, 3, generator=torch.manual_seed(0)), dim=1).requires_grad_()
    with ChoosesByMask() as asked:
        z[anchors]
        assert asked.n == 1  # it would be seen
        for reduction in ("mean", "sum"):
            loss = supervised_contrastive_loss(z, labels, smoothing=0.1, anchors=anchors, reduction=reduction)
            loss.backward()
            normalised_supervised_information(loss.detach(), labels, smoothing=0.1, anchors=anchors)
    assert asked.n == 1


def test_total_variance_and_rank_single_point_are_zero():
    z = F.normalize(torch.ones(50, 8), dim=1)
    assert total_variance(z) == pytest.approx(0, abs=1e-12)
    assert effective_rank(z) == 0


def test_effective_rank_equal_axes_is_number_of_axes():
    z = torch.cat([torch.eye(6), -torch.eye(6)])
    assert total_variance(z) == pytest.approx(1)
    assert effective_rank(z) == pytest.approx(6)


def test_effective_rank_shifted_embedding_is_unchanged():
    z = torch.randn(200, 6, generator=torch.manual_seed(0)).double()
    assert effective_rank(z + 1e8) == pytest.approx(effective_rank(z), rel=1e-6)
    assert effective_rank(z.float() + 1e8) == 0  # 32 bits do not tell


def test_effective_rank_line_is_one():
    angles = torch.linspace(0, 1e-3, 40)
    z = torch.stack([angles.cos(), angles.sin(), torch.zeros(40)], dim=1)
    assert effective_rank(z) == pytest.approx(1, abs=1e-3)


def test_effective_rank_unused_directions_have_no_effect():
    """Their share of the variance is zero but for rounding, on either side."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(40, 2, generator=generator) @ torch.randn(2, 8, generator=generator)
        assert 1 < effective_rank(z) <= 2 + 1e-6


def test_effective_rank_values_not_finite_is_nan():
    z = torch.cat([torch.eye(6), torch.full((1, 6), float("nan"))])
    assert math.isnan(effective_rank(z)) and math.isnan(total_variance(z))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [3, (3, 2)], ids=["a cell", "a value"])
def test_measures_nan_embedding_give_nan(bad, where):
    """Of an embedding that is none, "invariant" would be wrong; training stops at the loss that it makes."""
    z, label, well = torch.randn(64, 8, generator=torch.manual_seed(0)), torch.arange(64) % 4, torch.arange(64) // 4 % 4
    broken = z.clone()
    broken[where] = bad
    assert math.isnan(effective_rank(broken))
    for partners in ("within", "across"):
        assert math.isnan(explained_variance(broken, well, label, partners=partners).share)
    assert math.isnan(invariance_statistic([broken], well, label))
    assert math.isnan(invariance_statistic([z, broken, z], well, label))


def sets_of(labels: list[int], size: int) -> list[tuple[int, list[int]]]:
    """Labels of sets, and the rows in each, one label after the other."""
    found = []
    for label in sorted(set(labels)):
        rows = [row for row, other in enumerate(labels) if other == label]
        n_sets = max(len(rows) // size, min(len(rows), 2))
        found += [
            (label, [row for place, row in enumerate(rows) if place * n_sets // len(rows) == number])
            for number in range(n_sets)
        ]
    return found


@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=40), size=st.integers(1, 9))
def test_groups_average_over_sets_divides_cells_of_label_evenly(labels, size):
    expected = sets_of(labels, size)
    values = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.manual_seed(0))
    means, groups = Groups(torch.tensor(labels)).average_over_sets(values, size)
    assert groups.labels.tolist() == [label for label, _ in expected]
    torch.testing.assert_close(means, torch.stack([values[rows].mean(0) for _, rows in expected]))
    sizes = [len(rows) for _, rows in expected]
    # none is lost, and none is much smaller than asked for where there are cells enough
    assert sum(sizes) == len(labels)
    counts = [labels.count(label) for label, _ in expected]
    assert all(size <= n < 2 * size for n, count in zip(sizes, counts, strict=True) if count >= 2 * size)


def test_groups_attached_to_labels_are_not_computed_again(monkeypatch):
    labels, others = torch.tensor([3, 0, 3, 7]), torch.tensor([1, 1, 0, 1])
    groups = Groups(labels)
    pairs = groups.cross(Groups(others))
    moved = groups.to(torch.device("meta")).attach(labels.to("meta"))
    groups.attach(labels)
    monkeypatch.setattr("scbd.nn._groups.np.unique", None)  # counting again would fail
    assert Groups.of(labels) is groups and Groups.of(groups) is groups
    assert Groups.of(moved).index.device.type == "meta" and len(Groups.of(moved)) == 4
    assert pairs.labels.tolist() == [3, 1, 2, 5]


def test_groups_average_over_sets_of_one_cell_returns_cells():
    values, labels = torch.randn(12, 3), torch.arange(12) % 4
    means, groups = Groups(labels).average_over_sets(values, 1)
    order = torch.argsort(labels, stable=True)
    torch.testing.assert_close(means, values[order])
    assert groups.labels.equal(labels[order])
