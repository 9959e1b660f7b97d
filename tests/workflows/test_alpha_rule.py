from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest

from scbd.workflows import choose_alpha, selection_regret
from scbd.workflows._alpha_rule import Criterion


def sweep(accuracies: dict[float, list[float]], cells: int = 10_000) -> pd.DataFrame:
    return pd.DataFrame(
        [{"alpha": a, "accuracy": x, "chance": 0.1, "cells": cells} for a, runs in accuracies.items() for x in runs]
    )


def test_the_largest_alpha_that_costs_little_is_chosen():
    found = choose_alpha(sweep({0.0: [0.9], 0.1: [0.92], 1.0: [0.91], 10.0: [0.6], 100.0: [0.2]}))
    assert found.alpha == 1.0 and found.criterion == "kept"
    # .1 + .97 × (.92 - .1), less the standard error of .92
    assert found.threshold == pytest.approx(0.1 + 0.97 * 0.82 - np.sqrt(0.92 * 0.08 / 10_000))
    assert list(found.curve.index) == [0, 0.1, 1, 10, 100] and list(found.curve["kept"]) == [True] * 3 + [False] * 2
    assert "alpha 1 (kept: accuracy of at least 0.893)" in repr(found)


def test_an_alpha_that_passes_beyond_one_that_fails_is_luck():
    accuracies = {0.0: [0.9], 1.0: [0.7], 10.0: [0.9]}
    for criterion in get_args(Criterion):
        assert choose_alpha(sweep(accuracies), criterion=criterion).alpha == 0
    dip = {0.0: [0.6], 0.003: [0.45], 0.01: [0.45], 0.03: [0.45], 0.1: [0.6]}
    assert choose_alpha(sweep(dip, cells=5000), criterion="unseen").alpha == 0


@pytest.mark.parametrize("criterion", get_args(Criterion))
def test_below_the_best_alpha_accuracy_may_be_lower(criterion):
    assert choose_alpha(sweep({0.0: [0.5], 1.0: [0.8], 10.0: [0.9], 30.0: [0.5]}), criterion=criterion).alpha == 10
    beyond = {0.0: [0.5], 1.0: [0.8], 10.0: [0.9], 30.0: [0.899], 100.0: [0.5], 300.0: [0.9]}
    assert choose_alpha(sweep(beyond), criterion=criterion).alpha == 30


@pytest.mark.parametrize("criterion", get_args(Criterion))
def test_an_alpha_of_which_a_run_was_lost_is_not_chosen(criterion):
    runs = sweep({0.0: [0.8, 0.8], 1.0: [0.79, 0.81], 10.0: [0.95, np.nan], 100.0: [np.nan, np.nan]})
    found = choose_alpha(runs, criterion=criterion)
    assert found.alpha == 1 and found.threshold < 0.8
    assert found.curve["kept"].to_list() == [True, True, False, False]
    assert found.curve["accuracy"].isna().to_list() == [False, False, True, True]
    with pytest.raises(ValueError, match="Each alpha has a run whose accuracy is NaN"):
        choose_alpha(sweep({0.0: [0.8, np.nan], 1.0: [np.nan]}), criterion=criterion)


def test_the_error_is_that_of_runs_where_they_differ_by_more_than_cells_do():
    runs = {0.0: [0.9, 0.5], 1.0: [0.62, 0.62], 10.0: [0.5, 0.5]}
    found = choose_alpha(sweep(runs), criterion="unseen")
    assert found.threshold == pytest.approx(0.7 - np.std([0.9, 0.5], ddof=1) / np.sqrt(2))
    assert found.alpha == 10
    assert choose_alpha(sweep(runs), keep=0.5).alpha == 10


@pytest.mark.parametrize("columns", [["held_out"], ["held_out", "seed"]])
def test_an_alpha_that_is_worse_in_every_environment_is_worse(columns):
    """How far environments differ says nothing of how far alphas do."""
    levels = np.array([0.95, 0.55, 0.75, 0.35])
    costs = {0.0: np.zeros(4), 0.01: np.array([0.01, -0.01, 0.01, -0.01]), 0.1: np.full(4, 0.08)}
    runs = pd.concat([sweep({alpha: list(levels - cost)}) for alpha, cost in costs.items()])
    runs = runs.assign(held_out=3 * [["a"], ["b"], ["c"], ["d"]], seed=3 * [0, 0, 1, 1])
    found = choose_alpha(runs[["alpha", "accuracy", "chance", "cells", *columns]], criterion="unseen")
    assert found.alpha == 0.01 and found.curve["kept"].to_list() == [True, True, False]
    assert found.threshold == pytest.approx(levels.mean() - np.std(costs[0.01], ddof=1) / 2)
    # of other environments, there is nothing to pair
    other = runs.assign(held_out=np.arange(12).astype(str))
    assert choose_alpha(other, criterion="unseen").threshold == pytest.approx(
        levels.mean() - np.std(levels, ddof=1) / 2
    )


def test_what_cannot_be_chosen_from_is_refused():
    with pytest.raises(ValueError, match="nothing to choose from: give the runs of at least two alphas"):
        choose_alpha(sweep({1.0: [0.5, 0.6]}))
    with pytest.raises(KeyError, match="no column 'chance'"):
        choose_alpha(sweep({1.0: [0.5]}).drop(columns="chance"))
    with pytest.raises(ValueError, match="criterion='test' is not known: use one of kept, unseen"):
        choose_alpha(sweep({0.0: [0.4], 1.0: [0.5]}), criterion="test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=1.6 is the share of the best accuracy"):
        choose_alpha(sweep({0.0: [0.4], 1.0: [0.5]}), keep=1.6)


def test_the_regret_of_a_choice_is_seed_by_seed():
    rows: list[tuple[Any, ...]] = [
        (0, 0.0, 0.9, 0.2),
        (0, 1.0, 0.9, 0.5),
        (0, 10.0, 0.5, 0.8),
        (1, 0.0, 0.9, 0.6),
        (1, 1.0, 0.8, 0.4),
    ]
    found = selection_regret(pd.DataFrame(rows, columns=["seed", "alpha", "z_c in", "z_c out"]))
    assert found[["alpha", "best"]].to_numpy().tolist() == [[1, 10], [0, 0]]
    np.testing.assert_allclose(found["regret"], [0.3, 0])
    rows += [(0, "auto", 0.9, 0.75), (1, "auto", 0.9, 0.7)]
    found = selection_regret(pd.DataFrame(rows, columns=["seed", "alpha", "z_c in", "z_c out"]))
    np.testing.assert_allclose(found["regret"], [0.3, 0])
    np.testing.assert_allclose(found["auto, regret"], [0.05, -0.1])
