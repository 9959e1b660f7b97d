from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data import Split, hold_out_environments, split_by_column, stratified_split


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
        return
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
    obs = pd.DataFrame({"part": ["train", "val", "Test", "train", "unused"]})
    split = split_by_column(obs, "part")
    assert [part.tolist() for part in (split.train, split.validation, split.test)] == [[0, 3], [1], [2]]
    with pytest.raises(KeyError, match="no column 'split' to split by .its columns: part"):
        split_by_column(obs, "split")
    with pytest.raises(ValueError, match="it holds 'a' and no 'train'"):
        split_by_column(pd.DataFrame({"part": ["a", "a"]}), "part")


def test_held_out_environments_are_never_seen():
    e = np.array(["a", "b", "c", "d"] * 25)
    split = hold_out_environments(e, ["c", "a"], validation_size=0.2)
    assert set(e[split.test]) == {"a", "c"}
    assert len(split.test) == 50
    assert set(e[split.train]) == set(e[split.validation]) == {"b", "d"}
    assert len(split.validation) == 10
    with pytest.raises(ValueError, match="No cell is in the held-out environment 'z'"):
        hold_out_environments(e, ["z"])
    with pytest.raises(ValueError, match="All environments are held out"):
        hold_out_environments(e, list("abcd"))


def test_bad_splits_get_a_sentence():
    with pytest.raises(ValueError, match="A cell is in two parts"):
        Split(train=np.arange(4), validation=np.array([3]))
    with pytest.raises(ValueError, match="no cell to train on"):
        Split(train=np.array([]))
    for sizes in ((0, None), (0.8, 0.3), (1.2, None)):
        with pytest.raises(ValueError, match="must be fractions that sum to at most 1"):
            stratified_split([np.zeros(5)], train_size=sizes[0], validation_size=sizes[1])
