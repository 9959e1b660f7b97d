"""Settings that say what is wrong with them before anything is built, and parts of sentences that errors share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable


# rows that are looked through together
_BLOCK = 65_536


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


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ValueError`` unless a setting is one of a ``Literal`` or other choices; a mapping says what each is."""
    known = get_args(choices) or tuple(choices)
    if value not in known:
        words = choices if isinstance(choices, Mapping) else {}
        said = ", ".join(f"{one!r} ({words[one]})" if one in words else repr(one) for one in known)
        msg = f"{name}={value!r} is not known: use {said}."
        raise ValueError(msg)


def count_or(name: str, value: int | None, default: int) -> int:
    """A whole number from 1 on, or the default where it is `None`; see :func:`check_count`."""
    if value is None:
        return default
    check_count(name, value)
    return int(value)


def check_unmasked(name: str, values: Any) -> None:
    """Raise ``TypeError`` if values are a masked array, which numpy would take without its mask."""
    if isinstance(values, np.ma.MaskedArray):
        msg = (
            f"{name} is a masked array, and what its mask hides would be used: drop the rows of hidden values, or fill "
            "them in, as with values.filled(np.nan) and what imputes NaN."
        )
        raise TypeError(msg)


def check_finite_rows(values: Any, what: str = "The embedding") -> None:
    """Raise ``ValueError`` if a row ``(N, D)`` holds NaN or an infinity, and say how many do."""
    n_bad = 0
    for start in range(0, len(values), _BLOCK):
        n_bad += int((~np.isfinite(np.asarray(values[start : start + _BLOCK])).all(axis=1)).sum())
    if n_bad:
        msg = f"{what} has NaN or infinite values in {n_bad:,} of {len(values):,} cells: drop these cells."
        raise ValueError(msg)


def head(values: Iterable[object], n: int = 5) -> str:
    """The first few of many, for a sentence."""
    first = list(islice(values, n + 1))
    return ", ".join(map(str, first[:n])) + (", …" if len(first) > n else "")


def inflect(n: int | np.integer[Any], singular: str, plural: str) -> str:
    """Return the word or phrase that agrees with a number."""
    return singular if n == 1 else plural


def counted(n: int | np.integer[Any], noun: str) -> str:
    """Return a number with its noun, to which an s is added where needed: 1 cell, 2,000 cells."""
    return f"{n:,} {inflect(n, noun, f'{noun}s')}"


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


# pixels a side of a square, or (height, width)
ImageSize: TypeAlias = int | tuple[int, int]


def resized_to(image_size: ImageSize | None, height: int, width: int) -> tuple[int, int]:
    """Height and width of images after they were resized.

    Parameters
    ----------
    image_size
        `None` leaves images as they are. A number makes small squares of large ones. A pair ``(height, width)`` is
        taken at its word: it may stretch images.
    height, width
        Of the images.

    Raises
    ------
    ValueError
        If ``image_size`` is neither, or a number for images that are not square: they would be squashed.
    """
    if image_size is None:
        return height, width
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        msg = f"image_size must be a positive number of pixels, or (height, width), got {image_size!r}."
        raise ValueError(msg)
    if sides is not image_size and height != width:
        kept = tuple(max(1, round(sides[0] * side / max(height, width))) for side in (height, width))
        msg = (
            f"image_size={image_size} would squash images of {height} × {width} pixels to a square: crop or pad them, "
            f"keep their proportions with image_size={kept}, or ask for it by name, with image_size={sides}."
        )
        raise ValueError(msg)
    return int(sides[0]), int(sides[1])
