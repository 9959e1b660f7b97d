"""The three losses, value and gradient: the paper's listing against one streamed pass an embedding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from _compare import Row, child, interleaved, largest_difference, resident_peak, timed
from _scale import Scale
from torch import Tensor

from scbd.nn import invariance_loss, log_normaliser, supervised_contrastive_loss

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from reference.losses import listing_invariance, listing_supervised

DIMENSION = 64


def batch(size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """z_c, z_s, y with eight cells each, e of 34 wells."""
    generator = torch.Generator().manual_seed(0)
    z_c, z_s = (F.normalize(torch.randn(size, DIMENSION, generator=generator), dim=1).to(dtype) for _ in "cs")
    y = torch.randint(0, size // 8, (size,), generator=generator)
    e = torch.randint(0, 34, (size,), generator=generator)
    return z_c.requires_grad_(), z_s.requires_grad_(), y, e


def listing(z_c: Tensor, z_s: Tensor, y: Tensor, e: Tensor) -> Tensor:
    return listing_supervised(z_c, y, 0.1) + listing_supervised(z_s, e, 0.1) + listing_invariance(z_c, e, 0.1)


def ours(z_c: Tensor, z_s: Tensor, y: Tensor, e: Tensor) -> Tensor:
    shared = log_normaliser(z_c)
    loss = supervised_contrastive_loss(z_c, y, log_normaliser=shared) + supervised_contrastive_loss(z_s, e)
    return loss + invariance_loss(z_c, e, log_normaliser=shared)


def value_and_gradient(form: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    loss = form(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs[:2])]


def difference(fast: list[Tensor], naive: list[Tensor]) -> float:
    return max(map(largest_difference, fast, naive))


def extra(form: str, size: int) -> float:
    """Peak memory of a process that computes the losses, beyond that of one that stops before."""
    return child("losses.py", form, str(size)) - child("losses.py", "nothing", str(size))


def rows(scale: Scale) -> list[Row]:
    table = []
    for size in scale.of((512, 2048, 8192), (32,)):
        inputs = batch(size)
        row, naive, fast = interleaved(
            lambda: value_and_gradient(listing, inputs),
            lambda: value_and_gradient(ours, inputs),
            scale.repeats if size > 5000 else 5 * scale.repeats,
        )
        row["difference"] = difference(fast, naive)
        if size <= 2048:
            doubles = batch(size, torch.float64)
            exact = value_and_gradient(listing, doubles)
            row["difference_float64"] = difference(value_and_gradient(ours, doubles), exact)
        row |= {"naive_mib": extra("naive", size), "ours_mib": extra("ours", size)}
        table.append({"claim": f"three losses, batch {size:,}", **row})
    for size in scale.of((16384, 32768), (64,)):
        inputs = batch(size)
        seconds = min(timed(lambda: value_and_gradient(ours, inputs))[0] for _ in range(2))
        table.append({"claim": f"three losses, batch {size:,}", "ours_s": seconds, "ours_mib": extra("ours", size)})
    return table


if __name__ == "__main__":  # FORM SIZE
    form, size = sys.argv[1], int(sys.argv[2])
    forms = {"naive": listing, "ours": ours}
    value_and_gradient(ours, batch(16))  # libraries and threads are not what is measured
    value_and_gradient(listing, batch(16))
    inputs = batch(size)
    if form in forms:
        value_and_gradient(forms[form], inputs)
    print(resident_peak())
