"""One run of a grid, and the directory that keeps the results of finished runs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd._outputs import write_text
from scbd.workflows._systems import MEANINGS

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

# raised when what a row says would be misread by older code, or theirs by this one
FORMAT = 1


@dataclass(frozen=True)
class Trial:
    """Everything that decides the result of one run: data set, system, settings, seed; no path and no machine.

    Attributes
    ----------
    protocol
        How the trained system is scored, see :data:`scbd.workflows.PROTOCOLS`.
    dataset
        Name, see :data:`scbd.workflows.DATASETS`.
    system
        Name, see :data:`scbd.workflows.SYSTEMS`.
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
        """What a row of its system means today, a number that is raised when that changes."""
        return MEANINGS.get(self.system, 1)

    @property
    def key(self) -> str:
        """A name of its own for every different trial and meaning, good for a file."""
        told = asdict(self) | ({"meaning": self.meaning} if self.meaning > 1 else {})
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.dataset} {self.system} seed {self.seed}".lower())
        return f"{name}-{digest[:10]}"


class Results:
    """Finished runs in a directory: one JSON file a row, so that several processes can write at once.

    Rows of systems that have since been changed, so that the same settings would give another result, stay where they
    are and are left out.

    Parameters
    ----------
    directory
        Made when the first row is written.

    Raises
    ------
    ValueError
        If a row there was written by another version, or is no row; nothing is changed.

    Examples
    --------
    >>> scbd.workflows.Results("docs/results/cmnist/rows")  # those of this repository  # doctest: +SKIP
    Results in docs/results/cmnist/rows: 69 runs
    >>> frame = scbd.workflows.Results("grid/rows").frame()
    >>> len(frame)  # nothing has run yet
    0
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        for path in self._paths():
            _read(path)

    def __repr__(self) -> str:
        """Where they are and how many, for a person."""
        return f"Results in {self.directory}: {len(self._paths()):,} runs"

    def __contains__(self, trial: Trial) -> bool:
        return self._path(trial).is_file()

    def add(self, trial: Trial, scores: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Keep what a trial scored, and how it ran."""
        row = {"format": FORMAT, "meaning": trial.meaning, "trial": asdict(trial)}
        row |= {"scores": dict(scores), "run": dict(run)}
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps(row, indent=1), self._path(trial))

    def frame(self) -> pd.DataFrame:
        """All rows: what was asked for, what was scored, how it ran; one column each, sorted by name of the row."""
        rows = []
        for key, row in self._rows():
            if _is_of_today(row):
                trial = row["trial"]
                named = {key: trial[key] for key in ("protocol", "dataset", "system", "seed")}
                settings = trial["data"] | trial["model"] | trial["training"]
                rows.append({"key": key} | named | settings | row["scores"] | row["run"])
        return pd.DataFrame(rows)

    def left_out(self) -> list[str]:
        """Keys of rows whose systems have since been changed."""
        return [key for key, row in self._rows() if not _is_of_today(row)]

    def trial(self, key: str) -> Trial:
        """The trial of a row, to run it again.

        Raises
        ------
        KeyError
            If there is no such row.
        """
        path = self.directory / f"{key}.json"
        if not path.is_file():
            msg = f"{self.directory} has no row {key!r}."
            raise KeyError(msg)
        return Trial(**_read(path)["trial"])

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((path.stem, _read(path)) for path in self._paths())

    def _path(self, trial: Trial) -> Path:
        return self.directory / f"{trial.key}.json"

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("*.json") if not path.name.startswith("."))


def _is_of_today(row: Mapping[str, Any]) -> bool:
    return row.get("meaning", 1) == Trial(**row["trial"]).meaning


def _read(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        found = row["format"]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path} is no row of an experiment, or is truncated ({error}): move it away, and it is run again."
        raise ValueError(msg) from error
    if found != FORMAT:
        msg = (
            f"{path} was written by another version of scbd (rows of format {found}, this one has {FORMAT}): it is "
            "kept; choose another directory, or move it away to have it run again."
        )
        raise ValueError(msg)
    return row
