"""What the original implementations computed of given inputs: arrays beside the checkout, in ../shared/originals."""

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
    """Arrays of one file, by name; as tensors with :meth:`tensor`.

    Parameters
    ----------
    name
        Of the file, without its suffix.
    """

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
            self._arrays = dict(file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def tensor(self, name: str) -> Tensor:
        """Labels become int64."""
        values = torch.from_numpy(self._arrays[name].copy())
        return values if values.is_floating_point() or values.dtype == torch.uint8 else values.long()

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """All whose names begin like this, by the rest of their names."""
        return {name.removeprefix(prefix): self.tensor(name) for name in self._arrays if name.startswith(prefix)}


@cache
def _known(name: str) -> Known:
    return Known(name)


def known_answers(name: str) -> Known:
    """Arrays of a file; the test is skipped where they are not."""
    if not FOLDER.is_dir():
        pytest.skip("the originals' answers are not here: no folder ../shared/originals beside the checkout")
    return _known(name)


@torch.no_grad()
def put(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Copy tensors into others, in order."""
    for value, target in zip(values, into, strict=True):
        target.copy_(value.reshape(target.shape))


def apart(module: nn.Module | Iterable[Tensor], values: Iterable[Tensor]) -> float:
    """Largest difference of parameters from given ones, in order."""
    ours = module.parameters() if isinstance(module, nn.Module) else module
    return max(float((p.detach() - value.reshape(p.shape)).abs().max()) for p, value in zip(ours, values, strict=True))
