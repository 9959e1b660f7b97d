"""Images in files of their own: one TIFF or PNG a cell, or one a cell and channel."""

from __future__ import annotations

import lzma
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scbd._files import check_file
from scbd._messages import head
from scbd._progress import progress_bar
from scbd.data.sources._arrays import target_of
from scbd.data.sources._fitting import Fit, centred, fitted_size
from scbd.data.sources._kinds import IMAGE_DTYPES, check_images
from scbd.data.sources._listing import unlisted_files
from scbd.data.sources._packed import Packed
from scbd.data.sources._unreadable import Unreadable, UnreadableImages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL.Image import Image

# of Pillow: grey of 8, 16 and 32 bits, and colours, with transparency or without
_MODES = ("L", "LA", "I;16", "I;16B", "I", "F", "RGB", "RGBA")
# those that stand for another: black and white, and colours by their number in a palette
_MEANT = {"1": "L", "P": "RGB", "PA": "RGBA"}
# whole numbers up to here are the same in float32
_EXACT = 2**24
# how a TIFF begins, in either byte order, and of more than 4 GiB
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# tags of a TIFF, and what they say
_BITS, _PHOTOMETRIC, _SAMPLES, _EXTRA, _FORMAT = 258, 262, 277, 338, 339
_MIN_IS_WHITE, _PREMULTIPLIED, _SIGNED = 0, 1, 2


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
        images = [_channels(self._path(file, row)) for file in range(len(self._names))]
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
            for size in pool.map(_size, files):
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


def _channels(path: Path) -> np.ndarray:
    """Channels of one file, ``(C, H, W)``."""
    with _opened(path) as file:
        pages = None if file is None else _pillow_pages(file, path)
    pages = _tifffile_pages(path) if pages is None else pages
    if len({page.shape[1:] for page in pages}) > 1:
        msg = f"{path} has pages of different sizes."
        raise ValueError(msg)
    return np.concatenate(pages)


def _size(path: Path) -> tuple[int, int]:
    """Height and width."""
    with _opened(path) as file:
        if file is not None:
            return file.height, file.width
    return _tifffile_pages(path)[0].shape[1:]


@contextmanager
def _opened(path: Path) -> Iterator[Image | None]:
    """Through Pillow; `None` for a TIFF of a kind that Pillow does not know."""
    check_file(path)
    try:
        with _known(path) or nullcontext() as file:
            yield file
    except (OSError, SyntaxError, TypeError) as error:  # Pillow has one of each
        msg = f"{path} is no TIFF or PNG, or is truncated ({error})."
        raise ValueError(msg) from error


def _known(path: Path) -> Image | None:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except UnidentifiedImageError:
        with path.open("rb") as file:
            if file.read(4) in _TIFF:
                return None
        raise


def _pillow_pages(file: Image, path: Path) -> list[np.ndarray] | None:
    """Channels of each page, ``(C, H, W)``; `None` if Pillow makes others of one than are stored."""
    from PIL import ImageSequence

    pages = []
    for page in ImageSequence.Iterator(file):
        if _is_misread(page):
            return None
        pixels = _pixels(page, path)
        pages.append(pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0))
    return pages


def _is_misread(page: Image) -> bool:
    """Whether Pillow, which says nothing, takes bits, channels or signs of a TIFF's page for others."""
    tags = getattr(page, "tag_v2", None)
    if tags is None:
        return False
    bits, n_samples = max(tags.get(_BITS, (1,))), tags.get(_SAMPLES, 1)
    return (
        (bits > 8 and n_samples > 1)
        or n_samples != len(page.getbands())
        or _PREMULTIPLIED in tags.get(_EXTRA, ())
        or (bits == 8 and _SIGNED in tags.get(_FORMAT, ()))
        # which it turns for 8 bits alone
        or (tags.get(_PHOTOMETRIC) == _MIN_IS_WHITE and page.mode not in ("1", "L"))
    )


def _tifffile_pages(path: Path) -> list[np.ndarray]:
    """The same of a TIFF that Pillow does not know, or misreads."""
    try:
        import tifffile
    except ImportError as error:
        msg = (
            f"{path} is a TIFF that needs one more package (it has colours of 16 bits, several channels of floats in a "
            "page, or numbers with a sign), or is truncated: pip install tifffile, or save its channels as pages of "
            "8- or 16-bit grey."
        )
        raise ValueError(msg) from error
    of_library = (tifffile.TiffFileError, zlib.error, lzma.LZMAError, struct.error)
    try:
        with tifffile.TiffFile(path) as file:
            pages = [(page.asarray(maxworkers=1), page) for page in file.pages]
    except (*of_library, OSError, ValueError, KeyError, IndexError, RuntimeError, TypeError) as error:
        msg = f"{path} cannot be read as TIFF, or is truncated ({error})."
        raise ValueError(msg) from error
    found = []
    for pixels, page in pages:
        # channels that lie apart, depth, height, width, channels that lie together
        channels = np.moveaxis(pixels.reshape(page.shaped), -1, 1).reshape(-1, *page.shaped[2:4])
        if page.photometric == _MIN_IS_WHITE:
            channels = _turned(channels, page.bitspersample, path)
        found.append(_as_images(channels, path))
    return found


def _turned(pixels: np.ndarray, bits: int, path: Path) -> np.ndarray:
    """White becomes the largest value."""
    if pixels.dtype.kind != "u" or bits > 16:
        msg = f"{path} says that 0 is white (MinIsWhite) of {pixels.dtype}: save it with 0 as black (MinIsBlack)."
        raise ValueError(msg)
    return (2**bits - 1 - pixels).astype(pixels.dtype)


def _pixels(page: Image, path: Path) -> np.ndarray:
    """Of one page, in a type that images may have."""
    stored = str(getattr(page, "tile", ""))  # Pillow makes colours of 16 bits in a PNG such of 8
    if page.mode in ("RGB", "RGBA", "LA") and ";16" in stored:
        msg = f"{path} holds colours of 16 bits, of which half would be lost: save it as TIFF, or each channel as PNG."
        raise ValueError(msg)
    if page.mode in _MEANT:
        page = page.convert(_MEANT[page.mode])
    if page.mode not in _MODES:
        msg = f"{path} holds pixels of mode {page.mode!r}: save it as 8- or 16-bit grey, RGB or 32-bit float."
        raise ValueError(msg)
    return _as_images(np.asarray(page), path)


def _as_images(pixels: np.ndarray, path: Path) -> np.ndarray:
    """In a type that images may have; whole numbers of others become floats, where these hold them."""
    if pixels.dtype.name in IMAGE_DTYPES:
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if pixels.dtype.kind not in "iu":
        msg = f"{path} holds {pixels.dtype.name}: save it as 32-bit float."
        raise ValueError(msg)
    if not (0 <= pixels.min() and pixels.max() <= _EXACT):
        n_bits = 8 * pixels.dtype.itemsize
        msg = f"{path} holds numbers of {n_bits} bits from {pixels.min()} to {pixels.max()}: save it as 32-bit float."
        raise ValueError(msg)
    return pixels.astype(np.float32)


def _what(image: np.ndarray) -> str:
    return f"{' × '.join(map(str, image.shape))} of {image.dtype}"
