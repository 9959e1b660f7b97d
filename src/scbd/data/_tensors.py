"""Inputs as tensors: read into memory a GPU can fetch from, or resident on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from scbd.data.sources import count_rows

if TYPE_CHECKING:
    from scbd.data.sources import ImageSource

_COPIED_AT_ONCE = 64 * 2**20


def read_tensor(source: ImageSource, rows: np.ndarray | slice) -> torch.Tensor:
    """Inputs of these rows as a tensor: on the source's device, or pinned where there is a GPU to fetch them.

    Torch keeps pinned memory that is no longer used for the next batch.
    """
    if isinstance(source, TensorSource):
        return source.tensor(rows)
    if not torch.cuda.is_available():
        return torch.from_numpy(source.read(rows))
    n, *image_shape = source.shape
    pinned = torch.empty((count_rows(rows, n), *image_shape), dtype=_torch_dtype(source), pin_memory=True)
    source.read(rows, out=pinned.numpy())
    return pinned


def _torch_dtype(source: ImageSource) -> torch.dtype:
    return torch.from_numpy(np.empty(0, source.dtype)).dtype


class TensorSource:
    """Images, or features, on a device, read there.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, or ``(N, F)``.
    """

    in_memory = True

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images

    @classmethod
    def on_device(cls, source: ImageSource, device: torch.device) -> TensorSource:
        """Copy a source to a device.

        Raises
        ------
        ValueError
            If they are larger than the free memory of a GPU.
        """
        n, *image_shape = source.shape
        size = int(np.prod(source.shape)) * source.dtype.itemsize
        if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0]:
            free = torch.cuda.mem_get_info(device)[0]
            msg = (
                f"preload='device': all inputs take {size / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free: "
                "leave preload out, batches are read ahead anyway."
            )
            raise ValueError(msg)
        images = torch.empty((n, *image_shape), dtype=_torch_dtype(source), device=device)
        block = max(1, _COPIED_AT_ONCE * n // size)
        for start in range(0, n, block):
            images[start : start + block] = read_tensor(source, slice(start, start + block))
        return cls(images)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, H, W), or (N, F)."""
        return tuple(self._images.shape)

    @property
    def dtype(self) -> np.dtype:
        """As stored."""
        return torch.empty(0, dtype=self._images.dtype).numpy().dtype

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Inputs of these rows, in this order, as stored and free to change."""
        images = self.tensor(rows).cpu().numpy()
        if out is None:
            return images.copy() if isinstance(rows, slice) else images
        out[...] = images
        return out

    def tensor(self, rows: np.ndarray | slice) -> torch.Tensor:
        """Inputs of these rows, in this order, on the device."""
        if isinstance(rows, slice):
            return self._images[rows]
        # torch gathers int16 everywhere, uint16 only in places
        bits = self._images.view(torch.int16) if self._images.dtype == torch.uint16 else self._images
        return bits.index_select(0, torch.from_numpy(rows).to(bits.device)).view(self._images.dtype)
