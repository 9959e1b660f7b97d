"""Images in files of their own: one TIFF or PNG a cell, or one a cell and channel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scbd.data.sources.arrays import check_images, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# of Pillow: grey of 8, 16 and 32 bits, and colours
_MODES = ("L", "I;16", "F", "RGB", "RGBA")


class FileSource:
    """Images in TIFF or PNG files, decoded as they are read.

    Parameters
    ----------
    folder
        What paths are relative to.
    paths
        Of each cell the path of its file, or of several: their channels are stacked. The pages of a TIFF and the
        colours of a PNG are channels.

    Raises
    ------
    FileNotFoundError
        If the first cell's file is missing.
    TypeError, ValueError
        If a path leaves the folder, or the first cell's files are no images of one size and kind.
    """

    in_memory = False

    def __init__(self, folder: Path, paths: Sequence[Sequence[str]]) -> None:
        self._folder = folder.resolve()
        self._paths = paths
        for row, several in enumerate(paths):
            for path in several:
                if not (self._folder / path).resolve().is_relative_to(self._folder):
                    msg = f"Row {row} of the table names {path!r}, which is outside of {folder}: name files in there."
                    raise ValueError(msg)
        if not len(paths):
            msg = "The table names no file."
            raise ValueError(msg)
        first = self._image(0)
        self.shape: tuple[int, int, int, int] = (len(paths), *first.shape)
        self.dtype = first.dtype
        check_images(self.shape, self.dtype, f"{folder}")

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order.

        Raises
        ------
        IndexError
            If there is no such row.
        FileNotFoundError, ValueError
            If a file is missing, broken, or of another size or kind than the first.
        """
        out = target_of(self, rows, out)
        numbers = range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.tolist()
        for place, row in enumerate(numbers):
            image = self._image(row)
            if image.shape != out.shape[1:] or image.dtype != out.dtype:
                said = f"{self._paths[row][0]} is {_what(image)}, the first is {_what(out[0])}"
                msg = f"{said}: all must be alike."
                raise ValueError(msg)
            out[place] = image
        return out

    def _image(self, row: int) -> np.ndarray:
        return np.concatenate([_channels(self._folder / path) for path in self._paths[row]])


def _channels(path: Path) -> np.ndarray:
    """Channels of one file, ``(C, H, W)``."""
    from PIL import Image, ImageSequence, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            pages = [np.asarray(page) for page in ImageSequence.Iterator(file) if _known(page.mode, path)]
    except FileNotFoundError:
        msg = f"There is no file {path}."
        raise FileNotFoundError(msg) from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        msg = f"{path} is no TIFF or PNG, or is truncated ({error})."
        raise ValueError(msg) from error
    if len({page.shape for page in pages}) > 1:
        msg = f"{path} has pages of different sizes."
        raise ValueError(msg)
    return np.concatenate([page[None] if page.ndim == 2 else np.moveaxis(page, -1, 0) for page in pages])


def _known(mode: str, path: Path) -> bool:
    if mode not in _MODES:
        msg = f"{path} holds pixels of mode {mode!r}: save it as 8- or 16-bit grey, RGB or 32-bit float."
        raise ValueError(msg)
    return True


def _what(image: np.ndarray) -> str:
    return f"{' × '.join(map(str, image.shape))} of {image.dtype}"
