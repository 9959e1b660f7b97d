"""Label masks: where each label lies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.data._prefetch import worked_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data.fields._field import Field

# pixels that are looked at at once
_AT_ONCE = 16 * 2**20


def measured(fields: dict[str, Field], names: Sequence[str]) -> pd.DataFrame:
    """Centroids of all labels of some fields: ``field``, ``label``, ``y``, ``x``; 0 is background.

    Raises
    ------
    ValueError
        If something is no label mask, or cannot be read.
    """
    for name in names:
        _check_labels(fields[name], name)
    tables = [
        table.assign(field=name)
        for name, table in zip(names, worked_on(lambda name: _centroids(fields[name], name), names), strict=True)
    ]
    return pd.concat(tables, ignore_index=True)[["field", "label", "y", "x"]]


def _centroids(field: Field, name: str) -> pd.DataFrame:
    """Of one field, band by band."""
    _, height, width = field.shape
    step = height if field.whole else max(1, _AT_ONCE // width)
    sums = []
    for start in range(0, height, step):
        try:
            band = field.read(slice(0, 1), slice(start, min(start + step, height)), slice(None))[0]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            msg = f"Labels of field {name!r} cannot be read: {error}"
            raise ValueError(msg) from error
        y, x = np.nonzero(band)
        ids, places = np.unique(band[y, x], return_inverse=True)
        weights = (None, y + float(start), x.astype(float))
        n, ys, xs = (np.bincount(places, weight, minlength=len(ids)) for weight in weights)
        sums.append(pd.DataFrame({"label": ids.astype(np.int64), "n": n, "y": ys, "x": xs}))
    total = pd.concat(sums).groupby("label", as_index=False).sum()
    return pd.DataFrame({"label": total["label"], "y": total["y"] / total["n"], "x": total["x"] / total["n"]})


def _check_labels(field: Field, name: str) -> None:
    if field.shape[0] != 1 or field.dtype.kind not in "ui" or math.prod(field.shape) == 0:
        remedy = " Number the cells of a mask first, with scipy.ndimage.label." if field.dtype.kind == "b" else ""
        msg = f"Labels of field {name!r} are {field!r}: give one plane of whole numbers, 0 for background.{remedy}"
        raise ValueError(msg)
