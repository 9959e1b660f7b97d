"""What would be read of fields of view: how many, how large, and what their channels hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._messages import head
from scbd.data import open_field, read_plate

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = ("field", "ome_image", "ome_plate")
# pixels a side of the part whose range is told
_LOOKED_AT = 1024


def of_fields(path: Path, kind: str) -> list[str]:
    """Lines about an image, or about the first of a plate's.

    Raises
    ------
    ImportError, KeyError, OSError, TypeError, ValueError
        If it cannot be read.
    """
    lines = []
    if kind == "ome_plate":
        fields = read_plate(path)
        wells = fields["well"].unique()
        lines.append(f"{len(fields):,} fields in {len(wells):,} wells ({head(wells)}). The first:")
        field = fields["image"].iloc[0]
    else:
        field = open_field(path, str(path))
    n, *sides = field.shape
    size = "" if field.pixel_size is None else ", a pixel is {:g} × {:g}".format(*field.pixel_size)
    lines.append(f"{n} channels of {' × '.join(map(str, sides))} {field.dtype}{size}")
    part = field.read(slice(None), *(_middle(side) for side in sides))
    for name, channel in zip(field.channels or [f"channel_{i}" for i in range(n)], part, strict=True):
        lines.append(channel_line(name, channel))
    return lines


def channel_line(name: str, pixels: np.ndarray) -> str:
    """Range of a channel."""
    low, high = pixels.min(), pixels.max()
    told = f"{low:g} in every pixel: leave it out" if low == high else f"{low:g} to {high:g}"
    return f"  channel {name}: {told}"


def _middle(side: int) -> slice:
    return slice(max(0, (side - _LOOKED_AT) // 2), (side + _LOOKED_AT) // 2)
