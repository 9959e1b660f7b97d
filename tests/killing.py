"""Run a job in processes that are killed at random moments, without warning, until one comes to its end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# has everything loaded, and starts the job for every line it is sent
_SERVER = """
import os, sys
sys.path[:0] = [{tests!r}]
{code}
print("ready", flush=True)
for _ in sys.stdin:
    worker = os.fork()
    if not worker:
        job()
        os._exit(0)
    print(worker, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
"""

# for :func:`kill_until`: writing a screen, slow enough that no process comes to the end in half a second
WRITING = """
import time
from conftest import make_plates
from scbd.data import write_screen
from scbd.data.stores._plan import ScreenPlan

images = ScreenPlan.images
ScreenPlan.images = lambda self, block: (time.sleep(0.02), images(self, block))[1]

def job():
    write_screen({path!r}, make_plates(3, 100), y_key="gene", compression={compression!r}, block_size=4)
"""


def kill_until(done: Path, code: str, longest: float, seed: int = 0) -> int:
    """Start and kill until there is a file, and return how often that was; a job that fails fails here, too.

    Parameters
    ----------
    done
        Made by the job when it is finished.
    code
        Defines ``job()``.
    longest
        Seconds that a process is let live at most; twice that after ten kills, and so on.
    seed
        Of the moments.
    """
    rng, kills = random.Random(seed), 0
    server_code = _SERVER.format(tests=str(Path(__file__).parent), code=code)
    command = [sys.executable, "-c", server_code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        while not done.exists():
            print(file=server.stdin, flush=True)
            worker = int(server.stdout.readline())
            time.sleep(rng.uniform(0, longest * 2 ** (kills // 10)))
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            ended = int(server.stdout.readline().removeprefix("ended"))
            assert ended in (0, -signal.SIGKILL), "the job failed: its error stands above"
            kills += not done.exists()
        server.stdin.close()
    return kills
