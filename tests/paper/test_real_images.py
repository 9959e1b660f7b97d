"""Test the experiment with real images: which cells are held out, and scores with a known answer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.dataset_files import write_real_images

from paper.datasets import DATASETS, Dataset
from paper.held_out_scores import held_out_scores

LOADERS = ("bbbc021_crops", "mitocheck_crops", "mitosis_scanners")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_real_images(tmp_path_factory.mktemp("images") / "crops")


@pytest.mark.parametrize("name", LOADERS)
def test_real_images_have_32_pixels_and_whole_environments_held_out(folder, name):
    cells = DATASETS[name].load(folder, 0, fold=1)
    held_out = "scanner" if name == "mitosis_scanners" else "plate"
    assert cells.obsm["single_cell_images"].shape[2:] == (32, 32)
    of_group = cells.obs.groupby(held_out)["split"].agg(lambda parts: set(parts == "test"))
    assert all(len(parts) == 1 for parts in of_group)
    assert {"train", "validation", "test"} == set(cells.obs["split"])


@pytest.mark.parametrize("name", LOADERS)
def test_real_images_folds_differ_and_seeds_change_validation_only(folder, name):
    parts = [DATASETS[name].load(folder, seed, fold=fold).obs["split"] for seed, fold in ((0, 0), (1, 0), (0, 1))]
    is_test = [(part == "test").to_numpy() for part in parts]
    assert (is_test[0] == is_test[1]).all()
    assert (parts[0] != parts[1]).any()
    assert (is_test[0] != is_test[2]).any()


def test_real_images_drop_other_sets_and_cells_out_of_focus(folder):
    assert DATASETS["mitosis_scanners"].load(folder, 0).obs["scanner"].notna().all()
    assert "OutOfFocus" not in set(DATASETS["mitocheck_crops"].load(folder, 0).obs["phenotype"])


def labelled_cells(control: str | None) -> tuple[AnnData, Dataset]:
    """Return cells of three labels in four environments, the last of which is held out."""
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"y": rng.choice(["a", "b", "c"], 800), "e": np.repeat(["1", "2", "3", "4"], 200)})
    obs.index = obs.index.astype(str)
    obs["split"] = np.where(obs["e"] == "4", "test", np.where(rng.random(800) < 0.3, "validation", "train"))
    return AnnData(obs=obs), Dataset(lambda: None, "y", "e", control=control)


def test_held_out_scores_embedding_of_the_label_finds_label_but_no_environment():
    cells, dataset = labelled_cells(None)
    z = pd.get_dummies(cells.obs["y"]).to_numpy(float) + 0.01 * np.random.default_rng(1).normal(size=(800, 3))
    scores = held_out_scores(cells, z, dataset, "z_c")
    assert scores["z_c held out"] == 1
    assert scores["z_c environment, linear"] < 0.45  # three environments are seen in training


def test_held_out_scores_embedding_of_the_environment_finds_environment_but_no_label():
    cells, dataset = labelled_cells("a")
    z = pd.get_dummies(cells.obs["e"]).to_numpy(float) + 0.01 * np.random.default_rng(1).normal(size=(800, 4))
    scores = held_out_scores(cells, z, dataset, "r_c")
    assert scores["r_c held out"] < 0.65  # controls are not scored, so that two labels are left
    for kind in ("linear", "quadratic", "neighbours"):
        assert scores[f"r_c environment, {kind}"] == 1
        assert scores[f"environment chance, {kind}"] < 0.5
