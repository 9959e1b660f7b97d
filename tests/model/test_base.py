"""Set-up, saving, loading and attaching of all ten models: labels mean what they meant at set-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
from conftest import make_cells
from small_models import make_model

from scbd import SCBDModel
from scbd.baselines import (
    CORALModel,
    DANNModel,
    ERMModel,
    FishModel,
    GroupDROModel,
    IRMModel,
    IVAEModel,
    MCVAEModel,
    VAEModel,
)

# a few steps, or none
EXPECTED = (
    "z_c has collapsed",
    "z_c has learned to tell few",
    "Trying to query inferred values from an untrained model",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{warning}") for warning in EXPECTED]

QUICK: dict[str, Any] = {
    "max_steps": 4,
    "batch_size": 12,
    "enable_progress_bar": False,
    "accelerator": "cpu",
    "precision": "32-true",
}
SMALL: dict[str, Any] = {"encoder": "small"}
MODELS: dict[Any, dict[str, Any]] = {
    SCBDModel: SMALL | {"n_latent": 4},
    **dict.fromkeys((ERMModel, CORALModel, DANNModel, FishModel, GroupDROModel, IRMModel), SMALL),
    **{model: {"n_latent": 4} for model in (VAEModel, IVAEModel)},
    MCVAEModel: {"n_latent": 4, "control": "gene_2"},
}
# networks with parameters for each label
FIXED = {
    "gene": [ERMModel, CORALModel, DANNModel, FishModel, GroupDROModel, IRMModel, IVAEModel, MCVAEModel],
    "well": [DANNModel, GroupDROModel, IVAEModel],
}


def make(model_class, cells=None, **setup):
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    model_class.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | setup)
    return model_class(cells, **MODELS[model_class])


def reordered(model, tmp_path):
    for column in ("gene", "well"):
        labels = model.adata.obs[column].cat
        model.adata.obs[column] = labels.reorder_categories(labels.categories[::-1])
    return model


def cut_in_place(model, tmp_path):
    model.adata._inplace_subset_obs(model.adata.obs["gene"].isin(["gene_2", "gene_3"]).to_numpy())
    return model


def attached(model, tmp_path):
    model.adata = model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy()
    return model


def loaded(model, tmp_path):
    model.save(str(tmp_path / "model"))
    kept = model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy()
    return type(model).load(str(tmp_path / "model"), kept)


def loaded_and_attached(model, tmp_path):
    model.save(str(tmp_path / "model"))
    again = type(model).load(str(tmp_path / "model"))
    again.adata = model.adata[model.adata.obs["gene"].isin(["gene_2", "gene_3"])].copy()
    return again


@pytest.mark.parametrize("change", [reordered, cut_in_place, attached, loaded, loaded_and_attached])
@pytest.mark.parametrize("model_class", MODELS)
def test_codes_follow_the_registry(model_class, change, tmp_path):
    model = make(model_class)
    registered = {key: list(model._registered(key)["categories"]) for key in ("y", "e")}
    model = change(model, tmp_path)
    _, *codes = model._training_inputs()
    for key, column, found in zip("ye", ("gene", "well"), codes, strict=True):
        assert model._registered(key)["categories"] == registered[key]
        assert [registered[key][code] for code in found] == model.adata.obs[column].tolist()


def test_a_classifier_names_what_it_learned_after_categories_were_reordered(tmp_path):
    model = reordered(make(ERMModel, make_cells(200)), tmp_path)
    model.train(**QUICK | {"max_steps": 60, "batch_size": 50, "lr": 2e-3})
    assert np.mean(model.predict() == model.adata.obs["gene"]) > 0.9


@pytest.mark.parametrize("column", ["gene", "well"])
@pytest.mark.parametrize("model_class", MODELS)
def test_new_labels_are_embedded_and_learned_or_named(model_class, column, tmp_path):
    model = make(model_class)
    model.train(**QUICK)
    model.save(str(tmp_path / "model"))
    new = make_cells(24, seed=1)
    new.obs[column] = np.where(np.arange(24) % 2, "unseen", new.obs[column].astype(str))
    again = model_class.load(str(tmp_path / "model"), new)
    expected = model.get_latent_representation(new)
    np.testing.assert_array_equal(again.get_latent_representation(), expected)
    if model_class in FIXED[column]:
        with pytest.raises(ValueError, match=rf"obs\['{column}'\] holds 1 label .* \('unseen'\), used as "):
            again.train(**QUICK)
    else:
        again.train(**QUICK)
        assert again._registered("y" if column == "gene" else "e")["categories"][-1] == "unseen"
    # whatever was attached, what is saved can be loaded
    again.save(str(tmp_path / "again"))
    np.testing.assert_array_equal(
        model_class.load(str(tmp_path / "again"), False).get_latent_representation(new),
        again.get_latent_representation(new),
    )


def test_attaching_other_cells_keeps_the_model_its_own():
    model = make(ERMModel)
    model.train(**QUICK)
    training, new = model.adata, make_cells(30, seed=1)
    new.obs["gene"] = "unseen"
    model.adata = new
    assert model.summary_stats["n_y"] == 4
    assert model.predict().shape == (30,)
    assert "4 perturbations" in repr(model)
    model.adata = training
    assert model.predict().shape == (96,)


def test_cells_of_another_size_are_refused_before_they_are_attached(tmp_path):
    model = make(SCBDModel)
    training, larger = model.adata, make_cells(24, shape=(2, 32, 32))
    with pytest.raises(ValueError, match="images of 32 × 32 pixels, the model was trained on 16 × 16"):
        model.adata = larger
    assert model.adata is training
    model.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="images of 32 × 32 pixels, the model was trained on 16 × 16"):
        SCBDModel.load(str(tmp_path / "model"), larger)
    assert model.get_latent_representation(training, [0]).shape == (1, 4)


def test_cells_without_labels_or_with_some_can_be_attached_but_not_trained_on(tmp_path):
    model = make(SCBDModel)
    model.save(str(tmp_path / "model"))
    new = make_cells(20, seed=1)
    new.obs["gene"] = new.obs["gene"].where(np.arange(20) < 15)
    del new.obs["well"]
    again = SCBDModel.load(str(tmp_path / "model"), new)
    assert again.get_latent_representation().shape == (20, 4)
    with pytest.raises(ValueError, match=r"obs\['gene'\] has no value for 5 of 20 cells \(rows 15, 16"):
        again.train(**QUICK)
    with pytest.raises(ValueError, match="adata=None"):
        again.adata = None


def test_the_registry_returns_codes_and_of_a_cross_the_cross():
    model = make(SCBDModel, e_key=["plate", "well"])
    found, categories = model.adata_manager.get_from_registry("e"), model._registered("e")["categories"]
    assert found.shape == (96, 1)
    assert found.dtype == np.int64
    obs = model.adata.obs
    expected = [f"{plate} × {well}" for plate, well in zip(obs["plate"], obs["well"], strict=True)]
    assert [categories[code] for code in found[:, 0]] == expected
    assert model.adata_manager.get_from_registry("image").shape == (96, 2, 16, 16)
    obs["well"] = "well_7"
    with pytest.raises(ValueError, match=r"obs\['plate'\] and obs\['well'\] holds 2 labels"):
        model.adata_manager.get_from_registry("e")


def days(cells):
    return pd.Timestamp("2026-01-01") + pd.to_timedelta(cells.obs["well"].cat.codes, unit="D")


def bins(cells):
    return pd.cut(cells.obs["well"].cat.codes, 3)


@pytest.mark.parametrize("labels", [days, bins])
def test_dates_and_intervals_are_labels_that_can_be_saved(labels, tmp_path):
    cells = make_cells()
    cells.obs["day"] = np.asarray(labels(cells))
    cells.obs["day"] = cells.obs["day"].astype("category")
    model = make(SCBDModel, cells, e_key=cells.obs.columns[[2, 3]])
    assert model.registry_["setup_args"]["e_key"] == ["plate", "day"]
    model.save(str(tmp_path / "model"))
    again = SCBDModel.load(str(tmp_path / "model"), cells)
    np.testing.assert_array_equal(again._training_inputs()[2], model._training_inputs()[2])


def test_cells_of_an_earlier_model_are_not_left_beside_a_new_one(tmp_path):
    first = make(SCBDModel, make_cells(60))
    first.save(str(tmp_path / "model"), save_anndata=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata.n_obs == 60
    make(SCBDModel).save(str(tmp_path / "model"), overwrite=True)
    assert SCBDModel.load(str(tmp_path / "model")).adata is None
    first.save(str(tmp_path / "model"), prefix="first_", overwrite=True, save_anndata=True)
    make(SCBDModel).save(str(tmp_path / "model"), overwrite=True)
    assert SCBDModel.load(str(tmp_path / "model"), prefix="first_").adata.n_obs == 60


def test_a_file_is_no_directory_to_save_to(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file: give the path of a directory"):
        make(SCBDModel).save(str(tmp_path / "model"), overwrite=True)
    assert (tmp_path / "model").read_text() == "mine"


def test_load_takes_its_arguments_in_the_order_of_scvi_tools(tmp_path):
    make(SCBDModel).save(str(tmp_path / "model"), prefix="p_")
    assert SCBDModel.load(str(tmp_path / "model"), make_cells(), "auto", "auto", "p_").adata.n_obs == 96


def test_other_names_of_channels_are_said_once(tmp_path):
    cells = make_cells()
    cells.var_names = ["DNA", "actin"]
    make(SCBDModel, cells).save(str(tmp_path / "model"))
    new = make_cells(20)
    new.var_names = ["Hoechst", "phalloidin"]
    with pytest.warns(UserWarning) as said:
        SCBDModel.load(str(tmp_path / "model"), new)
    assert ["has the channels Hoechst, phalloidin" in str(warning.message) for warning in said] == [True]


def test_what_was_set_up_can_be_viewed(capsys, tmp_path):
    model = make(SCBDModel, e_key=["plate", "well"])
    model.view_anndata_setup()
    assert "plate × well" in capsys.readouterr().out
    model.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="loaded without data: pass adata"):
        SCBDModel.load(str(tmp_path / "model")).view_anndata_setup()


def test_a_control_is_named_by_its_own_value():
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.codes.to_numpy()
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    assert MCVAEModel(cells, n_latent=4, control=2).module.control == 2
    with pytest.raises(ValueError, match="no cell is '2': name their perturbation with control=…, one of 0, 1, 2, 3"):
        MCVAEModel(cells, n_latent=4, control="2")


def test_predictions_are_of_the_type_of_the_labels():
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].astype(str).replace({"gene_0": 7}).astype("category")
    model = make(ERMModel, cells)
    model.train(**QUICK | {"max_steps": 60, "batch_size": 48, "lr": 2e-3})
    assert {type(label) for label in model.predict()} == {int, str}


def test_setup_changes_nothing_but_uns(cells):
    obs, obsm = cells.obs.copy(), list(cells.obsm)
    make_model(cells)
    pd.testing.assert_frame_equal(cells.obs, obs)
    assert list(cells.obsm) == obsm


def test_e_key_may_be_a_list(cells):
    SCBDModel.setup_anndata(cells, "gene", ["plate", "well"])
    model = SCBDModel(cells, encoder="small", n_latent=4)
    assert model.summary_stats["n_e"] == 3
    model.train(**QUICK)
    assert "environments side by side: 2 of plate, 3 of well" in repr(model)
