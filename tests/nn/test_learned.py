from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scbd.data import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.nn import contrastive_ceiling, share_learned, supervised_contrastive_loss


def unit(n: int, d: int = 5) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize("include_self", [True, False])
def test_a_point_costs_the_ceiling(include_self):
    z = unit(1).expand(32, -1)
    labels = torch.arange(32) % 4
    loss = supervised_contrastive_loss(z, labels, include_self=include_self)
    assert float(loss) == pytest.approx(contrastive_ceiling(32, include_self=include_self))
    assert contrastive_ceiling(32) == pytest.approx(math.log(32))


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 2 / 3])
@pytest.mark.parametrize("include_self", [True, False])
def test_the_share_learned_is_0_for_a_point_and_1_at_best(smoothing, include_self):
    labels = torch.tensor([0] * 200 + [1] * 200)
    settings: dict[str, Any] = {"smoothing": smoothing, "include_self": include_self}

    def share(z: torch.Tensor, temperature: float) -> float:
        loss = supervised_contrastive_loss(z, labels, temperature=temperature, **settings)
        return float(share_learned(loss, labels, **settings))

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


def test_of_some_anchors_it_is_their_own_share():
    """Most cells are of one label that z does not tell from noise: what the others tell is asked of them."""
    labels = torch.arange(200).clamp(max=60) // 15
    anchors = labels < 4
    z = F.normalize(4 * torch.eye(8, dtype=torch.float64)[labels] * anchors[:, None] + unit(200, 8), dim=1)

    def share(z: torch.Tensor, **how: Any) -> float:
        return float(share_learned(supervised_contrastive_loss(z, labels, **how), labels, **how))

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


def test_the_share_learned_is_of_what_the_labels_say():
    labels = torch.tensor([0, 0, 0, 1])
    # by hand: the entropy of the labels, without smoothing; the last has no partner, and says nothing
    entropy = -0.75 * math.log(0.75)
    assert float(share_learned(torch.tensor(0.9), labels)) == pytest.approx((0.75 * math.log(4) - 0.9) / entropy)
    # the one without a partner is asked nothing with smoothing either
    asked, frequency = 0.5 + 0.5 * 2 / 3, 2 / 3
    divergence = asked * math.log(asked / frequency) + (1 - asked) * math.log((1 - asked) / (1 - frequency))
    found = share_learned(torch.tensor(0.9), labels, smoothing=0.5, include_self=False)
    assert float(found) == pytest.approx((0.75 * math.log(3) - 0.9) / (0.75 * divergence))
    for nothing in (torch.zeros(4, dtype=torch.long), torch.arange(4)):
        assert float(share_learned(torch.tensor(1.0), nothing)) == 0


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
        shares.append(float(share_learned(loss, of_batch, smoothing=smoothing)))
    return float(np.mean(shares))


@pytest.mark.parametrize(
    ("n_labels", "batch_size", "as_rare"),
    # cells of a label in a batch, of labels that have two
    [(200, 400, 3), (500, 400, 2), (1000, 400, 2), (5000, 400, 2), (200, 2048, 11), (500, 2048, 5), (5000, 2048, 2)],
)
def test_the_share_learned_is_one_number_where_labels_are_equally_rare(n_labels, batch_size, as_rare):
    """However many cells of a shuffled batch have no partner."""
    shuffled, drawn = (share_of_batches(n_labels, batch_size, of_label) for of_label in (None, as_rare))
    assert 0.4 < drawn < 0.8
    assert shuffled == pytest.approx(drawn, rel=0.03)


def test_the_share_learned_where_labels_are_rarer():
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
        assert float(share_learned(loss, labels, **settings)) == pytest.approx(expected, rel=1e-6)
