"""A field in a TIFF, read through tifffile."""

from __future__ import annotations

import lzma
import math
import struct
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from scbd._files import check_file
from scbd.data.fields._field import ArrayField, Field

if TYPE_CHECKING:
    from pathlib import Path

_MICROMETRES = (None, "µm", "μm", "um")


class TiffField(Field):
    """A field in one TIFF; its pages, or its colours, are channels.

    What is not compressed is memory-mapped while a part of it is read; what is, is decoded as a whole. Of an OME-TIFF,
    names of channels and sizes of pixels are known (micrometres).

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    ImportError
        If tifffile is not installed.
    FileNotFoundError, ValueError
        If there is no such file; if it is no TIFF, truncated, or holds several images, planes or time points.
    """

    def __init__(self, path: Path) -> None:
        self._path = check_file(path)
        try:
            with _opened(path) as file:
                series = file.series[0]
                self._axes = series.axes.lower()
                n, self._shape = len(file.series), series.shape
                self._stored = series.dtype.newbyteorder(file.byteorder)
                # where all of it lies in one stretch, as it is in memory
                self._offset = series.dataoffset
                ends = [o + c for p in series.pages if p for o, c in zip(p.dataoffsets, p.databytecounts, strict=True)]
                ends.append(_next_page(file))
                size, metadata = file.filehandle.size, file.ome_metadata if file.is_ome else None
        except _errors() as error:
            raise self._broken(error) from error
        if n > 1:
            msg = f"{path} holds {n} images: a field is one; save them as files of their own."
            raise ValueError(msg)
        if max(ends) > size:
            raise self._broken(f"it has {size:,} bytes of {max(ends):,}")
        looked = ArrayField(_Nothing(self._shape, self._stored), str(path), self._axes)
        self.shape, self.dtype = looked.shape, looked.dtype.newbyteorder("=")
        self.whole = self._offset is None
        self.channels, self.pixel_size = _ome(metadata, self.shape[0])

    def read(self, channels: slice, rows: slice, columns: slice) -> np.ndarray:
        """Pixels of this part, ``(channels, rows, columns)``.

        Raises
        ------
        ValueError
            If the file is damaged.
        """
        try:
            if self._offset is not None:
                image = np.memmap(self._path, self._stored, "r", self._offset, self._shape)
            else:
                with _opened(self._path) as file:
                    image = file.series[0].asarray(maxworkers=1)
        except _errors() as error:
            raise self._broken(error) from error
        return ArrayField(image, str(self._path), self._axes).read(channels, rows, columns)

    def _broken(self, fact: object) -> ValueError:
        return ValueError(f"{self._path} cannot be read as TIFF, or is truncated ({fact}).")


class _Nothing:
    """Shape and dtype of an array that is not read yet."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)


@cache
def _tifffile() -> Any:
    try:
        import tifffile
    except ImportError as error:
        msg = "Fields in TIFF files need one more package: pip install tifffile."
        raise ImportError(msg) from error
    return tifffile


def _opened(path: Path) -> Any:
    """A file by itself: the metadata of an OME-TIFF may count those beside it as further planes."""
    file = _tifffile().TiffFile(path)
    if file.is_ome and any(series.is_multifile for series in file.series):
        file.close()
        file = _tifffile().TiffFile(path, is_ome=False)
    return file


def _next_page(file: Any) -> int:
    """Where the page after the last is said to lie: 0, unless the file was cut off between pages."""
    start, form = file.pages[-1].offset, file.tiff
    n_tags = _number(file, start, form.tagnoformat, form.tagnosize)
    return _number(file, start + form.tagnosize + n_tags * form.tagsize, form.offsetformat, form.offsetsize)


def _number(file: Any, start: int, form: str, size: int) -> int:
    file.filehandle.seek(start)
    return struct.unpack(form, file.filehandle.read(size))[0]


def _errors() -> tuple[type[Exception], ...]:
    of_library = (_tifffile().TiffFileError, zlib.error, lzma.LZMAError, struct.error)
    return (*of_library, OSError, ValueError, KeyError, IndexError, RuntimeError, TypeError)


def _ome(metadata: str | None, n_channels: int) -> tuple[list[str] | None, tuple[float, float] | None]:
    """Names of channels, and size of pixels, as far as an OME-TIFF says."""
    if metadata is None:
        return None, None
    try:
        image = ElementTree.fromstring(metadata).find("{*}Image/{*}Pixels")
    except ElementTree.ParseError:
        return None, None
    if image is None:
        return None, None
    names = [channel.get("Name") for channel in image.findall("{*}Channel")]
    channels = [str(name) for name in names] if len(names) == n_channels and all(names) else None
    sizes = [image.get(f"PhysicalSize{axis}") for axis in "YX"]
    known = all(image.get(f"PhysicalSize{axis}Unit") in _MICROMETRES for axis in "YX")
    y, x = (float(size) if known and size else math.nan for size in sizes)
    return channels, (y, x) if y > 0 and x > 0 else None
