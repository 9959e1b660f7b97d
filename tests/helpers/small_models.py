"""Make small models for a few steps of training, and compare their weights."""

from __future__ import annotations

import os
import signal
from typing import Any

import scvi
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback

from scbd import SCBDModel

QUICK: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 24,
    "lr": 1e-4,
    "enable_progress_bar": False,
    "accelerator": "cpu",
    "precision": "32-true",  # equal results on every machine
}


def make_model(cells=None, **kwargs) -> SCBDModel:
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    return SCBDModel(cells, **{"encoder": "small", "n_latent": 6, **kwargs})


def weights(model: SCBDModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0, msg=name)


class PressCtrlC(Callback):
    """Callback that sends SIGINT or another signal to this process, after a given number of steps."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Worsen(Callback):
    """Callback that collapses the embedding to a single point after two steps."""

    def on_train_batch_start(self, trainer, plan, *args):
        if trainer.global_step > 1:
            plan.module.content.projection[-1].weight.data.zero_()
