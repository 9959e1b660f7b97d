"""Images of single cells (crops), cut from fields of view around given positions or centroids of segmented cells."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from scbd._shared.checks import check_choice, check_count, check_unmasked, inflect, join_first, missing_key_message
from scbd._shared.labels import label_text
from scbd._shared.messages import warn_user
from scbd.data._channels import default_channel_names, resolve_channels
from scbd.data._readers import Crops, warn_if_repeated
from scbd.data._sources import allocate_output, check_images, has_channels_last

if TYPE_CHECKING:
    from scbd.data._channels import Channels

logger = logging.getLogger(__name__)

Edge: TypeAlias = Literal["zeros", "reflect", "drop"]
Mask: TypeAlias = Literal["neighbours", "background"]

LABEL_COLUMN, AREA_COLUMN = "label", "area"
# Side, in pixels, of the square tiles into which a field of view is divided. Requested cells of the same tile are read
# together. Most fields of view fit into one tile; whole slides do not.
_TILE_SIDE = 4_096
# value of all cells in binary masks, such as those of ImageJ
_BINARY_FOREGROUND = 255


def crop_cells(
    images: Any,
    cells: pd.DataFrame | np.ndarray | None = None,
    *,
    size: int,
    labels: Any = None,
    field_key: str = "field",
    yx_keys: tuple[str, str] = ("y", "x"),
    channels: Channels | None = None,
    edge: Edge = "zeros",
    mask: Mask | None = None,
) -> Crops:
    """Crop cells from fields of view, around their positions or the centroids of their segmentation labels.

    All positions are checked immediately. The pixels of a crop are read only when they are needed, so that
    :func:`write_screen` holds few fields in memory at a time.

    Pixels are counted from 0, and a pixel's position is that of its centre, as in CellProfiler and scikit-image. The
    pixel that contains the centroid of the cell becomes pixel ``size // 2`` of the crop.

    Parameters
    ----------
    images
        Fields of view, as a mapping from the name of each field to an array, or as a single array. Arrays have the
        shape ``(channels, height, width)`` or ``(height, width)``, and may be of numpy, Zarr, dask, h5py or xarray.
        Names of fields are compared as text: the number 1 in ``cells`` is the field ``"1"``, but not the field
        ``"01"``.
    cells
        Table with one row per cell. It holds the name of the cell's field (not required for a single field) and the
        cell's position in pixels. If ``labels`` is given, a column ``label`` with the cell's segmentation label is
        required, and the position is optional. All columns are kept. For a single field without ``labels``, an array
        ``(N, 2)`` of y and x is sufficient. `None`: one cell per segmentation label.
    size
        Height and width of the crops, in pixels.
    labels
        Segmentation masks of the fields, given like ``images``: integers ``(height, width)`` or
        ``(1, height, width)``, where 0 is background and each other value is the label of one cell. Rows of ``cells``
        are matched to labels by field and column ``label``. The position of the centroid and the ``area`` in pixels are
        added as columns, if ``cells`` lacks them.
    field_key, yx_keys
        Columns of ``cells`` with the name of the field, and with the position (y and x).
    channels
        Channels to use and their order, by number. A mapping ``{name: number}``, for example ``{"DNA": 0}``, names
        them, and so does a list with one name per channel.
    edge
        Treatment of crops that reach over the edge of their field:

        - ``"zeros"`` (the default): the part outside of the field is filled with zeros;
        - ``"reflect"``: the part outside of the field is filled with the field mirrored at its last pixel;
        - ``"drop"``: cells whose crop reaches over the edge are excluded.
    mask
        Pixels of each crop that are set to zero, which requires ``labels``:

        - ``"neighbours"``: pixels with the label of another cell;
        - ``"background"``: all pixels outside of the cell's own label.

        Default: no pixel is set to zero.

    Returns
    -------
    :class:`Crops` in the dtype of the fields, sorted by field. If they fit into memory, ``to_memory()`` returns an
    AnnData.

    Raises
    ------
    KeyError, TypeError, ValueError
        If fields differ in channels or dtype, or have several planes or time points; if two fields have the same name
        as text; if labels are not integers, are negative, are only 0 and 255, have several planes, or differ from their
        field in height or width; if a column or channel does not exist; or if a cell has no field, no position, a
        position outside of its field, or a label without pixels.

    Warns
    -----
    UserWarning
        If ``cells`` is not given and some fields have no labels, so that no cell is cut from these fields; or if two
        rows of ``cells`` have the same field and position (with ``labels``, the same field and label).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> fields = {"A1": rng.integers(0, 99, (3, 64, 80), "uint16"), "A2": rng.integers(0, 99, (3, 64, 80), "uint16")}
    >>> cells = pd.DataFrame({"field": ["A1", "A1", "A2"], "y": [20.2, 40.0, 31.5], "x": [30.0, 25.0, 60.1]})
    >>> crops = scbd.data.crop_cells(fields, cells, size=32, channels={"DNA": 0, "actin": 2})
    >>> crops
    Crops 'cells': 3 of 2 × 32 × 32 uint16 (DNA, actin)
    """
    _check_arguments(size, edge, mask, cells, labels)
    fields = _fields_by_name(images, "Field")
    n_channels = _check_fields(fields)
    masks = {} if labels is None else _masks_by_field(labels, fields)
    table = None if cells is None else _table_with_fields(cells, fields, field_key, yx_keys)
    if table is None:
        table = _measure_fields(list(masks), fields, masks, field_key, yx_keys)
        table = table.set_axis(table[field_key].astype(str) + "_" + table[LABEL_COLUMN].astype(str))
    number = _locate_fields(table, fields, field_key)
    if cells is not None and labels is not None:
        table = _add_label_positions(table, number, fields, masks, field_key, yx_keys)
    centres = _locate_cells(table, number, fields, yx_keys)
    if cells is not None:
        keys = list(yx_keys) if labels is None else [LABEL_COLUMN]
        warn_if_repeated(table[keys].assign(**{field_key: number}).duplicated(), "the table of cells")
    if cells is None and (absent := [name for name in fields if name not in masks]):
        fields_have = f"fields {inflect(len(absent), 'has', 'have')}"
        msg = (
            f"{len(absent)} of {len(fields)} {fields_have} no labels, and no cell is cut out there "
            f"({join_first(absent)})."
        )
        warn_user(msg)
    lengths = np.array([field.shape[-2:] for field in fields.values()])[number]
    first = centres - size // 2
    cut = ((first < 0) | (first + size > lengths)).any(axis=1)
    if cut.any():
        reach = inflect(cut.sum(), "reaches over the edge of its field", "reach over the edge of their field")
        logger.info("%d of %d crops %s (edge=%r).", cut.sum(), len(cut), reach, edge)
    kept = np.flatnonzero(~cut if edge == "drop" else np.ones_like(cut))
    if not len(kept):
        msg = f"Crops of all {len(cut):,} cells reach over the edge of their field, and edge='drop' leaves none."
        raise ValueError(msg)
    tiles = centres // _TILE_SIDE
    order = kept[np.lexsort([tiles[kept, 1], tiles[kept, 0], number[kept]])]
    known = default_channel_names(n_channels)
    places, names = resolve_channels(known, known if channels is None else channels, "images")
    own = None if mask is None else _label_numbers(table)[order]
    source = _CropSource(fields, masks, number[order], centres[order], int(size), places, edge, mask, own)
    obs = table.iloc[order]
    return Crops(source, obs.set_axis(obs.index.astype(str)), names)


@dataclass(eq=False)
class _CropSource:
    """Source of cell images that cuts each crop from its field of view when the crop is read.

    Fields are divided into square tiles. If several cells of one tile are requested, their pixels are read together.

    Attributes
    ----------
    fields
        Fields of view by name.
    masks
        Segmentation masks by name of the field; empty without segmentation.
    number
        Position of each cell's field in ``fields``, ``(N,)``.
    centres
        Pixel that contains the centroid of each cell, as y and x in the cell's field, ``(N, 2)``.
    size
        Height and width of the crops, in pixels.
    channels
        Positions of the channels to use.
    edge, mask
        See :func:`crop_cells`.
    own
        Segmentation label of each cell, ``(N,)``; `None` if ``mask`` is `None`.
    chunk_rows
        Mean number of cells per tile. Reading one cell of a tile takes about as long as reading all its cells.
    """

    fields: dict[str, Any]
    masks: dict[str, Any]
    number: np.ndarray
    centres: np.ndarray
    size: int
    channels: list[int]
    edge: Edge
    mask: Mask | None
    own: np.ndarray | None
    in_memory: ClassVar[bool] = False
    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.names = list(self.fields)
        tiles = np.column_stack([self.number, self.centres // _TILE_SIDE])
        self.tile_of = np.unique(tiles, axis=0, return_inverse=True)[1].ravel()
        self.chunk_rows = -(-len(tiles) // (int(self.tile_of.max()) + 1))
        self.shape = (len(tiles), len(self.channels), self.size, self.size)
        self.dtype: np.dtype = self.fields[self.names[0]].dtype.newbyteorder("=")
        check_images(self.shape, self.dtype, "images")

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Return the crops of the cells in the given rows, in the order of these rows.

        Raises
        ------
        IndexError
            If a row does not exist.
        ValueError
            If a field of view cannot be read. The message names the field.
        """
        out = allocate_output(self, rows, out)
        asked = np.arange(self.shape[0])[rows]
        for places in pd.DataFrame(index=asked).groupby(self.tile_of[asked]).indices.values():
            name = self.names[self.number[asked[places[0]]]]
            try:
                out[places] = self._cut(name, asked[places])
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                msg = f"Field {name!r} cannot be read: {error}"
                raise ValueError(msg) from error
        return out

    def _cut(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the crops of n cells that lie in the same tile of a field of view, ``(n, C, size, size)``."""
        field = self.fields[name]
        (y, beyond_y), (x, beyond_x) = (
            _window_pixels(centres, self.size, length, reflect=self.edge == "reflect")
            for centres, length in zip(self.centres[rows].T, field.shape[-2:], strict=True)
        )
        box = (..., slice(int(y.min()), int(y.max()) + 1), slice(int(x.min()), int(x.max()) + 1))
        at = (slice(None), (y - y.min())[:, :, None], (x - x.min())[:, None, :])
        crops = np.moveaxis(_load_part(field[box])[self.channels][at], 1, 0)
        hidden = beyond_y[:, :, None] | beyond_x[:, None, :]
        if self.own is not None:
            labels = _load_part(self.masks[name][box])[at][0]
            others = labels != self.own[rows][:, None, None]
            hidden = hidden | (others & (labels != 0) if self.mask == "neighbours" else others)
        return np.where(hidden[:, None], 0, crops) if hidden.any() else crops


def _window_pixels(centres: np.ndarray, size: int, length: int, *, reflect: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the pixels that n crops cover along one axis (y or x) of their field.

    Returns
    -------
    Positions of the pixels, integers ``(n, size)``, and a boolean mask ``(n, size)`` of the pixels beyond the edge of
    the field. With ``reflect``, each pixel beyond the edge is replaced by its mirror image inside of the field, and the
    mask marks no pixel.
    """
    wanted = (centres - size // 2)[:, None] + np.arange(size)
    if reflect:  # the field is mirrored at its last pixel, which is not repeated
        period = max(2 * (length - 1), 1)
        folded = wanted % period
        return np.minimum(folded, period - folded), np.zeros(wanted.shape, dtype=bool)
    return np.clip(wanted, 0, length - 1), (wanted < 0) | (wanted >= length)


def _load_part(part: Any) -> np.ndarray:
    """Load a part of a field of view, or of its segmentation mask, into memory, ``(C, height, width)``."""
    part = np.asarray(part)
    return part.reshape(-1, *part.shape[-2:])


def _fields_by_name(arrays: Any, what: str) -> dict[str, Any]:
    """Return fields of view, or their segmentation masks, as a dictionary by name; a single array is named "0".

    Raises
    ------
    TypeError
        If an object is not an array, or is a masked array of numpy. ``what`` begins the message.
    ValueError
        If two names are equal as text, such as 1 and "1".
    """
    named = dict(arrays) if isinstance(arrays, Mapping) else {"0": arrays}
    for name, array in named.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            msg = f"{what} {name!r} is {type(array).__name__}: give an array, such as tifffile.imread(path)."
            raise TypeError(msg)
        check_unmasked(f"{what} {name!r}", array)
    texts = pd.Series(list(map(label_text, named)), index=range(len(named)), dtype=object)
    if twice := texts[texts.duplicated(keep=False)].tolist():
        equal = join_first(repr(name) for name in named if label_text(name) == twice[0])
        msg = f"{what} names {equal} are the same text: rename one of them."
        raise ValueError(msg)
    return named


def _match_field_names(names: pd.Series | list[Any], fields: dict[str, Any]) -> np.ndarray:
    """Return the position in ``fields`` of each name, ``(N,)``; -1 if no field has this name.

    Names are compared as text, because files give names as text, and tables of cells often give them as numbers.
    """
    codes, each = pd.factorize(pd.Series(names, dtype=None if len(names) else object))
    places = pd.Index([label_text(name) for name in fields]).get_indexer([label_text(name) for name in each])
    return np.where(codes < 0, -1, np.append(places, -1)[codes])


def _masks_by_field(labels: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return segmentation masks by the name of their field; a mask without a field keeps its own name."""
    masks, names = _fields_by_name(labels, "The label mask of field"), list(fields)
    places = _match_field_names(list(masks), fields)
    return {
        names[place] if place >= 0 else name: mask for place, (name, mask) in zip(places, masks.items(), strict=True)
    }


def _check_fields(fields: dict[str, Any]) -> int:
    """Check that fields of view have valid shapes and the same channels and dtype, and return the number of channels.

    Raises
    ------
    ValueError
        If an array is not a field, if there are no fields, or if fields differ in number of channels or dtype.
    """
    kinds = {}
    for name, field in fields.items():
        shape = tuple(field.shape)
        if len(shape) not in (2, 3) or 0 in shape or (len(shape) == 3 and has_channels_last(*shape)):
            msg = f"Field {name!r} has shape {shape}, a field is (channels, height, width): one plane, one time point."
            raise ValueError(msg)
        kinds[name] = (1 if len(shape) == 2 else shape[0], field.dtype)
    if len(set(kinds.values())) != 1:
        told = join_first(f"{name} has {n} channels of {dtype}" for name, (n, dtype) in kinds.items())
        msg = f"Fields must have the same channels and dtype: {told}." if kinds else "There are no fields."
        raise ValueError(msg)
    return next(iter(kinds.values()))[0]


def _table_with_fields(
    cells: pd.DataFrame | np.ndarray, fields: dict[str, Any], field_key: str, yx_keys: tuple[str, str]
) -> pd.DataFrame:
    """Return the table of cells with a column that names the field of view of each cell.

    An array of positions is converted to a table. If there is only one field, its name is added where the column is
    missing.

    Raises
    ------
    KeyError
        If there are several fields of view and the table has no column with their names.
    """
    table = cells if isinstance(cells, pd.DataFrame) else pd.DataFrame(cells, columns=list(yx_keys))
    if field_key not in table and len(fields) > 1:
        raise KeyError(missing_key_message("The table of cells", field_key, table.columns, "field_key"))
    return table if field_key in table else table.assign(**{field_key: next(iter(fields))})


def _add_label_positions(
    table: pd.DataFrame,
    number: np.ndarray,
    fields: dict[str, Any],
    masks: dict[str, Any],
    field_key: str,
    yx_keys: tuple[str, str],
) -> pd.DataFrame:
    """Add the centroid and area of each cell's segmentation label to the table of cells.

    Parameters
    ----------
    table
        Table of the cells.
    number
        Position of each cell's field in ``fields``, ``(N,)``.
    fields, masks
        Fields of view and segmentation masks by name of the field.
    field_key, yx_keys
        See :func:`crop_cells`.

    Raises
    ------
    KeyError
        If the table has no column ``label``.
    ValueError
        If a field lacks a segmentation mask, or if a label has no pixels.
    """
    if LABEL_COLUMN not in table:
        raise KeyError(missing_key_message("The table of cells", LABEL_COLUMN, table.columns))
    names = list(fields)
    found = _measure_fields([names[place] for place in np.unique(number)], fields, masks, field_key, yx_keys)
    keys = [field_key, LABEL_COLUMN]
    asked = pd.DataFrame({field_key: number, LABEL_COLUMN: _label_numbers(table)})
    found = found.assign(**{field_key: _match_field_names(found[field_key], fields)})
    joined = asked.merge(found, how="left", on=keys).set_axis(table.index)
    _raise_if_any(joined[AREA_COLUMN].isna(), "have a label without pixels")
    return table.assign(**{column: joined[column] for column in found if column not in table})


def _label_numbers(table: pd.DataFrame) -> np.ndarray:
    """Return the segmentation label of each cell, int64 ``(N,)``; raise ``ValueError`` if one is not a whole number."""
    labels = pd.to_numeric(table[LABEL_COLUMN], errors="coerce")
    _raise_if_any(labels.isna() | (labels % 1 != 0), f"have no whole number in column {LABEL_COLUMN!r}")
    return labels.to_numpy(np.int64)


def _measure_fields(
    names: list[str], fields: dict[str, Any], masks: dict[str, Any], field_key: str, yx_keys: tuple[str, str]
) -> pd.DataFrame:
    """Return a table with one row per segmentation label of the named fields of view.

    Raises
    ------
    ValueError
        If a name has no field or no segmentation mask, or if a mask is invalid.
    """
    for there, what in ((fields, "image"), (masks, "labels")):
        if absent := [name for name in names if name not in there]:
            fields_have = f"fields {inflect(len(absent), 'has', 'have')}"
            msg = (
                f"{len(absent)} of {len(names)} {fields_have} no {what} ({join_first(absent)}): give both, or leave "
                "them out."
            )
            raise ValueError(msg)
    parts = [_measure_labels(masks[name], fields[name].shape[-2:], name) for name in names]
    found = pd.concat(parts, ignore_index=True)
    return found.rename(columns=dict(zip(("field", "y", "x"), (field_key, *yx_keys), strict=True)))


def _measure_labels(mask: Any, size: tuple[int, int], name: str) -> pd.DataFrame:
    """Return a table with one row per segmentation label of a field of view: its centroid, and its area in pixels.

    Raises
    ------
    ValueError
        If the segmentation mask does not consist of integers, has several planes, differs from the field in height or
        width, has negative labels, or is binary (0 and 255).
    """
    shape = tuple(mask.shape)
    if mask.dtype.kind not in "ui" or shape[-2:] != tuple(size):
        msg = (
            f"Labels of field {name!r} are {mask.dtype} of shape {shape}: give whole numbers, 0 for background, of its "
            f"height and width {tuple(size)}."
        )
        raise ValueError(msg)
    if math.prod(shape[:-2]) != 1:
        msg = (
            f"Labels of field {name!r} have several planes (shape {shape}), such as nuclei and cells, or slices: give "
            "one of them, such as mask[0]."
        )
        raise ValueError(msg)
    labels = _load_part(mask[...])[0]
    y, x = np.nonzero(labels)
    found, of_pixel, area = np.unique(labels[y, x], return_inverse=True, return_counts=True)
    if (found < 0).any() or (labels.dtype.itemsize == 1 and found.tolist() == [_BINARY_FOREGROUND]):
        msg = (
            f"Labels of field {name!r} are {join_first(found)}: give each cell a positive label of its own (binary "
            "masks: skimage.measure.label(mask)), and set borders and background to 0."
        )
        raise ValueError(msg)
    y_mean, x_mean = (np.bincount(of_pixel, at) / area for at in (y, x))
    return pd.DataFrame(
        {"field": name, LABEL_COLUMN: found.astype(np.int64), "y": y_mean, "x": x_mean, AREA_COLUMN: area}
    )


def _locate_fields(table: pd.DataFrame, fields: dict[str, Any], field_key: str) -> np.ndarray:
    """Return the position of each cell's field of view in ``fields``, ``(N,)``.

    Raises
    ------
    ValueError
        If there are no cells, or if a cell lies in a field that is not given.
    """
    if not len(table):
        msg = "There are no cells: the table is empty, or the labels are all 0."
        raise ValueError(msg)
    number = _match_field_names(table[field_key], fields)
    absent = table[field_key][number < 0].drop_duplicates().tolist()
    # numbers in a table are often names such as "01" that lost their zeros when the table was read
    advice = ": read the column with dtype=str" if any(not isinstance(name, str) for name in absent) else ""
    _raise_if_any(
        number < 0,
        f"lie in fields that are not given (column {field_key!r} has {join_first(map(repr, absent))}; the fields are "
        f"called {join_first(map(repr, fields))}, and names are compared as text{advice})",
    )
    return number


def _locate_cells(
    table: pd.DataFrame, number: np.ndarray, fields: dict[str, Any], yx_keys: tuple[str, str]
) -> np.ndarray:
    """Return y and x of the pixel that contains each cell's centroid, ``(N, 2)``.

    Raises
    ------
    KeyError, ValueError
        If a position is missing, or is outside of its field.
    """
    for key in yx_keys:
        if key not in table:
            raise KeyError(missing_key_message("The table of cells", key, table.columns, "yx_keys"))
    yx = table[list(yx_keys)].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    lengths = np.array([field.shape[-2:] for field in fields.values()])[number]
    _raise_if_any(~((yx >= -0.5) & (yx < lengths - 0.5)).all(axis=1), "have no position in their field")
    return np.floor(yx + 0.5).astype(np.int64)


def _raise_if_any(bad: np.ndarray | pd.Series, what: str) -> None:
    """Raise an error that states the number of invalid cells, if there are any.

    Parameters
    ----------
    bad
        Mask of the invalid cells, boolean ``(N,)``.
    what
        Defect of the invalid cells, such as "have a label without pixels". It follows the word "cells" in the message.

    Raises
    ------
    ValueError
        If any cell is invalid. The message also states the first row with an invalid cell.
    """
    bad = np.asarray(bad)
    if bad.any():
        msg = f"{bad.sum():,} of {len(bad):,} cells {what}; the first is in row {np.argmax(bad)}. Correct or drop them."
        raise ValueError(msg)


def _check_arguments(size: Any, edge: Any, mask: Any, cells: Any, labels: Any) -> None:
    """Raise ``ValueError`` if an argument of :func:`crop_cells` is invalid, or if a required argument is missing."""
    check_choice("edge", edge, Edge)
    check_choice("mask", mask, (*get_args(Mask), None))
    check_count("size", size)
    if labels is None and (cells is None or mask is not None):
        msg = "Give cells, a table with their positions, or labels, whose centroids are computed; a mask needs labels."
        raise ValueError(msg)
    if cells is not None and not isinstance(cells, pd.DataFrame) and np.shape(cells)[1:] != (2,):
        msg = f"cells has shape {np.shape(cells)}: give a table, or positions (N, 2); label masks are given as labels."
        raise ValueError(msg)
