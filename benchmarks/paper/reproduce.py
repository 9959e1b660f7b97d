"""The experiments by name: run what is missing, then make tables and figures from all rows."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from paper.datasets import DATASETS
from paper.grids import comparisons, environments, generalization, maps, pictures, profiles, real_images, screens, wells
from paper.grids.shared import Budget, Experiment
from paper.reports import settings_table
from paper.runner import run_trials, with_weights
from paper.systems import SYSTEMS
from paper.trials import Results
from scbd._shared.files import write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pandas as pd

    from paper.trials import Trial

logger = logging.getLogger(__name__)

Protocol = Literal["ours", "authors"]

# first those of the paper, in the order of its tables and figures (1; 2b; 4; appendix), then ours
_ORDER = """
cmnist cmnist-systems camelyon17 camelyon17-systems counterfactuals funk22 funk22-systems funk22-cellprofiler
pacs pacs-systems vlcs vlcs-systems cmnist-ablations camelyon17-ablations
cmnist-preset cmnist-variance cmnist-alphas pacs-alphas cmnist-long cmnist-map cmnist-lengths rxrx1 funk22-plates
screen screen-variance screen-alphas screen-map screen-systems screen-lengths screen-neighbours screen-rivals
screen-wells screen-drawn screen-titration screen-plates effect-pictures
cpjump1 cpjump1-settings cpjump1-ablations breinig2015 real-wells real-images
new-plates new-plates-cpjump1 hidden-cmnist hidden-screen hidden-cpjump1
"""
_FAMILIES = (generalization, comparisons, screens, profiles, pictures, maps, environments, wells, real_images)
_FOUND = {name: experiment for family in _FAMILIES for name, experiment in family.EXPERIMENTS.items()}
EXPERIMENTS: dict[str, Experiment] = {name: _FOUND[name] for name in _ORDER.split()}


def reproduce(
    name: str,
    *,
    budget: Budget = "smoke",
    protocol: Protocol = "ours",
    path: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    n_seeds: int | None = None,
    shard: tuple[int, int] = (1, 1),
    weights: str | os.PathLike[str] | None = None,
    report_only: bool = False,
) -> pd.DataFrame:
    """Run one of the paper's experiments, and make its tables and figures.

    Finished runs are kept: called again, it runs what is missing, and goes on where a run was interrupted. Writes
    ``rows.jsonl`` (a line a run, with everything needed to run it again, see :class:`paper.trials.Results`; until all
    are finished, a file a run in ``rows/``), ``table.md``, figures, and ``runs/`` with the training history of each.

    Parameters
    ----------
    name
        One of ``EXPERIMENTS``.
    budget
        ``"smoke"``: minutes on two cores, to see that it works; ``"small"``: hours on two cores, small encoders;
        ``"paper"``: as published, for a GPU.
    protocol
        ``"authors"``: domain generalisation and batch correction as the code of the paper's authors has them, with
        half as many batches as steps, the weights of the lowest validation loss, and their one set of coloured digits;
        their head and their probe of the well are columns of every table anyway. See ``notes/originals.md``.
    path
        Files of the data set, see its loader.
    out
        Directory, ``results/<name>-<budget>`` by default, with the protocol behind it if it is not ours.
    n_seeds
        Number of seeds in place of the budget's.
    shard
        ``(i, n)``: run every n-th trial of the grid only, for n processes that share ``out``.
    weights
        File to start encoders from, a state dict of torchvision's network of that name: at the paper's budget, PACS and
        VLCS have a ResNet-50 that has seen ImageNet. Rows name its digest. Give it to a report, too.
    report_only
        Run nothing; make tables and figures of what is there.

    Returns
    -------
    The rows of this experiment that are finished.

    Raises
    ------
    ValueError
        If a name is not known, an experiment has no such protocol, weights do not fit, files are needed and no path was
        given, or rows of another version are there; before anything is run.
    FileNotFoundError
        If the weights are not there, ``path`` does not hold the data set, or there is nothing to report.
    """
    for what, asked, known in (
        ("experiment", name, EXPERIMENTS),
        ("budget", budget, get_args(Budget)),
        ("protocol", protocol, get_args(Protocol)),
    ):
        if asked not in known:
            msg = f"There is no {what} {asked!r}: use one of {', '.join(known)}."
            raise ValueError(msg)
    if n_seeds is not None and n_seeds < 1:
        msg = f"n_seeds={n_seeds}: run at least one seed."
        raise ValueError(msg)
    out = default_out(name, budget, protocol) if out is None else Path(out)
    trials = EXPERIMENTS[name].trials(budget, n_seeds)
    trials = trials if protocol == "ours" else as_authors(name, trials)
    trials = trials if weights is None else with_weights(trials, weights)
    if not report_only:
        for dataset in {trial.dataset for trial in trials}:
            DATASETS[dataset].check_path(path)
        run_trials(trials, out, path=path, shard=shard, weights=weights)
    return written(name, trials, out)


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


def default_out(name: str, budget: str, protocol: str = "ours") -> Path:
    """Where results go that were given no place."""
    return Path("results") / "-".join([name, budget, *([] if protocol == "ours" else [protocol])])


def written(name: str, trials: Sequence[Trial], out: Path) -> pd.DataFrame:
    """Tables and figures of what is finished of an experiment's trials; their rows."""
    frame = finished(trials, out)
    if frame.empty:
        msg = f"{out} has no finished run of {name} at this budget: run some first."
        raise FileNotFoundError(msg)
    write_text(report(name, frame, out) + "\n", out / "table.md")
    logger.info("%d of %d runs are in %s.", len(frame), len(trials), out / "table.md")
    return frame


def report(name: str, frame: pd.DataFrame, out: Path) -> str:
    """Draw the figures of an experiment's rows; its tables, as Markdown."""
    return EXPERIMENTS[name].report(frame, out) + "\n\n" + settings_table(frame)


def finished(trials: Sequence[Trial], out: Path) -> pd.DataFrame:
    """Rows of these trials in their order; a directory may hold those of other grids, such as more seeds."""
    order = {trial.key: i for i, trial in enumerate(trials)}
    frame = Results(out).frame()
    if frame.empty:
        return frame
    frame = frame[frame["key"].isin(list(order))].sort_values("key", key=lambda keys: keys.map(order))
    if {"final_alpha", "alpha"} <= set(frame):  # of a number it says nothing new
        frame = frame.assign(final_alpha=frame["final_alpha"].where(frame["alpha"] == "auto"))
    return _with_controls(frame).dropna(axis="columns", how="all")


def _with_controls(frame: pd.DataFrame) -> pd.DataFrame:
    """Beside every row what the encoder that was never trained scores on the same data with the same seed."""
    scores = [score for score in ("r_c in", "r_c out") if score in frame]
    same = [name for name in ("dataset", "seed", "encoder", "test_environment") if name in frame]
    control = frame[frame["system"] == "random encoder"].drop_duplicates(same)
    control = control[same + scores].rename(columns={score: f"random encoder, {score}" for score in scores})
    return frame.merge(control, "left", on=same)
