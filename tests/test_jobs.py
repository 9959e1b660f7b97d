"""Several processes at one thing."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import contents, make_cells, make_plates

from scbd._files import partial_path
from scbd._jobs import check_shard, check_space, share_of
from scbd.data import open_screen, write_screen
from scbd.data.stores import _containers as containers

KINDS = ["s.h5ad", "s.zarr"]

CODE = """
import os, sys
sys.path[:0] = [{tests!r}]
from conftest import make_plates
from scbd.data import write_screen

def job(path):
    try:
        write_screen(path, make_plates(), y_key="gene", block_size=8)
    except FileExistsError as error:
        assert "exists: it is kept" in str(error)  # came too late

for path in {paths!r}:
    workers = []
    for _ in range(3):
        workers.append(os.fork())
        if not workers[-1]:
            job(path)
            os._exit(0)
    assert not any(os.waitpid(worker, 0)[1] for worker in workers)
"""


def test_processes_with_the_same_job_all_end_well_and_leave_nothing(tmp_path):
    for name in KINDS:
        write_screen(tmp_path / "whole" / name, make_plates(), y_key="gene", block_size=8)
    paths = [str(tmp_path / str(attempt) / name) for attempt in range(2) for name in KINDS]
    code = CODE.format(tests=str(Path(__file__).parent), paths=paths)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stderr
    for path in map(Path, paths):
        assert contents(path) == contents(tmp_path / "whole" / path.name)
        assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize("name", KINDS)
def test_whoever_comes_late_finds_the_store(tmp_path, monkeypatch, name):
    """Another process finishes while this one is about to begin, or between two of its blocks."""
    kind = containers.HDF5Container if name.endswith("h5ad") else containers.ZarrContainer
    arguments: Any = {"plates": make_plates(), "y_key": "gene", "block_size": 30}
    write_screen(tmp_path / "whole" / name, **arguments)
    for moment in ("begin", "write", "finish"):
        path = tmp_path / moment / name
        original = getattr(kind, moment)

        def late(self, *given, path=path, original=original):
            if not path.exists():
                with monkeypatch.context() as patch:
                    patch.setattr(kind, moment, original)  # noqa: B023
                    write_screen(path, **arguments)
            return original(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(kind, moment, late)
            write_screen(path, **arguments)
        assert contents(path) == contents(tmp_path / "whole" / name)
        assert not list(path.parent.glob(".*"))


def test_a_folder_without_tables_is_no_beginning(tmp_path):
    path = tmp_path / "s.zarr"
    (partial_path(path) / "obsm").mkdir(parents=True)
    assert write_screen(path, make_cells(8), y_key="gene").n_obs == 8
    assert not list(tmp_path.glob(".*"))


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def refused(*given):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert write_screen(tmp_path / "s.h5ad", make_cells(8), y_key="gene").n_obs == 8
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_long_names(tmp_path, suffix):
    path = tmp_path / ("ü" * 120 + suffix)
    write_screen(path, make_cells(8), y_key="gene")
    assert open_screen(path).n_obs == 8


@pytest.mark.parametrize("n_blocks", [0, 1, 7, 12])
@pytest.mark.parametrize("n_shards", [1, 2, 5, 12, 20])
def test_shares_are_ranges_that_make_the_whole_and_differ_by_one_at_most(n_blocks, n_shards):
    done = np.zeros(n_blocks, dtype=bool)
    shares = [share_of(done, (index, n_shards)) for index in range(1, n_shards + 1)]
    np.testing.assert_array_equal(np.concatenate(shares), np.arange(n_blocks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_what_is_done_is_in_no_share_and_moves_no_other_block():
    """Else two processes of which one was started again would write the same blocks."""
    done = np.zeros(10, dtype=bool)
    done[[0, 1, 2, 7]] = True
    assert [share_of(done, (index, 2)).tolist() for index in (1, 2)] == [[3, 4], [5, 6, 8, 9]]
    assert not len(share_of(np.ones(10, dtype=bool), (1, 2)))


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (-1, 2), (1, 0)])
def test_a_share_is_one_of_so_many(shard):
    with pytest.raises(ValueError, match=f"shard={shard[0]}/{shard[1]}: give a first number from 1 to the second"):
        check_shard(shard)
    check_shard((1, 1))
    check_shard((2, 2))


@pytest.mark.parametrize("beginning", ["file", "folder", None])
def test_a_disk_has_room_to_the_byte(tmp_path, monkeypatch, beginning):
    """Beside what has been written of the store, which it does not take again."""
    path, size = tmp_path / "s.h5ad", 100_000
    partial = partial_path(path)
    if beginning == "folder":
        (partial / "obsm").mkdir(parents=True)
        partial = partial / "obsm" / "block"
    if beginning:
        with partial.open("wb") as file:
            file.write(b"x" * 20_000)
            os.fsync(file.fileno())  # some file systems give blocks when they must
    there = [partial_path(path), *partial_path(path).rglob("*")] if beginning else []
    needed = size - sum(place.stat().st_blocks * 512 for place in there)
    assert needed < size or not beginning
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        if free == needed:
            check_space(path, size)
        else:
            with pytest.raises(OSError, match="s.h5ad takes .* more, the disk has .* free: make room first"):
                check_space(path, size)


def test_sizes_are_said_in_a_unit_that_fits(tmp_path):
    free = "the disk has [0-9.]+ [GT]iB free"
    with pytest.raises(OSError, match=f"takes 1.0 EiB more, {free}|takes 1048576.0 TiB more, {free}"):
        check_space(tmp_path / "s.h5ad", 2**60)


def test_where_there_are_no_locks_nothing_is_held(tmp_path, monkeypatch):
    """As on Windows, which has no fcntl: what needs no lock must not ask for one when it is imported."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    module = importlib.reload(importlib.import_module("scbd._jobs"))
    with module.locked(tmp_path), module.locked(tmp_path):
        pass
