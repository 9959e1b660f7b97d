"""Files of a data set: images become one array, tables one frame."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scbd._progress import progress_bar
from scbd.data import read_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

_WORTH_A_BAR = 2_000


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Read image files as RGB, resized to a square (bilinear, antialiased).

    Parameters
    ----------
    paths
        PNG, JPEG or any other format that Pillow knows.
    size
        Pixels a side.

    Returns
    -------
    uint8 ``(N, 3, size, size)``.

    Raises
    ------
    FileNotFoundError
        If a file is missing: the first one.
    ValueError
        If a file is no image or truncated (which), or the size is not positive.
    """
    from PIL import Image

    if size < 1:
        msg = f"image_size must be a positive number of pixels, got {size}."
        raise ValueError(msg)
    images = np.empty((len(paths), 3, size, size), dtype=np.uint8)

    def read(row: int) -> None:
        try:
            with Image.open(paths[row]) as image:
                square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        except FileNotFoundError:
            raise
        except (OSError, SyntaxError, ValueError) as error:
            msg = f"{paths[row]} is no image, or is truncated ({error}): fetch it again."
            raise ValueError(msg) from error
        images[row] = np.asarray(square).transpose(2, 0, 1)

    bar = progress_bar("Reading images", len(paths), worth=_WORTH_A_BAR, unit="image")
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(read, range(len(paths))):
            bar.update()
    return images


def existing_folder(path: str | os.PathLike[str], name: str, marker: str) -> Path:
    """The folder of a data set: the path itself, or what lies in it under its official name.

    Parameters
    ----------
    path
        What the user gave.
    name
        Official name of the folder.
    marker
        File or folder that it must hold.

    Raises
    ------
    FileNotFoundError
        If neither holds the marker.
    """
    path = Path(path)
    for folder in (path, path / name):
        if (folder / marker).exists():
            return folder
    there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else "no such folder"
    msg = f"{path} is not {name}: it holds no {marker} ({there}). Give the folder that has it, or the one above."
    raise FileNotFoundError(msg)


def read_table(path: str | os.PathLike[str], columns: Sequence[str]) -> pd.DataFrame:
    """A ``.parquet``, ``.csv`` or ``.tsv`` with these columns, whatever others it has.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is of another kind, is truncated, or lacks a column.
    """
    table = read_frame(path)
    missing = [column for column in columns if column not in table]
    if missing:
        msg = f"{path} lacks the columns {', '.join(missing[:5])}; it has {', '.join(map(str, table.columns[:8]))}."
        raise ValueError(msg)
    return table
