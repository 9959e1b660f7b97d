"""Parts of sentences that errors have in common."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def head(values: Iterable[object], n: int = 5) -> str:
    """The first few of many, for a sentence."""
    first = list(islice(values, n + 1))
    return ", ".join(map(str, first[:n])) + (", …" if len(first) > n else "")


def missing_key(slot: str, key: str, keys: Iterable[object], argument: str | None = None) -> str:
    """That a table has no such key, which ones it has, which one may have been meant, and how to say so."""
    names = [str(k) for k in keys]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{slot} has no {key!r} (its keys: {', '.join(names) or 'none'}).{hint}" + (
        "" if argument is None else f" Name it with {argument}."
    )


def missing_label(argument: str, label: object, labels: Iterable[object]) -> str:
    """That no cell has a label that was named, which ones there are, and which one may have been meant."""
    there = {str(known).lower(): str(known) for known in labels}
    close = difflib.get_close_matches(str(label).lower(), list(there), n=1)
    hint = f" Did you mean {there[close[0]]!r}?" if close else ""
    return f"{argument}={label!r}: no cell has that perturbation (there are: {head(there.values())}).{hint}"
