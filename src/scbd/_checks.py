"""Settings that say what is wrong with them before anything is built."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ``ValueError`` unless a setting is a whole number that is large enough."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        msg = f"{name}={value!r}: give a whole number, {least} or larger."
        raise ValueError(msg)


def check_number(name: str, value: float, most: float = math.inf) -> None:
    """Raise ``ValueError`` unless a setting is a finite number from 0 on, or to the most that it may be."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value <= most or not value < math.inf:
        msg = f"{name}={value!r}: give a number{', 0 or larger' if most == math.inf else f' from 0 to {most:g}'}."
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


def count_or(name: str, value: int | None, default: int) -> int:
    """A whole number from 1 on, or the default where it is `None`; see :func:`check_count`."""
    if value is None:
        return default
    check_count(name, value)
    return int(value)
