"""Rows as Markdown tables: which scores are shown, mean and standard deviation over runs, what rows are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd


class Column(NamedTuple):
    """How a score is shown."""

    name: str
    factor: float = 1.0
    digits: int = 2


def percent(name: str) -> Column:
    return Column(f"{name}, %", 100.0, 1)


ACCURACIES = {
    "r_c in": percent("in distribution"),
    "r_c out": percent("out of distribution"),
    # of the head that learned with the encoder
    "own in": percent("in, online head"),
    "own out": percent("out, online head"),
    "z_c in": percent("z_c in"),
    "z_c out": percent("z_c out"),
    "e from r_c": percent("e from r_c"),
    "e from z_c": percent("e from z_c"),
    # of cells that were not learned from
    "e from r_c, new": percent("e from r_c, new cells"),
    "e from z_c, new": percent("e from z_c, new cells"),
}
# what is shown of a model's health
HEALTH = {
    "supervised_c": Column("L_c"),
    "ceiling": Column("of a point"),
    "learned_c": Column("learned"),
    "spread": Column("spread"),
    "effective_rank": Column("rank", digits=1),
    "final_alpha": Column("alpha at the end", digits=3),
}
CORRECTION = {
    "relationship_area": Column("area, complexes", digits=3),
    "relationship_average_precision": Column("average precision", digits=3),
    "relationship_recall": Column("recall", digits=3),
    "y_probe_f1": Column("gene F1", digits=3),
    "e_probe_f1": Column("well F1", digits=3),
    "e_probe_chance_f1": Column("chance", digits=3),
    # as the authors measure it, which depends on the scale of an embedding
    "e_probe_f1_unstandardised": Column("well F1, unstandardised", digits=3),
    "ilisi": Column("iLISI", digits=3),
}


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


def by_environment(frame: pd.DataFrame, out: Path, report: Callable[[pd.DataFrame, Path, str], str]) -> str:
    """A report of all rows, or one of each environment that was held out, under its name."""
    if "test_environment" not in frame:
        return report(frame, out, "")
    parts = [(str(name), part) for name, part in frame.groupby("test_environment")]
    return "\n\n".join(f"### {name} held out\n\n{report(part, out, name)}" for name, part in parts)


def settings_table(frame: pd.DataFrame) -> str:
    """What was run, how long, and on what, one line a system, as Markdown."""
    columns = ["encoder", "steps", "batch_size", "lr", "precision", "device"]
    lines = [["system", *(column.replace("_", " ") for column in columns), "runs", "minutes a run"]]
    lines.append(["---"] * len(lines[0]))
    for system, part in frame.groupby("system", sort=False):
        cells = [values_of(part[column]) if column in part else "–" for column in columns]
        lines.append([str(system), *cells, str(len(part)), mean_sd(part["seconds"], Column("", 1 / 60, 1))])
    return markdown(lines)


def names_of(frame: pd.DataFrame) -> pd.Series:
    """What each row is called in a table: the system, and what was varied of it."""
    if "style_posterior" in frame:
        only = frame["style_posterior"].eq("x").map({True: ", x only", False: ""})
        frame = frame.assign(system=frame["system"] + only)
    scbd = frame["system"] == "SCBD"
    norm = frame["norm"].map(_norm) if "norm" in frame else ""
    if "alpha" not in frame:
        return frame["system"] + norm
    several = "invariance" in frame and frame.loc[scbd, "invariance"].nunique() > 1
    what = frame["invariance"] if several else frame["system"]
    alpha = frame["alpha"].astype(object).where(frame["alpha"].notna(), "auto")  # the default
    return frame["system"].where(~scbd, what + ", alpha " + alpha.map(value_of)) + norm


def _norm(norm: object) -> str:
    """Of networks whose norm was asked for."""
    return f", norm {norm}" if isinstance(norm, str) else ""


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
