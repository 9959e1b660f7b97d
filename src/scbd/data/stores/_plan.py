"""What a screen is going to be: its table, the order of its rows, and where each comes from."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from anndata.utils import make_index_unique

from scbd._labels import label_values
from scbd.data._digests import digest_cells
from scbd.data.sources import DerivedSource, Unreadable, source_at_rest
from scbd.data.stores._finite import check_finite
from scbd.data.stores._sources import say_what_recurs, with_source
from scbd.data.stores._tables import storable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scbd.data.sources import ImageSource
    from scbd.data.stores._conversion import Conversion
    from scbd.data.stores._crops import Crops

_BLOCK_BYTES = 64 * 2**20
# images that are read and converted at once: few enough for a processor's caches, and for memory
_CONVERTED_BYTES = 8 * 2**20
# names at once
_HASHED = 65_536


@dataclass(frozen=True, eq=False)
class ScreenPlan:
    """A screen before it is written.

    Attributes
    ----------
    plates
        Where the crops come from.
    obs
        Table of all cells in the order of the store: sorted by perturbation, shuffled inside.
    plate_of, row_of
        Of each row of the store its plate, and its row there.
    shape, dtype
        Of the stored images, ``(N, C, H, W)``.
    convert
        What is done to images on the way.
    block_size
        Rows that are written at once.
    staged
        Of some plates, by their number, all images as they are stored: they are read from there.
    """

    plates: Sequence[Crops]
    obs: pd.DataFrame
    plate_of: np.ndarray
    row_of: np.ndarray
    shape: tuple[int, int, int, int]
    dtype: np.dtype
    convert: Conversion
    block_size: int
    staged: Mapping[int, ImageSource] = field(default_factory=dict)
    _turns: dict[int, Lock] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Most sources are read from one thread at a time; plates may share one."""
        self._turns.update((id(source_at_rest(plate.images)), Lock()) for plate in self.plates)

    @property
    def channels(self) -> list[str]:
        """Names of the channels."""
        return self.plates[0].channels

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.shape[0] // self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored image."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, block: int) -> slice:
        """Rows of a block."""
        return slice(block * self.block_size, min((block + 1) * self.block_size, self.shape[0]))

    def chunk_rows(self, number: int) -> int:
        """How many rows of a plate are read where one is asked for."""
        return getattr(self.plates[number].images, "chunk_rows", 1)

    def images(self, block: int) -> np.ndarray:
        """Images of a block, read from their plates and converted; for several threads at once.

        Raises
        ------
        ValueError
            If an image has NaN or infinite pixels (which), or some cannot be read (all of them).
        """
        rows = self.rows(block)
        plate_of, row_of = self.plate_of[rows], self.row_of[rows]
        images, unreadable = np.empty((len(row_of), *self.shape[1:]), self.dtype), Unreadable()
        for number in np.unique(plate_of):
            places = np.flatnonzero(plate_of == number)
            # in the order of the plate's file
            places = places[np.argsort(row_of[places])]
            step = self._step(number)
            for part in (places[start : start + step] for start in range(0, len(places), step)):
                with unreadable.kept():
                    images[part] = self._read(number, row_of[part])
        unreadable.tell()
        return images

    def convert_to(self, images: np.ndarray, raw: np.ndarray, number: int, first: int) -> None:
        """Convert neighbouring rows of a plate, the first of which is told."""
        step = self._step(number)
        for start in range(0, len(raw), step):
            part = slice(start, min(start + step, len(raw)))
            images[part] = self._converted(raw[part], number, np.arange(first + part.start, first + part.stop))

    def _step(self, number: int) -> int:
        source = self.plates[number].images
        return max(1, _CONVERTED_BYTES // (math.prod(source.shape[1:]) * source.dtype.itemsize))

    def _read(self, number: int, rows: np.ndarray) -> np.ndarray:
        if number in self.staged:
            return self.staged[number].read(rows)
        with self.turn(number):
            raw = self.plates[number].images.read(rows)
        return self._converted(raw, number, rows)

    def turn(self, number: int) -> AbstractContextManager:
        """To be held while a plate is read."""
        source = self.plates[number].images
        return nullcontext() if getattr(source, "concurrent", False) else self._turns[id(source_at_rest(source))]

    def _converted(self, raw: np.ndarray, number: int, rows: np.ndarray) -> np.ndarray:
        check_finite(raw, self.plates[number], rows)
        with np.errstate(over="ignore"):  # where float16 is too small: found below
            images = self.convert(raw)
        check_finite(images, self.plates[number], rows)
        return images

    def settings(self) -> dict[str, str]:
        """What decides every byte, as text: a store that was begun goes on only if it is the same.

        All labels are in it, and a sample of every plate's pixels: images that were corrected are other images.
        """
        return {"format": "2", "digest": self._digest}

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(digest_cells(None, self.obs).encode())
        digest.update(self.plate_of.data)
        digest.update(self.row_of.data)
        for plate in self.plates:
            digest.update(digest_cells(getattr(plate.images, "glimpse", plate.images), plate.obs.iloc[:0]).encode())
        scale = self.convert.intensity_range
        rest = [
            *self.shape,
            self.dtype.name,
            self.block_size,
            *self.channels,
            None if scale is None else scale.tolist(),
            *(plate.images.said for plate in self.plates if isinstance(plate.images, DerivedSource)),
        ]
        digest.update(json.dumps(rest).encode())
        return digest.hexdigest()


def screen_plan(
    plates: Sequence[Crops], y_key: str | Sequence[str], convert: Conversion, block_size: int | None, seed: int
) -> ScreenPlan:
    """Put plates together.

    Raises
    ------
    KeyError, ValueError
        If there is no plate, if plates differ in channels, dtype or size, or lack a perturbation, or if a column of
        theirs cannot be stored.
    """
    first = plates[0]
    for plate in plates:
        if (plate.channels, plate.images.dtype) != (first.channels, first.images.dtype):
            channels = [f"{', '.join(p.channels)} ({p.images.dtype})" for p in (plate, first)]
            msg = f"{plate.name} has channels {channels[0]}, {first.name} has {channels[1]}: they must be the same."
            raise ValueError(msg)
        if convert.image_size is None and plate.images.shape[2:] != first.images.shape[2:]:
            sides = [" × ".join(map(str, p.images.shape[2:])) for p in (plate, first)]
            msg = (
                f"{plate.name} has {sides[0]} pixels, {first.name} {sides[1]}: give image_size, to which all are "
                "resized."
            )
            raise ValueError(msg)
        try:
            label_values(plate.obs, y_key)
        except (KeyError, ValueError) as error:
            msg = f"{plate.name}: {error.args[0]}"
            raise type(error)(msg) from error
    sizes = [len(plate.obs) for plate in plates]
    shape = (sum(sizes), *convert.shape(*first.images.shape[1:]))
    if block_size is None:
        block_size = max(1, _BLOCK_BYTES // (math.prod(shape[1:]) * convert.dtype.itemsize))
    elif block_size < 1:
        msg = f"block_size={block_size}: write at least one row at once."
        raise ValueError(msg)
    obs, order = _in_order(plates, y_key, seed)
    say_what_recurs(plates, y_key)
    # of no more bytes than are needed: there are millions of them
    plate_of = np.repeat(np.arange(len(plates), dtype=np.int32), sizes)[order]
    row_of = np.concatenate([np.arange(size, dtype=order.dtype) for size in sizes])[order]
    return ScreenPlan(plates, obs, plate_of, row_of, shape, convert.dtype, convert, block_size)


def _in_order(plates: Sequence[Crops], y_key: str | Sequence[str], seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """The table, sorted by perturbation and shuffled inside, and which row of all plates each was."""
    # at once: what is text on one plate may be numbers on another
    obs = pd.concat([plate.obs for plate in plates]) if len(plates) > 1 else plates[0].obs
    obs = storable(with_source(obs, plates))
    order = np.random.default_rng(seed).permutation(len(obs))
    if len(obs) < 2**31:
        order = order.astype(np.int32)
    codes = label_values(obs, y_key).cat.codes.to_numpy()
    order = order[np.argsort(codes[order], kind="stable")]
    obs = obs.iloc[order].astype({column: "category" for column in obs if obs[column].dtype == object})
    obs.index = _unique_names(plates)[order]
    return obs, order


def _unique_names(plates: Sequence[Crops]) -> pd.Index:
    """Names of all cells; where they repeat between plates, with the plate's number, and inside of one with another."""
    names = [plate.obs.index.astype(str) for plate in plates]
    together = names[0].append(names[1:])
    if len(names) > 1 and _repeats(together):
        together = pd.Index([f"{name}-{number}" for number, of_plate in enumerate(names) for name in of_plate])
    if not _repeats(together):
        return together
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Suffix used", UserWarning)  # of names that had one before
        return make_index_unique(together)


def _repeats(names: pd.Index) -> bool:
    """Whether any two are the same: by their hashes, and only where these repeat by themselves, which takes memory."""
    texts = names.to_numpy()
    hashes = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), _HASHED):
        part = slice(start, start + _HASHED)
        hashes[part] = pd.util.hash_array(texts[part], categorize=False)
    hashes.sort()
    return bool((hashes[1:] == hashes[:-1]).any()) and not names.is_unique
