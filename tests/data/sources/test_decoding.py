from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from scbd.data.sources._decoding import channels_of, size_of


def test_pixels_of_every_kind(tmp_path):
    grey = np.arange(20, dtype="uint16").reshape(4, 5) * 3000
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(grey).save(tmp_path / name)
        np.testing.assert_array_equal(channels_of(tmp_path / name)[0], grey)
    (tmp_path / "big.tif").write_bytes(tiff(grey.astype(">u2"), big_endian=True))
    big = channels_of(tmp_path / "big.tif")
    np.testing.assert_array_equal(big[0], grey)
    assert big.dtype == np.uint16 and big.dtype.isnative
    whole = grey.astype("int32") * 200
    Image.fromarray(whole).save(tmp_path / "whole.tif")
    found = channels_of(tmp_path / "whole.tif")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], whole)
    Image.fromarray(grey / np.float32(7)).save(tmp_path / "real.tif")
    np.testing.assert_array_equal(channels_of(tmp_path / "real.tif")[0], grey / np.float32(7))


def test_palettes_are_the_colours_that_they_stand_for(tmp_path):
    colours = np.random.default_rng(0).choice([0, 80, 255], (4, 5, 3)).astype("uint8")
    picture = Image.fromarray(colours).quantize(64)
    assert picture.mode == "P"
    picture.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(np.moveaxis(channels_of(tmp_path / "palette.png"), 0, -1), colours)
    mask = colours[..., 0] > 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    np.testing.assert_array_equal(channels_of(tmp_path / "mask.png")[0], mask * np.uint8(255))
    Image.fromarray(colours[..., :2].copy(), "LA").save(tmp_path / "two.png")
    np.testing.assert_array_equal(np.moveaxis(channels_of(tmp_path / "two.png"), 0, -1), colours[..., :2])


def tiff(pixels: np.ndarray, big_endian: bool = False) -> bytes:
    """A plain one, of one strip."""
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


def test_colours_of_16_bits_in_a_png_are_not_halved(tmp_path):
    """Pillow reads the upper eight of them, and says nothing."""
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
        channels_of(path)


# what tifffile makes of three or four channels by default
APART: dict[str, Any] = {"photometric": "rgb", "planarconfig": "separate"}
# of TIFFs that Pillow does not know, or takes for others and says nothing: dtype, channels, how they are written
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
    """Channels first; colours, where they lie together, as Pillow knows them."""
    together = how.get("planarconfig") == "contig"
    kind = {"photometric": "rgb" if len(pixels) > 2 else "minisblack"} if "extrasamples" in how else {}
    tifffile.imwrite(path, np.moveaxis(pixels, 0, -1) if together else pixels, **kind, **how)


@pytest.mark.parametrize("name", MISREAD)
def test_tiffs_that_pillow_misreads_are_read_as_they_are(tmp_path, monkeypatch, name):
    dtype, n_channels, how = MISREAD[name]
    pixels = np.random.default_rng(0).integers(0, 250 if dtype == "uint8" else 4096, (n_channels, 20, 21)).astype(dtype)
    write_tiff(tmp_path / "a.tif", pixels, how)
    found = channels_of(tmp_path / "a.tif")
    np.testing.assert_array_equal(found, pixels)
    assert found.dtype == pixels.dtype and found.dtype.isnative
    assert size_of(tmp_path / "a.tif") == (20, 21)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ValueError, match=r"a.tif is a TIFF that needs one more package .*: pip install tifffile, or"):
        channels_of(tmp_path / "a.tif")


def test_what_pillow_reads_needs_no_other_package(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 21))
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        f"{dtype}.tif": (dtype, {"photometric": "minisblack"}) for dtype in ("uint8", "uint16", "float32")
    }
    kinds |= {"colours.tif": ("uint8", APART), "compressed.tif": ("uint8", APART | {"compression": "zlib"})}
    for name, (dtype, how) in kinds.items():
        tifffile.imwrite(tmp_path / name, pixels.astype(dtype), **how)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for name, (dtype, _) in kinds.items():
        found = channels_of(tmp_path / name)
        np.testing.assert_array_equal(found, pixels)
        assert found.dtype == dtype


@pytest.mark.parametrize(("dtype", "byteorder"), [("uint8", "<"), ("uint16", "<"), ("uint16", ">")])
def test_white_is_the_largest_value_of_any_number_of_bits(tmp_path, dtype, byteorder):
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (20, 21)).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="miniswhite", byteorder=byteorder)
    np.testing.assert_array_equal(channels_of(tmp_path / "a.tif")[0], np.iinfo(dtype).max - pixels)


def test_tiffs_of_other_numbers_say_what_they_hold(tmp_path):
    grey = np.arange(20).reshape(4, 5) - 10
    cases: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        "holds numbers of 8 bits from -10 to 9: save it as 32-bit float": (grey.astype("int8"), {}),
        "holds numbers of 32 bits from -10 to 9: save it as 32-bit float": (grey.astype("int16"), {}),
        "holds float64: save it as 32-bit float": (grey.astype("float64"), {}),
        r"says that 0 is white \(MinIsWhite\) of float32: save it with 0 as black": (
            grey.astype("float32"),
            {"photometric": "miniswhite"},
        ),
    }
    for message, (pixels, how) in cases.items():
        tifffile.imwrite(tmp_path / "a.tif", pixels, **how)
        with pytest.raises(ValueError, match=f"a.tif {message}"):
            channels_of(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "a.tif", np.abs(grey).astype("int8"))
    np.testing.assert_array_equal(channels_of(tmp_path / "a.tif")[0], np.abs(grey))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, beside its error
def test_a_truncated_tiff_is_no_image_either_way(tmp_path):
    pixels = np.zeros((3, 20, 21), "uint16")
    kinds: list[dict[str, Any]] = [{"photometric": "minisblack"}, APART]
    for how in kinds:
        tifffile.imwrite(tmp_path / "a.tif", pixels, **how)
        data = (tmp_path / "a.tif").read_bytes()
        for n_bytes in (100, len(data) // 2):
            (tmp_path / "a.tif").write_bytes(data[:n_bytes])
            with pytest.raises(ValueError, match=r"a.tif (is no TIFF or PNG|cannot be read as TIFF), or is truncated"):
                channels_of(tmp_path / "a.tif")


def test_numbers_that_are_no_pixels(tmp_path):
    for name, value in {"below": -1, "above": 2**24 + 1}.items():
        Image.fromarray(np.full((4, 4), value, "int32")).save(tmp_path / f"{name}.tif")
        with pytest.raises(ValueError, match=f"{name}.tif holds numbers of 32 bits from {value} to {value}: save"):
            channels_of(tmp_path / f"{name}.tif")
