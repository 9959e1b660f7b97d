from __future__ import annotations

import os
import sys

import pytest
import torch

from scbd._shared.files import (
    check_file,
    check_plates_distinct,
    open_atomically,
    partial_path,
    remove_partials,
    write_atomically,
)
from scbd._shared.progress import progress_bar
from scbd._shared.threads import keep_torch_threads, limit_torch_to_one_thread


def test_check_plates_distinct_repeated_plate_raises(tmp_path):
    (tmp_path / "a.h5ad").touch()
    (tmp_path / "b.h5ad").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a.h5ad")
    check_plates_distinct([tmp_path / "a.h5ad", str(tmp_path / "b.h5ad"), object(), object()])
    with pytest.raises(ValueError, match=r"a.h5ad is given twice: each cell would be there twice"):
        check_plates_distinct([tmp_path / "a.h5ad", str(tmp_path / "a.h5ad")])
    with pytest.raises(ValueError, match=r"a.h5ad and .*link are one: each cell"):
        check_plates_distinct([tmp_path / "a.h5ad", tmp_path / "b.h5ad", tmp_path / "link"])
    table = object()
    with pytest.raises(ValueError, match=r"plate 0 \(object\) and plate 2 \(object\) are one: each cell"):
        check_plates_distinct([table, object(), table])


def test_open_atomically_failed_write_keeps_previous_file(tmp_path):
    path = tmp_path / "new" / "a.ckpt"
    with open_atomically(path) as file:
        file.write(b"good")
    with pytest.raises(RuntimeError, match="disk full"), open_atomically(path) as file:
        file.write(b"ha")
        assert path.read_bytes() == b"good"
        raise RuntimeError("disk full")
    assert path.read_bytes() == b"good"
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_open_atomically_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    done = []

    def record_calls_of(name):
        call = getattr(os, name)

        def record_and_call(*arguments):
            done.append(name)
            return call(*arguments)

        return record_and_call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, record_calls_of(name))
    with open_atomically(tmp_path / "a") as file:
        file.write(b"x")
    assert done == ["fsync", "replace", "fsync"]


def test_write_atomically_path_is_replaced_only_on_success(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="disk full"), write_atomically(path) as partial:
        partial.write_text("ha")
        raise RuntimeError("disk full")
    assert path.read_text() == "before"
    with write_atomically(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["table.csv"]


def test_write_atomically_two_writers_last_to_finish_wins(tmp_path):
    """Each writer has its own temporary file, and the file of the last to finish is complete."""
    path = tmp_path / "row.json"
    with write_atomically(path) as first:
        first.write_text("first")
        with write_atomically(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_remove_partials_of_other_files_are_kept(tmp_path):
    left, other = tmp_path / ".a[1].ckpt.0f.partial", tmp_path / ".a1.ckpt.0f.partial"
    for path in (left, other):
        path.write_text("half")
    remove_partials(tmp_path / "a[1].ckpt")
    assert os.listdir(tmp_path) == [other.name]


def test_partial_path_long_names_are_shortened(tmp_path):
    """The path is the same in every process and after a kill; names too long for the file system are shortened."""
    assert partial_path(tmp_path / "s.zarr") == tmp_path / ".s.zarr.partial"
    long, other = (partial_path(tmp_path / ("\u00fc" * 120 + end)) for end in (".h5ad", ".zarr"))
    assert len(os.fsencode(long.name)) < 256
    assert long != other and long.parent == tmp_path


def test_check_file_folder_or_missing_file_raises(tmp_path):
    (tmp_path / "table.csv").touch()
    assert check_file(str(tmp_path / "table.csv")) == tmp_path / "table.csv"
    with pytest.raises(FileNotFoundError, match="is a folder: name a file"):
        check_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no file .*other.csv"):
        check_file(tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("n", "settings", "seen"),
    [
        (100, {}, False),
        (100_000, {}, True),
        (100, {"shown": True}, True),
        (100_000, {"shown": False}, False),
    ],
)
def test_progress_bar_long_task_or_requested_is_shown(capsys, n, settings, seen):
    with progress_bar("Counting", n, **settings) as bar:
        bar.update(n)
    said = capsys.readouterr().err
    assert ("Counting" in said and "100%" in said and " cells/s" in said) is seen


def test_keep_torch_threads_exception_restores_threads():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), keep_torch_threads():
        torch.set_num_threads(before + 1)
        raise KeyError
    assert torch.get_num_threads() == before


def test_keep_torch_threads_torch_not_loaded_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with keep_torch_threads():
        limit_torch_to_one_thread()
    assert "torch" not in sys.modules


def test_limit_torch_to_one_thread_is_undone_by_keep_torch_threads():
    before = torch.get_num_threads()
    with keep_torch_threads():
        torch.set_num_threads(3)
        limit_torch_to_one_thread()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
