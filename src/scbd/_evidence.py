"""Scores that the verdict of a run rests on: replicates retrieved across environments, and environments predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from scbd._compare import LEVEL, N_BOOTSTRAP, PROBES
from scbd._linear_maps import label_means
from scbd.metrics._benchmark import Scored, mean_score, probe_scores
from scbd.metrics._retrieval import profile_retrieval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scbd._candidates import CellLabels

    Embeddings = Mapping[str, np.ndarray]

SCORE_COLUMNS = ("embedding", "measure", "value", "low", "high", "chance", "better", "n", "unit")
# resamples of perturbations, of which there may be few
N_RESAMPLES = 2_000
# perturbations that must have replicates for a question to be answered, or half of all where these are fewer
MIN_WITH_REPLICATES = 5
# share of the perturbations with replicates that must have them at other positions, to be judged by those alone
MIN_SHARE_AT_OTHER_POSITIONS = 0.25
# controls, or other cells of one perturbation, that a probe of the environment is tested on, at least
MIN_PROBED_CELLS = 20
# perturbations within which the environment is probed where there are too few controls
MAX_PROBED_PERTURBATIONS = 5


class Measure(NamedTuple):
    """One score of several embeddings on the same cells."""

    words: str
    """Such as ``"average precision of the same gene in another well"``."""
    scores: Mapping[str, Scored]
    """One score per name of an embedding."""
    better: Literal["higher", "lower"]
    unit: Literal["perturbations", "cells"]
    """Units that the score is a mean of."""

    def table(self) -> pd.DataFrame:
        """Return one row per embedding: ``embedding, measure, value, low, high, chance, better, n, unit``."""
        rows = []
        for name, score in self.scores.items():
            low, high = np.clip(score.interval(LEVEL), 0, 1)
            row = {"embedding": name, "measure": self.words, "value": score.value, "low": low, "high": high}
            rows.append(row | {"chance": score.chance, "better": self.better, "n": int(score.n_units)})
        return pd.DataFrame(rows).assign(unit=self.unit)


class Question(NamedTuple):
    """A task for profiles of held-out cells: to retrieve others that share a label with them."""

    words: str
    """Such as ``"the same gene in another well"``."""
    label: np.ndarray
    """Label that a profile to be retrieved shares with the query, ``(N,)``; empty where missing."""
    apart: Sequence[np.ndarray]
    """Labels in each of which it differs from the query, ``(N,)``."""
    within: np.ndarray
    """Groups, such as environments: negatives come from those that hold the query's label, ``(N,)``."""
    crosses_environments: bool
    """True if the profile to be retrieved lies in another environment."""
    may_share_position: bool = False
    """True if positions are given, and it may lie at the position of the query."""
    relaxed: Question | None = None
    """The same question without the condition on positions."""


class AnsweredQuestion(NamedTuple):
    """Scores of the embeddings that answered a question."""

    question: Question
    tables: Mapping[str, pd.DataFrame]
    """By embedding, see :func:`scbd.metrics._retrieval.profile_retrieval`; all with the same rows."""

    @property
    def labels(self) -> np.ndarray:
        """Perturbations, or mechanisms, that have something to retrieve."""
        return np.asarray(next(iter(self.tables.values())).index)

    def measure(self, rows: np.ndarray, group: str = "", *, seed: int) -> Measure:
        """Average over some perturbations, resampled in pairs for all embeddings.

        Parameters
        ----------
        rows
            Mask of :attr:`labels`.
        group
            Words that distinguish them, for the name of the measure.
        seed
            Seed of the resamples.
        """
        scores = {name: mean_score(table[rows], N_RESAMPLES, seed) for name, table in self.tables.items()}
        perturbations = group and f", perturbations{group}"
        return Measure(f"average precision of {self.question.words}{perturbations}", scores, "higher", "perturbations")

    def gain(self, name: str, rows: np.ndarray, *, seed: int) -> Scored:
        """Return the average precision of one embedding above chance."""
        table = self.tables[name][rows]
        table = table.assign(average_precision=table["average_precision"] - table["chance"], chance=0.0)
        return mean_score(table, N_RESAMPLES, seed)


def questions(labels: CellLabels) -> Iterator[Question]:
    """List the questions that a design may answer, in order of preference."""
    y, name = labels.y, labels.y_name
    by_size = sorted(labels.environments.items(), key=lambda item: len(pd.unique(item[1])))
    coarsest = by_size[0][1]
    has_position = labels.position is not None
    for column, e in by_size:
        yield from _questions_of_replicates(labels, column, e, crosses_environments=True)
    for column, mechanism in (labels.mechanisms or {}).items():
        words = f"another {name} of the same {column}"
        for e_column, e in by_size:
            yield Question(f"{words} in another {e_column}", mechanism, (y, e), e, crosses_environments=True)
        yield Question(words, mechanism, (y,), coarsest, False, may_share_position=has_position)
    for column, guide in (labels.guides or {}).items():
        yield Question(f"another {column} of the same {name}", y, (guide,), coarsest, False, has_position)
    for column, place in (labels.places or {}).items():
        yield from _questions_of_replicates(labels, column, place, crosses_environments=False)


def _questions_of_replicates(
    labels: CellLabels, column: str, e: np.ndarray, *, crosses_environments: bool
) -> Iterator[Question]:
    words, y, position = f"the same {labels.y_name} in another {column}", labels.y, labels.position
    anywhere = Question(words, y, (e,), e, crosses_environments, may_share_position=position is not None)
    if position is not None:
        yield Question(f"{words} at another position", y, (e, position), e, crosses_environments, relaxed=anywhere)
    yield anywhere


def retrieve(labels: CellLabels, embeddings: Embeddings) -> AnsweredQuestion | None:
    """Answer the first question for which enough perturbations have replicates; `None` if there is none."""
    inputs = next(iter(embeddings.values()))
    scored = ~labels.is_train & ~labels.is_control
    for question in questions(labels):
        n_labels = len(pd.unique(question.label[scored & (question.label != "")]))
        needed: float = max(2, min(MIN_WITH_REPLICATES, -(-n_labels // 2)))
        if question.relaxed is not None:
            n_anywhere = len(_answer(labels, question.relaxed, inputs))
            needed = max(needed, MIN_SHARE_AT_OTHER_POSITIONS * n_anywhere)
        if len(_answer(labels, question, inputs)) >= needed:
            return AnsweredQuestion(question, {name: _answer(labels, question, z) for name, z in embeddings.items()})
    return None


def _answer(labels: CellLabels, question: Question, embedding: np.ndarray) -> pd.DataFrame:
    """Average held-out cells into profiles, and score the retrieval of each label that has something to retrieve."""
    keys = [question.label, labels.y, question.within, *question.apart]
    has_labels = np.logical_and.reduce([key != "" for key in keys])  # the mechanism of a compound may be unknown
    rows = np.flatnonzero(~labels.is_train & (labels.is_control | has_labels))
    codes = pd.DataFrame({i: pd.factorize(key[rows])[0] for i, key in enumerate(keys)})
    profile = codes.groupby([*codes]).ngroup().to_numpy()
    _, means, _ = label_means(np.asarray(embedding)[rows], profile)
    first = rows[np.unique(profile, return_index=True)[1]]
    is_control = labels.is_control[first]
    centre = means[is_control].mean(axis=0) if is_control.any() else means.mean(axis=0)
    return profile_retrieval(
        means - centre,
        question.label[first],
        apart=[key[first] for key in question.apart],
        within=question.within[first],
        is_control=is_control,
    )


def predict_environments(labels: CellLabels, embeddings: Embeddings, *, seed: int) -> dict[str, Measure]:
    """Predict each environment among cells of one perturbation, so that the perturbation cannot give it away.

    The score is the highest F1 of a linear, a quadratic and a neighbour probe on held-out controls; where these are
    few, its mean over the perturbations with the most held-out cells. Probes learn from training cells.

    Returns
    -------
    A measure for each environment that can be probed.
    """
    found = {}
    for column, e in labels.environments.items():
        groups = _probed_groups(labels, e)
        if not groups:
            continue
        cells = "controls" if labels.is_control[groups[0]].any() else f"cells of one {labels.y_name}"
        scores = {name: _strongest_probe(np.asarray(z), e, groups, labels, seed) for name, z in embeddings.items()}
        found[column] = Measure(f"F1 of {column} among {cells}", scores, "lower", "cells")
    return found


def _probed_groups(labels: CellLabels, e: np.ndarray) -> list[np.ndarray]:
    """Choose the rows within which an environment is probed: controls, or else each of some perturbations."""

    def rows_of(chosen: np.ndarray) -> np.ndarray:
        return np.flatnonzero(chosen & np.isin(e, pd.unique(e[chosen & labels.is_train])))

    def has_enough(rows: np.ndarray) -> bool:
        tested = e[rows[~labels.is_train[rows]]]
        return len(tested) >= MIN_PROBED_CELLS and len(pd.unique(tested)) > 1

    controls = rows_of(labels.is_control)
    if has_enough(controls):
        return [controls]
    seen = ~labels.is_train & ~labels.is_control & ~labels.is_unseen
    frequent = pd.Series(labels.y[seen]).value_counts().index[:MAX_PROBED_PERTURBATIONS]
    return [rows for name in frequent if has_enough(rows := rows_of(labels.y == name))]


def _strongest_probe(
    z: np.ndarray, e: np.ndarray, groups: Sequence[np.ndarray], labels: CellLabels, seed: int
) -> Scored:
    """Return the F1 of the probe with the highest mean over groups of rows."""
    means = []
    for kind in PROBES:
        how: dict[str, Any] = {"kind": kind, "groups": None, "n_bootstrap": N_BOOTSTRAP, "seed": seed}
        of_groups = [probe_scores(z[rows], e[rows], train=labels.is_train[rows], **how)["f1"] for rows in groups]
        value, chance, draws = (np.mean([getattr(s, part) for s in of_groups], axis=0) for part in Scored._fields[:3])
        n_cells = sum(score.n_units for score in of_groups)
        means.append(of_groups[0]._replace(value=float(value), chance=float(chance), draws=draws, n_units=n_cells))
    return max(means, key=lambda score: score.value)


def predict_perturbations(labels: CellLabels, embeddings: Embeddings, *, seed: int) -> Measure | None:
    """Predict the perturbation of single held-out cells by a linear probe; `None` if fewer than two can be tested."""
    rows = np.flatnonzero(~labels.is_unseen)
    train = labels.is_train[rows]
    if min(len(pd.unique(labels.y[rows[part]])) for part in (train, ~train)) < 2:
        return None
    how: dict[str, Any] = {"kind": "linear", "groups": None, "n_bootstrap": N_BOOTSTRAP, "seed": seed}
    scores = {
        name: probe_scores(np.asarray(z)[rows], labels.y[rows], train=train, **how)["f1"]
        for name, z in embeddings.items()
    }
    return Measure(f"F1 of {labels.y_name}", scores, "higher", "cells")
