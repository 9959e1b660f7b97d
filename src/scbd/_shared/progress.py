"""Progress bars, and messages that do not break them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    pass

# number of cells above which a progress bar is shown: about two seconds at 10,000 cells per second
_MIN_CELLS_FOR_BAR = 20_000


def progress_bar(description: str, n: int, *, shown: bool | None = None) -> tqdm:
    """Return a progress bar that counts cells up to ``n``.

    Parameters
    ----------
    description
        Text to the left of the bar.
    n
        Number of cells.
    shown
        Whether the bar is shown. Default: with more than 20,000 cells.
    """
    # seconds between updates: in a log file, each update is a new line
    interval = 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10
    return tqdm(
        total=n,
        desc=description,
        unit=" cells",
        unit_scale=n >= _MIN_CELLS_FOR_BAR,
        mininterval=interval,
        maxinterval=interval,
        disable=not (n > _MIN_CELLS_FOR_BAR if shown is None else shown),
    )


def print_above_bar(sentence: str) -> None:
    """Print a sentence to stderr, above the progress bar if one is shown."""
    tqdm.write(sentence, file=sys.stderr)
