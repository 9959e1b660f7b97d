"""Threads: one that reads ahead while a batch is worked on, and several that convert blocks beside each other.

Worker processes cost more than they give here: gathering, resizing, compressing and writing are done by libraries that
hold Python's lock for none of that time.
"""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from scbd._threads import one_torch_thread, torch_threads_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()
# more would only wait for the one that reads
_MOST_WORKERS = 16


def prefetch(items: Iterable[Item], ahead: int = 2) -> Generator[Item]:
    """Iterate over items in order, made by a background thread that is up to ``ahead`` items in front.

    An exception of the iterable is raised where its item would have come. When the iteration is closed early, the
    thread ends with the item at hand.
    """
    made: queue.Queue = queue.Queue(ahead)
    left = threading.Event()

    def hand_over(item: object) -> bool:
        """Wait for room; false when nobody is there any more."""
        while not left.is_set():
            try:
                made.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        try:
            for item in items:
                if not hand_over((item, None)):
                    return
            hand_over((_END, None))
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to the one who iterates
            hand_over((_END, error))

    thread = threading.Thread(target=make, name="scbd-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        left.set()
        thread.join()


def worked_on(work: Callable[[Item], Result], items: Iterable[Item], n_workers: int | None = None) -> Generator[Result]:
    """Results of all items in their order, made by threads of which each uses one core.

    An exception is raised where its result would have come. Then, and when the iteration is closed early, what has been
    begun is finished, and nothing else begun.

    Parameters
    ----------
    work
        What is done with an item.
    items
        All of them.
    n_workers
        Threads; `None`: one a core that this process may use, at least two (one works while another waits for the
        disk), at most 16.
    """
    with torch_threads_kept(), ThreadPoolExecutor(workers(n_workers), "scbd-worker", one_torch_thread) as pool:
        yield from pool.map(work, items)


def workers(n_workers: int | None) -> int:
    """How many there are, see :func:`worked_on`.

    Raises
    ------
    ValueError
        If that is not positive.
    """
    if n_workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(max(cores, 2), _MOST_WORKERS)
    if n_workers < 1:
        msg = f"n_workers={n_workers}: at least one is needed."
        raise ValueError(msg)
    return n_workers
