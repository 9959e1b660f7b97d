"""Plates and images of OME-Zarr: made by hand in the layout of the specification, and by ome-zarr itself."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import zarr
from plates import NAMES, make_plate, metadata_of_image, pixels, put

from scbd.data import crop_cells, read_plate, write_screen


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_fields_of_a_plate(version, tmp_path):
    table = read_plate(make_plate(tmp_path / "plate.zarr", version), labels="nuclei")
    assert table.index.tolist() == ["A/1/0", "A/1/1", "B/12/0"]
    assert table["well"].tolist() == ["A1", "A1", "B12"]
    assert table[["row", "column", "field"]].to_numpy().tolist() == [["A", "1", "0"], ["A", "1", "1"], ["B", "12", "0"]]
    assert table["channels"].tolist() == [NAMES] * 3 and table["pixel_size"].tolist() == [(0.65, 0.65)] * 3
    for name, image in table["image"].items():
        np.testing.assert_array_equal(np.asarray(image), pixels(*name.rsplit("/", 1)))
    assert repr(table["image"].iloc[0]) == "2 × 48 × 64 uint16 (DNA, actin)"
    table["gene"] = ["TP53", "AKT1", "TP53"]
    crops = crop_cells(table, labels=table["labels"], size=9, mask="background")
    assert crops.channels == NAMES and crops.obs["gene"].tolist() == ["TP53", "AKT1", "TP53"]
    assert crops.obs[["y", "x", "label"]].to_numpy().tolist() == [[22, 35, 3]] * 3
    expected = pixels("B/12", "0")[:, 18:27, 31:40].copy()
    expected[:, [0, 1, 7, 8]] = 0
    np.testing.assert_array_equal(crops.images.read(slice(2, 3))[0], expected)
    screen = write_screen(tmp_path / "screen.h5ad", crops, y_key="gene")
    assert sorted(screen.obs["well"]) == ["A1", "A1", "B12"]


def test_other_units_become_micrometres(tmp_path):
    for unit, expected in (("nanometer", 0.65e-3), ("millimeter", 650), (None, 0.65)):
        table = read_plate(make_plate(tmp_path / f"{unit}.zarr", unit=unit))
        assert table["pixel_size"].iloc[0] == pytest.approx((expected, expected))


def test_one_image_by_its_path(tmp_path):
    plate = make_plate(tmp_path / "plate.zarr")
    cells = pd.DataFrame({"y": [20 * 0.65], "x": [30 * 0.65]})
    crops = crop_cells(str(plate / "A" / "1" / "0"), cells, size=8, physical=True, channels=["actin"])
    np.testing.assert_array_equal(crops.images.read(slice(None))[0], pixels("A/1", "0")[1:, 16:24, 26:34])


def test_axes_without_names_are_those_of_the_first_versions(tmp_path):
    plate = make_plate(tmp_path / "plate.zarr", "0.4")
    file = plate / "A" / "1" / "0" / ".zattrs"
    metadata = json.loads(file.read_text())
    del metadata["multiscales"][0]["axes"], metadata["omero"]
    file.write_text(json.dumps(metadata))
    crops = crop_cells(plate / "A" / "1" / "0", pd.DataFrame({"y": [20], "x": [30]}), size=8)
    assert crops.channels == ["channel_0", "channel_1"]


def test_planes_are_refused(tmp_path):
    group = zarr.open_group(tmp_path / "image.zarr", mode="w")
    put(group, metadata_of_image("0.5"), "0.5")
    group.create_array("0", data=np.zeros((3, 2, 4, 9, 9), "uint8"))
    with pytest.raises(ValueError, match=r"3 time points \(t\) and 4 planes \(z\): crops have channels"):
        crop_cells(tmp_path / "image.zarr", pd.DataFrame({"y": [4], "x": [4]}), size=3)


def test_what_is_no_plate_is_said(tmp_path):
    plate = make_plate(tmp_path / "plate.zarr")
    with pytest.raises(FileNotFoundError, match="There is nothing at"):
        read_plate(tmp_path / "none.zarr")
    with pytest.raises(ValueError, match="is no OME-Zarr plate: .* It is an image: give its path to crop_cells"):
        read_plate(plate / "A" / "1" / "0")
    with pytest.raises(KeyError, match="has no A/1/0/labels/cells, which was asked for"):
        read_plate(plate, labels="cells")
    with pytest.raises(ValueError, match="is a plate: give crop_cells what read_plate finds in it"):
        crop_cells(plate, pd.DataFrame({"y": [4], "x": [4]}), size=3)
    with pytest.raises(ValueError, match=r"is no image \(it holds 0, 1\)"):
        crop_cells(plate / "A" / "1", pd.DataFrame({"y": [4], "x": [4]}), size=3)
    (tmp_path / "text.zarr").mkdir()
    with pytest.raises(ValueError, match="is no Zarr store"):
        read_plate(tmp_path / "text.zarr")
    shutil.rmtree(plate / "B")
    with pytest.raises(KeyError, match="has no B/12, which was asked for or its metadata name"):
        read_plate(plate)
    zarr.open_group(tmp_path / "empty.zarr", mode="w").attrs["ome"] = {"plate": {"wells": []}}
    with pytest.raises(ValueError, match="a plate without fields"):
        read_plate(tmp_path / "empty.zarr")


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"id": "pickle", "protocol": 5}, "A/1/0/0 of .* cannot be read .*pickle"),
        ({"id": "quantize", "digits": 2, "dtype": "<f4"}, "through .*, quantize: fields are numbers, plainly"),
    ],
)
def test_a_store_that_could_call_any_decoder_is_not_read(codec, message, tmp_path):
    """Format 2 names decoders, of which one unpickles, and any package may add others."""
    plate = make_plate(tmp_path / "plate.zarr", "0.4")
    file = plate / "A" / "1" / "0" / "0" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"filters": [codec]}))
    with pytest.raises(ValueError, match=message):
        read_plate(plate)


def test_two_plates_with_other_channels(tmp_path):
    one, other = (read_plate(make_plate(tmp_path / f"{name}.zarr")) for name in ("one", "other"))
    for image in other["image"]:
        image.channels = ["DNA", "ER"]
    both = pd.concat([one.add_prefix("one/", axis=0), other.add_prefix("other/", axis=0)])
    cells = pd.DataFrame({"field": both.index, "y": 20, "x": 20})
    with pytest.raises(ValueError, match=r"Field 'other/A/1/0' has 2 channels \(DNA, ER\), field 'one/A/1/0'"):
        crop_cells(both, cells, size=8)
    plates = [crop_cells(table, labels=None, cells=cells_of(table), size=8) for table in (one, other)]
    with pytest.raises(ValueError, match="has channels DNA, ER"):
        write_screen(tmp_path / "screen.h5ad", plates, y_key="well")


def cells_of(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"field": table.index, "y": 20, "x": 20})


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_plate_that_ome_zarr_has_written(version, tmp_path):
    """A bright pixel for each of 1,000 cells, centred in every crop."""
    writer = pytest.importorskip("ome_zarr.writer", reason="ome-zarr is not installed")
    formats = pytest.importorskip("ome_zarr.format")
    form = formats.FormatV04() if version == "0.4" else formats.FormatV05()
    rng = np.random.default_rng(0)
    plate = zarr.open_group(tmp_path / "plate.zarr", mode="w", zarr_format=form.zarr_format)
    writer.write_plate_metadata(plate, ["A", "B"], ["1", "2"], ["A/1", "B/2"], fmt=form)
    grid = np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), axis=-1).reshape(-1, 2) * 14 + 10
    tables = []
    for well in ("A/1", "B/2"):
        group = plate.require_group(well)
        writer.write_well_metadata(group, ["0", "1"], fmt=form)
        for field in ("0", "1"):
            yx = rng.permutation(grid)[:250]
            image = np.zeros((1, 2, 1, 240, 240), "uint16")
            image[0, :, 0, yx[:, 0], yx[:, 1]] = 60_000
            where = group.require_group(field)
            writer.write_image(
                image,
                where,
                fmt=form,
                axes="tczyx",
                scale_factors=(2,),
                scale={"y": 0.325, "x": 0.325},
                storage_options={"chunks": (1, 1, 1, 120, 120)},
            )
            tables.append(pd.DataFrame({"field": f"{well}/{field}", "y": yx[:, 0] * 0.325, "x": yx[:, 1] * 0.325}))
    fields = read_plate(tmp_path / "plate.zarr")
    assert fields["pixel_size"].iloc[0] == pytest.approx((0.325, 0.325))
    crops = crop_cells(fields, pd.concat(tables, ignore_index=True), size=13, physical=True)
    images = crops.images.read(slice(None))
    assert len(images) == 1000
    assert (images[:, :, 6, 6] == 60_000).all() and ((images > 0).sum(axis=(2, 3)) == 1).all()
