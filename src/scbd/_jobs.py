"""Several processes at one thing: who does which share, who begins it, and whether there is room for it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from scbd._files import partial_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# after so many seconds nobody is still writing the tables of a store
_OLD = 600


def check_shard(shard: tuple[int, int]) -> None:
    """Raise unless it is one of so many."""
    index, n = shard
    if not 1 <= index <= n:
        msg = f"shard={index}/{n}: give a first number from 1 to the second."
        raise ValueError(msg)


def share_of(done: np.ndarray, shard: tuple[int, int]) -> np.ndarray:
    """Blocks that are still to be written by one of several processes, each of which has a contiguous range.

    Parameters
    ----------
    done
        Which blocks are there, boolean ``(n_blocks,)``.
    shard
        Which process of how many, from 1 on.

    Returns
    -------
    Numbers of blocks, int64, in order.
    """
    index, n = shard
    mine = np.array_split(np.arange(len(done)), n)[index - 1]
    return mine[~done[mine]]


def check_space(path: Path, size: int) -> None:
    """Raise if the disk has less room than a store of this size takes beside what has been written of it.

    Parameters
    ----------
    path
        Of the whole store; what has been written of it lies beside, see :func:`~scbd._files.partial_path`.
    size
        Of the whole store, in bytes.

    Raises
    ------
    OSError
        If so.
    """
    partial = partial_path(path)
    written = sum(file.stat().st_blocks * 512 for file in (partial, *partial.rglob("*")) if file.exists())
    needed, free = size - written, shutil.disk_usage(path.parent).free
    if needed > free:
        msg = f"{path} takes {_bytes(needed)} more, the disk has {_bytes(free)} free: make room first."
        raise OSError(msg)


@contextmanager
def room_needed(path: Any) -> Iterator[None]:
    """Say of a disk that becomes full while a store is written which store that is, and that nothing is lost.

    Parameters
    ----------
    path
        Of the whole store.

    Raises
    ------
    OSError
        In place of the error of whichever library wrote.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # HDF5 has one of each
        if getattr(error, "errno", None) != errno.ENOSPC and os.strerror(errno.ENOSPC) not in str(error):
            raise
        msg = f"No space left for {path}: make room, and call again in the same way, which goes on with it."
        raise OSError(msg) from error


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], partial: Any) -> None:
    """Raise if what was begun is something else."""
    plain = {key: value.decode() if isinstance(value, bytes) else value for key, value in found.items()}
    if any(plain.get(key) != value for key, value in wanted.items() if isinstance(value, str)):
        msg = (
            f"{partial} is the beginning of something else (other cells, order or settings, or of another version of "
            "scbd): move it away to begin again, write to another path, or go on with the version that began it."
        )
        raise ValueError(msg)


def header_path(partial: Path) -> Path:
    """A name of a process's own: others may be at it, too, and the first one's header becomes the beginning."""
    return partial.with_name(f"{partial.name}.{uuid4().hex}")


def begin_with(header: Path, partial: Path) -> None:
    """Make a header the beginning, unless another process was faster."""
    if header.is_dir():
        with suppress(OSError):  # a folder that holds something is not replaced
            os.rename(header, partial)
        shutil.rmtree(header, ignore_errors=True)
        return
    try:
        os.link(header, partial)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: exFAT, SMB
        with locked(partial.parent):
            if not partial.exists():
                os.rename(header, partial)
    header.unlink(missing_ok=True)


def remove_headers(partial: Path) -> None:
    """What processes that were killed in their first moments have left; others may be at theirs."""
    for left in partial.parent.glob(f"{escape(partial.name)}.*"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - _OLD:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """One process at a time; one that dies lets go. Whether it holds: some systems and file systems have no locks."""
    with ExitStack() as stack:
        held = False
        with suppress(ImportError, OSError):
            import fcntl  # not on every system, and reading needs none of it

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        yield held


def _bytes(size: int) -> str:
    """In a unit that leaves something before the point."""
    unit = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**unit:.{min(unit, 1)}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
