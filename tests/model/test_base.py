"""Saving, loading and printing of models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells
from small_models import QUICK, assert_same, make_model, weights
from torch import nn

from scbd import SCBDModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:z_c has", "ignore:Trying to query inferred values from an untrained model"
)


def test_features_are_saved_with_transform_and_centre(tmp_path):
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", control="DMSO", position_key="well")
    model = SCBDModel(wells)
    model.train(**QUICK | {"train_size": 1.0})
    model.save(str(tmp_path / "model"))
    again = SCBDModel.load(str(tmp_path / "model"), wells)
    assert_same(weights(again), weights(model))
    np.testing.assert_array_equal(again.get_latent_representation(), model.get_latent_representation())
    assert again.module.is_fitted


def test_an_encoder_of_ones_own_is_loaded_only_if_allowed(tmp_path):
    model = make_model(encoder=nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32, 10)))
    model.train(**QUICK)
    assert model.get_latent_representation(representation="intermediate").shape == (96, 10)
    assert "Sequential" in repr(model)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="allow_pickle"):
        SCBDModel.load(tmp_path / "model", model.adata)
    again = SCBDModel.load(tmp_path / "model", model.adata, allow_pickle=True)
    np.testing.assert_array_equal(again.get_latent_representation(), model.get_latent_representation())


@pytest.mark.parametrize("labels", ["days", "bins"])
def test_dates_and_intervals_are_labels_that_can_be_saved(labels, tmp_path):
    cells = make_cells()
    codes = cells.obs["well"].cat.codes
    day = {"days": pd.Timestamp("2026-01-01") + pd.to_timedelta(codes, unit="D"), "bins": pd.cut(codes, 3)}[labels]
    cells.obs["day"] = np.asarray(day)
    cells.obs["day"] = cells.obs["day"].astype("category")
    SCBDModel.setup_anndata(cells, "gene", cells.obs.columns[[2, 3]])
    model = SCBDModel(cells, encoder="small")
    assert model.registry_["setup_args"]["e_key"] == ["plate", "day"]
    model.save(str(tmp_path / "model"))
    again = SCBDModel.load(str(tmp_path / "model"), cells)
    np.testing.assert_array_equal(again._codes(cells, "e"), model._codes(cells, "e"))


def test_cells_of_an_earlier_model_are_not_left_beside_a_new_one(tmp_path):
    first = make_model(make_cells(60))
    first.save(str(tmp_path / "model"), save_anndata=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata.n_obs == 60
    make_model().save(str(tmp_path / "model"), overwrite=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata is None
    first.save(str(tmp_path / "model"), prefix="first_", overwrite=True, save_anndata=True)
    make_model().save(str(tmp_path / "model"), overwrite=True)
    # arguments in the order of scvi-tools
    assert SCBDModel.load(str(tmp_path / "model"), None, "auto", "auto", "first_").adata.n_obs == 60


def test_nothing_is_overwritten_unasked(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name, overwrite in (("file", True), ("folder", False)):
        with pytest.raises(FileExistsError, match=name):
            make_model().save(str(tmp_path / name), overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_cells_of_another_kind_are_refused_and_other_names_of_channels_said_once(tmp_path):
    cells = make_cells()
    cells.var_names = ["DNA", "actin"]
    make_model(cells).save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="32 × 32 pixels"):
        SCBDModel.load(str(tmp_path / "model"), make_cells(24, shape=(2, 32, 32)))
    new = make_cells(20)
    new.var_names = ["Hoechst", "phalloidin"]
    with pytest.warns(UserWarning) as said:
        SCBDModel.load(str(tmp_path / "model"), new)
    assert ["Hoechst, phalloidin" in str(warning.message) for warning in said] == [True]


def test_what_is_printed_tells_data_state_and_the_next_step(trained):
    for part in (
        *("96 cells", "4 perturbations (gene)", "3 environments (well)", "2 × 16 × 16 uint8", "12 steps"),
        *("alpha auto", "get_latent_representation"),
    ):
        assert part in repr(trained)
    model = make_model()
    assert "not trained" in repr(model) and "train()" in repr(model)
    model.is_trained = True  # from outside, as a callback of scvi-tools does
    assert "state     trained\n" in repr(model)
    assert "10 of X, float32" in repr(of_features := features()) and "plda" in repr(of_features)


def features() -> SCBDModel:
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate")
    return SCBDModel(wells)
