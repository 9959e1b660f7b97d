"""What a job leaves in its directory, written beside its place and renamed: nothing is ever half there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scbd._files import named_when_whole, written_whole

if TYPE_CHECKING:
    import os

    import pandas as pd
    from matplotlib.figure import Figure


def check_directory(out: str | os.PathLike[str]) -> Path:
    """The path, if a directory is there or could be; nothing is made.

    Raises
    ------
    FileExistsError
        If it, or what it would lie in, is a file.
    """
    out = Path(out)
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            msg = f"{path} is a file: give a directory to write to, which is made if it is not there."
            raise FileExistsError(msg)
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
