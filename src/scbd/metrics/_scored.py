"""Scores of one embedding, each with what chance gives and how sure it is: what a report has a row for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from scipy import stats

from scbd.metrics._mixing import batch_mixing
from scbd.metrics._probes import probed
from scbd.metrics._relationship_chance import relationship_chance
from scbd.metrics._relationship_interval import resampled_scores
from scbd.metrics._relationships import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics._resampling import Score, interval, p_value

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scbd.metrics._retrieval_result import ReplicateRetrieval, Retrieval

# chance of the areas of a curve that no label is hit by
_EVEN = 0.5
_TAIL = 0.05
# draws that differ by less are equal
_ROUNDING = 1e-12
_NO_DRAWS = np.empty(0)


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


def relationship_scores(relations: Relations, n_bootstrap: int, seed: int) -> dict[str, Scored]:
    """Area, recall and average precision of known relations."""
    values = {
        "area": relationship_area(relationship_curve(relations)),
        "recall": relationship_recall(relations),
        "average_precision": relationship_average_precision(relations),
    }
    chance = relationship_chance(relations)
    draws: dict[str, dict[str, Any]] = {}
    for score in get_args(Score) if n_bootstrap else ():
        (found,), n_units = resampled_scores([relations], score, _TAIL, n_bootstrap, seed)
        draws[score] = {"draws": found[1:], "n_units": n_units}
    return {name: Scored(value, chance[name], **draws.get(name, {})) for name, value in values.items()}


def probe_scores(embedding: Any, labels: np.ndarray, *, n_bootstrap: int, seed: int, **how: Any) -> dict[str, Scored]:
    """F1, area and accuracy of :func:`scbd.metrics.label_probe`."""
    found = probed(embedding, labels, seed=seed, **how)
    chance = {"f1": found.scores["chance_f1"], "auroc": _EVEN}
    draws = found.resampled(n_bootstrap, seed) if n_bootstrap else {}
    n_units = len(np.unique(found.units))
    return {
        name: Scored(value, chance.get(name, np.nan), draws.get(name, _NO_DRAWS), n_units, True, name == "accuracy")
        for name, value in found.scores.items()
        if name != "chance_f1"
    }


def mixing_scores(adata: AnnData, key: str, e_key: Any, **how: Any) -> dict[str, Scored]:
    """Of :func:`scbd.metrics.batch_mixing`."""
    found = batch_mixing(adata, key, e_key, **how)
    expected = {name: f"{name.removesuffix('_neighbours')}_expected" for name in found}
    return {name: Scored(found[name], found[by]) for name, by in expected.items() if by in found}


def retrieval_scores(found: Retrieval, n_bootstrap: int, seed: int) -> dict[str, Scored]:
    """Mean average precision of :func:`scbd.metrics.retrieval`; how many perturbations are called."""
    return {
        "map": _mean(found.table, n_bootstrap, seed, found.units),
        "called": Scored(found.n_called / len(found.table)),
    }


def replicate_scores(found: ReplicateRetrieval, n_bootstrap: int, seed: int) -> dict[str, Scored]:
    """The same of :func:`scbd.metrics.replicate_retrieval`, with floor and cross-position where positions are known."""
    scores = retrieval_scores(found, n_bootstrap, seed)
    if len(found.floor_table):
        scores["floor"] = _mean(found.floor_table, n_bootstrap, seed)
        scores["floor_corrected"] = Scored(found.floor_corrected, _floor_corrected_chance(found))
    if len(found.cross_position_table):
        scores["cross_position"] = _mean(found.cross_position_table, n_bootstrap, seed)
    return scores


def _floor_corrected_chance(found: ReplicateRetrieval) -> float:
    """Of noise: not 0 where perturbations and positions of controls have unequal numbers of wells to find."""
    floor = float(found.floor_table["chance"].mean())
    return (found.chance - floor) / (1 - floor) if floor < 1 else np.nan


def prefixed(prefix: str, scores: Mapping[str, Scored]) -> dict[str, Scored]:
    """Scores by their names in a report."""
    return {f"{prefix}_{name}": score for name, score in scores.items()}


def _mean(table: pd.DataFrame, n_bootstrap: int, seed: int, units: np.ndarray | None = None) -> Scored:
    """Mean of perturbations, and of as many units of them drawn with replacement; each is one by default."""
    values, rng = table["average_precision"].to_numpy(), np.random.default_rng(seed)
    _, codes = np.unique(np.arange(len(values)) if units is None else units, return_inverse=True)
    size, total = np.bincount(codes), np.bincount(codes, values)
    drawn = rng.integers(len(size), size=(n_bootstrap, len(size)))
    draws = total[drawn].sum(axis=1) / size[drawn].sum(axis=1)
    # a few large units among small ones are as few as they weigh
    n_units = float(size.sum() ** 2 / (size**2).sum())
    return Scored(float(values.mean()), float(table["chance"].mean()), draws, n_units, is_mean=True)
