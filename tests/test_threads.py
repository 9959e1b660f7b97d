from __future__ import annotations

import sys

import pytest
import torch

from scbd._threads import one_torch_thread, torch_threads_kept


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
