"""Tables with embeddings in place of inputs, and models that are shared with them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from helpers.small_models import QUICK, make_model

import scbd
from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


@pytest.fixture
def full() -> SCBDModel:
    """A model with a decoder, and images."""
    model = make_model()
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    return model


def minified(model: SCBDModel, cells: Any = None) -> AnnData:
    """Cells with embeddings in place of inputs; the model goes on with those it has."""
    attached = model.adata
    model.adata = attached if cells is None else cells
    model.minify_adata()
    table, model.adata = model.adata, attached
    return table


QUESTIONS: dict[str, Any] = {
    "z_c": lambda model, cells: model.get_latent_representation(cells),
    "z_s": lambda model, cells: model.get_latent_representation(cells, block="s"),
    "as the losses see it": lambda model, cells: model.get_latent_representation(cells, [3, -1], center=None),
    "reconstruct": lambda model, cells: model.reconstruct(cells, [1, 2]),
    "swap": lambda model, cells: model.swap_blocks([1, 2], [3, 4], cells),
    "traverse": lambda model, cells: model.traverse([1, 2], "gene_0", cells, n_steps=2),
}


@pytest.mark.parametrize("new", [False, True], ids=["training cells", "other wells"])
def test_minified_table_gives_equal_embeddings_and_pictures(full, new, tmp_path):
    cells = full.adata
    if new:
        cells = make_cells(60, seed=1)
        cells.obs["well"] = cells.obs["well"].cat.rename_categories(lambda name: f"new {name}")
    cells.obsm["mine"] = np.arange(cells.n_obs)[:, None]
    small = minified(full, cells)
    assert IMAGE_KEY in cells.obsm and IMAGE_KEY not in small.obsm and "mine" in small.obsm
    for name, ask in QUESTIONS.items():
        np.testing.assert_allclose(ask(full, small), ask(full, cells), rtol=1e-5, atol=1e-6, err_msg=name)
    of_small, of_all = (full.embed_to(tmp_path / f"{n}.zarr", table) for n, table in enumerate((small, cells)))
    np.testing.assert_allclose(of_small.obsm["X_scbd_c"], of_all.obsm["X_scbd_c"], rtol=1e-5, atol=1e-6)
    before = small.obsm["_scbd_latent"].copy()
    full.get_latent_representation(small)  # which is centred, and the table is not
    np.testing.assert_array_equal(small.obsm["_scbd_latent"], before)


NEEDS_INPUTS: dict[str, Any] = {
    "train": lambda model: model.train(**QUICK),
    "train_decoder": lambda model: model.train_decoder(**QUICK),
    "intensities": lambda model: model.get_intensities(),
    "r": lambda model: model.get_latent_representation(representation="intermediate"),
    "again": lambda model: model.minify_adata(),
    "new model": lambda model: type(model).setup_anndata(model.adata, "gene", "well"),
}


def test_minified_table_raises_where_inputs_are_needed(full):
    cells = full.adata
    full.minify_adata()
    assert full.minified_data_type is not None and "minified" in repr(full)
    for name, ask in NEEDS_INPUTS.items():
        with pytest.raises(ValueError, match="These cells are minified"):
            ask(full)
            pytest.fail(name)
    full.adata = cells
    assert full.minified_data_type is None and "minified" not in repr(full)
    full.train(**QUICK)


def test_minified_table_of_other_models_raises_where_inputs_are_needed():
    cells = make_cells()
    VAEModel.setup_anndata(cells, "gene", "well")
    vae = VAEModel(cells)
    vae.train(**QUICK)
    z = vae.get_latent_representation()
    vae.minify_adata()
    np.testing.assert_array_equal(vae.get_latent_representation(), z)
    with pytest.raises(ValueError, match="minified"):
        vae.reconstruct()
    ERMModel.setup_anndata(cells, "gene", "well")
    erm = ERMModel(cells, encoder="small")
    erm.train(**QUICK)
    erm.minify_adata()
    with pytest.raises(ValueError, match="minified"):
        erm.predict()


def test_minify_adata_removes_features_from_any_location():
    wells = make_wells()
    wells.obsm["features"], wells.layers["raw"] = wells.X.copy(), wells.X
    places: list[dict[str, Any]] = [{"layer": "X"}, {"obsm_key": "features"}]
    for where in places:
        SCBDModel.setup_anndata(wells, "compound", "plate", control="DMSO", **where)
        model = SCBDModel(wells)
        model.train(**QUICK | {"train_size": 1.0})
        z = model.get_latent_representation()
        model.minify_adata()
        assert model.adata.X is None and not model.adata.layers
        assert ("features" in model.adata.obsm) is ("layer" in where)
        np.testing.assert_array_equal(model.get_latent_representation(), z)


def test_minified_table_of_training_cells_is_recognised(full):
    rows = full.train_indices
    small = minified(full)
    full.adata = small
    np.testing.assert_array_equal(full.train_indices, rows)
    full.adata = small[::-1].copy()
    with pytest.warns(UserWarning, match="others"):
        _ = full.train_indices


def test_minified_table_of_other_weights_raises(full):
    small = minified(full)
    full.train(**QUICK)
    with pytest.raises(ValueError, match="another model"):
        full.get_latent_representation(small)
    with pytest.raises(ValueError, match="another model"):
        full.adata = small
    assert full.minified_data_type is None


def test_minified_model_loaded_elsewhere_gives_equal_results(full, tmp_path):
    """Saved with a card in one place, and loaded by name of the class from that folder alone."""
    pytest.importorskip("huggingface_hub", reason="scvi.hub needs huggingface_hub")
    import scvi.hub
    from huggingface_hub import ModelCard, ModelCardData

    z = full.get_latent_representation()
    full.save(str(tmp_path / "images"), save_anndata=True)
    full.minify_adata()
    folder = str(tmp_path / "model")
    full.save(folder, save_anndata=True)
    weigh = lambda name: (tmp_path / name / "adata.h5ad").stat().st_size
    assert weigh("model") < weigh("images")
    metadata = scvi.hub.HubMetadata.from_dir(folder, version("anndata"), model_parent_module="scbd")
    header = ModelCardData(license="cc-by-4.0", library_name="scvi-tools").to_yaml()
    card = ModelCard(f"---\n{header}\n---\nSeed {full.training_settings_['seed']}")
    scvi.hub.HubModel(folder, metadata=metadata, model_card=card).save()

    shared = scvi.hub.HubModel(folder)
    assert shared.model_card.data.license == "cc-by-4.0" and "Seed 0" in shared.model_card.text
    assert isinstance(shared.model, scbd.SCBDModel) and shared.model.minified_data_type is not None
    np.testing.assert_array_equal(shared.model.get_latent_representation(), z)
    np.testing.assert_array_equal(shared.model.train_indices, full.train_indices)
    shared.load_model(make_cells())
    np.testing.assert_array_equal(shared.model.get_latent_representation(), z)
