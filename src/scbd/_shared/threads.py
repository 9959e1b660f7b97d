"""Number of threads that torch uses, without importing torch."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end of the block, if torch is loaded.

    numba sets the number of OpenMP threads, and thereby that of torch, to the number of all processors. A process that
    was limited to one thread because it shares the machine with others would be several times slower afterwards.
    """
    torch = sys.modules.get("torch")
    n = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(n)


def limit_torch_to_one_thread() -> None:
    """Limit torch, if it is loaded, to one thread for operations that the calling thread starts."""
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)
