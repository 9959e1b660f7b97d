from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from scbd.metrics import _readers as readers
from scbd.metrics import label_probe
from scbd.metrics._readers import READERS


def in_spread_alone(n: int = 1500, size: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two environments of the same mean, one with twice the spread."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    return rng.normal(size=(n, size)) * (1 + labels[:, None]), labels


def test_spread_is_read_by_squares_and_not_by_planes():
    z, labels = in_spread_alone()
    assert label_probe(z, labels)["accuracy"] < 0.6
    assert label_probe(z, labels, kind="quadratic")["accuracy"] > 0.8


def test_what_two_components_tell_together_is_read_by_products():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1500, 4))
    z, labels = hidden @ rng.normal(size=(4, 4)), (hidden[:, 0] * hidden[:, 1] > 0).astype(int)
    assert label_probe(z, labels)["accuracy"] < 0.6
    assert label_probe(z, labels, kind="quadratic")["accuracy"] > 0.85


def test_islands_are_read_by_neighbours():
    """A chessboard of directions."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, 2000)
    labels = (angle * 12 / np.pi).astype(int) % 2
    z = rng.uniform(0.5, 3, (2000, 1)) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    assert label_probe(z, labels)["accuracy"] < 0.6 and label_probe(z, labels, kind="quadratic")["accuracy"] < 0.6
    assert label_probe(z, labels, kind="neighbours")["accuracy"] > 0.85


@pytest.mark.parametrize("kind", READERS)
def test_all_probes_know_chance_and_certainty(kind):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=900)
    scores = label_probe(rng.normal(size=(900, 5)), labels, kind=kind)
    assert abs(scores["accuracy"] - 1 / 3) < 0.08 and abs(scores["auroc"] - 0.5) < 0.08
    scores = label_probe(rng.normal(size=(900, 5)) + 9 * np.eye(5)[labels], labels, kind=kind)
    assert scores["accuracy"] > 0.99 and scores["auroc"] > 0.99 and scores["chance_f1"] < 0.5
    same = label_probe(np.ones((900, 5), dtype=np.float32), labels, kind=kind)
    assert abs(same["accuracy"] - 1 / 3) < 0.08 and same["auroc"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("kind", READERS)
def test_units_and_memory_maps_change_nothing(kind, tmp_path):
    z, labels = in_spread_alone(400)
    z[:, 0] = 0.5  # a component that says nothing
    first = label_probe(z, labels, kind=kind)
    assert label_probe(64 * z, labels, kind=kind) == pytest.approx(first, abs=0.02)
    np.save(tmp_path / "z.npy", z)
    assert label_probe(np.load(tmp_path / "z.npy", mmap_mode="r"), labels, kind=kind) == first


def test_areas_of_nearest_means_have_no_unit():
    rng = np.random.default_rng(0)
    labels = rng.integers(8, size=800)
    z = rng.normal(size=(800, 10)) + 0.8 * rng.normal(size=(8, 10))[labels]
    first = label_probe(z, labels, kind="nearest_mean")
    for scale in (1e-3, 30, 1e4):
        assert label_probe(scale * z, labels, kind="nearest_mean") == pytest.approx(first, abs=1e-6)
    # labels as they were drawn: no classifier does better on average
    assert first["auroc"] > label_probe(z, labels)["auroc"] - 0.005


def test_probabilities_of_nearest_means_are_those_of_spheres():
    rng = np.random.default_rng(0)
    labels, means = np.repeat([0, 1, 2], 4000), 20 + 3 * rng.normal(size=(3, 4))
    z = means[labels] + 3 * rng.normal(size=(12_000, 4))
    found = softmax(READERS["nearest_mean"](z, labels, np.arange(12_000), 0).logits(z[::100]), axis=1)
    distance = np.square(z[::100, None] - means).sum(-1)
    np.testing.assert_allclose(found, softmax(-distance / (2 * 3**2), axis=1), atol=0.05)


def test_nearest_means_of_labels_that_do_not_vary():
    """Cells learned from are all at the mean of their label, and those of a point at one."""
    means, labels = np.array([[0.0, 0.1], [1.0, 0.1], [3.0, 0.1]]), np.repeat([0, 1, 2], 5)
    new = np.array([[0.4, 0.0], [2.2, 0.0]])
    one, two = (READERS["nearest_mean"](s * means[labels], labels, np.arange(15), 0).logits(s * new) for s in (1, 1e5))
    np.testing.assert_allclose(one, two)
    assert one.argmax(1).tolist() == [0, 2]
    point = READERS["nearest_mean"](np.full((15, 2), 0.1), labels, np.arange(15), 0).logits(new)
    np.testing.assert_allclose(point, point[:, :1].repeat(3, axis=1), atol=1e-9)


def votes_by_hand(z: np.ndarray, labels: np.ndarray, new: np.ndarray, n: int) -> np.ndarray:
    cosine = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in z] for a in new]
    nearest = [np.argsort(row)[::-1][:n] for row in cosine]
    return np.array([[np.mean(labels[near] == label) for label in range(labels.max() + 1)] for near in nearest])


def test_votes_of_neighbours(monkeypatch):
    rng = np.random.default_rng(0)
    z, labels, new = rng.normal(size=(60, 4)), rng.integers(3, size=60), rng.normal(size=(20, 4))
    reader = READERS["neighbours"](z, labels, np.arange(60), 0)
    expected = votes_by_hand(z, labels, new, 15)
    np.testing.assert_allclose(softmax(reader.logits(new), axis=1), expected, atol=2e-3)
    whole = reader.logits(new)
    monkeypatch.setattr(readers, "_BLOCK", 130)
    np.testing.assert_array_equal(reader.logits(new), whole)


def test_neighbours_that_are_equally_near_share_their_votes():
    """Whatever their rows: ten of one label at the very place, then forty of two others at another."""
    z = np.repeat([[1.0, 0.0], [0.0, 1.0]], [10, 40], axis=0)
    labels = np.repeat([0, 1, 2], [10, 10, 30])
    for order in (np.arange(50), np.arange(50)[::-1]):
        reader = READERS["neighbours"](z[order], labels[order], np.arange(50), 0)
        shares = softmax(reader.logits(np.array([[2.0, 0.1]])), axis=1)[0]
        np.testing.assert_allclose(shares, [10 / 15, 1.25 / 15, 3.75 / 15], atol=2e-3)


def test_few_cells_and_wide_embeddings():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 20)
    z = rng.normal(size=(40, 200)) + 2 * labels[:, None]
    for kind in READERS:
        assert label_probe(z, labels, kind=kind)["accuracy"] > 0.65


def test_a_probe_that_is_not_known():
    with pytest.raises(ValueError, match="kind='cubic' is not known: use one of 'linear', 'quadratic', 'neighbours'"):
        label_probe(np.eye(4), [0, 0, 1, 1], kind="cubic")  # type: ignore[arg-type]
