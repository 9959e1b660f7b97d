from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
from conftest import make_cells, make_wells
from sklearn.decomposition import PCA

from scbd import baselines
from scbd.baselines import pixel_pca
from scbd.metrics import label_probe

# raw plates, shifted as they come
SETTINGS: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu", "train_size": 1.0, "max_steps": 4}
KEYS = {"y_key": "compound", "e_key": "plate", "control": "DMSO"}
CLASSIFIERS = ["ERM", "CORAL", "DANN", "IRM", "Fish", "GroupDRO"]


def make(name: str, **kwargs: Any) -> Any:
    wells, system = make_wells(), getattr(baselines, f"{name}Model")
    scvi.settings.seed = 0
    system.setup_anndata(wells, **KEYS)
    return system(wells, **kwargs)


@pytest.mark.parametrize("name", [*CLASSIFIERS, "VAE", "IVAE", "MCVAE"])
def test_baselines_learn_from_features(name, tmp_path):
    settings = {"control": "DMSO"} if name == "MCVAE" else {}
    model = make(name, **settings)
    model.train(**SETTINGS)
    z = model.get_latent_representation()
    assert np.isfinite(z).all() and len(z) == 72
    model.save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"), model.adata)
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)


@pytest.mark.parametrize("name", [name for name in baselines.__all__ if name.endswith("Model")])
@pytest.mark.parametrize("where", ["X", "layers", "obsm", "images"])
def test_baselines_masked_features_raise(name, where):
    wells = make_cells(12) if where == "images" else make_wells()
    how: dict[str, str] = {}
    if where == "images":
        slot, key = wells.obsm, "single_cell_images"
    elif where == "X":
        wells.X = np.ma.masked_array(wells.X)
    else:
        slot, key, how = getattr(wells, where), "masked", {"layer" if where == "layers" else "obsm_key": "masked"}
    if where != "X":
        slot[key] = np.ma.masked_array(slot.get(key, wells.X))
    keys = {"y_key": "gene", "e_key": "well"} if where == "images" else KEYS
    with pytest.raises(TypeError, match="masked array, and what its mask hides would be used"):
        getattr(baselines, name).setup_anndata(wells, **keys, **how)
    if where == "images":
        with pytest.raises(TypeError, match="masked array"):
            pixel_pca(wells)


def test_pixel_pca_masked_fit_raises():
    with pytest.raises(TypeError, match="fit is a masked array"):
        pixel_pca(make_cells(12), fit=np.ma.masked_array(np.ones(12, dtype=bool)))


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_erm_features_predicts_compounds(encoder):
    model = make("ERM", encoder=encoder)
    model.train(**SETTINGS | {"max_steps": 400, "lr": 1e-2})
    assert (model.predict() == model.adata.obs["compound"].astype(str)).mean() > 0.9


def test_vae_features_reconstruction_improves():
    model = make("VAE", n_latent=8)
    model.train(**SETTINGS | {"max_steps": 300, "lr": 3e-3})
    losses = model.history["train_reconstruction"].to_numpy().ravel()
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("scale_channels", [True, False])
def test_pixel_pca_small_images_equal_exact_pca(scale_channels):
    cells = make_cells(80)
    ours = pixel_pca(cells, n_components=2, scale_channels=scale_channels)
    pixels = cells.obsm["single_cell_images"].reshape(80, 2, -1).astype(float)
    scaled = pixels / np.sqrt(pixels.var(0).mean(1))[:, None] if scale_channels else pixels
    exact = PCA(2, svd_solver="full").fit_transform(scaled.reshape(80, -1))
    for a, b in zip(ours.T, exact.T, strict=True):
        assert abs(np.corrcoef(a, b)[0, 1]) > 0.9999


def test_pixel_pca_scale_channels_gives_equal_weight():
    """The dim one tells the gene, the bright one nothing."""
    cells = make_cells(200, shape=(2, 16, 16), dtype="float32")
    cells.obsm["single_cell_images"][:, :, :, :4] = 0
    noise = np.random.default_rng(0).normal(size=(200, 16, 16))
    cells.obsm["single_cell_images"][:, 0] = noise
    found = pixel_pca(cells, n_components=4)
    cells.obsm["single_cell_images"][:, 0] *= 1000
    bright = pixel_pca(cells, n_components=4)
    np.testing.assert_allclose(np.abs(bright), np.abs(found), atol=1e-2)
    genes = cells.obs["gene"].to_numpy()
    assert label_probe(bright, genes)["f1"] > 0.9
    assert label_probe(pixel_pca(cells, n_components=4, scale_channels=False), genes)["f1"] < 0.6
    cells.obsm["single_cell_images"][:, 0] = 7  # a channel that is the same everywhere
    assert np.isfinite(pixel_pca(cells)).all()


def test_pixel_pca_large_images_are_averaged_and_cropped():
    cells = make_cells(30, shape=(1, 50, 70))
    assert pixel_pca(cells, n_components=500).shape == (30, 30)
    flat = make_cells(30, shape=(1, 33, 33))
    kept = pixel_pca(flat)
    flat.obsm["single_cell_images"][:, :, 32:] = 0
    np.testing.assert_array_equal(pixel_pca(flat), kept)


def test_pixel_pca_channels_selects_channels():
    cells = make_cells(60, shape=(3, 16, 16))
    images = cells.obsm["single_cell_images"]
    found = pixel_pca(cells, channels=["channel_2", 0])
    images[:, 1] = np.random.default_rng(0).integers(0, 255, images[:, 1].shape)
    np.testing.assert_array_equal(pixel_pca(cells, channels=["channel_2", 0]), found)
    np.testing.assert_array_equal(pixel_pca(cells, channels={"DNA": "channel_2", "actin": 0}), found)
    assert np.abs(pixel_pca(cells) - found).max() > 1


def test_pixel_pca_missing_images_raise(cells):
    with pytest.raises(KeyError, match="obsm has no 'images'"):
        pixel_pca(cells, image_key="images")
    with pytest.raises(KeyError, match="without names: .* not 'DNA'"):
        pixel_pca(cells, channels=["DNA"])
