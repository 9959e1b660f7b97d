from __future__ import annotations

import logging

import numpy as np
import pytest
from blobs import blobs

from scbd.metrics import label_probe, predict_labels


def test_labels_that_are_there_are_found():
    scores = label_probe(*blobs())
    assert set(scores) == {"f1", "auroc", "accuracy", "chance_f1"}
    assert min(scores["f1"], scores["auroc"], scores["accuracy"]) > 0.99
    assert 0.1 < scores["chance_f1"] < 0.4


def test_labels_that_are_not_there_are_at_chance():
    z, _ = blobs(4000)
    labels = np.random.default_rng(1).integers(4, size=4000)
    scores = label_probe(z, labels)
    assert abs(scores["accuracy"] - 0.25) < 0.05
    assert abs(scores["auroc"] - 0.5) < 0.05
    assert abs(scores["f1"] - scores["chance_f1"]) < 0.08


def test_chance_of_few_cells_is_no_single_draw():
    """Two labels, few cells: one permutation is anywhere between a third and two thirds."""
    z = np.random.default_rng(0).normal(size=(120, 8))
    chance = [label_probe(z, np.arange(120) % 2, seed=seed)["chance_f1"] for seed in range(20)]
    assert np.std(chance) < 0.06 and abs(np.mean(chance) - 0.5) < 0.05


def test_single_cells_of_a_label_are_left_out():
    z, labels = blobs()
    labels = labels.astype(object)
    labels[0] = "alone"
    assert label_probe(z, labels)["accuracy"] > 0.99


def test_subset_and_seed():
    z, labels = blobs(distance=1.0)
    assert label_probe(z, labels, seed=1) == label_probe(z, labels, seed=1)
    assert label_probe(z, labels, seed=1) != label_probe(z, labels, seed=2)
    assert label_probe(z, labels, max_cells=100) != label_probe(z, labels)


@pytest.mark.parametrize("classifier", ["linear", "nearest_mean"])
def test_predicting_other_cells(classifier):
    z, labels = blobs()
    new, truth = blobs(seed=1)
    assert (predict_labels(z, labels, new, classifier=classifier) == truth).mean() > 0.99


def test_nearest_mean_asks_for_the_embedding_as_it_is():
    """A direction with little variance that a linear head still finds, drowned by noise in another."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=400)
    z = np.stack([0.01 * labels + 0.001 * rng.normal(size=400), rng.normal(size=400)], axis=1)
    assert (predict_labels(z, labels, z) == labels).mean() > 0.99
    assert (predict_labels(z, labels, z, classifier="nearest_mean") == labels).mean() < 0.7


def test_the_nearest_mean_is_nearest_wherever_it_lies():
    rng = np.random.default_rng(0)
    z, labels = 5 + 3 * rng.normal(size=(300, 4)), np.repeat(["a", "b", "c"], 100)
    z[100:] *= np.repeat([1.3, 2], 100)[:, None]
    means = np.stack([z[labels == name].mean(axis=0) for name in "abc"])
    expected = np.array(list("abc"))[np.linalg.norm(z[:, None] - means, axis=2).argmin(axis=1)]
    np.testing.assert_array_equal(predict_labels(z, labels, z, classifier="nearest_mean"), expected)


def test_groups_are_not_split():
    """A label that follows from the group: readable cell by cell, not from groups that were never seen."""
    rng = np.random.default_rng(0)
    group = rng.integers(40, size=2000)
    z = 5 * rng.normal(size=(40, 60))[group] + rng.normal(size=(2000, 60))
    labels = (group % 2).astype(str)
    assert label_probe(z, labels)["accuracy"] > 0.95
    assert label_probe(z, labels, groups=group)["accuracy"] < 0.8


@pytest.mark.parametrize(("n_labels", "n_groups"), [(3, 2), (20, 2), (20, 4)])
def test_a_perfect_embedding_is_perfect_for_groups_that_were_not_seen(n_labels, n_groups):
    """Guides of genes that are perfectly told apart: no gene without a guide to learn from, or one to be tested on."""
    guide = np.repeat(np.arange(n_labels * n_groups), 10)
    gene = guide // n_groups
    scores = label_probe(np.eye(n_labels)[gene], gene, groups=guide)
    assert scores["f1"] == scores["accuracy"] == scores["auroc"] == 1


def test_labels_of_one_group_are_left_out_and_said(caplog):
    guide = np.repeat(np.arange(9), 10)
    gene = np.minimum(guide // 2, 3)
    gene[guide == 8] = 4
    with caplog.at_level(logging.WARNING, logger="scbd"):
        assert label_probe(np.eye(5)[gene], gene, groups=guide)["f1"] == 1
    assert "leaves out 1 of 5 labels, with cells in one group only" in caplog.text


def test_cells_to_learn_from_may_be_named():
    z, labels = blobs()
    train = np.arange(600) < 300
    wrong = np.where(train, labels, "w0")
    assert label_probe(z, labels, train=train)["accuracy"] > 0.99
    assert label_probe(z, labels, train=np.flatnonzero(train)) == label_probe(z, labels, train=train)
    assert label_probe(z, wrong, train=train)["accuracy"] == pytest.approx((labels[300:] == "w0").mean(), abs=0.02)


def test_a_list_with_a_missing_label_is_an_array_with_one():
    """As text it was a label of its own, "nan", which could even be predicted."""
    x, labels = np.random.default_rng(0).normal(size=(100, 3)), ["a"] * 40 + ["b"] * 50 + [np.nan] * 10
    with pytest.raises(ValueError, match="10 of 100 cells have no label: drop them"):
        label_probe(x, labels)
    with pytest.raises(ValueError, match="10 of 100 cells have no label"):
        predict_labels(x, labels, x)
    with pytest.raises(ValueError, match="10 of 100 cells have no group"):
        label_probe(x, ["a"] * 50 + ["b"] * 50, groups=labels)
    numbers = [0] * 50 + [1] * 50
    assert label_probe(x, numbers) == label_probe(x, np.array(numbers))


def test_no_cell_of_a_subset_is_learned_from_and_tested_on():
    """Labels that can only be learned by heart: a cell that was drawn twice would be known."""
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(600, 400)), rng.integers(2, size=600)
    assert label_probe(z, labels, max_cells=500)["accuracy"] < 0.6


def test_memory_maps(tmp_path):
    z, labels = blobs()
    np.save(tmp_path / "z.npy", z)
    assert label_probe(np.load(tmp_path / "z.npy", mmap_mode="r"), labels) == label_probe(z, labels)


def test_bad_input_gets_a_sentence():
    z, labels = blobs(40)
    with pytest.raises(ValueError, match="40 embeddings and 39 labels"):
        label_probe(z, labels[:39])
    with pytest.raises(ValueError, match="at least two labels with two cells each"):
        label_probe(z, ["a"] * 39 + ["b"])
    with pytest.raises(ValueError, match="1 of 40 cells have no label"):
        label_probe(z, [None, *labels[1:]])
    with pytest.raises(ValueError, match="train_fraction=1.5 must lie between 0 and 1"):
        label_probe(z, labels, train_fraction=1.5)
    with pytest.raises(ValueError, match="fewer than two labels to learn from"):
        label_probe(z, labels, train=labels == "w0")
    with pytest.raises(ValueError, match="train is a mask of numbers, .* give train.astype"):
        label_probe(z, labels, train=np.arange(40) % 2)
    with pytest.raises(ValueError, match="4 of 4 labels have cells in one group only"):
        label_probe(z, labels, groups=labels)
    with pytest.raises(ValueError, match="40 labels and 39 groups"):
        label_probe(z, labels, groups=labels[:39])
    with pytest.raises(ValueError, match="1 of 40 cells have no group"):
        label_probe(z, labels, groups=[None, *range(39)])
    with pytest.raises(ValueError, match="at least two different labels"):
        predict_labels(z, ["a"] * 40, z)
    with pytest.raises(ValueError, match="classifier='tree' is not known"):
        predict_labels(z, labels, z, classifier="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"embedding has the shape \(40,\): give a row a cell"):
        label_probe(z[:, 0], labels)
    with pytest.raises(ValueError, match="learned from has 8 components, and what is predicted from has 5"):
        predict_labels(z, labels, z[:, :5])
    with pytest.raises(ValueError, match="NaN or infinite values in 2 of 40 cells"):
        predict_labels(z, labels, np.where(np.arange(40)[:, None] < 2, np.nan, z), classifier="nearest_mean")
    z[3] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of"):
        predict_labels(z, labels, z)
