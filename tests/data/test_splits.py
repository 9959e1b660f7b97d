"""Tests of splits into training, validation and test cells."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scbd.data import Split, hold_out_environments, hold_out_perturbations, stratified_split
from scbd.data._splits import draw_matched_training_rows, split_by_column


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=4, max_size=120),
    st.sampled_from([(0.5, None), (0.9, None), (0.6, 0.2), (0.83, 0.02), (1.0, 0.0)]),
    st.integers(0, 20),
)
def test_stratified_split_each_stratum_is_divided_within_one_cell(labels, sizes, seed):
    y, e = np.array(labels).T
    try:
        split = stratified_split([y, e], train_size=sizes[0], validation_size=sizes[1], seed=seed)
    except ValueError as error:  # a few cells may leave none to train on
        assume("no cell to train on" not in str(error))
        raise
    together = np.concatenate([split.train, split.validation, split.test])
    assert sorted(together) == list(range(len(y)))
    validation = 1 - sizes[0] if sizes[1] is None else sizes[1]
    for stratum in set(labels):
        inside = (y == stratum[0]) & (e == stratum[1])
        assert abs(inside[split.train].sum() - sizes[0] * inside.sum()) < 1
        assert abs(inside[split.validation].sum() - validation * inside.sum()) < 1 + 1e-6


def test_stratified_split_single_cell_strata_sizes_are_exact_on_average():
    strata = np.arange(4000)
    split = stratified_split([strata], train_size=0.8, seed=0)
    assert abs(len(split.train) - 3200) < 100
    assert not np.array_equal(split.train, stratified_split([strata], train_size=0.8, seed=1).train)
    assert len(split.test) == 0


def test_splits_known_seed_rows_are_unchanged():
    """Resumed runs and published results depend on the rows drawn for a seed."""
    rng = np.random.default_rng(0)
    y, e = rng.integers(7, size=200), np.array(["a", "b", "c"])[rng.integers(3, size=200)]
    split = stratified_split([y, e], train_size=0.8, validation_size=0.1, seed=3)
    assert split.validation[:8].tolist() == [13, 14, 38, 40, 52, 57, 79, 88]
    assert [len(split.train), len(split.validation), len(split.test)] == [160, 19, 21]
    held = hold_out_environments(e, ["b"], strata=[y], seed=3)
    assert held.validation[:8].tolist() == [6, 14, 19, 39, 46, 50, 66, 76]
    same = hold_out_environments(pd.Series(pd.Categorical(e)), ["b"], strata=[y], seed=3)
    np.testing.assert_array_equal(same.validation, held.validation)


def test_splits_peak_memory_is_below_100_bytes_per_cell():
    """Splits hold row numbers instead of strings, since tables have tens of millions of cells."""
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
def test_draw_matched_training_rows_have_labels_of_validation_cells(cells, seed):
    labels, is_train = (np.array(column) for column in zip(*cells, strict=True))
    assume(is_train.any())
    split = Split(train=is_train, validation=~is_train)
    rows = draw_matched_training_rows(split, labels, seed)
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(split.train)
    # in the order of validation cells, as long as a label has training cells
    left, expected = np.bincount(labels[split.train], minlength=5), []
    for label in labels[split.validation]:
        if left[label]:
            left[label] -= 1
            expected.append(label)
    assert labels[rows].tolist() == expected


@pytest.mark.parametrize("dtype", [object, "category"])
def test_split_by_column_unknown_names_warn_or_raise(dtype):
    part = ["train"] * 8 + ["validaton"] * 2 + ["tset", None, float("nan"), "", " Val ", "spare", "left out", "Test"]
    obs = pd.DataFrame({"part": pd.Series(part).astype(dtype)})
    with pytest.warns(UserWarning, match=r"'validaton' × 2.*'tset' × 1.*'spare' × 1\): 4 cells"):
        split = split_by_column(obs, "part")
    assert [rows.tolist() for rows in (split.train, split.validation, split.test)] == [list(range(8)), [14], [17]]
    known = obs[~obs["part"].isin(["validaton", "tset", "spare"])]
    assert repr(split_by_column(known, "part")) == "Split of 10 cells: train 8, validation 1, test 1"
    with pytest.raises(KeyError, match="no 'split'"):
        split_by_column(obs, "split")
    with pytest.raises(ValueError, match="it holds ' Val '"):
        split_by_column(obs[14:15], "part")


def test_split_boolean_mask_returns_its_rows():
    mask = np.arange(10) < 7
    split = Split(train=mask, validation=~mask)
    assert split.train.tolist() == list(range(7)) and split.validation.tolist() == [7, 8, 9]
    assert Split(train=pd.Series(mask, dtype="boolean")).train.tolist() == list(range(7))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"train": [0.5, 1.7]}, r"float64 of shape \(2,\)"),
        ({"train": [[0, 1]]}, r"int64 of shape \(1, 2\)"),
        ({"train": ["a"]}, "row numbers or a mask"),
        ({"train": [3, -1]}, "row -1"),
        ({"train": [3, 4, 3]}, r"\(row 3\)"),
        ({"train": [0, 1, 2, 3], "validation": [3]}, r"\(row 3\)"),
        ({"train": []}, "no cell to train on"),
        ({"train": [True, False], "validation": [False]}, r"\(train 2, validation 1\)"),
    ],
)
def test_split_invalid_rows_raises(parts, said):
    with pytest.raises(ValueError, match=said):
        Split(**{name: np.array(rows) for name, rows in parts.items()})


@pytest.mark.parametrize("sizes", [(0, None), (0.8, 0.3), (1.2, None)])
def test_stratified_split_invalid_fractions_raises(sizes):
    with pytest.raises(ValueError, match="fractions"):
        stratified_split([np.zeros(5)], train_size=sizes[0], validation_size=sizes[1])


def test_hold_out_environments_are_in_test_only():
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


@pytest.mark.parametrize("dtype", [np.int64, np.float64, object, str])
def test_hold_out_environments_numbers_are_equal_to_text(dtype):
    e = np.repeat([0, 1, 2], 20).astype(dtype)
    for name in (1, 1.0, "1"):
        assert hold_out_environments(e, [name]).test.tolist() == list(range(20, 40))


def test_hold_out_environments_missing_value_raises():
    """A cell without an environment may be from the one that is held out."""
    e = pd.Series(["a", "b", None, "c"] * 25)
    with pytest.raises(ValueError, match=r"environments has no value for 25 of 100 cells .rows 2, 6"):
        hold_out_environments(e, ["c"])


def test_hold_out_environments_single_name_is_accepted():
    e = np.array(["aa", "b", "c"] * 30)
    np.testing.assert_array_equal(hold_out_environments(e, "aa").test, np.flatnonzero(e == "aa"))
    held = hold_out_perturbations(e, "aa", environments=e[::-1].copy(), held_out_environments="b", validation_share=0.0)
    assert set(np.flatnonzero(e == "aa")) <= set(held.test)


def make_labels(n_labels: int = 20, n_plates: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and plates: each plate holds every perturbation once and the control three times."""
    layout = [f"c{i:02}" for i in range(n_labels)] + ["DMSO"] * 3
    return np.tile(layout, n_plates), np.repeat([f"p{i}" for i in range(n_plates)], len(layout))


@given(st.floats(0, 0.5), st.floats(0, 0.4), st.integers(0, 2), st.integers(0, 50))
def test_hold_out_perturbations_parts_are_those_of_the_documented_table(share, validation_share, n_held, seed):
    y, e = make_labels()
    held = [f"p{i}" for i in range(n_held)]
    split = hold_out_perturbations(
        y,
        share=share,
        validation_share=validation_share,
        keep="DMSO",
        environments=e,
        held_out_environments=held,
        seed=seed,
    )
    train, validation = set(y[split.train]), set(y[split.validation])
    unseen = set(y) - train - validation
    assert len(unseen) == (max(1, round(20 * share)) if share else 0)
    assert len(validation) == (max(1, round(20 * validation_share)) if validation_share else 0)
    assert "DMSO" in train and not train & validation
    assert not set(e[np.concatenate([split.train, split.validation])]) & set(held)
    # the table of the docstring, cell by cell
    where = np.isin(e, held)
    expected = np.where(np.isin(y, [*unseen]) | where, "test", "train").astype(object)
    expected[np.isin(y, [*validation])] = "validation"
    expected[np.isin(y, [*validation]) & where] = "left out"
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(split, part), np.flatnonzero(expected == part))


def test_split_seen_distinguishes_quadrants():
    y, e = make_labels()
    split = hold_out_perturbations(y, ["c03", "c07"], keep="DMSO", environments=e, held_out_environments=["p3"])
    label, plate = split.seen(y), split.seen(e)
    test_y, test_e = y[split.test], e[split.test]
    np.testing.assert_array_equal(label, ~np.isin(test_y, ["c03", "c07"]))
    np.testing.assert_array_equal(plate, test_e != "p3")
    assert not (label & plate).any()  # cells of a seen label on a seen plate are training cells
    assert [(~label & plate).sum(), (label & ~plate).sum(), (~label & ~plate).sum()] == [6, 19, 2]
    assert not split.seen(pd.Series(y), "validation").any() and split.seen(e, "validation").all()
    with pytest.raises(ValueError, match="There are 50 values, and the split has cells beyond"):
        split.seen(y[:50])
    assert Split(train=np.arange(3)).seen(list("abc")).tolist() == []


def test_hold_out_perturbations_reordered_cells_holds_out_equal_labels():
    y, _ = make_labels()
    order = np.random.default_rng(0).permutation(len(y))
    one, two = hold_out_perturbations(y, seed=5), hold_out_perturbations(pd.Series(y[order]).astype("category"), seed=5)
    assert set(y[one.test]) == set(y[order][two.test]) and set(y[one.validation]) == set(y[order][two.validation])
    assert set(y[one.test]) != set(y[hold_out_perturbations(y, seed=6).test])


def test_hold_out_perturbations_controls_by_position_are_held_out():
    """Controls that are labelled by position can be held out like perturbations."""
    y, e = make_labels()
    position = np.array([f"{label} {i % 3}" if label == "DMSO" else label for i, label in enumerate(y)])
    split = hold_out_perturbations(position, ["DMSO 0", "c01"], environments=e)
    assert (y[split.test] == "DMSO").sum() == 4 and len(split.test) == 8


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"share": 1.2}, "share=1.2: give a number from 0 to 1"),
        ({"validation_share": -1}, "validation_share=-1: give"),
        ({"held_out": ["c99"]}, "No cell has the held-out perturbation 'c99'; there are: DMSO, c00, c01"),
        ({"keep": "water"}, "No cell has the perturbation to keep, 'water'"),
        ({"held_out": ["c01", "DMSO"], "keep": ["DMSO"]}, "'DMSO' is to be held out and to be kept: name it once"),
        ({"share": 0.9}, "19 perturbations to test on and 2 for validation leave none of 21 to train on"),
        ({"held_out_environments": ["p0"]}, "held_out_environments needs environments"),
        ({"environments": ["p0"] * 92, "held_out_environments": ["p0"]}, "All environments are held out"),
        ({"environments": ["p0"] * 92, "held_out_environments": ["p1"]}, "No cell is in the held-out environment 'p1'"),
        ({"environments": ["p0"] * 9}, "There are 92 labels and 9 environments"),
        ({"labels": ["a", None, "b"]}, r"labels has no value for 1 of 3 cells \(rows 1\): leave these out"),
    ],
)
def test_hold_out_perturbations_invalid_input_raises(how, said):
    with pytest.raises(ValueError, match=said):
        hold_out_perturbations(**{"labels": make_labels()[0], **how})
