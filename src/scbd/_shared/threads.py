"""Control the number of CPU threads that torch uses, without importing torch if it is not loaded yet."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of CPU threads at the end of the ``with`` block, if torch is loaded.

    Use this context manager around code that calls numba. numba sets the number of OpenMP threads, and thereby that of
    torch, to the number of all processors. A process that was limited to one thread, because it shares the machine with
    other processes, would then be several times slower.
    """
    torch = sys.modules.get("torch")
    n = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(n)


def limit_torch_to_one_thread() -> None:
    """Limit torch to one CPU thread in operations started by the calling thread; do nothing if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)
