"""Scores as Markdown tables: mean and standard deviation over runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd


class Column(NamedTuple):
    """How a score is shown."""

    name: str
    factor: float = 1.0
    digits: int = 2


def percent(name: str) -> Column:
    return Column(f"{name}, %", 100.0, 1)


def table(
    frame: pd.DataFrame,
    by: Sequence[str],
    scores: Mapping[str, Column],
    *,
    published: Mapping[str, str] | None = None,
) -> str:
    """Mean ± sd of each score over the rows of each group, in the order of the frame, as Markdown."""
    scores = {key: column for key, column in scores.items() if key in frame and frame[key].notna().any()}
    head = [*by, *(column.name for column in scores.values()), "runs", *(["paper: out, %"] if published else [])]
    lines = [head, ["---"] * len(head)]
    for group, part in frame.groupby(list(by), sort=False):
        cells = (
            [value_of(v) for v in group]
            + [mean_sd(part[key], column) for key, column in scores.items()]
            + [str(len(part))]
        )
        lines.append([*cells, published.get(str(group[0]), "")] if published else cells)
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def values_of(values: pd.Series) -> str:
    """The different values of a setting."""
    return ", ".join(map(value_of, sorted(values.dropna().unique()))) or "–"


def value_of(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def mean_sd(values: pd.Series, column: Column) -> str:
    values = values.dropna() * column.factor
    if values.empty:
        return "–"
    text = f"{values.mean():.{column.digits}f}"
    return text if len(values) < 2 else f"{text} ± {values.std():.{column.digits}f}"


def only(frame: pd.DataFrame, values: Mapping[str, object]) -> pd.DataFrame:
    for column, value in values.items():
        frame = frame[frame[column] == value]
    return frame
