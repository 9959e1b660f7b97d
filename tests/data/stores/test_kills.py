"""A screen is written by processes that are killed at random moments, without warning, until it is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import contents, make_plates

from scbd.data import verify_screen, write_screen

# has everything loaded, and starts a writer for every line it is sent
SERVER = """
import os, sys, time
sys.path[:0] = [{tests!r}]
from conftest import make_plates
from scbd.data import write_screen
from scbd.data.stores.plan import ScreenPlan

images = ScreenPlan.images
ScreenPlan.images = lambda self, block: (time.sleep(0.01), images(self, block))[1]
print("ready", flush=True)
for _ in sys.stdin:
    writer = os.fork()
    if not writer:
        write_screen({path!r}, make_plates(3, 100), y_key="gene", compression={compression!r}, block_size=4)
        os._exit(0)
    print(writer, flush=True)
    os.waitpid(writer, 0)
    print("ended", flush=True)
"""


@pytest.mark.parametrize(("name", "compression"), [("s.h5ad", None), ("s.zarr", "lz4")])
def test_killed_at_random_moments(tmp_path, name, compression):
    plates = make_plates(3, 100)
    write_screen(tmp_path / f"whole_{name}", plates, y_key="gene", compression=compression, block_size=4)
    path, rng, kills = tmp_path / name, random.Random(0), 0
    code = SERVER.format(tests=str(Path(__file__).parents[2]), path=str(path), compression=compression)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        while not path.exists():
            print(file=server.stdin, flush=True)
            writer = int(server.stdout.readline())
            time.sleep(rng.uniform(0, 0.5))
            with suppress(ProcessLookupError):
                os.kill(writer, signal.SIGKILL)
            assert server.stdout.readline() == "ended\n"
            kills += not path.exists()
        server.stdin.close()
    assert kills >= 2
    verify_screen(path)
    assert contents(path) == contents(tmp_path / f"whole_{name}")
