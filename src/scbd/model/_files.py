"""Read what torch saved, or say in a sentence why not."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_UNREADABLE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)


def read_header(path: Path, wanted: Callable[[Any], Any], what: str) -> Any:
    """Part of a file that :func:`torch.save` wrote; tensors stay on disk.

    Parameters
    ----------
    path
        An existing file.
    wanted
        Takes the part out of the whole.
    what
        How an error calls such a file.

    Raises
    ------
    ValueError
        If the file is truncated, foreign, or holds no such part.
    """
    try:
        return wanted(torch.load(path, map_location="cpu", weights_only=False, mmap=True))
    except _UNREADABLE as error:
        msg = f"{path} is no {what}, or is truncated ({type(error).__name__}): use another copy of it."
        raise ValueError(msg) from error
