"""Checks of paths, and functions that write a file under a temporary name and rename it once it is complete."""

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

    import pandas as pd
    from matplotlib.figure import Figure

# Maximum length in bytes of a file name to which a prefix and a suffix are added. A longer name is replaced by its
# hash, because file systems allow at most 255 bytes including prefix and suffix.
_MAX_NAME_BYTES = 200
# First bytes of a Git LFS pointer. Git stores such a small text file in place of a large file until the large file is
# downloaded.
_GIT_LFS_HEADER = b"version https://git-lfs.github.com/spec/"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Convert a path on this machine to a ``Path``, with ``~`` replaced by the home folder of the user.

    Raises
    ------
    ValueError
        If ``path`` contains ``://``, as addresses of other machines and of object stores do.
    """
    text = os.fspath(path)
    if "://" in text:
        msg = f"{text} is an address, and files are read and written on this machine: download it, and give its path."
        raise ValueError(msg)
    return Path(text).expanduser()


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Convert a path to a ``Path``, and check that a file or folder exists there on this machine.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    ValueError
        If ``path`` is an address, see :func:`local_path`.
    """
    found = local_path(path)
    if not found.exists():
        msg = f"There is nothing at {path}."
        raise FileNotFoundError(msg)
    return found


def check_file(path: str | os.PathLike[str]) -> Path:
    """Convert a path to a ``Path``, and check that a file with data exists there on this machine.

    Raises
    ------
    FileNotFoundError
        If the path does not exist or is a folder.
    ValueError
        If ``path`` is an address, see :func:`local_path`; or if the file is a Git LFS pointer, a small text file that
        stands in place of data that were not downloaded.
    """
    found = local_path(path)
    if not found.is_file():
        msg = f"{path} is a folder: name a file." if found.is_dir() else f"There is no file {path}."
        raise FileNotFoundError(msg)
    with found.open("rb") as file:
        if file.read(len(_GIT_LFS_HEADER)) == _GIT_LFS_HEADER:
            msg = f"{path} is a placeholder of Git LFS, without the data: run git lfs pull where it was cloned."
            raise ValueError(msg)
    return found


def check_plates_distinct(given: Iterable[object]) -> None:
    """Raise ``ValueError`` if a user gives the same plate of cells twice.

    A plate is given as the path of its file or folder, or as an object in memory. Two paths are the same plate if they
    lead to the same file or folder, whatever the spelling of the paths. Two objects are the same plate if they are the
    same Python object.
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
    """Return the hidden path at which a file or folder is written until it is complete.

    This hidden path depends only on the final path ``path``. Several processes can therefore write to the same
    incomplete file or folder, and a restarted job finds it again.
    """
    name = path.name
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(f".{name}.partial")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for writing a file, and rename the file to ``path`` at the end of the ``with`` block.

    An earlier file at ``path`` is replaced only by this renaming. The temporary path is unique, so that no other
    process writes to the temporary file. If the ``with`` block raises an error, the temporary file is removed.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file opened for writing bytes, and rename it to ``path`` when all bytes are on the disk.

    An earlier file at ``path`` is replaced only by this renaming. If the ``with`` block raises an error, the temporary
    file is removed, and the earlier file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial, partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    # After a file was renamed, fsync of its folder ensures that the new name survives a power failure. Some operating
    # systems cannot open a folder; the OSError is ignored there.
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def explained_write(path: Path, advice: str = "") -> Iterator[None]:
    """Replace errors of writing ``path`` by an ``OSError`` that names the file and the likely cause.

    If a disk is full, torch raises a ``RuntimeError`` without a file name.

    Parameters
    ----------
    path
        File or folder that is written. The ``with`` block must leave an earlier one in place if it fails.
    advice
        Last sentence of the message, on how to continue if there is an earlier file.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        msg = f"{path} could not be written ({error}): is the disk or the quota full, or the folder not writable?"
        if path.exists():
            msg += f" The earlier one is kept. {advice}".rstrip()
        raise OSError(msg) from error


def remove_partials(path: Path) -> None:
    """Remove the temporary files that killed processes left while they wrote ``path`` with :func:`write_atomically`."""
    for partial in path.parent.glob(f".{escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)


def check_outside_stores(out: Path) -> None:
    """Raise ``FileExistsError`` if a directory is a Zarr store, such as a screen, or lies inside of one."""
    for folder in (out, *out.absolute().parents):
        if (folder / "zarr.json").exists() or (folder / ".zgroup").exists():
            msg = f"{folder} is a Zarr store, and other files would damage it: give another directory."
            raise FileExistsError(msg)


def check_output_directory(out: str | os.PathLike[str]) -> Path:
    """Convert the path of an output directory to a ``Path``, and check that files can be written there.

    The directory must be writable, or must not exist yet and be possible to create. This function does not create it.

    Raises
    ------
    FileExistsError
        If ``out`` or one of its parents is a file, or a Zarr store such as a screen.
    PermissionError
        If the directory, or its closest existing parent, is not writable.
    ValueError
        If ``out`` is an address, see :func:`local_path`.
    """
    out = local_path(out)
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        msg = f"{there} is a file: give a directory to write to, which is made if it is not there."
        raise FileExistsError(msg)
    check_outside_stores(out)
    if not os.access(there, os.W_OK | os.X_OK):
        msg = f"{there} cannot be written to: give another directory, or change its permissions."
        raise PermissionError(msg)
    return out


@contextmanager
def hold_directory(out: Path) -> Iterator[None]:
    """Keep other processes, and other calls in this process, from writing to a directory during the ``with`` block.

    The directory is created if it is missing. If the block writes nothing, the created folders are removed again.

    The directory is marked by a file that the operating system locks. A process that is killed loses the lock, so that
    the directory is free again. In distributed training, all processes write to one directory, and only the first one
    holds it. Some file systems have no locks; the directory is then not held.

    Raises
    ------
    BlockingIOError
        If another process, or another call, holds the directory.
    """
    # number of the process in distributed training, as torchrun, Lightning and Slurm state it
    ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    if ranks and ranks[0] != "0":
        yield
        return
    created = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    mark = out / ".running"
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT)
    try:
        if not _lock(descriptor):
            msg = f"Another run is writing to {out}: wait until it has finished, or choose another directory."
            raise BlockingIOError(msg)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)
            for folder in created:
                # a folder that is not empty cannot be removed by rmdir
                with suppress(OSError):
                    folder.rmdir()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file for this process, and return whether no other process has locked it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows has no fcntl, and some network file systems have no locks
        return True
    # If the former holder removed the file before it was locked here, the directory is not held.
    return os.fstat(descriptor).st_nlink > 0


def write_text(text: str, path: Path) -> None:
    """Write a text file in UTF-8; the file appears at ``path`` only when it is complete and on the disk."""
    with open_atomically(path) as file:
        file.write(text.encode())


def write_table(table: pd.DataFrame, path: Path, *, index: bool = False) -> None:
    """Write a table to a CSV file; the index of the table is written as well if ``index`` is true."""
    write_text(table.to_csv(index=index), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure to a PNG file with 120 dots per inch, and close the figure."""
    import matplotlib.pyplot as plt

    with write_atomically(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
        plt.close(figure)
