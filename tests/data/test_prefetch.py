from __future__ import annotations

import threading
import time

import pytest
import torch

from scbd.data import prefetch
from scbd.data._prefetch import worked_on
from scbd.data._prefetch import workers as n_workers_of


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "scbd-prefetch"]


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_items_come_in_order(ahead):
    assert list(prefetch(iter(range(20)), ahead)) == list(range(20))
    assert not workers()


def test_nothing_comes_of_nothing():
    assert list(prefetch([])) == []


def test_it_is_never_further_ahead_than_asked():
    made = []
    third = threading.Event()

    def items():
        for item in range(10):
            made.append(item)
            if item == 3:
                third.set()
            yield item

    iterator = prefetch(items(), ahead=2)
    assert next(iterator) == 0
    assert third.wait(10)  # two wait, one is in hand
    assert made == [0, 1, 2, 3]
    iterator.close()


def test_an_error_comes_where_its_item_would_have():
    def items():
        yield 1
        raise OSError("the disk is gone")

    iterator = prefetch(items())
    assert next(iterator) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not workers()


def test_leaving_early_ends_the_thread():
    iterator = prefetch(iter(range(1000)))
    next(iterator)
    assert workers()
    iterator.close()
    assert not workers()


def test_the_work_is_done_elsewhere():
    (name,) = set(prefetch(threading.current_thread().name for _ in range(3)))
    assert name == "scbd-prefetch"


@pytest.mark.parametrize("n", [1, 3, None])
def test_results_come_in_order_whoever_is_first(n):
    def slow_at_first(item):
        time.sleep(0.02 / (1 + item))
        return item, threading.current_thread().name.split("_")[0], torch.get_num_threads()

    threads = torch.get_num_threads()
    assert list(worked_on(slow_at_first, range(9), n)) == [(item, "scbd-worker", 1) for item in range(9)]
    assert torch.get_num_threads() == threads


def test_they_work_beside_each_other():
    met = threading.Barrier(3, timeout=10)
    assert sorted(worked_on(lambda _: met.wait(), range(3), 3)) == [0, 1, 2]


def test_an_error_ends_all_work():
    begun = []

    def work(item):
        begun.append(item)
        if item == 1:
            raise OSError("the disk is full")
        time.sleep(0.01)

    with pytest.raises(OSError, match="the disk is full"):
        list(worked_on(work, range(1000), 2))
    assert len(begun) < 1000 and not [t for t in threading.enumerate() if t.name.startswith("scbd-worker")]


def test_leaving_early_begins_nothing_more():
    begun: list[int] = []

    def work(item):
        begun.append(item)
        time.sleep(0.01)

    results = worked_on(work, range(1000), 2)
    next(results)
    results.close()
    assert len(begun) < 1000


def test_how_many_there_are():
    assert n_workers_of(3) == 3 and 2 <= n_workers_of(None) <= 16
    with pytest.raises(ValueError, match="n_workers=0: at least one is needed"):
        n_workers_of(0)
