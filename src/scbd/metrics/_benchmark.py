"""All scores of several embeddings in one tidy frame; and that frame made shorter: over seeds, as ranks, as a table.

``METRICS`` is the only place to touch for a new score: what computes it, how it is read, what it needs, and its words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scipy import stats

from scbd._anndata import as_columns
from scbd._checks import check_choice, check_count
from scbd._linear_maps import effective_rank
from scbd.metrics._mixing import batch_mixing
from scbd.metrics._probes import Kind, probe_groups, probed
from scbd.metrics._relationships import (
    Relations,
    aggregate,
    relationship_area,
    relationship_average_precision,
    relationship_chance,
    relationship_curve,
    relationship_recall,
    resampled_scores,
)
from scbd.metrics._resampling import Score, interval, p_value
from scbd.metrics._retrieval import Retrieval, replicate_retrieval, retrieval
from scbd.metrics._table import Embedding, Embeddings, label_names, named_embeddings

if TYPE_CHECKING:
    from anndata import AnnData

# cells that probes and mixing are of, drawn at random
_MAX_CELLS = 100_000
_LEVEL = 0.95
# chance of the areas of a curve that no label is hit by
_EVEN = 0.5
_TAIL = 0.05
# draws that differ by less are equal
_ROUNDING = 1e-12
_NO_DRAWS = np.empty(0)
# of biology in a rank, as in Luecken et al. (2022)
_WEIGHTS = {"biology": 0.6, "batch": 0.4}
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


class Scored(NamedTuple):
    """A score."""

    value: float
    chance: float = np.nan
    """What an embedding that says nothing gets in the same design, or NaN."""
    draws: np.ndarray = _NO_DRAWS
    """The score of other complexes, perturbations or cells, as if drawn again ``(R,)``; empty where not asked for."""
    n_units: float = np.inf
    """How many there are of what is drawn."""
    is_mean: bool = False
    """Whether it is a mean of what is drawn, or nearly so: how sure it is, Student's t says."""
    is_share: bool = False
    """Whether it is the share of what is drawn that is right: how sure 0 and 1 are, the binomial distribution says."""

    def interval(self, level: float) -> tuple[float, float]:
        """Ends of the confidence interval; NaN where nothing was drawn, or one unit is all there is.

        Resamples of a mean give its standard error, never their own quantiles: of few units, no resample is beyond the
        largest of them, and an F1 loses labels that were not drawn, so that its resamples are low. Where no resample
        differs from another they give none: a share of 0 or 1 then has the bound of Clopper and Pearson, and all else
        NaN.
        """
        if not len(self.draws) or self.n_units <= 1:
            return np.nan, np.nan
        if not self.is_mean:
            return interval(self.draws, level, self.n_units)
        if np.ptp(self.draws) < _ROUNDING:
            return self._exact(level)
        wide = float(stats.t.ppf((1 + level) / 2, self.n_units - 1)) * self._error
        return self.value - wide, self.value + wide

    def minus(self, other: Scored) -> Scored:
        """The difference, over the same resamples."""
        return self._replace(
            value=self.value - other.value, chance=np.nan, draws=self.draws - other.draws, is_share=False
        )

    def p_value(self) -> float:
        """Of a difference that is 0 in truth, two-sided."""
        if not len(self.draws) or self.n_units <= 1:
            return np.nan
        if not self.is_mean:
            return p_value(self.draws, self.n_units)
        if self.value == 0:
            return 1.0
        return float(2 * stats.t.sf(abs(self.value) / self._error, self.n_units - 1)) if self._error else 0.0

    def _exact(self, level: float) -> tuple[float, float]:
        """Ends of the interval of a share of which all units, or none, are right."""
        if not self.is_share or self.value not in (0, 1):
            return np.nan, np.nan
        most = 1 - ((1 - level) / 2) ** (1 / self.n_units)
        return (0.0, float(most)) if self.value == 0 else (float(1 - most), 1.0)

    @property
    def _error(self) -> float:
        """Standard error: draws of n units have the variance of their mean, but for the factor (n - 1) / n."""
        return float(np.std(self.draws) * np.sqrt(self.n_units / (self.n_units - 1)))


class Metric(NamedTuple):
    """A score, or several that are read alike; their names are that of the metric and their own."""

    function: Callable[[Cells], dict[str, Scored]]
    """Scores by their own names; ``""`` for one that is called as the metric is."""
    side: Literal["biology", "batch", "shape"]
    """What it tells of."""
    better: Literal["higher", "lower", "nearer to chance", ""]
    """Which way is good; empty where neither is."""
    needs: tuple[str, ...] = ()
    """Arguments of :func:`benchmark` that it is computed with, where all are given."""
    title: Mapping[str, str] = {}
    """Words for its scores, by their own names."""
    headline: tuple[str, ...] = ()
    """Those that a short table shows."""


@dataclass
class Cells:
    """An embedding that is scored, with what was asked for, see :func:`benchmark`."""

    table: AnnData
    """``obs``, and the embedding as ``obsm["x"]``."""
    y_key: str | None
    e_key: str | Sequence[str] | None
    guide_key: str | None
    control: str | Sequence[str] | None
    nets: Mapping[str, pd.DataFrame]
    labels: Sequence[str]
    position_key: str | Sequence[str] | None
    kinds: Sequence[Kind]
    n_neighbors: int
    y: np.ndarray | None
    """Perturbation of each cell, ``(N,)``."""
    e: np.ndarray | None
    """Environment of each cell, ``(N,)``."""
    groups: np.ndarray | None
    """What the probe of the perturbation holds out as a whole, ``(N,)``."""
    drawn: dict[str, int]
    """``n_bootstrap`` and ``seed``."""

    @property
    def x(self) -> Any:
        return self.table.obsm["x"]

    @cached_property
    def mixing(self) -> dict[str, float]:
        how: dict[str, Any] = {"n_neighbors": self.n_neighbors, "max_cells": _MAX_CELLS, "seed": self.drawn["seed"]}
        return batch_mixing(self.table, "x", self.e_key or (), **how)


def _directions(cells: Cells) -> dict[str, Scored]:
    return {"": Scored(effective_rank(cells.x))}


def _known_relations(cells: Cells) -> dict[str, Scored]:
    """Area, recall and average precision of the relations of each network."""
    profiles = aggregate(cells.table, "x", gene_key=str(cells.y_key), guide_key=cells.guide_key, control=cells.control)
    n_bootstrap, seed = cells.drawn["n_bootstrap"], cells.drawn["seed"]
    found: dict[str, Scored] = {}
    for net_name, net in cells.nets.items():
        relations = Relations(profiles, net)
        values = {
            "area": relationship_area(relationship_curve(relations)),
            "recall": relationship_recall(relations),
            "average_precision": relationship_average_precision(relations),
        }
        chance = relationship_chance(relations)
        draws: dict[str, dict[str, Any]] = {}
        for score in get_args(Score) if n_bootstrap else ():
            (resampled,), n_units = resampled_scores([relations], score, _TAIL, n_bootstrap, seed)
            draws[score] = {"draws": resampled[1:], "n_units": n_units}
        for name, value in values.items():
            found[of_net(name, net_name)] = Scored(value, chance[name], **draws.get(name, {}))
    return found


def _perturbation(cells: Cells) -> dict[str, Scored]:
    return probe_scores(cells.x, cells.y, kind="linear", groups=cells.groups, **cells.drawn)


def _mechanisms(cells: Cells) -> dict[str, Scored]:
    """How well perturbations find others of their mechanism or target."""
    found: dict[str, Scored] = {}
    how: dict[str, Any] = {"y_key": cells.y_key, "control": cells.control or (), "seed": cells.drawn["seed"]}
    for label in cells.labels:
        scores = retrieval_scores(retrieval(cells.table, "x", label_key=label, **how), **cells.drawn)
        found |= {f"{label}_{name}": score for name, score in scores.items()}
    return found


def _replicates(cells: Cells) -> dict[str, Scored]:
    keys: dict[str, Any] = {"y_key": cells.y_key, "e_key": cells.e_key, "position_key": cells.position_key}
    found = replicate_retrieval(cells.table, "x", **keys, control=cells.control, seed=cells.drawn["seed"])
    return replicate_scores(found, **cells.drawn)


def _environment(kind: Kind) -> Callable[[Cells], dict[str, Scored]]:
    def scores(cells: Cells) -> dict[str, Scored]:
        return probe_scores(cells.x, cells.e, kind=kind, groups=None, **cells.drawn) if kind in cells.kinds else {}

    return scores


def _mixed(score: str) -> Callable[[Cells], dict[str, Scored]]:
    expected = f"{score.removesuffix('_neighbours')}_expected"
    return lambda cells: {"": Scored(cells.mixing[score], cells.mixing[expected])}


METRICS: dict[str, Metric] = {
    "effective_rank": Metric(_directions, side="shape", better="", title={"": "directions in use"}, headline=("",)),
    "relationship": Metric(
        _known_relations,
        side="biology",
        better="higher",
        needs=("y_key", "net"),
        title={
            "area": "area, known relations",
            "recall": "recall of known relations",
            "average_precision": "average precision, known relations",
        },
        headline=("average_precision",),
    ),
    "y_probe": Metric(
        _perturbation,
        side="biology",
        better="higher",
        needs=("y_key",),
        title={"f1": "F1 of the perturbation"},
        headline=("f1",),
    ),
    "retrieval": Metric(_mechanisms, side="biology", better="higher", needs=("y_key", "label_key")),
    "replicate": Metric(
        _replicates,
        side="biology",
        better="higher",
        needs=("y_key", "e_key", "control", "replicates"),
        title={
            "map": "average precision of replicates",
            "floor": "the same of positions alone",
            "floor_corrected": "replicates beyond position",
            "cross_position": "replicates across positions",
        },
        headline=("floor_corrected", "map"),
    ),
    "e_probe": Metric(
        _environment("linear"),
        side="batch",
        better="lower",
        needs=("e_key",),
        title={"f1": "F1 of the environment"},
        headline=("f1",),
    ),
    "e_probe_quadratic": Metric(
        _environment("quadratic"),
        side="batch",
        better="lower",
        needs=("e_key",),
        title={"f1": "F1 of the environment, quadratic"},
        headline=("f1",),
    ),
    "e_probe_neighbours": Metric(
        _environment("neighbours"),
        side="batch",
        better="lower",
        needs=("e_key",),
        title={"f1": "F1 of the environment, neighbours"},
    ),
    "e_probe_nearest_mean": Metric(_environment("nearest_mean"), side="batch", better="lower", needs=("e_key",)),
    "ilisi": Metric(
        _mixed("ilisi"),
        side="batch",
        better="higher",
        needs=("e_key",),
        title={"": "mixing of environments (iLISI)"},
        headline=("",),
    ),
    "same_environment_neighbours": Metric(
        _mixed("same_environment_neighbours"),
        side="batch",
        better="nearer to chance",
        needs=("e_key",),
        title={"": "neighbours of the same environment"},
    ),
    "silhouette": Metric(
        _mixed("silhouette"),
        side="batch",
        better="nearer to chance",
        needs=("e_key",),
        title={"": "silhouette by environment"},
    ),
}


def _joined(name: str, score: str) -> str:
    return f"{name}_{score}" if score else name


def metric_of(score: str) -> Metric:
    """How a score of a frame is read: that of the metric with the longest name that its own begins with."""
    names = [name for name in METRICS if score == name or score.startswith((f"{name}_", f"{name} ("))]
    return METRICS[max(names, key=len)] if names else Metric(lambda _: {}, side="shape", better="")


def measure_name(score: str) -> str:
    """A score of a frame in words, with the name of its network behind them; else its name without underscores.

    Examples
    --------
    >>> from scbd.metrics._benchmark import measure_name
    >>> measure_name("relationship_area (corum)"), measure_name("y_probe_auroc")
    ('area, known relations (corum)', 'y probe auroc')
    """
    plain, bracket, network = score.partition(" (")
    words = {_joined(name, own): title for name, metric in METRICS.items() for own, title in metric.title.items()}
    return words.get(plain, plain.replace("_", " ")) + bracket + network


def benchmark(
    adata: AnnData,
    embeddings: Embeddings,
    *,
    y_key: str | None = None,
    e_key: str | Sequence[str] | None = None,
    guide_key: str | None = None,
    group_key: str | Sequence[str] | Literal["auto"] | None = "auto",
    control: str | Sequence[str] | None = "nontargeting",
    net: pd.DataFrame | Mapping[str, pd.DataFrame] | None = None,
    label_key: str | Sequence[str] | None = None,
    replicates: bool | str | Sequence[str] = False,
    kinds: Sequence[Kind] = ("linear", "quadratic"),
    n_neighbors: int = 90,
    n_bootstrap: int = 0,
    reference: str | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Score embeddings for biology and for batch effects.

    What is asked for decides what is measured: ``y_key`` gives a probe of the perturbation, with ``net`` relationships,
    with ``label_key`` retrieval of mechanisms and the like, with ``replicates`` that of replicates; ``e_key`` gives
    probes of the environment and its mixing. Probes and mixing are of 100,000 random cells where there are more.

    Parameters
    ----------
    adata
        Embedded cells that the embedding was not trained on.
    embeddings
        Keys of ``obsm``; or names of representations with their key, or with several keys, such as those of several
        training seeds. In place of a key, an array, or the path of a file that ``embed_to`` wrote of these cells.
        Reduce wide features (of CellProfiler) to 64 principal components first, as the paper does.
    y_key, e_key, guide_key
        Columns of ``obs`` with the perturbation, the environment, and the guide.
    group_key
        What the probe of the perturbation holds out as a whole: a column of ``obs``, several for their cross, or `None`
        to split cells one by one. A probe that saw other cells of a well can recognise the well, and so its gene. By
        default, ``"auto"``, environments are held out where most hold one perturbation, guides where these belong to
        one, and otherwise nothing; see :func:`label_probe`.
    control
        Value of ``y_key`` for unperturbed cells, or several, or `None`: see :func:`aggregate`.
    net
        Frame with ``source`` and ``target``, values of ``y_key``; or several by name, which their rows then have. Leave
        large sets out, which pairs mostly measure.
    label_key
        Columns of ``obs`` with the mechanism or target of a perturbation, see :func:`retrieval`.
    replicates
        Whether rows are wells that should find their replicates in other environments, see
        :func:`replicate_retrieval`; or the columns with their position on a plate, which gives a floor, too. Needs
        ``y_key``, ``e_key`` and ``control``. Not for millions of cells.
    kinds
        Probes of the environment, see :func:`label_probe`. Environments that a linear probe cannot predict may still
        differ in their variance, which ``"quadratic"`` detects.
    n_neighbors
        Of the mixing metrics.
    n_bootstrap
        Resamples for confidence intervals, such as 200: of complexes for relations, of whole mechanisms for their
        retrieval, of perturbations for that of replicates, of what was held out for the F1 and accuracy of probes. They
        say what other complexes or cells would have given, not another training seed, and of probes nothing about other
        cells to learn from. The F1 loses labels that are not drawn: of labels with few cells, read the accuracy.
    reference
        A representation that all are compared with, over the same resamples: its keys with theirs in their order, or
        its only key with all.
    seed
        Seed of probes, subsets and resamples.

    Returns
    -------
    Tidy frame, one row a score and embedding: ``metric``, ``representation``, ``key``, ``value``, ``chance`` (what an
    embedding that says nothing gets in the same design, or NaN), ``better`` (``"higher"``, ``"lower"``, ``"nearer to
    chance"``, or empty). With ``n_bootstrap`` also ``low`` and ``high``, a 95 % interval, or NaN. With ``reference``
    also ``difference``, ``difference_low``, ``difference_high`` and ``p_value``. ``effective_rank`` is the number of
    directions in use, 0 for a point.

    Raises
    ------
    ValueError
        If there are no cells, nothing is asked for, something lacks its key, a file is of other cells, a reference has
        no resamples, or see the metrics.
    KeyError
        If a key is missing.

    Warns
    -----
    UserWarning
        If perturbations and environments nest so that the probe of the perturbation may read the environment, or
        replicates are scored of perturbations that were trained on.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> embeddings = {"SCBD": "X_scbd_c", "pixels": "X_pixel_pca"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> frame.columns.to_list()
    ['metric', 'representation', 'key', 'value', 'chance', 'better']
    """
    from anndata import AnnData

    if adata.n_obs == 0:
        msg = "adata has no rows to score: hold cells out with train(train_size=0.7)."
        raise ValueError(msg)
    nets, labels = nets_by_name(net), () if label_key is None else as_columns(label_key)
    given: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "control": control}
    given |= {"net": nets, "label_key": labels, "replicates": replicates}
    _check_asked(given)
    for kind in kinds:
        check_choice("kind", kind, Kind)
    compared = named_embeddings(adata, embeddings)
    check_reference_of(reference, [embedding.representation for embedding in compared], n_bootstrap)
    asked = {name: metric for name, metric in METRICS.items() if all(_is_given(given[key]) for key in metric.needs)}
    how: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "guide_key": guide_key, "control": control, "nets": nets}
    how |= {"labels": labels, "position_key": None if isinstance(replicates, bool) else replicates, "kinds": kinds}
    how |= {"y": None if y_key is None else label_names(adata, y_key)}
    how |= {"e": None if e_key is None else label_names(adata, e_key)}
    how |= {"groups": None if y_key is None else probe_groups(adata, y_key, e_key, guide_key, group_key)}
    how |= {"n_neighbors": n_neighbors, "drawn": {"n_bootstrap": n_bootstrap, "seed": seed}}
    measured = []
    for embedding in compared:
        cells = Cells(AnnData(obs=adata.obs, obsm={"x": embedding.values}), **how)
        measured.append((embedding, {name: metric.function(cells) for name, metric in asked.items()}))
    return _frame(measured, n_bootstrap, reference)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (hasattr(value, "__len__") and not len(value))


def _check_asked(given: Mapping[str, Any]) -> None:
    """Raise unless something is asked for, with the columns that it needs."""
    if given["y_key"] is None and given["e_key"] is None:
        msg = "Nothing to measure: give e_key or y_key."
        raise ValueError(msg)
    for what in ("net", "label_key", "replicates"):
        needs = next(metric.needs for metric in METRICS.values() if what in metric.needs)
        missing = [key for key in needs if given[key] is None]
        if _is_given(given[what]) and missing:
            msg = f"{what} needs {' and '.join(missing)}."
            raise ValueError(msg)


def check_reference_of(reference: str | None, representations: Sequence[str], n_bootstrap: int) -> None:
    """Raise unless each of these, the representation of every embedding, has one of the reference's beside it."""
    if reference is None:
        return
    if not n_bootstrap:
        msg = "reference needs n_bootstrap, such as 200: differences are tested over resamples."
        raise ValueError(msg)
    n_keys = pd.Series(representations).value_counts(sort=False)
    check_reference(reference, n_keys.index)
    if n_keys[reference] > 1 and (odd := n_keys[n_keys != n_keys[reference]]).size:
        msg = (
            f"{odd.index[0]!r} has {odd.iloc[0]} keys and the reference {reference!r} has {n_keys[reference]}: give as "
            "many of both, or one of the reference."
        )
        raise ValueError(msg)


def _frame(
    measured: Sequence[tuple[Embedding, dict[str, dict[str, Scored]]]], n_bootstrap: int, reference: str | None
) -> pd.DataFrame:
    """One row a score."""
    others = [scores for embedding, scores in measured if embedding.representation == reference]
    places: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for (representation, key, _), scores in measured:
        place = places[representation] = places.get(representation, -1) + 1
        for name, own, score in ((name, own, score) for name, of in scores.items() for own, score in of.items()):
            row = {"metric": _joined(name, own), "representation": representation, "key": key, "value": score.value}
            row |= {"chance": score.chance, "better": METRICS[name].better}
            if n_bootstrap:
                # whatever is drawn again is a share
                row |= dict(zip(("low", "high"), np.clip(score.interval(_LEVEL), 0, 1), strict=True))
            if others:
                apart = score.minus(others[min(place, len(others) - 1)][name][own])
                low, high = apart.interval(_LEVEL)
                row |= {"difference": apart.value, "difference_low": low, "difference_high": high}
                row |= {"p_value": apart.p_value()}
            rows.append(row)
    return pd.DataFrame(rows)


def nets_by_name(net: pd.DataFrame | Mapping[str, pd.DataFrame] | None) -> Mapping[str, pd.DataFrame]:
    """Networks as :func:`benchmark` takes them; one alone has no name."""
    return net if isinstance(net, Mapping) else {} if net is None else {"": net}


def of_net(metric: str, name: str) -> str:
    """What a metric of the network of this name is called."""
    return f"{metric} ({name})" if name else metric


def probe_scores(embedding: Any, labels: Any, *, n_bootstrap: int, seed: int, **how: Any) -> dict[str, Scored]:
    """F1, area and accuracy of :func:`scbd.metrics.label_probe`."""
    found = probed(embedding, labels, max_cells=_MAX_CELLS, seed=seed, **how)
    chance = {"f1": found.scores["chance_f1"], "auroc": _EVEN}
    draws = found.resampled(n_bootstrap, seed) if n_bootstrap else {}
    n_units = len(np.unique(found.units))
    return {
        name: Scored(value, chance.get(name, np.nan), draws.get(name, _NO_DRAWS), n_units, True, name == "accuracy")
        for name, value in found.scores.items()
        if name != "chance_f1"
    }


def retrieval_scores(found: Retrieval, n_bootstrap: int, seed: int) -> dict[str, Scored]:
    """Mean average precision of :func:`scbd.metrics.retrieval`; how many perturbations are called."""
    return {
        "map": mean_score(found.table, n_bootstrap, seed, found.units),
        "called": Scored(found.n_called / len(found.table)),
    }


def replicate_scores(found: Retrieval, n_bootstrap: int, seed: int) -> dict[str, Scored]:
    """The same of :func:`scbd.metrics.replicate_retrieval`, with floor and cross-position where positions are known."""
    scores = retrieval_scores(found, n_bootstrap, seed)
    if len(found.floor_table):
        scores["floor"] = mean_score(found.floor_table, n_bootstrap, seed)
        scores["floor_corrected"] = Scored(found.floor_corrected, _floor_corrected_chance(found))
    if len(found.cross_position_table):
        scores["cross_position"] = mean_score(found.cross_position_table, n_bootstrap, seed)
    return scores


def _floor_corrected_chance(found: Retrieval) -> float:
    """Of noise: not 0 where perturbations and positions of controls have unequal numbers of wells to find."""
    floor = float(found.floor_table["chance"].mean())
    return (found.chance - floor) / (1 - floor) if floor < 1 else np.nan


def mean_score(table: pd.DataFrame, n_bootstrap: int, seed: int, units: np.ndarray | None = None) -> Scored:
    """Mean of perturbations, and of as many units of them drawn with replacement; each is one by default."""
    values, rng = table["average_precision"].to_numpy(), np.random.default_rng(seed)
    _, codes = np.unique(np.arange(len(values)) if units is None else units, return_inverse=True)
    size, total = np.bincount(codes), np.bincount(codes, values)
    drawn = rng.integers(len(size), size=(n_bootstrap, len(size)))
    draws = total[drawn].sum(axis=1) / size[drawn].sum(axis=1)
    # a few large units among small ones are as few as they weigh
    n_units = float(size.sum() ** 2 / (size**2).sum())
    return Scored(float(values.mean()), float(table["chance"].mean()), draws, n_units, is_mean=True)


def summarise(frame: pd.DataFrame, *, reference: str | None = None) -> pd.DataFrame:
    """Mean and standard deviation over the keys of each representation (training seeds).

    Parameters
    ----------
    frame
        From :func:`benchmark`; several such frames may be concatenated. Folds of a key are
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
    sides = {metric: list(_SIDES).index(metric_of(metric).side) for metric in mean}
    order = sorted(mean, key=sides.__getitem__)  # stable: within a group as they were
    badness = pd.DataFrame({metric: _badness(mean, chance, metric) for metric in order}, index=mean.index).T
    best = badness.eq(badness.min(axis=1), axis=0)
    text = pd.DataFrame(
        {name: [_score_text(mean.loc[name, m], sd.loc[name, m], digits) for m in order] for name in mean.index}
    )
    text[_CHANCE] = [_score_text(chance[metric], np.nan, digits) for metric in order]
    best[_CHANCE] = False
    arrows = [_ARROWS[metric_of(metric).better] for metric in order]
    text.index = pd.MultiIndex.from_tuples(
        [
            (_SIDES[metric_of(metric).side], f"{measure_name(metric)} {arrow}".strip())
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
        if own := [m for m in scaled if metric_of(m).side == side]:
            sides[side] = scaled[own].mean(axis=1)
    if not sides:
        msg = f"None of {', '.join(mean)} has a chance to rank by: give frames of scbd.metrics.benchmark."
        raise ValueError(msg)
    total = sum(_WEIGHTS[side] for side in sides)
    overall = sum((_WEIGHTS[side] / total * value for side, value in sides.items()), start=pd.Series(0.0, scaled.index))
    ranked = pd.DataFrame({"overall": overall, **sides, **scaled})
    n_directions = frame[frame["metric"] == "effective_rank"].groupby("representation")["value"].mean()
    ranked["point"] = n_directions.reindex(ranked.index) < 1
    ranked = ranked.sort_values(["point", "overall"], ascending=[True, False], kind="stable")
    return ranked.drop(columns="point").rename_axis("representation")


def _tables(frame: pd.DataFrame, metrics: Sequence[str] | None) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Mean and deviation, a row a representation and a column a metric; and what chance gives of each."""
    there = list(dict.fromkeys(frame["metric"]))
    if metrics is None:
        short = [_joined(name, own) for name, metric in METRICS.items() for own in metric.headline]
        metrics = [m for m in there if m.split(" (")[0] in short] or there
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
    better = metric_of(metric).better
    if better == "nearer to chance":
        by_chance = float(chance[metric])
        return (mean[metric] - (0.0 if np.isnan(by_chance) else by_chance)).abs()
    return mean[metric] * {"higher": -1, "lower": 1, "": np.nan}[better]


def _scaled(values: pd.Series, chance: float, metric: str) -> pd.Series:
    """From 0 to 1. Of biology, chance is 0 and the best 1; of batch, the worst is 0 and chance is 1."""
    if metric_of(metric).side == "biology":
        best = float(values.max())
        return (values - chance) / (best - chance) if best > chance else values * 0.0
    further = values - chance
    better = metric_of(metric).better
    away = further.abs() if better == "nearer to chance" else (further if better == "lower" else -further).clip(lower=0)
    return 1 - away / float(away.max()) if away.max() > 0 else away + 1.0
