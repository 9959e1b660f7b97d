"""Run a job in processes that are killed at random moments, until one of them finishes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# code of a process that has imported all modules, and forks a worker for the job named in each line of its input
_SERVER = """
import os, sys
sys.path[:0] = [{tests!r}]
{code}
print("ready", flush=True)
for name in sys.stdin:
    worker = os.fork()
    if not worker:
        globals()[name.strip()]()
        os._exit(0)
    print(worker, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
"""

# code for :func:`kill_until`: write a screen of 75 blocks, 0.02 s each, which takes two threads more than 0.5 s
WRITING = """
import time
from conftest import make_plates
from scbd.data import _screens

_screens._BLOCK_BYTES = 4 * 2 * 16 * 16 * 2  # four rows
images = _screens.ScreenPlan.images
_screens.ScreenPlan.images = lambda self, rows: (time.sleep(0.02), images(self, rows))[1]

def job():
    _screens.write_screen({path!r}, make_plates(3, 100), y_key="gene", compression={compression!r})
"""


@contextmanager
def server(code: str) -> Iterator[subprocess.Popen]:
    """Start a process that imports all modules once, for :func:`killed_until`; ``code`` defines its jobs."""
    server_code = _SERVER.format(tests=str(Path(__file__).parents[1]), code=code)
    command = [sys.executable, "-c", server_code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def kill_until(done: Path, code: str, longest: float, seed: int = 0) -> int:
    """Start and kill a job until it has made a file, and return the number of kills; raise if the job fails.

    Parameters
    ----------
    done
        File that the job makes when it is finished.
    code
        Python code that defines ``job()``.
    longest
        Maximum lifetime of a process in seconds; it doubles after every ten kills.
    seed
        Seed of the random lifetimes.
    """
    with server(code) as process:
        return killed_until(done, process, "job", longest, seed)


def killed_until(done: Path, process: subprocess.Popen, job: str, longest: float, seed: int = 0) -> int:
    """Do the same as :func:`kill_until` with one of several jobs of a :func:`server`."""
    rng, kills = random.Random(seed), 0
    assert process.stdin is not None and process.stdout is not None
    while not done.exists():
        print(job, file=process.stdin, flush=True)
        worker = int(process.stdout.readline())
        time.sleep(rng.uniform(0, longest * 2 ** (kills // 10)))
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        ended = int(process.stdout.readline().removeprefix("ended"))
        assert ended in (0, -signal.SIGKILL), "the job failed: its error stands above"
        kills += not done.exists()
    return kills
