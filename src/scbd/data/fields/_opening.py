"""Fields by name, from what people have: arrays, paths, a mapping or sequence of them, a table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._messages import head, missing_key
from scbd.data._prefetch import worked_on
from scbd.data.fields._field import ArrayField, Field, StackedField
from scbd.data.fields._ome_zarr import open_zarr
from scbd.data.fields._tiff import TiffField

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIFF = (".tif", ".tiff", ".btf", ".tf8")


class Fields(NamedTuple):
    """Fields that can be read."""

    table: pd.DataFrame
    """A row a field, under its name, with all that was said of it."""
    opened: dict[str, Field]
    """By name."""
    broken: dict[str, str]
    """Of others, why not."""


def open_fields(images: Any, column: str) -> Fields:
    """Look at all fields, without reading pixels.

    Parameters
    ----------
    images
        One field, or several: a mapping or series by name, a sequence (their names are numbers), or a table with
        ``column``.
    column
        What they are, in a table and in errors: ``"image"`` or ``"labels"``.

    Raises
    ------
    KeyError, TypeError, ValueError
        If a table has no such column, names repeat, or something is no field.
    """
    table = _table(images, column)
    if not len(table) or table.index.has_duplicates:
        twice = head(table.index[table.index.duplicated()])
        msg = f"Fields must have names of their own: {twice} stand for several." if twice else "There are no fields."
        raise ValueError(msg)
    opened: dict[str, Field] = {}
    broken: dict[str, str] = {}
    whats = [f"{column} of field {name!r}" for name in table.index]
    found = worked_on(lambda item: _field_or_error(*item), zip(table[column], whats, strict=True))
    for name, field in zip(table.index, found, strict=True):
        if isinstance(field, Field):
            opened[name] = field
        else:
            broken[name] = str(field)
    return Fields(table.drop(columns=column), opened, broken)


def open_field(image: Any, where: str) -> Field:
    """One field: an array, the path of a TIFF, ``.npy`` or Zarr, or a sequence of such, which are its channels.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        If it is none, or broken.
    """
    if isinstance(image, Field):
        return image
    if isinstance(image, (list, tuple)) and image:
        parts = [open_field(part, where) for part in image]
        return parts[0] if len(parts) == 1 else StackedField(parts, where)
    if isinstance(image, (str, os.PathLike)):
        return _of_path(Path(image), str(image))
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        msg = f"{where} is {type(image).__name__}: give an array, or the path of a TIFF, .npy or .zarr."
        raise TypeError(msg)
    return ArrayField(image, where)


def check_broken(fields: Fields, asked: Sequence[str], invalid: str) -> None:
    """Say which fields that are asked for cannot be read.

    Raises
    ------
    ValueError
        Unless they are to be left out.

    Warns
    -----
    UserWarning
        If they are.
    """
    bad = [name for name in asked if name in fields.broken]
    if not bad:
        return
    fact = f"{len(bad)} of {len(asked)} fields cannot be read ({head(bad)}); the first: {fields.broken[bad[0]]}"
    if invalid == "raise":
        msg = f"{fact} Repair or drop them, or leave their cells out with invalid='drop'."
        raise ValueError(msg)
    warnings.warn(f"{fact} Their cells are left out.", UserWarning, stacklevel=4)


def _table(images: Any, column: str) -> pd.DataFrame:
    if isinstance(images, pd.DataFrame):
        if column not in images:
            raise KeyError(missing_key("The table of fields", column, images.columns))
        return images.set_axis(images.index.astype(str))
    if isinstance(images, (Mapping, pd.Series)):
        named = {str(name): image for name, image in images.items()}
        if len(named) < len(images):
            msg = "Fields must have names of their own: some stand for several."
            raise ValueError(msg)
    else:
        several = list(images) if isinstance(images, (list, tuple)) else [images]
        named = {str(number): image for number, image in enumerate(several)}
    # one by one: pandas would take arrays and lists apart
    values = np.empty(len(named), dtype=object)
    for number, image in enumerate(named.values()):
        values[number] = image
    return pd.DataFrame({column: values}, index=pd.Index(named, dtype=object))


def _field_or_error(image: Any, where: str) -> Field | Exception:
    try:
        return open_field(image, where)
    except (OSError, ValueError) as error:
        return error


def _of_path(path: Path, text: str) -> Field:
    if "://" in text:
        return open_zarr(text)
    if path.suffix.lower() in _TIFF:
        return TiffField(path)
    if path.suffix == ".npy" and path.is_file():
        return ArrayField(_mapped(path), text)
    if path.suffix == ".zarr" or path.is_dir() or not path.exists():
        return open_zarr(path)
    msg = f"{path} is of no known kind: a field is a TIFF, .npy or .zarr; read others yourself, and give arrays."
    raise ValueError(msg)


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        msg = f"{path} is no array of numpy's, or is truncated."
        raise ValueError(msg) from error
