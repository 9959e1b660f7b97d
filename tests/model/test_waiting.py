"""A training step does not make the CPU wait for a GPU: no value on the device is read.

Without a GPU, this is tested in two ways. The operations of a step on the CPU are recorded, and must not include one
whose result determines a shape or a Python number. A step on the device "meta", whose tensors have no values, must not
need any.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from conftest import make_cells, make_wells
from torch.utils._python_dispatch import TorchDispatchMode

from scbd import SCBDModel
from scbd.baselines import CORALModel, DANNModel, ERMModel, GroupDROModel, IRMModel, IVAEModel, MCVAEModel, VAEModel
from scbd.nn import Groups

# a model that was trained for four steps has learned nothing
pytestmark = pytest.mark.filterwarnings("ignore:z_c has")

WAITING = {"_local_scalar_dense", "nonzero", "unique", "bincount", "masked_select", "is_nonzero", "equal", "item"}
BOTH = {"e_key": ["plate", "well"], "e_columns": "side_by_side"}
PUBLISHED: dict[str, Any] = {"invariance": "listing", "alpha": 1.0, "smoothing": 0.0}
# setup_anndata, model and train
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}, {}),
    "controls": ({"control": "gene_0"}, {"standardize_by": "controls"}, {}),
    "sets": ({}, {"set_size": 3, "smoothing": 0.5}, {}),
    "columns": (BOTH, {}, {}),
    "pairs": ({}, {"style_target": "ye"}, {"plan_kwargs": {"n_steps_alpha_warmup": 4}}),
    "published": ({}, PUBLISHED, {}),
    "formula": (BOTH, PUBLISHED | {"invariance": "formula", "set_size": 2}, {}),
    "augment": ({}, {"augment": True, "standardize_by": "cells"}, {}),
    "one block": ({}, {"style_target": None, "alpha": 0.01}, {"online_head": True}),
}


class WaitingOperations(TorchDispatchMode):
    """Names of operations for which the CPU would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool for index in (args[1] if isinstance(args[1], list) else [])
        )
        if by_mask or any(name == waiting or name.startswith(("_unique", "unique")) for waiting in WAITING):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Step(L.Callback):
    """Records the operations of a training step, from its batch to the next, including those of other callbacks."""

    def __init__(self, number: int) -> None:
        self.number, self.operations = number, WaitingOperations()

    def on_train_batch_start(self, trainer: Any, plan: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.number - 1:
            self.operations.__enter__()
        if batch_idx == self.number:
            self.operations.__exit__(None, None, None)


def operations_of_step(model: Any, **training: Any) -> Counter[str]:
    """Return the waiting operations of a step after a step that was logged."""
    step = Step(8)
    how: dict[str, Any] = {"max_steps": 10, "validate_every": 10, "log_every_n_steps": 5}
    how |= {"batch_size": 48, "accelerator": "cpu", "precision": "32-true"}
    model.train(**how | training, callbacks=[step])
    return step.operations.found


def with_plates() -> Any:
    cells = make_cells(192)
    cells.obs["plate"] = np.random.default_rng(1).choice(["one", "two"], cells.n_obs)
    return cells


@pytest.mark.parametrize("name", OPTIONS)
def test_train_any_option_step_does_not_wait(name):
    labels, settings, training = OPTIONS[name]
    cells = with_plates()
    SCBDModel.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | labels)
    model = SCBDModel(cells, encoder="small", n_latent=6, **settings)
    assert not operations_of_step(model, **training)


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_train_features_step_does_not_wait(encoder):
    wells = make_wells()
    SCBDModel.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO", position_key="well")
    assert not operations_of_step(SCBDModel(wells, encoder=encoder), train_size=0.7, batch_size=32)


@pytest.mark.parametrize("kind", [ERMModel, CORALModel, IRMModel, DANNModel, GroupDROModel])
def test_train_classifier_step_does_not_wait(kind):
    cells = with_plates()
    kind.setup_anndata(cells, y_key="gene", e_key="well")
    assert not operations_of_step(kind(cells, encoder="small"))


@pytest.mark.parametrize("kind", [VAEModel, IVAEModel, MCVAEModel])
def test_train_latent_step_does_not_wait(kind):
    cells = with_plates()
    kind.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    assert not operations_of_step(kind(cells, n_latent=4))


def test_waiting_operations_are_recorded():
    mask = torch.tensor([True, False])
    with WaitingOperations() as operations:
        values = torch.zeros(2)
        values[mask] = 1.0
        float(values[mask].sum())
        torch.unique(values)
    assert operations.found.total() >= 4


@pytest.mark.parametrize("kind", [SCBDModel, CORALModel, GroupDROModel])
@pytest.mark.parametrize("name", ["controls", "sets", "columns", "pairs", "published", "augment"])
def test_step_reads_no_value_of_device(kind, name, monkeypatch):
    """Values on the device "meta" cannot be read. Its losses are those of a GPU, which computes the whole matrix."""
    labels, settings, _ = OPTIONS[name]
    if kind is not SCBDModel:
        labels, settings = {key: value for key, value in labels.items() if key not in BOTH}, {}
    cells = with_plates()
    kind.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | labels)
    module = kind(cells, encoder="small", **settings).module.train()
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # has no "meta"
    module.to("meta")
    codes = [torch.arange(48) % 4, torch.arange(48) // 4 % 3]
    y, e = (Groups(column).to(module.device).attach(column.to(module.device)) for column in codes)
    images = torch.zeros(48, *cells.obsm["single_cell_images"].shape[1:], dtype=torch.uint8, device="meta")
    losses = module(images, y, e, generator=torch.Generator().manual_seed(0))
    losses.loss.backward()
    assert {value.device.type for value in (losses.loss, *losses.parts.values())} == {"meta"}


@pytest.mark.parametrize("name", ["default", "controls", "columns", "augment"])
def test_start_of_an_embedding_waits_for_nothing(name):
    labels, settings, training = OPTIONS[name]
    cells = with_plates()
    SCBDModel.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | labels)
    model = SCBDModel(cells, encoder="small", n_latent=6, **settings)
    model.train(max_steps=2, batch_size=48, enable_progress_bar=False, **training)
    embedder, rows = model._make_embedder(None, ["c", "s"], "embedding", None), slice(0, 20)
    read = torch.from_numpy(np.ascontiguousarray(embedder.source.read(rows)))
    model.module.eval()
    with torch.inference_mode(), WaitingOperations() as operations:
        started = embedder._start(rows, read, torch.device("cpu"), None)
    assert not operations.found
    assert {block: len(z) for block, z in started.values.items()} == {"c": 20, "s": 20}
