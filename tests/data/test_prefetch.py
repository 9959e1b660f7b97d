from __future__ import annotations

import threading

import pytest

from scbd.data import prefetch


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
