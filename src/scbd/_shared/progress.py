"""Progress bars that count cells, and messages on the terminal that leave a progress bar intact."""

from __future__ import annotations

import sys

from tqdm import tqdm

# Number of cells above which a progress bar is shown. At 10,000 cells per second, this number of cells takes two
# seconds.
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
    # Time in seconds between updates of the progress bar. It is short in a terminal or notebook. It is long if the
    # output goes to a log file, because each update adds a line to the file.
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
