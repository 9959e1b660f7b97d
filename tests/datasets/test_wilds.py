from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from official import camelyon17_table, write_camelyon17, write_rxrx1

from scbd.datasets import camelyon17, rxrx1


@pytest.fixture
def camelyon(tmp_path):
    """Twelve patches of five hospitals: the red channel counts them."""
    patients = ["004", "004", "010", "010", "021", "021", "032", "032", "043", "043", "043", "044"]
    table = camelyon17_table(patients, [0, 0, 0, 3, 3, 4, 4, 1, 1, 2, 2, 2], [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    return write_camelyon17(tmp_path / "camelyon17_v1.0", table)


def test_camelyon17_has_the_official_split(camelyon):
    adata = camelyon17(camelyon)
    assert adata.obsm["single_cell_images"].shape == (12, 3, 32, 32)
    np.testing.assert_array_equal(adata.obsm["single_cell_images"][:, 0, 3, 3], 20 * np.arange(12))
    split = ["train", "train", "validation", "train", "train", "train", "validation"]
    assert list(adata.obs["split"]) == [*split, *["ood_validation"] * 2, *["test"] * 3]
    assert list(adata.obs["hospital"].iloc[[0, 3, 11]]) == ["hospital_0", "hospital_3", "hospital_2"]
    assert list(adata.obs["tumor"].iloc[:2]) == ["0", "1"] and adata.obs["patient"].iloc[0] == "004"


def test_a_random_subset_of_each_part(camelyon):
    subset = camelyon17(camelyon.parent, n_per_split=2, image_size=16)
    assert subset.obs["split"].value_counts().to_dict() == {
        "train": 2,
        "validation": 2,
        "ood_validation": 2,
        "test": 2,
    }
    assert subset.obs.equals(camelyon17(camelyon, n_per_split=2, image_size=16).obs)
    # images still belong to their rows
    rows = [int(name.split("_x_")[1].split("_")[0]) // 32 for name in subset.obs_names]
    np.testing.assert_array_equal(subset.obsm["single_cell_images"][:, 0, 3, 3], 20 * np.array(rows))


def test_what_is_wrong_with_camelyon17_is_said(camelyon):
    with pytest.raises(FileNotFoundError, match="is not rxrx1_v1.0: it holds no images/?|metadata.csv"):
        rxrx1(camelyon / "patches")
    table = pd.read_csv(camelyon / "metadata.csv", dtype={"patient": str})
    next(camelyon.glob("patches/*/*_x_0_*.png")).unlink()
    with pytest.raises(FileNotFoundError, match="patch_patient_004_node_4_x_0_y_64.png"):
        camelyon17(camelyon)
    table[table["center"] != 2].to_csv(camelyon / "metadata.csv")
    with pytest.raises(ValueError, match="has no image for the test part of the official split"):
        camelyon17(camelyon)
    table.drop(columns="center").to_csv(camelyon / "metadata.csv")
    with pytest.raises(ValueError, match="lacks the columns center: it is not the table that WILDS distributes"):
        camelyon17(camelyon)


def test_rxrx1_has_the_official_split(tmp_path):
    rows = [
        ("HEPG2", "HEPG2-01", 1, "B02", site, sirna, dataset)
        for dataset, site, sirna in [("train", 1, 5), ("train", 2, 5), ("train", 1, 9), ("val", 1, 5), ("test", 2, 9)]
    ]
    table = pd.DataFrame(rows, columns=["cell_type", "experiment", "plate", "well", "site", "sirna_id", "dataset"])
    table["plate"] = [1, 1, 2, 3, 4]
    adata = rxrx1(write_rxrx1(tmp_path / "rxrx1_v1.0", table), image_size=32)
    assert list(adata.obs["split"]) == ["train", "validation", "train", "ood_validation", "test"]
    assert list(adata.obs["sirna"]) == ["sirna_5", "sirna_5", "sirna_9", "sirna_5", "sirna_9"]
    assert adata.obs["well"].iloc[2] == "HEPG2-01_2_B02"
    np.testing.assert_array_equal(adata.obsm["single_cell_images"][:, 0, 3, 3], 40 * np.arange(5))
