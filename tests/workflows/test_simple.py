from __future__ import annotations

import numpy as np
from conftest import make_wells

from scbd.baselines import pixel_pca, standardize_by_environment
from scbd.data import Inputs
from scbd.workflows import _simple
from scbd.workflows._simple import input_pca, simple_embeddings


def test_the_pca_is_that_of_the_channels_a_model_looks_at(cells):
    inputs = Inputs.found(cells, channels=["channel_1"])
    found = input_pca(cells, inputs, seed=0)
    np.testing.assert_array_equal(found, pixel_pca(cells, channels=["channel_1"]))
    assert np.abs(found - pixel_pca(cells)).max() > 1


def test_features_are_scored_as_they_are_and_standardised(monkeypatch):
    wells = make_wells()
    inputs, components = Inputs(layer="X"), np.ones((wells.n_obs, 3), dtype=np.float32)
    found = simple_embeddings(wells, inputs, components, ["plate"])
    assert list(found) == ["features", "features, standardised by plate"]
    np.testing.assert_array_equal(found["features"], wells.X)
    expected = standardize_by_environment(wells.X, wells.obs["plate"])
    np.testing.assert_array_equal(found["features, standardised by plate"], expected)
    # of tables that are too large, components stand for them
    monkeypatch.setattr(_simple, "_MOST_VALUES", wells.n_obs * wells.n_vars - 1)
    found = simple_embeddings(wells, inputs, components, "plate")
    assert list(found) == ["feature PCA", "feature PCA, standardised by plate"]
    assert found["feature PCA"] is components and not found["feature PCA, standardised by plate"].any()


def test_a_single_cell_cannot_be_standardised(caplog):
    wells = make_wells()
    wells.obs["plate"] = wells.obs["plate"].cat.add_categories("alone")
    wells.obs.loc[wells.obs_names[0], "plate"] = "alone"
    caplog.set_level("INFO")
    found = simple_embeddings(wells, Inputs(layer="X"), np.ones((wells.n_obs, 3)), "plate")
    assert list(found) == ["features"]
    assert "features, standardised by plate is left out: an environment has a single cell" in caplog.text
