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


def test_one_place_by_two_names(tmp_path):
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


def test_half_a_file_never_takes_the_name_of_a_whole_one(tmp_path):
    path = tmp_path / "new" / "a.ckpt"
    with open_atomically(path) as file:
        file.write(b"good")
    with pytest.raises(RuntimeError, match="disk full"), open_atomically(path) as file:
        file.write(b"ha")
        assert path.read_bytes() == b"good"
        raise RuntimeError("disk full")
    assert path.read_bytes() == b"good"
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_a_file_is_on_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    done = []

    def noted(name):
        call = getattr(os, name)

        def doing(*arguments):
            done.append(name)
            return call(*arguments)

        return doing

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    with open_atomically(tmp_path / "a") as file:
        file.write(b"x")
    assert done == ["fsync", "replace", "fsync"]


def test_a_path_takes_its_name_when_what_writes_there_is_done(tmp_path):
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


def test_two_who_write_one_file_do_not_meet(tmp_path):
    """Each to a place of its own: the last to end has its whole file there."""
    path = tmp_path / "row.json"
    with write_atomically(path) as first:
        first.write_text("first")
        with write_atomically(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_what_the_killed_have_left_is_removed_of_this_file_alone(tmp_path):
    left, other = tmp_path / ".a[1].ckpt.0f.partial", tmp_path / ".a1.ckpt.0f.partial"
    for path in (left, other):
        path.write_text("half")
    remove_partials(tmp_path / "a[1].ckpt")
    assert os.listdir(tmp_path) == [other.name]


def test_where_a_store_lies_until_it_is_whole(tmp_path):
    """The same place in every process, and after a kill; names that a file system does not take are made short."""
    assert partial_path(tmp_path / "s.zarr") == tmp_path / ".s.zarr.partial"
    long, other = (partial_path(tmp_path / ("\u00fc" * 120 + end)) for end in (".h5ad", ".zarr"))
    assert len(os.fsencode(long.name)) < 256
    assert long != other and long.parent == tmp_path


def test_a_folder_is_no_file(tmp_path):
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
def test_a_bar_is_shown_where_waiting_is_long_or_where_it_is_asked_for(capsys, n, settings, seen):
    with progress_bar("Counting", n, **settings) as bar:
        bar.update(n)
    said = capsys.readouterr().err
    assert ("Counting" in said and "100%" in said and " cells/s" in said) is seen


def test_torch_keeps_its_threads_whatever_happens():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), keep_torch_threads():
        torch.set_num_threads(before + 1)
        raise KeyError
    assert torch.get_num_threads() == before


def test_torch_is_not_loaded_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with keep_torch_threads():
        limit_torch_to_one_thread()
    assert "torch" not in sys.modules


def test_one_thread_until_then():
    before = torch.get_num_threads()
    with keep_torch_threads():
        torch.set_num_threads(3)
        limit_torch_to_one_thread()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
