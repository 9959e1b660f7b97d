"""Scores behind the verdict of a run: retrieval of replicates across environments, and probes of the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.linear_maps import label_means
from scbd._workflows.compare import CONFIDENCE_LEVEL, N_BOOTSTRAP_RESAMPLES, PROBES
from scbd.metrics._benchmark import EstimatedScore, mean_score, probe_scores
from scbd.metrics._retrieval import profile_retrieval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scbd._workflows.candidates import CellLabels

    Embeddings = Mapping[str, np.ndarray]

SCORE_COLUMNS = ("embedding", "measure", "value", "low", "high", "chance", "better", "n", "unit")
# number of bootstrap resamples of perturbations for the intervals of retrieval scores
N_RESAMPLES = 2_000
# minimum number of perturbations (or mechanisms) with replicates for a question to be answered; half of all if that is
# fewer
MIN_WITH_REPLICATES = 5
# minimum fraction of the perturbations with replicates that have replicates at other positions; if there are fewer,
# replicates at the same position count, too
MIN_FRACTION_AT_OTHER_POSITIONS = 0.25
# minimum number of held-out controls (or held-out cells of one perturbation) on which a probe of the environment is
# tested
MIN_PROBED_CELLS = 20
# maximum number of perturbations within which the environment is probed if there are too few controls
MAX_PROBED_PERTURBATIONS = 5


class Measure(NamedTuple):
    """Scores of several embeddings by one measure, on the same cells."""

    words: str
    """Name of the measure, such as ``"average precision of the same gene in another well"``."""
    scores: Mapping[str, EstimatedScore]
    """Score of each embedding, by name of the embedding."""
    better: Literal["higher", "lower"]
    """Direction in which the measure improves."""
    unit: Literal["perturbations", "cells"]
    """Units over which the score is an average."""

    def table(self) -> pd.DataFrame:
        """Return one row per embedding: ``embedding, measure, value, low, high, chance, better, n, unit``."""
        rows = []
        for name, score in self.scores.items():
            low, high = np.clip(score.interval(CONFIDENCE_LEVEL), 0, 1)
            row = {"embedding": name, "measure": self.words, "value": score.value, "low": low, "high": high}
            rows.append(row | {"chance": score.chance, "better": self.better, "n": int(score.n_units)})
        return pd.DataFrame(rows).assign(unit=self.unit)


class Question(NamedTuple):
    """A retrieval task for profiles of held-out cells.

    A profile is the mean embedding of the held-out cells with equal labels. Each profile is a query once, and other
    profiles are ranked by their similarity to it. Positives are the profiles that should rank first: they share a label
    with the query, and differ from it in others. Negatives are profiles with another label than the query.

    All labels below are arrays ``(N,)`` with one value per cell.
    """

    words: str
    """Description of the positives, such as ``"the same gene in another well"``."""
    label: np.ndarray
    """Label that a positive shares with the query; "" where it is missing."""
    apart: Sequence[np.ndarray]
    """Labels in each of which a positive differs from the query, such as the well."""
    within: np.ndarray
    """Groups of cells, such as environments. Negatives come from the groups that contain the query's label."""
    crosses_environments: bool
    """True if positives lie in another environment than the query."""
    may_share_position: bool = False
    """True if positions are given, and a positive may lie at the same position as the query."""
    relaxed: Question | None = None
    """The same question, but positives may lie at the position of the query; `None` if that is already allowed."""


class AnsweredQuestion(NamedTuple):
    """Retrieval scores of several embeddings for one question."""

    question: Question
    """The retrieval task."""
    tables: Mapping[str, pd.DataFrame]
    """Table of :func:`scbd.metrics._retrieval.profile_retrieval` for each embedding, all with the same rows."""

    @property
    def labels(self) -> np.ndarray:
        """Perturbations (or mechanisms, if the question is about these) that have positives: the rows of the tables."""
        return np.asarray(next(iter(self.tables.values())).index)

    def measure(self, rows: np.ndarray, group: str = "", *, seed: int) -> Measure:
        """Average the average precision of each embedding over some of the perturbations.

        All embeddings have the same bootstrap resamples of perturbations, so that their differences can be compared in
        pairs.

        Parameters
        ----------
        rows
            Boolean mask of the perturbations in :attr:`labels` over which to average.
        group
            Words that describe these perturbations, for the name of the measure.
        seed
            Seed of the resamples.
        """
        scores = {name: mean_score(table[rows], N_RESAMPLES, seed) for name, table in self.tables.items()}
        perturbations = group and f", perturbations{group}"
        return Measure(f"average precision of {self.question.words}{perturbations}", scores, "higher", "perturbations")

    def gain(self, name: str, rows: np.ndarray, *, seed: int) -> EstimatedScore:
        """Return the mean difference between the average precision of an embedding and chance.

        Parameters
        ----------
        name
            Name of the embedding.
        rows
            Boolean mask of the perturbations in :attr:`labels` over which to average.
        seed
            Seed of the bootstrap resamples.
        """
        table = self.tables[name][rows]
        table = table.assign(average_precision=table["average_precision"] - table["chance"], chance=0.0)
        return mean_score(table, N_RESAMPLES, seed)


def list_questions(labels: CellLabels) -> Iterator[Question]:
    """Yield the retrieval questions that the labels of a run allow, in order of preference.

    1. The same perturbation in another environment; at another position, if positions are given. Columns with few
       environments come first.
    2. Another perturbation of the same mechanism, in another environment or anywhere.
    3. Another guide (reagent) of the same perturbation.
    4. The same perturbation in another plate, well or batch that is not an environment of the run.
    """
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


def answer_first_question(labels: CellLabels, embeddings: Embeddings) -> AnsweredQuestion | None:
    """Score all embeddings on the first question for which enough perturbations have replicates.

    Parameters
    ----------
    labels
        Labels of all cells.
    embeddings
        Embeddings ``(N, D)`` of all cells by name.

    Returns
    -------
    The question with the scores of the embeddings; `None` if no question has enough replicates
    (:data:`MIN_WITH_REPLICATES`, :data:`MIN_FRACTION_AT_OTHER_POSITIONS`).
    """
    inputs = next(iter(embeddings.values()))
    scored = ~labels.is_train & ~labels.is_control
    for question in list_questions(labels):
        n_labels = len(pd.unique(question.label[scored & (question.label != "")]))
        needed: float = max(2, min(MIN_WITH_REPLICATES, -(-n_labels // 2)))
        if question.relaxed is not None:
            n_anywhere = len(_score_question(labels, question.relaxed, inputs))
            needed = max(needed, MIN_FRACTION_AT_OTHER_POSITIONS * n_anywhere)
        if len(_score_question(labels, question, inputs)) >= needed:
            return AnsweredQuestion(
                question, {name: _score_question(labels, question, z) for name, z in embeddings.items()}
            )
    return None


def _score_question(labels: CellLabels, question: Question, embedding: np.ndarray) -> pd.DataFrame:
    """Average the held-out cells into profiles, and score the retrieval of each label that has positives.

    A profile is the mean of the held-out cells with equal labels in all parts of the question, relative to the mean
    profile of the controls (of all profiles, if there are no controls).
    """
    keys = [question.label, labels.y, question.within, *question.apart]
    has_labels = np.logical_and.reduce([key != "" for key in keys])  # a mechanism may be missing
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
    """Predict the environment among cells of one perturbation, so that the perturbation does not reveal it.

    The score is the highest F1 of three probes (linear, quadratic and nearest neighbours). Probes are trained on the
    training cells of the controls and tested on held-out controls. If there are too few of these, cells of other
    perturbations are used: the five with the most held-out cells, one at a time, and the score is the mean F1.

    Parameters
    ----------
    labels
        Labels of all cells.
    embeddings
        Embeddings ``(N, D)`` of all cells by name.
    seed
        Seed of the probes.

    Returns
    -------
    One measure for each column of environments that has enough cells to be probed.
    """
    found = {}
    for column, e in labels.environments.items():
        groups = _probed_groups(labels, e)
        if not groups:
            continue
        cells = "controls" if labels.is_control[groups[0]].any() else f"cells of one {labels.y_name}"
        scores = {name: _highest_probe_score(np.asarray(z), e, groups, labels, seed) for name, z in embeddings.items()}
        found[column] = Measure(f"F1 of {column} among {cells}", scores, "lower", "cells")
    return found


def _probed_groups(labels: CellLabels, e: np.ndarray) -> list[np.ndarray]:
    """Return the row numbers of each group of cells within which an environment is probed.

    The only group is that of the controls, if enough of them are held out. Otherwise, each of the most frequent
    perturbations with enough held-out cells is a group.
    """

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


def _highest_probe_score(
    z: np.ndarray, e: np.ndarray, groups: Sequence[np.ndarray], labels: CellLabels, seed: int
) -> EstimatedScore:
    """Return the highest mean F1, over groups of rows, of a linear, a quadratic and a nearest-neighbour probe."""
    means = []
    for kind in PROBES:
        how: dict[str, Any] = {"kind": kind, "groups": None, "n_bootstrap": N_BOOTSTRAP_RESAMPLES, "seed": seed}
        of_groups = [probe_scores(z[rows], e[rows], train=labels.is_train[rows], **how)["f1"] for rows in groups]
        value, chance, draws = (
            np.mean([getattr(s, part) for s in of_groups], axis=0) for part in EstimatedScore._fields[:3]
        )
        n_cells = sum(score.n_units for score in of_groups)
        means.append(of_groups[0]._replace(value=float(value), chance=float(chance), draws=draws, n_units=n_cells))
    return max(means, key=lambda score: score.value)


def predict_perturbations(labels: CellLabels, embeddings: Embeddings, *, seed: int) -> Measure | None:
    """Predict the perturbation of single held-out cells by a linear probe that is trained on training cells.

    Parameters
    ----------
    labels
        Labels of all cells.
    embeddings
        Embeddings ``(N, D)`` of all cells by name.
    seed
        Seed of the probes.

    Returns
    -------
    F1 of each embedding; `None` if fewer than two perturbations have both training and held-out cells.
    """
    rows = np.flatnonzero(~labels.is_unseen)
    train = labels.is_train[rows]
    if min(len(pd.unique(labels.y[rows[part]])) for part in (train, ~train)) < 2:
        return None
    how: dict[str, Any] = {"kind": "linear", "groups": None, "n_bootstrap": N_BOOTSTRAP_RESAMPLES, "seed": seed}
    scores = {
        name: probe_scores(np.asarray(z)[rows], labels.y[rows], train=train, **how)["f1"]
        for name, z in embeddings.items()
    }
    return Measure(f"F1 of {labels.y_name}", scores, "higher", "cells")
