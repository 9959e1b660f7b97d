"""Read ahead: the next batches are fetched by one background thread while the current one is worked on.

Worker processes cost more than they give here: a batch is one gather from an array or a memory-map, which holds
Python's lock for none of its time.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

Item = TypeVar("Item")

_END = object()


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
