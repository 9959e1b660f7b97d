"""Set-up of tables, cells that are attached later, and what suits the inputs: labels mean what they meant at set-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
import torch
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, make_model

from scbd import SCBDModel
from scbd.baselines import DANNModel, ERMModel, MCVAEModel, VAEModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:z_c has", "ignore:Trying to query inferred values from an untrained model"
)
# a few models, and the labels that they have parameters for
MODELS: dict[Any, tuple[dict[str, Any], tuple[str, ...]]] = {
    SCBDModel: ({"encoder": "small", "n_latent": 4}, ()),
    ERMModel: ({"encoder": "small"}, ("gene",)),
    DANNModel: ({"encoder": "small"}, ("gene", "well")),
    VAEModel: ({"n_latent": 4}, ()),
    MCVAEModel: ({"n_latent": 4, "control": "gene_2"}, ("gene",)),
}
WELLS = {"y_key": "compound", "e_key": "plate"}


def make(kind: Any, cells: Any = None, **setup: Any) -> Any:
    scvi.settings.seed = 0
    cells = make_cells() if cells is None else cells
    kind.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | setup)
    return kind(cells, **MODELS[kind][0])


def of_wells(wells: Any = None, keys: dict[str, Any] | None = None, **settings: Any) -> SCBDModel:
    wells = make_wells() if wells is None else wells
    SCBDModel.setup_anndata(wells, **WELLS | (keys or {}))
    return SCBDModel(wells, **settings)


def test_setup_changes_only_uns(cells):
    obs, obsm = cells.obs.copy(), list(cells.obsm)
    make_model(cells)
    pd.testing.assert_frame_equal(cells.obs, obs)
    assert list(cells.obsm) == obsm


def test_view_anndata_setup_prints_registered_fields(capsys, tmp_path):
    model = make(SCBDModel, e_key=["plate", "well"])
    model.view_anndata_setup()
    assert "plate × well" in capsys.readouterr().out
    model.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="pass adata"):
        SCBDModel.load(str(tmp_path / "model")).view_anndata_setup()


def test_get_from_registry_returns_codes_of_labels_and_combinations():
    model = make(SCBDModel, e_key=["plate", "well"])
    found, categories = model.adata_manager.get_from_registry("e"), model._registered("e")["categories"]
    assert found.shape == (96, 1) and found.dtype == np.int64
    obs = model.adata.obs
    expected = [f"{plate} × {well}" for plate, well in zip(obs["plate"], obs["well"], strict=True)]
    assert [categories[code] for code in found[:, 0]] == expected
    assert model.adata_manager.get_from_registry("image").shape == (96, 2, 16, 16)
    obs["well"] = "well_7"
    with pytest.raises(ValueError, match="2 labels"):
        model.adata_manager.get_from_registry("e")


def reordered(model, path):
    for column in ("gene", "well"):
        labels = model.adata.obs[column].cat
        model.adata.obs[column] = labels.reorder_categories(labels.categories[::-1])
    return model


def cut_in_place(model, path):
    model.adata._inplace_subset_obs(model.adata.obs["gene"].isin(["gene_2", "gene_3"]).to_numpy())
    return model


def attached(model, path):
    model.adata = model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy()
    return model


def loaded(model, path):
    model.save(path)
    return type(model).load(path, model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy())


def loaded_and_attached(model, path):
    model.save(path)
    again = type(model).load(path)
    again.adata = model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy()
    return again


@pytest.mark.parametrize("change", [reordered, cut_in_place, attached, loaded, loaded_and_attached])
@pytest.mark.parametrize("kind", [SCBDModel, DANNModel])
def test_codes_keep_order_of_registry(kind, change, tmp_path):
    model = make(kind)
    registered = {key: list(model._registered(key)["categories"]) for key in ("y", "e")}
    model = change(model, str(tmp_path / "model"))
    for key, column in (("y", "gene"), ("e", "well")):
        codes = model._codes(model.adata, key)
        assert model._registered(key)["categories"] == registered[key]
        assert [registered[key][code] for code in codes] == model.adata.obs[column].tolist()


@pytest.mark.parametrize("column", ["gene", "well"])
@pytest.mark.parametrize("kind", MODELS)
def test_new_labels_are_embedded_and_registered_or_raise(kind, column, tmp_path):
    model = make(kind)
    model.train(**QUICK | {"max_steps": 2})
    model.save(str(tmp_path / "model"))
    new = make_cells(24, seed=1)
    new.obs[column] = np.where(np.arange(24) % 2, "unseen", new.obs[column].astype(str))
    again = kind.load(str(tmp_path / "model"), new)
    expected = model.get_latent_representation(new)
    np.testing.assert_array_equal(again.get_latent_representation(), expected)
    short = QUICK | {"max_steps": 2, "batch_size": 12}
    if column in MODELS[kind][1]:
        with pytest.raises(ValueError, match="unseen"):
            again.train(**short)
    else:
        again.train(**short)
        assert again._registered("y" if column == "gene" else "e")["categories"][-1] == "unseen"
    # whatever was attached, what is saved can be loaded
    again.save(str(tmp_path / "again"))
    embedded = kind.load(str(tmp_path / "again"), False).get_latent_representation(new)
    np.testing.assert_array_equal(embedded, again.get_latent_representation(new))


def test_attach_other_cells_keeps_registry_of_model():
    model = make(ERMModel)
    model.train(**QUICK)
    training, new = model.adata, make_cells(30, seed=1)
    new.obs["gene"] = "unseen"
    model.adata = new
    assert model.summary_stats["n_y"] == 4 and "4 perturbations" in repr(model)
    assert model.predict().shape == (30,)
    with pytest.warns(UserWarning, match="train_indices"):
        assert len(model.train_indices)
    model.adata = training
    assert model.predict().shape == (96,) and len(model.train_indices)


def test_attach_cells_without_labels_allows_embedding_but_not_training(tmp_path):
    model = make(SCBDModel)
    new = make_cells(20, seed=1)
    new.obs["gene"] = new.obs["gene"].where(np.arange(20) < 15)
    del new.obs["well"]
    model.adata = new
    assert model.get_latent_representation().shape == (20, 4)
    with pytest.raises(ValueError, match=r"gene.* 5 of 20 cells"):
        model.train(**QUICK)
    for nothing, error in ((None, "adata=None"), (make_cells(8, shape=(2, 32, 32)), "32 × 32 pixels")):
        with pytest.raises(ValueError, match=error):
            model.adata = nothing
    assert model.adata is new


def test_new_table_features_are_matched_by_name():
    model = of_wells()
    model.train(**QUICK | {"train_size": 1.0})
    new = make_wells(seed=1)
    expected = model.get_latent_representation(new)
    np.testing.assert_array_equal(model.get_latent_representation(new[:, ::-1].copy()), expected)
    with pytest.raises(ValueError, match="feature_3"):
        model.get_latent_representation(new[:, new.var_names != "feature_3"].copy())
    new.X[5, 2] = np.nan
    with pytest.raises(ValueError, match="rows 5"):
        model.get_latent_representation(new)
    with pytest.raises(ValueError, match="feature_2"):
        model.adata = new


def test_setup_finds_location_of_inputs():
    cells = make_cells()
    cells.X = np.random.default_rng(0).normal(size=(96, 2)).astype(np.float32)
    make(SCBDModel, cells)
    assert SCBDModel(cells, encoder="small").module.preprocess.output_shape == (2, 16, 16)
    cells.obsm["crops"] = cells.obsm.pop("single_cell_images")
    with pytest.raises(KeyError, match="crops"):  # images under another key are not passed over
        SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", layer="X")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"image_key": "crops", "layer": "X"}, "image_key and layer"),
        ({"layer": "log"}, "no 'log'"),
        ({"obsm_key": "dino"}, "no 'dino'"),
    )
    for keys, named in refused:
        with pytest.raises((KeyError, ValueError), match=named):
            SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", **keys)


@pytest.mark.parametrize("e_key", ["gene", ["well", "gene"]], ids=str)
def test_setup_column_as_y_key_and_e_key_raises(e_key):
    with pytest.raises(ValueError, match="'gene' is named as y_key and as e_key, and z_c cannot carry"):
        SCBDModel.setup_anndata(make_cells(), y_key="gene", e_key=e_key)


@pytest.mark.parametrize(
    ("of_images", "settings"),
    [
        *(
            (False, {name: value})
            for name, value in (("image_size", 32), ("intensity", "none"), ("encoder", "resnet18"))
        ),
        *((True, {name: value}) for name, value in (("clip", 5.0), ("whitening", "plda"), ("encoder", "linear"))),
    ],
)
def test_constructor_settings_of_other_input_kind_raise(of_images, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        make_model(**settings) if of_images else of_wells(**settings)


@pytest.mark.parametrize(
    "settings", [{"encoder": "mlp", "whitening": None}, {"whitening": "controls"}, {"whitening": None}]
)
def test_constructor_unused_position_key_warns(settings):
    with pytest.warns(UserWarning, match="position_key is not used"):
        of_wells(keys={"control": "DMSO", "position_key": "well"}, **settings)


@pytest.mark.parametrize("accelerated", [True, False])
def test_encoder_auto_keeps_choice_of_setup_machine(accelerated, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerated)
    model = make_model(encoder="auto", style_target=None)
    model.is_trained_ = True
    model.save(str(tmp_path / "model"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: not accelerated)
    again = SCBDModel.load(str(tmp_path / "model"), make_cells(), accelerator="cpu")
    assert ("resnet18" if accelerated else "small") in repr(again)
    # a small encoder has a short run
    assert ("max_steps" in again._training_defaults) != accelerated


@pytest.mark.parametrize(("n_rows", "encoder"), [(99, "linear"), (100, "mlp")])
def test_encoder_auto_features_depends_on_rows_per_feature(n_rows, encoder):
    model = of_wells()  # of ten features
    model._registered_inputs["n_rows"] = n_rows
    assert model._encoder("auto") == encoder and model._encoder("linear") == "linear"


@pytest.mark.parametrize(
    ("n_features", "settings", "expected"),
    [
        (10, {}, 10),
        (10, {"n_latent": 3}, 3),
        (10, {"encoder": "mlp"}, 64),
        (310, {}, 300),
        (310, {"whitening": None}, 310),
    ],
)
def test_n_latent_linear_encoder_equals_input_dimension(n_features, settings, expected):
    assert of_wells(make_wells(n_features=n_features), **settings).module.content.n_latent == expected


@pytest.mark.parametrize("settings", [{"n_latent": 3, "whitening": None}, {"n_latent": 11}])
def test_n_latent_above_input_dimension_raises(settings):
    with pytest.raises(ValueError, match="n_latent"):
        of_wells(**settings)
