from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
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


def read_one(path: Path) -> np.ndarray:
    return FileSource(path.parent, [[path.name]]).read(slice(None))[0]


def test_pixels_of_every_kind(tmp_path):
    grey = np.arange(20, dtype="uint16").reshape(4, 5) * 3000
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(grey).save(tmp_path / name)
        np.testing.assert_array_equal(read_one(tmp_path / name)[0], grey)
    (tmp_path / "big.tif").write_bytes(tiff(grey.astype(">u2"), big_endian=True))
    big = read_one(tmp_path / "big.tif")
    np.testing.assert_array_equal(big[0], grey)
    assert big.dtype == np.uint16 and big.dtype.isnative
    whole = grey.astype("int32") * 200
    Image.fromarray(whole).save(tmp_path / "whole.tif")
    found = read_one(tmp_path / "whole.tif")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], whole)
    Image.fromarray(grey / np.float32(7)).save(tmp_path / "real.tif")
    np.testing.assert_array_equal(read_one(tmp_path / "real.tif")[0], grey / np.float32(7))


def test_palettes_are_the_colours_that_they_stand_for(tmp_path):
    colours = np.random.default_rng(0).choice([0, 80, 255], (4, 5, 3)).astype("uint8")
    picture = Image.fromarray(colours).quantize(64)
    assert picture.mode == "P"
    picture.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(np.moveaxis(read_one(tmp_path / "palette.png"), 0, -1), colours)
    mask = colours[..., 0] > 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_one(tmp_path / "mask.png")[0], mask * np.uint8(255))
    Image.fromarray(colours[..., :2].copy(), "LA").save(tmp_path / "two.png")
    np.testing.assert_array_equal(np.moveaxis(read_one(tmp_path / "two.png"), 0, -1), colours[..., :2])


def tiff(pixels: np.ndarray, big_endian: bool = False, samples: int = 1) -> bytes:
    """A plain one, of one strip."""
    order = ">" if big_endian else "<"
    height, width = pixels.shape[:2]
    bits = pixels.dtype.itemsize * 8
    data = pixels.tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, 2 if samples == 3 else 1)]
    tags += [(273, 8), (277, samples), (278, height), (279, len(data))]
    tail = b""
    if samples == 3:  # the bits of each, behind the directory
        place = 8 + len(data) + 2 + 12 * len(tags) + 4
        tail = struct.pack(f"{order}3H", bits, bits, bits)
    directory = struct.pack(f"{order}H", len(tags))
    for tag, value in tags:
        if tag == 258 and samples == 3:
            directory += struct.pack(f"{order}HHII", tag, 3, 3, place)
        else:
            directory += struct.pack(f"{order}HHII", tag, 4, 1, value)
    start = struct.pack(f"{order}2sHI", b"MM" if big_endian else b"II", 42, 8 + len(data))
    return start + data + directory + struct.pack(f"{order}I", 0) + tail


@pytest.mark.parametrize("ending", ["tif", "png"])
def test_colours_of_16_bits_are_not_halved(tmp_path, ending):
    """Pillow reads the upper eight of them, and says nothing."""
    colours = np.random.default_rng(0).integers(0, 2**16, (4, 5, 3), dtype="uint16")
    path = tmp_path / f"colours.{ending}"
    if ending == "tif":
        path.write_bytes(tiff(colours, samples=3))
    else:
        lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
        parts = [
            (b"IHDR", struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(lines)),
            (b"IEND", b""),
        ]
        chunks = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(ValueError, match=rf"colours.{ending} holds colours of 16 bits, of which half would be lost"):
        read_one(path)


def test_numbers_that_are_no_pixels(tmp_path):
    for name, value in {"below": -1, "above": 2**24 + 1}.items():
        Image.fromarray(np.full((4, 4), value, "int32")).save(tmp_path / f"{name}.tif")
        with pytest.raises(ValueError, match=f"{name}.tif holds numbers of 32 bits from {value} to {value}: save"):
            read_one(tmp_path / f"{name}.tif")


def test_channels_of_one_cell_that_do_not_fit(plates):
    folder = plates / "disk" / "plate 1"
    Image.fromarray(np.zeros((4, 4), "uint16")).save(folder / "deep.png")
    Image.fromarray(np.zeros((4, 5), "uint8")).save(folder / "wide.png")
    with pytest.raises(ValueError, match=r"channels of row 0 differ in type .uint16 and uint8; the first is .*0.png"):
        FileSource(folder, [["0.png", "deep.png"]])
    with pytest.raises(ValueError, match=r"channels of row 0 differ in size .4 × 4 and 4 × 5 pixels; the first is"):
        FileSource(folder, [["0.png", "wide.png"]])
    assert FileSource(folder, [["0.png", "wide.png"]], fit="pad").shape == (1, 2, 5, 5)
