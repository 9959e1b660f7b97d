from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from scbd.model._memory import freed_memory_kept

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's allocator")

# pages the operating system gives a process for the same 64 MiB, taken and freed eight times: before, within, after
# an error, and after
COUNT = """
import resource, torch
from scbd import SCBDModel  # as much is loaded as where models train, since that shapes the heap
from scbd.model._memory import freed_memory_kept

def pages():
    torch.empty(2**26, dtype=torch.uint8).fill_(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(2**26, dtype=torch.uint8).fill_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages())
with freed_memory_kept():
    print(pages())
try:
    with freed_memory_kept():
        raise RuntimeError
except RuntimeError:
    print(pages())
"""


def counted(**environment: str) -> list[int]:
    """In a process of its own, whose memory no other test has shaped."""
    allocator = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(allocator)}
    process = subprocess.run(
        [sys.executable, "-c", COUNT], env=clean | environment, capture_output=True, text=True, check=True
    )
    return [int(line) for line in process.stdout.split()]


@glibc
def test_freed_memory_is_kept_within_and_returned_after():
    before, within, after = counted()
    assert within < before / 3  # a block may be taken anew where something small came to lie in its way
    assert after > before / 2


@glibc
def test_somebody_s_own_tuning_is_respected():
    before, within, _ = counted(MALLOC_TRIM_THRESHOLD_="131072")
    assert within > before / 2


def test_other_systems_are_left_alone(monkeypatch):
    loaded: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: loaded.append(name))
    for system in ("darwin", "win32"):
        monkeypatch.setattr("sys.platform", system)
        with freed_memory_kept():
            pass
    assert not loaded
