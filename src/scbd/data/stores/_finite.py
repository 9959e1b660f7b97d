"""Pixels that are no numbers, found before they are written or measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._messages import head

if TYPE_CHECKING:
    from scbd.data.stores._crops import Crops


def check_finite(images: np.ndarray, plate: Crops, rows: np.ndarray) -> None:
    """Look at images of some rows of a plate, ``(N, C, H, W)``.

    Raises
    ------
    ValueError
        If one has NaN or infinite pixels (which).
    """
    if images.dtype.kind != "f":
        return
    bad = rows[~np.isfinite(images).all(axis=(1, 2, 3))]
    if bad.size:
        names = head(f"row {row} ({plate.obs.index[row]})" for row in bad)
        msg = (
            f"{plate.name} has NaN or infinite pixels as {images.dtype}: {names}. Drop these cells or repair their "
            "images."
        )
        raise ValueError(msg)
