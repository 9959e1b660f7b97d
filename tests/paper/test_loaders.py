from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from helpers.dataset_files import camelyon17_table, write_camelyon17, write_domains, write_rxrx1
from PIL import Image

from paper import loaders
from paper.loaders import PACS_CLASSES, PACS_DOMAINS, VLCS_CLASSES, VLCS_DOMAINS


@pytest.fixture
def pacs_folder(tmp_path):
    return write_domains(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES)


def test_pacs_official_layout_returns_images_labels_and_split(pacs_folder):
    adata = loaders.pacs(pacs_folder, test_environment="photo", image_size=16)
    images = adata.obsm["single_cell_images"]
    assert images.shape == (4 * 7 * 5, 3, 16, 16) and images.dtype == np.uint8
    domain, label = (adata.obs[key].cat.codes.to_numpy(int) for key in ("domain", "class"))
    np.testing.assert_array_equal(images[:, 0, 0, 0], 50 * domain)
    np.testing.assert_array_equal(images[:, 1, 5, 5], 30 * label)
    assert ((adata.obs["split"] == "test") == (adata.obs["domain"] == "photo")).all()
    inside = adata.obs[adata.obs["split"] != "test"]
    # one of the five images per class and domain is a validation image
    held_out = (inside["split"] == "validation").groupby([inside["class"], inside["domain"]], observed=True).sum()
    assert (held_out == 1).all()
    assert adata.obs_names[0] == "art_painting/dog/pic_0.png" and adata.obs_names.is_unique


def test_pacs_parent_folder_is_accepted_and_seed_determines_split(pacs_folder):
    first, again = (loaders.pacs(pacs_folder.parent, image_size=8) for _ in range(2))
    other = loaders.pacs(pacs_folder, image_size=8, seed=1)
    assert first.obs.equals(again.obs) and not first.obs.equals(other.obs)


def test_vlcs_official_layout_returns_all_images(tmp_path):
    adata = loaders.vlcs(write_domains(tmp_path / "VLCS", VLCS_DOMAINS, VLCS_CLASSES), image_size=8)
    assert adata.n_obs == 4 * 5 * 5 and set(adata.obs["class"]) == set(VLCS_CLASSES)
    assert set(adata.obs.loc[adata.obs["split"] == "test", "domain"]) == {"VOC2007"}


def test_pacs_real_data_has_published_counts(shared):
    adata = loaders.pacs(shared / "domains" / "pacs_32.npz", test_environment="sketch")
    assert adata.n_obs == 9991 and adata.obsm["single_cell_images"].shape[1:] == (3, 32, 32)
    assert adata.obs["domain"].value_counts().to_dict() == {
        "art_painting": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }
    assert (adata.obs["split"] == "test").sum() == 3929


def test_pacs_and_vlcs_other_folders_raise(tmp_path, pacs_folder):
    with pytest.raises(FileNotFoundError, match="holds no Caltech101"):
        loaders.vlcs(pacs_folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        loaders.pacs(tmp_path / "nowhere")
    (pacs_folder / "sketch" / "dog").rename(pacs_folder / "sketch" / "hound")
    with pytest.raises(FileNotFoundError, match="sketch/dog"):
        loaders.pacs(pacs_folder)


def test_read_images_png_keeps_orientation(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.testing.assert_array_equal(loaders.read_images([tmp_path / "a.png"], 8)[0], np.moveaxis(pixels, -1, 0))


def test_pacs_truncated_image_raises_with_its_path(pacs_folder):
    path = pacs_folder / "cartoon" / "horse" / "pic_2.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="horse/pic_2.png is no image, or is truncated"):
        loaders.pacs(pacs_folder)


def test_pacs_unknown_test_environment_raises(pacs_folder):
    with pytest.raises(ValueError, match="sketches"):
        loaders.pacs(pacs_folder, test_environment="sketches")


def make_packed_arrays(**changes):
    n = 28 * 5
    arrays = {
        "X": np.zeros((n, 8, 8, 3), np.uint8),
        "y": np.arange(n) % 7,
        "e": np.arange(n) // 7 % 4,
        "classes": np.array(PACS_CLASSES),
        "domains": np.array(PACS_DOMAINS),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def test_pacs_packed_file_returns_images_labels_and_split(tmp_path):
    """The pixels are unmodified, and labels are the names in the file, whatever their order."""
    rng = np.random.default_rng(0)
    given = make_packed_arrays(
        X=rng.integers(0, 256, (140, 8, 8, 3)).astype(np.uint8), classes=np.array(PACS_CLASSES[::-1])
    )
    np.savez(tmp_path / "pacs.npz", **given)
    adata = loaders.pacs(tmp_path / "pacs.npz", image_size=8)
    np.testing.assert_array_equal(adata.obsm["single_cell_images"], np.moveaxis(given["X"], -1, 1))
    assert list(adata.obs["class"]) == [PACS_CLASSES[::-1][code] for code in given["y"]]
    assert list(adata.obs["domain"]) == [PACS_DOMAINS[code] for code in given["e"]]
    assert adata.obs["split"].value_counts().to_dict() == {"train": 84, "test": 35, "validation": 21}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "is no packed PACS .*must hold X, y, e, classes, domains"),
        ({"domains": np.array(VLCS_DOMAINS)}, "holds other domains than PACS: Caltech101"),
        ({"X": np.zeros((140, 3, 8, 8), np.uint8)}, "X must be uint8"),
        ({}, "X must be uint8"),
    ],
)
def test_pacs_invalid_packed_file_raises(tmp_path, changes, message):
    np.savez(tmp_path / "pacs.npz", **make_packed_arrays(**changes))
    with pytest.raises(ValueError, match=message):
        loaders.pacs(tmp_path / "pacs.npz")


def test_pacs_missing_or_unreadable_packed_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="pacs.npz"):
        loaders.pacs(tmp_path / "pacs.npz")
    (tmp_path / "pacs.npz").write_text("no")
    with pytest.raises(ValueError, match="is no packed PACS"):
        loaders.pacs(tmp_path / "pacs.npz")


@pytest.fixture
def camelyon(tmp_path):
    """Twelve patches from five hospitals; the red channel holds 20 times the number of the patch."""
    patients = ["004", "004", "010", "010", "021", "021", "032", "032", "043", "043", "043", "044"]
    table = camelyon17_table(patients, [0, 0, 0, 3, 3, 4, 4, 1, 1, 2, 2, 2], [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    return write_camelyon17(tmp_path / "camelyon17_v1.0", table)


def test_camelyon17_returns_official_split(camelyon):
    adata = loaders.camelyon17(camelyon)
    assert adata.obsm["single_cell_images"].shape == (12, 3, 32, 32)
    np.testing.assert_array_equal(adata.obsm["single_cell_images"][:, 0, 3, 3], 20 * np.arange(12))
    split = ["train", "train", "validation", "train", "train", "train", "validation"]
    assert list(adata.obs["split"]) == [*split, *["ood_validation"] * 2, *["test"] * 3]
    assert list(adata.obs["hospital"].iloc[[0, 3, 11]]) == ["hospital_0", "hospital_3", "hospital_2"]
    assert list(adata.obs["tumor"].iloc[:2]) == ["0", "1"] and adata.obs["patient"].iloc[0] == "004"


def test_camelyon17_n_per_split_returns_subset_of_each_part(camelyon):
    subset = loaders.camelyon17(camelyon.parent, n_per_split=2, image_size=16)
    assert subset.obs["split"].value_counts().to_dict() == {
        "train": 2,
        "validation": 2,
        "ood_validation": 2,
        "test": 2,
    }
    assert subset.obs.equals(loaders.camelyon17(camelyon, n_per_split=2, image_size=16).obs)
    # each row keeps its own image
    rows = [int(name.split("_x_")[1].split("_")[0]) // 32 for name in subset.obs_names]
    np.testing.assert_array_equal(subset.obsm["single_cell_images"][:, 0, 3, 3], 20 * np.array(rows))


def test_camelyon17_incomplete_files_raise(camelyon):
    with pytest.raises(FileNotFoundError, match="metadata.csv"):
        loaders.rxrx1(camelyon / "patches")
    table = pd.read_csv(camelyon / "metadata.csv", dtype={"patient": str})
    next(camelyon.glob("patches/*/*_x_0_*.png")).unlink()
    with pytest.raises(FileNotFoundError, match="patch_patient_004_node_4_x_0_y_64.png"):
        loaders.camelyon17(camelyon)
    table[table["center"] != 2].to_csv(camelyon / "metadata.csv")
    with pytest.raises(ValueError, match="has no image for the test part of the official split"):
        loaders.camelyon17(camelyon)
    table.drop(columns="center").to_csv(camelyon / "metadata.csv")
    with pytest.raises(ValueError, match="center"):
        loaders.camelyon17(camelyon)


def test_rxrx1_returns_official_split(tmp_path):
    rows = [
        ("HEPG2", "HEPG2-01", 1, "B02", site, sirna, dataset)
        for dataset, site, sirna in [("train", 1, 5), ("train", 2, 5), ("train", 1, 9), ("val", 1, 5), ("test", 2, 9)]
    ]
    table = pd.DataFrame(rows, columns=["cell_type", "experiment", "plate", "well", "site", "sirna_id", "dataset"])
    table["plate"] = [1, 1, 2, 3, 4]
    adata = loaders.rxrx1(write_rxrx1(tmp_path / "rxrx1_v1.0", table), image_size=32)
    assert list(adata.obs["split"]) == ["train", "validation", "train", "ood_validation", "test"]
    assert list(adata.obs["sirna"]) == ["sirna_5", "sirna_5", "sirna_9", "sirna_5", "sirna_9"]
    assert adata.obs["well"].iloc[2] == "HEPG2-01_2_B02"
    np.testing.assert_array_equal(adata.obsm["single_cell_images"][:, 0, 3, 3], 40 * np.arange(5))


def test_funk22_cellprofiler_csv_returns_features_and_labels(tmp_path):
    table = pd.DataFrame({"gene_symbol_0": ["A", "B"], "sgRNA_0": ["x", "y"], "plate": [1, 2], "area": [3.0, 4.0]})
    table["well"] = "B4"
    table.to_csv(tmp_path / "features.csv", index=False)
    adata = loaders.funk22_cellprofiler(tmp_path / "features.csv")
    np.testing.assert_array_equal(adata.obsm["X_cellprofiler"], [[3], [4]])
    assert list(adata.obs) == ["gene", "sgRNA", "plate", "well"] and list(adata.obs["well"]) == ["1_B4", "2_B4"]
    assert loaders.funk22_cellprofiler(tmp_path / "features.csv", n_cells=1).obs_names[0] in ("0", "1")


def make_breinig2015_table() -> pd.DataFrame:
    about = {"cell_code": ["a", "b"], "cell_id": [1, 1], "plate": ["P1", "P1"], "replicate": [1, 2]}
    about |= {"well": ["M14", "M14"], "field": [3, 4], "target": ["CDK", "EGFR"], "split": ["train", "test"]}
    return pd.DataFrame(about | {"DNA.s.area": [0.5, 1.5]})


def test_breinig2015_csv_returns_replicates_as_text_labels(tmp_path):
    make_breinig2015_table().to_csv(tmp_path / "cells.csv", index=False)
    found = loaders.breinig2015(tmp_path / "cells.csv")
    assert found.obs_names.tolist() == ["a", "b"] and found.obs["replicate"].tolist() == ["1", "2"]
    assert found.var_names.tolist() == ["DNA.s.area"] and found.X[:, 0].tolist() == [0.5, 1.5]


def test_breinig2015_and_funk22_real_data_have_published_sizes(shared):
    found = loaders.breinig2015(shared / "profiles" / "breinig2015_single_cells.parquet")
    assert found.shape == (51_267, 26) and found.obs["target"].nunique() == 17
    assert found.obs["replicate"].cat.categories.tolist() == ["1", "2"]
    features = loaders.funk22_cellprofiler(shared / "funk22" / "funk22-cellprofiler-univariate-ipca90.parquet")
    assert features.obsm["X_cellprofiler"].shape == (20_445, 2) and set(features.obs) == {"gene", "sgRNA"}
