from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data import Split, hold_out_environments, hold_out_perturbations


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


@pytest.mark.parametrize("dtype", [np.int64, np.float64, object, str])
def test_numbers_have_one_name(dtype):
    e = np.repeat([0, 1, 2], 20).astype(dtype)
    for name in (1, 1.0, "1"):
        assert hold_out_environments(e, [name]).test.tolist() == list(range(20, 40))


def test_cells_without_an_environment_are_not_trained_on_unasked():
    """They may be of the one that is held out."""
    e = pd.Series(["a", "b", None, "c"] * 25)
    with pytest.raises(ValueError, match=r"environments has no value for 25 of 100 cells .rows 2, 6"):
        hold_out_environments(e, ["c"])


def test_one_may_be_named_by_itself():
    e = np.array(["aa", "b", "c"] * 30)
    np.testing.assert_array_equal(hold_out_environments(e, "aa").test, np.flatnonzero(e == "aa"))
    held = hold_out_perturbations(e, "aa", environments=e[::-1].copy(), held_out_environments="b", validation_share=0.0)
    assert set(np.flatnonzero(e == "aa")) <= set(held.test)


def make_labels(n_labels: int = 20, n_plates: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Each perturbation, and the control three times, on each plate."""
    layout = [f"c{i:02}" for i in range(n_labels)] + ["DMSO"] * 3
    return np.tile(layout, n_plates), np.repeat([f"p{i}" for i in range(n_plates)], len(layout))


@given(st.floats(0, 0.5), st.floats(0, 0.4), st.integers(0, 2), st.integers(0, 50))
def test_perturbations_and_environments_are_held_out(share, validation_share, n_held, seed):
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


def test_quadrants_are_told_apart():
    y, e = make_labels()
    split = hold_out_perturbations(y, ["c03", "c07"], keep="DMSO", environments=e, held_out_environments=["p3"])
    label, plate = split.seen(y), split.seen(e)
    test_y, test_e = y[split.test], e[split.test]
    np.testing.assert_array_equal(label, ~np.isin(test_y, ["c03", "c07"]))
    np.testing.assert_array_equal(plate, test_e != "p3")
    assert not (label & plate).any()  # what was seen in both ways is trained on
    assert [(~label & plate).sum(), (label & ~plate).sum(), (~label & ~plate).sum()] == [6, 19, 2]
    assert not split.seen(pd.Series(y), "validation").any() and split.seen(e, "validation").all()
    with pytest.raises(ValueError, match="There are 50 values, and the split has cells beyond"):
        split.seen(y[:50])
    assert Split(train=np.arange(3)).seen(list("abc")).tolist() == []


def test_draws_do_not_depend_on_the_order_of_cells():
    y, _ = make_labels()
    order = np.random.default_rng(0).permutation(len(y))
    one, two = hold_out_perturbations(y, seed=5), hold_out_perturbations(pd.Series(y[order]).astype("category"), seed=5)
    assert set(y[one.test]) == set(y[order][two.test]) and set(y[one.validation]) == set(y[order][two.validation])
    assert set(y[one.test]) != set(y[hold_out_perturbations(y, seed=6).test])


def test_controls_are_held_out_by_position():
    """As labels of their own: those that are held out were in no fit."""
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
def test_what_cannot_be_held_out(how, said):
    with pytest.raises(ValueError, match=said):
        hold_out_perturbations(**{"labels": make_labels()[0], **how})
