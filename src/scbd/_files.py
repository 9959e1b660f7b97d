"""Files that are whole or not there: written beside their place, and renamed when they are complete."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# longest name that a file system takes, in bytes, less what is put around it
_NAME_BYTES = 200


def check_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is there.

    Raises
    ------
    FileNotFoundError
        If there is nothing, or a folder.
    """
    found = Path(path)
    if not found.is_file():
        msg = f"{path} is a folder: name a file." if found.is_dir() else f"There is no file {path}."
        raise FileNotFoundError(msg)
    return found


def check_distinct(given: Iterable[object]) -> None:
    """Look whether plates, which may be paths, are each given once.

    Raises
    ------
    ValueError
        If two are the same file or folder, by whatever name, or one object.
    """
    seen: dict[str | int, str] = {}
    for number, one in enumerate(given):
        place: str | int = id(one)
        name = f"plate {number} ({type(one).__name__})"
        if isinstance(one, (str, os.PathLike)):
            place, name = os.path.realpath(one), str(one)
        if place in seen:
            names = f"{name} is given twice" if name == seen[place] else f"{seen[place]} and {name} are one"
            msg = f"{names}: each cell would be there twice, in training and in validation; give it once."
            raise ValueError(msg)
        seen[place] = name


def partial_path(path: Path) -> Path:
    """Where a file or folder lies until it is whole; the same for all who work on it, and after a kill."""
    name = path.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(f".{name}.partial")


@contextmanager
def named_when_whole(path: Path) -> Iterator[Path]:
    """A path to write a file to, which takes its name when it is complete; what was there stays until then.

    Nobody else writes to that path. If the block raises, nothing is left of the file.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when it is complete and on disk; what was there stays until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_when_whole(path) as partial, partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def remove_partials(path: Path) -> None:
    """Remove what processes left that were killed while they wrote a file of this name."""
    for partial in path.parent.glob(f".{escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # some systems cannot open a folder
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
