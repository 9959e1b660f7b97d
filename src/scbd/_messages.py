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
    return f"{slot} has no {key!r} (its keys: {', '.join(names) or 'none'}).{closest(str(key), names)}" + (
        "" if argument is None else f" Name it with {argument}."
    )


def closest(name: str, names: Iterable[str]) -> str:
    """A question that asks for the one of some names that may have been meant; nothing if none is alike."""
    there = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(there), n=1)
    return f" Did you mean {there[close[0]]!r}?" if close else ""
