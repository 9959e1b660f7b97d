"""Work in threads while a loop consumes its results."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from scbd._shared.threads import keep_torch_threads, limit_torch_to_one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


Item = TypeVar("Item")
Result = TypeVar("Result")


# marks the end of the items in the queue of prefetch
_END_OF_ITEMS = object()
# maximum number of worker threads; more of them would only wait for the thread that is reading
_MAX_WORKERS = 16


def prefetch(items: Iterable[Item], ahead: int = 2) -> Generator[Item]:
    """Iterate over items that a background thread produces in order, up to ``ahead`` items in advance.

    An exception that the iterable raises is raised here in place of its item. If the iteration is closed early, the
    thread finishes its current item and ends. A thread suffices: the libraries that gather rows release Python's global
    interpreter lock, so that a separate process would cost more than it gains.
    """
    made: queue.Queue = queue.Queue(ahead)
    left = threading.Event()

    def hand_over(item: object) -> bool:
        """Put an item into the queue as soon as there is room; return false if the iteration has been closed."""
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
            hand_over((_END_OF_ITEMS, None))
        except BaseException as error:  # noqa: BLE001 any exception is raised again where the items are iterated
            hand_over((_END_OF_ITEMS, error))

    thread = threading.Thread(target=make, name="scbd-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END_OF_ITEMS:
                return
            yield item
    finally:
        left.set()
        thread.join()


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """Apply a function to all items in several threads, and yield the results in the order of the items.

    There is one thread per core, but at least 2 and at most 16 threads. Each thread limits torch to one core.

    An exception is raised in place of its result. After an exception, or if the iteration is closed early, calls that
    have begun are finished, and no others are begun.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # at least two threads, so that one works while another waits for the disk
    n_workers = min(max(cores, 2), _MAX_WORKERS)
    with keep_torch_threads(), ThreadPoolExecutor(n_workers, "scbd-worker", limit_torch_to_one_thread) as pool:
        yield from pool.map(work, items)
