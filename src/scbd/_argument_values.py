"""What is written on a command line, and how it is shown: values with a sentence where they are none."""

from __future__ import annotations

import argparse
import math
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any


class Help(argparse.HelpFormatter):
    """Help with defaults, except of switches, and with words that are never broken at a hyphen.

    Paragraphs of a description or an epilog are separated by an empty line; a paragraph whose first line is indented is
    printed as it stands.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.nargs == 0 or not isinstance(action.default, (str, int, float, Path, list)):
            return action.help
        default = written(action.default).replace("%", "%%")
        return f"{action.help} (default: {default})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            paragraph
            if paragraph.startswith(" ")
            else textwrap.fill(
                " ".join(paragraph.split()),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
            for paragraph in paragraphs
        )


def written(value: Any) -> str:
    """A default as people write it.

    Parameters
    ----------
    value
        A number, a path, a word, or a list of these.

    Returns
    -------
    A fraction for a number such as two thirds, words separated by spaces for a list, and a number without digits that
    say nothing.

    Examples
    --------
    >>> from scbd._argument_values import written
    >>> written(2 / 3), written(20.0), written(1e-4), written(["dna", "actin"])
    ('2/3', '20', '0.0001', 'dna actin')
    """
    if isinstance(value, list):
        return " ".join(map(written, value))
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.4g}"
    if float(short) == value:
        return short
    fraction = Fraction(value).limit_denominator(12) if math.isfinite(value) else Fraction(0)
    return str(fraction) if float(fraction) == value else short


def path_or_url(text: str) -> Any:
    """A path, or the URL of a store as it is."""
    return text if "://" in text else Path(text)


def shard(text: str) -> tuple[int, int]:
    """``3/8``: the third of eight shares."""
    index, _, n = text.partition("/")
    if not (index.isdecimal() and n.isdecimal()):
        msg = f"{text!r} is no share of the work: write 1/4 for the first of four processes"
        raise argparse.ArgumentTypeError(msg)
    return int(index), int(n)


def seed(text: str) -> int:
    """A whole number below 2^32."""
    if not (text.isdecimal() and int(text) < 2**32):
        msg = f"{text!r} is no seed: give a whole number from 0 on, below 2^32"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def alpha(text: str) -> Any:
    """``auto``, or a weight."""
    return text if text == "auto" else number(text)


def number(text: str) -> float:
    """A weight, 0 or larger."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        msg = f"{text!r} is no weight of the invariance loss: give a number that is 0 or larger"
        raise argparse.ArgumentTypeError(msg)
    return value


def share(text: str) -> float:
    """A share below 1, as a decimal or as a fraction: ``0.5``, ``2/3``."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 <= value < 1:
        msg = f"{text!r} is not a share: give 0 or a number below 1, such as 0.5 or 2/3"
        raise argparse.ArgumentTypeError(msg)
    return value


def image_size(text: str) -> Any:
    """``64``, or ``32x64`` for height and width."""
    height, _, width = text.partition("x")
    return (int(height), int(width)) if width else int(height)


def fit(text: str) -> Any:
    """``pad``, ``crop``, or a size."""
    return text if text in ("pad", "crop") else image_size(text)


def word(text: str) -> str | None:
    """A word, or ``none``."""
    return None if text == "none" else text


def count_or_auto(text: str) -> Any:
    """A number, ``auto``, or ``none``."""
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else int(text)
