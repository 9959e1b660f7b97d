from __future__ import annotations

import numpy as np
import pytest
from official import write_domains
from PIL import Image

from scbd.datasets import pacs, vlcs
from scbd.datasets._domains import PACS_CLASSES, PACS_DOMAINS, VLCS_CLASSES, VLCS_DOMAINS
from scbd.datasets._files import read_images


@pytest.fixture
def pacs_folder(tmp_path):
    return write_domains(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES)


def test_pacs_in_the_official_layout(pacs_folder):
    adata = pacs(pacs_folder, test_environment="photo", image_size=16)
    images = adata.obsm["single_cell_images"]
    assert images.shape == (4 * 7 * 5, 3, 16, 16) and images.dtype == np.uint8
    domain, label = (adata.obs[key].cat.codes.to_numpy(int) for key in ("domain", "class"))
    np.testing.assert_array_equal(images[:, 0, 0, 0], 50 * domain)
    np.testing.assert_array_equal(images[:, 1, 5, 5], 30 * label)
    assert ((adata.obs["split"] == "test") == (adata.obs["domain"] == "photo")).all()
    inside = adata.obs[adata.obs["split"] != "test"]
    # one of five of each class and domain validates
    held_out = (inside["split"] == "validation").groupby([inside["class"], inside["domain"]], observed=True).sum()
    assert (held_out == 1).all()
    assert adata.obs_names[0] == "art_painting/dog/pic_0.png" and adata.obs_names.is_unique


def test_the_folder_above_is_found_and_the_seed_decides_the_split(pacs_folder):
    first, again = (pacs(pacs_folder.parent, image_size=8) for _ in range(2))
    other = pacs(pacs_folder, image_size=8, seed=1)
    assert first.obs.equals(again.obs) and not first.obs.equals(other.obs)


def test_vlcs_in_the_official_layout(tmp_path):
    adata = vlcs(write_domains(tmp_path / "VLCS", VLCS_DOMAINS, VLCS_CLASSES), image_size=8)
    assert adata.n_obs == 4 * 5 * 5 and set(adata.obs["class"]) == set(VLCS_CLASSES)
    assert set(adata.obs.loc[adata.obs["split"] == "test", "domain"]) == {"VOC2007"}


def test_real_pacs(shared):
    adata = pacs(shared / "domains" / "pacs_32.npz", test_environment="sketch")
    assert adata.n_obs == 9991 and adata.obsm["single_cell_images"].shape[1:] == (3, 32, 32)
    assert adata.obs["domain"].value_counts().to_dict() == {
        "art_painting": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }
    assert (adata.obs["split"] == "test").sum() == 3929


def test_other_folders_are_refused(tmp_path, pacs_folder):
    with pytest.raises(FileNotFoundError, match="is not VLCS: it holds no Caltech101 .art_painting, cartoon"):
        vlcs(pacs_folder)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        pacs(tmp_path / "nowhere")
    (pacs_folder / "sketch" / "dog").rename(pacs_folder / "sketch" / "hound")
    with pytest.raises(FileNotFoundError, match="lacks 1 of the 28 folders of PACS .sketch/dog.: give the whole"):
        pacs(pacs_folder)


def test_pictures_stand_upright(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_images([tmp_path / "a.png"], 8)[0], np.moveaxis(pixels, -1, 0))


def test_broken_images_are_named(pacs_folder):
    path = pacs_folder / "cartoon" / "horse" / "pic_2.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="horse/pic_2.png is no image, or is truncated"):
        pacs(pacs_folder)


def test_settings_are_checked(pacs_folder):
    with pytest.raises(ValueError, match="PACS has no domain 'sketches' to test on: use one of art_painting"):
        pacs(pacs_folder, test_environment="sketches")
    with pytest.raises(ValueError, match="image_size must be a positive number"):
        pacs(pacs_folder, image_size=0)
    with pytest.raises(ValueError, match="validation_size=1 must lie between 0 and 1"):
        pacs(pacs_folder, validation_size=1)


def packed(**changes):
    n = 28 * 5
    arrays = {
        "X": np.zeros((n, 8, 8, 3), np.uint8),
        "y": np.arange(n) % 7,
        "e": np.arange(n) // 7 % 4,
        "classes": np.array(PACS_CLASSES),
        "domains": np.array(PACS_DOMAINS),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def test_a_packed_file_is_what_the_folder_would_be(tmp_path):
    """Pixels where they were, and labels by the names of the file, in whatever order it has them."""
    rng = np.random.default_rng(0)
    given = packed(X=rng.integers(0, 256, (140, 8, 8, 3)).astype(np.uint8), classes=np.array(PACS_CLASSES[::-1]))
    np.savez(tmp_path / "pacs.npz", **given)
    adata = pacs(tmp_path / "pacs.npz", image_size=8)
    np.testing.assert_array_equal(adata.obsm["single_cell_images"], np.moveaxis(given["X"], -1, 1))
    assert list(adata.obs["class"]) == [PACS_CLASSES[::-1][code] for code in given["y"]]
    assert list(adata.obs["domain"]) == [PACS_DOMAINS[code] for code in given["e"]]
    assert adata.obs["split"].value_counts().to_dict() == {"train": 84, "test": 35, "validation": 21}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "is no packed PACS .*must hold X, y, e, classes, domains"),
        ({"domains": np.array(VLCS_DOMAINS)}, "holds other domains than PACS: Caltech101"),
        ({"X": np.zeros((140, 3, 8, 8), np.uint8)}, r"X must be uint8 \(N, H, W, 3\)"),
        ({}, "packs images of 8 × 8 pixels: use image_size=8"),
    ],
)
def test_packed_files_are_checked(tmp_path, changes, message):
    np.savez(tmp_path / "pacs.npz", **packed(**changes))
    with pytest.raises(ValueError, match=message):
        pacs(tmp_path / "pacs.npz")


def test_a_packed_file_that_is_missing_or_foreign(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        pacs(tmp_path / "pacs.npz")
    (tmp_path / "pacs.npz").write_text("no")
    with pytest.raises(ValueError, match="is no packed PACS"):
        pacs(tmp_path / "pacs.npz")
