from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from matplotlib.colors import to_hex
from readable import long_names, require_readable_in_print

from scbd import pl
from scbd.pl._looks import COLORS


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def points(ax) -> np.ndarray:
    return np.asarray(ax.collections[0].get_offsets())


def test_umaps_of_both_blocks_by_each_label(cells):
    rng = np.random.default_rng(0)
    for block in "cs":
        cells.obsm[f"X_scbd_{block}"] = rng.normal(size=(96, 4)).astype("float32")
    axes = pl.umap_blocks(cells, ["gene", "well"])
    titles = [ax.get_title().replace("\n", " ") for ax in axes.flat]
    assert titles == ["z_c by gene", "z_c by well", "z_s by gene", "z_s by well"]
    np.testing.assert_array_equal(points(axes[0, 0]), points(axes[0, 1]))
    assert not np.array_equal(points(axes[0, 0]), points(axes[1, 0]))
    assert list(cells.obsm) == ["single_cell_images", "X_scbd_c", "X_scbd_s"] and not cells.uns
    assert torch.get_num_threads() == 1  # numba sets them to all processors


def test_a_umap_that_is_there_is_drawn_in_the_colours_of_its_cells(cells):
    cells.obsm["Z"] = np.zeros((96, 3))
    cells.obsm["Z_umap"] = np.stack([np.arange(96), np.zeros(96)], axis=1)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, max_cells=50).flat
    drawn = points(ax)[:, 0].astype(int)
    assert len(set(drawn)) == 50 and set(drawn) <= set(range(96))
    shades = pd.Series(list(map(tuple, ax.collections[0].get_facecolor())), index=cells.obs["gene"].iloc[drawn])
    assert shades.groupby(level=0, observed=True).nunique().eq(1).all() and shades.nunique() == 4


def test_many_labels_have_no_legend_and_numbers_a_bar(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    cells.obs["cell"] = cells.obs_names
    cells.obs["area"] = np.arange(96.0)
    of_cells, of_genes, of_areas = pl.umap_blocks(cells, ["cell", "gene", "area"], blocks={"mine": "Z"}).flat
    assert of_cells.get_legend() is None and len(of_genes.get_legend().get_texts()) == 4
    assert any(ax.get_label() == "<colorbar>" for ax in of_areas.figure.axes)


def test_long_names_can_be_read(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    column = "Metadata_JCP2022_perturbation_by_name"
    cells.obs[column] = np.array(long_names(3))[np.arange(96) % 3]
    ax = pl.umap_blocks(cells, column, blocks={"z_c of the model of alpha 10, adapted": "Z"})[0, 0]
    require_readable_in_print(ax.figure)


def test_few_labels_are_told_apart_by_colour_blind_readers(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}).flat
    shown = set(map(to_hex, ax.collections[0].get_facecolor()))
    assert shown == set(map(to_hex, COLORS[:4]))


@pytest.mark.parametrize(("color", "blocks", "named"), [("gene", None, "X_scbd_c"), ("genes", {"mine": "Z"}, "genes")])
def test_what_is_missing_is_named(cells, color, blocks, named):
    cells.obsm["Z"] = np.zeros((96, 2))
    with pytest.raises(KeyError, match=named):
        pl.umap_blocks(cells, color, blocks=blocks)


def test_an_embedding_that_lacks_cells_is_named():
    cells = AnnData(obs=pd.DataFrame({"gene": ["a", "b"] * 30}).set_axis(map(str, range(60))))
    cells.obsm["X_scbd_c"] = np.random.default_rng(0).normal(size=(60, 5))
    cells.obsm["X_scbd_c"][7] = np.nan
    with pytest.raises(ValueError, match=r"X_scbd_c.* in 1 of 60 cells"):
        pl.umap_blocks(cells, "gene", blocks={"z_c": "X_scbd_c"})
