"""Two processes, as torchrun starts them, train like one on the joint batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_cells
from torch import nn
from torch.nn import functional

from scbd import SCBDModel
from scbd.data import open_embedding
from scbd.model import TrainingPlan

# what torchrun tells its processes, which here are copies of one that has everything loaded: that takes seconds
SCRIPT = """
import os, sys
sys.path[:0] = [{tests!r}]
import torch
torch.set_num_threads(1)
from model.test_devices import one_process

os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
workers = []
for rank in ("0", "1"):
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    workers.append(os.fork())
    if not workers[-1]:
        one_process({out!r})
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers))
"""
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 24,
    "lr": 1e-3,
    "train_size": 0.5,
    "validate_every": 1,
    "accelerator": "cpu",
    "precision": "32-true",
    "enable_progress_bar": False,
    "perturbations_per_batch": None,
    "seed": 0,  # that of scvi-tools is another in each process
    "plan_kwargs": {"lr_decay": False},  # what is made longer goes on with the same rate
}

# three perturbations of eight cells
NORMALISED = SETTINGS | {"perturbations_per_batch": 3, "lr": 1e-2}


class OfShares(nn.BatchNorm2d):
    """In one process what two compute: a device normalises every second cell, and in the end the first one's counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        shares = super().forward(x[::2]), functional.batch_norm(x[1::2], None, None, self.weight, self.bias, True)
        return torch.stack(shares, dim=1).flatten(0, 1)


class SteadyPlan(TrainingPlan):
    """Where a gradient is nothing but rounding, Adam follows its sign: not with an epsilon that is larger than that."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["eps"] = 1e-3
        return optimizer


class SteadyModel(SCBDModel):
    traits = replace(SCBDModel.traits, plan=SteadyPlan)


def make(norm: type[nn.BatchNorm2d] | None = None) -> SCBDModel:
    """By default without BatchNorm, whose statistics are those of a process."""
    cells = make_cells()
    SteadyModel.setup_anndata(cells, y_key="gene", e_key="well")
    torch.manual_seed(1)
    # before BatchNorm a bias has no gradient but noise
    first = [nn.Conv2d(2, 6, 3, 2, bias=False), norm(6)] if norm else [nn.Conv2d(2, 6, 3, 2)]
    encoder = nn.Sequential(*first, nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU(), nn.Flatten())
    # "auto" looks at validation cells, which a device sees by its own statistics
    alpha: Any = 0.0 if norm else "auto"
    # each turns its own images
    return SteadyModel(cells, encoder=encoder, n_latent=4, style_target=None, alpha=alpha, augment=False)


def one_process(out: str) -> None:
    """What each of them does."""
    model, rank = make(), os.environ["RANK"]
    settings = SETTINGS | {"devices": 2, "strategy": "ddp", "checkpoint_dir": out}
    model.train(**settings | {"max_steps": 3})
    torch.distributed.barrier()
    model = make()
    model.train(**settings, resume=True)
    torch.save(model.module.state_dict(), f"{out}/{rank}.pt")
    pd.concat(model.history.values(), axis=1).to_csv(f"{out}/history {rank}.csv")
    for block_size in (32, 100_000):  # some for each, and none for one
        whole = model.embed_to(f"{out}/{block_size}.zarr", block_size=block_size, batch_size=16)
        assert "X_steady_c" in whole.obsm
    model = make(torch.nn.BatchNorm2d)
    model.train(**NORMALISED | {"devices": 2, "strategy": "ddp"})
    torch.save(model.module.state_dict(), f"{out}/normalised {rank}.pt")


@pytest.mark.filterwarnings("ignore:z_c has collapsed")  # six steps
def test_train_two_processes_equals_one_process_and_resumes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = SCRIPT.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path), port=port)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    model = make()
    model.train(**SETTINGS)
    expected = model.module.state_dict()
    for rank in range(2):
        weights = torch.load(tmp_path / f"{rank}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    # each embeds a share, and no cell is lost or there twice
    z = model.get_latent_representation(batch_size=16)
    for block_size in (32, 100_000):
        embedded = open_embedding(tmp_path / f"{block_size}.zarr")
        assert list(embedded.obs_names) == list(model.adata.obs_names)
        np.testing.assert_allclose(embedded.obsm["X_steady_c"], z, atol=1e-3)
    # of BatchNorm, each has the statistics of its share, with cells of all perturbations; afterwards those of the first
    normalised = make(OfShares)
    normalised.train(**NORMALISED)
    one, two = (torch.load(tmp_path / f"normalised {rank}.pt") for rank in range(2))
    assert any("running_mean" in name for name in one)
    for name, value in normalised.module.state_dict().items():
        assert torch.equal(two[name], one[name]), name
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)
    # one history, of the joint losses
    history = pd.read_csv(tmp_path / "history 0.csv").set_index("step")
    for name in ("train_loss", "validation_loss"):
        expected = model.history[name][name].astype(float)
        both = pd.concat([history[name].dropna(), expected], axis=1, join="inner", keys=["two", "one"])
        assert len(both) > 1
        np.testing.assert_allclose(both["two"], both["one"], rtol=1e-4)
