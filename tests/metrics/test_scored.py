from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from scbd.metrics._retrieval_result import ReplicateRetrieval, Retrieval
from scbd.metrics._scored import Scored, probe_scores, replicate_scores, retrieval_scores


def means(values: np.ndarray, seed: int = 0, units: np.ndarray | None = None) -> Scored:
    """Average precision of as many perturbations."""
    table = pd.DataFrame({"average_precision": values, "chance": 0.1, "q_value": 1.0})
    return retrieval_scores(Retrieval(table, units=units), 200, seed)["map"]


@pytest.mark.parametrize("n", [2, 3, 8, 40])
def test_of_few_perturbations_intervals_hold_the_truth_and_nothing_is_called_different(n):
    """Quantiles of resamples held it in 48, 77 and 93 % of cases, and p values were below 0.05 in 52, 22 and 10 %."""
    rng = np.random.default_rng(n)
    held, called, n_runs = 0, 0, 800
    for _ in range(n_runs):
        both = 0.5 + 0.1 * (rng.normal(size=n) + rng.normal(size=(2, n)))
        one, other = map(means, both)
        low, high = one.interval(0.95)
        held += low < 0.5 < high
        called += one.minus(other).p_value() < 0.05
    assert held / n_runs == pytest.approx(0.95, abs=0.025)  # three standard errors
    assert called / n_runs == pytest.approx(0.05, abs=0.025)


@pytest.mark.parametrize("sizes", [[6] * 20, [12] * 10, [2] * 10 + [8] * 10])
def test_perturbations_of_a_mechanism_are_drawn_together(sizes):
    """They score together: drawn one by one, intervals held the truth in 57 % where 20 mechanisms had 6 each."""
    rng = np.random.default_rng(0)
    mechanism = np.repeat(np.arange(len(sizes)), sizes)
    held, called, n_runs = 0, 0, 600
    for _ in range(n_runs):
        both = 0.5 + 0.1 * rng.normal(size=(2, len(sizes)))[:, mechanism] + 0.05 * rng.normal(size=(2, len(mechanism)))
        one, other = (means(values, units=mechanism) for values in both)
        low, high = one.interval(0.95)
        held += low < 0.5 < high
        called += one.minus(other).p_value() < 0.05
    assert held / n_runs == pytest.approx(0.95, abs=0.03)
    assert called / n_runs == pytest.approx(0.05, abs=0.03)


def test_of_one_mechanism_nothing_is_known():
    score = means(np.array([0.2, 0.5, 0.9]), units=np.zeros(3, dtype=int))
    assert score.value == pytest.approx(1.6 / 3) and np.isnan(score.interval(0.95)).all()


@pytest.mark.parametrize("n_units", [1.6, 3.0, 12.0, 500.0])
def test_a_difference_is_called_where_its_interval_leaves_zero_out(n_units):
    """Few complexes widened the interval, and not the p value: 10.8 % were below 0.05 where nothing differed."""
    rng = np.random.default_rng(0)
    for shift in rng.uniform(-4, 4, 60):
        score = Scored(shift, draws=shift + rng.normal(size=999), n_units=n_units)
        p = score.p_value()
        for level in (0.5, 0.8, 0.95):
            low, high = score.interval(level)
            if abs(p - (1 - level)) > 0.02:  # the ends lie between two draws
                assert p > 1 - level or not low <= 0 <= high
                assert p < 1 - level or low <= 0 <= high or n_units < 12  # no draw is beyond the last one
    many = Scored(0.0, draws=rng.normal(size=999) + 1.5, n_units=1e9)
    assert many.p_value() == pytest.approx(2 * (1 + (many.draws <= 0).sum()) / 1000, rel=1e-3)


@pytest.mark.parametrize("n_wells", [2, 3, 10])
def test_the_f1_of_a_probe_lies_in_its_interval(n_wells):
    """Resamples lack labels, whose F1 then counts as 0: their quantiles lay below the score."""
    rng = np.random.default_rng(0)
    gene, well = np.repeat(np.arange(20), n_wells * 10), np.repeat(np.arange(20 * n_wells), 10)
    z = 0.8 * rng.normal(size=(20, 8))[gene] + 0.4 * rng.normal(size=(20 * n_wells, 8))[well]
    z += rng.normal(size=z.shape)
    how = {"kind": "linear", "groups": well, "max_cells": None}
    for score in ("f1", "accuracy"):
        found = probe_scores(z, gene, n_bootstrap=100, seed=0, **how)[score]
        low, high = found.interval(0.95)
        assert low < found.value < high and high - low < 0.5


@pytest.mark.parametrize("n_wells", [2, 5])
@pytest.mark.parametrize("right", [True, False])
def test_a_probe_that_is_always_right_or_wrong_is_not_sure_of_it(n_wells, right):
    """All resamples are the score itself, and its interval had no width."""
    gene, well = np.tile(np.repeat([0, 1], 10), n_wells * 2), np.repeat(np.arange(n_wells * 4), 10)
    is_train = well < n_wells * 2
    z = np.eye(2)[np.where(is_train | right, gene, 1 - gene)]
    how = {"kind": "linear", "groups": well, "train": is_train, "max_cells": None}
    scores = probe_scores(z, gene, n_bootstrap=20, seed=0, **how)
    n_tested = n_wells * 2
    found = scores["accuracy"]
    assert found.value == right
    low, high = found.interval(0.95)
    expected = scipy.stats.binomtest(n_tested * right, n_tested).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((expected.low, expected.high))
    for other in (scores["f1"], found.minus(found), Scored(0.5, 0.5, np.full(9, 0.5), 4, True, True)):
        assert np.isnan(other.interval(0.95)).all()


def test_without_draws_or_with_one_unit_nothing_is_known():
    for score in (Scored(0.5), means(np.array([0.5]))):
        assert np.isnan([*score.interval(0.95), score.minus(score).p_value()]).all()
    same = means(np.full(4, 0.5))
    assert same.minus(same).p_value() == 1 and same.minus(means(np.full(4, 0.4))).p_value() == 0


def test_what_is_beyond_the_floor_by_chance_is_that_of_the_design():
    """Scores that are those of chance come to it, however many wells perturbations and controls have."""
    columns = ["average_precision", "chance", "q_value"]
    table = pd.DataFrame([[0.3, 0.3, 1.0], [0.1, 0.1, 1.0]], columns=columns)
    controls = pd.DataFrame([[0.05, 0.05, 1.0]], columns=columns)
    score = replicate_scores(ReplicateRetrieval(table, floor_table=controls), 0, 0)["floor_corrected"]
    assert score.chance == pytest.approx(score.value) and score.chance == pytest.approx(0.15 / 0.95)
