from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scbd.data._image_files import FileSource, pad_or_crop, read_channels, read_size, target_size

SIDES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def pad_or_crop_naively(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pad or crop pixel by pixel, about the central pixel."""
    h, w = image.shape
    out = np.zeros((height, width), image.dtype)
    for y in range(height):
        for x in range(width):
            row, column = y - height // 2 + h // 2, x - width // 2 + w // 2
            if 0 <= row < h and 0 <= column < w:
                out[y, x] = image[row, column]
    return out


@given(SIDES, SIDES)
def test_pad_or_crop_any_size_is_equal_to_naive(stored, wanted):
    images = np.random.default_rng(0).integers(1, 99, (2, *stored), dtype="uint16")
    fitted = pad_or_crop(images, wanted)
    assert fitted.dtype == images.dtype
    for image, expected in zip(fitted, images, strict=True):
        np.testing.assert_array_equal(image, pad_or_crop_naively(expected, *wanted))


@given(st.lists(SIDES, min_size=1))
def test_target_size_crop_and_pad_return_smallest_and_largest_side(sizes):
    (low, _), (high, _) = target_size("crop", sizes), target_size("pad", sizes)
    assert all(low <= side <= high for size in sizes for side in size)
    assert {low, high} <= {side for size in sizes for side in size}


@pytest.fixture
def plates(tmp_path):
    """Return a folder with one folder for tables and one with images."""
    (tmp_path / "meta").mkdir()
    (tmp_path / "disk" / "plate 1").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((4, 4), number, "uint8")).save(tmp_path / "disk" / "plate 1" / f"{number}.png")
    return tmp_path


def read_numbers(source: FileSource) -> list[int]:
    return source.read(slice(None))[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("start", ["", "./", "../disk/", "plate 1/../"])
def test_file_source_relative_paths_are_read(plates, start):
    assert read_numbers(FileSource(plates / "disk", [[f"{start}plate 1/{n}.png"] for n in (2, 0)])) == [2, 0]


def test_file_source_absolute_paths_and_links_are_read(plates):
    """Plates are often linked into a project; a name in a table cannot create a link."""
    paths = [[str(plates / "disk" / "plate 1" / f"{n}.png")] for n in (2, 1)]
    for folder in (plates, plates / "disk", "/"):
        assert read_numbers(FileSource(folder, paths)) == [2, 1]
    (plates / "meta" / "plate").symlink_to(plates / "disk" / "plate 1")
    (plates / "meta" / "2.png").symlink_to(plates / "disk" / "plate 1" / "2.png")
    assert read_numbers(FileSource(plates / "meta", [["plate/1.png"], ["2.png"]])) == [1, 2]
    # the root is itself a link, and files are named by either of its names
    (plates / "project").symlink_to(plates / "disk")
    for name in ("project", "disk"):
        assert read_numbers(FileSource(plates / "project", [[str(plates / name / "plate 1" / "1.png")]])) == [1]


@pytest.mark.parametrize("path", ["../disk/plate 1/0.png", "plate/../../disk/plate 1/0.png", "/etc/passwd"])
def test_file_source_path_outside_of_folder_raises(plates, path):
    """Paths must not leave the folder behind a link either: ``..`` is resolved without following links."""
    (plates / "meta" / "plate").symlink_to(plates / "disk" / "plate 1")
    with pytest.raises(ValueError, match="Row 1 of the table names .* outside of .*meta: .* as root"):
        FileSource(plates / "meta", [["plate/0.png"], [path]])
    with pytest.raises(ValueError, match="outside of"):
        FileSource(plates / "meta", [["plate/0.png", path]])


def test_file_source_windows_paths_are_read(plates):
    r"""Tables made under Windows separate folders with ``\\``, which may be part of a file name on other systems."""
    paths = [["plate 1\\2.png"], [".\\plate 1/0.png"], ["plate 1\\..\\plate 1\\1.png"]]
    assert read_numbers(FileSource(plates / "disk", paths)) == [2, 0, 1]
    Image.fromarray(np.full((4, 4), 9, "uint8")).save(plates / "disk" / "plate 1\\2.png")
    assert read_numbers(FileSource(plates / "disk", paths)) == [9, 0, 1]
    with pytest.raises(ValueError, match="outside of"):
        FileSource(plates / "meta", [["..\\disk\\plate 1\\0.png"]])


@pytest.mark.parametrize("path", ["C:\\plate 1\\0.png", "d:/plate 1/0.png", "\\\\server\\share\\plate 1\\0.png"])
def test_file_source_windows_drive_raises_with_advice(plates, path):
    with pytest.raises(FileNotFoundError, match="Windows"):
        FileSource(plates / "disk", [[path]])


@pytest.mark.parametrize("listed", [True, False])
def test_file_source_missing_files_raises_before_reading(plates, monkeypatch, listed):
    """In a folder that cannot be listed, each file is checked on its own."""
    if not listed:
        monkeypatch.setattr(os, "access", lambda *how: False)
    assert read_numbers(FileSource(plates / "disk", [["plate 1/2.png"], ["plate 1/0.png"]])) == [2, 0]
    paths = [[f"plate 1/{n}.png", f"plate {n % 2}/0.png"] for n in (0, 1, 7, 8, 9)]
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(FileNotFoundError, match=r"5 of 10 files .*plate 0/0.png \(row 0\), .*/7.png \(row 2\)"):
        FileSource(plates / "disk", paths, fit="pad")


def test_file_source_many_files_lists_the_folder_once(plates, monkeypatch):
    looked: list[str] = []
    listed = os.listdir

    def list_and_record(path: str) -> list[str]:
        looked.append(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", list_and_record)
    FileSource(plates / "disk", [["plate 1/0.png", "plate 1/1.png"]] * 1000)
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("name", "image", "message"),
    [
        ("deep", np.zeros((4, 4), "uint16"), "1 × 4 × 4 of uint16.*save all images in the same form"),
        ("wide", np.zeros((4, 5), "uint8"), "1 × 4 × 5 of uint8.*fit='pad'"),
        ("colours", np.zeros((4, 4, 3), "uint8"), "3 × 4 × 4 of uint8.*save all images in the same form"),
    ],
)
def test_file_source_other_size_or_kind_raises(plates, name, image, message):
    folder = plates / "disk" / "plate 1"
    Image.fromarray(image).save(folder / f"{name}.png")
    with pytest.raises(ValueError, match=f"{name}.png and the first .*{message}"):
        FileSource(folder, [["0.png"], [f"{name}.png"]]).read(slice(None))
    if name != "colours":
        with pytest.raises(ValueError, match="channels of row 0 differ"):
            FileSource(folder, [["0.png", f"{name}.png"]])
    assert FileSource(folder, [["0.png", "1.png"]], fit="pad").shape == (1, 2, 4, 4)


def test_read_channels_any_dtype_returns_stored_pixels(tmp_path):
    grey = np.arange(20, dtype="uint16").reshape(4, 5) * 3000
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(grey).save(tmp_path / name)
        np.testing.assert_array_equal(read_channels(tmp_path / name)[0], grey)
    (tmp_path / "big.tif").write_bytes(tiff(grey.astype(">u2"), big_endian=True))
    big = read_channels(tmp_path / "big.tif")
    np.testing.assert_array_equal(big[0], grey)
    assert big.dtype == np.uint16 and big.dtype.isnative
    whole = grey.astype("int32") * 200
    Image.fromarray(whole).save(tmp_path / "whole.tif")
    found = read_channels(tmp_path / "whole.tif")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], whole)
    Image.fromarray(grey / np.float32(7)).save(tmp_path / "real.tif")
    np.testing.assert_array_equal(read_channels(tmp_path / "real.tif")[0], grey / np.float32(7))


def test_read_channels_palette_returns_its_colours(tmp_path):
    colours = np.random.default_rng(0).choice([0, 80, 255], (4, 5, 3)).astype("uint8")
    picture = Image.fromarray(colours).quantize(64)
    assert picture.mode == "P"
    picture.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(np.moveaxis(read_channels(tmp_path / "palette.png"), 0, -1), colours)
    mask = colours[..., 0] > 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_channels(tmp_path / "mask.png")[0], mask * np.uint8(255))
    Image.fromarray(colours[..., :2].copy(), "LA").save(tmp_path / "two.png")
    np.testing.assert_array_equal(np.moveaxis(read_channels(tmp_path / "two.png"), 0, -1), colours[..., :2])


def tiff(pixels: np.ndarray, big_endian: bool = False) -> bytes:
    """Return the bytes of an uncompressed TIFF of one strip."""
    order = ">" if big_endian else "<"
    height, width = pixels.shape
    data = pixels.tobytes()
    tags = [(256, width), (257, height), (258, pixels.dtype.itemsize * 8), (259, 1), (262, 1)]
    tags += [(273, 8), (277, 1), (278, height), (279, len(data))]
    directory = struct.pack(f"{order}H", len(tags))
    for tag, value in tags:
        directory += struct.pack(f"{order}HHII", tag, 4, 1, value)
    start = struct.pack(f"{order}2sHI", b"MM" if big_endian else b"II", 42, 8 + len(data))
    return start + data + directory + struct.pack(f"{order}I", 0)


def test_read_channels_16_bit_colour_png_raises(tmp_path):
    """Pillow reads only the upper eight bits, without a warning."""
    colours = np.random.default_rng(0).integers(0, 2**16, (4, 5, 3), dtype="uint16")
    path = tmp_path / "colours.png"
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(ValueError, match=r"colours.png holds colours of 16 bits, of which half would be lost: save it"):
        read_channels(path)


# tifffile's default for three or four channels
APART: dict[str, Any] = {"photometric": "rgb", "planarconfig": "separate"}
# TIFFs that Pillow cannot read, or misreads without a warning: dtype, number of channels, options of writing
MISREAD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "apart": ("uint16", 3, APART),
    "four apart": ("uint16", 4, APART),
    "big-endian": ("uint16", 3, APART | {"byteorder": ">"}),
    "compressed": ("uint16", 3, APART | {"compression": "zlib"}),
    "together": ("uint16", 3, {"photometric": "rgb", "planarconfig": "contig"}),
    "two of 16 bits": ("uint16", 2, {"photometric": "minisblack", "planarconfig": "contig"}),
    "two of which one is extra": ("uint8", 2, {"planarconfig": "contig", "extrasamples": ["unspecified"]}),
    "a fourth that is extra": ("uint8", 4, {"planarconfig": "contig", "extrasamples": ["unspecified"]}),
    "premultiplied": ("uint8", 4, {"planarconfig": "contig", "extrasamples": ["assocalpha"]}),
    "many": ("uint8", 5, {"photometric": "minisblack", "planarconfig": "contig"}),
    "floats": ("float32", 3, APART),
    "halves": ("float16", 3, {"photometric": "minisblack"}),
    "half, grey": ("float16", 1, {}),
}


def write_tiff(path: Path, pixels: np.ndarray, how: dict[str, Any]) -> None:
    """Write pixels given channels first; with extra samples, name the colours in the way that Pillow knows."""
    together = how.get("planarconfig") == "contig"
    kind: dict[str, Any] = {"photometric": "rgb" if len(pixels) > 2 else "minisblack"} if "extrasamples" in how else {}
    tifffile.imwrite(path, np.moveaxis(pixels, 0, -1) if together else pixels, **kind, **how)


@pytest.mark.parametrize("name", MISREAD)
def test_read_channels_tiff_misread_by_pillow_returns_stored_pixels(tmp_path, monkeypatch, name):
    dtype, n_channels, how = MISREAD[name]
    pixels = np.random.default_rng(0).integers(0, 250 if dtype == "uint8" else 4096, (n_channels, 20, 21)).astype(dtype)
    write_tiff(tmp_path / "a.tif", pixels, how)
    found = read_channels(tmp_path / "a.tif")
    np.testing.assert_array_equal(found, pixels)
    assert found.dtype == pixels.dtype and found.dtype.isnative
    assert read_size(tmp_path / "a.tif") == (20, 21)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ValueError, match=r"a.tif is a TIFF that needs one more package .*: pip install tifffile, or"):
        read_channels(tmp_path / "a.tif")


def test_read_channels_tiff_read_by_pillow_needs_no_tifffile(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 21))
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        f"{dtype}.tif": (dtype, {"photometric": "minisblack"}) for dtype in ("uint8", "uint16", "float32")
    }
    kinds |= {"colours.tif": ("uint8", APART), "compressed.tif": ("uint8", APART | {"compression": "zlib"})}
    for name, (dtype, how) in kinds.items():
        tifffile.imwrite(tmp_path / name, pixels.astype(dtype), **how)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for name, (dtype, _) in kinds.items():
        found = read_channels(tmp_path / name)
        np.testing.assert_array_equal(found, pixels)
        assert found.dtype == dtype


@pytest.mark.parametrize(("dtype", "byteorder"), [("uint8", "<"), ("uint16", "<"), ("uint16", ">")])
def test_read_channels_min_is_white_is_inverted(tmp_path, dtype, byteorder):
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (20, 21)).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="miniswhite", byteorder=byteorder)
    np.testing.assert_array_equal(read_channels(tmp_path / "a.tif")[0], np.iinfo(dtype).max - pixels)


def test_read_channels_tiff_of_unsupported_numbers_raises(tmp_path):
    grey = np.arange(20).reshape(4, 5) - 10
    cases: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        "holds numbers of 8 bits from -10 to 9: save it as 32-bit float": (grey.astype("int8"), {}),
        "holds numbers of 32 bits from -10 to 9: save it as 32-bit float": (grey.astype("int16"), {}),
        "holds float64: save it as 32-bit float": (grey.astype("float64"), {}),
        r"stores float32 with 0 as white \(MinIsWhite\): save it with 0 as black": (
            grey.astype("float32"),
            {"photometric": "miniswhite"},
        ),
    }
    for message, (pixels, how) in cases.items():
        tifffile.imwrite(tmp_path / "a.tif", pixels, **how)
        with pytest.raises(ValueError, match=f"a.tif {message}"):
            read_channels(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "a.tif", np.abs(grey).astype("int8"))
    np.testing.assert_array_equal(read_channels(tmp_path / "a.tif")[0], np.abs(grey))


@pytest.mark.filterwarnings("ignore::UserWarning")  # raised by Pillow in addition to its error
def test_read_channels_truncated_tiff_raises(tmp_path):
    pixels = np.zeros((3, 20, 21), "uint16")
    kinds: list[dict[str, Any]] = [{"photometric": "minisblack"}, APART]
    for how in kinds:
        tifffile.imwrite(tmp_path / "a.tif", pixels, **how)
        data = (tmp_path / "a.tif").read_bytes()
        for n_bytes in (100, len(data) // 2):
            (tmp_path / "a.tif").write_bytes(data[:n_bytes])
            with pytest.raises(ValueError, match=r"a.tif (is no TIFF or PNG|cannot be read as TIFF), or is truncated"):
                read_channels(tmp_path / "a.tif")


def test_read_channels_int32_out_of_range_raises(tmp_path):
    for name, value in {"below": -1, "above": 2**24 + 1}.items():
        Image.fromarray(np.full((4, 4), value, "int32")).save(tmp_path / f"{name}.tif")
        with pytest.raises(ValueError, match=f"{name}.tif holds numbers of 32 bits from {value} to {value}: save"):
            read_channels(tmp_path / f"{name}.tif")


def test_file_source_invalid_images_raises(plates):
    folder = plates / "disk" / "plate 1"
    (folder / "text.png").write_bytes(b"no image at all")
    Image.new("CMYK", (5, 6)).save(folder / "cmyk.tif")
    pages = [Image.new("L", (5, 6)), Image.new("L", (5, 3))]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    for name, message in {
        "text.png": "is no TIFF or PNG",
        "cmyk.tif": "'CMYK'",
        "pages.tif": "pages of different sizes",
    }.items():
        with pytest.raises(ValueError, match=f"{name} .*{message}|{name} {message}"):
            FileSource(folder, [["0.png"], [name]]).read(np.array([1]))
