"""Rows that hold several scores of one run, as a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from scbd.workflows import CHANCE, SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterable


def by_variant(frame: pd.DataFrame, scores: Iterable[str]) -> pd.DataFrame:
    """A line for each block and correction that a row has scores of, in the order of the rows.

    Parameters
    ----------
    frame
        Rows with a column ``name``, to which the variant is added; what chance gives has that for its name.
    scores
        Columns of what is scored as it is; other variants have those of their own alone.

    Returns
    -------
    The lines, with the column ``variant``; chance comes last.
    """
    frame = frame.reset_index(drop=True)
    columns = {c: c.split(SEPARATOR, 1) for c in frame.columns if SEPARATOR in c}
    variants = list(dict.fromkeys(variant for variant, _ in columns.values()))
    shared = frame.drop(columns=list(columns))
    plain = [c for c in dict.fromkeys([*scores, *(name for _, name in columns.values())]) if c in shared]
    lines = [shared.assign(variant="")[shared[plain].notna().any(axis=1)]] if plain else []
    for variant in variants:
        own = {c: name for c, (of, name) in columns.items() if of == variant}
        rows = frame[frame[list(own)].notna().any(axis=1)]
        line = rows[[c for c in shared if c not in plain]].join(rows[list(own)].rename(columns=own))
        name = CHANCE if variant == CHANCE else line["name"] + ", " + variant
        lines.append(line.assign(variant=variant, name=name))
    both = pd.concat(lines).sort_index(kind="stable")
    return both.sort_values("variant", key=lambda variant: variant == CHANCE, kind="stable", ignore_index=True)
