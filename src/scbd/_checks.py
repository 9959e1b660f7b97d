"""Settings of networks and losses that say what is wrong with them before anything is built."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ``ValueError`` unless a setting is a whole number that is large enough."""
    if not isinstance(value, Integral) or value < least:
        msg = f"{name} is a whole number of at least {least}, got {value!r}."
        raise ValueError(msg)


def check_weight(name: str, value: float, what: str) -> None:
    """Raise ``ValueError`` unless a setting is a finite number that is not negative.

    Parameters
    ----------
    name
        Of the setting.
    value
        Of the same.
    what
        What it does, for the sentence.
    """
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        msg = f"{name} {what}: give a number that is 0 or larger, got {value!r}."
        raise ValueError(msg)
