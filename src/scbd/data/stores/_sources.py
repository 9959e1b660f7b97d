"""Which of several files each cell is from, and what these files call alike."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from scbd._labels import as_columns
from scbd._progress import say

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from scbd.data.stores._crops import Crops

SOURCE = "source"


def with_source(obs: pd.DataFrame, plates: Sequence[Crops]) -> pd.DataFrame:
    """The table of all plates, with a column of the file each row is from; one that a plate has itself stays.

    Parameters
    ----------
    obs
        Rows of the plates, one plate after the other.
    plates
        Where they come from.
    """
    if len(plates) == 1:
        return obs
    new = [number for number, plate in enumerate(plates) if SOURCE not in plate.obs]
    if not new:
        return obs
    old = {str(name) for plate in plates if SOURCE in plate.obs for name in plate.obs[SOURCE].dropna().unique()}
    names = dict(zip(new, source_names([plates[number] for number in new], old), strict=True))
    plate_of = np.repeat(np.arange(len(plates), dtype=np.int32), [len(plate.obs) for plate in plates])
    if not old:
        return obs.assign(**{SOURCE: pd.Categorical.from_codes(plate_of, list(names.values()))})
    column = obs[SOURCE].to_numpy(object, copy=True)
    for number, name in names.items():
        column[plate_of == number] = name
    return obs.assign(**{SOURCE: column})


def source_names(plates: Sequence[Crops], taken: Collection[str] = ()) -> list[str]:
    """Of each plate the name of its file, with as many folders as tell them apart; or with a number.

    Parameters
    ----------
    plates
        Where cells come from.
    taken
        Names of others.
    """
    paths = [Path(plate.name) for plate in plates]
    stems = [path.stem for path in paths]
    depth = max(len(path.parts) for path in paths)
    for names in [stems, *(["/".join(path.parts[-n:]) for path in paths] for n in range(1, depth + 1))]:
        if len({*names, *taken}) == len(names) + len(taken):
            return names
    numbers = count(len(taken))
    return [next(name for n in numbers if (name := f"{stem} {n}") not in taken) for stem in stems]


def say_what_recurs(plates: Sequence[Crops], y_key: str | Sequence[str]) -> None:
    """Say which labels, beside the perturbation and what goes with it, have values in several plates."""
    y_columns = list(as_columns(y_key))
    for column in dict.fromkeys(column for plate in plates for column in plate.obs):
        tables = [plate.obs for plate in plates if column in plate.obs and not is_numeric_dtype(plate.obs[column])]
        if column in (*y_columns, SOURCE) or len(tables) < 2:
            continue
        found = [table[[column, *y_columns]].dropna().drop_duplicates().astype(str) for table in tables]
        pairs = pd.concat(found).drop_duplicates()
        # a guide is of one perturbation, and a perturbation of one complex; one value for all says neither
        goes_with_y = pairs[column].nunique() > 1 and any(
            not pairs.duplicated(one).any() for one in (column, y_columns)
        )
        n = (pd.concat([table[column].drop_duplicates() for table in found]).value_counts() > 1).sum()
        if n and not goes_with_y:
            say(
                f"{column}: {n} values occur in several files; where these stand for different ones, tell them apart "
                f"by the file, e_key={[SOURCE, str(column)]}."
            )
