"""SCBDModel as its users meet it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells
from small_models import QUICK, make_model
from torch import nn

import scbd
from scbd import SCBDModel

# a few steps leave BatchNorm's statistics unsettled and z_c squeezed
pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_the_five_lines(trained):
    z_c, z_s = trained.get_latent_representation(), trained.get_latent_representation(block="s")
    assert z_c.shape == z_s.shape == (96, 6)
    assert z_c.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(z_c, axis=1), 1, rtol=1e-5)
    assert not np.allclose(z_c, z_s)
    assert trained.get_latent_representation(representation="intermediate").shape == (96, 256)


def test_training_learns_both_blocks():
    cells = make_cells(200)
    model = make_model(cells, alpha=0.0)
    model.train(**QUICK | {"max_steps": 60, "lr": 2e-3, "batch_size": 100})
    truth = {"c": cells.obs["gene"], "s": cells.obs["well"]}
    for block, label in truth.items():
        predicted = scbd.metrics.predict_labels(
            model.get_latent_representation(block=block),
            label,
            model.get_latent_representation(block=block),
            classifier="nearest_mean",
        )
        assert (predicted == label).mean() > 0.9


def test_any_module_is_an_encoder(tmp_path):
    mine = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32, 10))
    model = make_model(encoder=mine)
    model.train(**QUICK)
    assert model.get_latent_representation(representation="intermediate").shape == (96, 10)
    assert "Sequential" in repr(model)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds Python objects \(.*making them could run any code"):
        SCBDModel.load(tmp_path / "model", model.adata)
    loaded = SCBDModel.load(tmp_path / "model", model.adata, allow_pickle=True)
    np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())
