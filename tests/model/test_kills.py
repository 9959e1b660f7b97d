"""Training and embedding by processes that are killed at random moments, without warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import contents, make_cells
from helpers.crash_injection import killed_until, server

from scbd import SCBDModel
from scbd.data import verify_screen

TRAINING: dict[str, Any] = {
    "max_steps": 20,
    "batch_size": 24,
    "validate_every": 2,  # and keep a state: few processes live long enough for five
    "accelerator": "cpu",
    "precision": "32-true",
    "seed": 0,  # that of scvi-tools is another in each process
}
# slow enough that no process comes to the end in the time it is given
CODE = """
import time
import torch
torch.set_num_threads(1)
import warnings
warnings.simplefilter("ignore")
from pathlib import Path
from model.test_kills import embed, train, train_large
from scbd.data._screens import BlockStore
from scbd.model._plan import TrainingPlan

def slowed(call, seconds):
    return lambda *arguments: (time.sleep(seconds), call(*arguments))[1]

BlockStore.write = slowed(BlockStore.write, 0.02)
TrainingPlan.training_step = slowed(TrainingPlan.training_step, 0.11)
folder = Path({folder!r})

def job():
    {job}(folder)
"""


def make_model(encoder: str = "small") -> SCBDModel:
    cells = make_cells(200)
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    torch.manual_seed(0)
    return SCBDModel(cells, encoder=encoder, n_latent=6)


def train(folder: Path, encoder: str = "small", **how: Any) -> None:
    """Go on, if there is something to go on with."""
    model = make_model(encoder)
    model.train(**TRAINING | how, checkpoint_dir=folder, resume=True, enable_progress_bar=False)
    model.save(str(folder / "model"))


def train_large(folder: Path) -> None:
    """Write 262 MiB after every step, so that many a process is killed while it does."""
    train(folder, "resnet18", validate_every=1, max_steps=10)


def embed(folder: Path) -> None:
    model = SCBDModel.load(str(folder.parent / "model"), adata=make_cells(200))
    model.embed_to(folder / "z.zarr", batch_size=2, block_size=4)


@pytest.mark.filterwarnings("ignore:z_c has")
def test_train_and_embed_to_killed_at_random_moments_continue_to_equal_results(tmp_path):
    train(tmp_path, max_steps=10)
    killed, embedded = tmp_path / "killed", tmp_path / "killed" / "embedded"
    embedded.mkdir(parents=True)
    code = CODE.format(folder=str(killed), job="train")
    code += "\ndef shorter():\n    train(folder, max_steps=10)\n"  # it still takes several processes
    code += f"\ndef again():\n    embed(Path({str(embedded)!r}))"
    with server(code) as process:
        assert killed_until(killed / "model" / "model.pt", process, "shorter", longest=1.0) >= 2
        whole, again = (SCBDModel.load(str(folder / "model"), adata=make_cells(200)) for folder in (tmp_path, killed))
        for name, value in whole.module.state_dict().items():
            torch.testing.assert_close(again.module.state_dict()[name], value, rtol=0, atol=0, msg=name)
        # the curve goes on as if nothing had happened
        assert whole.history is not None and again.history is not None
        for name, frame in whole.history.items():
            pd.testing.assert_frame_equal(again.history[name], frame)

        embed(killed)
        assert killed_until(embedded / "z.zarr", process, "again", longest=0.5) >= 2
    verify_screen(embedded / "z.zarr")
    assert contents(embedded / "z.zarr") == contents(killed / "z.zarr")
