from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from PIL import Image

from scbd.datasets._plate_files import Field, write_ome_zarr, write_tiff


def fields():
    rng = np.random.default_rng(0)
    for well, number in (("A01", 0), ("A01", 1), ("AF48", 0)):
        image = rng.integers(0, 99, (2, 20, 30), "uint8")
        labels = np.zeros((20, 30), "int32")
        labels[4:7, 8:11] = 1
        nuclei = pd.DataFrame({"label": [1], "y": [5.0], "x": [9.0]}, index=[f"cell of {well}, {number}"])
        yield Field(well, number, ["DNA", "actin"], image, labels, nuclei)


def test_plate_of_ome_zarr(tmp_path):
    found = write_ome_zarr(tmp_path, fields())
    assert found["field"].tolist() == ["A/1/0", "A/1/1", "AF/48/0"] and found.index[2] == "cell of AF48, 0"
    plate: Any = zarr.open_group(tmp_path / "plate.zarr", mode="r")
    described = plate.attrs["ome"]
    assert described["version"] == "0.5" and described["plate"]["rows"] == [{"name": "A"}, {"name": "AF"}]
    assert described["plate"]["wells"][1] == {"path": "AF/48", "rowIndex": 1, "columnIndex": 1}
    assert plate["A/1"].attrs["ome"]["well"] == {"images": [{"path": "0"}, {"path": "1"}]}
    for field, name in zip(fields(), found["field"], strict=True):
        np.testing.assert_array_equal(plate[f"{name}/0"][:], field.image)
        np.testing.assert_array_equal(plate[f"{name}/labels/nuclei/0"][:], field.labels)
    assert plate["A/1/0/labels"].attrs["ome"]["labels"] == ["nuclei"]


def test_ome_zarr_reads_it(tmp_path):
    """The library of those who wrote the specification."""
    reader = pytest.importorskip("ome_zarr.reader")
    io = pytest.importorskip("ome_zarr.io")
    write_ome_zarr(tmp_path, fields())
    found = list(reader.Reader(io.parse_url(tmp_path / "plate.zarr" / "A" / "1" / "0"))())
    image, labels = (node.data[0].compute() for node in found if node.data)
    first = next(fields())
    np.testing.assert_array_equal(image, first.image)
    np.testing.assert_array_equal(labels.squeeze(), first.labels)
    plate = next(iter(reader.Reader(io.parse_url(tmp_path / "plate.zarr"))()))
    assert any(isinstance(spec, reader.Plate) for spec in plate.specs)


def test_files_of_tiff(tmp_path):
    found = write_tiff(tmp_path, fields())
    assert found["field"].tolist() == ["A01_s1", "A01_s2", "AF48_s1"]
    table = pd.read_csv(tmp_path / "fields.csv", index_col="field")
    assert table["well"].tolist() == ["A01", "A01", "AF48"] and table.columns.tolist() == ["well", "DNA", "actin"]
    for field, name in zip(fields(), found["field"], strict=True):
        for channel, expected in zip(field.channels, field.image, strict=True):
            with Image.open(tmp_path / table.loc[name, channel]) as image:
                np.testing.assert_array_equal(np.asarray(image), expected)
