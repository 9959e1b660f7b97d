"""A report made shorter: over seeds, as a table, as ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd._measure_names import measure_name
from scbd.metrics._measures import measure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# of many, one a question
_HEADLINE = (
    "relationship_average_precision",
    "replicate_floor_corrected",
    "replicate_map",
    "y_probe_f1",
    "e_probe_f1",
    "e_probe_quadratic_f1",
    "ilisi",
    "effective_rank",
)
# of biology in a rank, as in Luecken et al. (2022)
_BIOLOGY = 0.6
_SIDES = {"biology": "biology", "batch": "batch", "shape": "other"}
_ARROWS = {"higher": "↑", "lower": "↓", "nearer to chance": "→", "": ""}
_ARROW_WORDS = {"↑": "higher is better", "↓": "lower is better", "→": "nearer to chance is better"}
_CHANCE = "chance"
_MOST_DIGITS = 6
# wide tables scroll on their own, and not the page; names of scores break where they must
_TABLE_STYLES = [
    {"selector": "", "props": "display: block; width: fit-content; max-width: 100%; overflow-x: auto"},
    {"selector": "caption", "props": "caption-side: bottom; text-align: left"},
    {"selector": "td, th", "props": "padding: 0.2em 0.35em"},
    {"selector": "td", "props": "text-align: right; white-space: nowrap"},
    {"selector": "th.row_heading", "props": "text-align: left; vertical-align: top; font-weight: normal"},
    {"selector": "th.row_heading.level1", "props": "min-width: 6.5em; white-space: normal"},
]


def summarise(frame: pd.DataFrame, *, reference: str | None = None) -> pd.DataFrame:
    """Mean and standard deviation over the keys of each representation (training seeds).

    Parameters
    ----------
    frame
        From :func:`benchmark` or :func:`generalization`; several such frames may be concatenated. Folds of a key are
        averaged first: they share most of what was learned from, and are no seeds.
    reference
        A representation that the others are compared with, key by key: those of as many seeds as it, in their order, or
        all with its one. The differences are then tested by a paired t test over seeds. A reference with one key counts
        as known exactly, and has to be without seeds, as components of pixels are: of one that is trained, its one run
        may be lucky, and p values are too small. Give it as many seeds.

    Returns
    -------
    Frame ``metric, representation, mean, sd, n, chance``; ``n`` is the number of keys, and ``sd`` is NaN for a single
    one. Where the score of a key, or of one of its folds, is NaN, so is the mean: the runs of which there is a score
    are the lucky ones. With ``reference`` also ``difference``, ``difference_sd`` and ``p_value``, the last two NaN for
    a single key.

    Raises
    ------
    ValueError
        If the reference is not there, or has another number of keys than a representation that is compared with it.

    Examples
    --------
    >>> frame = scbd.metrics.benchmark(adata, {"SCBD": "X_scbd_c"}, y_key="gene", e_key="well", n_neighbors=30)
    >>> scbd.metrics.summarise(frame).columns.to_list()
    ['metric', 'representation', 'mean', 'sd', 'n', 'chance']
    """
    if "chance" not in frame:
        frame = frame.assign(chance=np.nan)
    frame = _a_row_a_key(frame)
    grouped = frame.groupby(["metric", "representation"], sort=False)
    found = grouped["value"].agg(mean=_mean_of_all, sd="std", n="size").assign(chance=grouped["chance"].mean())
    found["sd"] = found["sd"].mask(found["mean"].isna())
    if reference is not None:
        names = ["difference", "difference_sd", "p_value"]
        found[names] = [_against(frame, metric, name, reference) for metric, name in found.index]
    return found.reset_index()


def _a_row_a_key(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame itself, or where it has folds, their means."""
    if "fold" not in frame:
        return frame
    key = ["metric", "representation", "key"]
    # frames of several seeds may have one key: a fold that comes again is of another run
    run = frame.groupby([*key, "fold"], dropna=False).cumcount().to_numpy()
    of_run = frame.assign(run=run).groupby([*key, "run"], sort=False, dropna=False)
    return of_run.agg({"value": _mean_of_all, "chance": "mean"}).reset_index()


def _mean_of_all(values: pd.Series) -> float:
    """NaN where one of them is: pandas would leave it out."""
    return float(values.mean(skipna=False))


def _against(frame: pd.DataFrame, metric: str, representation: str, reference: str) -> tuple[float, float, float]:
    """Mean and deviation over seeds of the difference from a reference, and the p value of a paired t test."""
    of_metric = frame[frame["metric"] == metric].groupby("representation", sort=False)["value"]
    values = {name: value.to_numpy(dtype=float) for name, value in of_metric}
    check_reference(reference, values)
    one, other = values[representation], values[reference]
    if len(other) not in (1, len(one)):
        msg = (
            f"{representation!r} has {len(one)} keys and the reference {reference!r} has {len(other)}: seeds are "
            "compared in pairs, so give as many of both, or one of the reference."
        )
        raise ValueError(msg)
    difference = one - other
    if len(difference) < 2:
        return float(difference.mean()), np.nan, np.nan
    mean, sd = float(difference.mean()), float(difference.std(ddof=1))
    return mean, sd, paired_p_value(mean, sd, len(difference))


def paired_p_value(mean: float, sd: float, n: int) -> float:
    """Of a two-sided t test; 1 where all differences are zero."""
    from scipy import stats

    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / (sd / np.sqrt(n)), n - 1))


def check_reference(reference: str, names: Any) -> None:
    """Raise a ValueError that names the representations there are, if this is none of them."""
    if reference not in names:
        msg = f"reference={reference!r} is no representation here; there are: {', '.join(names)}."
        raise ValueError(msg)


def styled(frame: pd.DataFrame, metrics: Sequence[str] | None = None, *, digits: int = 2) -> Any:
    """Show a report as a table that fits a page: metrics as rows, embeddings as columns, the best in bold.

    Rows are grouped into biology (should be high), batch (should be near chance) and others. An arrow behind each name
    says which way is better; the last column is what an embedding without information gets. Several keys of a
    representation (training seeds) are shown as ``mean ± sd``. Where the page is narrow, the table scrolls by itself.

    Parameters
    ----------
    frame
        From :func:`benchmark`.
    metrics
        Rows, as they are called in ``frame["metric"]``. By default one a question, so that the table stays short;
        ``frame["metric"].unique()`` are all. Within a group they stay in this order.
    digits
        Decimal places, from 0 to 6; of scores of ten and more one less, such as for ``effective_rank``.

    Returns
    -------
    :class:`pandas.io.formats.style.Styler`, whose ``data`` is the frame of texts: index ``(group, metric)``, a column a
    representation, and ``chance``.

    Raises
    ------
    ValueError
        If the frame lacks a metric, ``digits`` is no number from 0 to 6, or a representation is called ``"chance"``.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> table = scbd.metrics.styled(frame)  # as the last line of a notebook's cell, this shows the table
    >>> table.data.columns.to_list()
    ['z_c', 'z_s', 'chance']
    >>> [f"{group}: {name}" for group, name in table.data.index][:2]
    ['biology: F1 of the perturbation ↑', 'batch: F1 of the environment ↓']
    """
    check_count("digits", digits, 0)
    if digits > _MOST_DIGITS:
        msg = f"digits={digits}: give a number of decimal places from 0 to {_MOST_DIGITS}."
        raise ValueError(msg)
    mean, sd, chance = _tables(frame, metrics)
    if _CHANCE in mean.index:
        msg = "A representation is called 'chance', as is the last column of the table: give it another name."
        raise ValueError(msg)
    sides = {metric: list(_SIDES).index(measure_of(metric).side) for metric in mean}
    order = sorted(mean, key=sides.__getitem__)  # stable: within a group as they were
    badness = pd.DataFrame({metric: _badness(mean, chance, metric) for metric in order}, index=mean.index).T
    best = badness.eq(badness.min(axis=1), axis=0)
    text = pd.DataFrame(
        {name: [_score_text(mean.loc[name, m], sd.loc[name, m], digits) for m in order] for name in mean.index}
    )
    text[_CHANCE] = [_score_text(chance[metric], np.nan, digits) for metric in order]
    best[_CHANCE] = False
    arrows = [_ARROWS[measure_of(metric).better] for metric in order]
    text.index = pd.MultiIndex.from_tuples(
        [
            (_SIDES[measure_of(metric).side], f"{measure_name(metric)} {arrow}".strip())
            for metric, arrow in zip(order, arrows, strict=True)
        ]
    )
    bold = np.where(best.to_numpy(), "font-weight: bold", "")
    key = [f"{arrow} {words}" for arrow, words in _ARROW_WORDS.items() if arrow in arrows]
    styler = text.style.apply(lambda _: bold, axis=None).set_table_attributes('class="dataframe"')
    styler = styler.set_table_styles(_TABLE_STYLES)
    return styler.set_caption(f"{'; '.join(key)}. The best is bold.") if key else styler


def _score_text(value: float, sd: float, digits: int) -> str:
    """Such as 0.93 or 0.93 ± 0.02; nothing of NaN."""
    if np.isnan(value):
        return ""
    places = max(digits - 1, 0) if abs(value) >= 10 else digits
    return f"{value:.{places}f}" + ("" if np.isnan(sd) else f" ± {sd:.{places}f}")


def rank(frame: pd.DataFrame, metrics: Sequence[str] | None = None) -> pd.DataFrame:
    """Representations in order, each score on a scale from 0 to 1.

    Of biology, 0 is what chance gives and 1 the best there is here; of batch, 0 is the worst there is here and 1 what
    chance gives: an embedding that knows nothing of environments. Biology counts 0.6 and batch 0.4, as in published
    benchmarks of integration (Luecken et al., 2022). A rank hides what it is made of, and moves with what else is
    compared: read the scores first. A score without a chance is not ranked by. A score that an embedding lacks, or that
    is NaN of any key, counts as the worst there is of it here. What has collapsed to a point comes last, where the
    frame has ``effective_rank``, be it ranked by or not.

    Parameters
    ----------
    frame
        From :func:`benchmark`.
    metrics
        What to rank by; one a question by default.

    Returns
    -------
    Frame with a row a representation, the best first: ``overall``, ``biology``, ``batch``, and each score on its scale,
    below 0 where it is worse than chance.

    Raises
    ------
    ValueError
        If the frame lacks a metric, or none can be ranked by.

    References
    ----------
    Luecken et al. (2022), Benchmarking atlas-level data integration in single-cell genomics.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> scbd.metrics.rank(frame).columns[:3].to_list()
    ['overall', 'biology', 'batch']
    """
    mean, _, chance = _tables(frame, metrics)
    scaled = pd.DataFrame({m: _scaled(mean[m], float(chance[m]), m) for m in mean if np.isfinite(chance[m])})
    scaled = scaled.dropna(axis=1, how="all")
    scaled = scaled.fillna(scaled.min())  # else what could not be measured would be left out, to the good
    sides: dict[str, pd.Series] = {}
    for side in ("biology", "batch"):
        if own := [m for m in scaled if measure_of(m).side == side]:
            sides[side] = scaled[own].mean(axis=1)
    if not sides:
        msg = f"None of {', '.join(mean)} has a chance to rank by: give frames of scbd.metrics.benchmark."
        raise ValueError(msg)
    weights = {"biology": _BIOLOGY, "batch": 1 - _BIOLOGY}
    total = sum(weights[side] for side in sides)
    overall = sum((weights[side] / total * value for side, value in sides.items()), start=pd.Series(0.0, scaled.index))
    ranked = pd.DataFrame({"overall": overall, **sides, **scaled})
    n_directions = frame[frame["metric"] == "effective_rank"].groupby("representation")["value"].mean()
    ranked["point"] = n_directions.reindex(ranked.index) < 1
    ranked = ranked.sort_values(["point", "overall"], ascending=[True, False], kind="stable")
    return ranked.drop(columns="point").rename_axis("representation")


def _tables(frame: pd.DataFrame, metrics: Sequence[str] | None) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Mean and deviation, a row a representation and a column a metric; and what chance gives of each."""
    there = list(dict.fromkeys(frame["metric"]))
    if metrics is None:
        metrics = [m for m in there if m.split(" (")[0] in _HEADLINE] or there
    if absent := [m for m in metrics if m not in there]:
        msg = f"The frame has no metric {absent[0]!r}; there are: {', '.join(there)}."
        raise ValueError(msg)
    summary = summarise(frame)
    order = list(dict.fromkeys(summary["representation"]))
    mean, sd = (
        summary.pivot(index="representation", columns="metric", values=what).loc[order, list(metrics)]
        for what in ("mean", "sd")
    )
    return mean, sd, summary.groupby("metric")["chance"].mean().reindex(metrics)


def _badness(mean: pd.DataFrame, chance: pd.Series, metric: str) -> pd.Series:
    """Lowest for the representation that is best by a metric; NaN where no value is better than another."""
    better = measure_of(metric).better
    if better == "nearer to chance":
        by_chance = float(chance[metric])
        return (mean[metric] - (0.0 if np.isnan(by_chance) else by_chance)).abs()
    return mean[metric] * {"higher": -1, "lower": 1, "": np.nan}[better]


def _scaled(values: pd.Series, chance: float, metric: str) -> pd.Series:
    """From 0 to 1. Of biology, chance is 0 and the best 1; of batch, the worst is 0 and chance is 1."""
    if measure_of(metric).side == "biology":
        best = float(values.max())
        return (values - chance) / (best - chance) if best > chance else values * 0.0
    further = values - chance
    better = measure_of(metric).better
    away = further.abs() if better == "nearer to chance" else (further if better == "lower" else -further).clip(lower=0)
    return 1 - away / float(away.max()) if away.max() > 0 else away + 1.0
