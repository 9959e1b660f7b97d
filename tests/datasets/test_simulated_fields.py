from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from scbd.data import crop_cells, read_plate
from scbd.datasets import simulated_plate, simulated_screen

SMALL: dict[str, Any] = {"n_complexes": 3, "genes_per_complex": 2, "guides_per_gene": 2, "seed": 3}


@pytest.fixture(scope="module")
def plate(tmp_path_factory):
    """The truth, and where the plate lies."""
    folder = tmp_path_factory.mktemp("plate") / "new"
    return simulated_plate(folder, 200, **SMALL), folder


def test_cells_are_those_of_the_simulated_screen(plate):
    truth, _ = plate
    screen = simulated_screen(200, n_wells=6, plate_wells=6, image_size=32, **SMALL)
    pd.testing.assert_frame_equal(truth.obs[screen.obs.columns], screen.obs)
    np.testing.assert_array_equal(truth.obsm["X_oracle"], screen.obsm["X_oracle"])
    assert list(truth.obsm) == ["X_oracle"] and truth.uns["truth"]["network"].equals(screen.uns["truth"]["network"])


def test_each_nucleus_is_where_the_truth_says(plate):
    truth, folder = plate
    fields = read_plate(folder / "plate.zarr", labels="nuclei")
    for name, cells in truth.obs.groupby("field"):
        labels = np.asarray(fields.loc[name, "labels"])[0]
        assert sorted(np.unique(labels)) == [0, *sorted(cells["label"])]
        for label, y, x in cells[["label", "y", "x"]].itertuples(index=False):
            pixels = np.argwhere(labels == label)
            np.testing.assert_allclose(pixels.mean(axis=0), [y, x])
        dna = np.asarray(fields.loc[name, "image"])[2]
        assert dna[labels > 0].mean() > 3 * dna[labels == 0].mean()


def test_cells_lie_in_fields_of_their_wells(plate):
    truth, folder = plate
    fields = read_plate(folder / "plate.zarr")
    assert len(fields) == 12 and fields["channels"].iloc[0] == truth.var_names.tolist()
    assert set(fields["pixel_size"]) == {(0.65, 0.65)}
    well = fields.loc[truth.obs["field"], "well"].to_numpy()
    assert (truth.obs["position"].astype(str).str.replace("0", "") == well).all()
    assert truth.obs.groupby("well", observed=True)["field"].nunique().eq(2).all()


def test_both_forms_hold_the_same_cells(plate, tmp_path):
    truth, folder = plate
    other = simulated_plate(tmp_path, 200, form="tiff", **SMALL)
    nuclei, fields = pd.read_csv(tmp_path / "nuclei.csv"), pd.read_csv(tmp_path / "fields.csv", index_col="field")
    channels = truth.var_names.tolist()
    assert nuclei.columns.tolist() == ["field", "y", "x", "gene", "sgRNA"]
    assert fields.columns.tolist() == ["well", *channels]
    fields["image"] = [[tmp_path / file for file in files] for files in fields[channels].to_numpy()]
    pytest.importorskip("tifffile")
    crops = crop_cells(fields[["well", "image"]], nuclei, size=25, channels=channels).to_memory()

    nuclei = pd.read_csv(folder / "nuclei.csv")
    assert nuclei.columns.tolist() == ["field", "label", "gene", "sgRNA"]
    fields = read_plate(folder / "plate.zarr", labels="nuclei")
    expected = crop_cells(fields, nuclei, labels=fields["labels"], size=25).to_memory()
    np.testing.assert_array_equal(crops.obsm["single_cell_images"], expected.obsm["single_cell_images"])
    for column in ("gene", "sgRNA"):
        assert crops.obs[column].tolist() == expected.obs[column].tolist()
    assert other.obs["field"].nunique() == 12 and other.obs["gene"].equals(truth.obs["gene"])


def test_wells_look_different_as_strongly_as_is_asked_for(tmp_path):
    def backgrounds(well_effect: float) -> np.ndarray:
        simulated_plate(tmp_path / str(well_effect), 60, well_effect=well_effect, **SMALL)
        fields = read_plate(tmp_path / str(well_effect) / "plate.zarr")
        return np.array([np.median(np.asarray(image)) for image in fields["image"]]).reshape(6, 2)

    same, different = backgrounds(0.0), backgrounds(2.0)
    assert np.ptp(same) <= 1  # a grey value
    assert np.ptp(different.mean(axis=1)) > 4 and np.ptp(different, axis=1).max() <= 1


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"form": "png"}, ValueError, "form='png' is not known: use 'ome-zarr' or 'tiff'"),
        ({"n_fields": 0}, ValueError, "n_fields=0: give at least 1"),
        ({"plate_wells": 5}, ValueError, "plate_wells=5: plates have 6, 24"),
        ({"image_size": 8}, ValueError, "image_size=8: give at least 16"),
        ({"n_cells": 3}, ValueError, "n_cells=3 is less than one cell for each of the 16 guides"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_bad_input_leaves_nothing(bad, error, message, tmp_path):
    with pytest.raises(error, match=message):
        simulated_plate(tmp_path / "plate", **{"n_cells": 60, **SMALL, **bad})
    assert not (tmp_path / "plate").exists()


def test_what_is_there_stays(tmp_path):
    (tmp_path / "plate.zarr").write_text("mine")
    with pytest.raises(FileExistsError, match="is there already, and not an empty folder"):
        simulated_plate(tmp_path, 60, **SMALL)
    with pytest.raises(FileExistsError, match="is there already"):
        simulated_plate(tmp_path / "plate.zarr", 60, **SMALL)
    assert (tmp_path / "plate.zarr").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
