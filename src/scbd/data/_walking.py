"""All files under a folder that somebody has put there: links are followed, what systems leave is passed over."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# folders that archives of a Mac bring along
_LEFT = ("__MACOSX",)


def walked(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    """Folders, from above to below and in the order of their names, each with the names of its files.

    Links to folders are followed, but not those that lead back to where they lie in. Names that begin with a dot are
    left out.

    Parameters
    ----------
    folder
        Where to begin.

    Raises
    ------
    OSError
        If a folder cannot be listed.
    """
    yield from _walked(os.fspath(folder), ())


def _walked(folder: str, above: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    place = os.path.realpath(folder)
    if place in above:
        return
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    yield folder, [name for name, is_folder in found if not is_folder]
    for name, is_folder in found:
        if is_folder and name not in _LEFT:
            yield from _walked(os.path.join(folder, name), (*above, place))
