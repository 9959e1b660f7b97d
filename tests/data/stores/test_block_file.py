"""What a file promises about the disk, whatever way it is written."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_cells

from scbd.data import verify_screen, write_screen

KEY = "single_cell_images"
CHECKSUM_BYTES = 8


def test_a_checksum_is_written_only_once_its_rows_are_on_the_disk(tmp_path, monkeypatch):
    """Else a machine that loses power keeps the word without the rows."""
    events: list[str] = []
    pwrite, fsync = os.pwrite, os.fsync

    def written(file, data, offset):
        events.append("checksum" if len(data) == CHECKSUM_BYTES else "rows")
        return pwrite(file, data, offset)

    def synced(file):
        events.append("sync")
        fsync(file)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fsync", synced)
    write_screen(tmp_path / "s.h5ad", make_cells(12), y_key="gene", block_size=4, n_workers=1)
    assert events.count("checksum") == events.count("rows") == 3
    for place, event in enumerate(events):
        assert event != "checksum" or events[place - 1] == "sync"
    assert events[-1] == "sync"


def test_what_the_system_writes_in_parts_is_written_whole(tmp_path, monkeypatch):
    """A call writes at most 2 GiB; here, a hundred bytes."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:100], offset))
    cells = make_cells(12)
    cells.obs["row"] = np.arange(12)
    screen = write_screen(tmp_path / "s.h5ad", cells, y_key="gene", block_size=5)
    np.testing.assert_array_equal(screen.obsm[KEY], cells.obsm[KEY][screen.obs["row"]])
    verify_screen(tmp_path / "s.h5ad")


def test_a_disk_is_too_small_by_a_byte(tmp_path, monkeypatch):
    cells = make_cells(2000, shape=(1, 32, 32))
    free = cells.obsm[KEY].nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1))
    with pytest.raises(OSError, match="make room first"):
        write_screen(tmp_path / "s.h5ad", cells, y_key="gene")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert write_screen(tmp_path / "s.h5ad", cells, y_key="gene").n_obs == 2000
