"""A Zarr store that is read from is not removed by the process that reads it."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store

# roots and folders of images by store; a store lives as long as any array of it does
_open: WeakValueDictionary[tuple[int, Path, Path], Store] = WeakValueDictionary()


def guarded(images: zarr.Array) -> zarr.Array:
    """Images whose folder is not removed as long as they are in use.

    AnnData clears a Zarr store before it writes to it, and would then find nothing of what it was to write: images of
    that very store are gone, and are read as zeros. Python asks its audit hooks before a folder is removed, and one of
    them objects.
    """
    from zarr.storage import LocalStore

    if isinstance(images.store, LocalStore):
        _listen()
        root = Path(os.path.realpath(images.store.root))
        _open[id(images.store), root, root / images.path] = images.store
    return images


@cache
def _listen() -> None:
    sys.addaudithook(_object_to_removal)


def _object_to_removal(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "shutil.rmtree" or not _open:
        return
    folder = Path(os.path.realpath(os.fsdecode(arguments[0])))
    if _in_use(folder):
        gc.collect()  # what nobody can reach any more is not in use
    if _in_use(folder):
        msg = (
            f"{folder} holds images that are open, and would be lost: write to another path, or add results to the "
            "screen with scbd.data.add_to_screen. To remove it, first `del` what was opened."
        )
        raise PermissionError(msg)


def _in_use(folder: Path) -> bool:
    """Whether it holds open images, or is part of them; not whether a folder further up is removed by somebody."""
    return any(
        folder.is_relative_to(root) and (images.is_relative_to(folder) or folder.is_relative_to(images))
        for _, root, images in list(_open)
    )


def check_inside(folder: Path) -> None:
    """Raise if a link leads out of a Zarr store: one from elsewhere could so name any file of this machine."""
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for entry in (Path(place, name) for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(root):
                msg = f"{entry} is a link to another place, which is not followed: copy what is there into the store."
                raise ValueError(msg)
