"""Crops of fields, cut out when they are asked for."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from scbd.data.fields._geometry import span
from scbd.data.sources import check_images, target_of

if TYPE_CHECKING:
    from scbd.data.fields._field import Field

Edge: TypeAlias = Literal["zeros", "reflect", "drop"]
Mask: TypeAlias = Literal["neighbours", "background"]

# of a field at once; larger ones are gone through in parts
_AT_ONCE = 64 * 2**20


@dataclass(frozen=True, eq=False)
class View:
    """A field, and how crops are cut out of it.

    Attributes
    ----------
    name
        What errors call it.
    field
        Where its pixels are.
    channels
        Numbers of those that are read.
    extent
        Height and width of a window in its own pixels; where that is not the size of crops, they are resized.
    labels
        Whose pixel is whose, for a mask.
    """

    name: str
    field: Field
    channels: list[int]
    extent: tuple[int, int]
    labels: Field | None = None

    def look(self) -> None:
        """Read a pixel: what is asked for first is a package that decodes it.

        Raises
        ------
        ValueError
            If it cannot be read.
        """
        one = slice(0, 1)
        for field in (self.field, self.labels):
            if field is not None:
                field.read(one, one, one)

    @property
    def n_parts(self) -> int:
        """In how many parts a side it is read; what costs as much as a whole is read at once."""
        if self.field.whole:
            return 1
        size = math.prod(self.field.shape[1:]) * len(self.channels) * self.field.dtype.itemsize
        return math.ceil(math.sqrt(size / _AT_ONCE))


def parts_of(views: list[View], view_of: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Of centres ``(N, 2)`` the part of their field in which each lies, int ``(N,)``."""
    n = np.array([view.n_parts for view in views])[view_of]
    lengths = np.array([view.field.shape[1:] for view in views])[view_of]
    rows, columns = (centres * n[:, None] // lengths).T
    return rows * n + columns


class FieldSource:
    """Crops of fields, as a source of images; for several threads at once.

    Neighbouring rows of one part of a field are read together, so that each part is read once by whoever goes through
    the rows in their order.

    Parameters
    ----------
    views
        Fields.
    view_of
        Of each cell its field, int ``(N,)``.
    part_of
        Of each cell the part of the field, see :func:`parts_of`.
    centres
        Of each cell the pixel that becomes the one at ``size // 2``, int ``(N, 2)``.
    size
        Pixels a side.
    edge
        What is beyond the edge.
    mask
        What becomes zero, by the field's labels.
    own
        Of each cell its label, int ``(N,)``, for a mask.

    Attributes
    ----------
    chunk_rows
        Cells of a part of a field: one of them costs as much to read as all.
    """

    in_memory = False
    concurrent = True

    def __init__(
        self,
        views: list[View],
        view_of: np.ndarray,
        part_of: np.ndarray,
        centres: np.ndarray,
        *,
        size: int,
        edge: Edge = "zeros",
        mask: Mask | None = None,
        own: np.ndarray | None = None,
    ) -> None:
        self._views, self._view_of, self._part_of, self._centres = views, view_of, part_of, centres
        self._size, self._edge, self._mask, self._own = size, edge, mask, own
        first = views[0]
        self.shape: tuple[int, int, int, int] = (len(view_of), len(first.channels), size, size)
        self.dtype = first.field.dtype.newbyteorder("=")
        check_images(self.shape, self.dtype, "images")
        n_read = np.unique(np.stack([view_of, part_of]), axis=1).shape[1]
        self.chunk_rows = -(-len(view_of) // n_read)
        if any(view.extent != (size, size) for view in views):
            importlib.import_module("scbd.data._resizing")  # before there are threads, as where screens are resized

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order.

        Raises
        ------
        IndexError
            If there is no such row.
        ValueError
            If a field is damaged (which).
        """
        out = target_of(self, rows, out)
        numbers = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else np.asarray(rows)
        order = np.lexsort([self._part_of[numbers], self._view_of[numbers]])
        parts = np.stack([self._view_of[numbers], self._part_of[numbers]])[:, order]
        breaks = np.flatnonzero((parts[:, 1:] != parts[:, :-1]).any(axis=0)) + 1
        for places in np.split(order, breaks) if len(numbers) else ():
            view = self._views[self._view_of[numbers[places[0]]]]
            try:
                self._cut(view, numbers[places], out, places)
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                msg = f"Field {view.name!r} cannot be read: {error}"
                raise ValueError(msg) from error
        return out

    def _cut(self, view: View, rows: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Crops of one part of a field, to their places."""
        reflect = self._edge == "reflect"
        ys, xs = (
            span(centres, n, length, reflect=reflect)
            for centres, n, length in zip(self._centres[rows].T, view.extent, view.field.shape[1:], strict=True)
        )
        y0, x0, first = ys.box.start, xs.box.start, min(view.channels)
        box = view.field.read(slice(first, max(view.channels) + 1), ys.box, xs.box)
        if view.channels != list(range(first, first + len(box))):
            box = box[[number - first for number in view.channels]]
        labels = None
        if self._mask is not None and view.labels is not None:
            labels = view.labels.read(slice(0, 1), ys.box, xs.box)[0]
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            at = np.ix_(ys.pixels[number] - y0, xs.pixels[number] - x0)
            if ys.inside[number] and xs.inside[number]:  # neighbours: without an index for every pixel
                at = tuple(slice(int(index.flat[0]), int(index.flat[-1]) + 1) for index in at)
            crop = box[(slice(None), *at)]
            hidden = None if labels is None else self._hidden(labels[at], row)
            if not reflect and not (ys.inside[number] and xs.inside[number]):
                beyond = ys.beyond[number][:, None] | xs.beyond[number]
                hidden = beyond if hidden is None else hidden | beyond
            out[place] = self._sized(crop if hidden is None else np.where(hidden, 0, crop).astype(crop.dtype))

    def _hidden(self, labels: np.ndarray, row: int) -> np.ndarray:
        """Pixels of a crop that are to be zero."""
        assert self._own is not None
        others = labels != self._own[row]
        return others & (labels != 0) if self._mask == "neighbours" else others

    def _sized(self, crop: np.ndarray) -> np.ndarray:
        """A crop of as many pixels as all have."""
        if crop.shape[1:] == (self._size, self._size):
            return crop
        from scbd.data._resizing import resized

        crop = np.ascontiguousarray(crop, self.dtype)
        found = resized(crop[None], (self._size, self._size)).numpy()[0]
        return np.round(found) if self.dtype.kind == "u" else found
