from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given, settings
from hypothesis import strategies as st

from scbd.metrics import perturbation_effects

KEYS: dict[str, Any] = {"y_key": "y", "control": "DMSO"}
# these tests use independent rows, more per environment than there would be wells
MANY = pytest.mark.filterwarnings("ignore:Perturbations have .* rows in an environment")


def make_table(y: np.ndarray, e: np.ndarray) -> AnnData:
    return AnnData(obs=pd.DataFrame({"y": y.astype(str), "e": e.astype(str)}, index=np.arange(len(y)).astype(str)))


def naive_energy(x: np.ndarray, c: np.ndarray) -> float:
    def mean(pairs: Any) -> Any:
        return np.mean([np.linalg.norm(a - b) for a, b in pairs])

    across = mean([(a, b) for a in x for b in c])
    return float(2 * across - mean(combinations(x, 2)) - mean(combinations(c, 2)))


def naive_magnitude(x: np.ndarray, e: np.ndarray, n: int) -> float:
    """Return the energy distance of the first ``n`` rows minus its mean over all permutations within environments."""

    def energy(chosen: tuple[int, ...]) -> float:
        return naive_energy(x[list(chosen)], np.delete(x, chosen, axis=0))

    every = (chosen for chosen in combinations(range(len(x)), n) if sorted(e[list(chosen)]) == sorted(e[:n]))
    return energy(tuple(range(n))) - float(np.mean([energy(chosen) for chosen in every]))


def naive_consistency(x: np.ndarray, e: np.ndarray, centre: np.ndarray) -> float:
    unit = (x - centre) / np.linalg.norm(x - centre, axis=1, keepdims=True)
    several = len(set(e)) > 1
    return float(np.mean([unit[i] @ unit[j] for i, j in combinations(range(len(x)), 2) if not several or e[i] != e[j]]))


@given(seed=st.integers(0, 1000), n_plates=st.integers(1, 3))
@settings(max_examples=20)
def test_perturbation_effects_random_table_is_equal_to_naive(seed, n_plates):
    rng = np.random.default_rng(seed)
    y = np.array(["DMSO"] * 6 + ["a"] * 4 + ["b"] * 5)
    e = np.concatenate([np.arange(len(part)) % n_plates for part in (y[:6], y[6:10], y[10:])])
    x = rng.normal(size=(15, 3))
    found = perturbation_effects(make_table(y, e), x, e_key="e", n_permutations=1, **KEYS)
    assert found.index.to_list() == ["a", "b"] and found["n"].to_list() == [4, 5]
    for name in "ab":
        of = y == name
        magnitude = naive_magnitude(np.concatenate([x[of], x[:6]]), np.concatenate([e[of], e[:6]]), of.sum())
        assert found.loc[name, "magnitude"] == pytest.approx(magnitude)
        expected = naive_consistency(x[of], e[of], x[:6].mean(0))
        assert found.loc[name, "consistency"] == pytest.approx(expected, abs=1e-9)


def test_perturbation_effects_strong_and_consistent_are_distinguished():
    rng = np.random.default_rng(0)
    y = np.repeat(["DMSO", "nothing", "consistent", "strong"], [200, 20, 20, 20])
    x = rng.normal(size=(260, 5))
    x[y == "consistent"] += [2, 0, 0, 0, 0]
    x[y == "strong"] *= 3  # larger variance in all directions, without a mean shift
    found = perturbation_effects(make_table(y, np.arange(260) % 4), x, e_key="e", n_permutations=200, **KEYS)
    called = found[["magnitude_q", "consistency_q"]] < 0.05
    assert called.loc["consistent"].all() and called.loc["strong"].to_list() == [True, False]
    assert not called.loc["nothing"].any()


@MANY
def test_perturbation_effects_plate_effect_is_not_significant():
    """A perturbation on one plate shows the effect of this plate, unless labels are permuted within plates."""
    rng = np.random.default_rng(0)
    e = np.repeat([0, 1], 60)
    y = np.where((e == 1) & (np.arange(120) % 3 == 0), "a", "DMSO")
    x = rng.normal(size=(120, 4)) + 2 * e[:, None]
    one, other = (
        perturbation_effects(make_table(y, e), x, e_key=k, n_permutations=100, **KEYS).loc["a"] for k in (None, "e")
    )
    assert one["magnitude"] > 1 > 0.2 > abs(other["magnitude"])
    assert one["magnitude_p"] < 0.02 < 0.05 < other["magnitude_p"]
    assert np.isfinite(one["consistency"]) and np.isnan(other["consistency"])  # not defined for a single plate


@pytest.mark.parametrize("n_plates", [2, 20])
def test_perturbation_effects_no_effect_mean_magnitude_is_zero(n_plates):
    """The perturbation is on two plates, unevenly; the other plates have no information on it."""
    e = np.concatenate([[0] * 5 + [1] * 2, np.repeat(np.arange(n_plates), 10)])
    y = np.repeat(["a", "DMSO"], [7, 10 * n_plates])
    magnitudes = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = 2 * rng.normal(size=(n_plates, 6))[e] + rng.normal(size=(len(e), 6))
        found = perturbation_effects(make_table(y, e), x, e_key="e", n_permutations=1, **KEYS)
        magnitudes.append(found.loc["a", "magnitude"])
    assert abs(np.mean(magnitudes)) < 3 * np.std(magnitudes) / np.sqrt(60) < 0.15


def test_perturbation_effects_environment_without_controls_returns_nan():
    y = np.array(["DMSO"] * 4 + ["a"] * 3 + ["b"] * 3)
    e = np.array([0] * 4 + [0, 0, 0] + [1, 1, 1])
    found = perturbation_effects(make_table(y, e), np.random.default_rng(0).normal(size=(10, 2)), e_key="e", **KEYS)
    assert found.loc["b"].drop("n").isna().all() and np.isfinite(found.loc["a", "magnitude_q"])


@MANY
def test_perturbation_effects_no_effect_p_values_are_uniform():
    """Perturbed rows are mostly in one environment, controls in others, and the mean of few controls is uncertain."""
    rng = np.random.default_rng(0)
    y = np.repeat(["DMSO", "a"], [20, 16])
    p = []
    for _ in range(150):
        e = np.where(y == "a", rng.choice(3, 36, p=[0.7, 0.15, 0.15]), rng.choice(3, 36, p=[0.2, 0.4, 0.4]))
        x = rng.normal(size=(36, 20)) + 2 * rng.normal(size=(3, 20))[e]
        p.append(perturbation_effects(make_table(y, e), x, e_key="e", n_permutations=39, **KEYS).loc["a"])
    for name in ("magnitude_p", "consistency_p"):
        values = np.array([of[name] for of in p])
        assert np.abs([(values <= level).mean() - level for level in (0.1, 0.25, 0.5, 0.75)]).max() < 0.12


@MANY
def test_perturbation_effects_max_cells_limits_n():
    y = np.repeat(["DMSO", "few", "many"], [20, 5, 40])
    x = np.random.default_rng(0).normal(size=(65, 3))
    found = perturbation_effects(make_table(y, np.zeros(65)), x, max_cells=12, n_permutations=1, **KEYS)
    assert found["n"].to_dict() == {"few": 5, "many": 12}


def test_perturbation_effects_many_rows_per_environment_warns():
    """The number of rows that most perturbations have per environment decides; controls and environments do not."""
    y, e = np.repeat(["DMSO", "a", "b", "c"], [40, 18, 18, 80]), np.arange(156) % 2
    x = np.random.default_rng(0).normal(size=(156, 3))
    with pytest.warns(UserWarning, match="9 rows in an environment"):
        perturbation_effects(make_table(y, e), x, e_key="e", n_permutations=1, **KEYS)
    few = np.flatnonzero(~np.isin(np.arange(156), [40, 41, 58, 59]))
    perturbation_effects(make_table(y[few], e[few]), x[few], e_key="e", n_permutations=1, **KEYS)


def test_perturbation_effects_point_is_zero_and_single_row_nan():
    y = np.array(["DMSO"] * 4 + ["a"] * 3 + ["b"])
    found = perturbation_effects(make_table(y, np.zeros(8)), np.full((8, 2), 0.1), n_permutations=20, **KEYS)
    assert (found["magnitude"] == 0).all() and (found["magnitude_p"] == 1).all()
    assert found.loc["a", "consistency"] == 0 and found["consistency"].isna().to_list() == [False, True]


@pytest.mark.parametrize(
    ("names", "error", "how"),
    [
        ("1 of 3 rows are controls", ValueError, KEYS),
        ("control 'water'", ValueError, {"y_key": "y", "control": "water"}),
        ("max_cells=0", ValueError, KEYS | {"max_cells": 0}),
        ("'z'", KeyError, {"y_key": "z", "control": "DMSO"}),
    ],
)
def test_perturbation_effects_invalid_input_raises(names, error, how):
    with pytest.raises(error, match=names):
        perturbation_effects(make_table(np.array(["DMSO", "a", "a"]), np.zeros(3)), np.eye(3), **how)


def test_perturbation_effects_trained_on_perturbation_warns():
    y = np.repeat(["DMSO", "a", "b"], [8, 4, 4])
    adata, x = make_table(y, np.tile(["p", "q"], 8)), np.random.default_rng(0).normal(size=(16, 3))
    with pytest.warns(UserWarning, match=r"1 of 2 perturbations .*\(a\)"):
        perturbation_effects(adata, x, trained_on=[9], n_permutations=5, **KEYS)
    perturbation_effects(adata, x, trained_on=[0], n_permutations=5, **KEYS)
