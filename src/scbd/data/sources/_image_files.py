"""Images in files of their own: one TIFF or PNG a cell, or one a cell and channel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scbd._files import check_file
from scbd.data.sources._arrays import target_of
from scbd.data.sources._kinds import check_images
from scbd.data.sources._packed import Packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# of Pillow: grey of 8, 16 and 32 bits, and colours
_MODES = ("L", "I;16", "F", "RGB", "RGBA")


class FileSource:
    """Images in TIFF or PNG files, decoded as they are read.

    Paths are those of a table, which anybody may have written: a name alone must not make us read any file of this
    machine. So all of them have to lie in ``folder``, by their names: what ``..`` says is taken at its word. Links that
    lie in there are followed wherever they lead, since names cannot make any: whoever put them there could read those
    files already. Where files lie all over the machine, give ``"/"``.

    Parameters
    ----------
    folder
        What paths are relative to, and do not leave; absolute ones lie in there, too.
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
    concurrent = True

    def __init__(self, folder: str | os.PathLike[str], paths: Sequence[Sequence[str]] | np.ndarray) -> None:
        if not len(paths):
            msg = "The table names no file."
            raise ValueError(msg)
        self._folders = _Folders(Path(folder))
        n_files = len(paths[0])
        # of each file its folder, of which there are few, and its name
        self._folder_of = np.empty((n_files, len(paths)), dtype=np.int32)
        self._names = [Packed(self._named(paths, file)) for file in range(n_files)]
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
                fact = f"{self._path(0, row)} is {_what(image)}, the first is {_what(out[0])}"
                msg = f"{fact}: all must be alike."
                raise ValueError(msg)
            out[place] = image
        return out

    def _named(self, paths: Sequence[Sequence[str]] | np.ndarray, file: int) -> Iterator[bytes]:
        for row, several in enumerate(paths):
            folder, slash, name = several[file].rpartition("/")
            self._folder_of[file, row] = self._folders.number(folder + slash, row, several[file])
            yield os.fsencode(name)

    def _path(self, file: int, row: int) -> Path:
        return Path(self._folders.paths[self._folder_of[file, row]], os.fsdecode(self._names[file][row]))

    def _image(self, row: int) -> np.ndarray:
        return np.concatenate([_channels(self._path(file, row)) for file in range(len(self._names))])


class _Folders:
    """Folders of files, each looked at once.

    Parameters
    ----------
    root
        What they are relative to, and lie in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.paths: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, folder: str, row: int, path: str) -> int:
        """Of a folder, as it is written in a row of the table.

        Raises
        ------
        ValueError
            If it does not lie in the root.
        """
        if folder not in self._numbers:
            # by names alone; the root's own links apart, so that absolute paths may be written either way
            found = os.path.normpath(os.path.join(os.path.abspath(self._root), folder))
            roots = os.path.abspath(self._root), os.path.realpath(self._root)
            if all(os.path.commonpath([root, found]) != root for root in roots):
                msg = (
                    f"Row {row} of the table names {path!r}, which is outside of {self._root}: give the folder that "
                    "holds all files as root (with root='/' any absolute path is read)."
                )
                raise ValueError(msg)
            self._numbers[folder] = len(self.paths)
            self.paths.append(found)
        return self._numbers[folder]


def _channels(path: Path) -> np.ndarray:
    """Channels of one file, ``(C, H, W)``."""
    from PIL import Image, ImageSequence, UnidentifiedImageError

    check_file(path)
    try:
        with Image.open(path) as file:
            pages = [np.asarray(page) for page in ImageSequence.Iterator(file) if _known(page.mode, path)]
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
