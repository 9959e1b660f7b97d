"""Saving, loading and printing of models."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, assert_same, make_model, weights
from torch import nn

from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel
from scbd.data import open_screen

pytestmark = pytest.mark.filterwarnings(
    "ignore:z_c has", "ignore:Trying to query inferred values from an untrained model"
)


def test_save_features_keeps_transform_and_centers(tmp_path):
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", control="DMSO", position_key="well")
    model = SCBDModel(wells)
    model.train(**QUICK | {"train_size": 1.0})
    model.save(str(tmp_path / "model"))
    again = SCBDModel.load(str(tmp_path / "model"), wells)
    assert_same(weights(again), weights(model))
    np.testing.assert_array_equal(again.get_latent_representation(), model.get_latent_representation())
    assert again.module.is_fitted


@pytest.mark.parametrize("cls", [SCBDModel, VAEModel])
def test_load_format_1_gives_equal_model(cls, tmp_path):
    """Format 1 had an attribute for each value of ``alignment_`` and ``results_``."""
    cells = make_cells()
    cls.setup_anndata(cells, "gene", "well", control="gene_0")
    model = cls(cells, **{"encoder": "small"} if cls is SCBDModel else {})
    model.train(**QUICK)
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "model.pt"
    saved = torch.load(path, weights_only=False)
    attributes = saved["attr_dict"]
    alignment, results = attributes.pop("alignment_"), attributes.pop("results_")
    assert alignment["kinds"] and results["centers"]
    attributes |= {
        "format_": 1,
        "standardized_by_": alignment["kinds"],
        "could_be_known_by_": alignment["alternative_kinds"],
        "label_shares_": alignment["label_frequencies"],
        "in_common_": alignment["overlaps"],
        "centered_by_": results["offsets"]["kinds"],
        "leftover_": results["offsets"]["state"],
        "centers_": results["centers"],
        {SCBDModel: "health_", VAEModel: "latent_health_"}[cls]: results["diagnostics"],
    }
    torch.save(saved, path)
    again = cls.load(tmp_path / "model", cells)
    new = cells.copy()
    new.obs["well"] = pd.Categorical("new " + new.obs["well"].astype(str))
    for center in ("auto", "controls"):
        for table in (cells, new):
            np.testing.assert_array_equal(
                again.get_latent_representation(table, center=center),
                model.get_latent_representation(table, center=center),
            )
    assert repr(again) == repr(model)
    again.train(**QUICK)
    assert not [name for name in vars(again) if name in attributes and name not in vars(model)]


def test_load_custom_encoder_requires_allow_pickle(tmp_path):
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
def test_save_date_and_interval_labels_succeeds(labels, tmp_path):
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


def test_save_overwrite_removes_cells_of_earlier_model(tmp_path):
    first = make_model(make_cells(60))
    first.save(str(tmp_path / "model"), save_anndata=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata.n_obs == 60
    make_model().save(str(tmp_path / "model"), overwrite=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata is None
    first.save(str(tmp_path / "model"), prefix="first_", overwrite=True, save_anndata=True)
    make_model().save(str(tmp_path / "model"), overwrite=True)
    # arguments in the order of scvi-tools
    assert SCBDModel.load(str(tmp_path / "model"), None, "auto", "auto", "first_").adata.n_obs == 60


def test_save_existing_path_raises_and_keeps_it(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name, overwrite in (("file", True), ("folder", False)):
        with pytest.raises(FileExistsError, match=name):
            make_model().save(str(tmp_path / name), overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_load_other_image_kind_raises_and_other_channel_names_warn_once(tmp_path):
    cells = make_cells()
    cells.var_names = ["DNA", "actin"]
    make_model(cells).save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="32 × 32 pixels"):
        SCBDModel.load(str(tmp_path / "model"), make_cells(24, shape=(2, 32, 32)))
    new = make_cells(20)
    new.var_names = ["Hoechst", "phalloidin"]
    with pytest.warns(UserWarning, match="Hoechst, phalloidin") as said:
        SCBDModel.load(str(tmp_path / "model"), new)
    assert ["Hoechst, phalloidin" in str(warning.message) for warning in said] == [True]


def test_repr_states_data_training_and_next_step(trained):
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


# ---- copies and pickles, as ray and joblib make them


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
@pytest.mark.parametrize("cls", [SCBDModel, ERMModel, VAEModel])
def test_copied_model_gives_equal_embeddings_and_is_independent(cls, how):
    cells = make_cells()
    cls.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    model = cls(cells)
    model.train(**QUICK)
    z, new = model.get_latent_representation(), make_cells(20, seed=3)
    copied = how(model)
    np.testing.assert_array_equal(copied.get_latent_representation(), z)
    np.testing.assert_array_equal(copied.get_latent_representation(new), model.get_latent_representation(new))
    copied.train(**QUICK)
    copied.deregister_manager()
    np.testing.assert_array_equal(model.get_latent_representation(), z)
    assert not np.array_equal(copied.get_latent_representation(), z)
    assert model.get_from_registry(cells, "y").shape == (96, 1)


def test_pickle_keeps_decoder_and_cells_on_disk(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    model = make_model(open_screen(tmp_path / "cells.h5ad"))
    model.train(**QUICK, online_head=True)
    model.train_decoder(**QUICK, width=4)
    copied = pickled(model)
    np.testing.assert_array_equal(copied.reconstruct(), model.reconstruct())
    np.testing.assert_array_equal(copied.predict(), model.predict())


def test_pickle_loaded_in_other_process_gives_equal_model(tmp_path):
    model = make_model()
    model.train(**QUICK)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    code = (
        "import pickle, sys, numpy, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "model = pickle.loads((folder / 'model.pkl').read_bytes())\n"
        "model.get_from_registry(model.adata, 'y')\n"
        "numpy.save(folder / 'z.npy', model.get_latent_representation())\n"
        "model.deregister_manager()\n"
        "model.save(folder / 'saved')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    z = model.get_latent_representation()
    np.testing.assert_allclose(np.load(tmp_path / "z.npy"), z, atol=1e-6)
    saved = SCBDModel.load(tmp_path / "saved", model.adata)
    np.testing.assert_array_equal(saved.get_latent_representation(), z)
