"""What is not whole yet: where it lies, who may begin it, and what is left of it."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anndata import AnnData

# longest name that a file system takes, in bytes, less what is put around it
_NAME_BYTES = 200
# after so many seconds nobody is still writing the tables of a store
_OLD = 600


def partial_path(path: Path) -> Path:
    """Where a file or folder lies until it is whole."""
    name = path.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return path.with_name(f".{name}.partial")


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
    for left in partial.parent.glob(f"{glob.escape(partial.name)}.*"):
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


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], partial: Any) -> None:
    """Raise if what was begun is something else."""
    plain = {key: value.decode() if isinstance(value, bytes) else value for key, value in found.items()}
    if any(plain.get(key) != value for key, value in wanted.items() if isinstance(value, str)):
        msg = (
            f"{partial} is the beginning of something else (other cells, order or settings): move it away, or write to "
            "another path."
        )
        raise ValueError(msg)


def check_names(tables: AnnData) -> None:
    """Raise if a table has names or text that no store can hold; before anything is written.

    Raises
    ------
    ValueError
        If so.
    """
    for slot, table in (("obs", tables.obs), ("var", tables.var)):
        for column in table:
            if "/" in str(column) or "\0" in str(column) or str(column) in ("", ".", ".."):
                msg = (
                    f"{slot} has a column {column!r}, of which a store makes a path: rename it, for example "
                    f"adata.{slot} = adata.{slot}.rename(columns={{{column!r}: "
                    f"{str(column).replace('/', '_').strip('.') or 'column'!r}}})."
                )
                raise ValueError(msg)
        for name, values in [("index", table.index), *table.items()]:
            texts = values.cat.categories if values.dtype == "category" else values
            if texts.dtype.kind in "OUT" and any(isinstance(text, str) and "\0" in text for text in texts):
                msg = f"{slot} has text with a NUL character in {name!r}, which cannot be stored: remove it."
                raise ValueError(msg)
