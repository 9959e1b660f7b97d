from __future__ import annotations

import sys

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from scbd import _threads
from scbd._threads import one_blas_thread, one_torch_thread, torch_threads_kept


def test_torch_keeps_its_threads_whatever_happens():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads_kept():
        torch.set_num_threads(before + 1)
        raise KeyError
    assert torch.get_num_threads() == before


def test_torch_is_not_loaded_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with torch_threads_kept():
        one_torch_thread()
    assert "torch" not in sys.modules


def test_one_thread_until_then():
    before = torch.get_num_threads()
    with torch_threads_kept():
        torch.set_num_threads(3)
        one_torch_thread()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_numpy_and_scipy_have_one_thread_within():
    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    with threadpool_limits(2, user_api="blas"):
        assert set(threads()) == {2}
        with one_blas_thread():
            assert set(threads()) == {1}
        assert set(threads()) == {2}


def test_libraries_are_looked_for_again_once_more_is_loaded(monkeypatch):
    _threads._libraries.cache_clear()
    for _ in range(3):
        with one_blas_thread():
            pass
    assert _threads._libraries.cache_info().misses <= 2  # to look loads what looks
    before = _threads._libraries.cache_info().misses
    monkeypatch.setitem(sys.modules, "a_library_that_is_new", sys)
    with one_blas_thread():
        pass
    assert _threads._libraries.cache_info().misses == before + 1


def test_torch_has_one_thread_within_where_asked():
    before = torch.get_num_threads()
    with one_blas_thread(torch_too=True):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
