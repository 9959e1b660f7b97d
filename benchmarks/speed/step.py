"""One training step: the naive form against ours, and how much of ours is not the encoders'."""

from __future__ import annotations

import sys
import time
from itertools import product
from typing import Any

import lightning.pytorch as L
import numpy as np
import scvi
import torch
from _compare import Row, child, compared, largest_difference, resident_peak, timed
from _scale import Scale
from anndata import AnnData
from losses import listing
from torch import Tensor, nn
from torch.nn import functional as F

import scbd
from scbd.model import Losses
from scbd.model._objective import SCBDModule
from scbd.nn import Preprocess, build_encoder
from scbd.nn._encoders import SmallMapConv2d

Shape = tuple[int, int, int]
NAMES = {"resnet18": "ResNet-18", "small": "small encoders"}
SETTINGS: dict[str, Any] = {
    "n_latent": 64,
    "alpha": 1.0,
    "temperature": 0.1,
    "style_target": "e",
    "include_self": True,
    "invariance": "listing",
    "smoothing": 0.0,
}


class NaiveModule(nn.Module):
    """Two encoders with heads as one would write them down, and the paper's listing."""

    def __init__(self, encoder: str, shape: Shape, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in "cs":
            head = nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64)
            self.blocks.append(nn.Sequential(build_encoder(encoder, shape[0]), *head))

    def forward(self, inputs: Tensor, y: Tensor, e: Tensor) -> Losses:
        images = (inputs.float() / 255 - 0.0) / 1.0
        z_c, z_s = (F.normalize(block(images), dim=1) for block in self.blocks)
        return Losses(listing(z_c, z_s, y, e))

    def copy_from(self, module: SCBDModule) -> None:
        """The same weights."""
        for mine, theirs in zip(self.blocks, (module.content, module.style), strict=True):
            values = [*theirs.encoder.state_dict().values(), *theirs.projection.state_dict().values()]
            mine.load_state_dict(dict(zip(mine.state_dict(), values, strict=True)))


def batch(size: int, shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "inputs": torch.randint(0, 256, (size, *shape), dtype=torch.uint8, generator=generator),
        "y": torch.randint(0, size // 8, (size,), generator=generator),
        "e": torch.randint(0, 34, (size,), generator=generator),
    }


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor], bf16: bool) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast(inputs["y"].device.type, torch.bfloat16, enabled=bf16):
        loss = module(**inputs).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def pair(encoder: str, shape: Shape, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours = SCBDModule(Preprocess(shape, "uint8"), encoder=encoder, **SETTINGS).to(device)
    naive = NaiveModule(encoder, shape, ours.content.n_features).to(device)
    naive.copy_from(ours)
    return (naive, torch.optim.AdamW(naive.parameters(), lr=1e-4)), (
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-4, fused=True),
    )


def library_convolutions(module: nn.Module) -> None:
    """Undo :func:`scbd.nn.build_encoder`."""
    for part in module.modules():
        if isinstance(part, SmallMapConv2d):
            part.__class__ = nn.Conv2d


def gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def against_naive(encoder: str, size: int, shape: Shape, repeats: int) -> list[Row]:
    """Rounds of naive, float32 and bfloat16 steps; each form's first step of a round is not timed."""
    naive, ours = pair(encoder, shape)
    inputs = batch(size, shape)
    first = [take_step(*form, inputs, bf16) for form, bf16 in ((naive, False), (ours, False))]
    gradients = [gradient(form[0]) for form in (naive, ours)]
    cosine = float(F.cosine_similarity(gradients[0].double(), gradients[1].double(), dim=0))
    seconds = np.empty((repeats, 3))
    for row in seconds:
        take_step(*naive, inputs, False)
        row[0] = timed(lambda: take_step(*naive, inputs, False))[0]
        for column, bf16 in ((1, False), (2, True)):
            take_step(*ours, inputs, bf16)
            row[column] = timed(lambda: take_step(*ours, inputs, bf16))[0]
    what = f"step of two {NAMES[encoder]}, batch {size:,} of {shape[1]}×{shape[2]}×{shape[0]}"
    case = [encoder, *map(str, (size, *shape))]
    memory = {"naive_mib": child("step.py", "naive", *case)}
    return [
        {
            "claim": f"{what}, float32",
            **compared(seconds[:, [0, 1]]),
            "difference": largest_difference(first[1], first[0]),
            **memory,
            "ours_mib": child("step.py", "float32", *case),
            "note": f"cosine of first gradients {cosine:.6f}",
        },
        {
            "claim": f"{what}, bfloat16",
            **compared(seconds[:, [0, 2]]),
            **memory,
            "ours_mib": child("step.py", "bfloat16", *case),
        },
    ]


class Clock(L.Callback):
    """Seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def of_encoders(encoder: str, size: int, shape: Shape, precision: str, repeats: int, steps: int) -> Row:
    """`train()` of a model against bare forward and backward passes of its two encoders on prepared images."""
    rng = np.random.default_rng(0)
    cells = AnnData(
        obs={"y": rng.integers(0, size // 8, 2 * size).astype(str), "e": rng.integers(0, 34, 2 * size).astype(str)}
    )
    cells.obsm["single_cell_images"] = rng.integers(0, 256, (2 * size, *shape), dtype=np.uint8)
    scvi.settings.seed = 0
    scbd.SCBDModel.setup_anndata(cells, "y", "e")
    model = scbd.SCBDModel(cells, encoder=encoder, **SETTINGS)
    images = model.module.preprocess(torch.from_numpy(cells.obsm["single_cell_images"][:size]))
    encoders = [block.encoder.train() for block in (model.module.content, model.module.style)]
    seed = torch.ones(size, model.module.content.n_features) / size

    def bare() -> None:
        for encoder in encoders:
            encoder.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                features = encoder(images)
            features.backward(seed.to(features.dtype))

    seconds = np.empty((repeats, 2))
    for row in seconds:
        for encoder in encoders:
            encoder.train()
        bare()
        row[0] = np.median([timed(bare)[0] for _ in range(steps)])
        clock = Clock()
        model.train(
            max_steps=steps + 2,
            batch_size=size,
            train_size=1.0,
            precision=precision,
            accelerator="cpu",
            enable_progress_bar=False,
            callbacks=[clock],
        )
        row[1] = np.median(np.diff(clock.ends[1:]))
    name = "float32" if precision == "32-true" else "bfloat16"
    return {
        "claim": f"train() against its bare encoders, batch {size:,} of {shape[1]}×{shape[2]}×{shape[0]}, {name}",
        **compared(seconds),
        "note": "naive: the bare encoders; the goal is 0.95×",
    }


def rows(scale: Scale) -> list[Row]:
    large: list[tuple[str, int, Shape]] = [("resnet18", 2048, (3, 32, 32)), ("resnet18", 512, (4, 64, 64))]
    cases = scale.of(large, [("small", 16, (3, 32, 32))])
    table = [row for case in cases for row in against_naive(*case, scale.repeats)]
    for case, precision in product(cases, ("32-true", "bf16-mixed")):
        table.append(of_encoders(*case, precision, scale.repeats, steps=scale.of(5, 1)))
    return table


if __name__ == "__main__":  # FORM ENCODER SIZE C H W
    form, encoder, size, channels, height, width = *sys.argv[1:3], *map(int, sys.argv[3:])
    naive, ours = pair(encoder, (channels, height, width))
    inputs = batch(size, (channels, height, width))
    if form == "naive":
        for _ in range(3):
            take_step(*naive, inputs, False)
    else:
        for _ in range(3):
            take_step(*ours, inputs, form == "bfloat16")
    print(resident_peak())
