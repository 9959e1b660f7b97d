"""Scores by which ``scbd.run`` chooses the best embedding: retrieval of replicates, and probes of the environment.

Retrieval of replicates is the task of finding profiles of the same perturbation in other environments by similarity. A
probe is a classifier that is trained on an embedding, here to predict the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.linear_maps import label_means
from scbd._workflows.compare import CONFIDENCE_LEVEL, PROBES, score_probe
from scbd.metrics._benchmark import EstimatedScore, mean_score
from scbd.metrics._probes import ProbeImpossible
from scbd.metrics._retrieval import profile_retrieval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scbd._workflows.candidates import CellLabels

    Embeddings = Mapping[str, np.ndarray]

SCORE_COLUMNS = ("embedding", "measure", "value", "low", "high", "chance", "better", "n", "unit")
# Number of bootstrap resamples of the perturbations, from which confidence intervals of retrieval scores are computed.
N_RESAMPLES = 2_000
# Minimum number of perturbations (or mechanisms) with replicates for which a retrieval task is used. If the data have
# fewer than ten perturbations (or mechanisms), half of these suffice, but at least two.
MIN_WITH_REPLICATES = 5
# Minimum fraction of perturbations with replicates at another position of the plate, among all perturbations with
# replicates. If the fraction is smaller, replicates at the same position count as well.
MIN_FRACTION_AT_OTHER_POSITIONS = 0.25
# Minimum number of held-out cells on which a probe (classifier) of the environment is tested. The cells are all
# controls, or all of one perturbation. With fewer cells, the environment is not predicted among them.
MIN_PROBED_CELLS = 20
# Maximum number of perturbations among whose cells the environment is predicted. These cells are used only if too few
# controls are held out.
MAX_PROBED_PERTURBATIONS = 5


class Measure(NamedTuple):
    """Scores of several embeddings by one measure of quality, all computed on the same cells."""

    words: str
    """Name of the measure, such as ``"average precision of the same gene in another well"``."""
    scores: Mapping[str, EstimatedScore]
    """Mapping from the name of each embedding to its score, with chance level and bootstrap resamples."""
    better: Literal["higher", "lower"]
    """Direction in which the measure improves: ``"higher"`` or ``"lower"`` values are better."""
    unit: Literal["perturbations", "cells"]
    """Kind of the units over which the score is averaged: perturbations, or single cells."""

    def table(self) -> pd.DataFrame:
        """Convert the scores to a table with one row per embedding.

        The columns are ``embedding``, ``measure`` (its name), ``value`` (the score), ``low`` and ``high`` (95 %
        confidence interval), ``chance``, ``better``, ``n`` (number of perturbations or cells over which the score is
        averaged) and ``unit`` (``"perturbations"`` or ``"cells"``).
        """
        rows = []
        for name, score in self.scores.items():
            low, high = np.clip(score.interval(CONFIDENCE_LEVEL), 0, 1)
            row = {"embedding": name, "measure": self.words, "value": score.value, "low": low, "high": high}
            rows.append(row | {"chance": score.chance, "better": self.better, "n": int(score.n_units)})
        return pd.DataFrame(rows).assign(unit=self.unit)


class Question(NamedTuple):
    """Retrieval task for profiles of held-out cells, such as finding the same gene in another well.

    A profile is the mean embedding of the held-out cells with equal labels. Each profile serves as a query once, and
    the other profiles are ranked by their similarity to the query. Positives are the profiles that should rank first,
    such as profiles of the same perturbation in another environment. Negatives are profiles of other perturbations.

    Labels are arrays ``(N,)`` with one value per cell.
    """

    words: str
    """Description of the positives in words, such as ``"the same gene in another well"``."""
    label: np.ndarray
    """Label ``(N,)`` that positives share with the query, such as the perturbation; "" for cells without one."""
    apart: Sequence[np.ndarray]
    """One or several labels ``(N,)``, such as the well; a positive must differ from the query in each of them."""
    within: np.ndarray
    """Label ``(N,)`` that divides cells into groups, such as the environment.

    Negatives of a query are taken only from groups that contain the query's value of :attr:`label`.
    """
    crosses_environments: bool
    """True if positives must lie in another environment than the query."""
    may_share_position: bool = False
    """True if positives may lie at the same plate position as the query; false if positions are not given."""
    relaxed: Question | None = None
    """Variant of the task that also allows positives at the plate position of the query; `None` if this task does."""


class AnsweredQuestion(NamedTuple):
    """Retrieval task with the scores of several embeddings."""

    question: Question
    """Retrieval task on which the embeddings are scored."""
    tables: Mapping[str, pd.DataFrame]
    """Mapping from the name of each embedding to its table of scores, with one row per perturbation.

    See :func:`scbd.metrics._retrieval.profile_retrieval` for the columns. The tables of all embeddings have the same
    rows. If the task is to find the same mechanism, there is one row per mechanism.
    """

    @property
    def labels(self) -> np.ndarray:
        """Perturbations (or mechanisms) that are scored, because they have replicates: the rows of :attr:`tables`."""
        return np.asarray(next(iter(self.tables.values())).index)

    def measure(self, rows: np.ndarray, group: str = "", *, seed: int) -> Measure:
        """Compute the mean average precision of each embedding over a group of perturbations.

        The bootstrap resamples of perturbations are the same for all embeddings, so that the difference between two
        embeddings has a confidence interval of its own.

        Parameters
        ----------
        rows
            Boolean mask of :attr:`labels`: the group of perturbations over which to average.
        group
            Description of the group in words, for the name of the measure, such as ``" that were not trained on"``.
        seed
            Seed of the bootstrap resamples.
        """
        scores = {name: mean_score(table[rows], N_RESAMPLES, seed) for name, table in self.tables.items()}
        perturbations = group and f", perturbations{group}"
        return Measure(f"average precision of {self.question.words}{perturbations}", scores, "higher", "perturbations")

    def gain(self, name: str, rows: np.ndarray, *, seed: int) -> EstimatedScore:
        """Compute by how much the mean average precision of an embedding exceeds chance.

        Parameters
        ----------
        name
            Name of the embedding.
        rows
            Boolean mask of :attr:`labels`: the group of perturbations over which to average.
        seed
            Seed of the bootstrap resamples.
        """
        table = self.tables[name][rows]
        table = table.assign(average_precision=table["average_precision"] - table["chance"], chance=0.0)
        return mean_score(table, N_RESAMPLES, seed)


def list_questions(labels: CellLabels) -> Iterator[Question]:
    """Yield the retrieval tasks that the labels of the cells allow, the preferred tasks first.

    Queries and positives are mean profiles of held-out cells. The tasks are to find:

    1. the same perturbation in another environment, first at another plate position and then at any position if
       positions are given; with several columns of environments, the column with the fewest environments comes first;
    2. another perturbation of the same mechanism, first in another environment and then anywhere;
    3. another guide (reagent) of the same perturbation;
    4. the same perturbation in another plate, well or batch, in columns that are not environments of the run.
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


def answer_questions(labels: CellLabels, embeddings: Embeddings) -> Iterator[AnsweredQuestion]:
    """Score all embeddings on the retrieval tasks that have enough replicates, preferred tasks first.

    See :func:`list_questions` for the tasks. A task is scored when it is requested from the iterator.

    Parameters
    ----------
    labels
        Labels of all cells.
    embeddings
        Embeddings ``(N, D)`` of all cells by name.

    Yields
    ------
    Retrieval task with the scores of the embeddings. Tasks with too few replicates are skipped (see
    :data:`MIN_WITH_REPLICATES` and :data:`MIN_FRACTION_AT_OTHER_POSITIONS`).
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
            tables = {name: _score_question(labels, question, z) for name, z in embeddings.items()}
            yield AnsweredQuestion(question, tables)


def _score_question(labels: CellLabels, question: Question, embedding: np.ndarray) -> pd.DataFrame:
    """Score an embedding on a retrieval task, and return a table with one row per perturbation (or mechanism).

    The embeddings of held-out cells with equal values of all labels of the task are averaged into profiles. The mean
    profile of the controls (of all profiles, if there are no controls) is subtracted from each profile.
    """
    keys = [question.label, labels.y, question.within, *question.apart]
    # A cell without a value of a label, such as a compound of unknown mechanism, has the text "" as this label. Cells
    # with an empty label are dropped.
    has_labels = np.logical_and.reduce([key != "" for key in keys])
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
    """Measure how well the environment can be predicted from embeddings, among cells of one perturbation.

    If cells of several perturbations were used, the perturbation could reveal the environment. Classifiers (probes) are
    therefore trained on controls among the training cells, and tested on held-out controls. If there are too few
    held-out controls, the five perturbations with the most held-out cells are used, one at a time, and the F1 is
    averaged over them. The score of an embedding is the highest F1 of three kinds of probes: linear, quadratic and
    nearest neighbours.

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
    Mapping from each column of environments to the scores of the embeddings. Columns for which there are too few cells
    are missing.
    """
    found = {}
    for column, e in labels.environments.items():
        groups = _probed_groups(labels, e)
        if not groups:
            continue
        cells = "controls" if labels.is_control[groups[0]].any() else f"cells of one {labels.y_name}"
        try:
            scores = {
                name: _highest_probe_score(np.asarray(z), e, groups, labels, seed) for name, z in embeddings.items()
            }
        except ProbeImpossible:
            continue
        found[column] = Measure(f"F1 of {column} among {cells}", scores, "lower", "cells")
    return found


def _probed_groups(labels: CellLabels, e: np.ndarray) -> list[np.ndarray]:
    """Choose the groups of cells within which the environment is predicted, and return their row numbers.

    If enough controls are held out, the controls are the only group. Otherwise, the cells of each of the five most
    frequent perturbations are a group, if enough of these cells are held out. From each group, cells are dropped if the
    group has no training cells in the environment of these cells.
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
    """Predict the environment ``e`` from an embedding ``z`` by three kinds of probes, and return the highest F1.

    Probes are linear, quadratic and nearest-neighbour classifiers. The F1 of each kind is averaged over groups of
    cells, each given by its row numbers.
    """
    means = []
    for kind in PROBES:
        of_groups = [
            score_probe(z[rows], e[rows], kind=kind, train=labels.is_train[rows], seed=seed)["f1"] for rows in groups
        ]
        value, chance, draws = (
            np.mean([getattr(s, part) for s in of_groups], axis=0) for part in EstimatedScore._fields[:3]
        )
        n_cells = sum(score.n_units for score in of_groups)
        means.append(of_groups[0]._replace(value=float(value), chance=float(chance), draws=draws, n_units=n_cells))
    return max(means, key=lambda score: score.value)


def predict_perturbations(labels: CellLabels, embeddings: Embeddings, *, seed: int) -> Measure | None:
    """Measure how well the perturbation of single held-out cells can be predicted from embeddings.

    It is predicted by a linear classifier (probe) that is trained on the embeddings of training cells.

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
    F1 of the prediction from each embedding; `None` if there are not at least two perturbations with training cells and
    held-out cells.
    """
    rows = np.flatnonzero(~labels.is_unseen)
    train = labels.is_train[rows]
    if min(len(pd.unique(labels.y[rows[part]])) for part in (train, ~train)) < 2:
        return None
    try:
        scores = {
            name: score_probe(np.asarray(z)[rows], labels.y[rows], kind="linear", train=train, seed=seed)["f1"]
            for name, z in embeddings.items()
        }
    except ProbeImpossible:
        return None
    return Measure(f"F1 of {labels.y_name}", scores, "higher", "cells")
