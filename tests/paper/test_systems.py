from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import AnnData
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from paper.systems import FEATURES, MODEL_SPACE, SYSTEMS, TRAINING_SPACE, as_measured, best_setting, settings_of
from paper.trials import Trial
from scbd.metrics import label_probe


def test_best_setting_two_seeds_returns_best_mean():
    """The small learning rate is better for the first seed, and worse on average."""
    accuracy = pd.Series([0.9, 0.8, 0.1, 0.7])
    assert best_setting(accuracy, pd.Series(["small", "large", "small", "large"])) == "large"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8)), min_size=1))
def test_best_setting_any_runs_returns_highest_mean(runs):
    of: dict[str, list[int]] = {}
    for setting, accuracy in runs:
        of.setdefault(setting, []).append(accuracy)
    means = {setting: sum(accuracies) / len(accuracies) for setting, accuracies in of.items()}
    settings, accuracies = zip(*runs, strict=True)
    assert means[best_setting(pd.Series(accuracies), pd.Series(settings))] == max(means.values())


def test_best_setting_equal_means_returns_first():
    assert best_setting(pd.Series([0.5, 0.5]), pd.Series(["z", "a"])) == "z"


def test_best_setting_other_index_returns_same_setting():
    accuracy = pd.Series([0.2, 0.9], index=[7, 3])
    assert best_setting(accuracy, pd.Series(["a", "b"])) == "b"


@given(st.lists(st.integers(0, 8), min_size=4, max_size=4), st.integers(0, 1))
def test_best_setting_setting_with_nan_is_not_chosen_all_nan_raises(accuracies, lost):
    accuracy = pd.Series(accuracies, dtype=float)
    accuracy[2 * lost] = np.nan
    setting = pd.Series(["a", "a", "b", "b"])
    assert best_setting(accuracy, setting) == ("a" if lost else "b")
    accuracy[3 - 2 * lost] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        best_setting(accuracy, setting)


def test_settings_of_model_space_has_sizes_of_the_paper():
    """The sizes equal the table of the search space in the appendix of the paper."""
    assert set(MODEL_SPACE) <= set(SYSTEMS)
    sizes = {system: len(settings_of(space)) for system, space in MODEL_SPACE.items()}
    assert sizes == {"ERM": 1, "CORAL": 3, "DANN": 3, "IRM": 4, "Fish": 6, "Group DRO": 1, "iVAE": 1}
    assert len(settings_of(TRAINING_SPACE)) == 9


CELLPROFILER: dict[str, Any] = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}


def test_cellprofiler_features_well_shift_is_standardised_on_controls():
    """Wells shift and scale all features. Missing values and constant features count as typical."""
    rng = np.random.default_rng(0)
    well, gene = rng.integers(3, size=600), rng.choice(["A", "nontargeting"], 600)
    truth = rng.normal(size=(600, 3)) + 4.0 * (gene == "A")[:, None]
    table = np.column_stack([(truth + 10 * well[:, None]) * (1 + well[:, None]), np.ones(600)])
    table[0, 1] = np.nan
    obs = pd.DataFrame({"well": well.astype(str), "gene": gene}, index=map(str, range(600)))
    adata = AnnData(obs=obs, obsm={"X_cellprofiler": table})
    z = FEATURES["CellProfiler"](adata, **CELLPROFILER, n_components=64)
    assert z.shape == (600, 3) and z.dtype == np.float32 and np.isfinite(z).all()
    control = gene == "nontargeting"
    means = np.stack([z[control & (well == i)].mean(0) for i in range(3)])
    np.testing.assert_allclose(means, np.broadcast_to(means[0], means.shape), atol=0.02)
    assert label_probe(z, obs["well"])["f1"] < 0.45 < 0.9 < label_probe(z, obs["gene"])["f1"]


def cellprofiler_at_once(features: np.ndarray, wells: np.ndarray, is_control: np.ndarray, n: int) -> np.ndarray:
    """Compute the embedding from the whole table at once, with scikit-learn."""
    features = np.where(np.isfinite(features), features, np.nan).astype(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # features without any value
        for well in np.unique(wells):
            learned = features[(wells == well) & is_control]
            sd = np.nanstd(learned, axis=0, ddof=1)
            features[wells == well] -= np.nanmean(learned, axis=0)
            features[wells == well] /= np.where(sd > 0, sd, np.inf)
    features = np.nan_to_num(features).clip(-10, 10)
    return PCA(n, svd_solver="full").fit_transform(features[:, np.ptp(features, axis=0) > 0])


def make_cellprofiler_screen(n: int, d: int, rng: np.random.Generator) -> AnnData:
    well, gene = rng.integers(5, size=n), rng.choice(["A", "B", "nontargeting"], n)
    table = rng.normal(size=(n, d)) @ (rng.normal(size=(d, d)) * 2.0 ** -np.arange(d)[:, None])
    obs = pd.DataFrame({"well": well.astype(str), "gene": gene}, index=map(str, range(n)))
    return AnnData(obs=obs, obsm={"X_cellprofiler": (table + 10 * well[:, None]).astype(np.float32)})


@pytest.mark.parametrize("n", [40, 20_000])
@pytest.mark.parametrize("on_disk", [False, True])
def test_cellprofiler_features_in_blocks_are_equal_to_naive(n, on_disk):
    adata = make_cellprofiler_screen(n, 8, np.random.default_rng(n))
    table, wells = adata.obsm["X_cellprofiler"], adata.obs["well"].to_numpy()
    table[3] *= 1e6  # beyond ten standard deviations
    table[:, 1] += 1e4
    table[:, 4] = 7
    table[wells == "2", 5] = 7  # constant in a well
    table[7:20, 2], table[5, 6] = np.nan, np.inf
    table[np.flatnonzero(wells == "3")[1:], 3] = np.nan
    adata.obs.loc[wells == "4", "gene"] = "A"  # no controls
    adata.obs.iloc[np.flatnonzero(wells == "0")[1:], 1] = "A"
    adata.obs.iloc[np.flatnonzero(wells == "0")[:1], 1] = "nontargeting"  # one control
    expected = cellprofiler_at_once(table, wells, (adata.obs["gene"] == "nontargeting").to_numpy(), 5)
    if on_disk:
        adata.obsm["X_cellprofiler"] = zarr.create_array(store={}, data=table, chunks=(1000, 8))
    found = FEATURES["CellProfiler"](adata, **CELLPROFILER, n_components=5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_cellprofiler_features_memory_does_not_grow_with_table():
    peaks = []
    for n in (20_000, 100_000):
        adata = make_cellprofiler_screen(n, 40, np.random.default_rng(0))
        tracemalloc.start()
        FEATURES["CellProfiler"](adata, **CELLPROFILER, n_components=4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 80_000 * 40  # at most one byte per added value, including the components


@pytest.mark.parametrize("system", SYSTEMS)
def test_as_measured_unseen_environment_is_not_standardised(system):
    cells = make_cells()
    SYSTEMS[system].setup_anndata(cells, y_key="gene", e_key="well")
    model = {"control": "gene_2"} if system == "mcVAE" else {}
    seen = Trial("new environments", "", system, model={"standardize_by": "auto"} | model)
    unseen = Trial("domain generalization", "", system, model=model)
    assert SYSTEMS[system](cells, **as_measured(seen, {}, cells)[0]).module.preprocess.environments is not None
    preprocess = SYSTEMS[system](cells, **as_measured(unseen, {}, cells)[0]).module.preprocess
    assert preprocess.environments is None and not preprocess.augment  # a rotated 6 is a 9


def test_as_measured_older_trial_returns_former_defaults():
    cells = make_cells()
    before = {"standardize_by": None, "augment": False, "set_size": 1, "include_self": True, "smoothing": 2 / 3}
    for name in ("batch correction of new cells", "domain generalization", "counterfactuals"):
        model, training = as_measured(Trial(name, "", "SCBD"), {"lr": 1e-3}, cells)
        assert model == before and training == {"lr": 1e-3, "plan_kwargs": {"lr_decay": False}}
    today = Trial("batch correction of new cells", "", "SCBD", model={"standardize_by": "auto"})
    assert as_measured(today, {}, cells) == ({"standardize_by": "auto"}, {})


def test_as_measured_standardize_by_none_does_not_augment():
    asked = Trial("domain generalization", "", "SCBD", model={"standardize_by": None})
    assert not as_measured(asked, {}, make_cells())[0]["augment"]
