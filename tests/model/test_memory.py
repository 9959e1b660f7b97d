from __future__ import annotations

import platform
import resource

import pytest
import torch

from scbd.model._memory import freed_memory_kept

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's allocator")


def pages_handed_out() -> int:
    """Pages the operating system gave this process for the same 64 MiB, taken and freed eight times."""
    torch.empty(2**26, dtype=torch.uint8).fill_(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(2**26, dtype=torch.uint8).fill_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def untuned(monkeypatch):
    for name in (
        "MALLOC_ARENA_MAX",
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "GLIBC_TUNABLES",
        "LD_PRELOAD",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@glibc
def test_freed_memory_is_kept_within_and_returned_after(untuned):
    before = pages_handed_out()
    with freed_memory_kept():
        within = pages_handed_out()
    after = pages_handed_out()
    assert within < before / 3  # one block may be taken anew, where something small lies in its way
    assert after > before / 2


@glibc
def test_it_is_returned_after_an_error(untuned):
    with pytest.raises(RuntimeError), freed_memory_kept():
        raise RuntimeError
    assert pages_handed_out() > 1000


@glibc
def test_somebody_s_own_tuning_is_respected(untuned):
    untuned.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    before = pages_handed_out()
    with freed_memory_kept():
        assert pages_handed_out() > before / 2


def test_other_systems_are_left_alone(untuned):
    untuned.setattr("sys.platform", "darwin")
    with freed_memory_kept():
        pass
