"""What is written on a command line, and how it is shown: values with a sentence where they are none."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults where there are any: not of switches, and numbers as short as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.nargs == 0 or not isinstance(action.default, (str, int, float, Path, list)):
            return action.help
        if isinstance(action.default, float):
            return f"{action.help} (default: {action.default:.2g})"
        return super()._get_help_string(action)


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
