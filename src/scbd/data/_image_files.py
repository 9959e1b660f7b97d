"""Images in files of their own, TIFF or PNG: one a cell, or one a cell and channel."""

from __future__ import annotations

import lzma
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from scbd._checks import head, inflect, resized_to
from scbd._files import check_file, local_path, progress_bar
from scbd.data._sources import IMAGE_DTYPES, check_images, numbers_of, target_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from PIL.Image import Image

# a square that holds the largest image, one that lies in the smallest, or so many pixels
Fit: TypeAlias = Literal["pad", "crop"] | int | tuple[int, int]

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

    Paths are those of a table, which anybody may have written: all have to lie in ``folder``, by their names. Links
    that lie in there are followed. Where files lie all over the machine, give ``"/"``.

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
        self._folder, self._paths = os.path.abspath(local_path(folder)), paths
        self._check_there()
        self._size = None if fit is None else fitted_size(fit, self._sizes() if isinstance(fit, str) else [])
        first = self._image(0)
        self.shape: tuple[int, ...] = (len(paths), *first.shape)
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
        for place, row in enumerate(numbers_of(rows, self.shape[0]).tolist()):
            image = self._image(row)
            if image.shape != out.shape[1:] or image.dtype != self.dtype:
                advice = "use fit='pad' or fit='crop'" if image.shape[1:] != out.shape[2:] else "save all alike"
                what = " and ".join(f"{' × '.join(map(str, i.shape))} of {i.dtype}" for i in (image, out[0]))
                msg = f"{self._path(row, 0)} and the first image differ ({what}): {advice}."
                raise ValueError(msg)
            out[place] = image
        return out

    def _path(self, row: int, file: int) -> Path:
        return Path(os.path.normpath(os.path.join(self._folder, self._paths[row][file])))

    def _check_there(self) -> None:
        """Each folder is looked at once."""
        roots = self._folder, os.path.realpath(self._folder)  # absolute paths may be written either way
        listed: dict[str, set[str]] = {}
        missing = []
        for row, several in enumerate(self._paths):
            for file, said in enumerate(several):
                folder, name = os.path.split(said)
                if folder not in listed:
                    found = os.path.normpath(os.path.join(self._folder, folder))
                    if all(os.path.commonpath([root, found]) != root for root in roots):
                        msg = (
                            f"Row {row} of the table names {said!r}, which is outside of {self._folder}: give the "
                            "folder that holds all files as root (with root='/' any absolute path is read)."
                        )
                        raise ValueError(msg)
                    listed[folder] = set(os.listdir(found)) if os.access(found, os.R_OK) else set()
                # one may be there that a list has in other letters, or in a folder that shows no list
                if name not in listed[folder] and not self._path(row, file).is_file():
                    missing.append(f"{self._path(row, file)} (row {row})")
        if missing:
            n_files, are = len(self._paths) * len(self._paths[0]), inflect(len(missing), "is", "are")
            msg = (
                f"{len(missing)} of {n_files} files that the table names {are} not there: "
                f"{head(missing, 3)}; name the folder that paths are relative to (root=…), or drop these rows."
            )
            raise FileNotFoundError(msg)

    def _image(self, row: int) -> np.ndarray:
        images = [channels_of(self._path(row, file)) for file in range(len(self._paths[0]))]
        if self._size is not None:
            images = [centred(image, self._size) for image in images]
        kinds = sorted({f"{' × '.join(map(str, image.shape[1:]))} {image.dtype}" for image in images})
        if len(kinds) > 1:
            msg = f"The channels of row {row} differ ({' and '.join(kinds)}; the first is {self._path(row, 0)})."
            raise ValueError(msg)
        return np.concatenate(images)

    def _sizes(self) -> list[tuple[int, int]]:
        """Of all files, by their heads."""
        files = [self._path(row, file) for row in range(len(self._paths)) for file in range(len(self._paths[0]))]
        with ThreadPoolExecutor() as pool, progress_bar("Measuring images", len(files)) as bar:
            sizes = []
            for size in pool.map(size_of, files):
                sizes.append(size)
                bar.update()
            return sizes


def fitted_size(fit: Fit, sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Height and width that images of these sizes are brought to.

    Raises
    ------
    ValueError
        If ``fit`` is neither a word that is known nor a size.
    """
    if fit in ("pad", "crop"):
        side = max(map(max, sizes)) if fit == "pad" else min(map(min, sizes))
        return side, side
    try:
        return resized_to(fit, 1, 1)  # type: ignore[arg-type]
    except ValueError as error:
        msg = f"fit={fit!r} is not known: use 'pad', 'crop', a number of pixels, or (height, width)."
        raise ValueError(msg) from error


def centred(images: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Images ``(…, h, w)`` on a canvas of zeros ``(…, *size)``.

    Pixel ``h // 2``, in which the middle lies, becomes pixel ``size[0] // 2``; likewise in width.
    """
    out = np.zeros((*images.shape[:-2], *size), images.dtype)
    # of each axis where the canvas begins in the image, which may be before it
    starts = [h // 2 - side // 2 for h, side in zip(images.shape[-2:], size, strict=True)]
    inside = [slice(max(s, 0), max(s + side, 0)) for s, side in zip(starts, size, strict=True)]
    part = images[..., inside[0], inside[1]]
    places = [slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(starts, part.shape[-2:], strict=True)]
    out[..., places[0], places[1]] = part
    return out


def channels_of(path: Path) -> np.ndarray:
    """Channels of one file, ``(C, H, W)``."""
    with _opened(path) as file:
        pages = None if file is None else _pillow_pages(file, path)
    pages = _tifffile_pages(path) if pages is None else pages
    if len({page.shape[1:] for page in pages}) > 1:
        msg = f"{path} has pages of different sizes."
        raise ValueError(msg)
    return np.concatenate(pages)


def size_of(path: Path) -> tuple[int, int]:
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
        if "imagecodecs" in str(error):  # in the library's words
            msg = f"{path} is compressed in a way that needs one more package: pip install imagecodecs."
        else:
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
