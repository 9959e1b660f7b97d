"""New plates from their controls: cells of another camera are embedded as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from torch import nn

from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel
from scbd.model._adapt import _normal

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
CONTROL = "gene_0"


def trained(cells, kind: Any = SCBDModel, *, control=CONTROL, steps=30, e_key="well", **settings):
    kind.setup_anndata(cells, y_key="gene", e_key=e_key, control=control)
    torch.manual_seed(0)  # the same weights, whichever tests ran before
    model = kind(cells, **{"encoder": "small"} | settings)
    how = {"accelerator": "cpu", "precision": "32-true", "enable_progress_bar": False}
    model.train(max_steps=steps, batch_size=48, lr=1e-3, train_size=1.0, **how)
    return model


def photographed(cells, gain=1.6, offset=35.0):
    """The same cells by another camera."""
    new = cells.copy()
    new.obsm[IMAGE_KEY] = (new.obsm[IMAGE_KEY] * gain + offset).astype(np.float32)
    new.obs["plate"] = pd.Categorical(["next month"] * new.n_obs)
    return new


def distance(z, truth):
    return float(np.linalg.norm(z - truth, axis=1).mean())


@pytest.fixture(scope="module")
def cells():
    return make_cells(240, dtype="float32")


@pytest.fixture(scope="module")
def model(cells):
    return trained(cells)


@pytest.fixture(autouse=True)
def _as_trained(request):
    if "model" in request.fixturenames:
        request.getfixturevalue("model").forget_adaptations()


@pytest.mark.parametrize("using", ["auto", "controls", "all"])
@pytest.mark.parametrize("block", ["c", "s"])
def test_cells_of_another_camera_are_embedded_as_they_were(model, cells, using, block):
    new = photographed(cells)
    truth = model.get_latent_representation(cells, block=block)
    raw = distance(model.get_latent_representation(new, block=block), truth)
    table = model.adapt(new, "plate", using=using)
    adapted = distance(model.get_latent_representation(new, block=block, adapt_key="plate"), truth)
    assert adapted < 0.15 * raw
    assert table["distance_after"].item() < 0.5 * table["distance_before"].item()


def test_controls_are_right_where_a_new_plate_holds_other_perturbations(model, cells):
    """Controls, and of the others one perturbation alone: of all cells, the mean is that of the perturbation."""
    chosen = np.flatnonzero(cells.obs["gene"].isin([CONTROL, "gene_3"]))
    new, truth = photographed(cells[chosen]), model.get_latent_representation(cells, chosen)
    found = {}
    for using in ("controls", "all"):
        model.adapt(new, "plate", using=using)
        found[using] = distance(model.get_latent_representation(new, adapt_key="plate"), truth)
    assert found["controls"] < 0.5 * found["all"]


def test_each_layer_is_left_by_controls_as_in_training(cells):
    """The definition: behind every normalisation, the mean of controls is that of the reference.

    All controls are one batch, so that nothing is approximate but for what is shrunk.
    """
    network = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)),
        *(nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8)),
    )
    model = trained(cells, encoder=network, style_target=None, n_latent=4)
    new, controls = photographed(cells), np.flatnonzero(cells.obs["gene"] == CONTROL)
    model.adapt(new, "plate")
    means = {}

    def look(name):
        def keep(layer, _inputs, outputs):
            normalised = outputs.transpose(0, 1).flatten(1).mean(1)
            means[name] = (normalised - layer.bias) / layer.weight

        return keep

    layers = {name: layer for name, layer in model.module.named_modules() if "BatchNorm" in type(layer).__name__}
    for name, layer in layers.items():
        layer.register_forward_hook(look(name))
    model.get_latent_representation(new, controls)
    raw = {name: values.numpy() for name, values in means.items()}
    model.get_latent_representation(new, controls, adapt_key="plate")
    assert len(means) == 3
    for name, values in means.items():
        wanted = model.statistics_["controls"]["moments"][name][0]
        assert np.abs(raw[name] - wanted).max() > 0.5
        np.testing.assert_allclose(values.numpy(), wanted, atol=0.05)


def test_adapting_leaves_the_model_and_other_cells_as_they_were(model, cells):
    before = {name: values.clone() for name, values in model.module.state_dict().items()}
    z = model.get_latent_representation(cells)
    new = photographed(cells)
    assert model.adapt(new, "plate", linear_map=True, max_cells=10)["n_cells"].item() == 10
    model.get_latent_representation(new, adapt_key="plate")
    for name, values in model.module.state_dict().items():
        torch.testing.assert_close(values, before[name], rtol=0, atol=0)
    np.testing.assert_array_equal(model.get_latent_representation(cells), z)


def test_cells_of_several_plates_go_by_their_own(model, cells, caplog):
    """In any order and batches; those that the model was not adapted to as they are, which the log tells."""
    new = photographed(cells)
    new.obs["plate"] = pd.Categorical(np.array(["P1", "P2", "old"])[np.arange(cells.n_obs) % 3])
    new.obsm[IMAGE_KEY][1::3] *= 0.5
    model.adapt(new[new.obs["plate"] != "old"].copy(), "plate")
    whole = model.get_latent_representation(new, adapt_key="plate")
    assert "old of 'plate'" in caplog.text
    for plate in ("P1", "P2", "old"):
        rows = np.flatnonzero(new.obs["plate"] == plate)
        key = None if plate == "old" else "plate"
        alone = model.get_latent_representation(new[rows].copy(), adapt_key=key)
        np.testing.assert_allclose(whole[rows], alone, atol=1e-5)
    order = np.random.default_rng(0).permutation(cells.n_obs)
    shuffled = model.get_latent_representation(new, order, adapt_key="plate", batch_size=11)
    np.testing.assert_allclose(shuffled, whole[order], atol=1e-5)


def test_an_environment_is_adapted_to_in_the_same_way_whichever_stand_beside_it(model, cells):
    new = photographed(cells)
    new.obs["plate"] = pd.Categorical(np.array(["P1", "P2"])[np.arange(cells.n_obs) % 2])
    how: dict[str, Any] = {"using": "all", "max_cells": 20}
    of_two = model.adapt(new, "plate", **how).set_index("environment").loc[["P2"]]
    z = model.get_latent_representation(new, adapt_key="plate")[1::2]
    model.forget_adaptations()
    alone = model.adapt(new[new.obs["plate"] == "P2"].copy(), "plate", **how).set_index("environment")
    pd.testing.assert_frame_equal(alone, of_two)
    np.testing.assert_array_equal(model.get_latent_representation(new[1::2].copy(), adapt_key="plate"), z)


def test_a_linear_map_brings_controls_to_the_mean_of_those_of_the_training(model, cells):
    new = photographed(cells)
    new.obsm[IMAGE_KEY][:, 0, :8] += 40  # no gain and no offset: nothing that a statistic takes out
    plain, mapped = (model.adapt(new, "plate", linear_map=linear_map).iloc[0] for linear_map in (False, True))
    assert mapped["distance_after"] < 0.5 * plain["distance_after"] and mapped["linear_map"]
    z = model.get_latent_representation(new, adapt_key="plate")
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)


def test_one_pair_among_cells_alone_in_their_groups_is_no_covariance():
    z = np.random.default_rng(0).normal(size=(64, 8))
    groups = np.arange(64)
    groups[1] = 0
    mean, covariance = _normal(z, groups)
    np.testing.assert_allclose(mean, z.mean(0))
    np.testing.assert_allclose(covariance, np.cov(z.T))


def test_an_adaptation_is_listed_saved_and_forgotten(model, cells, tmp_path):
    new = photographed(cells)
    new.obs["batch"] = "B1"
    raw = model.get_latent_representation(new)
    model.adapt(new, "plate")
    model.adapt(new, ["plate", "batch"], using="all")
    assert model.adaptations["environment"].tolist() == ["next month", "next month × B1"]
    assert model.adaptations["using"].tolist() == ["controls", "all"]
    assert "next month of plate, next month × B1 of plate × batch" in str(model)
    z = model.get_latent_representation(new, adapt_key="plate")
    assert distance(z, raw) > 0.01
    written = model.embed_to(tmp_path / "z.zarr", new, adapt_key="plate", batch_size=64, block_size=64)
    np.testing.assert_allclose(np.asarray(written.obsm["X_scbd_c"]), z, atol=1e-6)
    model.save(tmp_path / "model")
    loaded = SCBDModel.load(tmp_path / "model")
    pd.testing.assert_frame_equal(loaded.adaptations, model.adaptations)
    np.testing.assert_allclose(loaded.get_latent_representation(new, adapt_key="plate"), z, atol=1e-6)
    # without its training cells, it adapts to what comes next
    new.obs["plate"] = "the month after"
    assert loaded.adapt(new, "plate")["environment"].tolist() == ["the month after"]
    np.testing.assert_allclose(loaded.get_latent_representation(new, adapt_key="plate"), z, atol=1e-5)
    loaded.forget_adaptations("plate", ["the month after"])
    assert len(loaded.adaptations) == 2
    loaded.forget_adaptations("plate")
    assert loaded.adaptations["key"].tolist() == ["plate × batch"]
    for key in ("plate", None):
        with pytest.raises((KeyError, ValueError), match="B1|'plate'"):
            loaded.forget_adaptations(key, ["B1"]) if key else loaded.get_latent_representation(new, adapt_key="plate")
    with pytest.raises(ValueError, match="key"):
        loaded.forget_adaptations(environments=["next month"])


def test_training_on_forgets_what_was_of_other_weights(cells):
    model = trained(cells, steps=2)
    model.adapt(photographed(cells), "plate")
    known = model.statistics_["all"]["mean"]["c"]
    model.train(max_steps=1, batch_size=48, accelerator="cpu", precision="32-true", enable_progress_bar=False)
    assert model.adaptations.empty
    assert not np.array_equal(model.statistics_["all"]["mean"]["c"], known)


def test_a_file_of_another_adaptation_is_another_file(model, cells):
    """What a killed run goes on with is compared by a digest, of all that embeddings depend on."""
    new = photographed(cells)

    def digest(**how):
        model.adapt(new, "plate", **how)
        return model._adapted_cells(new, "plate").digest()

    plain = digest()
    assert plain == digest()
    assert len({plain, digest(using="all"), digest(linear_map=True)}) == 3
    model.adapt(new, "plate")
    new.obs["plate"] = pd.Categorical(np.where(np.arange(cells.n_obs) < 9, "old", "next month"))
    assert model._adapted_cells(new, "plate").digest() != plain


def test_a_classifier_names_cells_of_another_camera(cells):
    model = trained(cells, ERMModel, steps=60)
    new = photographed(cells, gain=2.5, offset=100)
    right = (model.predict(cells) == cells.obs["gene"]).mean()
    raw = (model.predict(new) == cells.obs["gene"]).mean()
    model.adapt(new, "plate")
    adapted = (model.predict(new, adapt_key="plate") == cells.obs["gene"]).mean()
    assert right > 0.8 > raw + 0.2
    assert adapted > right - 0.1


def test_only_what_embedding_passes_is_adapted(cells):
    VAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = VAEModel(cells, n_latent=4, image_size=16)
    model.train(max_steps=2, batch_size=24, accelerator="cpu", precision="32-true", enable_progress_bar=False)
    model.adapt(photographed(cells), "plate", using="all")
    buffers = model.adaptations_["plate"]["next month"]["buffers"]
    assert buffers and not [name for name in buffers if "decoder" in name]
    with_scale = trained(cells, steps=1, norm="group")
    with_scale.adapt(photographed(cells), "plate")
    assert set(with_scale.adaptations_["plate"]["next month"]["buffers"]) == {"preprocess.mean", "preprocess.sd"}
    with pytest.raises(ValueError, match="nothing to adapt"):
        trained(cells, steps=1, norm="group", standardize=False).adapt(photographed(cells), "plate")


def of_wells(encoder: str) -> tuple[SCBDModel, AnnData]:
    wells = make_wells(n_plates=6, n_controls=20)
    SCBDModel.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO")
    model = SCBDModel(wells, encoder=encoder, n_latent=4)
    model.train(max_steps=5, train_size=1.0, enable_progress_bar=False, accelerator="cpu")
    return model, wells


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_features_of_another_plate_are_embedded_as_they_were(encoder):
    model, wells = of_wells(encoder)
    new = wells.copy()
    scale = np.random.default_rng(0).uniform(1.5, 3, wells.n_vars)
    new.X = (new.X * scale + 10).astype(np.float32)
    new.obs["batch"] = "far away"
    truth = model.get_latent_representation(wells)
    raw = distance(model.get_latent_representation(new), truth)
    model.adapt(new, "batch", using="all")
    # one environment of six plates, which the reference has within
    assert distance(model.get_latent_representation(new, adapt_key="batch"), truth) < 0.6 * raw


@pytest.mark.parametrize(("offset", "outlier"), [(10, 0), (25, 1e6), (1_000, 0)])
def test_features_are_adapted_however_far_away_a_plate_is(offset, outlier):
    """In standard deviations; further than where features are cut off, and where a control has an odd feature."""
    model, wells = of_wells("linear")
    near = wells[wells.obs["plate"] == "plate_1"].copy()
    near.obs["plate"] = "next month"
    near.X[np.flatnonzero(near.obs["compound"] == "DMSO")[0], 0] += outlier
    far = near.copy()
    far.X = far.X + np.float32(offset) * model.module.preprocess.sd.numpy()
    model.adapt(near, "plate")
    wanted = model.get_latent_representation(near, adapt_key="plate")
    table = model.adapt(far, "plate")
    assert distance(model.get_latent_representation(far, adapt_key="plate"), wanted) < 0.1
    assert table["distance_after"].item() < 0.6


@pytest.mark.parametrize("column", ["well", "plate"])
def test_environments_of_the_training_are_left_as_they_are(model, cells, column, tmp_path):
    """Of the column of environments, and of others that held a value for several cells: these are saved, too."""
    new = photographed(cells)
    half = np.arange(cells.n_obs) < 120
    new.obs[column] = np.where(half, cells.obs[column].astype(str), "new")
    model.save(tmp_path / "model")
    loaded = SCBDModel.load(tmp_path / "model", adata=False)
    for either in (model, loaded):
        assert either.adapt(new, column)["environment"].tolist() == ["new"]
    z = model.get_latent_representation(new, adapt_key=column)
    np.testing.assert_allclose(z[half], model.get_latent_representation(new)[half], atol=1e-5)
    with pytest.raises(ValueError, match=f"'{column}'"):
        model.adapt(cells, column)


def test_environments_of_one_of_several_columns_are_left_as_they_are(cells):
    both = cells.copy()
    both.obs["donor"] = pd.Categorical(np.resize(["× one", "two"], both.n_obs))
    model = trained(both, steps=2, e_key=["well", "donor"])
    new, half = photographed(both), np.arange(cells.n_obs) < 120
    new.obs["well"] = pd.Categorical(np.where(half, "well_0", "well_new"))
    new.obs["donor"] = pd.Categorical(np.where(half, "× one", "three"))
    assert model.adapt(new, "well")["environment"].tolist() == ["well_new"]
    assert model.adapt(new, "donor")["environment"].tolist() == ["three"]


def test_what_is_held_out_by_a_split_was_not_trained_on(cells):
    """Set up with the others, and registered with them."""
    held = cells.copy()
    held.obs["split"] = np.where((held.obs["well"] == "well_2").to_numpy(), "test", "train")
    SCBDModel.setup_anndata(held, y_key="gene", e_key="well", control=CONTROL)
    model = SCBDModel(held, encoder="small")
    model.train(max_steps=2, batch_size=48, split="split", accelerator="cpu", enable_progress_bar=False)
    assert model.adapt(held, "well")["environment"].tolist() == ["well_2"]


def without_controls(new):
    return new[new.obs["gene"] != CONTROL].copy()


def with_bad_control(new):
    new.obsm[IMAGE_KEY][np.flatnonzero(new.obs["gene"] == CONTROL)[3]] = np.nan
    new.obs["plate"] = pd.Categorical(np.where(np.arange(new.n_obs) % 2, "a", "b"))
    return new


def without_perturbations(new):
    del new.obs["gene"]
    return new


def without_images(new):
    del new.obsm[IMAGE_KEY]
    return new


@pytest.mark.parametrize(
    ("change", "settings", "error", "named"),
    [
        (None, {"using": "some"}, ValueError, "using='some'"),
        (None, {"max_cells": 1}, ValueError, "max_cells=1"),
        (None, {"key": "plaet"}, KeyError, "Did you mean 'plate'"),
        (without_controls, {"using": "controls"}, ValueError, r"next month \(0\)"),
        (with_bad_control, {}, ValueError, "NaN"),
        (without_perturbations, {"using": "controls"}, ValueError, "using='controls'"),
        (without_images, {}, KeyError, IMAGE_KEY),
    ],
)
def test_what_cannot_be_adapted_to_leaves_the_model_as_it_was(model, cells, change, settings, error, named):
    before = {name: values.clone() for name, values in model.module.state_dict().items()}
    new = photographed(cells)
    with pytest.raises(error, match=named):
        model.adapt(new if change is None else change(new), **{"key": "plate"} | settings)
    assert model.adaptations.empty
    for name, values in model.module.state_dict().items():
        torch.testing.assert_close(values, before[name], rtol=0, atol=0)


def test_without_known_controls_all_cells_are_used_with_a_warning(model, cells):
    with pytest.warns(UserWarning, match="All cells of each environment"):
        assert model.adapt(without_perturbations(photographed(cells)), "plate")["using"].item() == "all"
    unknown = trained(cells[cells.obs["gene"] != CONTROL].copy(), control=None, steps=1)
    unknown.statistics_ = {}
    with pytest.raises(ValueError, match="using='all'"):
        unknown.adapt(photographed(cells), "plate", using="all")
