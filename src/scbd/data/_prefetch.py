"""Iterators that compute their items in background threads, such as batches that are read while the model trains."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from scbd._shared.threads import keep_torch_threads, limit_torch_to_one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


Item = TypeVar("Item")
Result = TypeVar("Result")


# object that the background thread of prefetch returns after the last item
_END_OF_ITEMS = object()
# Maximum number of threads in map_in_threads. More threads would only wait, since many sources can be read by only one
# thread at a time.
_MAX_WORKERS = 16


def prefetch(items: Iterable[Item], ahead: int = 2) -> Generator[Item]:
    """Iterate over items that a background thread computes up to ``ahead`` items in advance, in their order.

    An exception that occurs in the background thread is raised again in the loop that consumes the items. If the loop
    ends early, the thread finishes its current item and ends. A thread is used rather than a process, since the
    libraries that read rows release Python's global interpreter lock. A process would only add the cost of copying the
    items.

    Parameters
    ----------
    items
        Iterable of the items, such as batches. It is consumed in the background thread.
    ahead
        Maximum number of items that are computed before they are needed.
    """
    iterator = iter(items)
    pool = ThreadPoolExecutor(1, "scbd-prefetch")
    try:
        # up to `ahead` items wait to be consumed while the thread computes another item
        made = deque(pool.submit(next, iterator, _END_OF_ITEMS) for _ in range(ahead + 1))
        while (item := made.popleft().result()) is not _END_OF_ITEMS:
            made.append(pool.submit(next, iterator, _END_OF_ITEMS))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """Apply a function to all items in several threads, and yield the results in the order of the items.

    There is one thread per CPU core, but at least 2 and at most 16 threads. Torch uses a single core in each of these
    threads.

    If a call of the function raises an exception, the loop that consumes the results receives this exception in place
    of the result. After an exception, or if the loop ends early, running calls are finished and no further call is
    started.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # use at least two threads, so that one thread computes while another waits for the disk
    n_workers = min(max(cores, 2), _MAX_WORKERS)
    with keep_torch_threads(), ThreadPoolExecutor(n_workers, "scbd-worker", limit_torch_to_one_thread) as pool:
        yield from pool.map(work, items)
