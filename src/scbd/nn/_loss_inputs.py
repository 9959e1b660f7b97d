"""What the contrastive losses are given, looked at before anything is computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scbd.nn._log_sums import LOWEST_TEMPERATURE

# how far from 1 a length may be: half precision rounds unit vectors by less
_OFF = 0.01


def check_smoothing(smoothing: float) -> None:
    """Raise ``ValueError`` unless labels still say something."""
    if not 0 <= smoothing < 1:
        msg = f"smoothing is a probability below 1, at which labels say nothing; got {smoothing}."
        raise ValueError(msg)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless logits are finite."""
    if not LOWEST_TEMPERATURE < temperature < math.inf:
        msg = (
            f"temperature must be a number above {LOWEST_TEMPERATURE:.4f} (exp(1/temperature) overflows), got "
            f"{temperature}."
        )
        raise ValueError(msg)


def checked_batch(z: Tensor, temperature: float, labels: Tensor | None = None, name: str = "") -> Tensor:
    """``z`` in float32 or wider, if everything is as it should be."""
    if z.ndim != 2 or (labels is not None and labels.shape != z.shape[:1]):
        msg = f"z must be (B, D), got {tuple(z.shape)}."
        if labels is not None:
            msg = f"z must be (B, D) and {name} (B,), got {tuple(z.shape)} and {tuple(labels.shape)}."
        raise ValueError(msg)
    if len(z) < 2:
        msg = f"A contrastive loss compares examples with each other: the batch holds {len(z)}, give it at least 2."
        raise ValueError(msg)
    check_temperature(temperature)
    if z.device.type == "cpu":  # elsewhere, looking would make the processor wait for the device
        lengths = torch.linalg.vector_norm(z.detach().float(), dim=1)
        off, row = (lengths - 1).abs().max(0)
        if off > _OFF:  # NaN is not: of that, the loss is NaN
            msg = (
                f"z must hold vectors of unit length, that of row {int(row)} is {float(lengths[row]):.3g}: use "
                "torch.nn.functional.normalize(z, dim=1)."
            )
            raise ValueError(msg)
    return z.to(torch.promote_types(z.dtype, torch.float32))
