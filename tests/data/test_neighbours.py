from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from scbd.data._neighbours import mixed_neighbours, parts_of, stretches


def test_stretches_begin_at_any_cell():
    """Five of a ring of six, two by two: each of the six is left out as often."""
    rng = np.random.default_rng(0)
    left = [(set(range(6)) - set(stretches(rng, np.array([6]), np.array([5]))[0].tolist())).pop() for _ in range(3000)]
    counts = np.bincount(left, minlength=6)
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500 * 5 / 6)


def test_stretches_lie_apart_and_everywhere():
    rng = np.random.default_rng(1)
    sizes, counts = np.array([100, 8, 30, 50]), np.array([8, 8, 9, 3])
    gaps = []
    for _ in range(200):
        groups = stretches(rng, sizes, counts)
        for cells, size, count in zip(groups, sizes, counts, strict=True):
            assert len(set(cells.tolist())) == len(cells) == count
            assert cells.min() >= 0
            assert cells.max() < size
        pairs = groups[0].reshape(4, 2)
        np.testing.assert_array_equal((pairs[:, 1] - pairs[:, 0]) % 100, np.ones(4))
        gaps.append(np.diff(np.sort(pairs[:, 0])))
    assert np.ptp(np.concatenate(gaps)) > 50


def of_screen(seed: int = 0, n: int = 3000) -> dict[str, np.ndarray]:
    """Labels of cells sorted by gene and shuffled inside: controls have one guide, and are many."""
    rng = np.random.default_rng(seed)
    gene = np.sort(np.where(rng.random(n) < 0.3, 0, rng.integers(1, 31, n)))
    plate, place = rng.integers(4, size=n), rng.integers(12, size=n)
    return {
        "gene": gene,
        "guide": np.where(gene == 0, 0, 1 + 4 * gene + rng.integers(4, size=n)),
        "plate": plate,
        "well name": place,
        "well": plate * 12 + place,
    }


def mixed(labels: dict[str, np.ndarray], *names: str) -> bool:
    return mixed_neighbours(labels["gene"], (labels[name] for name in names))


@pytest.mark.parametrize("seed", range(20))
def test_a_shuffled_screen_is_mixed_by_all_labels(seed):
    labels = of_screen(seed)
    assert mixed(labels, *labels)
    few = {name: codes[::60] for name, codes in of_screen(seed).items()}
    assert mixed(few, *few)


@pytest.mark.parametrize(
    ("sorted_by", "not_mixed"),
    [("guide", ["guide"]), ("plate", ["plate", "well"]), ("well name", ["well name", "well"])],
)
def test_rows_that_are_sorted_by_another_label_are_not_mixed_by_it(sorted_by, not_mixed):
    """Rows sorted by gene and guide, or by gene and plate with names of wells that repeat, are mixed by the others."""
    labels = of_screen()
    order = np.lexsort([labels[sorted_by], labels["gene"]])
    labels = {name: codes[order] for name, codes in labels.items()}
    for name in labels:
        assert mixed(labels, name) == (name not in not_mixed), name
    assert not mixed(labels, *labels)


def test_a_few_perturbations_in_order_are_seen():
    labels = of_screen()
    key = np.where(np.isin(labels["gene"], [3, 9]), labels["guide"], np.arange(3000))
    order = np.lexsort([key, labels["gene"]])
    assert not mixed({name: codes[order] for name, codes in labels.items()}, "guide")


def test_one_large_perturbation_does_not_hide_the_others():
    """Controls that share a label have all of it in common by right; guides of genes must be mixed nonetheless."""
    labels = of_screen()
    order = np.lexsort([labels["guide"], labels["gene"]])
    assert np.mean(labels["gene"] == 0) > 0.25
    assert not mixed({name: codes[order] for name, codes in labels.items()}, "guide")


def test_rows_that_are_not_sorted_by_perturbation_are_not_mixed():
    labels = of_screen()
    order = np.random.default_rng(0).permutation(3000)
    assert not mixed({name: codes[order] for name, codes in labels.items()})
    assert not mixed_neighbours(np.arange(9), [np.zeros(9, dtype=int)])  # no two cells of any


def test_labels_are_asked_for_up_to_the_first_that_is_not_mixed():
    labels = of_screen()
    order = np.lexsort([labels["plate"], labels["gene"]])
    asked = []

    def one_by_one():
        for name in ("guide", "plate", "well"):
            asked.append(name)
            yield labels[name][order]

    assert not mixed_neighbours(labels["gene"][order], one_by_one())
    assert asked == ["guide", "plate"]


def test_chance_is_that_of_all_orders(monkeypatch):
    """Mean and variance of the pairs that share a label, over all orders of the rows of two perturbations."""
    label = np.array([0, 0, 0, 1, 1, 2, 0, 1, 1, 0])
    y = np.array([0] * 6 + [1] * 4)
    shared = [
        np.array([np.count_nonzero(np.diff(np.array(order)) == 0) for order in permutations(label[y == g])])
        for g in (0, 1)
    ]
    mean, sd = sum(s.mean() for s in shared), np.sqrt(sum(s.var() for s in shared))
    # the limit is where the answer changes: looked for by how many standard errors are too many
    for z in (-1.5, 0.0, 0.5):
        monkeypatch.setattr("scbd.data._neighbours._SURPRISING", z)
        counted = {}
        for order in set(permutations(label[y == 0].tolist())):
            row = np.concatenate([order, label[y == 1]])
            n = np.count_nonzero((np.diff(row) == 0) & (np.diff(y) == 0))
            counted[n] = mixed_neighbours(y, [row])
        assert len(set(counted.values())) == 2
        assert counted == {n: bool(n <= mean + z * sd + 1) for n in counted}


def test_what_follows_an_order_is_not_mixed():
    labels = of_screen()
    n = len(labels["gene"])
    by_time = np.concatenate([np.arange(size) for size in np.bincount(labels["gene"])])
    shuffled = np.random.default_rng(0).permutation(n)
    assert list(parts_of(None)) == []
    assert [codes.tolist() for codes in parts_of(np.arange(10)[:, None])] == [[0, 0, 1, 2, 3, 4, 4, 5, 6, 7]]
    for places, mixed_by_it in ((by_time, False), (shuffled, True)):
        numbers = np.stack([shuffled, places], axis=1)
        assert mixed_neighbours(labels["gene"], parts_of(numbers)) is mixed_by_it
