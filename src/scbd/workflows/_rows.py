"""Rows of finished runs on disk: a file a run while a grid is running, one file with a line a run afterwards.

Several processes add rows at once, each as a file that is there whole or not at all; :func:`fold_rows` makes lines of
them. At every moment a row is in its file, in its line, or in both.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scbd._jobs import locked
from scbd._outputs import write_text

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]

# raised when what a row says would be misread by older code, or theirs by this one
FORMAT = 1
# in the directory of an experiment: one JSON a line, and one JSON a file
AT_REST, RUNNING = "rows.jsonl", "rows"


def read_rows(directory: Path) -> dict[str, Row]:
    """All rows by their keys, in the order of these.

    Raises
    ------
    ValueError
        If a row was written by another version, or is no row.
    """
    rows = _read_files(directory)  # before the lines: what is folded in the meantime is found there
    return dict(sorted((_read_lines(directory) | rows).items()))


def write_row(row: Row, key: str, directory: Path) -> None:
    """Add a row, or replace that of the same key."""
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        write_text(json.dumps(row, indent=1), directory / RUNNING / f"{key}.json")


def fold_rows(directory: Path) -> None:
    """Make lines of files, which are deleted when the lines are on the disk.

    Without a lock, two processes that fold would undo each other's work: then files stay files, which are read as well.

    Raises
    ------
    ValueError
        If a row was written by another version, or is no row; nothing is changed.
    """
    with locked(directory) as held:
        if not held:
            return
        files = _read_files(directory)
        if files:
            rows = sorted((_read_lines(directory) | files).items())
            # names inside a row stay in their order, which is that of the columns
            text = "".join(json.dumps({"key": key} | row) + "\n" for key, row in rows)
            write_text(text, directory / AT_REST)
        for key in files:
            (directory / RUNNING / f"{key}.json").unlink(missing_ok=True)
        # what processes left that were killed: nobody else is writing now
        for left in (*directory.glob(f".{AT_REST}.*.partial"), *(directory / RUNNING).glob(".*.partial")):
            left.unlink(missing_ok=True)
        with suppress(OSError):  # it is not there, or something else lies in it
            (directory / RUNNING).rmdir()


def _read_files(directory: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    with suppress(FileNotFoundError):  # nothing is running, or another process has folded what was there
        for name in os.listdir(directory / RUNNING):
            path = directory / RUNNING / name
            if path.suffix == ".json" and not name.startswith("."):
                with suppress(FileNotFoundError):
                    rows[path.stem] = _parsed(path.read_bytes(), f"{path}", "move it away")
    return rows


def _read_lines(directory: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    path = directory / AT_REST
    if path.is_file():
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                where = f"Line {number} of {path}"
                row = _parsed(line, where, "restore the file from a copy, or delete the line", "key")
                rows[row.pop("key")] = row
    return rows


def _parsed(text: bytes, where: str, remedy: str, *names: str) -> Row:
    """A row, which has these names."""
    try:
        row = json.loads(text)
        found, *_ = (row[name] for name in ("format", *names))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{where} is no row of an experiment, or is truncated ({error}): {remedy}, and it is run again."
        raise ValueError(msg) from error
    if found != FORMAT:
        msg = (
            f"{where} was written by another version of scbd (rows of format {found}, this one has {FORMAT}): it is "
            "kept; choose another directory, or move it away to have it run again."
        )
        raise ValueError(msg)
    return row
