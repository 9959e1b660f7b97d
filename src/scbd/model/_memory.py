"""Keep freed memory at hand while training on a processor.

Activations of tens of megabytes are allocated and freed in every step. By default the C library returns such memory
to the operating system at once, which then hands it out again page by page, zeroed: a quarter of a float32 step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# numbers of mallopt's options, from malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, freed memory stays with the process; after, it is returned.

    Does something with glibc (Linux) alone, and only where nobody has tuned or replaced its allocator. Peak memory
    rises, since freed blocks are not always of the size needed next.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    tuned = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if tuned or not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    assert library is not None
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        # where glibc's own adaptation ends up: explicit values switch it off
        library.mallopt(_MMAP_MAX, 65536)
        library.mallopt(_MMAP_THRESHOLD, 32 * 2**20)
        library.mallopt(_TRIM_THRESHOLD, 64 * 2**20)
        library.malloc_trim(0)
