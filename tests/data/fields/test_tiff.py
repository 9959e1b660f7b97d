"""Fields in TIFF files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scbd.data import crop_cells
from scbd.data.fields import _tiff

CELLS = pd.DataFrame({"y": [20.0, 12.0], "x": [30.0, 11.0]})
IMAGE = np.random.default_rng(0).integers(0, 60_000, (3, 40, 50)).astype("uint16")
CROPS = np.stack([IMAGE[:, 15:26, 25:36], IMAGE[:, 7:18, 6:17]])


@pytest.fixture
def tifffile() -> Any:
    return pytest.importorskip("tifffile", reason="tifffile is not installed")


def pixels(images: Any, **how: Any) -> np.ndarray:
    return crop_cells(images, CELLS, size=11, **how).images.read(slice(None))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"compression": "zlib"},
        {"byteorder": ">"},
        {"imagej": True},
        {"tile": (16, 16), "compression": "zlib"},
        {"metadata": None},
        {"metadata": {"axes": "CYX"}, "ome": True},
    ],
    ids=str,
)
def test_pages_are_channels(tifffile, tmp_path, how):
    tifffile.imwrite(tmp_path / "field.tif", IMAGE, photometric="minisblack", **how)
    found = crop_cells(tmp_path / "field.tif", CELLS, size=11)
    assert found.images.dtype == np.dtype("uint16")
    np.testing.assert_array_equal(found.images.read(slice(None)), CROPS)
    one = crop_cells(tmp_path / "field.tif", CELLS, size=11, channels=[2, 0])
    np.testing.assert_array_equal(one.images.read(slice(None)), CROPS[:, [2, 0]])


def test_colours_and_files_of_their_own_are_channels(tifffile, tmp_path):
    tifffile.imwrite(tmp_path / "rgb.tif", np.moveaxis(IMAGE, 0, -1), photometric="rgb")
    np.testing.assert_array_equal(pixels(str(tmp_path / "rgb.tif")), CROPS)
    files = [tmp_path / f"{channel}.TIFF" for channel in range(3)]
    for file, channel in zip(files, IMAGE, strict=True):
        tifffile.imwrite(file, channel)
    np.testing.assert_array_equal(pixels({"A1": files}), CROPS)
    tifffile.imwrite(files[1], IMAGE[1, :30])
    with pytest.raises(ValueError, match="has channels of 1 × 30 × 50 uint16 and of 1 × 40 × 50 uint16"):
        pixels({"A1": files})


def test_ome_tiff_tells_channels_and_pixels(tifffile, tmp_path):
    metadata = {"axes": "CYX", "PhysicalSizeX": 0.65, "PhysicalSizeY": 0.325, "Channel": {"Name": ["DNA", "ER", "RNA"]}}
    tifffile.imwrite(tmp_path / "field.ome.tif", IMAGE, metadata=metadata)
    places = CELLS * [0.325, 0.65]
    found = crop_cells(tmp_path / "field.ome.tif", places, size=11, physical=True, channels=["RNA", "DNA"])
    np.testing.assert_array_equal(found.images.read(slice(None)), CROPS[:, [2, 0]])


@pytest.mark.parametrize("xml", ["<OME", "<OME/>", "<OME><Image><Pixels PhysicalSizeX='1'/></Image></OME>"])
def test_metadata_that_say_nothing(xml):
    assert _tiff._ome(xml, 2) == (None, None)


def test_files_of_one_image_are_read_by_themselves(tifffile, tmp_path):
    """The metadata of each name the other, as some microscopes have it."""
    for name, channel in zip("ab", IMAGE, strict=False):
        tifffile.imwrite(tmp_path / f"{name}.ome.tif", channel[None], metadata={"axes": "CYX"})
    text = tifffile.tiffcomment(tmp_path / "a.ome.tif")
    uuid = [t.split('UUID="')[1].split('"')[0] for t in (text, tifffile.tiffcomment(tmp_path / "b.ome.tif"))]
    data = "".join(
        f'<TiffData IFD="0" FirstC="{i}" PlaneCount="1"><UUID FileName="{name}.ome.tif">{uuid[i]}</UUID></TiffData>'
        for i, name in enumerate("ab")
    )
    text = text.replace('SizeC="1"', 'SizeC="2"').replace('<TiffData IFD="0" PlaneCount="1"/>', data)
    tifffile.tiffcomment(tmp_path / "a.ome.tif", text)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        assert file.series[0].is_multifile
    np.testing.assert_array_equal(pixels(tmp_path / "a.ome.tif"), CROPS[:, :1])


def test_planes_and_several_images_are_refused(tifffile, tmp_path):
    tifffile.imwrite(tmp_path / "stack.ome.tif", np.zeros((4, 3, 40, 50), "uint8"), metadata={"axes": "ZCYX"})
    with pytest.raises(ValueError, match=r"stack.ome.tif has 4 planes \(z\): crops have channels, height and width"):
        pixels(tmp_path / "stack.ome.tif")
    with tifffile.TiffWriter(tmp_path / "two.tif") as file:
        file.write(IMAGE[0])
        file.write(IMAGE[0, :20])
    with pytest.raises(ValueError, match="two.tif holds 2 images: a field is one"):
        pixels(tmp_path / "two.tif")


def test_broken_files_are_named_and_left_out(tifffile, tmp_path):
    for name in ("whole", "short", "empty", "text"):
        tifffile.imwrite(tmp_path / f"{name}.tif", IMAGE, photometric="minisblack", compression="zlib")
    data = (tmp_path / "short.tif").read_bytes()
    (tmp_path / "short.tif").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.tif").write_bytes(b"")
    (tmp_path / "text.tif").write_text("no image")
    images = {name: tmp_path / f"{name}.tif" for name in ("whole", "short", "empty", "text", "missing")}
    cells = pd.concat([CELLS.assign(field=name) for name in images], ignore_index=True)
    with pytest.raises(ValueError, match=r"4 of 5 fields cannot be read \(short, empty, text, missing\); .*short.tif"):
        crop_cells(images, cells, size=11)
    with pytest.warns(UserWarning, match="4 of 5 fields cannot be read .* Their cells are left out"):
        found = crop_cells(images, cells, size=11, invalid="drop")
    np.testing.assert_array_equal(found.images.read(slice(None)), CROPS)


def test_damage_inside_is_named_when_it_is_read(tifffile, tmp_path):
    tifffile.imwrite(tmp_path / "field.tif", IMAGE, photometric="minisblack", compression="zlib", rowsperstrip=40)
    data = bytearray((tmp_path / "field.tif").read_bytes())
    data[-2000:] = bytes(2000)
    (tmp_path / "field.tif").write_bytes(data)
    with pytest.raises(ValueError, match="field.tif cannot be read as TIFF, or is truncated"):
        pixels(tmp_path / "field.tif")


def test_without_tifffile(tmp_path, monkeypatch):
    (tmp_path / "field.tif").write_bytes(b"II*")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    _tiff._tifffile.cache_clear()
    with pytest.raises(ImportError, match="need one more package: pip install tifffile"):
        pixels(Path(tmp_path / "field.tif"))
