"""A bar for people who wait: how much is done, how fast, how long it takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable

# what takes longer than a glance at about ten thousand a second
_WORTH_A_BAR = 20_000
# how sentences are put: the command line names its options in place of arguments
wording: Callable[[str], str] = str


def progress_bar(
    description: str,
    n: int,
    *,
    unit: str = "cell",
    initial: int = 0,
    shown: bool | None = None,
    worth: int = _WORTH_A_BAR,
) -> tqdm:
    """A bar that counts to ``n``.

    Parameters
    ----------
    description
        What is done.
    n
        How many there are.
    unit
        What is counted.
    initial
        How many were done before.
    shown
        Whether to show it; `None`: where there are more than ``worth``.
    worth
        From how many on waiting is worth a bar.
    """
    # a log file wants a line now and then, not ten a second
    interval = 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10
    return tqdm(
        total=n,
        initial=initial,
        desc=description,
        unit=f" {unit}s",
        unit_scale=n >= _WORTH_A_BAR,
        mininterval=interval,
        maxinterval=interval,
        disable=not (n > worth if shown is None else shown),
    )


def say(sentence: str) -> None:
    """Something to know meanwhile, above a bar that stays where it is."""
    tqdm.write(wording(sentence), file=sys.stderr)
