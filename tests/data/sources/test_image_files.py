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
    real, listed = os.path.realpath, os.scandir

    def realpath(path, **how):
        looked.append(path)
        return real(path, **how)

    def scandir(path):
        looked.append(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os.path, "realpath", realpath)
    monkeypatch.setattr(Path, "resolve", None)
    FileSource(plates / "disk", [["plate 1/0.png", "plate 1/1.png"]] * 1000)
    assert len(looked) < 5  # root, folder, and the two that an older Pillow looks at as it opens the first row


def test_paths_take_little_more_than_their_names(plates, monkeypatch):
    n = 2_000
    paths = np.array([[f"plate 1/cell_{row:08d}_{c}.png" for c in "ab"] for row in range(n)], dtype=object)
    for path in paths.ravel():
        (plates / "disk" / path).touch()
    paths[0] = ["plate 1/0.png", "plate 1/1.png"]
    monkeypatch.setattr("scbd.data.sources._listing._AT_ONCE", 1_000)
    tracemalloc.start()
    source = FileSource(plates / "disk", paths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.shape == (n, 2, 4, 4) and peak < 2 * 80 * n


def test_files_of_another_size_or_kind_are_named(plates):
    folder = plates / "disk" / "plate 1"
    Image.fromarray(np.zeros((4, 4), "uint16")).save(folder / "deep.png")
    Image.fromarray(np.zeros((4, 5), "uint8")).save(folder / "wide.png")
    Image.fromarray(np.zeros((4, 4, 3), "uint8")).save(folder / "colours.png")
    kind = "all must be alike, save all with the same channels and bits"
    size = "all must be alike, use fit='pad' or fit='crop'"
    for name, what, remedy in (
        ("deep", "1 × 4 × 4 of uint16", kind),
        ("colours", "3 × 4 × 4 of uint8", kind),
        ("wide", "1 × 4 × 5 of uint8", size),
    ):
        source = FileSource(folder, [["0.png"], [f"{name}.png"]])
        with pytest.raises(ValueError, match=f"{name}.png is {what}, the first is 1 × 4 × 4 of uint8: {remedy}"):
            source.read(slice(None))


def test_missing_files_are_counted_before_any_is_read(plates, monkeypatch):
    paths = [[f"plate 1/{n}.png", f"plate {n % 2}/0.png"] for n in (0, 1, 7, 8, 9)]
    monkeypatch.setattr(Image, "open", None)
    told = r"5 of 10 files .* not there: .*plate 1/7.png \(row 2\), .*/8.png \(row 3\), .*/9.png \(row 4\), …; name"
    with pytest.raises(FileNotFoundError, match=told):
        FileSource(plates / "disk", paths, fit="pad")


def test_a_folder_without_a_list_and_names_in_other_letters(plates, monkeypatch):
    """Some systems open 0.PNG as 0.png."""
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError))
    assert numbers(FileSource(plates / "disk", [["plate 1/2.png"], ["plate 1/0.png"]])) == [2, 0]
    with pytest.raises(FileNotFoundError, match="1 of 2 files"):
        FileSource(plates / "disk", [["plate 1/2.png"], ["plate 1/7.png"]])


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        (".\\plate 1\\0.png", r"write its path with / in place of \\"),
        ("~/plate 1/0.png", "write its path with the name of the folder in place of ~"),
        ("plate 1/0.png ", "remove blanks around its path"),
        (" plate 1/0.png", "remove blanks around its path"),
        ("plate 2/0.png", r"name the folder that paths are relative to \(root=…\), or drop these rows"),
    ],
)
def test_why_a_file_is_not_there(plates, path, remedy):
    with pytest.raises(FileNotFoundError, match=f"1 of 1 files .*: .*row 0.; {remedy}"):
        FileSource(plates / "disk", [[path]])


def test_all_files_that_cannot_be_read_are_told(plates):
    folder = plates / "disk" / "plate 1"
    for number in range(10):
        (folder / f"bad{number}.png").write_bytes(b"no image at all")
    bad = [[f"bad{number}.png"] for number in range(10)]
    with pytest.raises(ValueError, match=r"^10 images cannot be read: .*bad0.png is no TIFF.*bad4.png is no .*, …\.$"):
        FileSource(folder, [["0.png"], *bad, ["1.png"]]).read(slice(None))
    source = FileSource(folder, [["0.png"], *bad * 12])
    read: list[int] = []
    whole = source._image

    def watched(row: int) -> np.ndarray:
        read.append(row)
        return whole(row)

    source._image = watched  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="^101 images cannot be read"):
        source.read(slice(None))
    assert max(read) == 101


def test_channels_of_one_cell_that_do_not_fit(plates):
    folder = plates / "disk" / "plate 1"
    Image.fromarray(np.zeros((4, 4), "uint16")).save(folder / "deep.png")
    Image.fromarray(np.zeros((4, 5), "uint8")).save(folder / "wide.png")
    with pytest.raises(ValueError, match=r"channels of row 0 differ in type .uint16 and uint8; the first is .*0.png"):
        FileSource(folder, [["0.png", "deep.png"]])
    with pytest.raises(ValueError, match=r"channels of row 0 differ in size .4 × 4 and 4 × 5 pixels; the first is"):
        FileSource(folder, [["0.png", "wide.png"]])
    assert FileSource(folder, [["0.png", "wide.png"]], fit="pad").shape == (1, 2, 5, 5)
