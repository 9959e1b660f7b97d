"""Fields that fit together: which can be read, their pixel sizes, their channels, their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._messages import head
from scbd.data._channels import chosen_channels, numbered
from scbd.data.fields._opening import check_broken
from scbd.data.fields._source import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._channels import Channels
    from scbd.data.fields._field import Field
    from scbd.data.fields._opening import Fields

PIXEL_SIZE = "pixel_size"
# sizes that differ by less are the same, written with fewer digits
_TOLERANCE = 1e-3


def readable(fields: Fields, masks: Fields | None, of_cells: pd.Series | None, invalid: str) -> list[str]:
    """Names of the fields that have cells, or labels, and can be read.

    Raises
    ------
    ValueError
        If some are broken, and not to be left out; if labels are of no field, or a field has none; if none is left.
    """
    there = list(fields.table.index)
    if of_cells is not None:
        asked = list(dict.fromkeys(of_cells))
    else:
        asked = there if masks is None else list(masks.table.index)
    unknown = [name for name in asked if name not in fields.table.index]
    unlabelled = [] if masks is None else [name for name in asked if name not in masks.table.index]
    if unknown or unlabelled:
        lack, what = (unknown, "images") if unknown else (unlabelled, "labels")
        msg = f"{len(lack)} of {len(asked)} fields have no {what}: {head(lack)}. Fields are: {head(there)}."
        raise ValueError(msg)
    for of in (fields, masks):
        if of is not None:
            check_broken(of, asked, invalid)
    names = [name for name in asked if name in fields.opened and (masks is None or name in masks.opened)]
    if not names:
        msg = f"There is no cell in a field that can be read ({len(asked)} were tried)."
        raise ValueError(msg)
    return names


def pixel_sizes(
    fields: Fields, names: Sequence[str], default: float | None, resample_to: float | None, *, physical: bool
) -> np.ndarray:
    """Height and width of the pixels of each field, float ``(F, 2)``; NaN where nobody says.

    Raises
    ------
    ValueError
        If they are no sizes, are asked for and not there, or differ and nothing is resampled.
    """
    said = fields.table[PIXEL_SIZE] if PIXEL_SIZE in fields.table else pd.Series(dtype=object)
    found = np.array([_pair(said.get(name), fields.opened[name].pixel_size, default) for name in names])
    bad = ~(found > 0).all(axis=1) & ~np.isnan(found).all(axis=1)
    if bad.any() or (resample_to is not None and not resample_to > 0):
        what = f"that of field {names[int(np.argmax(bad))]!r} is {found[np.argmax(bad)].tolist()}" if bad.any() else ""
        msg = f"Pixel sizes are positive: {what or f'resample_to is {resample_to}'}."
        raise ValueError(msg)
    unknown = np.isnan(found).any(axis=1)
    if unknown.any() and (physical or resample_to is not None):
        msg = (
            f"The size of pixels is not known of {unknown.sum()} of {len(names)} fields "
            f"({head(np.array(names, object)[unknown])}): give pixel_size, or a table of fields with that column."
        )
        raise ValueError(msg)
    known = found[~unknown]
    other = ~np.isclose(known, known[:1], rtol=_TOLERANCE).all(axis=1)
    if resample_to is None and other.any():
        first, second = (np.array(names, object)[~unknown][place] for place in (0, int(np.argmax(other))))
        msg = (
            f"Pixels of field {second!r} are {_text(known[np.argmax(other)])} high and wide, those of {first!r} "
            f"{_text(known[0])}: cells would differ in size; give all of them one with resample_to={known.max():g}."
        )
        raise ValueError(msg)
    return found


def extents(sizes: np.ndarray, size: int, resample_to: float | None) -> list[tuple[int, int]]:
    """Height and width of each field's windows, in its own pixels."""
    if resample_to is None:
        return [(size, size)] * len(sizes)
    found = np.maximum(np.round(size * resample_to / sizes), 1).astype(int)
    return [(int(height), int(width)) for height, width in found]


def views_of(
    fields: Fields,
    masks: Fields | None,
    names: Sequence[str],
    channels: Channels | None,
    windows: list[tuple[int, int]],
) -> tuple[list[View], list[str]]:
    """How crops are cut out of each field, and names of their channels.

    Raises
    ------
    KeyError, ValueError
        If fields differ in dtype or channels, lack one, or do not fit their labels.
    """
    first = fields.opened[names[0]]
    views, named, told = [], [], []
    for name, window in zip(names, windows, strict=True):
        field = fields.opened[name]
        labels = None if masks is None else masks.opened[name]
        if field.dtype.newbyteorder("=") != first.dtype.newbyteorder("="):
            msg = f"Field {name!r} is {field!r}, field {names[0]!r} is {first!r}: pixels must be of one dtype."
            raise ValueError(msg)
        if labels is not None and labels.shape[1:] != field.shape[1:]:
            msg = f"Labels of field {name!r} are {labels!r}, its image is {field!r}: they must have the same pixels."
            raise ValueError(msg)
        numbers, names_of_channels = _chosen(field, name, channels)
        views.append(View(name, field, numbers, window, labels))
        named.append(names_of_channels)
        told.append(f"field {name!r} has {len(numbers)} channels ({', '.join(names_of_channels)})")
    for other, fact in zip(named, told, strict=True):
        if other != named[0]:
            msg = f"{fact[0].upper()}{fact[1:]}, {told[0]}: choose those that all have with channels=[…]."
            raise ValueError(msg)
    return views, named[0]


def _chosen(field: Field, name: str, channels: Channels | None) -> tuple[list[int], list[str]]:
    """Numbers of a field's channels, and how they are called."""
    known = field.channels or numbered(field.shape[0])
    if channels is None:
        return list(range(len(known))), known
    return chosen_channels(known, channels, f"Field {name!r}")


def _pair(*sizes: Any) -> tuple[float, float]:
    """Height and width by the first who says."""
    for size in sizes:
        both = np.ravel(np.asarray(np.nan if size is None else size, dtype=float))
        if both.size in (1, 2) and not np.isnan(both).any():
            return float(both[0]), float(both[-1])
    return np.nan, np.nan


def _text(size: np.ndarray) -> str:
    return " and ".join(f"{length:g}" for length in dict.fromkeys(size.tolist()))
