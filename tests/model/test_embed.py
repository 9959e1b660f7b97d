from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from conftest import IMAGE_KEY, make_cells
from small_models import make_model
from torch import nn

from scbd import SCBDModel
from scbd.baselines import ERMModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def make_trained(cells, kind=SCBDModel, **kwargs):
    kind.setup_anndata(cells, y_key="gene", e_key="well")
    model = kind(cells, encoder="small", **kwargs)
    model.train(max_steps=4, batch_size=24, accelerator="cpu", precision="32-true", enable_progress_bar=False)
    return model


def of_network(network, cells):
    """An encoder of one's own, as it is."""
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder=network, n_latent=6)
    model.is_trained_ = True
    return model


def named(cells):
    cells.var_names = ["DNA", "actin"]
    return cells


@pytest.fixture(scope="module")
def of_names():
    return make_trained(named(make_cells()), n_latent=6)


@pytest.fixture(scope="module")
def of_floats():
    return make_trained(make_cells(dtype="float32"), n_latent=6)


@pytest.fixture(scope="module")
def classifier():
    return make_trained(make_cells(dtype="float32"), ERMModel)


@pytest.mark.parametrize("batch_size", [-1, 0, 2.5, "8"])
def test_a_batch_size_that_is_none_gets_a_sentence(of_names, classifier, tmp_path, batch_size):
    """Of -1, the embedding was memory that nothing had been written to."""
    said = f"batch_size={batch_size!r}: give a whole number, 1 or larger"
    for call in (
        lambda: of_names.get_latent_representation(batch_size=batch_size),
        lambda: of_names.embed_to(tmp_path / "z.h5ad", batch_size=batch_size),
        lambda: classifier.predict(batch_size=batch_size),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert not list(tmp_path.iterdir())


def test_any_batch_size_gives_the_same_embedding(of_names):
    z = of_names.get_latent_representation(batch_size=None)
    for batch_size in (1, np.int64(7), 10**6):
        np.testing.assert_allclose(of_names.get_latent_representation(batch_size=batch_size), z, atol=1e-6)


def test_a_module_in_training_mode_embeds_as_it_does_out_of_it():
    """With the statistics of a batch, a cell's embedding would depend on the cells beside it."""
    model = of_network(nn.Sequential(nn.Flatten(), nn.Linear(512, 8), nn.BatchNorm1d(8)), make_cells())
    z = model.get_latent_representation()
    model.module.train()
    np.testing.assert_allclose(model.get_latent_representation(batch_size=5), z, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_pixels_of_new_cells_are_named_before_anything_is_returned(of_floats, classifier, tmp_path, value):
    cells = make_cells(60, dtype="float32")
    cells.obsm[IMAGE_KEY][[21, 40], 1, 3, 3] = value
    for call in (
        lambda: of_floats.get_latent_representation(cells),
        lambda: of_floats.get_latent_representation(cells, indices=[3, 40, 21]),
        lambda: of_floats.get_latent_representation(cells, out=tmp_path / "z.npy"),
        lambda: of_floats.embed_to(tmp_path / "z.h5ad", cells),
        lambda: classifier.predict(cells),
    ):
        with pytest.raises(ValueError, match=r"Images of 2 of \d+ cells .* \(rows (21, 40|40, 21)\): drop these cells"):
            call()
    assert not (tmp_path / "z.h5ad").exists() and not (tmp_path / "z.npy").exists()
    fine = np.isfinite(cells.obsm[IMAGE_KEY]).all(axis=(1, 2, 3))
    assert np.isfinite(of_floats.get_latent_representation(cells, indices=fine)).all()


def test_a_broken_model_is_told_from_broken_cells(of_names):
    weight = of_names.module.content.projection[-1].bias
    kept = weight.data.clone()
    weight.data[2] = torch.nan
    try:
        with pytest.raises(
            ValueError, match=r"returns NaN for 96 of 96 cells .*content.projection.*training that diverged"
        ):
            of_names.get_latent_representation()
    finally:
        weight.data = kept


def test_pixels_beyond_all_measure_are_told_from_a_broken_model():
    model = of_network(nn.Sequential(nn.Flatten(), nn.Linear(512, 8)), make_cells(dtype="float32"))
    model.module.content.encoder[1].weight.data.fill_(1e10)
    cells = make_cells(60, dtype="float32")
    cells.obsm[IMAGE_KEY][7] = 1e30
    with pytest.raises(ValueError, match=r"NaN for 1 of 60 cells \(rows 7\) .* far outside of those it was trained on"):
        model.get_latent_representation(cells)


def test_channels_in_another_order_are_refused_wherever_cells_are_embedded(of_names, tmp_path):
    turned = named(make_cells(20))[:, ["actin", "DNA"]].copy()
    for call in (
        lambda: of_names.get_latent_representation(turned),
        lambda: of_names.embed_to(tmp_path / "z.h5ad", turned),
    ):
        with pytest.raises(ValueError, match="channels actin, DNA, .* with DNA, actin: the same in another order"):
            call()


def test_channels_of_another_name_warn_once(of_names):
    cells = make_cells(20)
    cells.var_names = ["DNA", "tubulin"]
    with pytest.warns(UserWarning, match="channels DNA, tubulin, .* other names") as caught:
        of_names.get_latent_representation(cells)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_model_that_resizes_takes_other_sizes_of_the_same_proportions():
    with pytest.raises(ValueError, match="image_size=8 would squash images of 8 × 16 pixels"):
        make_trained(make_cells(shape=(2, 8, 16)), image_size=8)
    model = make_trained(make_cells(), n_latent=6, image_size=12)
    assert len(model.get_latent_representation(make_cells(8, shape=(2, 20, 20)))) == 8
    with pytest.raises(ValueError, match="images of 20 × 16 pixels, .* on 16 × 16, and resizing would stretch them"):
        model.get_latent_representation(make_cells(8, shape=(2, 20, 16)))


def test_new_cells_need_no_labels(trained):
    new = make_cells(10, seed=5)
    expected = trained.get_latent_representation(new)
    new.obs = new.obs.drop(columns=["gene", "well"])
    np.testing.assert_array_equal(trained.get_latent_representation(new), expected)
    new.obs["well"] = "never seen"
    np.testing.assert_array_equal(trained.get_latent_representation(new), expected)
    assert not new.uns  # not even set up


def test_indices_are_embedded_in_the_order_asked_for(trained):
    whole = trained.get_latent_representation(batch_size=7)
    rows = [5, 90, 5, 0, -1]
    np.testing.assert_allclose(trained.get_latent_representation(indices=rows), whole[rows], rtol=1e-5, atol=1e-6)
    mask = np.arange(96) % 3 == 0
    np.testing.assert_allclose(trained.get_latent_representation(indices=mask), whole[mask], rtol=1e-5, atol=1e-6)
    assert trained.get_latent_representation(indices=[]).shape == (0, 6)
    view = trained.adata[10:20]
    np.testing.assert_allclose(trained.get_latent_representation(view), whole[10:20], rtol=1e-5, atol=1e-6)
    for bad, said in (([0, 96], "reach from 0 to 96, there are 96"), (mask[:5], "length 5"), ([0.5], "row numbers")):
        with pytest.raises(ValueError, match=said):
            trained.get_latent_representation(indices=bad)


def test_out(trained, tmp_path):
    whole = trained.get_latent_representation()
    mine = np.zeros((96, 6), dtype=np.float32)
    assert trained.get_latent_representation(out=mine) is mine
    np.testing.assert_array_equal(mine, whole)
    mapped = trained.get_latent_representation(out=tmp_path / "new" / "z.npy", enable_progress_bar=True)
    np.testing.assert_array_equal(mapped, whole)
    np.testing.assert_array_equal(np.load(tmp_path / "new" / "z.npy"), whole)
    assert os.listdir(tmp_path / "new") == ["z.npy"]
    with pytest.raises(ValueError, match=r"out has shape \(3, 6\), the embedding has shape \(96, 6\)"):
        trained.get_latent_representation(out=mine[:3])
    with pytest.raises(ValueError, match="out has dtype int64, which holds no fractions"):
        trained.get_latent_representation(out=mine.astype(int))
    with pytest.raises(ValueError, match=r"the path of an \.npy file"):
        trained.get_latent_representation(out=tmp_path / "z.csv")


def test_a_broken_embedding_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    def breaks(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trained.module, "embed", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        trained.get_latent_representation(out=tmp_path / "z.npy")
    assert os.listdir(tmp_path) == []


def test_bad_requests_of_an_embedding(trained):
    with pytest.raises(ValueError, match="block='z' is not known: use 'c' .perturbation. or 's'"):
        trained.get_latent_representation(block="z")
    with pytest.raises(ValueError, match="representation='r' is not known"):
        trained.get_latent_representation(representation="r")
    with pytest.raises(ValueError, match="holds 3 channels of uint8, the model was set up with 2"):
        trained.get_latent_representation(make_cells(4, shape=(3, 16, 16)))
    with pytest.raises(ValueError, match="holds images of 20 × 20 pixels, the model was trained on 16 × 16"):
        trained.get_latent_representation(make_cells(4, shape=(2, 20, 20)))


def test_an_untrained_model_warns():
    with pytest.warns(UserWarning, match="untrained"):
        make_model().get_latent_representation()
