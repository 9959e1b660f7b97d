"""Images in files of their own: one TIFF or PNG a cell, or one a cell and channel."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scbd._messages import head
from scbd._progress import progress_bar
from scbd.data.sources._arrays import target_of
from scbd.data.sources._decoding import channels_of, size_of
from scbd.data.sources._fitting import Fit, centred, fitted_size
from scbd.data.sources._kinds import check_images
from scbd.data.sources._listing import unlisted_files
from scbd.data.sources._packed import Packed
from scbd.data.sources._unreadable import Unreadable, UnreadableImages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class FileSource:
    """Images in TIFF or PNG files, decoded as they are read.

    Paths are those of a table, which anybody may have written: a name alone must not make us read any file of this
    machine. So all of them have to lie in ``folder``, by their names: what ``..`` says is taken at its word. Links that
    lie in there are followed wherever they lead, since names cannot make any: whoever put them there could read those
    files already. Where files lie all over the machine, give ``"/"``.

    Pixels are those that are stored; where a TIFF says that 0 is white, white becomes the largest value. Some TIFFs
    need tifffile to be installed: colours of 16 bits, several channels of floats in one page, numbers with a sign.

    Parameters
    ----------
    folder
        What paths are relative to, and do not leave; absolute ones lie in there, too.
    paths
        Of each cell the path of its file, or of several: their channels are stacked. Pages and colours of a TIFF, and
        the colours of a PNG, are channels.
    fit
        What images are padded with zeros to, or cut to about their middle, where they differ in size or are not square:
        ``"pad"``, a square that holds the largest; ``"crop"``, one that lies in the smallest; or so many pixels. For a
        word, the heads of all files are read first.

    Raises
    ------
    FileNotFoundError
        If files are missing (how many, and the first few), before any is read.
    TypeError, ValueError
        If a path leaves the folder, or the first cell's files are no images of one size and kind.
    """

    in_memory = False
    concurrent = True

    def __init__(
        self, folder: str | os.PathLike[str], paths: Sequence[Sequence[str]] | np.ndarray, fit: Fit | None = None
    ) -> None:
        if not len(paths):
            msg = "The table names no file."
            raise ValueError(msg)
        self._folders = _Folders(Path(folder))
        n_files = len(paths[0])
        # of each file its folder, of which there are few, and its name
        self._folder_of = np.empty((n_files, len(paths)), dtype=np.int32)
        self._names = [Packed(self._named(paths, file)) for file in range(n_files)]
        self._check_there()
        self._size = None if fit is None else fitted_size(fit, self._sizes() if isinstance(fit, str) else [])
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
            If a file is missing, broken (all of these rows that are), or of another size or kind than the first.
        """
        out, unreadable = target_of(self, rows, out), Unreadable()
        numbers = range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.tolist()
        for place, row in enumerate(numbers):
            with unreadable.kept():
                out[place] = self._like(out[0], row)
        unreadable.tell()
        return out

    def _like(self, first: np.ndarray, row: int) -> np.ndarray:
        try:
            image = self._image(row)
        except ValueError as error:
            raise UnreadableImages(str(error)) from error
        if image.shape != first.shape or image.dtype != first.dtype:
            remedy = "save all with the same channels and bits"
            if image.shape[1:] != first.shape[1:]:
                remedy = "use fit='pad' or fit='crop'"
            msg = f"{self._path(0, row)} is {_what(image)}, the first is {_what(first)}: all must be alike, {remedy}."
            raise ValueError(msg)
        return image

    def _check_there(self) -> None:
        n = len(self._names[0])
        unlisted = unlisted_files(self._folders.paths, self._folder_of.ravel(), chain.from_iterable(self._names))
        # one may be there that a list has in other letters, or in a folder that shows no list
        places = [place for place in unlisted.tolist() if not self._path(*divmod(place, n)).is_file()]
        if not places:
            return
        told = head((f"{self._path(*divmod(place, n))} (row {place % n})" for place in places), 3)
        msg = (
            f"{len(places)} of {self._folder_of.size} files that the table names are not there: {told}; "
            f"{_remedy(self._path(*divmod(places[0], n)))}."
        )
        raise FileNotFoundError(msg)

    def _named(self, paths: Sequence[Sequence[str]] | np.ndarray, file: int) -> Iterator[bytes]:
        for row, several in enumerate(paths):
            folder, slash, name = several[file].rpartition("/")
            self._folder_of[file, row] = self._folders.number(folder + slash, row, several[file])
            yield os.fsencode(name)

    def _path(self, file: int, row: int) -> Path:
        return Path(self._folders.paths[self._folder_of[file, row]], os.fsdecode(self._names[file][row]))

    def _image(self, row: int) -> np.ndarray:
        images = [channels_of(self._path(file, row)) for file in range(len(self._names))]
        sizes = {image.shape[1:] for image in images}
        if len(sizes) > 1 and self._size is None:
            told = " and ".join(" × ".join(map(str, size)) for size in sorted(sizes))
            msg = f"The channels of row {row} differ in size ({told} pixels; the first is {self._path(0, row)})."
            raise ValueError(msg)
        if {image.dtype for image in images} != {images[0].dtype}:
            told = " and ".join(sorted({image.dtype.name for image in images}))
            msg = f"The channels of row {row} differ in type ({told}; the first is {self._path(0, row)})."
            raise ValueError(msg)
        return np.concatenate(images if self._size is None else [centred(image, self._size) for image in images])

    def _sizes(self) -> list[tuple[int, int]]:
        """Of all files, by their heads."""
        files = [self._path(file, row) for row in range(len(self._folder_of[0])) for file in range(len(self._names))]
        with ThreadPoolExecutor() as pool, progress_bar("Measuring images", len(files)) as bar:
            sizes = []
            for size in pool.map(size_of, files):
                sizes.append(size)
                bar.update()
            return sizes


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


def _remedy(missing: Path) -> str:
    """What may be wrong with the name of a file that is not there."""
    if "\\" in str(missing):
        return "write its path with / in place of \\"
    if any(part.startswith("~") for part in missing.parts):
        return "write its path with the name of the folder in place of ~"
    if any(part != part.strip() for part in missing.parts):
        return "remove blanks around its path"
    return "name the folder that paths are relative to (root=…), or drop these rows"


def _what(image: np.ndarray) -> str:
    return f"{' × '.join(map(str, image.shape))} of {image.dtype}"
