"""Reuse of freed memory within a process."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# codes, defined in malloc.h, of three options of the C function mallopt, which configures memory allocation: trim
# threshold, mmap threshold and maximum number of mmap allocations
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in the process, instead of returning it to the system, until the ``with`` statement ends.

    By default, the C library (glibc) returns the memory of each batch's activations to the system. The system zeroes
    this memory page by page when the next batch allocates it again. This takes up to half of the time of embedding
    cells on a CPU. The function has an effect only on Linux with glibc, if ``device`` is a CPU, and if no environment
    variable configures memory allocation.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" and device.type == "cpu" else None
    tuned = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if library is None or tuned or not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        # By default, the C library glibc adapts its thresholds of memory allocation to the program, up to a limit.
        # Setting a threshold switches the adaptation off for good. At the end, the thresholds are therefore set to the
        # limits of the adaptation.
        library.mallopt(_MMAP_MAX, 65_536)
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_TRIM_THRESHOLD, 64 << 20)
        library.malloc_trim(0)
