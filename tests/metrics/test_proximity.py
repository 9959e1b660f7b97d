from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import proximity
from scipy import sparse

from scbd.metrics import _proximity as module
from scbd.metrics import proximity_bias


def profiles(x: np.ndarray, arms) -> AnnData:
    obs = pd.DataFrame({"arm": np.asarray(arms).astype(str)}, index=[f"G{i}" for i in range(len(arms))])
    return AnnData(X=x, obs=obs)


@given(seed=st.integers(0, 1000), n=st.integers(4, 25), coarse=st.booleans(), block=st.sampled_from([1 << 22, 40]))
def test_it_equals_the_loops(seed, n, coarse, block):
    """With ties, arms of one gene, and profiles of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, size=(n, 2)).astype(float) if coarse else rng.normal(size=(n, 4))
    arms = np.array(["1p", "1p", "2q", *rng.choice(["1p", "2q", "3q", "4p"], size=n - 3)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_BLOCK", block)
        table = proximity_bias(profiles(x, arms), "arm", n_permutations=1)
    expected = proximity.of_genes(x, arms.tolist())
    assert table.index.to_list() == ["all", *sorted(expected)]
    for arm, values in expected.items():
        assert table.loc[arm, "probability"] == pytest.approx(np.mean(values), abs=1e-6)
        assert table.loc[arm, "n_genes"] == len(values)
    everything = [value for values in expected.values() for value in values]
    assert table.loc["all", "probability"] == pytest.approx(np.mean(everything), abs=1e-6)


def test_arms_that_look_alike_are_found():
    rng = np.random.default_rng(0)
    arms = np.repeat([f"{i}q" for i in range(1, 9)], 12)
    x = rng.normal(size=(96, 20))
    x[arms == "3q"] += 2 * rng.normal(size=20)
    table = proximity_bias(profiles(x, arms), "arm", n_permutations=300)
    assert table.loc["3q", "probability"] > 0.95
    assert table.index[table["q_value"] < 0.05].to_list() == ["all", "3q"]
    assert (table.drop(["all", "3q"])["probability"] - 0.5).abs().max() < 0.15
    assert table.equals(proximity_bias(profiles(sparse.csr_matrix(x), arms), "arm", n_permutations=300))


def test_p_values_are_those_of_chance():
    rng = np.random.default_rng(0)
    arms = rng.choice(["1p", "1q", "2p"], size=40)
    found = [proximity_bias(profiles(rng.normal(size=(40, 5)), arms), "arm", n_permutations=40) for _ in range(150)]
    p = pd.concat(found)["p_value"]
    for at in (0.1, 0.5):
        assert abs((p <= at).mean() - at) < 0.06
    assert pd.concat(found).loc["all", "probability"].mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("at", [0.0, 3.3])
def test_a_point_is_at_chance(at):
    table = proximity_bias(profiles(np.full((9, 4), at), list("aaabbbccc")), "arm", n_permutations=20)
    assert (table["probability"] == 0.5).all() and (table[["p_value", "q_value"]] == 1).all(axis=None)


def test_bad_input_gets_a_sentence():
    x = np.eye(4)
    for arms, said in {
        "aaaa": "has 1 arms, the largest of 4 genes",
        "abcd": "has 4 arms, the largest of 1 genes",
    }.items():
        with pytest.raises(ValueError, match=said):
            proximity_bias(profiles(x, list(arms)), "arm")
    with pytest.raises(KeyError, match="obs has no 'chromosome'"):
        proximity_bias(profiles(x, list("aabb")), "chromosome")
    with pytest.raises(ValueError, match="n_permutations=0: give"):
        proximity_bias(profiles(x, list("aabb")), "arm", n_permutations=0)
    table = profiles(x, list("aabb"))
    table.obs.loc["G1", "arm"] = None
    with pytest.raises(ValueError, match=r"obs\['arm'\] has no value for 1 of 4"):
        proximity_bias(table, "arm")
    table = profiles(x, list("aabb"))
    table.obs_names = ["A", "A", "B", "C"]
    with pytest.raises(ValueError, match=r"1 genes have several profiles \(A\): average them"):
        proximity_bias(table, "arm")
    table = profiles(x, list("aabb"))
    table.X[0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 4 rows"):
        proximity_bias(table, "arm")
