"""Models of features in place of images: the same contract."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scvi
import torch
from anndata import AnnData
from conftest import make_cells, make_wells
from small_models import PressCtrlC, assert_same, weights

from scbd import SCBDModel
from scbd.baselines import standardize_by_environment
from scbd.data import memory_map_h5ad, open_screen
from scbd.model import TrainingDiverged

# a few steps teach nothing
pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:position_key is not used", "ignore:Environments \\(")
QUICK: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu", "train_size": 1.0}
KEYS = {"y_key": "compound", "e_key": "plate", "control": "DMSO", "position_key": "well"}


def make(wells: AnnData | None = None, keys: dict[str, Any] = KEYS, **kwargs: Any) -> SCBDModel:
    wells = make_wells() if wells is None else wells
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(wells, **keys)
    return SCBDModel(wells, **kwargs)


def test_features_of_x_are_taken_where_there_are_no_images():
    model = make()
    model.train(**QUICK, max_steps=3)
    assert model.get_latent_representation().shape == (72, 10)
    assert model.get_latent_representation(block="s").shape == (72, 10)
    assert "10 of X, float32" in repr(model) and "plda" in repr(model) and "channels" not in repr(model)
    cells = make_cells()
    cells.X = np.ones((96, 2), dtype=np.float32)
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    assert SCBDModel(cells, encoder="small").module.preprocess.output_shape == (2, 16, 16)


def test_a_linear_encoder_begins_as_the_map_it_starts_from():
    model = make(style_target=None)
    model.train(**QUICK, max_steps=1, lr=0.0)
    module, wells = model.module, model.adata
    r = model.get_latent_representation(representation="intermediate")
    scaled = module.preprocess(torch.from_numpy(wells.X))
    np.testing.assert_allclose(r, module.content.transform(scaled).numpy(), atol=1e-5)
    z = model.get_latent_representation(center=None)
    np.testing.assert_allclose(z, r / np.linalg.norm(r, axis=1, keepdims=True), atol=1e-5)


def test_embeddings_of_features_are_centred_on_controls():
    model = make()
    model.train(**QUICK, max_steps=3)
    controls = (model.adata.obs["compound"] == "DMSO").to_numpy()
    plain, centred = (model.get_latent_representation(center=center) for center in (None, "auto"))
    np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(centred, plain - plain[controls].mean(0), atol=1e-5)
    without = make(keys={"y_key": "compound", "e_key": "plate"})
    without.train(**QUICK, max_steps=1)
    np.testing.assert_allclose(np.linalg.norm(without.get_latent_representation(), axis=1), 1, atol=1e-5)
    with pytest.raises(ValueError, match="center='controls' needs controls"):
        without.get_latent_representation(center="controls")
    with pytest.raises(ValueError, match="center='mean' is not known"):
        model.get_latent_representation(center="mean")


def test_an_interrupted_run_has_the_centre_of_its_weights():
    model = make()
    model.train(**QUICK, max_steps=3)
    first = model.centers_["c"]
    with pytest.raises(KeyboardInterrupt):
        model.train(**QUICK, max_steps=8, lr=1e-2, callbacks=PressCtrlC(5))
    controls = (model.adata.obs["compound"] == "DMSO").to_numpy()
    z = model.get_latent_representation(center=None)
    np.testing.assert_allclose(model.get_latent_representation(), z - z[controls].mean(0), atol=1e-5)
    assert not np.allclose(model.centers_["c"], first, atol=1e-3)


def test_a_run_that_diverges_at_once_on_other_cells_leaves_all_as_it_was():
    model = make()
    model.train(**QUICK, max_steps=3)
    z, wells = model.get_latent_representation(), model.adata
    model.adata = make_wells(n_plates=2)
    with pytest.raises(TrainingDiverged):
        model.train(**QUICK, max_steps=3, lr=1e30)
    np.testing.assert_array_equal(model.get_latent_representation(wells), z)


def test_a_feature_that_controls_do_not_vary_in_is_trained_on():
    wells = make_wells()
    controls = (wells.obs["compound"] == "DMSO").to_numpy()
    wells.X[controls, 3] = 0  # foci that only treated cells have
    wells.X[:, 4] = np.where(np.arange(72) < 40, 1, np.nextafter(np.float32(1), 2))  # rounding
    model = make(wells)
    model.train(**QUICK, max_steps=3)
    scaled = model.module.preprocess(torch.from_numpy(wells.X)).numpy()
    assert not scaled[controls, 3].any() and 0.5 < scaled[~controls, 3].std() < 2 and not scaled[:, 4].any()
    assert np.isfinite(model.get_latent_representation()).all()


def test_few_controls_among_many_cells_are_all_looked_at(monkeypatch):
    wells = make_wells()
    controls = (wells.obs["compound"] == "DMSO").to_numpy()
    monkeypatch.setattr("scbd.model._sample._ROWS", 20)
    model = make(wells)
    model.train(**QUICK, max_steps=1)
    np.testing.assert_allclose(model.module.preprocess.mean.numpy(), np.median(wells.X[controls], axis=0), rtol=1e-6)


@pytest.mark.parametrize("settings", [{"encoder": "mlp"}, {"whitening": "controls"}, {"whitening": None}])
def test_positions_that_nobody_looks_at_are_told(settings):
    with pytest.warns(UserWarning, match="position_key is not used: effects of positions are removed only"):
        make(**settings)


def test_missing_values_of_another_table_are_named():
    model, other = make(), make_wells(seed=1)
    other.X[5, 2] = np.nan
    with pytest.raises(ValueError, match=r"1 features, first of all feature_2, and in 1 of 72 cells looked at .rows 5"):
        model.adata = other


def test_positions_that_were_mended_are_other_labels(tmp_path):
    wells = make_wells()
    make(wells).train(**QUICK, max_steps=2, checkpoint_dir=tmp_path)
    wells.obs["well"] = wells.obs["well"].astype(str).str.replace("W00", "W17")
    with pytest.raises(ValueError, match="other cells .other labels"):
        make(wells).train(**QUICK, max_steps=4, checkpoint_dir=tmp_path, ckpt_path="last")


def test_a_control_may_be_a_number():
    wells = make_wells()
    wells.obs["compound"] = wells.obs["compound"].cat.codes.astype(int)
    for control in (0, "0"):
        model = make(wells, KEYS | {"control": control})
        np.testing.assert_array_equal(model._controls(wells), wells.obs["compound"] == 0)


def test_wells_full_of_controls_hide_nothing_of_what_was_learned():
    """Six wells in ten are controls, as where all of DMSO is kept: nothing tells them apart from each other."""
    wells = make_wells(n_compounds=12, n_controls=18, n_features=20)
    learned, said = [], []
    for keys in (KEYS, {"y_key": "compound", "e_key": "plate"}):  # told of controls, and not
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = make(wells, keys)
            model.train(**QUICK, max_steps=20)
        learned.append(model.health["learned_c"])
        said.append(any("z_c has learned to tell few" in str(warning.message) for warning in caught))
    assert learned[0] > 0.5 > 0 > learned[1] and said == [False, True]


def test_a_subset_of_a_table_is_set_up_by_itself():
    wells = make_wells()
    make(wells)
    for part in (wells[:30], wells.copy()):
        with pytest.raises(
            ValueError, match="subset or a copy of a table that was set up: call SCBDModel.setup_anndata"
        ):
            SCBDModel(part)
    assert make(wells[:30].copy()).adata.n_obs == 30


def test_a_label_of_many_rows_may_be_that_of_controls(caplog):
    columns = {"y_key": "compound", "e_key": "plate"}
    make(make_wells(n_controls=12), columns)
    assert "50% of the rows are 'DMSO'. If these are controls, name them: control='DMSO'." in caplog.text
    caplog.clear()
    wells = make_wells(n_controls=12)
    wells.obs["compound"] = wells.obs["compound"].cat.rename_categories(range(13))
    make(wells, columns)
    number = wells.obs["compound"].mode()[0]
    assert f"are {number}. If these are controls, name them: control={number}." in caplog.text
    caplog.clear()
    make(make_wells(n_controls=12), columns | {"control": "DMSO"})
    make(make_wells(n_controls=2), columns)
    make(make_wells(n_compounds=3, n_controls=12), columns)  # two or three conditions are no screen
    assert "If these are controls" not in caplog.text


def test_several_controls_are_controls_all():
    wells = make_wells()
    model = make(wells, KEYS | {"control": ["DMSO", "compound_0"]})
    np.testing.assert_array_equal(model._controls(wells), wells.obs["compound"].isin(["DMSO", "compound_0"]))
    fewer = wells[wells.obs["compound"] != "compound_0"]
    np.testing.assert_array_equal(model._controls(fewer), fewer.obs["compound"] == "DMSO")
    with pytest.raises(ValueError, match="No row has the control 'EMPTY' in 'compound'"):
        make(wells, KEYS | {"control": ["DMSO", "EMPTY"]})


def test_controls_that_are_not_trained_on_are_no_centre():
    model = make()
    obs = model.adata.obs
    obs["split"] = np.where(obs["compound"] == "DMSO", "test", "train")
    with pytest.warns(UserWarning, match="No training cell is a control"):
        model.train(enable_progress_bar=False, accelerator="cpu", split="split", max_steps=1)
    assert model.centers_ == {}


def test_saved_and_loaded_with_transform_and_centre(tmp_path):
    model = make()
    model.train(**QUICK, max_steps=3)
    z = model.get_latent_representation()
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), model.adata)
    assert_same(weights(loaded), weights(model))
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)
    assert loaded.module.is_fitted


def test_new_tables_may_have_other_features_beside_and_another_order(tmp_path):
    model = make()
    model.train(**QUICK, max_steps=3)
    new = make_wells(seed=1)
    expected = model.get_latent_representation(new)
    turned = new[:, ::-1].copy()
    np.testing.assert_array_equal(model.get_latent_representation(turned), expected)
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), turned)
    np.testing.assert_array_equal(loaded.get_latent_representation(), expected)
    with pytest.raises(ValueError, match=r"lacks 1 of the 10 features .* \(feature_3\)"):
        model.get_latent_representation(new[:, new.var_names != "feature_3"].copy())
    new.X[5, 2] = np.nan
    with pytest.raises(ValueError, match=r"Features of 1 of 72 cells .* infinite values \(rows 5\)"):
        model.get_latent_representation(new)


def test_runs_are_the_same_and_go_on(tmp_path):
    def trained(folder: str, *steps: int) -> SCBDModel:
        for n, step in enumerate(steps):
            model = make(encoder="mlp", n_latent=4)
            where = {"checkpoint_dir": tmp_path / folder, "ckpt_path": "last" if n else None}
            model.train(**QUICK, max_steps=step, batch_size=40, **where)
        return model

    assert_same(weights(trained("whole", 6)), weights(trained("parts", 3, 6)))


@pytest.mark.parametrize("encoder", ["linear", "mlp", torch.nn.Linear(10, 5)], ids=["linear", "mlp", "module"])
@pytest.mark.parametrize("whitening", ["auto", "within", "controls", "lda", "plda", None])
def test_encoders_and_whitenings(encoder, whitening):
    model = make(encoder=encoder, whitening=whitening)
    model.train(**QUICK, max_steps=2)
    assert np.isfinite(model.get_latent_representation()).all()
    kind = None if whitening is None else whitening if whitening != "auto" else "plda" if encoder == "linear" else None
    assert getattr(model.module.content.transform, "kind", None) == kind


def test_n_latent_takes_the_best_directions():
    model = make(n_latent=3)
    assert model.module.content.transform.output_shape == (3,)
    assert make().module.content.n_latent == 10 and make(encoder="mlp").module.content.n_latent == 64
    with pytest.raises(ValueError, match="n_latent=3: without whitening"):
        make(n_latent=3, whitening=None)
    with pytest.raises(ValueError, match=r"n_components=11 \(n_latent of a linear encoder\): there are 10 features"):
        make(n_latent=11)


def test_the_encoder_of_z_s_starts_from_environments():
    model = make()
    model.train(**QUICK, max_steps=1, lr=0.0)
    z_c, z_s = (model.get_latent_representation(block=block, center=None) for block in "cs")
    plate = model.adata.obs["plate"].cat.codes.to_numpy()

    def share(z: np.ndarray) -> float:
        means = np.stack([z[plate == p].mean(0) for p in range(4)])
        return float(means.var(0).sum() / z.var(0).sum())

    assert share(z_s) > 2 * share(z_c)


def test_plates_that_were_standardised_one_by_one_are_trained_on():
    """Their means are the same, and the encoder of z_s has no difference of plates to start from."""
    wells = make_wells()
    wells.layers["standardized"] = standardize_by_environment(wells.X, wells.obs["plate"])
    model = make(wells, KEYS | {"layer": "standardized"})
    model.train(**QUICK, max_steps=2)
    z_s = model.get_latent_representation(block="s", center=None)
    assert np.isfinite(z_s).all() and np.linalg.matrix_rank(z_s) > 3


def test_learns_compounds_and_not_plates():
    wells = make_wells(n_compounds=20, n_plates=6, n_features=20)
    model = make(wells)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(enable_progress_bar=False, accelerator="cpu")
    z, compound, plate = (
        model.get_latent_representation(),
        wells.obs["compound"].to_numpy(),
        wells.obs["plate"].to_numpy(),
    )

    def nearest(x: np.ndarray) -> tuple[float, float]:
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        similar = x @ x.T
        np.fill_diagonal(similar, -np.inf)
        chosen = similar[compound != "DMSO"].argmax(1)
        known = compound != "DMSO"
        return float((compound[chosen] == compound[known]).mean()), float((plate[chosen] == plate[known]).mean())

    (raw_compound, raw_plate), (found_compound, found_plate) = nearest(wells.X), nearest(z)
    assert found_compound > 0.85 > raw_compound and found_plate < 0.5 < raw_plate


def test_what_validates_is_taken_from_what_trains():
    """A linear encoder trains on all cells by default, and validates when asked to."""
    model = make()
    model.train(enable_progress_bar=False, accelerator="cpu", max_steps=1)
    assert len(model.train_indices) == 72 and not len(model.validation_indices)
    model = make()
    model.train(enable_progress_bar=False, accelerator="cpu", max_steps=1, validation_size=0.25)
    assert len(model.train_indices) + len(model.validation_indices) == 72
    assert 0 < len(model.validation_indices) < 36


def test_memory_mapped_and_zarr_features_give_the_same(tmp_path):
    wells = make_wells()
    model = make(wells)
    model.train(**QUICK, max_steps=3)
    z = model.get_latent_representation()
    wells.uns.clear()
    wells.write_h5ad(tmp_path / "wells.h5ad")
    mapped = open_screen(tmp_path / "wells.h5ad", layer="X")
    np.testing.assert_array_equal(model.get_latent_representation(mapped), z)
    assert not isinstance(mapped.X, np.memmap) and mapped.X.flags.writeable is False
    wells.X = memory_map_h5ad(tmp_path / "wells.h5ad", "X")
    again = make(wells)
    again.train(**QUICK, max_steps=3, perturbations_per_batch=None)
    np.testing.assert_allclose(again.get_latent_representation(), z, atol=1e-5)


def test_embed_to(tmp_path):
    model = make()
    model.train(**QUICK, max_steps=3)
    table = model.embed_to(tmp_path / "z.h5ad")
    np.testing.assert_allclose(table.obsm["X_scbd_c"], model.get_latent_representation(), atol=1e-6)
    np.testing.assert_allclose(table.obsm["X_scbd_s"], model.get_latent_representation(block="s"), atol=1e-6)


def test_a_decoder_shows_features():
    model = make()
    model.adata.X[3, 0] = 1e4  # beyond what the encoders see of it, and still what the cell has
    np.testing.assert_array_equal(model.get_intensities(), model.adata.X)
    model.train(**QUICK, max_steps=5)
    model.train_decoder(enable_progress_bar=False, accelerator="cpu", max_steps=200, width=32)
    decoded, given = model.reconstruct(), model.get_intensities()
    assert decoded.shape == given.shape == (72, 10)
    np.testing.assert_array_equal(given, model.adata.X)
    others = np.delete(decoded, 3, axis=0), np.delete(given, 3, axis=0)
    assert np.square(others[0] - others[1]).mean() < others[1].var()
    assert model.swap_blocks([0, 1], [20, 21]).shape == (2, 10)


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        ("Give one of image_key and layer", {"image_key": "single_cell_images", "layer": "X"}),
        ("layers has no 'log' .*Name it with layer", {"layer": "log"}),
        ("obsm has no 'dino' .*Name it with obsm_key", {"obsm_key": "dino"}),
        ("No row has the control 'dmso' in 'compound' .*Did you mean 'DMSO'", {"control": "dmso"}),
        ("control=nan is no value: give control the value of 'compound'", {"control": float("nan")}),
        ("obs has no 'wells' .*Did you mean 'well'", {"position_key": "wells"}),
        ("Every cell has the same obs\\['one'\\]", {"e_key": "one"}),
    ],
)
def test_bad_set_ups_are_said(message, keys):
    wells = make_wells()
    wells.obs["one"] = "plate"
    with pytest.raises((KeyError, ValueError), match=message):
        SCBDModel.setup_anndata(wells, **KEYS | keys)


def test_images_under_another_key_are_not_passed_over():
    cells = make_cells()
    cells.obsm["crops"] = cells.obsm.pop("single_cell_images")
    cells.X = np.random.default_rng(0).normal(size=(96, 2)).astype(np.float32)
    with pytest.raises(KeyError, match="obsm has no 'single_cell_images' .its keys: crops"):
        SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", layer="X")


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        (
            "encoder='resnet18' is for images, and the inputs are features: use one of linear, mlp",
            {"encoder": "resnet18"},
        ),
        ("There is no encoder 'conv': use one of linear", {"encoder": "conv"}),
        ("image_size=32 is for images", {"image_size": 32}),
        ("augment=True is for images", {"augment": True}),
        ("whitening='zca' is not known", {"whitening": "zca"}),
    ],
)
def test_settings_of_images_are_refused(message, settings):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_settings_of_features_are_refused_with_images():
    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    for settings in ({"encoder": "linear"}, {"clip": 5.0}, {"whitening": "plda"}):
        with pytest.raises(ValueError, match="for features"):
            SCBDModel(cells, **settings)


def test_one_well_a_perturbation_is_said():
    wells = make_wells(n_compounds=40, n_plates=2, n_controls=1)
    wells.obs["each"] = [f"one_{i}" for i in range(len(wells))]
    keys = {"y_key": "each", "e_key": "plate"}
    with pytest.warns(UserWarning, match="confounded"):
        model = make(wells, keys)
    with pytest.raises(ValueError, match="Each of the 82 training cells has a label of its own"):
        model.train(**QUICK, max_steps=1)


def test_without_whitening_a_linear_embedding_has_the_dimension_of_its_features():
    assert make(make_wells(n_features=310)).module.content.n_latent == 300
    assert make(make_wells(n_features=310), whitening=None).module.content.n_latent == 310
