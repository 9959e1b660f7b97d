from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from scbd._shared.memory import keep_freed_memory

# pages that the system hands out for blocks that were freed before: by default, within, and after an error
COUNT = """
import resource, torch, scbd
from scbd._shared.memory import keep_freed_memory

def pages():
    torch.empty(2**26, dtype=torch.uint8).fill_(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(2**26, dtype=torch.uint8).fill_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

scbd.SCBDModel  # with its libraries, as in use
print(pages())
try:
    with keep_freed_memory(torch.device("cpu")):
        print(pages())
        raise RuntimeError
except RuntimeError:
    print(pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be asked")
@pytest.mark.parametrize("own", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_keep_freed_memory_sets_allocator_unless_configured(own):
    allocator = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(allocator)}
    done = subprocess.run([sys.executable, "-c", COUNT], env=clean | own, capture_output=True, text=True, check=True)
    before, within, after = map(int, done.stdout.split())
    # a block may be taken anew where something small came to lie in its way
    assert within > before / 2 if own else within < before / 3
    assert after > before / 2


def test_keep_freed_memory_other_system_or_device_does_nothing(monkeypatch):
    loaded: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", loaded.append)
    with keep_freed_memory(torch.device("cuda")):
        pass
    for system in ("darwin", "win32"):
        monkeypatch.setattr("sys.platform", system)
        with keep_freed_memory(torch.device("cpu")):
            pass
    assert not loaded
