from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scbd.workflows._rows import FORMAT, fold_rows, read_rows, write_row

# each adds rows of its own, and folds in between what is there
CODE = """
import os
from pathlib import Path
from scbd.workflows._rows import FORMAT, fold_rows, read_rows, write_row

out, workers = Path({out!r}), []
for worker in range(3):
    workers.append(os.fork())
    if not workers[-1]:
        mine = [f"{{worker}}-{{i:02d}}" for i in range(40)]
        for i, key in enumerate(mine, start=1):
            write_row({{"format": FORMAT, "n": i}}, key, out)
            if i % 3 == worker:
                fold_rows(out)
            assert not set(mine[:i]) - set(read_rows(out))
        os._exit(0)
assert not any([os.waitpid(worker, 0)[1] for worker in workers])
"""


class Killed(BaseException):
    """Nothing of what comes after it in the code is done, as after a kill."""


def row(n: Any = 1) -> dict[str, Any]:
    return {"format": FORMAT, "trial": {"seed": n}, "scores": {"z_c out": 0.1, "z_c in": n}}


def filled(out: Path) -> dict[str, Any]:
    """Two rows at rest, one of them run again, and two that are not at rest; returns what is there."""
    for key in "bd":
        write_row(row(), key, out)
    fold_rows(out)
    for key in "cda":
        write_row(row(2), key, out)
    return {"a": row(2), "b": row(), "c": row(2), "d": row(2)}


def names(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


def kill_before(moment: int, monkeypatch) -> None:
    """The n-th thing that is done to a file, and so before all that come after it."""
    moments = itertools.count()
    for name in ("fsync", "replace", "unlink", "rmdir"):
        done = getattr(os, name)

        def step(*given, done=done, **how):
            if next(moments) >= moment:
                raise Killed
            return done(*given, **how)

        monkeypatch.setattr(os, name, step)


def test_files_and_lines_are_read_and_a_file_goes_before_the_line_of_its_key(tmp_path):
    assert read_rows(tmp_path / "none") == {}
    expected = filled(tmp_path)
    assert names(tmp_path) == ["rows", "rows.jsonl", "rows/a.json", "rows/c.json", "rows/d.json"]
    assert list(read_rows(tmp_path).items()) == list(expected.items())
    fold_rows(tmp_path)
    assert list(read_rows(tmp_path).items()) == list(expected.items())
    assert names(tmp_path) == ["rows.jsonl"]


def test_a_new_run_is_a_new_line(tmp_path):
    """Sorted by key, and with everything in its order: a difference between two states of the file is what was run."""
    for key in ("b", "c-10", "c-2"):
        write_row(row(), key, tmp_path)
    fold_rows(tmp_path)
    before = (tmp_path / "rows.jsonl").read_text()
    first = '{"key": "b", "format": 1, "trial": {"seed": 1}, "scores": {"z_c out": 0.1, "z_c in": 1}}'
    assert before.splitlines()[0] == first and before.endswith("}\n")
    write_row(row(7), "c-11", tmp_path)
    fold_rows(tmp_path)
    after = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert after[:2] + after[3:] == before.splitlines() and after[2].startswith('{"key": "c-11", ')
    modified = (tmp_path / "rows.jsonl").stat()
    fold_rows(tmp_path)  # nothing is new
    assert (tmp_path / "rows.jsonl").stat() == modified


def test_killed_at_any_moment_no_row_is_lost_and_the_next_call_ends_it(tmp_path, monkeypatch):
    for moment in itertools.count():
        out = tmp_path / str(moment)
        expected = filled(out)
        with monkeypatch.context() as patch:
            kill_before(moment, patch)
            try:
                fold_rows(out)
            except Killed:
                assert read_rows(out) == expected
            else:
                break
        fold_rows(out)
        assert read_rows(out) == expected and names(out) == ["rows.jsonl"]
    # it is on the disk, renamed, not left under its first name, and so is the folder; three files go, and their folder
    assert moment == 8


def test_a_run_that_ends_while_another_process_folds_is_kept(tmp_path, monkeypatch):
    """Without a lock, as a process of an older version has none."""
    expected, replace = filled(tmp_path), os.replace

    def late(source, target):
        (tmp_path / "rows" / "e.json").write_text('{"format": 1}')
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", late)
        fold_rows(tmp_path)
    assert names(tmp_path) == ["rows", "rows.jsonl", "rows/e.json"]
    assert read_rows(tmp_path) == expected | {"e": {"format": 1}}


def test_what_is_folded_while_it_is_read_is_found(tmp_path, monkeypatch):
    expected, read, listdir = filled(tmp_path), Path.read_bytes, os.listdir
    for when in ("at the first file", "before the first file"):

        def meanwhile(path, *, original):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "read_bytes", read)
                patch.setattr(os, "listdir", listdir)
                fold_rows(tmp_path)
            return original(path)

        with monkeypatch.context() as patch:
            if when == "at the first file":
                patch.setattr(Path, "read_bytes", lambda path: meanwhile(path, original=read))
            else:
                patch.setattr(os, "listdir", lambda path: meanwhile(path, original=listdir))
            assert read_rows(tmp_path) == expected
        assert names(tmp_path) == ["rows.jsonl"]
        filled(tmp_path)


def test_a_file_that_is_gone_hides_no_other(tmp_path, monkeypatch):
    expected, listdir = filled(tmp_path), os.listdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: ["0.json", *listdir(path)])
        assert read_rows(tmp_path) == expected


def test_nobody_folds_while_a_row_is_written(tmp_path, monkeypatch):
    """Else its folder could be removed, as it is empty, just before the row is there."""
    fcntl, fsync = pytest.importorskip("fcntl"), os.fsync
    refused = []

    def another(descriptor):
        folder = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.append(True)
        os.close(folder)
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", another)
        write_row(row(), "a", tmp_path)
    assert refused and read_rows(tmp_path) == {"a": row()}


def test_processes_that_add_and_fold_at_once_lose_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", CODE.format(out=str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert not ended.returncode, ended.stderr
    fold_rows(tmp_path)
    rows = {f"{worker}-{i:02d}": {"format": FORMAT, "n": i + 1} for worker in range(3) for i in range(40)}
    assert list(read_rows(tmp_path).items()) == list(rows.items()) and names(tmp_path) == ["rows.jsonl"]


def test_where_there_are_no_locks_files_stay_files(tmp_path, monkeypatch):
    expected = filled(tmp_path)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    before = names(tmp_path)
    fold_rows(tmp_path)
    assert names(tmp_path) == before and read_rows(tmp_path) == expected


@pytest.mark.parametrize("line", ['{"key": "c", "form', '{"format": 1}', "<<<<<<< HEAD", "[]", "\xff"])
def test_a_damaged_line_is_named(tmp_path, line):
    filled(tmp_path)
    path = tmp_path / "rows.jsonl"
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line.encode("latin-1"), second]))
    message = (
        r"Line 2 of .*rows\.jsonl is no row of an experiment, or is truncated \(.*\): "
        "restore the file from a copy, or delete the line, and it is run again"
    )
    before = path.read_bytes(), names(tmp_path)
    for ask in (read_rows, fold_rows):
        with pytest.raises(ValueError, match=message):
            ask(tmp_path)
    assert before == (path.read_bytes(), names(tmp_path))


def test_a_line_of_another_version_is_refused_and_kept(tmp_path):
    expected = filled(tmp_path)
    path = tmp_path / "rows.jsonl"
    ours = path.read_text()
    path.write_text(ours.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}', 1))
    with pytest.raises(ValueError, match=rf"Line 1 of .* another version of scbd \(rows of format {FORMAT + 1}, this"):
        fold_rows(tmp_path)
    # a file that passed through a system of other line ends is the same
    path.write_bytes(ours.replace("\n", "\r\n").encode() + b"\r\n")
    assert read_rows(tmp_path) == expected
