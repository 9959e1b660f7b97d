"""On a GPU: the losses, steps, training from disk, memory and the device, and embedding. Refuses to run without one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import scvi
import torch
from _compare import Row, interleaved, largest_difference
from _scale import Scale
from anndata import AnnData
from data import cells_of
from losses import batch as embeddings
from losses import listing, ours, value_and_gradient
from step import SETTINGS, batch, gradient, pair, take_step
from torch.nn import functional as F

import scbd
from scbd.data import open_screen

Shape = tuple[int, int, int]
GOAL = "naive: the bare encoders; the goal is 0.95×"


def waited(call: Callable[[], Any]) -> Any:
    """What is computed, when it is: a GPU is only told what to do."""
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def peak(call: Callable[[], Any]) -> float:
    """MiB of the device beyond what was there before."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    waited(call)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def losses(sizes: tuple[int, ...], largest: int, device: torch.device, repeats: int) -> Iterator[Row]:
    """Both forms, and ours alone where the listing has no room."""
    for size in (*sizes, largest):
        z_c, z_s, y, e = (tensor.detach().to(device) for tensor in embeddings(size))
        inputs = z_c.requires_grad_(), z_s.requires_grad_(), y, e
        theirs, mine = (partial(value_and_gradient, form, inputs) for form in (listing, ours))
        claim = f"three losses, batch {size:,}"
        if size == largest:
            waited(mine)
            seconds = sorted(_seconds(mine) for _ in range(repeats))[repeats // 2]
            yield {"claim": claim, "ours_s": seconds, "ours_mib": peak(mine)}
            continue
        row, naive, fast = interleaved(lambda: waited(theirs), lambda: waited(mine), 5 * repeats)
        difference = max(largest_difference(a.cpu(), b.cpu()) for a, b in zip(fast, naive, strict=True))
        yield {"claim": claim, **row, "difference": difference, "naive_mib": peak(theirs), "ours_mib": peak(mine)}


def steps(encoder: str, size: int, shape: Shape, device: torch.device, repeats: int) -> Iterator[Row]:
    """Whole steps of the naive form, and of ours in float32 and bfloat16."""
    forms = pair(encoder, shape, device)
    inputs = {name: tensor.to(device) for name, tensor in batch(size, shape).items()}
    first = [take_step(*form, inputs, bf16=False) for form in forms]
    cosine = float(F.cosine_similarity(*(gradient(form[0]).double() for form in forms), dim=0))
    naive, ours = forms
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        theirs, mine = partial(take_step, *naive, inputs, bf16), partial(take_step, *ours, inputs, bf16)
        row = interleaved(lambda: waited(theirs), lambda: waited(mine), 2 * repeats)[0]
        claim = f"step of two {encoder}, batch {size:,} of {shape[1]}×{shape[2]}×{shape[0]}, {name}"
        row |= {"claim": claim, "naive_mib": peak(theirs), "ours_mib": peak(mine)}
        if not bf16:
            row |= {"difference": largest_difference(*(loss.cpu() for loss in first[::-1]))}
            row |= {"note": f"cosine of first gradients {cosine:.6f}"}
        yield row


class Between(L.Callback):
    """Seconds a step between a first, that only warms up, and the last; no step in between is waited for."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last, self._times = first, last, []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step in (self._first, self._last):
            waited(lambda: None)
            self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return (self._times[1] - self._times[0]) / (self._last - self._first)


def training(n: int, size: int, shape: Shape, length: int, encoder: str, repeats: int) -> Iterator[Row]:
    """`train()` against its bare encoders, with images in memory, on disk, and on the device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.h5ad"
        in_memory = cells_of(n, shape, "uint16")
        in_memory.write_h5ad(path)
        forms: dict[str, tuple[Callable[[], AnnData], dict[str, Any]]] = {
            "from memory": (lambda: in_memory, {}),
            "from a memory-map": (lambda: open_screen(path), {}),
            "preload='device'": (lambda: open_screen(path), {"batch_kwargs": {"preload": "device"}}),
        }
        for precision, name in (("32-true", "float32"), ("bf16-mixed", "bfloat16")):
            for where, (cells, how) in forms.items():
                found = [_trained(cells(), encoder, size, length, precision, how) for _ in range(max(1, repeats // 2))]
                bare, seconds = np.median(found, axis=0)
                what = f"train(), {encoder}, batch {size:,} of {shape[1]}×{shape[2]}×{shape[0]} uint16"
                note = f"{size / seconds:,.0f} cells/s. {GOAL}"
                row = {"claim": f"{what}, {name}, {where}", "naive_s": float(bare), "ours_s": float(seconds)}
                yield row | {"ratio": float(bare / seconds), "note": note}


def _trained(
    cells: AnnData, encoder: str, size: int, length: int, precision: str, how: dict[str, Any]
) -> tuple[float, float]:
    """Seconds of both encoders, forward and backward, and of a step."""
    scvi.settings.seed = 0
    scbd.SCBDModel.setup_anndata(cells, "y", "e")
    model, clock = scbd.SCBDModel(cells, encoder=encoder, **SETTINGS), Between(length // 3, length)
    quiet = {"enable_progress_bar": False, "train_size": 1.0, "callbacks": [clock]}
    model.train(max_steps=length, batch_size=size, precision=precision, **quiet, **how)
    net, device = model.module, model.device
    net.train()
    images = net.preprocess(torch.from_numpy(np.array(cells.obsm["single_cell_images"][:size])).to(device))
    seed = torch.ones(size, net.content.n_features, device=device) / size

    def bare() -> None:
        for _ in range(length // 3):
            for block in (net.content, net.style):
                block.encoder.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=precision != "32-true"):
                    features = block.encoder(images)
                features.backward(seed.to(features.dtype))

    waited(bare)
    return _seconds(bare) / (length // 3), clock.seconds


def embedding(n: int, shape: Shape, encoder: str, sizes: tuple[int, ...], repeats: int) -> Iterator[Row]:
    """`get_latent_representation` against the bare encoder on images prepared on the device, in the same batches."""
    scvi.settings.seed = 0
    cells = cells_of(n, shape, "uint16")
    scbd.SCBDModel.setup_anndata(cells, "y", "e")
    model = scbd.SCBDModel(cells, encoder=encoder, standardize=False)
    model.train(max_steps=2, batch_size=32, enable_progress_bar=False)
    images, net = cells.obsm["single_cell_images"], model.module.eval()
    for size in sizes:
        parts = [net.preprocess(torch.from_numpy(part).to(model.device)) for part in _parts(images, size)]

        def bare(parts: list[torch.Tensor] = parts) -> np.ndarray:
            with torch.inference_mode():
                return torch.cat([net.content.encoder(part) for part in parts]).cpu().numpy()

        how = {"representation": "intermediate", "enable_progress_bar": False, "batch_size": size}
        mine = partial(model.get_latent_representation, **how)
        row, theirs, z = interleaved(bare, mine, repeats)
        row |= {"difference": largest_difference(z, theirs), "note": f"{n / row['ours_s']:,.0f} cells/s"}
        what = f"embed {n:,} cells of {shape[1]}×{shape[2]}×{shape[0]} uint16, {encoder}, batches of {size:,}"
        yield {"claim": what, **row}


def _parts(images: np.ndarray, size: int) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    waited(call)
    return time.perf_counter() - start


def rows(scale: Scale) -> list[Row]:
    """All of it; the smallest sizes run on a processor, too."""
    return list(measured(scale))


def measured(scale: Scale) -> Iterator[Row]:
    """Rows as they come."""
    if not (torch.cuda.is_available() or scale.smoke):
        msg = "torch sees no GPU: leave gpu out."
        raise SystemExit(msg)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape: Shape = scale.of((4, 64, 64), (3, 32, 32))
    encoder, size, length = scale.of(("resnet18", 2048, 36), ("small", 16, 3))
    yield from losses(*scale.of(((2048, 8192, 32_768), 65_536), ((32,), 64)), device, scale.repeats)
    yield from steps(encoder, size, shape, device, scale.repeats)
    yield from training(8 * size, size, shape, length, encoder, scale.repeats)
    yield from embedding(scale.of(65_536, 64), shape, encoder, scale.of((512, 4096), (16,)), scale.repeats)
