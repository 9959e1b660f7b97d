"""Checks of settings and arrays that raise errors with a clear message, and functions that word such messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# number of rows of an array that are checked for NaN and infinity at a time, to limit memory
_N_ROWS_CHECKED_AT_ONCE = 65_536


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ``ValueError`` unless the value of the setting ``name`` is a whole number of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        msg = f"{name}={value!r}: give a whole number, {least} or larger."
        raise ValueError(msg)


def check_number(name: str, value: float, most: float = math.inf) -> None:
    """Raise ``ValueError`` unless the value of the setting ``name`` is a finite number from 0 to ``most``."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value <= most or not value < math.inf:
        msg = f"{name}={value!r}: give a number{', 0 or larger' if most == math.inf else f' from 0 to {most:g}'}."
        raise ValueError(msg)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ValueError`` unless the value of a setting is one of the given choices.

    Parameters
    ----------
    name
        Name of the setting, for the error message.
    value
        Value of the setting.
    choices
        Permitted values: a ``Literal`` type, or a collection. If ``choices`` is a mapping from each permitted value to
        a description, the error message includes the descriptions.
    """
    known = get_args(choices) or tuple(choices)
    if value not in known:
        words = choices if isinstance(choices, Mapping) else {}
        said = ", ".join(f"{one!r} ({words[one]})" if one in words else repr(one) for one in known)
        msg = f"{name}={value!r} is not known: use {said}."
        raise ValueError(msg)


def count_or_default(name: str, value: int | None, default: int) -> int:
    """Return the value of the setting ``name`` as a positive whole number, or ``default`` if the value is `None`.

    Raises
    ------
    ValueError
        If the value is not a whole number of at least 1.
    """
    if value is None:
        return default
    check_count(name, value)
    return int(value)


def check_unmasked(name: str, values: Any) -> None:
    """Raise ``TypeError`` if ``values`` is a masked array of numpy.

    The computations of this package would ignore the mask and silently use the masked values.
    """
    if isinstance(values, np.ma.MaskedArray):
        msg = (
            f"{name} is a masked array, and what its mask hides would be used: drop the rows of hidden values, or fill "
            "them in, as with values.filled(np.nan) and what imputes NaN."
        )
        raise TypeError(msg)


def check_finite_rows(values: Any, what: str = "The embedding") -> None:
    """Raise ``ValueError`` if an array ``(N, D)`` contains NaN or infinity.

    The error message states the number of rows (cells) with such values. ``what`` is the name of the array in the
    message.
    """
    n_bad = 0
    for start in range(0, len(values), _N_ROWS_CHECKED_AT_ONCE):
        n_bad += int((~np.isfinite(np.asarray(values[start : start + _N_ROWS_CHECKED_AT_ONCE])).all(axis=1)).sum())
    if n_bad:
        msg = f"{what} has NaN or infinite values in {n_bad:,} of {len(values):,} cells: drop these cells."
        raise ValueError(msg)


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Begin the message of a ``ValueError`` raised in the ``with`` block with ``what``, such as the name of a score."""
    try:
        yield
    except ValueError as error:
        msg = f"{what}: {error}"
        raise ValueError(msg) from error


def join_first(values: Iterable[object], n: int = 5) -> str:
    """Return the first ``n`` values as one text, separated by commas; an ellipsis stands for all further values."""
    first = list(islice(values, n + 1))
    return ", ".join(map(str, first[:n])) + (", …" if len(first) > n else "")


def inflect(n: int | np.integer[Any], singular: str, plural: str) -> str:
    """Return the word ``singular`` if the number ``n`` is 1, otherwise the word ``plural``."""
    return singular if n == 1 else plural


def format_count(n: int | np.integer[Any], noun: str) -> str:
    """Return the number ``n`` with a noun in the singular or the plural, such as "1 cell" or "2,000 cells"."""
    return f"{n:,} {inflect(n, noun, f'{noun}s')}"


def missing_key_message(slot: str, key: str, keys: Iterable[object], argument: str | None = None) -> str:
    """Return the error message for a key that a table or mapping lacks.

    The message lists the existing keys and suggests the one that is most similar to the missing key.

    Parameters
    ----------
    slot
        Name of the table or mapping that lacks the key, such as ``"obs"``.
    key
        The missing key.
    keys
        Existing keys of the table or mapping.
    argument
        Name of the argument with which the user can choose another key. If given, the message mentions it.
    """
    names = [str(k) for k in keys]
    return f"{slot} has no {key!r} (its keys: {', '.join(names) or 'none'}).{suggest_name(str(key), names)}" + (
        "" if argument is None else f" Name it with {argument}."
    )


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return the question "Did you mean …?" with the one of ``names`` that is most similar to a misspelt name.

    If no name is similar, the empty text is returned.
    """
    there = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(there), n=1)
    return f" Did you mean {there[close[0]]!r}?" if close else ""


# Type of the size of images in pixels. A single number is the side of a square; a pair is (height, width).
ImageSize: TypeAlias = int | tuple[int, int]


def size_after_resizing(image_size: ImageSize | None, height: int, width: int) -> tuple[int, int]:
    """Return the height and the width, in pixels, that images have after resizing.

    Parameters
    ----------
    image_size
        Size requested by the user, in pixels. `None` keeps the size of the images. A single number is the side of a
        square, and allowed for square images only. A pair ``(height, width)`` may change the proportions of the images.
    height, width
        Size of the images before resizing, in pixels.

    Raises
    ------
    ValueError
        If ``image_size`` is neither a positive whole number nor a pair of positive whole numbers; or if it is a single
        number and the images are not square, because resizing to a square would distort the images.
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
