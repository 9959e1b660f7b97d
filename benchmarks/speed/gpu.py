"""On a GPU: losses, steps, training, embedding, and the paper's own setting on Colored MNIST.

    python benchmarks/speed/gpu.py OUT                                  the speed, at most 8 minutes on an H100
    python benchmarks/speed/gpu.py OUT --digits 400 --mnist FOLDER      Colored MNIST for 400 seconds

OUT is a folder for results, which are written as they come: gpu.json and profile.txt, or digits.json and weights. Each
row names its goal. `--smoke` runs tiny sizes, also without a GPU. FOLDER has the four official MNIST files.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import scvi
import torch
from _compare import Row, interleaved, largest_difference, machine
from _report import as_text
from _scale import SMOKE, Scale
from anndata import AnnData
from data import cells_of
from losses import batch as embeddings
from losses import listing, ours, value_and_gradient
from step import SETTINGS, batch, gradient, pair, take_step
from torch.nn import functional as F

import scbd
from scbd._workflows import demo

Shape = tuple[int, int, int]
# smallest ratio of the time of the naive form, or of the bare encoders, to our time
GOALS = {"losses, batch 2,048": 1.0, "losses, batch 8,192": 3.0, "step": 1.4, "train": 0.9, "embed": 0.95}


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
        claim = f"step of two {encoder}, batch {size:,} of {_text(shape)}, {name}"
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


def training(size: int, shape: Shape, length: int, encoder: str, where: tuple[str, ...], runs: int) -> Iterator[Row]:
    """`train()` against its bare encoders, with images in memory or on the device."""
    cells = cells_of(8 * size, shape, "uint16")
    for precision, name in (("32-true", "float32"), ("bf16-mixed", "bfloat16")):
        for place in where:
            how: dict[str, Any] = {"batch_kwargs": {"preload": "device"}} if place == "device" else {}
            found = [_trained(cells, encoder, size, length, precision, how) for _ in range(runs)]
            bare, seconds = np.median(found, axis=0)
            claim = f"train(), {encoder}, batch {size:,} of {_text(shape)} uint16, {name}, images in {place}"
            row = {"claim": claim, "naive_s": float(bare), "ours_s": float(seconds), "ratio": float(bare / seconds)}
            yield row | {"note": f"{size / seconds:,.0f} cells/s; naive: the bare encoders"}


def _text(shape: Shape) -> str:
    return f"{shape[1]}×{shape[2]}×{shape[0]}"


QUIET: dict[str, Any] = {"enable_progress_bar": False, "train_size": 1.0}


def _model(cells: AnnData, encoder: str) -> scbd.SCBDModel:
    scvi.settings.seed = 0
    scbd.SCBDModel.setup_anndata(cells, "y", "e")
    return scbd.SCBDModel(cells, encoder=encoder, **SETTINGS)


def _trained(
    cells: AnnData, encoder: str, size: int, length: int, precision: str, how: dict[str, Any]
) -> tuple[float, float]:
    """Seconds of both encoders, forward and backward, and of a step."""
    model, clock = _model(cells, encoder), Between(length // 3, length)
    model.train(max_steps=length, batch_size=size, precision=precision, callbacks=[clock], **QUIET, **how)
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
        what = f"embed {n:,} cells of {_text(shape)} uint16, {encoder}, batches of {size:,}"
        yield {"claim": what, **row}


def _parts(images: np.ndarray, size: int) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    waited(call)
    return time.perf_counter() - start


class Profile(L.Callback):
    """Operations of ten steps of training."""

    def __init__(self, first: int) -> None:
        self._first, self.seconds = first, 0.0
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.profile = torch.profiler.profile(
            activities=activities + [torch.profiler.ProfilerActivity.CUDA] * _has_gpu()
        )

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self._first:
            waited(lambda: None)
            self.profile.__enter__()
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self._first + 10:
            waited(lambda: None)
            self.seconds = (time.perf_counter() - self._start) / 10
            self.profile.__exit__(None, None, None)

    def per_step(self, pattern: str) -> float:
        """Number of calls per step, of operations or functions of the driver whose names match a pattern."""
        return sum(event.count for event in self.profile.key_averages() if re.match(pattern, event.key)) / 10


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def profile(size: int, shape: Shape, encoder: str, out: Path | None) -> Row:
    """Ten steps of training: how often the processor launches a kernel, copies, and waits."""
    cells = cells_of(4 * size, shape, "uint16")
    seen = Profile(first=3)
    _model(cells, encoder).train(max_steps=14, batch_size=size, callbacks=[seen], **QUIET | {"precision": "bf16-mixed"})
    if out is not None:
        by = "self_device_time_total" if _has_gpu() else "self_cpu_time_total"
        (out / "profile.txt").write_text(seen.profile.key_averages().table(sort_by=by, row_limit=60))
    launches, copies = seen.per_step("cu(da)?LaunchKernel"), seen.per_step("cudaMemcpyAsync")
    waits = seen.per_step("cuda(Stream|Device|Event)Synchronize")
    note = f"per step: {launches:.0f} kernels launched, {copies:.0f} copies, {waits:.1f} waits; goal: no waits"
    return {"claim": f"profiled step, batch {size:,} of {_text(shape)}, bfloat16", "ours_s": seen.seconds, "note": note}


def rows(scale: Scale) -> list[Row]:
    """All of it; the smallest sizes run on a processor, too."""
    return list(measured(scale))


def measured(scale: Scale, out: Path | None = None) -> Iterator[Row]:
    """Rows as they come."""
    if not (_has_gpu() or scale.smoke):
        msg = "torch sees no GPU: leave gpu out."
        raise SystemExit(msg)
    for row in _measured(scale, out):
        goal = next((goal for name, goal in GOALS.items() if name in row["claim"]), None)
        if goal is not None and "ratio" in row:
            verdict = "met" if row["ratio"] >= goal else "missed"
            row["note"] = "; ".join([*filter(None, [row.get("note")]), f"goal {goal:.2f}×: {verdict}"])
        yield row


def _measured(scale: Scale, out: Path | None) -> Iterator[Row]:
    device = torch.device("cuda" if _has_gpu() else "cpu")
    encoder, size, length = scale.of(("resnet18", 2048, 36), ("small", 16, 3))
    yield from losses(*scale.of(((2048, 8192), 65_536), ((32,), 64)), device, scale.repeats)
    for shape in ((3, 32, 32), (4, 64, 64)):
        yield from steps(encoder, size, shape, device, scale.repeats)
        where = ("memory",) if shape[0] == 3 else ("memory", "device")
        yield from training(size, shape, length, encoder, where, max(1, scale.repeats // 2))
    yield profile(size, (3, 32, 32), encoder, out)
    yield from embedding(scale.of(65_536, 64), (4, 64, 64), encoder, scale.of((512, 4096), (16,)), scale.repeats)


class Until(L.Callback):
    """Ends training after a number of seconds, and keeps the weights every two minutes."""

    def __init__(self, seconds: float, path: Path) -> None:
        self._end, self._kept, self._path = time.perf_counter() + seconds, time.perf_counter(), path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        now = time.perf_counter()
        trainer.should_stop = trainer.should_stop or now > self._end
        if now > self._kept + 120 or trainer.should_stop:
            self._kept = now
            trainer.save_checkpoint(self._path, weights_only=True)


def digits(seconds: float, mnist: Path | None, out: Path, scale: Scale) -> list[dict[str, float]]:
    """The paper's own setting on Colored MNIST with alpha 0 and 192: as many of its steps as fit in the time.

    Scores are accuracies of the digit from r_c and z_c, of white digits among others, and whether z_c has collapsed.
    """
    cells = scbd.datasets.colored_digits()[::9].copy() if scale.smoke else scbd.datasets.colored_mnist(mnist)
    found = []
    for alpha in (0.0, 192.0):
        scvi.settings.seed = 0
        scbd.SCBDModel.setup_anndata(cells, "digit", "environment")
        model = scbd.SCBDModel(cells, preset="paper", alpha=alpha, **scale.of({}, {"encoder": "small"}))
        start, until = time.perf_counter(), Until(seconds / 2, out / f"alpha_{alpha:g}.ckpt")
        how = scale.of({}, {"max_steps": 3, "batch_size": 32})
        model.train(split="split", callbacks=[until], enable_progress_bar=False, **how)
        trained = time.perf_counter() - start
        scores = demo.score_model(cells, model) | {"collapsed": model.health["collapsed"]}
        found.append({"alpha": alpha, "steps": model.training_settings_["steps"], "seconds": trained} | scores)
        (out / "digits.json").write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--digits", type=float, metavar="SECONDS", help="train on Colored MNIST instead")
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="default: downloaded once")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    scale, out = SMOKE if arguments.smoke else Scale(arguments.repeats), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.digits:
        digits(arguments.digits, arguments.mnist, out, scale)
        return
    start, found = time.perf_counter(), []
    for row in measured(scale, out):
        found.append(row)
        result = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": found}
        (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{time.perf_counter() - start:4.0f} s  {row['claim']}", flush=True)
    print(as_text(found))


if __name__ == "__main__":
    main()
