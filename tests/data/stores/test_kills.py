"""A screen is written by processes that are killed at random moments, without warning, until it is whole."""

from __future__ import annotations

from typing import Any

from conftest import contents, make_plates
from killing import WRITING, killed_until, server

from scbd.data import verify_screen, write_screen


def test_killed_at_random_moments(tmp_path):
    plates = make_plates(3, 100)  # a second and a half to write: more than two processes are let live for
    kinds: dict[str, Any] = {"s.h5ad": None, "s.zarr": "lz4"}
    jobs = [WRITING.format(path="", compression=None)]
    for name, compression in kinds.items():
        write_screen(tmp_path / f"whole_{name}", plates, y_key="gene", compression=compression, block_size=4)
        how = f"y_key='gene', compression={compression!r}, block_size=4"
        jobs.append(f"def {name[2:]}(): write_screen({str(tmp_path / name)!r}, make_plates(3, 100), {how})")
    with server("\n".join(jobs)) as process:  # one for both: it takes seconds to load
        for name in kinds:
            assert killed_until(tmp_path / name, process, name[2:], longest=0.5) >= 2
            verify_screen(tmp_path / name)
            assert contents(tmp_path / name) == contents(tmp_path / f"whole_{name}")
