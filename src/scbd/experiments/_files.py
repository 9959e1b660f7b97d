"""Files of an experiment, written beside their place and renamed: nothing is ever half there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure


def write_text(text: str, path: Path) -> None:
    """Write a text file."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_table(table: pd.DataFrame, path: Path, *, index: bool = False) -> None:
    """Write a CSV."""
    write_text(table.to_csv(index=index), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, and close the figure."""
    import matplotlib.pyplot as plt

    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, dpi=120, format="png")
    plt.close(figure)
    os.replace(partial, path)
