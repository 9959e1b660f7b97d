"""One field of view: channels of pixels of which any part can be asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data.sources import channels_last

if TYPE_CHECKING:
    from collections.abc import Sequence

# what axes may be called that are channels: of files, colours, and pages of which nothing is said
CHANNEL_AXES = ("c", "s", "i", "q")
EVERYTHING = slice(None)


class Field(ABC):
    """Channels of one field of view, of which a part is read when it is asked for; for several threads at once.

    Attributes
    ----------
    shape
        Channels, height and width.
    dtype
        Of a pixel.
    channels
        Names of the channels; `None` where nobody says.
    pixel_size
        Height and width of a pixel, in physical units; `None` where nobody says.
    whole
        Whether a part costs as much to read as all of it.
    """

    shape: tuple[int, int, int]
    dtype: np.dtype
    channels: list[str] | None = None
    pixel_size: tuple[float, float] | None = None
    whole: bool = False

    @abstractmethod
    def read(self, channels: slice, rows: slice, columns: slice) -> np.ndarray:
        """Pixels of this part, ``(channels, rows, columns)``."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, for :func:`numpy.asarray`."""
        return np.asarray(self.read(EVERYTHING, EVERYTHING, EVERYTHING), dtype)

    def __repr__(self) -> str:
        """Shape and channels, for a person."""
        names = f" ({', '.join(self.channels)})" if self.channels else ""
        return f"{' × '.join(map(str, self.shape))} {self.dtype}{names}"


class ArrayField(Field):
    """A field in an array: numpy's, dask's, Zarr's, or any other that can be sliced.

    Parameters
    ----------
    array
        Height and width, with a channel before them; or what ``axes`` says.
    where
        How an error should call it.
    axes
        Names of its axes, such as ``"tczyx"``; those beside channels, height and width have to be of length 1.
    channels
        Names of the channels.
    pixel_size
        Height and width of a pixel.

    Raises
    ------
    ValueError
        If it has several planes or time points, or its channels come last.
    """

    def __init__(
        self,
        array: Any,
        where: str,
        axes: str | None = None,
        channels: Sequence[str] | None = None,
        pixel_size: tuple[float, float] | None = None,
    ) -> None:
        self._array = array
        self._axes = axes_of(array.shape, where) if axes is None else axes
        lengths = dict(zip(self._axes, array.shape, strict=True))
        check_axes(lengths, where)
        self._channel = next((axis for axis in self._axes if axis in CHANNEL_AXES), "")
        self.shape = (lengths.get(self._channel, 1), lengths["y"], lengths["x"])
        self.dtype = np.dtype(array.dtype)
        self.channels = None if channels is None else [str(name) for name in channels]
        self.pixel_size = pixel_size
        if 0 in self.shape:
            msg = f"{where} is empty: it has shape {tuple(array.shape)}."
            raise ValueError(msg)

    def read(self, channels: slice, rows: slice, columns: slice) -> np.ndarray:
        """Pixels of this part, ``(channels, rows, columns)``."""
        wanted = {self._channel: channels, "y": rows, "x": columns}
        part = self._array[tuple(wanted.get(axis, 0) for axis in self._axes)]
        # dask's own threads would stand in the way of those that ask
        part = part.compute(scheduler="synchronous") if hasattr(part, "compute") else part
        kept = "".join(axis for axis in self._axes if axis in wanted)
        part = np.asarray(part)
        if self._channel:
            return part.transpose([kept.index(axis) for axis in (self._channel, "y", "x")])
        return part.transpose([kept.index(axis) for axis in "yx"])[None]


class StackedField(Field):
    """A field whose channels lie in files or arrays of their own.

    Parameters
    ----------
    parts
        Fields of one size and kind.
    where
        How an error should call it.

    Raises
    ------
    ValueError
        If they differ in size or dtype.
    """

    def __init__(self, parts: Sequence[Field], where: str) -> None:
        first = parts[0]
        for part in parts[1:]:
            if (part.shape[1:], part.dtype) != (first.shape[1:], first.dtype):
                msg = f"{where} has channels of {part!r} and of {first!r}: they must be alike."
                raise ValueError(msg)
        self._owner = [(part, channel) for part in parts for channel in range(part.shape[0])]
        self.shape = (len(self._owner), *first.shape[1:])
        self.dtype = first.dtype
        self.pixel_size = first.pixel_size
        self.whole = any(part.whole for part in parts)
        named = [part.channels for part in parts]
        self.channels = [name for names in named for name in names or []] if all(named) else None

    def read(self, channels: slice, rows: slice, columns: slice) -> np.ndarray:
        """Pixels of this part, ``(channels, rows, columns)``."""
        wanted = self._owner[channels]
        return np.concatenate([part.read(slice(one, one + 1), rows, columns) for part, one in wanted])


def axes_of(shape: tuple[int, ...], where: str) -> str:
    """Axes of an array that does not name them.

    Raises
    ------
    ValueError
        If it has others than height and width, and channels before them.
    """
    if len(shape) not in (2, 3):
        msg = (
            f"{where} has shape {tuple(shape)}, a field is (channels, height, width): of planes and time points take "
            "one, or their maximum, for example image[0].max(axis=1) of (time, channels, depth, height, width)."
        )
        raise ValueError(msg)
    if len(shape) == 3 and channels_last(*shape):
        msg = (
            f"{where} has shape {tuple(shape)}, which looks like (height, width, channels), a field is (channels, "
            "height, width): turn it with np.moveaxis(image, -1, 0)."
        )
        raise ValueError(msg)
    return "cyx"[-len(shape) :]


def check_axes(lengths: dict[str, int], where: str) -> None:
    """Raise if there are several planes or time points, or anything else that a crop of channels cannot hold.

    Raises
    ------
    ValueError
        Which.
    """
    channels = [axis for axis in lengths if axis in CHANNEL_AXES]
    others = [axis for axis in lengths if axis not in (*channels[:1], "y", "x") and lengths[axis] > 1]
    if not {"y", "x"} <= set(lengths) or others:
        known = {"z": "planes (z)", "t": "time points (t)"}
        several = " and ".join(f"{lengths[axis]} {known.get(axis, axis)}" for axis in others) or "no height and width"
        msg = f"{where} has {several}: crops have channels, height and width; take one of each, or their maximum."
        raise ValueError(msg)
