"""The verdict of ``scbd.run``: which of several embeddings is best, by which measure, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from scbd._workflows.compare import CONFIDENCE_LEVEL, MIN_HELD_OUT_CELLS, MIN_UNSEEN_PERTURBATIONS
from scbd._workflows.evidence import SCORE_COLUMNS, answer_questions, predict_environments, predict_perturbations

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from scbd._workflows.candidates import CellLabels
    from scbd._workflows.evidence import AnsweredQuestion, Measure
    from scbd.metrics._benchmark import EstimatedScore

# Difference in the score (average precision of retrieval) up to which two embeddings count as equally good. The simpler
# of two equally good embeddings is called best.
MARGIN = 0.01
# Largest permitted F1 above chance with which the environment is predicted from the best embedding, as a fraction of
# the F1 above chance with which the environment is predicted from the inputs. An embedding with a significantly larger
# F1 is not called best. The limit applies only if replicates lie in the same environment, because retrieval of
# replicates then does not show whether environments are mixed in the embedding.
MAX_ENVIRONMENT_KEPT = 0.5


class Verdict(NamedTuple):
    """The verdict of a run: the best of the compared embeddings, and the scores behind this choice."""

    best: str | None
    """Name of the best embedding; `None` if no score is above chance or if no score can be computed."""
    text: str
    """Sentences for the user: the best embedding, its lead over others, and how well it predicts environments.

    If no embedding is called best, the sentences state why.
    """
    notes: Sequence[str] = ()
    """Sentences for the user about limits of the scores."""
    scores: pd.DataFrame = pd.DataFrame(columns=list(SCORE_COLUMNS))
    """Table with one row per measure and embedding, see :meth:`scbd._workflows.evidence.Measure.table`."""
    replicates: pd.DataFrame = pd.DataFrame()
    """Average precision of retrieval, one row per perturbation and one column per embedding.

    The table is empty if too few perturbations have replicates.
    """


def judge_embeddings(labels: CellLabels, embeddings: Mapping[str, np.ndarray], *, seed: int = 0) -> Verdict:
    """Compare embeddings on held-out cells and name the best one.

    The score is the average precision with which mean profiles of held-out cells retrieve their replicates, such as the
    same perturbation in other environments (see :func:`scbd._workflows.evidence.list_questions`). If too few
    perturbations have replicates of any kind, embeddings are compared by classifiers of single cells (probes).

    Parameters
    ----------
    labels
        Labels of all cells.
    embeddings
        Embeddings ``(N, D)`` of all cells by name, in the order from simple to complex. The first one must be the
        inputs: the features, or principal components of the images.
    seed
        Seed of bootstrap resamples and probes.
    """
    n_held_out = int((~labels.is_train).sum())
    if n_held_out < MIN_HELD_OUT_CELLS:
        text = f"No embedding is called best: {n_held_out} cells were held out, and {MIN_HELD_OUT_CELLS} are needed."
        return Verdict(None, text)
    answers = answer_questions(labels, embeddings)
    found = next(answers, None)
    if found is None:
        return _judge_by_probes(labels, embeddings, seed)
    return _judge_by_retrieval(labels, found, answers, embeddings, seed)


def _judge_by_retrieval(
    labels: CellLabels,
    found: AnsweredQuestion,
    further: Iterator[AnsweredQuestion],
    embeddings: Mapping[str, np.ndarray],
    seed: int,
) -> Verdict:
    """Name the best embedding by the retrieval task ``found``, or by further tasks if the first does not decide."""
    groups = _groups_of_perturbations(labels, found)
    measures = {group: found.measure(rows, group, seed=seed) for group, rows in groups.items()}
    decisive, *others = measures
    scores = measures[decisive].scores
    considered, environments = list(scores), {}
    if not found.question.crosses_environments:
        environments = predict_environments(labels, embeddings, seed=seed)
        considered = _embeddings_without_environment(scores, environments)
    best = _choose_simplest_of_best({name: scores[name].value for name in considered})
    tie = None if found.question.label is not labels.y else _break_tie(labels, scores, considered, best, further, seed)
    if tie is not None:
        best = tie.best
    if found.question.crosses_environments:
        # Classifiers that predict the environment (probes) are slow to train, and the best embedding is already chosen
        # here. They are therefore trained only for the embeddings that the text of the verdict mentions.
        compared = {name: z for name, z in embeddings.items() if name in _compared_names(scores, best)}
        environments = predict_environments(labels, compared, seed=seed)
    shown = [*measures.values(), *([] if tie is None else [tie.measure]), *environments.values()]
    table = pd.concat([measure.table() for measure in shown], ignore_index=True)
    replicates = pd.DataFrame({name: each["average_precision"] for name, each in found.tables.items()})
    gain = found.gain(best, groups[decisive], seed=seed)
    if gain.value <= 0 or gain.interval(CONFIDENCE_LEVEL)[0] <= 0:
        text = (
            f"No embedding is called best: in held-out cells, none retrieves {found.question.words} above chance "
            f"(average precision {_format_scores(scores, scores)}; chance {scores[best].chance:.2f})."
        )
        return Verdict(None, text, (), table, replicates)
    text = (
        f"'{best}' is best: profiles (means of held-out cells) retrieve {found.question.words} with an average "
        f"precision of {scores[best].value:.2f} (chance {scores[best].chance:.2f}; {int(scores[best].n_units)} "
        f"perturbations{decisive}). {tie.text if tie else _describe_lead(scores, considered, best)}."
    )
    notes = [
        f"{measures[group].words}: {_format_scores(measures[group].scores, _compared_names(scores, best))}."
        for group in others
    ]
    notes += _notes_of_design(labels, found, scores, considered)
    return Verdict(best, f"{text} {_state_environments(labels, environments, best)}", notes, table, replicates)


class BrokenTie(NamedTuple):
    """Decision between embeddings whose scores on the first retrieval task differ too little to decide."""

    best: str
    """Name of the embedding that is best on the second task."""
    measure: Measure
    """Scores of all embeddings on the second task."""
    text: str
    """Part of the verdict that states both comparisons."""


def _break_tie(
    labels: CellLabels,
    scores: Mapping[str, EstimatedScore],
    considered: Collection[str],
    best: str,
    further: Iterator[AnsweredQuestion],
    seed: int,
) -> BrokenTie | None:
    """Choose by mechanism between embeddings whose order in retrieving replicates is uncertain.

    Replicates of a compound often lie on plates of one week. An embedding that shows the week then finds them more
    easily. Perturbations with the same mechanism usually lie in several weeks.

    Parameters
    ----------
    labels
        Labels of all cells.
    scores
        Scores of all embeddings in retrieving replicates.
    considered, best
        Names of the embeddings to choose from, and of the one with the best score.
    further
        The less preferred retrieval tasks, with the scores of all embeddings.
    seed
        Seed of bootstrap resamples.

    Returns
    -------
    The decision. `None` if mechanisms are not given or have too few perturbations, or if no embedding of uncertain
    order is significantly better than ``best`` at retrieving the mechanism.
    """
    tied = [name for name in considered if not scores[best].minus(scores[name]).interval(CONFIDENCE_LEVEL)[0] > 0]
    mechanisms = list((labels.mechanisms or {}).values())
    is_mechanism = (each for each in further if any(each.question.label is label for label in mechanisms))
    found = next(is_mechanism, None) if mechanisms and len(tied) > 1 else None
    if found is None:
        return None
    measure = found.measure(np.ones(len(found.labels), dtype=bool), seed=seed)
    leader = _choose_simplest_of_best({name: measure.scores[name].value for name in tied})
    low, high = measure.scores[leader].minus(measure.scores[best]).interval(CONFIDENCE_LEVEL)
    if leader == best or not low > 0:
        return None
    difference = measure.scores[leader].value - measure.scores[best].value
    text = (
        f"'{best}' has {scores[best].value:.2f}, but the order of the two is uncertain, and '{leader}' retrieves "
        f"{found.question.words} with {measure.scores[leader].value:.2f}, '{best}' with "
        f"{measure.scores[best].value:.2f}, a difference of {difference:.2f} (95 % interval {low:.2f} to {high:.2f})"
    )
    return BrokenTie(leader, measure, text)


def _groups_of_perturbations(labels: CellLabels, found: AnsweredQuestion) -> dict[str, np.ndarray]:
    """Group the scored perturbations into unseen ones (without training cells) and seen ones (with training cells).

    The first group decides which embedding is best. It consists of the unseen perturbations if there are enough of
    them, otherwise of all perturbations.

    Returns
    -------
    Mapping from the description of each group, such as ``" that were not trained on"``, to a boolean mask of the scored
    perturbations (``found.labels``). The description of all perturbations is "".
    """
    every = np.ones(len(found.labels), dtype=bool)
    unseen = np.isin(found.labels, pd.unique(labels.y[labels.is_unseen]))
    if found.question.label is not labels.y or not unseen.any():
        return {"": every}
    parts = {" that were not trained on": unseen, " that were trained on": ~unseen}
    parts = {group: rows for group, rows in parts.items() if rows.any()}
    return parts if unseen.sum() >= MIN_UNSEEN_PERTURBATIONS else {"": every} | parts


def _choose_simplest_of_best(scores: Mapping[str, float]) -> str:
    """Return the name of the simplest embedding whose score is within 0.01 (:data:`MARGIN`) of the highest score.

    ``scores`` lists embeddings in the order from simple to complex.
    """
    return next(name for name, score in scores.items() if score >= max(scores.values()) - MARGIN)


def _embeddings_without_environment(names: Collection[str], environments: Mapping[str, Measure]) -> list[str]:
    """Return the names of the embeddings from which the environment is not predicted too well.

    For each column of environments, the F1 above chance of the prediction must not be significantly larger than half of
    the F1 above chance for the inputs. If no embedding fulfils this condition, the names of all embeddings are
    returned.

    Parameters
    ----------
    names
        Names of the embeddings to choose from.
    environments
        Mapping from each column of environments to the F1 of its prediction from each embedding.
    """

    def keeps(measure: Measure, name: str) -> bool:
        inputs = next(iter(measure.scores.values()))
        limit = inputs.chance + MAX_ENVIRONMENT_KEPT * max(0.0, inputs.value - inputs.chance)
        score = measure.scores[name]
        # The confidence interval is NaN if the environment of every cell is predicted correctly. A comparison with NaN
        # is false, so that "not ... <=" is true for such an embedding.
        return score.value > limit and not score.interval(CONFIDENCE_LEVEL)[0] <= limit

    mixing = [name for name in names if not any(keeps(measure, name) for measure in environments.values())]
    return mixing or list(names)


def _compared_names(names: Collection[str], best: str) -> list[str]:
    """Return the names of the embeddings that the verdict mentions: the best one, z_c, and the inputs.

    The first name in ``names`` must be that of the inputs. Embeddings that are not in ``names`` are not returned.
    """
    return [name for name in dict.fromkeys([best, "z_c", next(iter(names))]) if name in names]


def _format_scores(scores: Mapping[str, EstimatedScore], names: Collection[str]) -> str:
    return ", ".join(f"'{name}' {scores[name].value:.2f}" for name in dict.fromkeys(names) if name in scores)


def _describe_lead(scores: Mapping[str, EstimatedScore], considered: Collection[str], best: str) -> str:
    """Word the part of the verdict that compares the score of the best embedding with those of other embeddings.

    The best embedding is compared with all embeddings whose score is within 0.01 (:data:`MARGIN`) of its own, with the
    next best embedding, with the best of the corrected and uncorrected inputs, and with the uncorrected inputs.
    """
    own, inputs = scores[best].value, next(iter(scores))
    rivals = sorted((name for name in considered if name != best), key=lambda name: -scores[name].value)
    # The names of corrected inputs begin with the name of the inputs, as in "features, sphered" and "features".
    of_inputs = [name for name in rivals if name.startswith(inputs)]
    equal = [name for name in rivals if scores[name].value >= own - MARGIN]
    parts = [f"Within {MARGIN:g} of it: {_format_scores(scores, equal)}"] if equal else []
    lower = [name for name in rivals if name not in equal]
    compared = {*lower[:1], *of_inputs[:1], inputs}
    for name in (name for name in lower if name in compared):
        low, high = scores[best].minus(scores[name]).interval(CONFIDENCE_LEVEL)
        certain = "" if low > 0 else ", so the order of the two is uncertain"
        parts.append(
            f"'{name}' has {scores[name].value:.2f}, a difference of {own - scores[name].value:.2f} (95 % interval "
            f"{low:.2f} to {high:.2f}{certain})"
        )
    return "; ".join(parts) or "No other embedding was compared"


def _state_environments(labels: CellLabels, environments: Mapping[str, Measure], best: str) -> str:
    """Word the sentence of the verdict on how well the environment is predicted from the embeddings.

    The embeddings are the best one, z_c and the inputs. All columns of environments are mentioned.
    """
    if not environments:
        names = " or ".join(labels.environments)
        return f"How well {names} can be predicted from it was not measured, as too few cells were held out."
    parts = []
    for column, measure in environments.items():
        shown = _compared_names(measure.scores, best)
        cells = measure.words.partition(" among ")[2]
        values = ", ".join(
            f"{measure.scores[name].value:.2f} from '{name}' (chance {measure.scores[name].chance:.2f})"
            for name in shown
        )
        parts.append(f"the {column} of {cells} is predicted with an F1 of {values}")
    text = "; ".join(parts)
    return (
        f"{text[0].upper()}{text[1:]}; lower is better. F1 is that of the best of a linear, a quadratic and a "
        "neighbour classifier."
    )


def _notes_of_design(
    labels: CellLabels, found: AnsweredQuestion, scores: Mapping[str, EstimatedScore], considered: Collection[str]
) -> list[str]:
    """Return sentences on limits of the verdict that follow from the design of the experiment.

    An example is a design in which replicates lie at the same position of the plate, so that effects of the position
    may count as effects of the perturbation.
    """
    notes, question = [], found.question
    environments = " or ".join(labels.environments)
    if question.label is labels.y and not labels.is_unseen.any():
        notes.append(
            f"Every {labels.y_name} was trained on (with other cells), which favours embeddings that learn from labels "
            f"(z_c, WCCN, ERM): their lead may be smaller for a new {labels.y_name}. With 30 perturbations or more, a "
            "fifth of the perturbations is held out automatically."
        )
    if question.may_share_position:
        notes.append(
            f"Replicates may lie at the same position of the plate: effects of position may count as effects of "
            f"{labels.y_name}."
        )
    if not question.crosses_environments:
        notes.append(
            f"Too few perturbations lie in more than one {environments} to be retrieved across {environments}: the "
            "average precision does not show whether these are mixed."
        )
    if excluded := [name for name in scores if name not in considered]:
        notes.append(f"Not considered, as they keep {environments}: {_format_scores(scores, excluded)}.")
    return notes


def _judge_by_probes(labels: CellLabels, embeddings: Mapping[str, np.ndarray], seed: int) -> Verdict:
    """Name the best embedding by classifiers of single cells (probes), if too few perturbations have replicates.

    The score of an embedding is the F1 with which the perturbation is predicted from it, minus the F1 with which the
    environment is predicted among controls (or among cells of one perturbation, if there are too few controls). With
    several columns of environments, the mean of their F1 is subtracted; columns with too few cells are ignored. Each F1
    is first rescaled so that chance is 0 and a perfect prediction is 1.

    The F1 of the environment is subtracted because perturbation and environment may be confounded: if wells of
    different perturbations differ no more than wells of controls do, the differences do not show effects of the
    perturbations.
    """
    names = " or ".join(labels.environments)
    why = f"Too few perturbations have replicates in another {names}, at another place or with the same mechanism"
    measure = predict_perturbations(labels, embeddings, seed=seed)
    if measure is None:
        return Verdict(None, f"No embedding is called best. {why}.")
    environments = predict_environments(labels, embeddings, seed=seed)
    table = pd.concat([each.table() for each in (measure, *environments.values())], ignore_index=True)

    def beyond_chance(score: EstimatedScore) -> float:
        return max(0.0, score.value - score.chance) / (1 - score.chance)

    net = {name: beyond_chance(score) for name, score in measure.scores.items()}
    for each in environments.values():
        for name in net:
            net[name] -= beyond_chance(each.scores[name]) / len(environments)
    best = _choose_simplest_of_best(net)
    chance, low = measure.scores[best].chance, measure.scores[best].interval(CONFIDENCE_LEVEL)[0]
    listed = f"F1 of {labels.y_name}: {_format_scores(measure.scores, measure.scores)}; chance {chance:.2f}"
    if net[best] <= 0 or low <= chance:
        text = f"No embedding is called best: none shows more of {labels.y_name} than of {names} ({listed})."
        return Verdict(None, text, (f"{why}.",), table)
    less = f", less that of {names} among controls" if environments else ""
    text = f"'{best}' is best by probes of single held-out cells, which predict {labels.y_name}{less} ({listed})."
    notes = [f"{why}: this comparison is weak, as {labels.y_name} and {names} may be confounded."]
    return Verdict(best, f"{text} {_state_environments(labels, environments, best)}", notes, table)
