from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given, settings
from hypothesis import strategies as st

from scbd.metrics import environment_mmd, label_probe


def table(e: np.ndarray, y: np.ndarray | None = None) -> AnnData:
    obs = {"e": e.astype(str)} | ({} if y is None else {"y": y.astype(str)})
    return AnnData(obs=pd.DataFrame(obs, index=np.arange(len(e)).astype(str)))


def naive(x: np.ndarray, e: np.ndarray) -> float:
    squared = np.square(x[:, None] - x[None]).sum(-1)
    kernel = np.exp(-squared / np.median(squared[np.triu_indices(len(x), 1)]))
    values = []
    for a, b in combinations(np.unique(e), 2):
        within = [
            np.mean([kernel[i, j] for i in np.flatnonzero(e == g) for j in np.flatnonzero(e == g) if i != j])
            for g in (a, b)
        ]
        values.append(sum(within) - 2 * kernel[np.ix_(e == a, e == b)].mean())
    return float(np.mean(values))


@given(seed=st.integers(0, 1000), n_environments=st.integers(2, 4))
@settings(max_examples=20)
def test_equals_the_loop_over_pairs(seed, n_environments):
    rng = np.random.default_rng(seed)
    e = np.concatenate([np.repeat(np.arange(n_environments), 2), rng.integers(n_environments, size=12)])
    x = rng.normal(size=(len(e), 3)) + e[:, None]
    assert environment_mmd(table(e), x, "e", n_permutations=1)["mmd"] == pytest.approx(naive(x, e), abs=1e-5)


def test_sees_what_a_linear_probe_does_not():
    """Environments that differ in spread alone."""
    rng, e = np.random.default_rng(0), np.arange(1000) % 2
    x = rng.normal(size=(1000, 4)) * np.where(e, 1, 2)[:, None]
    probe = label_probe(x, e)
    assert probe["accuracy"] < 0.6
    assert environment_mmd(table(e), x, "e", n_permutations=99)["p_value"] == 0.01


def test_environments_at_random_are_called_as_often_as_they_should():
    rng, e = np.random.default_rng(0), np.arange(90) % 3
    found = [environment_mmd(table(e), rng.normal(size=(90, 3)), "e", n_permutations=19) for _ in range(200)]
    p = np.array([each["p_value"] for each in found])
    assert abs(np.mean(p <= 0.2) - 0.2) < 0.1 and abs(np.mean(p) - 0.525) < 0.07
    assert abs(np.mean([each["mmd"] for each in found])) < 0.002


def test_a_point_is_exactly_zero():
    found = environment_mmd(table(np.arange(40) % 4), np.ones((40, 3)), "e", n_permutations=9)
    assert found == {"mmd": 0.0, "expected": 0.0, "p_value": 1.0}


def test_what_perturbations_explain_is_no_discrepancy():
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=600)
    e = (rng.random(600) < np.where(y, 0.9, 0.1)).astype(int)  # unequally spread
    x = 3 * y[:, None] + rng.normal(size=(600, 3))
    cells = table(e, y)
    assert environment_mmd(cells, x, "e", n_permutations=49)["p_value"] == 0.02
    within = environment_mmd(cells, x, "e", y_key="y", n_permutations=49)
    assert within["p_value"] > 0.05 and within["expected"] == pytest.approx(within["mmd"], rel=0.1)


def test_bad_input_gets_a_sentence():
    cells = table(np.arange(4))
    with pytest.raises(ValueError, match="No two environments of 'e' have two of the 4 cells"):
        environment_mmd(cells, np.zeros((4, 2)), "e")
    with pytest.raises(ValueError, match="rep has NaN"):
        environment_mmd(cells, np.full((4, 2), np.nan), "e")
    with pytest.raises(KeyError, match="obs has no 'plate'"):
        environment_mmd(cells, np.zeros((4, 2)), "plate")
    with pytest.raises(ValueError, match="n_permutations=0"):
        environment_mmd(cells, np.zeros((4, 2)), "e", n_permutations=0)
