from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from torch.nn import functional as F

from scbd.baselines import ERMModel

QUICK: dict[str, Any] = {"batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu", "lr": 3e-3}


@pytest.fixture(scope="module")
def trained() -> ERMModel:
    cells = make_cells()
    scvi.settings.seed = 0
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(max_steps=60, load_best=True, **QUICK)
    return model


def test_it_learns_the_perturbation_and_predicts_by_name(trained):
    predicted = trained.predict(indices=trained.train_indices)
    genes = trained.adata.obs["gene"].to_numpy()
    assert np.mean(predicted == genes[trained.train_indices]) > 0.9
    assert np.mean(trained.predict(indices=trained.validation_indices) == genes[trained.validation_indices]) > 0.6
    proba = trained.predict(return_proba=True)
    assert proba.shape == (96, 4)
    np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(
        np.array(["gene_0", "gene_1", "gene_2", "gene_3"])[proba.argmax(1)], trained.predict()
    )


def test_it_takes_the_norm_of_its_encoder():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    kinds = {type(part).__name__ for part in ERMModel(cells, encoder="small", norm="group").module.modules()}
    assert "GroupNorm" in kinds and "BatchNorm2d" not in kinds
    with pytest.raises(ValueError, match="norm='layer' is not known"):
        ERMModel(cells, encoder="small", norm="layer")


def test_its_loss_is_cross_entropy_of_a_linear_head_on_its_embedding(trained):
    r = torch.from_numpy(trained.get_latent_representation())
    assert r.shape == (96, 256)
    np.testing.assert_array_equal(r, trained.get_latent_representation(representation="intermediate"))
    y = torch.from_numpy(trained.adata.obs["gene"].cat.codes.to_numpy(np.int64))
    images = torch.from_numpy(trained.adata.obsm["single_cell_images"])
    with torch.no_grad():
        loss = trained.module(images, y, torch.zeros_like(y)).loss
        expected = F.cross_entropy(trained.module.head(r), y)
    torch.testing.assert_close(loss, expected)


def test_environments_do_not_enter(trained):
    images, y = torch.randint(0, 256, (8, 2, 16, 16), dtype=torch.uint8), torch.arange(8) % 4
    with torch.no_grad():
        losses = [trained.module(images, y, e).loss for e in (torch.zeros(8).long(), torch.arange(8))]
    assert losses[0] == losses[1]


def test_save_and_load(trained, tmp_path):
    trained.save(str(tmp_path / "model"))
    loaded = ERMModel.load(str(tmp_path / "model"), adata=trained.adata)
    np.testing.assert_array_equal(loaded.predict(), trained.predict())
    new = make_cells(7, seed=3)
    del new.obs["gene"]
    assert loaded.predict(new).shape == (7,)


def test_it_has_one_block_and_a_history_of_its_loss(trained):
    assert {"train_loss", "validation_loss"} == set(trained.history)
    with pytest.raises(ValueError, match="has a single block, which carries the perturbation: use block='c'"):
        trained.get_latent_representation(block="s")
