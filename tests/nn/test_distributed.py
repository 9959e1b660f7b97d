from __future__ import annotations

import gc
import importlib

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from scbd.nn import invariance_statistic, supervised_contrastive_loss
from scbd.nn._distributed import gather_rows

WORLD = 2
BATCH = 12


def cells() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return x, torch.arange(BATCH) % 3, torch.randint(2, (BATCH,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def objective(features: torch.Tensor, y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    features, y, e = gather_rows(features), gather_rows(y), gather_rows(e)
    z = nn.functional.normalize(features)
    return supervised_contrastive_loss(z, y) + 0.1 * invariance_statistic((features, z), e, y)


def loss_and_gradients(rank: int) -> list[torch.Tensor | None]:
    x, y, e = (part.chunk(WORLD)[rank] for part in cells())
    model = DistributedDataParallel(network())
    loss = objective(model(x), y, e)
    loss.backward()
    return [loss.detach(), gather_rows(y), *(p.grad for p in model.parameters())]


def one_process(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save(loss_and_gradients(rank), f"{folder}/{rank}.pt")
    # the model is part of a reference cycle; as long as it exists, so do the threads of gloo, and a thread that still
    # runs when Python shuts down can abort the process
    gc.collect()
    distributed.destroy_process_group()


def test_gather_rows_two_processes_have_gradient_of_joint_batch(tmp_path):
    """Loss and gradients are those of a single process with all cells."""
    # by a name that processes find: a package that is installed may be called tests, too
    job = importlib.import_module("nn.test_distributed").one_process
    multiprocessing.spawn(job, (str(tmp_path),), nprocs=WORLD)
    model = network()
    loss = objective(model(cells()[0]), *cells()[1:])
    loss.backward()
    expected = [loss.detach(), cells()[1], *(p.grad for p in model.parameters())]
    for rank in range(WORLD):
        for one, other in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gather_rows_single_process_returns_same_rows():
    rows = torch.ones(3, requires_grad=True)
    assert gather_rows(rows) is rows
