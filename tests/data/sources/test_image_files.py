from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scbd.data.sources import FileSource


@pytest.fixture
def plates(tmp_path):
    """A table's folder, beside one with images."""
    (tmp_path / "meta").mkdir()
    (tmp_path / "disk" / "plate 1").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((4, 4), number, "uint8")).save(tmp_path / "disk" / "plate 1" / f"{number}.png")
    return tmp_path


def numbers(source: FileSource) -> list[int]:
    return source.read(slice(None))[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("start", ["", "./", "../disk/", "plate 1/../"])
def test_paths_relative_to_the_folder(plates, start):
    assert numbers(FileSource(plates / "disk", [[f"{start}plate 1/{n}.png"] for n in (2, 0)])) == [2, 0]
    assert numbers(FileSource(plates / "disk" / "plate 1", [[f"{n}.png"] for n in (1, 1)])) == [1, 1]


def test_absolute_paths_are_read_where_they_lie_in_the_folder(plates):
    paths = [[str(plates / "disk" / "plate 1" / f"{n}.png")] for n in (2, 1)]
    for folder in (plates, plates / "disk", "/"):
        assert numbers(FileSource(folder, paths)) == [2, 1]
    with pytest.raises(ValueError, match=r"Row 0 of the table names .*2.png', which is outside of .*meta: give the"):
        FileSource(plates / "meta", paths)


def test_links_in_the_folder_lead_where_they_do(plates):
    """Plates are often linked into a project; a name cannot make a link."""
    (plates / "meta" / "plate").symlink_to(plates / "disk" / "plate 1")
    (plates / "meta" / "2.png").symlink_to(plates / "disk" / "plate 1" / "2.png")
    assert numbers(FileSource(plates / "meta", [["plate/1.png"], ["2.png"]])) == [1, 2]
    # a folder that is itself a link, by either of its names
    (plates / "project").symlink_to(plates / "disk")
    for name in ("project", "disk"):
        paths = [[str(plates / name / "plate 1" / "1.png")]]
        assert numbers(FileSource(plates / "project", paths)) == [1]


@pytest.mark.parametrize("path", ["../disk/plate 1/0.png", "plate/../../disk/plate 1/0.png", "/etc/passwd"])
def test_names_do_not_leave_the_folder(plates, path):
    """Not by way of a link either: what ``..`` says is taken at its word."""
    (plates / "meta" / "plate").symlink_to(plates / "disk" / "plate 1")
    with pytest.raises(ValueError, match="Row 1 of the table names .* outside of .*meta: .* as root"):
        FileSource(plates / "meta", [["plate/0.png"], [path]])
    with pytest.raises(ValueError, match="outside of"):
        FileSource(plates / "meta", [["plate/0.png", path]])


def test_a_folder_is_looked_at_once_and_files_not_at_all(plates, monkeypatch):
    looked: list[str] = []
    real = os.path.realpath

    def realpath(path, **how):
        looked.append(path)
        return real(path, **how)

    monkeypatch.setattr(os.path, "realpath", realpath)
    monkeypatch.setattr(Path, "resolve", None)
    FileSource(plates / "disk", [["plate 1/0.png"]] * 1000)
    assert len(looked) == 1


def test_paths_take_little_more_than_their_names(plates):
    n = 20_000
    paths = np.array([[f"plate 1/cell_{row:08d}_{c}.png" for c in "ab"] for row in range(n)], dtype=object)
    paths[0] = ["plate 1/0.png", "plate 1/1.png"]
    tracemalloc.start()
    source = FileSource(plates / "disk", paths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.shape == (n, 2, 4, 4) and peak < 2 * 60 * n


def test_files_of_another_size_or_kind_are_named(plates):
    folder = plates / "disk" / "plate 1"
    Image.fromarray(np.zeros((4, 4), "uint16")).save(folder / "deep.png")
    Image.fromarray(np.zeros((4, 5), "uint8")).save(folder / "wide.png")
    for name, what in {"deep": "1 × 4 × 4 of uint16", "wide": "1 × 4 × 5 of uint8"}.items():
        source = FileSource(folder, [["0.png"], [f"{name}.png"]])
        with pytest.raises(ValueError, match=f"{name}.png is {what}, the first is 1 × 4 × 4 of uint8: all must be"):
            source.read(slice(None))
