"""One run of a grid, and the directory that keeps the results of finished runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper.datasets import DATASETS
from paper.systems import version_of
from scbd._shared.files import write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Row = dict[str, Any]

# raised when what a row says would be misread by older code, or theirs by this one
FORMAT = 1
# in the directory of an experiment: one JSON a line, and while a grid is running one JSON a file
AT_REST, RUNNING = "rows.jsonl", "rows"


@dataclass(frozen=True)
class Trial:
    """Everything that decides the result of one run: data set, system, settings, seed; no path and no machine.

    Attributes
    ----------
    protocol, dataset, system
        Names in ``PROTOCOLS``, ``DATASETS`` and ``SYSTEMS``, ``FEATURES`` or ``TABLES``.
    seed
        Seed of data, weights and batches.
    data, model, training
        Arguments of the data set's loader, of the model and of its ``train``.
    """

    protocol: str
    dataset: str
    system: str
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Of what a row of such a trial says: raised where the same settings would now train, or score, otherwise."""
        knows_controls = self.dataset in DATASETS and DATASETS[self.dataset].setup.get("control") is not None
        return version_of(self.system, self.model, self.protocol, knows_controls=knows_controls)

    @property
    def key(self) -> str:
        """A name of its own for every different trial and version, good for a file."""
        # rows call the version so
        told = asdict(self) | ({"meaning": self.version} if self.version > 1 else {})
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.dataset} {self.system} seed {self.seed}".lower())
        return f"{name}-{digest[:10]}"


def as_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table, in which a setting that was `None` is another than one that was not made."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, math.nan) for row in rows]
        # as text, pandas would take both for missing
        columns[name] = pd.Series(values, dtype=object) if any(isinstance(v, str) for v in values) else values
    return pd.DataFrame(columns)


class Results:
    """Finished runs in the directory of an experiment: a line each in ``rows.jsonl``, sorted by key.

    While a grid is running they are files in ``rows/``, one JSON each, so that several processes can write at once;
    both are read, and a file goes before the line of the same run. Rows of another version than today's stay where they
    are and are left out.

    Parameters
    ----------
    directory
        Of the experiment; made when the first row is written.

    Raises
    ------
    ValueError
        If a row there is of another format, or is no row.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.rows()

    def rows(self) -> dict[str, Row]:
        """All rows by their keys, in the order of these."""
        rows = self._files()  # before the lines: what is folded in the meantime is found there
        return dict(sorted((self._lines() | rows).items()))

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those of these trials that have no row, in their order."""
        rows = self.rows()
        return [trial for trial in trials if trial.key not in rows]

    def digests(self, trial: Trial) -> set[str]:
        """Of the cells of all rows that were to be of the same cells as this trial."""
        wanted = json.loads(json.dumps(asdict(trial)))
        same = (row for row in self.rows().values() if all(row["trial"][k] == wanted[k] for k in _CELLS))
        return {row["run"]["digest"] for row in same if "digest" in row["run"]}

    def add(self, trial: Trial, scores: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Keep what a trial scored, and how it ran."""
        row = {"format": FORMAT, "meaning": trial.version, "trial": asdict(trial)}
        row |= {"scores": dict(scores), "run": dict(run)}
        with self._locked():
            write_text(json.dumps(row, indent=1), self.directory / RUNNING / f"{trial.key}.json")

    def fold(self) -> None:
        """Make one file of all rows, ``rows.jsonl``; other processes may add rows at the same time."""
        with self._locked():
            files = self._files()
            if files:
                rows = sorted((self._lines() | files).items())
                # names inside a row stay in their order, which is that of the columns
                text = "".join(json.dumps({"key": key} | row) + "\n" for key, row in rows)
                write_text(text, self.directory / AT_REST)
            for key in files:
                (self.directory / RUNNING / f"{key}.json").unlink()
            with suppress(OSError):  # it is not there, or something else lies in it
                (self.directory / RUNNING).rmdir()

    def frame(self) -> pd.DataFrame:
        """All rows of today's version: what was asked for, what was scored, how it ran; sorted by key."""
        rows = []
        for key, row in self.rows().items():
            if _is_of_today(row):
                trial = row["trial"]
                named = {key: trial[key] for key in ("protocol", "dataset", "system", "seed")}
                settings = trial["data"] | trial["model"] | trial["training"]
                rows.append({"key": key} | named | settings | row["scores"] | row["run"])
        return as_frame(rows)

    def left_out(self) -> list[str]:
        """Keys of rows of another version."""
        return [key for key, row in self.rows().items() if not _is_of_today(row)]

    def _files(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for path in (self.directory / RUNNING).glob("[!.]*.json"):
            with suppress(FileNotFoundError):  # another process has folded it
                rows[path.stem] = _parsed(path.read_bytes(), str(path))
        return rows

    def _lines(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        path = self.directory / AT_REST
        if path.is_file():
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                row = _parsed(line, f"Line {number} of {path}", "key")
                rows[row.pop("key")] = row
        return rows

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; one that dies lets go."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


# what decides the cells of a trial
_CELLS = ("dataset", "seed", "data")


def _parsed(text: bytes, where: str, *names: str) -> Row:
    """A row, which has these names."""
    try:
        row = json.loads(text)
        found, *_ = (row[name] for name in ("format", *names))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{where} is no row of an experiment, or is truncated ({error}): move it away, and it is run again."
        raise ValueError(msg) from error
    if found != FORMAT:
        msg = f"{where} is a row of format {found}, not {FORMAT}: choose another directory, or move it away."
        raise ValueError(msg)
    return row


def _is_of_today(row: Row) -> bool:
    return row.get("meaning", 1) == Trial(**row["trial"]).version
