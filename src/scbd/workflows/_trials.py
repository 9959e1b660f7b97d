"""One run of a grid, and the directory that keeps the results of finished runs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd.workflows._datasets import DATASETS
from scbd.workflows._rows import AT_REST, FORMAT, RUNNING, fold_rows, read_rows, write_row
from scbd.workflows._systems import meaning

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Trial:
    """Everything that decides the result of one run: data set, system, settings, seed; no path and no machine.

    Attributes
    ----------
    protocol
        How the trained system is scored, see ``scbd.workflows.PROTOCOLS``.
    dataset
        Name, see ``scbd.workflows.DATASETS``.
    system
        Name, see ``scbd.workflows.SYSTEMS``.
    seed
        Seed of data, weights and batches.
    data, model, training
        Arguments of the data set's loader, of the model and of its ``train``.

    Examples
    --------
    >>> data = {"n_cells": 2000, "image_size": 32}
    >>> pcs = {"n_components": 8}
    >>> trial = scbd.workflows.Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, pcs)
    >>> trial.key.startswith("simulated-screen-pixel-pca-seed-0-")
    True
    """

    protocol: str
    dataset: str
    system: str
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def meaning(self) -> int:
        """What a row of such a trial means today, a number that is raised when that changes."""
        told_controls = self.dataset in DATASETS and DATASETS[self.dataset].setup.get("control") is not None
        return meaning(self.system, self.model, self.protocol, told_controls=told_controls)

    @property
    def key(self) -> str:
        """A name of its own for every different trial and meaning, good for a file."""
        told = asdict(self) | ({"meaning": self.meaning} if self.meaning > 1 else {})
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.dataset} {self.system} seed {self.seed}".lower())
        return f"{name}-{digest[:10]}"


class Results:
    """Finished runs in the directory of an experiment: a line each in ``rows.jsonl``.

    While a grid is running they are files in ``rows/``, one JSON each, so that several processes can write at once;
    both are read, and a file goes before the line of the same run. Rows of systems that have since been changed, so
    that the same settings would give another result, stay where they are and are left out.

    Parameters
    ----------
    directory
        What was given as ``out``; made when the first row is written.

    Raises
    ------
    ValueError
        If a row there was written by another version, or is no row, or if this is the folder ``rows`` itself; nothing
        is changed.

    Examples
    --------
    >>> scbd.workflows.Results("docs/results/cmnist")  # those of this repository  # doctest: +SKIP
    Results in docs/results/cmnist: 69 runs
    >>> frame = scbd.workflows.Results("grid").frame()
    >>> len(frame)  # nothing has run yet
    0
    >>> frame.to_csv("grid.csv")  # for a spreadsheet
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        above = self.directory.parent
        if self.directory.name == RUNNING and (any(self.directory.glob("*.json")) or (above / AT_REST).is_file()):
            msg = f"{self.directory} holds runs only until a grid is finished: give the directory above, {above}."
            raise ValueError(msg)
        read_rows(self.directory)

    def __repr__(self) -> str:
        """Where they are and how many, for a person."""
        return f"Results in {self.directory}: {len(read_rows(self.directory)):,} runs"

    def __contains__(self, trial: Trial) -> bool:
        return not self.missing([trial])

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those of these trials that have no row, in their order."""
        rows = read_rows(self.directory)
        return [trial for trial in trials if trial.key not in rows]

    def digests(self, trial: Trial) -> set[str]:
        """Of the cells of all rows that were to be of the same cells as this trial."""
        wanted = json.loads(json.dumps(asdict(trial)))
        rows = read_rows(self.directory).values()
        alike = [row for row in rows if all(row["trial"][k] == wanted[k] for k in ("dataset", "seed", "data"))]
        return {row["run"]["digest"] for row in alike if "digest" in row["run"]}

    def add(self, trial: Trial, scores: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Keep what a trial scored, and how it ran."""
        row = {"format": FORMAT, "meaning": trial.meaning, "trial": asdict(trial)}
        row |= {"scores": dict(scores), "run": dict(run)}
        write_row(row, trial.key, self.directory)

    def fold(self) -> None:
        """Make one file of all rows, ``rows.jsonl``, sorted by key: the same rows.

        Other processes may add rows at the same time, and a kill loses none. Where system or file system has no locks,
        nothing is folded: then ``rows/`` stays, which is read as well.

        Raises
        ------
        ValueError
            If a row was written by another version, or is no row; nothing is changed.
        """
        fold_rows(self.directory)

    def frame(self) -> pd.DataFrame:
        """All rows: what was asked for, what was scored, how it ran; one column each, sorted by name of the row."""
        rows = []
        for key, row in read_rows(self.directory).items():
            if _is_of_today(row):
                trial = row["trial"]
                named = {key: trial[key] for key in ("protocol", "dataset", "system", "seed")}
                settings = trial["data"] | trial["model"] | trial["training"]
                rows.append({"key": key} | named | settings | row["scores"] | row["run"])
        return pd.DataFrame(rows)

    def left_out(self) -> list[str]:
        """Keys of rows whose systems have since been changed."""
        return [key for key, row in read_rows(self.directory).items() if not _is_of_today(row)]

    def trial(self, key: str) -> Trial:
        """The trial of a row, to run it again.

        Raises
        ------
        KeyError
            If there is no such row.
        """
        rows = read_rows(self.directory)
        if key not in rows:
            msg = f"{self.directory} has no row {key!r}."
            raise KeyError(msg)
        return Trial(**rows[key]["trial"])


def _is_of_today(row: Mapping[str, Any]) -> bool:
    return row.get("meaning", 1) == Trial(**row["trial"]).meaning
