"""Run the trials of a grid one after the other; what is finished is kept, what was interrupted goes on."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import time
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from paper.datasets import DATASETS
from paper.protocols import PROTOCOLS
from paper.systems import FEATURES, NEEDED, SYSTEMS, TABLES, is_computed
from paper.trials import Results, Trial
from scbd._shared.files import check_output_directory
from scbd.datasets._published_screens import _total_memory
from scbd.nn import build_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

    from paper.datasets import Dataset

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
# of a number of an embedding: itself, float32, and what scores and corrections make of it, twice as float64 at most
_BYTES, _WIDTH = 20, 64
# GiB: two of ResNet-50 with the state of its optimiser, and room to write a third
_CHECKPOINTS = 1
# encoders that torchvision has, too
_ENCODERS = ("resnet18", "resnet50", "densenet121")


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
        ``(i, n)``: run only every n-th trial of the grid, from the i-th (of 1 … n), for n processes that share ``out``.
    weights
        File of weights that trials start from, which name its digest.

    Returns
    -------
    All rows in ``out``, see :meth:`Results.frame`.

    Raises
    ------
    ValueError
        If a name is not known, the shard is out of range, trials name other weights than are given, or a row of another
        format is there; before any is run.
    ImportError
        If a system needs a package that is not installed; before any is run.
    OSError
        If the embeddings of any trial of a data set cannot be in memory, or its checkpoints on the disk; before the
        first is run.

    Warns
    -----
    UserWarning
        If rows in ``out`` are of another version, and so are not used; or of other cells than those that are loaded
        under the same name.
    """
    index, n_shards = shard
    if not 1 <= index <= n_shards:
        msg = f"shard={index}/{n_shards}: give a first number from 1 to the second."
        raise ValueError(msg)
    _check_names(trials)
    _check_weights(trials, weights)
    out = check_output_directory(out)
    results = Results(out)
    if left_out := results.left_out():
        msg = f"Of the rows in {out}, {len(left_out):,} are of another version of their system: they are not used."
        warnings.warn(msg, UserWarning, stacklevel=2)
    mine = list(trials)[index - 1 :: n_shards]
    todo = results.missing(mine)
    _check_packages(todo)
    logger.info("%d of %d trials are done.", len(mine) - len(todo), len(mine))
    looked_at: set[str] = set()
    for number, (trial, adata, digest) in enumerate(_with_data(todo, path), start=1):
        if digest not in looked_at:
            if results.digests(trial) - {digest}:
                msg = f"Rows in {out} are of other cells than those that are loaded now: give another out."
                warnings.warn(msg, UserWarning, stacklevel=2)
            _check_room([other for other in todo if other.dataset == trial.dataset], adata.n_obs, out)
        logger.info("Trial %d of %d: %s", number, len(todo), trial.key)
        looked_at.add(digest)
        run_trial(trial, adata, DATASETS[trial.dataset], results, out / "runs" / trial.key, digest, weights=weights)
    if not results.missing(trials):  # no other shard of this grid is still at work
        results.fold()
    return results.frame()


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
    """Train and score one trial, and keep its row; its history stays in the directory, its checkpoints do not."""
    start = time.perf_counter()
    resumed = (directory / "last.ckpt").is_file()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores, model = PROTOCOLS[trial.protocol](_begun(trial, adata, dataset, weights), adata, dataset, directory)
    run = {name: version(name) for name in ("scbd", "torch")} | {
        "commit": commit(),
        "digest": digest,
        "seconds": round(time.perf_counter() - start, 1),
        "resumed": resumed,  # then the seconds are those since it was
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "warnings": sorted({str(warning.message) for warning in caught if warning.category is UserWarning}),
    }
    if model is not None:
        run |= {name: model.training_settings_[name] for name in ("steps", "precision")}
        run["device"] = _device(str(model.device))
        pd.concat(model.history.values(), axis=1).to_csv(directory / "history.csv")
    results.add(trial, scores, run)
    for checkpoint in directory.glob("*.ckpt"):
        checkpoint.unlink()


def _check_names(trials: Iterable[Trial]) -> None:
    """Raise a ValueError that names what there is, if a trial names what is not."""
    systems = SYSTEMS | FEATURES | TABLES
    for trial in trials:
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


def _check_room(trials: Sequence[Trial], n_cells: int, out: Path) -> None:
    """Raise ``OSError`` if one of these trials could not end, before one that comes first takes days."""
    place = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.is_dir())
    gib, there, free = 2**30, _total_memory() / 2**30, shutil.disk_usage(place).free / 2**30
    for trial in trials:
        width = trial.model.get("n_latent") or trial.model.get("n_components") or _WIDTH
        needed = n_cells * width * _BYTES / gib
        if needed > there:
            msg = (
                f"{trial.system}: embeddings of {n_cells:,} cells take about {needed:,.0f} GiB of memory, this machine "
                f"has {there:,.0f}. Take fewer cells, or another machine; nothing was run."
            )
            raise OSError(msg)
    if any(trial.system in SYSTEMS for trial in trials) and free < _CHECKPOINTS:
        msg = f"{free:.1f} GiB are free at {out}, checkpoints of a run take up to {_CHECKPOINTS}; nothing was run."
        raise OSError(msg)


def with_weights(trials: Sequence[Trial], path: str | os.PathLike[str]) -> list[Trial]:
    """These trials, begun at weights in a file, wherever an encoder of a known name is trained.

    A trial names the weights by their digest. An encoder that is never trained stays at random weights, as it is
    called.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If no trial has such an encoder, or the weights are those of another.
    """
    digest = _digest(path)
    taken = [trial.model.get("encoder") in _ENCODERS and trial.training.get("lr") != 0 for trial in trials]
    if not any(taken):
        msg = f"No trial takes weights: they are for the encoders {', '.join(_ENCODERS)}. Leave them out."
        raise ValueError(msg)
    for name in {str(trial.model["encoder"]) for trial, takes in zip(trials, taken, strict=True) if takes}:
        build_encoder(name, 3, weights=path)
    return [
        replace(trial, model={**trial.model, "weights": digest}) if takes else trial
        for trial, takes in zip(trials, taken, strict=True)
    ]


def _check_weights(trials: Sequence[Trial], path: str | os.PathLike[str] | None) -> None:
    """Raise ``ValueError`` unless the file is the one that these trials name, if any."""
    named = {str(trial.model["weights"]) for trial in trials if "weights" in trial.model}
    if named - ({_digest(path)} if path is not None else set()):
        msg = f"Trials start from weights with the digest {min(named)}: give their file with weights=…"
        raise ValueError(msg)


def _begun(trial: Trial, adata: AnnData, dataset: Dataset, path: str | os.PathLike[str] | None) -> Trial:
    """The trial with its encoder made, where it names weights."""
    model = dict(trial.model)
    if path is None or model.pop("weights", None) is None:
        return trial
    channels = dataset.inputs(adata).source(adata).shape[1]
    return replace(trial, model=model | {"encoder": build_encoder(model["encoder"], channels, weights=path)})


def _digest(path: str | os.PathLike[str]) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


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


@cache
def commit() -> str:
    """The git commit of this clone, with ``-dirty`` where code of the package or of the experiments has changed."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks/paper/*.py")
        return git("rev-parse", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return ""


def _device(name: str) -> str:
    if name.startswith("cuda"):
        return torch.cuda.get_device_name(name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
