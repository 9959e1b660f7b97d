"""The paper's experiments by name: run what is missing, then make tables and figures from all rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from scbd._outputs import write_text
from scbd.paper import (
    _ablations,
    _bounds,
    _classifiers,
    _counterfactuals,
    _effect_pictures,
    _generalization,
    _hidden,
    _lengths,
    _long_run,
    _maps,
    _neighbours,
    _new_plates,
    _profiles,
    _rivals,
    _screens,
    _systems,
)
from scbd.paper._budgets import Budget
from scbd.paper._protocol import Protocol, as_authors
from scbd.paper._tables import settings_table
from scbd.workflows import DATASETS, Results, run_trials, with_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pandas as pd

    from scbd.paper._experiment import Experiment
    from scbd.workflows import Trial

logger = logging.getLogger(__name__)


EXPERIMENTS: dict[str, Experiment] = {
    **_generalization.EXPERIMENTS,
    **_ablations.EXPERIMENTS,
    **_long_run.EXPERIMENTS,
    **_bounds.EXPERIMENTS,
    **_maps.EXPERIMENTS,
    **_classifiers.EXPERIMENTS,
    **_systems.EXPERIMENTS,
    **_rivals.EXPERIMENTS,
    **_hidden.EXPERIMENTS,
    **_lengths.EXPERIMENTS,
    **_neighbours.EXPERIMENTS,
    **_counterfactuals.EXPERIMENTS,
    **_effect_pictures.EXPERIMENTS,
    **_screens.EXPERIMENTS,
    **_profiles.EXPERIMENTS,
    **_new_plates.EXPERIMENTS,
}


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
    ``rows.jsonl`` (a line a run, with everything needed to run it again, see :class:`scbd.workflows.Results`; until all
    are finished, a file a run in ``rows/``), ``table.md``, figures, and ``runs/`` with the training history of each.

    Parameters
    ----------
    name
        ``"cmnist"``, ``"camelyon17"``, ``"rxrx1"``, ``"pacs"``, ``"vlcs"`` (alpha against accuracy in and out of
        distribution); ``"cmnist-ablations"``, ``"camelyon17-ablations"``; ``"cmnist-long"`` (one long run);
        ``"cmnist-map"``, ``"screen-map"`` (regimes of alpha); ``"cmnist-alphas"``, ``"pacs-alphas"``,
        ``"screen-alphas"`` (what choosing alpha costs);
        ``"cmnist-variance"``, ``"screen-variance"`` (our form of invariance, with an oracle and the published form);
        ``"cmnist-systems"``, ``"camelyon17-systems"``, ``"pacs-systems"``, ``"vlcs-systems"``, ``"screen-systems"``
        (every system of the paper); ``"cmnist-lengths"``,
        ``"screen-lengths"`` (latent-variable models trained for longer); ``"screen-neighbours"`` (batches of any cells,
        and of stretches that a disk reads fast);
        ``"counterfactuals"`` (blocks exchanged and decoded); ``"screen"`` (simulated), ``"funk22"``,
        ``"funk22-systems"`` (every system of the paper), ``"funk22-cellprofiler"`` (batch correction); ``"cpjump1"``,
        ``"breinig2015"`` (feature tables), with ``"cpjump1-settings"`` (what was chosen on training plates) and
        ``"cpjump1-ablations"``.
    budget
        ``"smoke"``: minutes on two cores, to see that it works; ``"small"``: hours on two cores, small encoders;
        ``"paper"``: as published, for a GPU.
    protocol
        ``"authors"``: domain generalisation and batch correction as the code of the paper's authors has them, with
        half as many batches as steps, the weights of the lowest validation loss, and their one set of coloured digits;
        their head and their probe of the well are columns of every table anyway. See :doc:`/archive/originals`.
    path
        Files of the data set, see its loader in :mod:`scbd.datasets`.
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

    Examples
    --------
    >>> frame = scbd.paper.reproduce("cmnist", budget="small", path="data/mnist")  # hours  # doctest: +SKIP
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
