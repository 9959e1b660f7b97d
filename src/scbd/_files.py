"""Files that are whole or not there, what a job leaves in its folder, and a bar for people who wait."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd
    from matplotlib.figure import Figure

# longest name that a file system takes, in bytes, less what is put around it
_NAME_BYTES = 200
# how a file begins that Git LFS leaves in place of a large one
_PLACEHOLDER = b"version https://git-lfs.github.com/spec/"


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, in which ``~`` is the home folder.

    Raises
    ------
    ValueError
        If it is the address of another machine or of an object store.
    """
    text = os.fspath(path)
    if "://" in text:
        msg = f"{text} is an address, and files are read and written on this machine: download it, and give its path."
        raise ValueError(msg)
    return Path(text).expanduser()


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder on this machine.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    ValueError
        If it is an address.
    """
    found = local_path(path)
    if not found.exists():
        msg = f"There is nothing at {path}."
        raise FileNotFoundError(msg)
    return found


def check_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is there.

    Raises
    ------
    FileNotFoundError
        If there is nothing, or a folder.
    ValueError
        If it is an address, or a placeholder of Git LFS, which holds none of the data.
    """
    found = local_path(path)
    if not found.is_file():
        msg = f"{path} is a folder: name a file." if found.is_dir() else f"There is no file {path}."
        raise FileNotFoundError(msg)
    with found.open("rb") as file:
        if file.read(len(_PLACEHOLDER)) == _PLACEHOLDER:
            msg = f"{path} is a placeholder of Git LFS, without the data: run git lfs pull where it was cloned."
            raise ValueError(msg)
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


def check_directory(out: str | os.PathLike[str]) -> Path:
    """The path, if a directory is there or could be; nothing is made.

    Raises
    ------
    FileExistsError
        If it, or what it would lie in, is a file.
    PermissionError
        If nothing may be written there.
    ValueError
        If it is an address.
    """
    out = local_path(out)
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        msg = f"{there} is a file: give a directory to write to, which is made if it is not there."
        raise FileExistsError(msg)
    if not os.access(there, os.W_OK | os.X_OK):
        msg = f"{there} cannot be written to: give another directory, or change its permissions."
        raise PermissionError(msg)
    return out


def write_text(text: str, path: Path) -> None:
    """Write a text file, which has its name when it is on the disk."""
    with written_whole(path) as file:
        file.write(text.encode())


def write_table(table: pd.DataFrame, path: Path, *, index: bool = False) -> None:
    """Write a CSV."""
    write_text(table.to_csv(index=index), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, and close the figure."""
    import matplotlib.pyplot as plt

    with named_when_whole(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
        plt.close(figure)


# what takes longer than a glance at about ten thousand a second
_WORTH_A_BAR = 20_000


def progress_bar(description: str, n: int, *, shown: bool | None = None) -> tqdm:
    """A bar that counts cells to ``n``; by default shown where there are enough to wait for."""
    # a log file wants a line now and then, not ten a second
    interval = 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10
    return tqdm(
        total=n,
        desc=description,
        unit=" cells",
        unit_scale=n >= _WORTH_A_BAR,
        mininterval=interval,
        maxinterval=interval,
        disable=not (n > _WORTH_A_BAR if shown is None else shown),
    )


def say(sentence: str) -> None:
    """Something to know meanwhile, above a bar that stays where it is."""
    tqdm.write(sentence, file=sys.stderr)


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Leave torch, if it is loaded, with the threads it has.

    numba sets OpenMP's number of threads to that of all processors, and torch's with it. A process that was given one,
    beside others, is then several times slower in all that it does later.
    """
    torch = sys.modules.get("torch")
    n = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(n)


def one_torch_thread() -> None:
    """Let torch, if it is loaded, use one core for what the calling thread asks of it."""
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)
