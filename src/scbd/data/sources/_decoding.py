"""What a TIFF or PNG holds, as it is stored: through Pillow, or through tifffile where Pillow misreads it."""

from __future__ import annotations

import lzma
import struct
import zlib
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from scbd._files import check_file
from scbd.data.sources._kinds import IMAGE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
