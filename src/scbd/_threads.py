"""Libraries that change how many threads the whole process has."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threadpoolctl import ThreadpoolController


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Leave torch, if it is loaded, with the threads it has.

    numba sets OpenMP's number of threads to that of all processors, and torch's with it. A process that was given one,
    beside others, is then several times slower in all that it does later.
    """
    torch = sys.modules.get("torch")
    n = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(n)


def one_torch_thread() -> None:
    """Let torch, if it is loaded, use one core for what the calling thread asks of it."""
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)


@contextmanager
def one_blas_thread(*, torch_too: bool = False) -> Iterator[None]:
    """Keep what numpy and scipy multiply to one core, where torch works between.

    Each library has threads of its own, which go on waiting for work for a while: by turns, they keep each other from
    the processor. Where there is little to do, torch had better have one thread, too.
    """
    with _libraries(len(sys.modules)).limit(limits=1, user_api="blas"), torch_threads_kept():
        if torch_too:
            one_torch_thread()
        yield


@lru_cache(maxsize=1)
def _libraries(n_modules: int) -> ThreadpoolController:
    """What has threads of its own, looked for anew once more modules are loaded: to look takes longer than a small fit.

    What is loaded later comes with a module.
    """
    from threadpoolctl import ThreadpoolController  # comes with scikit-learn

    return ThreadpoolController()
