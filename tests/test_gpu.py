"""Tests that need a GPU. The suite hides GPUs: `CUDA_VISIBLE_DEVICES=0 python -m pytest tests/test_gpu.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import scvi
import torch
from anndata import AnnData
from conftest import make_cells, make_wells
from torch import Tensor, nn
from torch.nn import functional

from scbd import SCBDModel, baselines, run
from scbd.nn import invariance_loss, supervised_contrastive_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are"),
]
DEVICE, ACCELERATOR = "cuda", "gpu"
SHORT: dict[str, Any] = {"max_steps": 4, "batch_size": 24, "enable_progress_bar": False, "accelerator": ACCELERATOR}
KEYS: dict[str, Any] = {"y_key": "gene", "e_key": "well"}
SYSTEMS = [SCBDModel, *(getattr(baselines, name) for name in baselines.__all__ if name.endswith("Model"))]

LOSSES: dict[str, Any] = {
    "supervised": lambda z, y, e: supervised_contrastive_loss(z, y),
    "smoothed": lambda z, y, e: supervised_contrastive_loss(z, y, smoothing=0.1),
    **{form: lambda z, y, e, form=form: invariance_loss(z, e, reduction=form) for form in ("listing", "formula")},
}


@pytest.mark.parametrize("size", [70, 9000])  # one tile, and several
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_gpu_are_equal_to_cpu_in_float64(name, size):
    generator = torch.Generator().manual_seed(0)
    z = functional.normalize(torch.randn(size, 16, generator=generator), dim=1)
    labels = [torch.randint(0, n, (size,), generator=generator) for n in (9, 5)]

    def value_and_gradient(z: Tensor, *labels: Tensor) -> list[Tensor]:
        loss = LOSSES[name](z.requires_grad_(), *labels)
        return [part.cpu().double() for part in (loss.detach(), *torch.autograd.grad(loss, z))]

    found = value_and_gradient(*(tensor.to(DEVICE) for tensor in (z, *labels)))
    for mine, exact in zip(found, value_and_gradient(z.double(), *labels), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


def assert_embeddings_close(one: np.ndarray, two: np.ndarray) -> None:
    """Assert that embeddings are equal up to the precision of convolutions in TF32."""
    np.testing.assert_allclose(one, two, rtol=0, atol=5e-3)


def make_model(system: Any, cells: AnnData, control: str) -> Any:
    """Return a small model."""
    settings = {"control": control, "encoder": "small" if cells.X is None else "auto"}
    return system(cells, **{name: settings[name] for name in settings.keys() & system.__init__.__annotations__.keys()})


@pytest.mark.parametrize("how", [{}, {"batch_kwargs": {"preload": "device"}}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("system", SYSTEMS)
def test_load_model_trained_on_gpu_embeds_equally_on_cpu(system, how, tmp_path):
    cells = make_cells()
    scvi.settings.seed = 0
    system.setup_anndata(cells, **KEYS)
    model = make_model(system, cells, "gene_0")
    model.train(**SHORT, **how)
    assert model.device.type == DEVICE
    model.save(str(tmp_path / "model"))
    z = model.get_latent_representation()
    for accelerator in ("cpu", ACCELERATOR):
        loaded = system.load(str(tmp_path / "model"), cells, accelerator=accelerator)
        assert_embeddings_close(loaded.get_latent_representation(), z)


@pytest.mark.parametrize("system", SYSTEMS)
def test_load_feature_model_trained_on_gpu_embeds_equally_on_cpu(system, tmp_path):
    wells = make_wells()
    system.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO", position_key="well")
    model = make_model(system, wells, "DMSO")
    model.train(**SHORT | {"train_size": 1.0})
    z = model.get_latent_representation()
    model.save(str(tmp_path / "model"))
    loaded = system.load(str(tmp_path / "model"), wells, accelerator="cpu")
    assert_embeddings_close(loaded.get_latent_representation(), z)


def test_load_custom_encoder_on_gpu_embeds_equally_and_trains_on(tmp_path):
    cells = make_cells()
    SCBDModel.setup_anndata(cells, **KEYS)
    own = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32, 10)).to(DEVICE)
    model = SCBDModel(cells, encoder=own)
    model.train(**SHORT)
    model.save(str(tmp_path / "model"))
    for accelerator in ("cpu", ACCELERATOR):
        again = SCBDModel.load(str(tmp_path / "model"), cells, allow_pickle=True, accelerator=accelerator)
        assert_embeddings_close(again.get_latent_representation(), model.get_latent_representation())
        again.train(**SHORT)


def test_train_resume_and_train_decoder_on_gpu_return_finite_images(tmp_path):
    cells = make_cells()
    SCBDModel.setup_anndata(cells, **KEYS)
    model = SCBDModel(cells, encoder="small", n_latent=6)
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path / "run", "plan_kwargs": {"lr_decay": False}}
    model.train(**SHORT, **kept)
    model.train(**SHORT | {"max_steps": 8}, **kept, resume=True)
    assert model.training_settings_["steps"] == 8
    for joint in (False, True):
        model.train_decoder(**SHORT, width=4, joint=joint)
        pictures = model.swap_blocks([0, 1], [2, 3])
        assert pictures.shape == (2, 2, 16, 16) and np.isfinite(pictures).all()
        assert np.isfinite(model.traverse([0, 1], "gene_1")).all()
    new = make_cells(40, seed=1)
    new.obs["well"] = "elsewhere"
    assert np.isfinite(model.get_latent_representation(new)).all()


@pytest.mark.parametrize("inputs", ["images", "features"])
def test_run_on_gpu_written_embedding_is_equal_to_model_on_cpu(inputs, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("scbd._workflows.run._write_pictures", lambda *args: None)
    settings = SHORT | {"max_steps": 6}
    if inputs == "images":
        cells = make_cells(300)
        run(cells, **KEYS, out=tmp_path / "out", model_kwargs={"encoder": "small"}, train_kwargs=settings)
    else:
        cells = make_wells()
        run(cells, y_key="compound", e_key="plate", out=tmp_path / "out", train_kwargs=settings)
    written = anndata.read_h5ad(tmp_path / "out" / "cells.h5ad")
    model = SCBDModel.load(str(tmp_path / "out" / "model"), cells, accelerator="cpu")
    assert_embeddings_close(model.get_latent_representation(), written.obsm["X_scbd_c"])
