"""From fields of view to crops of cells."""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd.data.fields._cells import cells_of_labels, cells_of_table, table_with_fields
from scbd.data.fields._geometry import centre_pixels, near_edge
from scbd.data.fields._opening import open_fields
from scbd.data.fields._source import FieldSource, parts_of
from scbd.data.fields._views import PIXEL_SIZE, extents, pixel_sizes, readable, views_of
from scbd.data.stores import Crops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from scbd.data.fields._cells import Cells
    from scbd.data.fields._source import Edge, Mask, View

_CHOICES = {
    "edge": ("zeros", "reflect", "drop"),
    "mask": (None, "neighbours", "background"),
    "invalid": ("raise", "drop"),
}
# pixels; no field is as large
_FAR = 2.0**40
# of a table of fields what is not told of their cells
_OF_FIELDS = [PIXEL_SIZE, "channels", "image", "labels"]


def crop_cells(
    images: Any,
    cells: pd.DataFrame | None = None,
    *,
    size: int,
    labels: Any = None,
    field_key: str = "field",
    yx_keys: tuple[str, str] = ("y", "x"),
    channels: Sequence[str | int] | Mapping[str, str | int] | None = None,
    edge: Edge = "zeros",
    mask: Mask | None = None,
    physical: bool = False,
    pixel_size: float | None = None,
    resample_to: float | None = None,
    invalid: Literal["raise", "drop"] = "raise",
) -> Crops:
    """Crops of cells in fields of view, around their centroids or those of their labels.

    Everything is checked first, and next to nothing read. Crops are cut when :func:`write_screen` asks for them: each
    field is read once, by as many threads as write, in a memory that does not grow with the number of fields.

    Pixels are counted from 0, and their positions are those of their middles (as CellProfiler and scikit-image have
    it): pixel 3 reaches from 2.5 up to 3.5. The pixel in which the centroid lies becomes pixel ``size // 2`` of the
    crop: the middle one of an odd size, and of an even one the lower right of the four in the middle.

    Parameters
    ----------
    images
        Fields, each with its name: a mapping or series, a sequence (names are ``"0"``, ``"1"``, …), or a table with a
        column ``image``, such as :func:`read_plate` finds; or one field. Each is

        - an array of numpy, dask, Zarr or the like, ``(channels, height, width)`` or ``(height, width)``;
        - the path of a TIFF (with tifffile installed), an ``.npy``, a Zarr array or an OME-Zarr image;
        - or a list of those, whose channels are stacked.
    cells
        A row a cell, with its field and its position; all columns are kept. `None`: a cell for each label.
    size
        Height and width of crops, in pixels.
    labels
        Label masks of the fields, given like ``images`` (of a table, the column ``labels``): integers of the height and
        width of the image, 0 for background. Where the table has no positions, cells are at the centroids of their
        ``label``; ``y`` and ``x`` are then added to it.
    field_key
        Column of the cells that names their field; not needed for one field.
    yx_keys
        Columns of their positions.
    channels
        Which, by name or number, and in which order; a mapping gives them new names, ``{"DNA": 0}``.
    edge
        Crops that reach over the edge of their field are filled with ``"zeros"``, filled with the field mirrored at its
        last pixel (``"reflect"``), or left out (``"drop"``).
    mask
        What becomes zero: pixels of other cells' labels (``"neighbours"``), or all but those of the cell's own
        (``"background"``). Wants ``labels`` and the column ``label``.
    physical
        Whether positions are in the unit of the pixel sizes; the middle of the first pixel is 0.
    pixel_size
        Of fields that do not say theirs: a table in a column ``pixel_size`` (a number, or height and width), OME-Zarr
        and OME-TIFF in their metadata.
    resample_to
        Pixel size that all crops get: of a field with pixels of size ``p``, ``round(size * resample_to / p)`` pixels
        are cut and resized to ``size`` (bilinear, antialiased).
    invalid
        What is done with cells whose centroid lies outside of the field or is not a number, whose label has no pixel,
        or whose field cannot be read: ``"raise"`` an error, or ``"drop"`` them, with a warning that counts them.

    Returns
    -------
    :class:`Crops`, for :func:`write_screen`; ``to_memory()`` makes an AnnData of a few. The table has the cells sorted
    by field, with the columns of a table of fields (well, row, …).

    Raises
    ------
    ImportError
        If there is a TIFF, and no tifffile.
    KeyError, TypeError, ValueError
        If fields differ in channels, dtype or (unless resampled) pixel size, have planes or time points, or do not fit
        their labels; if a name, column or channel is not there; or what ``invalid`` says. All before crops are cut.

    Warns
    -----
    UserWarning
        How many crops reach over an edge, and how many cells are left out.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> fields = pd.DataFrame({"image": list(rng.integers(0, 99, (2, 3, 64, 80), "uint16")), "well": ["A1", "A2"]})
    >>> cells = pd.DataFrame({"field": [0, 0, 1], "y": [20.2, 40.0, 31.5], "x": [30.0, 25.0, 60.1]})
    >>> cells["gene"] = ["TP53", "AKT1", "TP53"]
    >>> crops = scbd.data.crop_cells(fields, cells, size=32, channels={"DNA": 0, "actin": 2})
    >>> crops
    Crops 'cells': 3 of 2 × 32 × 32 uint16 (DNA, actin)
    >>> screen = scbd.data.write_screen("screen.zarr", crops, y_key="gene")
    >>> sorted(screen.obs["well"])
    ['A1', 'A1', 'A2']
    """
    _check_arguments({"edge": edge, "mask": mask, "invalid": invalid}, size, cells, labels)
    fields = open_fields(images, "image")
    masks = None if labels is None else open_fields(labels, "labels")
    table = None if cells is None else table_with_fields(cells, field_key, list(fields.table.index))
    names = readable(fields, masks, None if table is None else table[field_key], invalid)
    sizes = pixel_sizes(fields, names, pixel_size, resample_to, physical=physical)
    views, channel_names = views_of(fields, masks, names, channels, extents(sizes, size, resample_to))
    views[0].look()
    if table is not None:
        table = table[table[field_key].isin(names).to_numpy()]
    if masks is not None and (table is None or not set(yx_keys) & set(table)):
        found = cells_of_labels(table, masks, names, field_key, invalid)
    else:
        assert table is not None
        units = pd.DataFrame(sizes if physical else np.ones_like(sizes), index=names)
        found = cells_of_table(table, field_key, yx_keys, units, labelled=mask is not None)
    found, view_of, centres = _in_reach(found, views, edge, invalid)
    part_of = parts_of(views, view_of, centres)
    order = np.lexsort([part_of, view_of])
    found = found[order]
    how: dict[str, Any] = {"size": size, "edge": edge, "mask": mask, "own": found.label}
    source = FieldSource(views, view_of[order], part_of[order], centres[order], **how)
    return Crops(source, _with_fields(found.obs, fields.table, field_key), channel_names)


def _in_reach(cells: Cells, views: list[View], edge: str, invalid: str) -> tuple[Cells, np.ndarray, np.ndarray]:
    """Cells that can be cropped, the number of each one's field, and its centre."""
    names = pd.Index([view.name for view in views])
    lengths, windows = (np.array(each) for each in ([v.field.shape[1:] for v in views], [v.extent for v in views]))
    beyond = ~(np.abs(cells.yx) < _FAR).all(axis=1)
    centres = centre_pixels(np.where(beyond[:, None], 0, cells.yx))
    beyond |= ((centres < 0) | (centres >= lengths[names.get_indexer(cells.field)])).any(axis=1)
    cells, centres = cells.without(beyond, "have a centroid outside of their field", invalid), centres[~beyond]
    view_of = names.get_indexer(cells.field)
    cut = near_edge(centres, windows[view_of], lengths[view_of])
    if not cut.any():
        return cells, view_of, centres
    if edge == "drop" and cut.all():
        msg = f"Crops of all {len(cut):,} cells reach over the edge of their field: edge='drop' leaves none."
        raise ValueError(msg)
    done = {"zeros": "zeros are there", "reflect": "the field is mirrored there", "drop": "these cells are left out"}
    msg = f"{cut.sum():,} of {len(cut):,} crops reach over the edge of their field: {done[edge]} (edge={edge!r})."
    warnings.warn(msg, UserWarning, stacklevel=3)
    return (cells[~cut], view_of[~cut], centres[~cut]) if edge == "drop" else (cells, view_of, centres)


def _with_fields(obs: pd.DataFrame, table: pd.DataFrame, field_key: str) -> pd.DataFrame:
    """Cells with what is known of their fields.

    Raises
    ------
    ValueError
        If both tables have a column, and it is not the same.
    """
    told = table.drop(columns=[name for name in _OF_FIELDS if name in table]).loc[obs[field_key]].set_axis(obs.index)
    for column in told:
        if column == field_key:
            continue  # a name in the well, where cells have the whole name
        if column in obs and (obs[column].astype(str) != told[column].astype(str)).any():
            msg = f"The tables of cells and of fields both have {column!r}, and differ: drop or rename one of them."
            raise ValueError(msg)
        obs = obs.assign(**{str(column): told[column]})
    return obs.set_axis(obs.index.astype(str))


def _check_arguments(chosen: dict[str, Any], size: Any, cells: Any, labels: Any) -> None:
    """Raise if an argument is none of those that are known, or one is missing."""
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            msg = f"{name}={value!r} is not known: use {', '.join(map(repr, _CHOICES[name]))}."
            raise ValueError(msg)
    if not isinstance(size, Integral) or size < 1:
        msg = f"size={size!r}: give a whole number of pixels."
        raise ValueError(msg)
    if cells is None and labels is None:
        msg = "Give cells, a table with their positions, or labels, whose centroids are computed."
        raise ValueError(msg)
    if labels is None and chosen["mask"] is not None:
        msg = f"mask={chosen['mask']!r} needs labels, which say which cell each pixel belongs to."
        raise ValueError(msg)
    if cells is not None and not isinstance(cells, pd.DataFrame):
        msg = f"cells is {type(cells).__name__}: give a table (a data frame); label masks are given as labels."
        raise TypeError(msg)
    if cells is not None and not len(cells):
        msg = "The table of cells is empty."
        raise ValueError(msg)
