from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

from scbd.metrics import profile_uncertainty

KEYS: dict[str, Any] = {"y_key": "gene", "unit_key": "well"}


def table(z, genes, wells) -> AnnData:
    obs = pd.DataFrame({"gene": genes, "well": wells}, index=[f"c{i}" for i in range(len(z))])
    return AnnData(obs=obs, obsm={"X": np.asarray(z, dtype=np.float32)})


def cells_of(n_genes: int, n_wells: int, n_cells: int, well_sd: float, seed: int = 0, width: int = 8) -> AnnData:
    """Genes without effect; what a well adds is its own for each gene."""
    rng = np.random.default_rng(seed)
    of_well = well_sd * rng.normal(size=(n_genes, n_wells, 1, width))
    z = (of_well + rng.normal(size=(n_genes, n_wells, n_cells, width))).reshape(-1, width)
    genes = np.repeat([f"g{i:03}" for i in range(n_genes)], n_wells * n_cells)
    wells = np.tile(np.repeat([f"w{i:02}" for i in range(n_wells)], n_cells), n_genes)
    return table(z, genes, wells)


@pytest.mark.parametrize("n_wells", [3, 20])
def test_the_error_is_that_of_wells(n_wells):
    """Profiles are 0 in truth: their squared length is their error."""
    found = profile_uncertainty(cells_of(200, n_wells, 10, well_sd=1.0), "X", **KEYS)
    truth = np.sqrt(np.square(found["length"]).mean())
    assert np.sqrt(np.square(found["standard_error"]).mean()) == pytest.approx(truth, rel=0.1)
    assert truth == pytest.approx(np.sqrt(8 * (1 / n_wells + 1 / (10 * n_wells))), rel=0.1)
    assert found["standard_error_of_cells"].mean() < 0.6 * truth  # as if cells were independent
    assert (found["n_units"] == n_wells).all() and (found["n_cells"] == 10 * n_wells).all()


@pytest.mark.parametrize("n_cells", [[300, 5, 5, 5, 5, 5], [20, 10, 5, 10, 20, 3], [80, 20]])
def test_the_error_is_that_of_wells_of_any_size(n_cells):
    """The mean over cells is mostly that of the largest wells, and no surer than these."""
    adata = cells_of(200, len(n_cells), max(n_cells), well_sd=1.0)
    kept = np.arange(max(n_cells)) < np.array(n_cells)[:, None]
    found = profile_uncertainty(adata[np.tile(kept.ravel(), 200)].copy(), "X", **KEYS)
    truth = np.square(found["length"]).mean()
    assert np.square(found["standard_error"]).mean() == pytest.approx(truth, rel=0.15)


def test_a_single_draw_of_each_well_once_moves_nothing():
    adata = cells_of(1, 2, 5, well_sd=1.0)
    errors = [profile_uncertainty(adata, "X", **KEYS, n_draws=1, seed=s)["standard_error"].iloc[0] for s in range(9)]
    assert 0 in errors and np.isfinite(errors).all()


def test_without_well_effects_both_errors_are_one():
    found = profile_uncertainty(cells_of(100, 20, 10, well_sd=0.0), "X", **KEYS)
    assert found["standard_error"].mean() == pytest.approx(found["standard_error_of_cells"].mean(), rel=0.1)


def test_wells_that_agree_have_one_direction():
    adata = cells_of(40, 4, 5, well_sd=0.3)
    strong = (adata.obs["gene"] >= "g020").to_numpy()
    adata.obsm["X"][strong, 0] += 10
    found = profile_uncertainty(adata, "X", **KEYS)
    assert found["direction"].iloc[20:].min() > 0.98 > 0.9 > found["direction"].iloc[:20].mean()


def test_profiles_are_seen_from_the_controls():
    adata = cells_of(6, 4, 5, well_sd=0.3)
    adata.obsm["X"] += 7
    plain, seen = (profile_uncertainty(adata, "X", **KEYS, control=control) for control in (None, "g003"))
    assert plain["length"].min() > 15 and seen["length"].max() < 3
    control = seen.loc["g003"]
    assert control["length"] == pytest.approx(0, abs=1e-4)
    assert np.isnan(control[["standard_error", "standard_error_of_cells", "direction"]]).all()
    assert np.isfinite(seen.drop("g003")).all(axis=None)


@pytest.mark.parametrize(
    ("perturbed", "controls"),
    [
        (range(6), range(6)),
        (range(3), range(6)),
        (range(4), range(2, 8)),
        (range(8), range(8, 10)),
        (range(2), range(2, 40)),
    ],
)
def test_the_error_beside_controls_is_that_of_the_units_of_both(perturbed, controls):
    """What a unit adds is added to all of its cells. In truth nothing was done: the length is the error."""
    rng = np.random.default_rng(0)
    of_unit = rng.normal(size=(40, 2_000))
    genes = np.repeat(["a", "c"], [10 * len(perturbed), 10 * len(controls)])
    units = np.repeat([*perturbed, *controls], 10)
    adata = table(of_unit[units] + 0.5 * rng.normal(size=(len(units), 2_000)), genes, [f"w{u}" for u in units])
    found = profile_uncertainty(adata, "X", **KEYS, control="c", n_draws=1_000).loc["a"]
    assert found["standard_error"] == pytest.approx(found["length"], rel=0.2)
    assert found["standard_error_of_cells"] == pytest.approx(
        np.sqrt(2_000 * 1.25 * (1 / (10 * len(perturbed)) + 1 / (10 * len(controls)))), rel=0.2
    )


def test_of_controls_in_one_unit_no_error_is_known(caplog):
    adata = cells_of(3, 2, 4, well_sd=1.0)
    adata = adata[~((adata.obs["gene"] == "g001") & (adata.obs["well"] == "w01"))].copy()
    found = profile_uncertainty(adata, "X", **KEYS, control="g001")
    assert found[["standard_error", "direction"]].isna().all(axis=None)
    assert "All controls are in one unit" in caplog.text


@given(seed=st.integers(0, 20), n_cells=st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_draws_are_those_of_the_naive_form(seed, n_cells):
    """Wells of unequal size, drawn one by one with all of their cells."""
    rng = np.random.default_rng(seed)
    wells = np.repeat(np.arange(len(n_cells)), n_cells)
    z = rng.normal(size=(len(wells), 3)) + 2 * rng.normal(size=(len(n_cells), 3))[wells]
    found = profile_uncertainty(table(z, "g", [f"w{w}" for w in wells]), "X", **KEYS, n_draws=3000).iloc[0]
    z = z.astype(np.float32).astype(float)
    share = np.array(n_cells) / len(wells)
    errors, seen = [], []
    for _ in range(3000):
        drawn = np.concatenate([np.flatnonzero(wells == w) for w in rng.integers(len(n_cells), size=len(n_cells))])
        errors.append(((z[drawn].mean(0) - z.mean(0)) ** 2).sum())
        seen.append(sum((np.mean(wells[drawn] == w) - share[w]) ** 2 for w in range(len(n_cells))))
    expected = np.sqrt(np.mean(errors) / np.mean(seen) * np.square(share).sum())
    assert found["standard_error"] == pytest.approx(expected, rel=0.1)
    assert found["length"] == pytest.approx(np.linalg.norm(z.mean(0)), rel=1e-5)


def test_of_a_single_well_nothing_is_known(caplog):
    adata = cells_of(3, 2, 4, well_sd=1.0)
    adata = adata[~((adata.obs["gene"] == "g001") & (adata.obs["well"] == "w01"))].copy()
    found = profile_uncertainty(adata, "X", **KEYS)
    assert np.isnan(found.loc["g001", ["standard_error", "direction"]]).all()
    assert np.isfinite(found.drop("g001")).all(axis=None)
    assert "1 perturbations are in one unit, and their error is not known (g001)" in caplog.text


def test_bad_input_gets_a_sentence():
    adata = cells_of(2, 2, 2, well_sd=1.0)
    with pytest.raises(KeyError, match="obs has no 'wel'"):
        profile_uncertainty(adata, "X", y_key="gene", unit_key="wel")
    with pytest.raises(ValueError, match="No row has the control 'none'"):
        profile_uncertainty(adata, "X", **KEYS, control="none")
    with pytest.raises(ValueError, match="n_draws=0: give"):
        profile_uncertainty(adata, "X", **KEYS, n_draws=0)
    adata.obsm["X"][0, 0] = np.nan
    with pytest.raises(ValueError, match="rep has NaN"):
        profile_uncertainty(adata, "X", **KEYS)
