from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_cells
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from scbd import datasets
from scbd.data import InferredEnvironments, _inferred, infer_environments
from scbd.data._inferred import _subtract_group_means


def make_features(
    n: int = 600, *, apart: float = 6.0, seed: int = 0, n_days: int = 2, loud: float = 20.0, plates: float = 4.0
) -> AnnData:
    """Return features: days shift the first by ``apart``, genes the second; the third has a large variance."""
    rng = np.random.default_rng(seed)
    gene, day, plate = rng.integers(5, size=n), rng.integers(n_days, size=n), rng.integers(3, size=n)
    values = rng.normal(size=(n, 6))
    values[:, 0] += apart * day
    values[:, 1] += 5 * gene
    values[:, 2] *= loud
    values[:, 3] += plates * plate
    obs = pd.DataFrame({"gene": gene, "day": day, "plate": plate}, index=[f"c{i}" for i in range(n)]).astype(str)
    return AnnData(values.astype(np.float32), obs=obs)


def agreement(adata: AnnData, found: InferredEnvironments, key: str = "day") -> float:
    return adjusted_rand_score(adata.obs[key], found.labels)


def test_infer_environments_separated_groups_are_found_despite_feature_of_large_variance():
    adata = make_features(loud=50.0)
    adata = AnnData(np.delete(np.asarray(adata.X), 3, axis=1), obs=adata.obs)  # no plates
    found = infer_environments(adata, "gene")
    assert agreement(adata, found) > 0.97
    assert found.labels.index.equals(adata.obs_names) and found.labels.name == "inferred_environment"
    counts = found.labels.value_counts()
    assert list(counts.index) == ["inferred_1", "inferred_2"]  # the most frequent first
    assert found.axes.shape == (600, 2) and found.axes.dtype == np.float32 and found.gain > 0.3
    # the first axis separates them
    one = (found.labels == "inferred_1").to_numpy()
    means, sds = zip(*((found.axes[part, 0].mean(), found.axes[part, 0].std()) for part in (one, ~one)), strict=True)
    assert abs(means[0] - means[1]) > 4 * max(sds)


@settings(max_examples=6)
@given(st.integers(0, 100), st.integers(2, 4))
def test_infer_environments_linearly_mixed_features_returns_equal_groups(seed, n_days):
    adata = make_features(400, seed=seed, n_days=n_days, apart=9.0)
    adata = AnnData(np.asarray(adata.X)[:, [0, 1, 4]], obs=adata.obs)
    mixed = np.random.default_rng(seed).normal(size=(3, 3)) + 3 * np.eye(3)
    other = AnnData((np.asarray(adata.X) @ mixed * 1000 + 7).astype(np.float32), obs=adata.obs)
    one, two = (infer_environments(a, "gene", n_days, seed=1) for a in (adata, other))
    assert agreement(adata, one) > 0.95
    assert adjusted_rand_score(one.labels, two.labels) > 0.99


def test_infer_environments_shifted_features_returns_equal_groups():
    adata = make_features(apart=9.0)
    one, two = (infer_environments(AnnData(adata.X.astype(float) + at, obs=adata.obs), "gene") for at in (0, 1e8))
    assert adjusted_rand_score(one.labels, two.labels) > 0.99


def test_infer_environments_perturbation_effects_are_not_groups():
    adata = make_features(apart=8.0)
    adata = AnnData(np.asarray(adata.X)[:, :2], obs=adata.obs)  # genes form five groups with larger distances
    assert agreement(adata, infer_environments(adata, "gene")) > 0.97


def test_infer_environments_e_key_given_finds_further_environment():
    adata = make_features(apart=4.5, plates=15.0)
    assert agreement(adata, infer_environments(adata, "gene", 3), "plate") > 0.95
    further = infer_environments(adata, "gene", 2, e_key="plate")
    assert agreement(adata, further) > 0.9
    assert abs(agreement(adata, further, "plate")) < 0.05


def test_infer_environments_images_returns_wells():
    screen = datasets.simulated_screen(1500, image_size=16, n_complexes=3, genes_per_complex=2, well_effect=2.0)
    found = infer_environments(screen, "gene", 6)
    assert agreement(screen, found, "well") > 0.9
    grey = infer_environments(screen, "gene", 6, channels=["DNA"])
    assert agreement(screen, grey, "well") < agreement(screen, found, "well")


def test_infer_environments_fit_or_control_given_assigns_all_cells():
    adata = make_features()
    fit = np.arange(adata.n_obs) < 300
    moved = adata.copy()
    moved.X[~fit, 4] += 100  # a group outside of fit
    found = infer_environments(moved, "gene", e_key="plate", fit=fit)
    assert adjusted_rand_score(adata.obs["day"][fit], found.labels[fit]) > 0.9
    assert found.labels.notna().all()
    more = make_features(1000)
    of_controls = infer_environments(more, "gene", e_key="plate", control="0")
    assert agreement(more, of_controls) > 0.9


def test_infer_environments_equal_seed_returns_equal_result():
    adata = make_features(apart=2.0)
    one, two = (infer_environments(adata, "gene", 3, seed=4) for _ in range(2))
    pd.testing.assert_series_equal(one.labels, two.labels)
    np.testing.assert_array_equal(one.axes, two.axes)


@pytest.mark.parametrize("seed", [1, 13, 20])
def test_infer_environments_noise_warns(seed):
    """By chance, two groups may describe held-out cells of a single group slightly better than one does."""
    rng = np.random.default_rng(seed)
    gene = np.repeat(np.arange(50), 20)
    values = 2 * rng.normal(size=(50, 6))[gene] + rng.normal(size=(1000, 6))
    adata = AnnData(values.astype(np.float32), obs=pd.DataFrame({"gene": gene}, index=[f"c{i}" for i in range(1000)]))
    with pytest.warns(UserWarning, match="do not form 2 groups"):
        assert infer_environments(adata, "gene", seed=seed).gain < 0.05


def test_infer_environments_no_groups_warns_and_gain_is_not_positive():
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"gene": rng.integers(3, size=400)}, index=[f"c{i}" for i in range(400)])
    adata = AnnData(rng.normal(size=(400, 4)).astype(np.float32), obs=obs)
    with pytest.warns(UserWarning, match="Cells of equal 'gene' do not form 6 groups: these describe new cells no"):
        assert infer_environments(adata, "gene", 6).gain <= 0


def test_infer_environments_gain_within_its_error_warns(monkeypatch):
    """The gain is compared with its standard error, even if groups are separated."""
    monkeypatch.setattr(_inferred, "_MIN_GAIN_IN_STANDARD_ERRORS", 1e6)
    with pytest.warns(UserWarning, match="do not form 2 groups"):
        assert infer_environments(make_features(), "gene").gain > 0.3


def test_infer_environments_separated_groups_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infer_environments(make_features(), "gene", e_key="plate").gain > 0.3


def test_infer_environments_single_feature_returns_one_axis():
    adata = make_features()
    found = infer_environments(AnnData(np.asarray(adata.X)[:, :1], obs=adata.obs), "gene")
    assert agreement(adata, found) > 0.97 and not found.axes[:, 1].any()


def test_infer_environments_obsm_key_given_reads_embedding():
    adata = make_features()
    adata.obsm["z"] = np.asarray(adata.X)[:, :2].copy()
    assert agreement(adata, infer_environments(adata, "gene", obsm_key="z")) > 0.97


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"n_environments": 1}, ValueError, "n_environments=1"),
        ({"y_key": "guide"}, KeyError, "guide"),
        ({"e_key": "site"}, KeyError, "site"),
        ({"n_environments": 11}, ValueError, "100 cells to learn 11 .* 110"),
        ({"fit": np.arange(100) < 5}, ValueError, "5 cells to learn 2"),
        ({"fit": np.arange(100)}, ValueError, "fit"),
        ({"fit": np.ones(99, dtype=bool)}, ValueError, "fit"),
        ({"control": "DMSO"}, ValueError, "DMSO"),
        ({"layer": "same"}, ValueError, "same .* at equal label"),
        ({"layer": "missing"}, ValueError, r"1 cell \(rows 3\)"),
    ],
)
def test_infer_environments_invalid_input_raises(how, error, said):
    adata = make_features(100)
    adata.layers["same"], adata.layers["missing"] = np.ones_like(adata.X), np.array(adata.X)
    adata.layers["missing"][3, 2] = np.nan
    with pytest.raises(error, match=said):
        infer_environments(adata, **{"y_key": "gene", **how})


def test_infer_environments_missing_label_raises():
    cells = make_cells()
    cells.obs.loc[cells.obs_names[2], "gene"] = np.nan
    with pytest.raises(ValueError, match="1 of 96 cells"):
        infer_environments(cells, "gene")


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(-12, 12))
def test_subtract_group_means_any_units_is_equal_to_least_squares(seed, exponent):
    """Regression: the iteration ended when the feature in the largest unit had converged."""
    rng = np.random.default_rng(seed)
    n = 200
    one = rng.integers(5, size=n)
    other = np.where(rng.random(n) < 0.7, one, rng.integers(5, size=n))  # mostly equal, so that convergence is slow
    values = np.column_stack([rng.normal(size=n), one + 3 * other + rng.normal(size=n)])
    units = 10.0 ** np.array([-exponent, exponent])
    left = _subtract_group_means(values * units, [one, other]) / units
    design = np.column_stack([one[:, None] == np.arange(5), other[:, None] == np.arange(5)]).astype(float)
    expected = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    np.testing.assert_allclose(left, expected, atol=1e-4)


def test_infer_environments_features_in_small_units_are_used():
    adata = make_features()
    adata.X = adata.X * np.where(np.arange(6) == 2, 1e6, 1e-4).astype(np.float32)
    assert agreement(adata, infer_environments(adata, ["gene", "plate"], 2)) > 0.95
