from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from scbd.data.sources._byte_ranges import LocalFiles, RemoteFiles

DATA = bytes(range(256))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 20), st.integers(1, 50))
def test_targets_are_filled_however_little_a_call_reads(sizes, start, most):
    """A system call may read less than was asked for."""
    preadv = os.preadv

    def short(descriptor, targets, offset):
        return preadv(descriptor, [targets[0][:most]], offset)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "file").write_bytes(DATA)
        patch.setattr(os, "preadv", short)
        targets = [bytearray(size) for size in sizes]
        LocalFiles(Path(folder)).read_into("file", start, [memoryview(target) for target in targets])
        assert b"".join(targets) == DATA[start : start + sum(sizes)]


def test_what_is_not_there_is_said_of_an_object_store(tmp_path):
    held = {"a/file": default_buffer_prototype().buffer.from_bytes(DATA)}
    files = RemoteFiles(MemoryStore(held), "a")
    assert files.read("file", 3, 5) == DATA[3:8] and files.read("file", -6, 6) == DATA[-6:]
    assert files.size("file") == 256
    for start, length in ((250, 10), (-300, 300)):
        with pytest.raises(EOFError, match=f"of {length} bytes at {start}"):
            files.read("file", start, length)
    with pytest.raises(FileNotFoundError):
        files.read("none", 0, 1)


def test_what_is_not_there_is_said(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    files = LocalFiles(tmp_path)
    assert files.read("file", -6, 6) == DATA[-6:] and files.size("file") == 256
    for call in (
        lambda: files.read("file", 250, 10),
        lambda: files.read("file", -300, 300),
        lambda: files.read_into("file", 250, [memoryview(bytearray(10))]),
    ):
        with pytest.raises(EOFError):
            call()
    with pytest.raises(FileNotFoundError):
        files.read("none", 0, 1)
