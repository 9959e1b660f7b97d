from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import contents, make_cells, make_plates

from scbd.data import open_screen, write_screen
from scbd.data.stores import containers
from scbd.data.stores.block_file import check_space
from scbd._jobs import partial_path

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


@pytest.mark.parametrize("name", KINDS)
def test_names_and_text_that_no_store_holds(tmp_path, name):
    cases: dict[str, dict[str, Any]] = {
        "obs has a column 'a/b', of which a store makes a path: rename it.*'a_b'": {"a/b": 1},
        "obs has a column '..', of which": {"..": 1},
        "obs has text with a NUL character in 'note'": {"note": ["a\0b"] * 8},
    }
    for message, columns in cases.items():
        cells = make_cells(8)
        cells.obs = cells.obs.assign(**columns)
        with pytest.raises(ValueError, match=message):
            write_screen(tmp_path / name, cells, y_key="gene")
    cells = make_cells(8)
    cells.obs_names = [f"cell\0{i}" for i in range(8)]
    with pytest.raises(ValueError, match="obs has text with a NUL character in 'index'"):
        write_screen(tmp_path / name, cells, y_key="gene")
    assert not list(tmp_path.iterdir())


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
