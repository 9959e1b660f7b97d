"""Load outputs of the original implementations for given inputs, stored next to the checkout in shared/originals."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "originals"


class Known:
    """Arrays of one file by name, also as tensors with :meth:`tensor`.

    Parameters
    ----------
    name
        Name of the file, without its suffix.
    """

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
            self._arrays = dict(file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def tensor(self, name: str) -> Tensor:
        """Return an array as a tensor; integers become int64, except uint8."""
        values = torch.from_numpy(self._arrays[name].copy())
        return values if values.is_floating_point() or values.dtype == torch.uint8 else values.long()

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return all tensors whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): self.tensor(name) for name in self._arrays if name.startswith(prefix)}


@cache
def _known(name: str) -> Known:
    return Known(name)


def known_answers(name: str) -> Known:
    """Return the arrays of a file, or skip the test if the folder is missing."""
    if not FOLDER.is_dir():
        pytest.skip("the originals' answers are not here: no folder ../shared/originals beside the checkout")
    return _known(name)


@torch.no_grad()
def put(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Copy tensors into others, in order."""
    for value, target in zip(values, into, strict=True):
        target.copy_(value.reshape(target.shape))


def apart(module: nn.Module | Iterable[Tensor], values: Iterable[Tensor]) -> float:
    """Return the largest absolute difference between parameters and given values, in order."""
    ours = module.parameters() if isinstance(module, nn.Module) else module
    return max(float((p.detach() - value.reshape(p.shape)).abs().max()) for p, value in zip(ours, values, strict=True))
