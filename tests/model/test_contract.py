"""A system of a stranger's: what the contract asks for is enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells
from small_models import QUICK, assert_same, weights

from scbd.model import EmbeddingModule, ImageModel, Losses
from scbd.nn import Features, FeatureScaling, Preprocess


class RidgeModule(EmbeddingModule):
    """Codes of the perturbation as numbers: of no use, and as short as can be."""

    def __init__(self, preprocess: Preprocess | FeatureScaling, encoder: str) -> None:
        super().__init__(preprocess)
        self.content = Features(encoder, preprocess.output_shape)
        self.head = torch.nn.Linear(self.content.n_features, 1)

    def forward(
        self,
        inputs: torch.Tensor,
        y: torch.Tensor,
        e: torch.Tensor,
        *,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        error = (self.head(self.content(self.preprocess(inputs, generator)))[:, 0] - y).abs()
        return Losses(error.square().mean(), {"error": error.mean()})


class RidgeModel(ImageModel):
    def __init__(self, adata: Any = None, encoder: str = "small", registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self.module = RidgeModule(self._preprocess(), encoder)


def test_a_new_system_is_trained_saved_and_embedded_from(tmp_path):
    cells = make_cells()
    RidgeModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = RidgeModel(cells)
    model.train(**QUICK, checkpoint_dir=tmp_path / "run")
    assert {"train_loss", "train_error", "validation_error"} <= set(model.history or {})
    z = model.get_latent_representation()
    assert z.shape == (96, 256) and model.training_settings_["steps"] == QUICK["max_steps"]
    model.save(str(tmp_path / "model"))
    loaded = RidgeModel.load(str(tmp_path / "model"), cells)
    assert_same(weights(loaded), weights(model))
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)
    with pytest.raises(ValueError, match="single block"):
        model.get_latent_representation(block="s")
    assert model.embed_to(tmp_path / "z.h5ad").obsm["X_ridge_c"].shape == (96, 256)
    assert "RidgeModel: 96 cells" in repr(model)


def test_a_module_without_an_objective_is_refused_when_it_is_made():
    class Forgotten(EmbeddingModule):
        pass

    with pytest.raises(TypeError, match="forward"):
        Forgotten(Preprocess((2, 16, 16), "uint8"))  # type: ignore[abstract]
