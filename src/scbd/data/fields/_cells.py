"""Which cell lies where in which field."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._messages import head, missing_key
from scbd.data.fields._labels import measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data.fields._opening import Fields

LABEL = "label"


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells and their places.

    Attributes
    ----------
    obs
        What is known of each.
    field
        Name of its field, ``(N,)``.
    yx
        Position in pixels of the field, the middle of the first one being 0, ``(N, 2)``.
    label
        Its number in the field's label mask, ``(N,)``; `None` where there is none.
    """

    obs: pd.DataFrame
    field: np.ndarray
    yx: np.ndarray
    label: np.ndarray | None = None

    def __getitem__(self, keep: np.ndarray) -> Cells:
        """Some of them, by a mask or in an order."""
        label = None if self.label is None else self.label[keep]
        return Cells(self.obs.iloc[np.arange(len(self.obs))[keep]], self.field[keep], self.yx[keep], label)

    def without(self, bad: np.ndarray, what: str, invalid: str) -> Cells:
        """All but those that cannot be cropped.

        Raises
        ------
        ValueError
            Unless they are to be left out.

        Warns
        -----
        UserWarning
            If they are.
        """
        if not bad.any():
            return self
        first = int(np.argmax(bad))
        place = "at y={:g}, x={:g} pixels".format(*self.yx[first])
        if self.label is not None and np.isnan(self.yx[first]).any():
            place = f"label {self.label[first]}"
        fact = (
            f"{bad.sum():,} of {len(bad):,} cells {what}; the first is {self.obs.index[first]!r} in field "
            f"{self.field[first]!r}, {place}"
        )
        if invalid == "raise":
            msg = f"{fact}. Correct them, or leave them out with invalid='drop'."
            raise ValueError(msg)
        if bad.all():
            msg = f"{fact}: none is left."
            raise ValueError(msg)
        warnings.warn(f"{fact}: they are left out.", UserWarning, stacklevel=4)
        return self[~bad]


def table_with_fields(cells: pd.DataFrame, field_key: str, names: Sequence[str]) -> pd.DataFrame:
    """The table with the name of each cell's field, as text.

    Raises
    ------
    KeyError, ValueError
        If there are several fields and no column names them, or it names others.
    """
    if field_key not in cells:
        if len(names) > 1:
            said = missing_key("The table of cells", field_key, cells.columns, "field_key")
            msg = f"{said} There are {len(names)} fields: {head(names)}."
            raise KeyError(msg)
        return cells.assign(**{field_key: names[0]})
    found = cells[field_key].astype(str)
    unknown = (~found.isin(names)).to_numpy()
    if unknown.any():
        which = head(dict.fromkeys(found[unknown]))
        msg = (
            f"{unknown.sum():,} of {len(found):,} cells lie in fields that are not given: {which}. Fields are: "
            f"{head(names)}."
        )
        raise ValueError(msg)
    return cells.assign(**{field_key: found})


def cells_of_table(
    table: pd.DataFrame, field_key: str, yx_keys: tuple[str, str], units: pd.DataFrame, *, labelled: bool
) -> Cells:
    """Cells at the positions of their table, and how many of its units high and wide a pixel of each field is.

    Raises
    ------
    KeyError, TypeError
        If positions, or labels where they are needed, are not there or not numbers.
    """
    _check_numbers(table, *yx_keys, *[LABEL] * labelled)
    field = table[field_key].to_numpy()
    yx = table[list(yx_keys)].to_numpy(np.float64, na_value=np.nan) / units.loc[field].to_numpy()
    return Cells(table, field, yx, table[LABEL].to_numpy() if labelled else None)


def cells_of_labels(
    cells: pd.DataFrame | None, labels: Fields, names: Sequence[str], field_key: str, invalid: str
) -> Cells:
    """Cells at the centroids of their labels: those of a table, or all.

    Raises
    ------
    KeyError, ValueError
        If a table does not say which label, or one without pixels.
    """
    found = measured(labels.opened, names)
    if cells is None:
        if not len(found):
            msg = "No field has a label: all their pixels are 0."
            raise ValueError(msg)
        index = found["field"] + "_" + found[LABEL].astype(str)
        obs = found.rename(columns={"field": field_key}).set_axis(index)
    else:
        _check_numbers(cells, LABEL)
        keys = pd.DataFrame({"field": cells[field_key].to_numpy(), LABEL: cells[LABEL].to_numpy()})
        yx = keys.merge(found, how="left", on=["field", LABEL])[["y", "x"]].to_numpy()
        obs = cells.assign(y=yx[:, 0], x=yx[:, 1])
    result = Cells(obs, obs[field_key].to_numpy(), obs[["y", "x"]].to_numpy(np.float64), obs[LABEL].to_numpy())
    return result.without(np.isnan(result.yx).any(axis=1), "have a label without pixels", invalid)


def _check_numbers(table: pd.DataFrame, *keys: str) -> None:
    for key in keys:
        if key not in table:
            argument = None if key == LABEL else "yx_keys"
            raise KeyError(missing_key("The table of cells", key, table.columns, argument))
        if not pd.api.types.is_numeric_dtype(table[key]):
            msg = f"{key!r} of the table of cells holds {table[key].dtype}: positions and labels are numbers."
            raise TypeError(msg)
