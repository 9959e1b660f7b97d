"""Two forms of one thing, interleaved in one process: times, ratio with its spread, peak memory of a child process."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def interleaved(naive: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> tuple[Row, Any, Any]:
    """Seconds of both (medians), the ratio naive / ours with its sd over pairs, and what both returned."""
    results = naive(), ours()  # first calls load libraries
    return compared(np.array([[timed(naive)[0], timed(ours)[0]] for _ in range(repeats)])), *results


def compared(seconds: np.ndarray) -> Row:
    """A row of ``(repeats, 2)`` seconds, naive and ours."""
    ratios = seconds[:, 0] / seconds[:, 1]
    naive, ours = np.median(seconds, axis=0)
    return {
        "naive_s": float(naive),
        "ours_s": float(ours),
        "ratio": float(np.median(ratios)),
        "ratio_sd": float(ratios.std(ddof=1)) if len(ratios) > 1 else float("nan"),
    }


def largest_difference(ours: Any, naive: Any) -> float:
    """Largest absolute difference over the largest value, of arrays or tensors."""
    one, two = (np.asarray(array, dtype=np.float64) for array in (ours, naive))
    return float(np.abs(one - two).max() / np.abs(two).max())


def said(script: str, *arguments: str) -> list[float]:
    """The numbers that a script of this folder prints, in its last line, when run by itself."""
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [float(word) for word in printed.splitlines()[-1].split()]


def child(script: str, *arguments: str) -> float:
    """The one number: its peak memory, for example."""
    (number,) = said(script, *arguments)
    return number


def resident_peak() -> float:
    """Peak memory of this process so far, in MiB; getrusage would count the parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10


def machine() -> str:
    import torch

    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    instructions = next((name for name in ("amx_bf16", "avx512_bf16") if any(name in line for line in _cpuinfo())), "")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cpu} ({instructions or 'no bfloat16 instructions'}), {torch.get_num_threads()} threads, {device}; "
        f"torch {torch.__version__}, numpy {np.__version__}, scikit-learn {version('scikit-learn')}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
