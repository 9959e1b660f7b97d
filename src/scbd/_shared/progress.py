"""Progress bars that count cells, and messages on the terminal that leave a progress bar intact."""

from __future__ import annotations

import sys

from tqdm import tqdm

# number of cells above which a progress bar is shown; at 10,000 cells per second, they take about two seconds
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
        Whether the bar is shown. By default, it is shown if ``n`` is larger than 20,000.
    """
    # Seconds between updates of the bar. They are few in a terminal or notebook, but many if the output goes to a log
    # file, where each update adds a line.
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
