"""Images of cells in separate TIFF or PNG files: one file per cell, or one file per channel of each cell."""

from __future__ import annotations

import lzma
import os
import struct
import zlib
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from scbd._shared.checks import inflect, join_first, size_after_resizing
from scbd._shared.files import check_file, local_path
from scbd._shared.progress import progress_bar
from scbd.data._prefetch import map_in_threads
from scbd.data._sources import IMAGE_DTYPES, allocate_output, as_row_numbers, check_images

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from PIL.Image import Image

# Rule by which images of different sizes get one size. "pad" enlarges images to the smallest square that contains every
# image. "crop" cuts images to the largest square that every image contains. Numbers are a size in pixels.
Fit: TypeAlias = Literal["pad", "crop"] | int | tuple[int, int]

# Pixel formats (Pillow's modes) that are read directly. They are grey of 8, 16 and 32 bits, and colours, with or
# without transparency.
_READ_MODES = ("L", "LA", "I;16", "I;16B", "I", "F", "RGB", "RGBA")
# Pixel formats (Pillow's modes) that are converted before they are read. Black and white is converted to grey, and
# indices of a palette are converted to colours.
_CONVERTED_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}
# largest number up to which float32 represents every integer exactly
_MAX_EXACT_INTEGER = 2**24
# first four bytes of TIFF files, and of BigTIFF files (TIFF files larger than 4 GiB), in either byte order
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Numbers of TIFF tags. _BITS: bits per sample. _PHOTOMETRIC: photometric interpretation. _SAMPLES: samples per pixel.
# _EXTRA: kind of extra samples, such as transparency. _FORMAT: sample format, such as signed integer.
_BITS, _PHOTOMETRIC, _SAMPLES, _EXTRA, _FORMAT = 258, 262, 277, 338, 339
# Values of TIFF tags. _MIN_IS_WHITE: photometric interpretation in which 0 is white. _PREMULTIPLIED: extra samples that
# are an alpha channel with premultiplied colours. _SIGNED: sample format of signed integers.
_MIN_IS_WHITE, _PREMULTIPLIED, _SIGNED = 0, 1, 2


class FileSource:
    """Source of cell images in TIFF or PNG files. Each file is decoded only when its image is read.

    The paths usually come from a table of unknown origin. Each file must therefore lie in ``folder``; links inside of
    ``folder`` are followed. Use ``"/"`` as ``folder`` if the files lie in many places.

    Pixels are returned as stored, with one exception: if a TIFF states that 0 is white, its values are inverted, so
    that white is the largest value. TIFFs with colours of 16 bits, several channels of floats in one page, or signed
    integers require the package tifffile.

    Parameters
    ----------
    folder
        Folder to which paths are relative. Absolute paths must lie in it, too.
    paths
        Paths of the image files, one sequence per cell. If a cell has several files, their channels are stacked. Each
        page and each colour of a TIFF, and each colour of a PNG, is a channel. Relative paths with the backslashes
        of Windows are read on any system.
    fit
        Rule by which images that differ in size, or are not square, get one size. They are padded with zeros or cut
        around their centre:

        - ``"pad"``: to the smallest square that contains every image;
        - ``"crop"``: to the largest square that every image contains;
        - a number, or ``(height, width)``: to this size in pixels.

        For ``"pad"`` and ``"crop"``, the headers of all files are read first. Default: sizes are not changed.

    Raises
    ------
    FileNotFoundError
        If files are missing, or are named by absolute paths of Windows on another system. All paths are checked before
        any file is read. The message states the number of missing files and the first of them.
    TypeError, ValueError
        If a path lies outside of ``folder``, or if the files of the first cell are not images of one size and dtype.
    """

    in_memory = False
    concurrent = True

    def __init__(
        self, folder: str | os.PathLike[str], paths: Sequence[Sequence[str]] | np.ndarray, fit: Fit | None = None
    ) -> None:
        if not len(paths):
            msg = "The table names no file."
            raise ValueError(msg)
        self._folder = os.path.abspath(local_path(folder))
        self._paths = [[self._with_system_separators(path) for path in several] for several in paths]
        self._check_files()
        self._size = None if fit is None else target_size(fit, self._sizes() if isinstance(fit, str) else [])
        first = self._image(0)
        self.shape: tuple[int, ...] = (len(paths), *first.shape)
        self.dtype = first.dtype
        check_images(self.shape, self.dtype, f"{folder}")

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Return the images of the cells in the given rows, in the order of these rows.

        Raises
        ------
        IndexError
            If a row does not exist.
        FileNotFoundError, ValueError
            If a file is missing or damaged, or if the image of a cell differs from that of the first cell in size or
            dtype.
        """
        out = allocate_output(self, rows, out)
        for place, row in enumerate(as_row_numbers(rows, self.shape[0]).tolist()):
            image = self._image(row)
            if image.shape != out.shape[1:] or image.dtype != self.dtype:
                differ_in_size = image.shape[1:] != out.shape[2:]
                advice = "use fit='pad' or fit='crop'" if differ_in_size else "save all images in the same form"
                what = " and ".join(f"{' × '.join(map(str, i.shape))} of {i.dtype}" for i in (image, out[0]))
                msg = f"{self._path(row, 0)} and the first image differ ({what}): {advice}."
                raise ValueError(msg)
            out[place] = image
        return out

    def files(self) -> list[tuple[str, ...]]:
        """Return the image files of each cell as absolute paths, which are equal for every spelling of a path."""
        resolved = cache(lambda folder: os.path.realpath(os.path.normpath(os.path.join(self._folder, folder))))
        split = (map(os.path.split, several) for several in self._paths)
        return [tuple(os.path.join(resolved(folder), name) for folder, name in several) for several in split]

    def _with_system_separators(self, path: str) -> str:
        r"""Return a relative path of Windows, such as ``crops\0.png``, with the separators of this system.

        Other paths are returned unmodified. The path of an existing file is not modified either, because a backslash
        may be a part of its name.
        """
        if "\\" not in path or PureWindowsPath(path).drive or os.path.exists(os.path.join(self._folder, path)):
            return path
        return PureWindowsPath(path).as_posix()

    def _path(self, row: int, file: int) -> Path:
        """Return the normalised path of one of the image files of a cell."""
        return Path(os.path.normpath(os.path.join(self._folder, self._paths[row][file])))

    def _check_files(self) -> None:
        """Check that the image files of all cells exist and lie in the folder. Each directory is listed only once.

        Raises
        ------
        FileNotFoundError
            If files are missing.
        ValueError
            If a path lies outside of the folder.
        """
        # an absolute path in the table may name the folder by a link, or by the target of the link
        roots = self._folder, os.path.realpath(self._folder)
        listed: dict[str, set[str]] = {}
        missing = []
        for row, several in enumerate(self._paths):
            for file, path in enumerate(several):
                folder, name = os.path.split(path)
                if folder not in listed:
                    found = os.path.normpath(os.path.join(self._folder, folder))
                    if all(os.path.commonpath([root, found]) != root for root in roots):
                        msg = (
                            f"Row {row} of the table names {path!r}, which is outside of {self._folder}: give the "
                            "folder that holds all files as root (with root='/' any absolute path is read)."
                        )
                        raise ValueError(msg)
                    listed[folder] = set(os.listdir(found)) if os.access(found, os.R_OK) else set()
                # a file may exist but not be listed: a file system may ignore case, or refuse to list a directory with
                # readable files
                if name not in listed[folder] and not self._path(row, file).is_file():
                    missing.append(f"{self._path(row, file)} (row {row})")
        if missing:
            n_files, are = len(self._paths) * len(self._paths[0]), inflect(len(missing), "is", "are")
            advice = "name the folder that paths are relative to (root=…), or drop these rows"
            drives = [drive for several in self._paths for path in several if (drive := PureWindowsPath(path).drive)]
            if drives and os.name != "nt":
                advice = (
                    f"absolute paths of Windows, such as those in {drives[0]}, do not exist on this system: make them "
                    "relative to a folder, and name this folder (root=…)"
                )
            msg = (
                f"{len(missing)} of {n_files} files that the table names {are} not there: "
                f"{join_first(missing, 3)}; {advice}."
            )
            raise FileNotFoundError(msg)

    def _image(self, row: int) -> np.ndarray:
        """Read all channels of one cell, ``(C, H, W)``; pad or crop them if images get a common size.

        Raises
        ------
        ValueError
            If the image files of the cell differ in size or dtype.
        """
        images = [read_channels(self._path(row, file)) for file in range(len(self._paths[0]))]
        if self._size is not None:
            images = [pad_or_crop(image, self._size) for image in images]
        kinds = sorted({f"{' × '.join(map(str, image.shape[1:]))} {image.dtype}" for image in images})
        if len(kinds) > 1:
            msg = f"The channels of row {row} differ ({' and '.join(kinds)}; the first is {self._path(row, 0)})."
            raise ValueError(msg)
        return np.concatenate(images)

    def _sizes(self) -> list[tuple[int, int]]:
        """Return height and width of the image in each file, in pixels, from the headers of the files."""
        files = [self._path(row, file) for row in range(len(self._paths)) for file in range(len(self._paths[0]))]
        sizes = []
        with progress_bar("Measuring images", len(files)) as bar:
            for size in map_in_threads(read_size, files):
                sizes.append(size)
                bar.update()
        return sizes


def target_size(fit: Fit, sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width that all images get by padding or cropping, in pixels.

    Parameters
    ----------
    fit
        ``"pad"``, ``"crop"``, a number of pixels or ``(height, width)``, see :class:`FileSource`.
    sizes
        Height and width of each image. Used for ``"pad"`` and ``"crop"`` only.

    Raises
    ------
    ValueError
        If ``fit`` is neither ``"pad"`` nor ``"crop"`` nor a valid size.
    """
    if fit in ("pad", "crop"):
        side = max(map(max, sizes)) if fit == "pad" else min(map(min, sizes))
        return side, side
    try:
        return size_after_resizing(fit, 1, 1)  # type: ignore[arg-type]
    except ValueError as error:
        msg = f"fit={fit!r} is not known: use 'pad', 'crop', a number of pixels, or (height, width)."
        raise ValueError(msg) from error


def pad_or_crop(images: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Pad images ``(…, h, w)`` with zeros, or crop them, around their centre to the given height and width.

    The central pixel ``h // 2`` of an image becomes pixel ``size[0] // 2`` of the result; likewise along the width.
    """
    out = np.zeros((*images.shape[:-2], *size), images.dtype)
    # pixel of the image that becomes the first pixel of the result, along height and width; negative if the image is
    # padded
    starts = [h // 2 - side // 2 for h, side in zip(images.shape[-2:], size, strict=True)]
    inside = [slice(max(s, 0), max(s + side, 0)) for s, side in zip(starts, size, strict=True)]
    part = images[..., inside[0], inside[1]]
    places = [slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(starts, part.shape[-2:], strict=True)]
    out[..., places[0], places[1]] = part
    return out


def read_channels(path: Path) -> np.ndarray:
    """Read all channels (pages and colours) of an image file, ``(C, H, W)``.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged, not an image, or has pages of different sizes.
    """
    with _open_image(path) as file:
        pages = None if file is None else _read_pages_with_pillow(file, path)
    pages = _read_pages_with_tifffile(path) if pages is None else pages
    if len({page.shape[1:] for page in pages}) > 1:
        msg = f"{path} has pages of different sizes."
        raise ValueError(msg)
    return np.concatenate(pages)


def read_size(path: Path) -> tuple[int, int]:
    """Return height and width of the image in a file, in pixels."""
    with _open_image(path) as file:
        if file is not None:
            return file.height, file.width
    return _read_pages_with_tifffile(path)[0].shape[1:]


@contextmanager
def _open_image(path: Path) -> Iterator[Image | None]:
    """Open an image file with Pillow for a ``with`` statement, which gets `None` for a TIFF that Pillow cannot open.

    Raises
    ------
    ValueError
        If the file is not an image, or is truncated.
    """
    from PIL import Image, UnidentifiedImageError

    check_file(path)
    try:
        try:
            opened: Any = Image.open(path)
        except UnidentifiedImageError:
            with path.open("rb") as start:
                if start.read(4) not in _TIFF_SIGNATURES:
                    raise
            opened = nullcontext()
        with opened as file:
            yield file
    except (OSError, SyntaxError, TypeError) as error:  # Pillow raises any of these errors for damaged files
        msg = f"{path} is no TIFF or PNG, or is truncated ({error})."
        raise ValueError(msg) from error


def _read_pages_with_pillow(file: Image, path: Path) -> list[np.ndarray] | None:
    """Return the pixels of each page of an image file that Pillow has opened, arrays ``(C, H, W)``.

    The pixels have a dtype that models accept for images. If Pillow would misread a page, `None` is returned instead.

    Raises
    ------
    ValueError
        If a page is a PNG with 16-bit colours, of which Pillow would lose half of the bits, or if its pixel format
        (Pillow's mode) is not supported.
    """
    from PIL import ImageSequence

    pages = []
    for page in ImageSequence.Iterator(file):
        if _is_misread(page):
            return None
        # the description of the stored pixels shows whether a PNG has 16-bit colours, which Pillow reduces to 8 bits
        if page.mode in ("RGB", "RGBA", "LA") and ";16" in str(getattr(page, "tile", "")):
            msg = (
                f"{path} holds colours of 16 bits, of which half would be lost: save it as TIFF, or each channel as "
                "PNG."
            )
            raise ValueError(msg)
        converted = page.convert(_CONVERTED_MODES[page.mode]) if page.mode in _CONVERTED_MODES else page
        if converted.mode not in _READ_MODES:
            msg = f"{path} holds pixels of mode {page.mode!r}: save it as 8- or 16-bit grey, RGB or 32-bit float."
            raise ValueError(msg)
        pixels = _to_image_dtype(np.asarray(converted), path)
        pages.append(pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0))
    return pages


def _is_misread(page: Image) -> bool:
    """Return whether Pillow reads a page of a TIFF wrongly, but without an error.

    For some kinds of pages, Pillow reduces the number of bits, changes the number of channels, or ignores the sign of
    pixels.
    """
    tags = getattr(page, "tag_v2", None)
    if tags is None:
        return False
    bits, n_samples = max(tags.get(_BITS, (1,))), tags.get(_SAMPLES, 1)
    return (
        (bits > 8 and n_samples > 1)
        or n_samples != len(page.getbands())
        or _PREMULTIPLIED in tags.get(_EXTRA, ())
        or (bits == 8 and _SIGNED in tags.get(_FORMAT, ()))
        # if 0 is white, Pillow inverts the pixels only if they have at most 8 bits
        or (tags.get(_PHOTOMETRIC) == _MIN_IS_WHITE and page.mode not in ("1", "L"))
    )


def _read_pages_with_tifffile(path: Path) -> list[np.ndarray]:
    """Return the pixels of each page of a TIFF, arrays ``(C, H, W)``, read with the package tifffile.

    This is for TIFFs that Pillow cannot open or misreads.

    Raises
    ------
    ValueError
        If a required package is not installed, or if the file is damaged.
    """
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
        if "imagecodecs" in str(error):  # tifffile's error names the package that is missing
            msg = f"{path} is compressed in a way that needs one more package: pip install imagecodecs."
        else:
            msg = f"{path} cannot be read as TIFF, or is truncated ({error})."
        raise ValueError(msg) from error
    found = []
    page: Any
    for pixels, page in pages:
        # page.shaped is the shape of a page in tifffile. Its axes are separate channels, depth, height, width, and
        # interleaved channels.
        channels = np.moveaxis(pixels.reshape(page.shaped), -1, 1).reshape(-1, *page.shaped[2:4])
        if page.photometric == _MIN_IS_WHITE:
            if channels.dtype.kind != "u" or page.bitspersample > 16:
                stored = f"{path} stores {channels.dtype} with 0 as white (MinIsWhite)"
                msg = f"{stored}: save it with 0 as black (MinIsBlack)."
                raise ValueError(msg)
            channels = (2**page.bitspersample - 1 - channels).astype(channels.dtype)
        found.append(_to_image_dtype(channels, path))
    return found


def _to_image_dtype(pixels: np.ndarray, path: Path) -> np.ndarray:
    """Convert pixels to a dtype that models accept for images.

    Pixels of an accepted dtype keep it. Integers of other dtypes become float32, in which values from 0 to 2**24 are
    exact.

    Raises
    ------
    ValueError
        If the dtype is neither accepted nor an integer, or if integers of other dtypes lie outside of 0 to 2**24.
    """
    if pixels.dtype.name in IMAGE_DTYPES:
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if pixels.dtype.kind not in "iu":
        msg = f"{path} holds {pixels.dtype.name}: save it as 32-bit float."
        raise ValueError(msg)
    if not (pixels.min() >= 0 and pixels.max() <= _MAX_EXACT_INTEGER):
        n_bits = 8 * pixels.dtype.itemsize
        msg = f"{path} holds numbers of {n_bits} bits from {pixels.min()} to {pixels.max()}: save it as 32-bit float."
        raise ValueError(msg)
    return pixels.astype(np.float32)
