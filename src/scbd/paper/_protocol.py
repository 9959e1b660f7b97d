"""Experiments as the authors' code runs them: the same trials, trained and measured as there.

Their head and their probe of the well are columns of every row, beside ours. What is left is what this module changes:
how long, which weights are kept, and which digits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from scbd.workflows import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.workflows import Trial

Protocol = Literal["ours", "authors"]

# scored as the paper scores
_KNOWN = ("domain generalization", "batch correction", "batch correction of new cells")
# their digits are one data set: nothing of it can be chosen but whether it is coloured
_SUBSET, _FREE = {"n_train", "n_test"}, {"colored"}
# two optimisers, each of which raises the counter of steps
_OPTIMISERS = 2
# batches between two validations: their default, in whole passes over 48,000 digits
_VALIDATE_EVERY = {"colored_mnist": 4992}
_VALIDATE_EVERY_ELSEWHERE = 5000


def as_authors(name: str, trials: Sequence[Trial]) -> list[Trial]:
    """The trials of an experiment under the authors' protocol; what it does not touch stays the same trial.

    Raises
    ------
    ValueError
        If the experiment measures something else, or varies what they hold fixed.
    """
    if other := {trial.protocol for trial in trials} - set(_KNOWN):
        msg = (
            f"{name} has no protocol of the authors: it is of {', '.join(sorted(other))}; they have domain "
            "generalisation and batch correction. Use protocol='ours'."
        )
        raise ValueError(msg)
    # a subset and all of it are one there
    found = {trial.key: trial for trial in (_as_authors(name, trial) for trial in trials)}
    return list(found.values())


def _as_authors(name: str, trial: Trial) -> Trial:
    data, training = dict(trial.data), dict(trial.training)
    if trial.dataset == "colored_mnist":
        if varied := set(data) - _SUBSET - _FREE:
            msg = f"{name} varies {', '.join(sorted(varied))}, and the authors' digits are one data set: use another."
            raise ValueError(msg)
        data = {key: value for key, value in data.items() if key in _FREE} | {"protocol": "authors"}
    if trial.system in SYSTEMS and training.get("lr") != 0:  # nothing is chosen of what is never trained
        training |= {"load_best": True}
        if SYSTEMS[trial.system] is SYSTEMS["SCBD"]:
            training |= _counted(trial.dataset, training["max_steps"])
    return replace(trial, data=data, training=training)


def _counted(dataset: str, steps: int) -> dict[str, Any]:
    """Length of a run, and where it looks at validation cells, which it does at its end at the latest."""
    batches = max(1, steps // _OPTIMISERS)
    every = _VALIDATE_EVERY.get(dataset, _VALIDATE_EVERY_ELSEWHERE)
    return {"max_steps": batches} | ({"validate_every": every} if every < batches else {})
