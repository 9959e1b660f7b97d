from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import anova

from scbd.metrics import variance_table


def make_table(x: np.ndarray, **columns) -> AnnData:
    obs = pd.DataFrame({name: np.asarray(values) for name, values in columns.items()})
    return AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"Z": x})


def compute_shares(x: np.ndarray, factors=None, **columns) -> pd.DataFrame:
    return variance_table(make_table(x, **columns), ["Z"], factors or list(columns)).set_index("factor")


@given(seed=st.integers(0, 1000), n=st.integers(8, 40), offset=st.sampled_from([0.0, 1e3]))
def test_variance_table_random_factors_are_equal_to_naive(seed, n, offset):
    """Factors are correlated or nested, and labels may be nearly as many as cells."""
    rng = np.random.default_rng(seed)
    y, e = rng.integers(rng.integers(1, n), size=n).astype(str), rng.integers(3, size=n).astype(str)
    well = np.char.add(e, rng.integers(2, size=n).astype(str))  # each well is in one environment
    count = rng.normal(size=n) + e.astype(int)
    x = rng.normal(size=(n, 3)) * [1, 2, 5] + offset + e.astype(int)[:, None]
    shares = compute_shares(x, y=y, e=e, well=well, count=count)
    columns = {name: anova.dummies(labels) for name, labels in {"y": y, "e": e, "well": well}.items()}
    z = (count - count.mean()) / count.std()
    columns["count"] = np.stack([z, z**2], axis=1)
    whole = anova.share_of_columns(x, *columns.values())
    for name, labels in {"y": y, "e": e, "well": well}.items():
        assert shares.loc[name, "share"] == pytest.approx(anova.share_of_labels(x, labels), abs=1e-9)
        assert shares.loc[name, "chance"] == (len(set(labels)) - 1) / (n - 1)
    assert shares.loc["count", "share"] == pytest.approx(anova.share_of_columns(x, columns["count"]), abs=1e-9)
    for name in columns:
        rest = anova.share_of_columns(x, *(other for key, other in columns.items() if key != name))
        assert shares.loc[name, "alone"] == pytest.approx(whole - rest, abs=1e-8)
    assert shares["kind"].to_list() == ["labels"] * 3 + ["numbers"]


def test_variance_table_only_independent_factors_add_up():
    rng = np.random.default_rng(0)
    y, e = np.divmod(np.arange(600) % 12, 4)
    x = 2 * rng.normal(size=(3, 5))[y] + rng.normal(size=(4, 5))[e] + 0.1 * rng.normal(size=(600, 5))
    names = {"y": y.astype(str), "e": e.astype(str)}
    shares = compute_shares(x, **names)
    assert shares["share"].sum() == pytest.approx(1, abs=0.02)
    np.testing.assert_allclose(shares["share"], shares["alone"], atol=1e-12)
    both = compute_shares(x, **names, again=names["e"])
    assert both.loc["e", "share"] == both.loc["again", "share"] == pytest.approx(shares.loc["e", "share"])
    assert both.loc["e", "alone"] < 1e-12 and both.loc["y", "alone"] == pytest.approx(shares.loc["y", "alone"])


def test_variance_table_unrelated_factors_are_at_chance():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 100)), rng.integers(80, size=400).astype(str)
    row, column = rng.integers(16, size=400), rng.integers(24, size=400)
    shares = compute_shares(x, {"y": "y", "place": ["row", "column"]}, y=y, row=row, column=column)
    assert shares["chance"].to_list() == [(len(set(y)) - 1) / 399, 5 / 399]
    np.testing.assert_allclose(shares["share"], shares["chance"], rtol=0.2)
    np.testing.assert_allclose(shares["alone"], shares["chance"], rtol=0.2)


def test_variance_table_numbers_fit_a_surface_and_crosses_are_labels():
    row, column = np.divmod(np.arange(384), 24)
    edge = np.square(row - 7.5) + row * column
    letters = np.array(list("ABCDEFGHIJKLMNOP"))[row]
    x = np.stack([edge, 0 * edge], axis=1)
    factors = {"surface": ["row", "column"], "row": "row", "cells": ["letter", "column"], "flag": "flag"}
    shares = compute_shares(x, factors, row=row, column=column, letter=letters, flag=row > 3)
    assert shares.loc[["surface", "cells"], "share"].to_list() == pytest.approx([1, 1])
    assert shares.loc["row", "share"] < 0.9
    assert shares["kind"].to_list() == ["numbers", "numbers", "labels", "labels"]
    assert (shares["chance"] * 383).round(9).to_list() == [5, 2, 383, 1]


def test_variance_table_point_is_nan_and_constant_factor_zero():
    e = np.arange(60) % 3
    for at in (0.0, 0.1, 1e6):
        shares = compute_shares(np.full((60, 4), at, dtype=np.float32), e=e.astype(str))
        assert np.isnan(shares[["share", "alone"]]).all(axis=None) and shares["chance"].notna().all()
    shares = compute_shares(
        np.full((3001, 4), 123.456), e=(np.arange(3001) % 3).astype(str)
    )  # the plain sum of these values has a rounding error
    assert np.isnan(shares[["share", "alone"]]).all(axis=None)
    factors = {"one": np.ones(60), "name": ["a"] * 60, "rounded": np.where(e == 0, 0.3, 0.1 + 0.2), "e": e}
    shares = compute_shares(np.random.default_rng(0).normal(size=(60, 4)), **factors)
    assert shares.loc[["one", "name", "rounded"], ["share", "chance", "alone"]].abs().max(axis=None) < 1e-12


def test_variance_table_several_keys_and_max_cells_return_expected():
    adata = make_table(np.random.default_rng(0).normal(size=(90, 3)), e=["a", "b", "c"] * 30)
    adata.obsm["W"] = 2 * adata.obsm["Z"]
    both = variance_table(adata, {"ours": ["Z", "W"]}, ["e"])
    assert both["key"].to_list() == ["Z", "W"] and both["share"].nunique() <= 2
    np.testing.assert_allclose(both["share"].iloc[0], both["share"].iloc[1])
    part = variance_table(adata, ["Z"], ["e"], max_cells=40, seed=1)
    assert part["chance"].to_list() == [2 / 39]
    assert part.equals(variance_table(adata, ["Z"], ["e"], max_cells=40, seed=1))


@pytest.mark.parametrize(
    ("names", "factors", "how"),
    [
        (r"obs\['area'\].* 1 of 5 cells", ["area"], {}),
        (r"obs\['hole'\].* 1 of 5 cells", ["hole"], {}),
        ("0 factors", [], {}),
        ("max_cells=2", ["e"], {"max_cells": 2}),
        ("NaN or infinite values in 1 of 5 cells", ["e"], {"Z": np.inf}),
    ],
)
def test_variance_table_invalid_input_raises(names, factors, how):
    adata = make_table(np.ones((5, 2)), e=list("aabbc"), area=[1.0, 2, np.nan, 4, 5], hole=["a", None, "b", "b", "a"])
    adata.obsm["Z"][3] = how.pop("Z", 1)
    with pytest.raises(ValueError, match=names):
        variance_table(adata, ["Z"], factors, **how)
    with pytest.raises(KeyError, match="'well'"):
        variance_table(adata, ["Z"], {"place": ["e", "well"]})
