"""Run the trials of a grid one after the other; what is finished is kept, what was interrupted goes on."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scbd._jobs import check_shard
from scbd._outputs import check_directory
from scbd.workflows._datasets import DATASETS
from scbd.workflows._protocols import PROTOCOLS
from scbd.workflows._provenance import versions
from scbd.workflows._rivals import NEEDED, RIVALS
from scbd.workflows._systems import FEATURES, SYSTEMS, is_computed
from scbd.workflows._trials import Results
from scbd.workflows._weights import begun, check_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd
    from anndata import AnnData

    from scbd.workflows._datasets import Dataset
    from scbd.workflows._trials import Trial

logger = logging.getLogger(__name__)


def run_trials(
    trials: Sequence[Trial],
    out: str | os.PathLike[str],
    *,
    path: str | os.PathLike[str] | None = None,
    shard: tuple[int, int] = (1, 1),
    weights: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Run what has no row yet.

    Parameters
    ----------
    trials
        The grid. Those of one data set and seed run together, since the data are then loaded once.
    out
        Directory: ``rows.jsonl`` with a line a finished trial (until all are, ``rows/`` with a JSON file each), and
        ``runs/`` with the history of each and the state of those that were interrupted, from which the next call goes
        on.
    path
        Files of the data set, where it has any. A trial does not name them: rows count for whatever files are given,
        and say of which cells they are in ``digest``.
    shard
        ``(i, n)``: run only every n-th trial of the grid, from the i-th (of 1 … n), for n processes or jobs of an array
        that share ``out``.
    weights
        File of weights that trials start from, which name its digest.

    Returns
    -------
    All rows in ``out``, see :meth:`Results.frame`.

    Raises
    ------
    ValueError
        If a name is not known, the shard is out of range, trials name other weights than are given, or a row of another
        version is there; before any is run.
    ImportError
        If a system needs a package that is not installed; before any is run.
    FileExistsError
        If ``out`` is a file.
    KeyboardInterrupt
        If interrupted; finished rows are kept.

    Warns
    -----
    UserWarning
        If rows in ``out`` are of systems that have since been changed, and so are not used; or of other cells than
        those that are loaded under the same name.

    Examples
    --------
    >>> data = {"n_cells": 600, "image_size": 32, "n_complexes": 3, "genes_per_complex": 2}
    >>> pcs = {"n_components": 8}
    >>> trial = scbd.workflows.Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, pcs)
    >>> frame = scbd.workflows.run_trials([trial], "grid")
    >>> len(frame)
    1
    """
    index, n_shards = shard
    check_shard(shard)
    _check_names(trials)
    check_weights(trials, weights)
    out = check_directory(out)
    results = Results(out)
    if left_out := results.left_out():
        msg = (
            f"Of the rows in {results.directory}, {len(left_out):,} belong to systems that have since been "
            "changed: they are kept, and not used."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    mine = list(trials)[index - 1 :: n_shards]
    todo = results.missing(mine)
    _check_packages(todo)
    logger.info("%d of %d trials are done.", len(mine) - len(todo), len(mine))
    looked_at: set[str] = set()
    for number, (trial, adata, digest) in enumerate(_with_data(todo, path), start=1):
        logger.info("Trial %d of %d: %s", number, len(todo), trial.key)
        if digest not in looked_at and results.digests(trial) - {digest}:
            msg = (
                f"Rows in {results.directory} are of other cells than those that are loaded now, under the same name: "
                "they are used all the same. Give another out for other files."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        looked_at.add(digest)
        run_trial(trial, adata, DATASETS[trial.dataset], results, out / "runs" / trial.key, digest, weights=weights)
    if not results.missing(trials):  # no other shard of this grid is still at work
        results.fold()
    return results.frame()


def _check_names(trials: Iterable[Trial]) -> None:
    """Raise a ValueError that names what there is, if a trial names what is not."""
    for trial in trials:
        systems = SYSTEMS | FEATURES | RIVALS
        for name, known, is_known in (
            (trial.dataset, DATASETS, trial.dataset in DATASETS),
            (trial.system, systems, trial.system in systems or is_computed(trial.system)),
            (trial.protocol, PROTOCOLS, trial.protocol in PROTOCOLS),
        ):
            if not is_known:
                msg = f"A trial names {name!r}, which is not known: use one of {', '.join(map(str, known))}."
                raise ValueError(msg)


def _check_packages(trials: Iterable[Trial]) -> None:
    """Raise an ImportError that names a package, if a trial's system or correction needs one that is not there."""
    for system in {name for trial in trials for name in trial.system.split(", ")} & set(NEEDED):
        if importlib.util.find_spec(NEEDED[system]) is None:
            msg = f"{system}, which has no row yet, needs one more package: pip install {NEEDED[system]}."
            raise ImportError(msg)


def run_trial(
    trial: Trial,
    adata: AnnData,
    dataset: Dataset,
    results: Results,
    directory: Path,
    digest: str,
    *,
    weights: str | os.PathLike[str] | None = None,
) -> None:
    """Train and score one trial, and keep its row; its history stays in the directory.

    Parameters
    ----------
    trial
        What to run.
    adata, dataset
        The trial's data, and its columns.
    results
        Where the row goes.
    directory
        State of the run while it lasts, ``history.csv`` afterwards.
    digest
        Of the cells, for the row.
    weights
        File of the weights that the trial names.
    """
    start = time.perf_counter()
    resumed = (directory / "last.ckpt").is_file()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores, model = PROTOCOLS[trial.protocol](begun(trial, adata, dataset, weights), adata, dataset, directory)
    messages = sorted({str(warning.message) for warning in caught if warning.category is UserWarning})
    run = versions() | {
        "digest": digest,
        "seconds": round(time.perf_counter() - start, 1),
        "resumed": resumed,  # then the seconds are those since it was
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "warnings": messages,
    }
    if model is not None:
        run |= {"steps": model.training_settings_["steps"], "precision": model.training_settings_["precision"]}
        run["device"] = _device(str(model.device))
    results.add(trial, scores, run)
    for checkpoint in directory.glob("*.ckpt"):
        checkpoint.unlink()


def _with_data(trials: Iterable[Trial], path: Any) -> Iterable[tuple[Trial, AnnData, str]]:
    """Each trial with its data and their digest, which are kept while the next trial wants the same."""
    wanted, adata, digest = None, None, ""
    for trial in trials:
        this = json.dumps([trial.dataset, trial.data, trial.seed], sort_keys=True, default=dict)
        if this != wanted:
            dataset = DATASETS[trial.dataset]
            adata = dataset.load(path, trial.seed, **trial.data)
            digest, wanted = dataset.digest(adata), this
        assert adata is not None
        yield trial, adata, digest


def _device(name: str) -> str:
    import torch

    if name.startswith("cuda"):
        return torch.cuda.get_device_name(name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
