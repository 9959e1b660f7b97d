from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scbd.data import Split, hold_out_environments, split_by_column, stratified_split
from scbd.data._splits import matched_rows


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=4, max_size=120),
    st.sampled_from([(0.5, None), (0.9, None), (0.6, 0.2), (0.83, 0.02), (1.0, 0.0)]),
    st.integers(0, 20),
)
def test_each_stratum_is_divided_to_within_one_cell(labels, sizes, seed):
    y, e = np.array(labels).T
    try:
        split = stratified_split([y, e], train_size=sizes[0], validation_size=sizes[1], seed=seed)
    except ValueError as error:
        assert "no cell to train on" in str(error)
        assume(False)  # of a handful of cells, now and then
    together = np.concatenate([split.train, split.validation, split.test])
    assert sorted(together) == list(range(len(y)))
    validation = 1 - sizes[0] if sizes[1] is None else sizes[1]
    for stratum in set(labels):
        inside = (y == stratum[0]) & (e == stratum[1])
        assert abs(inside[split.train].sum() - sizes[0] * inside.sum()) < 1
        assert abs(inside[split.validation].sum() - validation * inside.sum()) < 1 + 1e-6


def test_sizes_are_exact_on_average_even_for_single_cells():
    strata = np.arange(4000)
    split = stratified_split([strata], train_size=0.8, seed=0)
    assert abs(len(split.train) - 3200) < 100
    assert not np.array_equal(split.train, stratified_split([strata], train_size=0.8, seed=1).train)
    assert len(split.test) == 0


def test_by_column():
    obs = pd.DataFrame({"part": ["train", "val", "Test", "train", None]})
    split = split_by_column(obs, "part")
    assert [part.tolist() for part in (split.train, split.validation, split.test)] == [[0, 3], [1], [2]]
    with pytest.raises(KeyError, match="no column 'split' to split by .its columns: part"):
        split_by_column(obs, "split")
    with pytest.raises(ValueError, match="it holds 'a' and no 'train'"):
        split_by_column(pd.DataFrame({"part": ["a", "a"]}), "part")


def test_bad_splits_get_a_sentence():
    with pytest.raises(ValueError, match="A cell is in two parts"):
        Split(train=np.arange(4), validation=np.array([3]))
    with pytest.raises(ValueError, match="no cell to train on"):
        Split(train=np.array([]))
    for sizes in ((0, None), (0.8, 0.3), (1.2, None)):
        with pytest.raises(ValueError, match="must be fractions that sum to at most 1"):
            stratified_split([np.zeros(5)], train_size=sizes[0], validation_size=sizes[1])


def test_values_that_name_no_part_are_counted_and_named():
    part = pd.Series(["train"] * 8 + ["validaton"] * 2 + ["tset", None, float("nan"), "", " Val ", "spare"])
    for column in (part, part.astype("category")):
        obs = pd.DataFrame({"part": column})
        said = r"\('validaton' × 2, validation\?, 'tset' × 1, test\?, 'spare' × 1\): 4 cells are left out"
        with pytest.warns(UserWarning, match=said):
            split = split_by_column(obs, "part")
        assert split.train.tolist() == list(range(8)) and split.validation.tolist() == [14]
        known = obs[~obs["part"].isin(["validaton", "tset", "spare"])]
        assert len(split_by_column(known, "part").train) == 8  # cells without a value are meant to be left out
    assert len(split_by_column(pd.DataFrame({"part": pd.Categorical(["val"] * 3 + ["train"])}), "part").validation) == 3
    with pytest.raises(ValueError, match="no 'train'"):
        split_by_column(pd.DataFrame({"part": pd.Categorical(["val"], categories=["train", "val"])}), "part")


def test_masks_are_masks():
    mask = np.arange(10) < 7
    split = Split(train=mask, validation=~mask)
    assert split.train.tolist() == list(range(7)) and split.validation.tolist() == [7, 8, 9]
    nullable = Split(train=pd.Series(mask, dtype="boolean"), validation=np.array([8]))
    assert nullable.train.tolist() == list(range(7))
    with pytest.raises(ValueError, match=r"masks of a split differ in length \(train 10, validation 9\)"):
        Split(train=mask, validation=~mask[:9])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0.5, 1.7], r"The train part of a split must be a list of row numbers or a mask, not float64 of shape \(2,\)"),
        ([0.0, 1.0], "not float64"),
        ([[0, 1]], r"int64 of shape \(1, 2\)"),
        (["a"], "row numbers or a mask"),
        ([3, -1], "names row -1: count from the first cell, which is row 0"),
        ([3, 4, 3], r"twice in one: .* \(row 3\)"),
    ],
)
def test_rows_that_are_none(rows, said):
    with pytest.raises(ValueError, match=said):
        Split(train=np.array(rows))


def test_a_split_stays_the_same():
    """Of runs that are gone on with, and of results that were published."""
    rng = np.random.default_rng(0)
    y, e = rng.integers(7, size=200), np.array(["a", "b", "c"])[rng.integers(3, size=200)]
    split = stratified_split([y, e], train_size=0.8, validation_size=0.1, seed=3)
    assert split.validation[:8].tolist() == [13, 14, 38, 40, 52, 57, 79, 88]
    assert [len(split.train), len(split.validation), len(split.test)] == [160, 19, 21]
    held = hold_out_environments(e, ["b"], strata=[y], seed=3)
    assert held.validation[:8].tolist() == [6, 14, 19, 39, 46, 50, 66, 76]
    same = hold_out_environments(pd.Series(pd.Categorical(e)), ["b"], strata=[y], seed=3)
    np.testing.assert_array_equal(same.validation, held.validation)


def test_memory_of_splits():
    """A cell costs its row numbers, not its strings: tables have tens of millions."""
    n = 200_000
    rng = np.random.default_rng(0)
    part = pd.Categorical.from_codes(rng.integers(3, size=n), ["train", "val", "test"])
    y, e = rng.integers(500, size=n), pd.Series(pd.Categorical.from_codes(rng.integers(40, size=n), list(range(40))))
    obs = pd.DataFrame({"part": part})
    for split in (
        lambda: split_by_column(obs, "part"),
        lambda: stratified_split([y, e]),
        lambda: hold_out_environments(e, [3], strata=[y]),
    ):
        tracemalloc.start()
        try:
            split()
            assert tracemalloc.get_traced_memory()[1] < 100 * n
        finally:
            tracemalloc.stop()


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=60), st.integers(0, 5))
def test_each_validation_cell_is_matched_by_another_training_cell_of_its_label(cells, seed):
    labels, is_train = (np.array(column) for column in zip(*cells, strict=True))
    assume(is_train.any())
    split = Split(train=is_train, validation=~is_train)
    rows = matched_rows(split, labels, seed)
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(split.train)
    # in the order of validation cells, as long as a label has training cells
    left, expected = np.bincount(labels[split.train], minlength=5), []
    for label in labels[split.validation]:
        if left[label]:
            left[label] -= 1
            expected.append(label)
    assert labels[rows].tolist() == expected


def test_cells_that_a_run_left_out_are_left_out_in_silence():
    obs = pd.DataFrame({"scbd_split": ["train", "left out", "test"]})
    assert repr(split_by_column(obs, "scbd_split")) == "Split of 2 cells: train 1, validation 0, test 1"
