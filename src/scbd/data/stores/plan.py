"""What a screen is going to be: its table, the order of its rows, and where each comes from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._labels import label_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scbd.data.stores.conversion import Conversion
    from scbd.data.stores.crops import Crops

_BLOCK_BYTES = 64 * 2**20


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
    """

    plates: Sequence[Crops]
    obs: pd.DataFrame
    plate_of: np.ndarray
    row_of: np.ndarray
    shape: tuple[int, int, int, int]
    dtype: np.dtype
    convert: Conversion
    block_size: int

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
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def rows(self, block: int) -> slice:
        """Rows of a block."""
        return slice(block * self.block_size, min((block + 1) * self.block_size, self.shape[0]))

    def images(self, block: int) -> np.ndarray:
        """Images of a block, read from their plates and converted."""
        rows = self.rows(block)
        plate_of, row_of = self.plate_of[rows], self.row_of[rows]
        images = np.empty((len(row_of), *self.shape[1:]), self.dtype)
        for number in np.unique(plate_of):
            places = np.flatnonzero(plate_of == number)
            # in the order of the plate's file
            places = places[np.argsort(row_of[places])]
            images[places] = self.convert(self.plates[number].images.read(row_of[places]))
        return images

    def settings(self) -> dict[str, str]:
        """What decides every byte, as text: a store that was begun goes on only if it is the same."""
        hashes = pd.util.hash_pandas_object(self.obs).to_numpy()
        digest = hashlib.sha256(hashes.tobytes() + self.plate_of.tobytes() + self.row_of.tobytes())
        scale = self.convert.intensity_range
        said = [
            *self.shape,
            self.dtype.name,
            self.block_size,
            *self.channels,
            None if scale is None else scale.tolist(),
        ]
        digest.update(json.dumps(said).encode())
        return {"format": "1", "digest": digest.hexdigest()}


def screen_plan(
    plates: Sequence[Crops], y_key: str, convert: Conversion, block_size: int | None, seed: int
) -> ScreenPlan:
    """Put plates together.

    Raises
    ------
    KeyError, ValueError
        If there is no plate, if plates differ in channels, dtype or size, or lack a perturbation.
    """
    first = plates[0]
    for plate in plates:
        if (plate.channels, plate.images.dtype) != (first.channels, first.images.dtype):
            said = [f"{', '.join(p.channels)} ({p.images.dtype})" for p in (plate, first)]
            msg = f"{plate.name} has channels {said[0]}, {first.name} has {said[1]}: they must be the same."
            raise ValueError(msg)
        if convert.image_size is None and plate.images.shape[2:] != first.images.shape[2:]:
            said = [" × ".join(map(str, p.images.shape[2:])) for p in (plate, first)]
            msg = (
                f"{plate.name} has {said[0]} pixels, {first.name} {said[1]}: give image_size, to which all are resized."
            )
            raise ValueError(msg)
        try:
            label_values(plate.obs, y_key)
        except (KeyError, ValueError) as error:
            msg = f"{plate.name}: {error.args[0]}"
            raise type(error)(msg) from error
    obs = pd.concat([plate.obs for plate in plates])
    obs.index = list(_unique_names([plate.obs.index.astype(str) for plate in plates]))
    sizes = [len(plate.obs) for plate in plates]
    plate_of = np.repeat(np.arange(len(plates), dtype=np.int32), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes])
    codes = label_values(obs, y_key).cat.codes.to_numpy()
    shuffled = np.random.default_rng(seed).permutation(len(obs))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    shape = (len(obs), *convert.shape(*first.images.shape[1:]))
    if block_size is None:
        block_size = max(1, _BLOCK_BYTES // (int(np.prod(shape[1:])) * convert.dtype.itemsize))
    elif block_size < 1:
        msg = f"block_size={block_size}: write at least one row at once."
        raise ValueError(msg)
    obs = obs.iloc[order].astype({column: "category" for column in obs if obs[column].dtype == object})
    return ScreenPlan(plates, obs, plate_of[order], row_of[order], shape, convert.dtype, convert, block_size)


def _unique_names(names: Sequence[pd.Index]) -> Iterator[str]:
    """Names of all plates; where they repeat between plates, with the plate's number."""
    together = names[0].append(list(names[1:])) if len(names) > 1 else names[0]
    for number, of_plate in enumerate(names):
        yield from of_plate if together.is_unique else (f"{name}-{number}" for name in of_plate)
