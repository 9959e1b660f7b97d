"""Warnings that point to the line of the user's code, and silencing of messages from other packages."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def warn_user(message: str) -> None:
    """Raise a ``UserWarning`` that points to the line outside of this package from which the package was called."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


@contextmanager
def without_messages(logger_name: str, warning_patterns: Iterable[str]) -> Iterator[None]:
    """Silence a logger, except for warnings and errors, and some Python warnings, until the ``with`` statement ends.

    Parameters
    ----------
    logger_name
        Name of the logger of another package.
    warning_patterns
        Regular expressions that match the beginning of the Python warnings to silence.
    """
    messages = logging.getLogger(logger_name)
    level = messages.level
    with warnings.catch_warnings():
        for pattern in warning_patterns:
            warnings.filterwarnings("ignore", pattern)
        messages.setLevel(logging.WARNING)
        try:
            yield
        finally:
            messages.setLevel(level)
