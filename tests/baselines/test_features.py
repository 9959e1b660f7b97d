"""All systems take features in place of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
from conftest import make_wells

from scbd import baselines

# raw plates, shifted as they come
pytestmark = pytest.mark.filterwarnings("ignore:Environments \\(")
SETTINGS: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu", "train_size": 1.0, "max_steps": 4}
KEYS = {"y_key": "compound", "e_key": "plate", "control": "DMSO"}
CLASSIFIERS = ["ERM", "CORAL", "DANN", "IRM", "Fish", "GroupDRO"]


def make(name: str, **kwargs: Any) -> Any:
    wells, system = make_wells(), getattr(baselines, f"{name}Model")
    scvi.settings.seed = 0
    system.setup_anndata(wells, **KEYS)
    return system(wells, **kwargs)


@pytest.mark.parametrize("name", [*CLASSIFIERS, "VAE", "IVAE", "MCVAE"])
def test_every_system_learns_from_features(name, tmp_path):
    settings = {"control": "DMSO"} if name == "MCVAE" else {}
    model = make(name, **settings)
    model.train(**SETTINGS)
    z = model.get_latent_representation()
    assert np.isfinite(z).all() and len(z) == 72
    model.save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"), model.adata)
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_a_classifier_learns_compounds(encoder):
    model = make("ERM", encoder=encoder)
    model.train(**SETTINGS | {"max_steps": 400, "lr": 1e-2})
    assert (model.predict() == model.adata.obs["compound"].astype(str)).mean() > 0.9


def test_a_latent_model_describes_features():
    model = make("VAE", n_latent=8)
    model.train(**SETTINGS | {"max_steps": 300, "lr": 3e-3})
    losses = model.history["train_reconstruction"].to_numpy().ravel()
    assert losses[-1] < losses[0] - 1
