"""Benchmark of embeddings: all scores of several embeddings in one tidy frame, and summaries of this frame.

:func:`benchmark` returns one row per score and embedding. :func:`summarise` averages the scores over training seeds,
:func:`rank` orders the representations, and :func:`styled` formats the scores as a table.

Each score is an entry of the dictionary ``METRICS``. To add a score, add an entry. An entry holds the function that
computes the score, the arguments that this function requires, the title of the score, and how the score is interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scipy import stats

from scbd._shared.checks import check_choice, check_count, named_errors
from scbd._shared.labels import as_columns
from scbd._shared.linear_maps import effective_rank
from scbd.metrics._arguments import Embedding, Embeddings, get_label_texts, get_named_embeddings
from scbd.metrics._mixing import batch_mixing
from scbd.metrics._probes import ProbeKind, resolve_probe_groups, run_probe
from scbd.metrics._profiles import aggregate
from scbd.metrics._relationships import (
    Relations,
    expected_relationship_scores,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
    resampled_scores,
)
from scbd.metrics._resampling import ScoreName, bootstrap_interval, bootstrap_p_value, small_sample_factor
from scbd.metrics._retrieval import Retrieval, replicate_retrieval, retrieval

if TYPE_CHECKING:
    from anndata import AnnData

# Maximum number of cells from which probes and mixing scores are computed. With more cells, a random subset of this
# size is used.
_MAX_CELLS = 100_000
# coverage of the confidence intervals of scores
_INTERVAL_LEVEL = 0.95
# area under the ROC curve (AUROC) of a classifier that has no information about the label
_CHANCE_AUROC = 0.5
# Size of the lower and of the upper tail of the cosines, as a fraction of all pairs of genes. The recall is the
# fraction of known gene relations that lie in the two tails.
_RECALL_TAIL = 0.05
# bootstrap samples of a score count as equal if their range, maximum minus minimum, is below this value
_SAMPLE_TOLERANCE = 1e-12
_NO_SAMPLES = np.empty(0)
# Weights of the mean biology score and of the mean batch score in the overall score. Representations are ranked by the
# overall score. The weights are those of Luecken et al. (2022).
_WEIGHTS = {"biology": 0.6, "batch": 0.4}
_GROUP_TITLES = {"biology": "biology", "batch": "batch", "shape": "other"}
_ARROWS = {"higher": "↑", "lower": "↓", "nearer to chance": "→", "": ""}
_ARROW_WORDS = {"↑": "higher is better", "↓": "lower is better", "→": "nearer to chance is better"}
_CHANCE = "chance"
_MAX_DIGITS = 6
# Styles of the HTML table of scores. A wide table has its own scroll bar instead of widening the page, and long names
# of scores break into several lines.
_TABLE_STYLES = [
    {"selector": "", "props": "display: block; width: fit-content; max-width: 100%; overflow-x: auto"},
    {"selector": "caption", "props": "caption-side: bottom; text-align: left"},
    {"selector": "td, th", "props": "padding: 0.2em 0.35em"},
    {"selector": "td", "props": "text-align: right; white-space: nowrap"},
    {"selector": "th.row_heading", "props": "text-align: left; vertical-align: top; font-weight: normal"},
    {"selector": "th.row_heading.level1", "props": "min-width: 6.5em; white-space: normal"},
]


class EstimatedScore(NamedTuple):
    """Value of one score of an embedding, its value expected by chance, and its bootstrap samples."""

    value: float
    chance: float = np.nan
    """Expected score of an embedding without information in the same experimental design; NaN if it is not known."""
    draws: np.ndarray = _NO_SAMPLES
    """Bootstrap samples of the score, ``(R,)``; empty if no samples were requested.

    Depending on the score, each sample draws complexes, perturbations or cells with replacement.
    """
    n_units: float = np.inf
    """Number of units (complexes, perturbations or cells) that the bootstrap resamples.

    If units differ in size, it is the effective number of units.
    """
    is_mean: bool = False
    """True if the score is, at least nearly, a mean over the resampled units.

    The confidence interval of such a score comes from Student's t distribution.
    """
    is_fraction: bool = False
    """True if the score is the fraction of resampled units that are correct, for example an accuracy.

    If such a score is 0 or 1, its confidence interval comes from the binomial distribution.
    """

    def interval(self, level: float) -> tuple[float, float]:
        """Return the lower and the upper end of the confidence interval of the score, with the coverage ``level``.

        Both ends are NaN if there are no bootstrap samples, or if only one unit is resampled. The method depends on the
        score:

        - Score that is not a mean: quantiles of the bootstrap samples, widened if there are few units.
        - Score that is a mean: value plus and minus its standard error times a quantile of Student's t. The standard
          error comes from the bootstrap samples. The quantiles of the bootstrap samples are not used, for two reasons:
          with few units, no resampled mean exceeds the largest value of a unit; and bootstrap samples of the F1 score
          are too low, because they lack some labels.
        - Score that is a mean, if all its bootstrap samples are equal: the exact interval of Clopper and Pearson if the
          score is a fraction of 0 or 1, otherwise NaN.
        """
        if not len(self.draws) or self.n_units <= 1:
            return np.nan, np.nan
        if not self.is_mean:
            return bootstrap_interval(self.draws, level, self.n_units)
        if np.ptp(self.draws) >= _SAMPLE_TOLERANCE:
            wide = float(stats.t.ppf((1 + level) / 2, self.n_units - 1)) * self._error
            return self.value - wide, self.value + wide
        if not self.is_fraction or self.value not in (0, 1):
            return np.nan, np.nan
        most = float(1 - ((1 - level) / 2) ** (1 / self.n_units))
        return (0.0, most) if self.value == 0 else (1 - most, 1.0)

    def minus(self, other: EstimatedScore) -> EstimatedScore:
        """Return the difference between this score and the score of another embedding.

        Bootstrap samples are subtracted one by one: sample ``i`` of both scores must have drawn the same units.
        """
        return self._replace(
            value=self.value - other.value, chance=np.nan, draws=self.draws - other.draws, is_fraction=False
        )

    def p_value(self) -> float:
        """Return the two-sided p value of the hypothesis that a difference of two scores (see :meth:`minus`) is 0."""
        if not len(self.draws) or self.n_units <= 1:
            return np.nan
        if not self.is_mean:
            return bootstrap_p_value(self.draws, self.n_units)
        if self.value == 0:
            return 1.0
        return float(2 * stats.t.sf(abs(self.value) / self._error, self.n_units - 1)) if self._error else 0.0

    @property
    def _error(self) -> float:
        """Standard error of a score that is a mean, from its bootstrap samples.

        The bootstrap variance of a mean of n units is too small by the factor (n - 1) / n, which is corrected here.
        """
        return float(np.std(self.draws)) * small_sample_factor(self.n_units)


class Metric(NamedTuple):
    """Entry of ``METRICS``: one score, or several scores that are interpreted in the same way.

    One function computes all scores of an entry. The full name of a score consists of the name of the metric and of the
    score's own name. For example, the score ``f1`` of the metric ``y_probe`` is called ``y_probe_f1``.
    """

    function: Callable[[BenchmarkInput], dict[str, EstimatedScore]]
    """Function that computes the scores of one embedding, and returns them by their own names.

    The own name is ``""`` if the full name of the score is the name of the metric.
    """
    side: Literal["biology", "batch", "shape"] = "shape"
    """Property of the embedding that the scores describe.

    It is ``"biology"`` for scores of perturbations, ``"batch"`` for scores of environments, and ``"shape"`` for scores
    that depend on the embedding alone, such as its effective rank.
    """
    better: Literal["higher", "lower", "nearer to chance", ""] = ""
    """Direction in which the scores are better; empty if neither direction is better."""
    needs: tuple[str, ...] = ()
    """Names of the arguments of :func:`benchmark` that must be given for the scores to be computed."""
    title: Mapping[str, str] = {}
    """Titles of the scores in a formatted table, by the scores' own names."""
    headline: tuple[str, ...] = ()
    """Own names of the scores that :func:`styled` and :func:`rank` use by default."""


@dataclass(kw_only=True)
class BenchmarkInput:
    """Input of each function in ``METRICS``: the embedding to be scored, and the arguments of :func:`benchmark`."""

    x: Any
    """Embedding to be scored, ``(N, D)``, an array or a memory-map."""
    table: AnnData
    """Table of the cells with their ``obs``, and with the embedding to be scored as ``obsm["x"]``."""
    y_key: str | None
    e_key: str | Sequence[str] | None
    guide_key: str | None
    control: str | Sequence[str] | None
    nets: Mapping[str, pd.DataFrame]
    labels: Sequence[str]
    position_key: str | Sequence[str] | None
    kinds: Sequence[ProbeKind]
    n_neighbors: int
    y: np.ndarray | None
    """Perturbation of each cell as text, ``(N,)``; `None` if ``y_key`` is not given."""
    e: np.ndarray | None
    """Environment of each cell as text, ``(N,)``; `None` if ``e_key`` is not given."""
    groups: np.ndarray | None
    """Group of each cell for the probe of the perturbation, ``(N,)``; `None` if the probe splits single cells.

    The probe uses either all or none of the cells of a group for training.
    """
    drawn: dict[str, int]
    """Arguments of the bootstrap by name: number of samples (``n_bootstrap``) and ``seed``."""

    @cached_property
    def mixing(self) -> dict[str, float]:
        how: dict[str, Any] = {"n_neighbors": self.n_neighbors, "max_cells": _MAX_CELLS, "seed": self.drawn["seed"]}
        return batch_mixing(self.table, "x", self.e_key or (), **how)


def _relationship_scores(cells: BenchmarkInput) -> dict[str, EstimatedScore]:
    """Compute how well cosines of gene profiles recover the known gene relations of each network.

    The three scores are the area under the precision-recall curve, the recall, and the average precision.
    """
    profiles = aggregate(cells.table, "x", gene_key=str(cells.y_key), guide_key=cells.guide_key, control=cells.control)
    n_bootstrap, seed = cells.drawn["n_bootstrap"], cells.drawn["seed"]
    found: dict[str, EstimatedScore] = {}
    for net_name, net in cells.nets.items():
        relations = Relations(profiles, net)
        chance = expected_relationship_scores(relations)
        values: dict[ScoreName, float] = {
            "area": relationship_area(relationship_curve(relations)),
            "recall": relationship_recall(relations),
            "average_precision": relationship_average_precision(relations),
        }
        for name, value in values.items():
            score = EstimatedScore(value, chance[name])
            if n_bootstrap:
                (resampled,), n_units = resampled_scores([relations], name, _RECALL_TAIL, n_bootstrap, seed)
                score = score._replace(draws=resampled[1:], n_units=n_units)
            found[name_with_net(name, net_name)] = score
    return found


def _mechanism_scores(cells: BenchmarkInput) -> dict[str, EstimatedScore]:
    """Compute how well perturbations retrieve other perturbations with the same mechanism or target.

    The scores are computed for each column of mechanisms or targets in ``label_key``.
    """
    found: dict[str, EstimatedScore] = {}
    how: dict[str, Any] = {"y_key": cells.y_key, "control": cells.control or (), "seed": cells.drawn["seed"]}
    for label in cells.labels:
        scores = retrieval_scores(retrieval(cells.table, "x", label_key=label, **how), **cells.drawn)
        found |= {f"{label}_{name}": score for name, score in scores.items()}
    return found


def _replicate_scores_of_cells(cells: BenchmarkInput) -> dict[str, EstimatedScore]:
    keys: dict[str, Any] = {"y_key": cells.y_key, "e_key": cells.e_key, "position_key": cells.position_key}
    found = replicate_retrieval(cells.table, "x", **keys, control=cells.control, seed=cells.drawn["seed"])
    return replicate_scores(found, **cells.drawn)


def _environment_probe_scores(cells: BenchmarkInput) -> dict[str, EstimatedScore]:
    """Compute the scores of each requested kind of probe; their own names begin with the kind, except ``"linear"``."""
    found: dict[str, EstimatedScore] = {}
    for kind in get_args(ProbeKind):
        if kind in cells.kinds:
            scores = probe_scores(cells.x, cells.e, kind=kind, groups=None, **cells.drawn)
            found |= {name if kind == "linear" else f"{kind}_{name}": score for name, score in scores.items()}
    return found


def _mixing_score(cells: BenchmarkInput, name: str, expected: str) -> dict[str, EstimatedScore]:
    return {"": EstimatedScore(cells.mixing[name], cells.mixing[expected])}


METRICS: dict[str, Metric] = {
    "effective_rank": Metric(
        lambda cells: {"": EstimatedScore(effective_rank(cells.x))}, title={"": "directions in use"}, headline=("",)
    ),
    "relationship": Metric(
        _relationship_scores,
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
        lambda cells: probe_scores(cells.x, cells.y, kind="linear", groups=cells.groups, **cells.drawn),
        side="biology",
        better="higher",
        needs=("y_key",),
        title={"f1": "F1 of the perturbation"},
        headline=("f1",),
    ),
    "retrieval": Metric(_mechanism_scores, side="biology", better="higher", needs=("y_key", "label_key")),
    "replicate": Metric(
        _replicate_scores_of_cells,
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
        _environment_probe_scores,
        side="batch",
        better="lower",
        needs=("e_key",),
        title={
            "f1": "F1 of the environment",
            "quadratic_f1": "F1 of the environment, quadratic",
            "neighbours_f1": "F1 of the environment, neighbours",
        },
        headline=("f1", "quadratic_f1"),
    ),
    "ilisi": Metric(
        partial(_mixing_score, name="ilisi", expected="ilisi_expected"),
        side="batch",
        better="higher",
        needs=("e_key",),
        title={"": "mixing of environments (iLISI)"},
        headline=("",),
    ),
    "same_environment_neighbours": Metric(
        partial(_mixing_score, name="same_environment_neighbours", expected="same_environment_expected"),
        side="batch",
        better="nearer to chance",
        needs=("e_key",),
        title={"": "neighbours of the same environment"},
    ),
    "silhouette": Metric(
        partial(_mixing_score, name="silhouette", expected="silhouette_expected"),
        side="batch",
        better="nearer to chance",
        needs=("e_key",),
        title={"": "silhouette by environment"},
    ),
}


def _join_score_name(name: str, score: str) -> str:
    return f"{name}_{score}" if score else name


def find_metric(score: str) -> Metric:
    """Return the entry of ``METRICS`` to which the score with this full name belongs.

    The full name of a score begins with the name of its entry. If it begins with the names of several entries, the
    entry with the longest name is returned. For an unknown score, a new :class:`Metric` is returned, which does not
    state whether high or low scores are better.
    """
    names = [name for name in METRICS if score == name or score.startswith((f"{name}_", f"{name} ("))]
    return METRICS[max(names, key=len)] if names else Metric(lambda _: {})


def score_title(score: str) -> str:
    """Return the title of a score for a table, from the score's full name.

    If the score belongs to a network of gene relations, the title ends with the name of the network in parentheses. A
    score without a title keeps its name, with spaces in place of underscores.

    Examples
    --------
    >>> from scbd.metrics._benchmark import score_title
    >>> score_title("relationship_area (corum)"), score_title("y_probe_auroc")
    ('area, known relations (corum)', 'y probe auroc')
    """
    plain, bracket, network = score.partition(" (")
    words = {
        _join_score_name(name, own): title for name, metric in METRICS.items() for own, title in metric.title.items()
    }
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
    kinds: Sequence[ProbeKind] = ("linear", "quadratic"),
    n_neighbors: int = 90,
    n_bootstrap: int = 0,
    reference: str | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Score how well embeddings carry biology, and how much of the batch effects they retain.

    The arguments decide which scores are computed:

    - ``y_key``: probe of the perturbation
    - ``y_key`` and ``net``: known relations between genes
    - ``y_key`` and ``label_key``: retrieval of perturbations with the same mechanism or target
    - ``y_key``, ``e_key``, ``control`` and ``replicates``: retrieval of replicates
    - ``e_key``: probes of the environment, and mixing of environments

    ``y_key`` or ``e_key`` is required. The effective rank is always computed. If there are more than 100,000 cells,
    probes and mixing use a random subset of this size.

    Parameters
    ----------
    adata
        Embedded cells that the embedding was not trained on.
    embeddings
        Keys of ``obsm``; or a mapping from the name of a representation to its key, or to several keys, for example one
        per training seed. In place of a key, an array or the path of a file that ``embed_to`` wrote for these cells can
        be given. Reduce wide features (for example of CellProfiler) to 64 principal components first, as the paper
        does.
    y_key, e_key, guide_key
        Columns of ``obs`` with the perturbation, the environment, and the guide.
    group_key
        Groups of cells that the probe of the perturbation keeps together: all cells of a group are training cells, or
        all are test cells. Groups are given as a column of ``obs``, or as several columns that are crossed. `None`
        splits cells one by one. A probe that was trained on other cells of a well can recognise the well, and infer the
        perturbation from it. The default ``"auto"`` holds out environments if most cells lie in an environment with a
        single perturbation, otherwise guides if most cells have a guide of a single perturbation, otherwise single
        cells. See ``groups`` of :func:`label_probe`.
    control
        Value or values of ``y_key`` for unperturbed cells, or `None`: see :func:`aggregate`.
    net
        Frame with columns ``source`` and ``target``, which hold values of ``y_key``; or a mapping from names to such
        frames. The name of a network appears in the names of its scores. Remove large sets of genes first: they
        contribute most of the related pairs, and would dominate the scores.
    label_key
        Columns of ``obs`` with the mechanism or target of a perturbation, see :func:`retrieval`.
    replicates
        `True` if rows are wells that should retrieve their replicates in other environments, see
        :func:`replicate_retrieval`. Alternatively, the columns with the position of a well on its plate. With
        positions, the floor is computed as well, which is the score of positions without any perturbation. ``y_key``,
        ``e_key`` and ``control`` are required. The computation is too slow for millions of cells.
    kinds
        Types of classifiers for the probes of the environment, see :func:`label_probe`. Environments that a linear
        probe cannot predict may still differ in their variance, which ``"quadratic"`` detects.
    n_neighbors
        Number of neighbours of the mixing scores.
    n_bootstrap
        Number of bootstrap samples for confidence intervals, for example 200; 0 computes no intervals. The resampled
        units are complexes (known relations), groups of perturbations with linked mechanisms (retrieval of mechanisms),
        perturbations (retrieval of replicates), or held-out cells or groups (F1 and accuracy of probes). The intervals
        describe variation over these units. They do not describe variation over training seeds or, for probes, over
        training cells. Bootstrap samples lack some labels, which lowers the F1 of the samples: with few cells per
        label, use the accuracy.
    reference
        Name of the representation that all other representations are compared with, over the same bootstrap samples.
        Requires ``n_bootstrap``. If the reference has several keys, its first key is compared with the first key of
        each representation, and so on. If the reference has one key, this key is compared with all keys.
    seed
        Seed of probes, subsets and bootstrap samples.

    Returns
    -------
    Tidy frame with one row per score and embedding, and these columns:

    - ``metric``: name of the score
    - ``representation`` and ``key``: name of the representation, and key of the embedding
    - ``value``: the score; ``effective_rank`` is the number of directions that the embedding uses, 0 for a single point
    - ``chance``: expected score of an embedding without information in the same experimental design; NaN if it is not
      known
    - ``better``: direction of better scores: ``"higher"``, ``"lower"``, ``"nearer to chance"``, or empty
    - ``low`` and ``high``, with ``n_bootstrap`` only: ends of the 95 % confidence interval, or NaN
    - ``difference``, ``difference_low``, ``difference_high`` and ``p_value``, with ``reference`` only: difference from
      the reference, its 95 % confidence interval, and its two-sided p value

    Raises
    ------
    ValueError
        If there are no cells, neither ``y_key`` nor ``e_key`` is given, an argument is given without another argument
        that it requires, a file does not hold the cells of ``adata``, ``reference`` is given without ``n_bootstrap``,
        or a single score cannot be computed.
    KeyError
        If a key is missing.

    Warns
    -----
    UserWarning
        If perturbations and environments are nested, so that the probe of the perturbation may recognise the
        environment instead; or if the retrieval of replicates scores perturbations that the embedding was trained on.

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
    _check_required_arguments(given)
    for kind in kinds:
        check_choice("kind", kind, ProbeKind)
    compared = get_named_embeddings(adata, embeddings)
    check_reference_keys(reference, [embedding.representation for embedding in compared], n_bootstrap)
    asked = {name: metric for name, metric in METRICS.items() if all(_is_given(given[key]) for key in metric.needs)}
    y, e = (None if key is None else get_label_texts(adata, key) for key in (y_key, e_key))
    how: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "guide_key": guide_key, "control": control, "nets": nets}
    how |= {"labels": labels, "position_key": None if isinstance(replicates, bool) else replicates, "kinds": kinds}
    how |= {"groups": None if y_key is None else resolve_probe_groups(adata, y_key, e_key, guide_key, group_key)}
    how |= {"y": y, "e": e, "n_neighbors": n_neighbors, "drawn": {"n_bootstrap": n_bootstrap, "seed": seed}}
    measured = []
    for embedding in compared:
        cells = BenchmarkInput(x=embedding.values, table=AnnData(obs=adata.obs, obsm={"x": embedding.values}), **how)
        scores: dict[tuple[str, str], EstimatedScore] = {}
        for name, metric in asked.items():
            keys = [embedding.key, *(f"{need}={given[need]!r}" for need in metric.needs if need.endswith("_key"))]
            with named_errors(f"{name} of {embedding.representation!r} ({', '.join(keys)})"):
                scores |= {(name, own): score for own, score in metric.function(cells).items()}
        measured.append((embedding, scores))
    return _report_frame(measured, n_bootstrap, reference)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (hasattr(value, "__len__") and not len(value))


def _check_required_arguments(given: Mapping[str, Any]) -> None:
    """Raise an error if an argument of :func:`benchmark` is given without the arguments that it requires.

    ``y_key`` or ``e_key`` is always required. ``given`` holds all arguments of :func:`benchmark` by name.
    """
    if given["y_key"] is None and given["e_key"] is None:
        msg = "Nothing to measure: give e_key or y_key."
        raise ValueError(msg)
    for what in ("net", "label_key", "replicates"):
        needs = next(metric.needs for metric in METRICS.values() if what in metric.needs)
        missing = [key for key in needs if not _is_given(given[key])]
        if _is_given(given[what]) and missing:
            msg = f"{what} needs {' and '.join(missing)}."
            raise ValueError(msg)


def check_reference_keys(reference: str | None, representations: Sequence[str], n_bootstrap: int) -> None:
    """Raise a ``ValueError`` unless every embedding can be compared with an embedding of the reference representation.

    The comparison requires bootstrap samples. The reference must have either one embedding, or as many embeddings (for
    example one per training seed) as every other representation.

    Parameters
    ----------
    reference
        Name of the reference representation; `None` if there is no reference.
    representations
        For each embedding, the name of the representation that it belongs to.
    n_bootstrap
        Number of bootstrap samples.
    """
    if reference is None:
        return
    if not n_bootstrap:
        msg = "reference needs n_bootstrap, such as 200: differences are tested over resamples."
        raise ValueError(msg)
    _check_reference(reference, representations)


def _check_reference(reference: str, representations: Iterable[str]) -> None:
    """Raise a ``ValueError`` unless the reference has one embedding, or as many as every other representation."""
    n_keys = pd.Series(representations).value_counts(sort=False)
    if reference not in n_keys:
        msg = f"reference={reference!r} is no representation here; there are: {', '.join(n_keys.index)}."
        raise ValueError(msg)
    if n_keys[reference] > 1 and (odd := n_keys[n_keys != n_keys[reference]]).size:
        msg = (
            f"{odd.index[0]!r} has {odd.iloc[0]} keys and the reference {reference!r} has {n_keys[reference]}: seeds "
            "are compared in pairs, so give as many of both, or one of the reference."
        )
        raise ValueError(msg)


def _report_frame(
    measured: Sequence[tuple[Embedding, dict[tuple[str, str], EstimatedScore]]],
    n_bootstrap: int,
    reference: str | None,
) -> pd.DataFrame:
    """Return the result of :func:`benchmark`, a frame with one row per score and embedding.

    ``measured`` holds one pair per embedding: the embedding, and a dictionary of its scores. A key of the dictionary is
    the name of the metric and the score's own name.
    """
    others = [scores for embedding, scores in measured if embedding.representation == reference]
    places: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for (representation, key, _), scores in measured:
        for (name, own), score in scores.items():
            row: dict[str, Any] = {"metric": _join_score_name(name, own), "representation": representation, "key": key}
            row |= {"value": score.value, "chance": score.chance, "better": METRICS[name].better}
            if n_bootstrap:
                # confidence intervals are clipped to the range from 0 to 1, in which all scores with bootstrap samples
                # lie
                row["low"], row["high"] = np.clip(score.interval(_INTERVAL_LEVEL), 0, 1)
            if others:
                apart = score.minus(others[min(places[representation], len(others) - 1)][name, own])
                row["difference"] = apart.value
                row["difference_low"], row["difference_high"] = apart.interval(_INTERVAL_LEVEL)
                row["p_value"] = apart.p_value()
            rows.append(row)
        places[representation] += 1
    return pd.DataFrame(rows)


def nets_by_name(net: pd.DataFrame | Mapping[str, pd.DataFrame] | None) -> Mapping[str, pd.DataFrame]:
    """Return networks of gene relations as a mapping from names to frames; a single network has the name ``""``."""
    return net if isinstance(net, Mapping) else {} if net is None else {"": net}


def name_with_net(metric: str, name: str) -> str:
    """Return the name of a score, followed by the name of its network of gene relations in parentheses.

    An example is ``area (corum)``. If the name of the network is empty, the name of the score is returned unchanged.
    """
    return f"{metric} ({name})" if name else metric


def probe_scores(embedding: Any, labels: Any, *, n_bootstrap: int, seed: int, **how: Any) -> dict[str, EstimatedScore]:
    """Compute F1, AUROC and accuracy of a classifier that predicts labels from an embedding.

    The classifier is trained and tested as in :func:`scbd.metrics.label_probe`. F1 and accuracy have bootstrap samples;
    AUROC has none.
    """
    found = run_probe(embedding, labels, max_cells=_MAX_CELLS, seed=seed, **how)
    scores, draws = found.scores, found.bootstrap_scores(n_bootstrap, seed)
    of_units: dict[str, Any] = {"n_units": len(np.unique(found.units)), "is_mean": True}
    return {
        "f1": EstimatedScore(scores["f1"], scores["chance_f1"], draws["f1"], **of_units),
        "auroc": EstimatedScore(scores["auroc"], _CHANCE_AUROC),
        "accuracy": EstimatedScore(scores["accuracy"], np.nan, draws["accuracy"], **of_units, is_fraction=True),
    }


def retrieval_scores(found: Retrieval, n_bootstrap: int, seed: int) -> dict[str, EstimatedScore]:
    """Return the mean average precision of a retrieval, and the fraction of perturbations with a q value below 0.05."""
    return {
        "map": mean_score(found.table, n_bootstrap, seed, found.units),
        "called": EstimatedScore(found.n_called / len(found.table)),
    }


def replicate_scores(found: Retrieval, n_bootstrap: int, seed: int) -> dict[str, EstimatedScore]:
    """Return the scores of a replicate retrieval, see :func:`replicate_retrieval`.

    The floor (score of plate positions alone) and the cross-position score (replicates at other plate positions) are
    included if they were computed.
    """
    scores = retrieval_scores(found, n_bootstrap, seed)
    if len(found.floor_table):
        scores["floor"] = mean_score(found.floor_table, n_bootstrap, seed)
        # The expected score of noise is not 0 if perturbations and plate positions of controls differ in their numbers
        # of positives and negatives. A random order then has different average precisions for both.
        floor = float(found.floor_table["chance"].mean())
        chance = (found.chance - floor) / (1 - floor) if floor < 1 else np.nan
        scores["floor_corrected"] = EstimatedScore(found.floor_corrected, chance)
    if len(found.cross_position_table):
        scores["cross_position"] = mean_score(found.cross_position_table, n_bootstrap, seed)
    return scores


def mean_score(table: pd.DataFrame, n_bootstrap: int, seed: int, units: np.ndarray | None = None) -> EstimatedScore:
    """Return the mean average precision over the rows of a retrieval table, with bootstrap samples over units.

    A unit is a group of rows that are resampled together. Each bootstrap sample draws units with replacement, as many
    as there are units. ``units`` holds the unit of each row as an integer code or a label; by default, each row is a
    unit of its own.
    """
    values, rng = table["average_precision"].to_numpy(), np.random.default_rng(seed)
    _, codes = np.unique(np.arange(len(values)) if units is None else units, return_inverse=True)
    size, total = np.bincount(codes), np.bincount(codes, values)
    drawn = rng.integers(len(size), size=(n_bootstrap, len(size)))
    draws = total[drawn].sum(axis=1) / size[drawn].sum(axis=1)
    # The effective number of units is lower than the number of units if some units have many more rows than others.
    n_units = float(size.sum() ** 2 / (size**2).sum())
    return EstimatedScore(float(values.mean()), float(table["chance"].mean()), draws, n_units, is_mean=True)


def summarise(frame: pd.DataFrame, *, reference: str | None = None) -> pd.DataFrame:
    """Compute mean and standard deviation of each score over the keys (training seeds) of each representation.

    Parameters
    ----------
    frame
        Result of :func:`benchmark`, or several such frames concatenated. If the frame has a column ``fold``, the folds
        of each key are averaged first, because models of different folds share most of their training cells and are not
        independent like seeds.
    reference
        Name of the representation that all other representations are compared with, by a paired t test over seeds. The
        reference must have either a single key, or as many keys as the representation that is compared with it; keys
        are then paired in their order. The score of a single key is treated as known exactly. Use a single key only for
        a representation without seeds, for example principal components of pixels. The single run of a trained model
        may be better than its average run by chance, which makes p values too small.

    Returns
    -------
    Frame with one row per metric and representation, and these columns:

    - ``metric`` and ``representation``: names of the score and of the representation
    - ``mean``: mean over keys. It is NaN if the score of any key, or of any fold, is NaN: a mean of the remaining
      scores would favour the runs that succeeded.
    - ``sd``: standard deviation over keys; NaN for a single key
    - ``n``: number of keys
    - ``chance``: expected score of an embedding without information, mean over keys
    - ``difference``, ``difference_sd`` and ``p_value``, with ``reference`` only: mean and standard deviation of the
      difference from the reference, and the p value of the paired t test. ``difference_sd`` and ``p_value`` are NaN for
      a single key.

    Raises
    ------
    ValueError
        If the frame lacks the reference, or if the reference has several keys, but not as many as a representation that
        is compared with it.

    Examples
    --------
    >>> frame = scbd.metrics.benchmark(adata, {"SCBD": "X_scbd_c"}, y_key="gene", e_key="well", n_neighbors=30)
    >>> scbd.metrics.summarise(frame).columns.to_list()
    ['metric', 'representation', 'mean', 'sd', 'n', 'chance']
    """
    if "chance" not in frame:
        frame = frame.assign(chance=np.nan)
    if "fold" in frame:
        # Concatenated frames of several training seeds may have the same key. If a fold occurs again under a key, it
        # belongs to another training run.
        key = ["metric", "representation", "key"]
        run = frame.groupby([*key, "fold"], dropna=False).cumcount().to_numpy()
        of_run = frame.assign(run=run).groupby([*key, "run"], sort=False, dropna=False)
        frame = of_run.agg({"value": _mean_with_nan, "chance": "mean"}).reset_index()
    grouped = frame.groupby(["metric", "representation"], sort=False)
    found = grouped["value"].agg(mean=_mean_with_nan, sd="std", n="size").assign(chance=grouped["chance"].mean())
    found["sd"] = found["sd"].mask(found["mean"].isna())
    if reference is not None:
        for _, representations in frame.groupby("metric", sort=False)["representation"]:
            _check_reference(reference, representations)
        values = {key: of_key.to_numpy(dtype=float) for key, of_key in grouped["value"]}
        found[["difference", "difference_sd", "p_value"]] = [
            _paired_difference(values[metric, name], values[metric, reference]) for metric, name in found.index
        ]
    return found.reset_index()


def _mean_with_nan(values: pd.Series) -> float:
    """Return the mean of all values, or NaN if any value is NaN; by default, pandas would skip NaN."""
    return float(values.mean(skipna=False))


def _paired_difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Return mean and standard deviation of the differences between two scores, and the p value of a paired t test.

    ``one`` and ``other`` hold the scores of each training seed. ``other`` may be a single score. The p value is 1 if
    all differences are 0, and 0 if all differences are equal but not 0.
    """
    difference = one - other
    mean, n = float(difference.mean()), len(difference)
    if n < 2:
        return mean, np.nan, np.nan
    sd = float(difference.std(ddof=1))
    if sd == 0:
        return mean, sd, float(mean == 0)
    return mean, sd, float(2 * stats.t.sf(abs(mean) / (sd / np.sqrt(n)), n - 1))


def styled(frame: pd.DataFrame, metrics: Sequence[str] | None = None, *, digits: int = 2) -> Any:
    """Format a benchmark as a table: scores as rows, representations as columns, the best value in bold.

    Rows are grouped into scores of biology (should be high), scores of batch (should be near chance) and other scores.
    An arrow after the name of a score shows the direction of better values. The last column is the expected score of an
    embedding without information. A representation with several keys (training seeds) is shown as ``mean ± sd``. A
    table wider than the page has its own scroll bar.

    Parameters
    ----------
    frame
        Result of :func:`benchmark`.
    metrics
        Scores that form the rows of the table, by their names in ``frame["metric"]``; ``frame["metric"].unique()``
        lists all of them. By default a short selection of the main scores. Within a group, rows have the given order.
    digits
        Number of decimal places, from 0 to 6. Scores of 10 and more, for example of ``effective_rank``, have one
        decimal place less.

    Returns
    -------
    :class:`pandas.io.formats.style.Styler`. Its ``data`` is the frame of texts, with the index ``(group, metric)``, one
    column per representation, and the column ``chance``.

    Raises
    ------
    ValueError
        If the frame lacks a metric, ``digits`` is not a whole number from 0 to 6, or a representation is called
        ``"chance"``.

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
    if digits > _MAX_DIGITS:
        msg = f"digits={digits}: give a number of decimal places from 0 to {_MAX_DIGITS}."
        raise ValueError(msg)
    mean, sd, chance = _pivot_summary(frame, metrics)
    if _CHANCE in mean.index:
        msg = "A representation is called 'chance', as is the last column of the table: give it another name."
        raise ValueError(msg)
    # sorted() is stable, so that scores of the same group stay in the given order
    order = sorted(mean, key=lambda metric: list(_GROUP_TITLES).index(find_metric(metric).side))
    arrows = [_ARROWS[find_metric(metric).better] for metric in order]
    badness = pd.DataFrame({metric: _distance_from_best(mean, chance, metric) for metric in order}, index=mean.index).T
    best = badness.eq(badness.min(axis=1), axis=0).assign(chance=False)
    text = pd.DataFrame(
        {name: [_score_text(mean.loc[name, m], sd.loc[name, m], digits) for m in order] for name in mean.index}
    )
    text[_CHANCE] = [_score_text(chance[metric], np.nan, digits) for metric in order]
    titles = [f"{score_title(metric)} {arrow}".strip() for metric, arrow in zip(order, arrows, strict=True)]
    text.index = pd.MultiIndex.from_arrays([[_GROUP_TITLES[find_metric(metric).side] for metric in order], titles])
    bold = np.where(best.to_numpy(), "font-weight: bold", "")
    key = [f"{arrow} {words}" for arrow, words in _ARROW_WORDS.items() if arrow in arrows]
    styler = text.style.apply(lambda _: bold, axis=None).set_table_attributes('class="dataframe"')
    styler = styler.set_table_styles(_TABLE_STYLES)
    return styler.set_caption(f"{'; '.join(key)}. The best is bold.") if key else styler


def _score_text(value: float, sd: float, digits: int) -> str:
    """Format a score as text, for example 0.93, or 0.93 ± 0.02 with its standard deviation.

    The text is empty if the score is NaN.
    """
    if np.isnan(value):
        return ""
    places = max(digits - 1, 0) if abs(value) >= 10 else digits
    return f"{value:.{places}f}" + ("" if np.isnan(sd) else f" ± {sd:.{places}f}")


def rank(frame: pd.DataFrame, metrics: Sequence[str] | None = None) -> pd.DataFrame:
    """Rank representations by the weighted mean of biology and batch scores, each on a scale from 0 to 1.

    A score of **biology** is scaled so that the value expected by chance is 0 and the best of the compared
    representations is 1. A score of **batch** is scaled so that the worst of the compared representations is 0 and the
    value expected by chance is 1. Chance is the score of an embedding without information about environments. The
    weights are 0.6 for biology and 0.4 for batch, as in published benchmarks of integration (Luecken et al., 2022).

    A rank hides the scores that it combines, and depends on the representations that are compared: read the scores
    first.

    Scores without a value for chance are not used. If a representation lacks a score, or if the score is NaN for any of
    its keys, it gets the worst value of this score among the representations. If the frame has ``effective_rank``,
    embeddings that have collapsed to a point come last, whether or not ``effective_rank`` is among ``metrics``.

    Parameters
    ----------
    frame
        Result of :func:`benchmark`.
    metrics
        Scores to rank by, by their names in ``frame["metric"]``; by default a short selection of the main scores.

    Returns
    -------
    Frame with one row per representation, the best first. Its columns are ``overall``, ``biology``, ``batch``, and each
    scaled score. A scaled score of biology is below 0 if it is worse than chance.

    Raises
    ------
    ValueError
        If the frame lacks a metric, or no metric can be used.

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
    mean, _, chance = _pivot_summary(frame, metrics)
    scaled = pd.DataFrame({m: _scale_scores(mean[m], float(chance[m]), m) for m in mean if np.isfinite(chance[m])})
    scaled = scaled.dropna(axis=1, how="all")
    # A missing score gets the worst value. Skipping missing scores would favour embeddings that could not be scored.
    scaled = scaled.fillna(scaled.min())
    own = {side: [metric for metric in scaled if find_metric(metric).side == side] for side in _WEIGHTS}
    sides = {side: scaled[metrics].mean(axis=1) for side, metrics in own.items() if metrics}
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


def _pivot_summary(frame: pd.DataFrame, metrics: Sequence[str] | None) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Return three summaries of the selected scores: mean, standard deviation, and the value expected by chance.

    Mean and standard deviation over keys are frames with one row per representation and one column per score. The value
    expected by chance is a series with one entry per score.
    """
    there = list(dict.fromkeys(frame["metric"]))
    if metrics is None:
        short = [_join_score_name(name, own) for name, metric in METRICS.items() for own in metric.headline]
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


def _distance_from_best(mean: pd.DataFrame, chance: pd.Series, metric: str) -> pd.Series:
    """Return one number per representation that is lowest for the representation with the best value of a score.

    All numbers are NaN if the score has no direction of better values.
    """
    better = find_metric(metric).better
    if better == "nearer to chance":
        by_chance = float(chance[metric])
        return (mean[metric] - (0.0 if np.isnan(by_chance) else by_chance)).abs()
    return mean[metric] * {"higher": -1, "lower": 1, "": np.nan}[better]


def _scale_scores(values: pd.Series, chance: float, metric: str) -> pd.Series:
    """Scale one score of all representations so that higher is better, as described in :func:`rank`.

    ``chance`` is the value of the score that is expected by chance.
    """
    if find_metric(metric).side == "biology":
        best = float(values.max())
        return (values - chance) / (best - chance) if best > chance else values * 0.0
    further = values - chance
    better = find_metric(metric).better
    away = further.abs() if better == "nearer to chance" else (further if better == "lower" else -further).clip(lower=0)
    return 1 - away / float(away.max()) if away.max() > 0 else away + 1.0
