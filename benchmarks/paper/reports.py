"""Rows as Markdown tables: which scores are shown, mean and sd over runs, what rows are called, the paper's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from paper.scores import CHANCE, SEPARATOR
from paper.systems import best_setting
from scbd._workflows.select_alpha import choose_alpha

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path


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
    """What was run, on what inputs, how long, and where, one line a system, as Markdown."""
    trained = frame["steps"].notna() if "steps" in frame else pd.Series(data=False, index=frame.index)
    asked = frame["standardize_by"] if "standardize_by" in frame else pd.Series(index=frame.index, dtype=object)
    inputs = asked.notna().map({True: "within environments", False: "over all cells"}).where(trained)
    if "preset" in frame:
        inputs = inputs.mask(frame["preset"].notna(), "by the preset")
    frame = frame.assign(inputs_standardised=inputs)
    columns = ["inputs_standardised", "encoder", "steps", "batch_size", "lr", "precision", "device"]
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
    # of networks whose norm was asked for
    norm = frame["norm"].map(lambda norm: f", norm {norm}" if isinstance(norm, str) else "") if "norm" in frame else ""
    if "alpha" not in frame:
        return frame["system"] + norm
    several = "invariance" in frame and frame.loc[scbd, "invariance"].nunique() > 1
    what = frame["invariance"] if several else frame["system"]
    alpha = frame["alpha"].astype(object).where(frame["alpha"].notna(), "auto")  # the default
    return frame["system"].where(~scbd, what + ", alpha " + alpha.map(value_of)) + norm


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


# of what is searched over, what tells the settings of a system apart
_SETTINGS = ("lr", "weight_decay", "max_steps", "penalty", "step_size", "meta_lr", "pretrain_steps", "alpha")


def chosen(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Rows of the setting that a search chooses, of each group of rows.

    Its accuracy is that of the head that learned with the encoder, where all rows of a group have one, and of the
    fitted head otherwise.
    """
    parts = [part[setting_of(part) == _best(part)] for _, part in frame.groupby(list(by), sort=False)]
    return pd.concat(parts) if parts else frame


def setting_of(frame: pd.DataFrame) -> pd.Series:
    """What tells the settings of one system apart, as words."""
    columns = [column for column in _SETTINGS if column in frame]
    return frame[columns].map(value_of).agg(" ".join, axis=1)


def _best(part: pd.DataFrame) -> str:
    own = "own in" in part and part["own in"].notna().all()
    return str(best_setting(part["own in" if own else "r_c in"], setting_of(part)))


def by_alpha(frame: pd.DataFrame) -> pd.DataFrame:
    """Sorted by alpha, what finds it itself last."""
    return frame.sort_values("alpha", kind="stable", key=lambda alphas: pd.to_numeric(alphas, errors="coerce"))


def cost_of_choosing(scbd: pd.DataFrame, ins: str, outs: str, what: str) -> str:
    """What choosing alpha without the test environment would have cost, as a paragraph; nothing where nothing varies.

    Parameters
    ----------
    scbd
        Rows of SCBD.
    ins, outs
        Columns of the accuracy to choose by, and of the score that is wanted.
    what
        Name of that score.
    """
    if not {ins, outs, "alpha"} <= set(scbd):
        return ""
    # a seed that is not finished may have one alpha, or none but "auto"
    numbers = pd.to_numeric(scbd["alpha"], errors="coerce")
    scbd = scbd[numbers.groupby(scbd["seed"]).transform("nunique") > 1]
    if scbd.empty:
        return ""
    found = selection_regret(scbd, ins=ins, outs=outs)
    alphas = ", ".join(f"{alpha:g} ({n})" for alpha, n in found["alpha"].value_counts().sort_index().items())
    points = Column("", 100.0, 1)
    text = (
        f"\n\nAlpha as `choose_alpha` takes it from what is seen in distribution, seed by seed: {alphas}. Its {what} "
        f"is {mean_sd(found['regret'], points)} percentage points below that of the best alpha"
    )
    auto = f', that of `alpha="auto"` {mean_sd(found["auto, regret"], points)}' if "auto, regret" in found else ""
    return f"{text}{auto}."


def selection_regret(frame: pd.DataFrame, *, ins: str = "z_c in", outs: str = "z_c out") -> pd.DataFrame:
    """What choosing alpha in distribution costs, seed by seed.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run, with ``alpha`` and ``seed``.
    ins, outs
        Columns of the accuracy to choose by, and of the score that is wanted, the higher the better.

    Returns
    -------
    One row a seed: the ``alpha`` that :func:`choose_alpha` takes from that seed's runs alone; the ``best`` one, known
    afterwards; the ``regret``, by how much the score of the best is higher; and that of ``alpha="auto"``, where there
    is such a run: ``"auto, regret"``, below zero where it does better than the best number.
    """
    rows = []
    for seed, part in frame.groupby("seed"):
        numbers = part[part["alpha"] != "auto"]
        numbers = numbers.assign(alpha=numbers["alpha"].astype(float), accuracy=numbers[ins], chance=0.0, cells=np.inf)
        score = numbers.set_index("alpha")[outs]
        alpha = choose_alpha(numbers).alpha
        row = {"seed": seed, "alpha": alpha, "best": score.idxmax(), "regret": score.max() - score[alpha]}
        auto = part.loc[part["alpha"] == "auto", outs]
        rows.append(row | ({"auto, regret": score.max() - auto.iloc[0]} if len(auto) else {}))
    return pd.DataFrame(rows)


def in_out_correlation(frame: pd.DataFrame, *, ins: str = "own in", outs: str = "own out") -> dict[str, float]:
    """Correlation over runs of accuracy in distribution with accuracy out of it.

    Parameters
    ----------
    frame
        From :func:`check_assumption`, or rows of an experiment.
    ins, outs
        Columns.

    Returns
    -------
    ``pearson`` and ``spearman`` over all runs; ``strong``, Pearson's over the better half in distribution, since what
    bad runs do says nothing about spurious features; and ``n``. NaN where there is no variation.

    """
    if len(frame) < 3:
        msg = f"A correlation needs at least three runs, there are {len(frame)}."
        raise ValueError(msg)
    strong = frame[frame[ins] >= frame[ins].median()]
    return {
        "pearson": _correlation(frame[ins], frame[outs]),
        "spearman": _correlation(frame[ins].rank(), frame[outs].rank()),
        "strong": _correlation(strong[ins], strong[outs]),
        "n": float(len(frame)),
    }


def _correlation(x: pd.Series, y: pd.Series) -> float:
    if x.nunique() < 2 or y.nunique() < 2:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


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


# The paper's numbers, to stand beside ours: test accuracy in %, mean ± sd (Makino et al., 2025).
# table 1, ten seeds; by data set, then system
TABLE_1 = {
    "colored_mnist": {
        "SCBD, alpha 0": "25.5 ± 3.0",
        "SCBD, alpha 192": "82.9 ± 12.1",
        "ERM": "37.8 ± 2.6",
        "CORAL": "37.6 ± 3.6",
        "DANN": "39.0 ± 4.5",
        "IRM": "37.0 ± 4.2",
        "Fish": "48.2 ± 3.5",
        "Group DRO": "35.0 ± 2.9",
        "iVAE": "52.1 ± 37.6",
    },
    "camelyon17": {
        "SCBD, alpha 0": "61.9 ± 3.8",
        "SCBD, alpha 192": "72.7 ± 3.0",
        "ERM": "65.8 ± 4.9",
        "CORAL": "59.5 ± 7.7",
        "DANN": "55.2 ± 6.7",
        "IRM": "66.3 ± 2.1",
        "Fish": "49.1 ± 0.9",
        "Group DRO": "68.4 ± 7.3",
        "iVAE": "52.0 ± 2.0",
    },
}

# appendix, three seeds; by test environment
_APPENDIX = ("SCBD, alpha 0", "ERM", "CORAL", "DANN", "IRM", "Group DRO")
_BY_ENVIRONMENT = {
    "art_painting": ("86.6 ± 2.1", "88.1 ± 0.1", "87.7 ± 0.6", "85.9 ± 0.5", "85.0 ± 1.6", "86.4 ± 0.3"),
    "cartoon": ("81.3 ± 1.9", "77.9 ± 1.3", "79.2 ± 1.1", "79.9 ± 1.4", "77.6 ± 0.9", "79.9 ± 0.8"),
    "photo": ("97.0 ± 0.8", "97.8 ± 0.0", "97.6 ± 0.0", "97.6 ± 0.2", "96.7 ± 0.3", "98.0 ± 0.3"),
    "sketch": ("70.6 ± 4.9", "79.1 ± 0.9", "79.4 ± 0.7", "75.2 ± 2.8", "78.5 ± 2.6", "72.1 ± 0.7"),
    "Caltech101": ("94.7 ± 1.8", "97.6 ± 1.0", "98.8 ± 0.1", "98.5 ± 0.2", "97.6 ± 0.3", "97.7 ± 0.4"),
    "LabelMe": ("67.1 ± 1.3", "63.3 ± 0.9", "64.6 ± 0.8", "64.9 ± 1.1", "65.0 ± 0.9", "62.5 ± 1.1"),
    "SUN09": ("74.7 ± 3.0", "72.2 ± 0.5", "71.7 ± 1.4", "73.1 ± 0.7", "72.2 ± 0.5", "70.1 ± 0.7"),
    "VOC2007": ("71.4 ± 1.3", "76.4 ± 1.5", "75.8 ± 0.4", "78.3 ± 0.3", "76.4 ± 1.5", "78.4 ± 0.9"),
}
# as the paper says it: of IRM on VLCS its domains have 77.8
_AVERAGE = {
    "pacs": ("83.9", "85.7", "86.0", "84.6", "84.4", "84.1"),
    "vlcs": ("77.0", "77.4", "77.7", "78.7", "78.1", "77.2"),
}


def published_of(dataset: str, environment: str = "") -> dict[str, str]:
    """By the names of rows; where forms of SCBD are told apart, the paper's is the listing."""
    numbers = _BY_ENVIRONMENT.get(environment)
    found = TABLE_1.get(dataset, {}) if numbers is None else dict(zip(_APPENDIX, numbers, strict=True))
    return found | {name.replace("SCBD", "listing"): number for name, number in found.items()}


def published_average(dataset: str) -> dict[str, str]:
    """The same, averaged over the domains of a data set."""
    found = dict(zip(_APPENDIX, _AVERAGE.get(dataset, ()), strict=False))
    return found | {name.replace("SCBD", "listing"): number for name, number in found.items()}
