from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from helpers.figure_checks import long_names, require_readable_in_print
from matplotlib.colors import to_hex

from scbd import pl
from scbd.pl._style import COLORS
from scbd.pl._umap import compute_umap


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def get_points(ax) -> np.ndarray:
    return np.asarray(ax.collections[0].get_offsets())


def test_umap_blocks_draws_each_block_by_each_label(cells):
    rng = np.random.default_rng(0)
    for block in "cs":
        cells.obsm[f"X_scbd_{block}"] = rng.normal(size=(96, 4)).astype("float32")
    axes = pl.umap_blocks(cells, ["gene", "well"])
    titles = [ax.get_title().replace("\n", " ") for ax in axes.flat]
    assert titles == ["z_c by gene", "z_c by well", "z_s by gene", "z_s by well"]
    np.testing.assert_array_equal(get_points(axes[0, 0]), get_points(axes[0, 1]))
    assert not np.array_equal(get_points(axes[0, 0]), get_points(axes[1, 0]))
    assert list(cells.obsm) == ["single_cell_images", "X_scbd_c", "X_scbd_s"] and not cells.uns
    assert torch.get_num_threads() == 1  # numba would set it to the number of processors


def test_umap_blocks_stored_umap_is_drawn_in_colours_of_its_cells(cells):
    cells.obsm["Z"] = np.zeros((96, 3))
    cells.obsm["Z_umap"] = np.stack([np.arange(96), np.zeros(96)], axis=1)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, max_cells=50).flat
    drawn = get_points(ax)[:, 0].astype(int)
    assert len(set(drawn)) == 50 and set(drawn) <= set(range(96))
    shades = pd.Series(list(map(tuple, ax.collections[0].get_facecolor())), index=cells.obs["gene"].iloc[drawn])
    assert shades.groupby(level=0, observed=True).nunique().eq(1).all() and shades.nunique() == 4


def place_cells(cells) -> None:
    """Give each cell a place, so that no UMAP is computed."""
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))


def colors_by_label(ax) -> dict[str, str]:
    """Return the colour of each label in the legend."""
    legend = ax.get_legend()
    handles = zip(legend.get_texts(), legend.legend_handles, strict=True)
    return {text.get_text(): to_hex(handle.get_facecolor()[0]) for text, handle in handles}


def count_cells_by_color(ax) -> dict[str, int]:
    return pd.Series(list(map(to_hex, ax.collections[0].get_facecolor()))).value_counts().to_dict()


def make_many_labels(n: int = 330) -> AnnData:
    """Make three cells of each gene, but six of g7, and a third of all cells controls."""
    names = [f"g{i % 73}" for i in range(2 * n // 3 - 3)] + ["g7"] * 3 + ["mock"] * (n // 3)
    cells = AnnData(obs=pd.DataFrame({"gene": pd.Categorical(names)}, index=list(map(str, range(n)))))
    place_cells(cells)
    return cells


def test_umap_blocks_few_labels_have_a_legend_and_numbers_a_colour_bar(cells):
    place_cells(cells)
    cells.obs["area"] = np.arange(96.0)
    of_genes, of_areas = pl.umap_blocks(cells, ["gene", "area"], blocks={"mine": "Z"}).flat
    assert len(of_genes.get_legend().get_texts()) == 4
    assert any(ax.get_label() == "<colorbar>" for ax in of_areas.figure.axes)


def test_umap_blocks_many_labels_colours_the_ten_most_frequent():
    """With more than 102 labels, scanpy draws all cells in one grey."""
    cells = make_many_labels()
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, control="mock").flat
    colors = colors_by_label(ax)
    *named, control, others = colors
    assert named[0] == "g7" and len(set(colors.values())) == 12
    assert (control, others) == ("mock", "63 others")
    counts = count_cells_by_color(ax)
    assert counts[colors["g7"]] == 6 and counts[colors["mock"]] == 110
    assert sum(counts.values()) == 330
    # grey cells lie beneath coloured ones
    drawn = list(map(to_hex, ax.collections[0].get_facecolor()))
    assert drawn[0] == colors[others] and drawn[-1] == colors["g7"]
    require_readable_in_print(ax.figure)


def test_umap_blocks_highlight_is_used_where_a_column_has_its_labels():
    cells = make_many_labels()
    cells.obs["well"] = pd.Categorical([f"well {i % 3}" for i in range(330)])
    genes, wells = pl.umap_blocks(cells, ["gene", "well"], blocks={"mine": "Z"}, highlight=["g9", "g2"]).flat
    assert list(colors_by_label(genes)) == ["g9", "g2", "72 others"]
    assert list(colors_by_label(wells)) == ["well 0", "well 1", "well 2"]


@pytest.mark.parametrize("n", [11, 25, 60, 200])
def test_umap_blocks_many_highlighted_labels_are_all_coloured(n):
    cells = AnnData(obs=pd.DataFrame({"gene": [f"g{i % 210}" for i in range(420)]}, index=list(map(str, range(420)))))
    place_cells(cells)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, highlight=[f"g{i}" for i in range(n)]).flat
    assert len(count_cells_by_color(ax)) == min(n, 102) + 1


@pytest.mark.parametrize("n_labels", [4, 30])
def test_umap_blocks_missing_labels_are_drawn(n_labels):
    names = [None if i % 7 == 0 else f"g{i % n_labels}" for i in range(210)]
    cells = AnnData(obs=pd.DataFrame({"gene": pd.Categorical(names)}, index=list(map(str, range(210)))))
    place_cells(cells)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}).flat
    assert "NA" in colors_by_label(ax) and sum(count_cells_by_color(ax).values()) == 210


def test_umap_blocks_controls_are_grey_among_few_labels(cells):
    place_cells(cells)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, control="gene_0").flat
    colors = colors_by_label(ax)
    assert list(colors) == ["gene_1", "gene_2", "gene_3", "gene_0"]
    assert list(colors.values()) == [*map(to_hex, COLORS[:3]), to_hex("0.5")]
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, control=["gene_0", "gene_3"]).flat
    assert list(colors_by_label(ax)) == ["gene_1", "gene_2", "2 controls"]


@pytest.mark.parametrize(
    ("labels", "control", "drawn"),
    [
        ([0, 1, 2], 0, ["1", "2", "0"]),
        ([0, 1, 2], ["0"], ["1", "2", "0"]),
        ([0.0, 1.5, 2.0], [0, 2.0], ["1.5", "2 controls"]),
        ([False, True, True], False, ["True", "False"]),
        ([False, True, True], ["False"], ["True", "False"]),
        (["a", 1, "1"], 1, ["a", "1"]),
    ],
)
def test_umap_blocks_control_of_any_type_is_grey(cells, labels, control, drawn):
    place_cells(cells)
    cells.obs["compound"] = pd.Series(labels).iloc[np.arange(96) % 3].to_numpy()
    cells.obs["area"] = np.arange(96) + 0.25
    of_compounds, of_areas = pl.umap_blocks(cells, ["compound", "area"], blocks={"mine": "Z"}, control=control).flat
    colors = colors_by_label(of_compounds)
    assert list(colors) == drawn and colors[drawn[-1]] == to_hex("0.5")
    assert of_areas.get_legend() is None


def test_umap_blocks_highlighted_number_is_a_label(cells):
    place_cells(cells)
    cells.obs["compound"] = np.arange(96) % 4
    for highlight in ([1, 3], ["1", "3"]):
        (ax,) = pl.umap_blocks(cells, "compound", blocks={"mine": "Z"}, highlight=highlight).flat
        assert list(colors_by_label(ax)) == ["1", "3", "2 others"]
    with pytest.raises(ValueError, match="highlight='5': none of the columns"):
        pl.umap_blocks(cells, "compound", blocks={"mine": "Z"}, highlight=[5])


@pytest.mark.parametrize("n_labels", [2, 30])
def test_umap_blocks_dollars_are_no_formula(cells, n_labels):
    place_cells(cells)
    names = ["$\\frac{a$", "US$ 5 and $6", *(f"g{i}" for i in range(n_labels))][:n_labels]
    cells.obs["$a$"] = np.array(names)[np.arange(96) % n_labels]
    (ax,) = pl.umap_blocks(cells, "$a$", blocks={"$\\frac{z$": "Z"}, highlight=names[:2]).flat
    ax.figure.draw_without_rendering()
    texts = [ax.title, *ax.get_legend().get_texts()[:2]]
    assert not any(text._preprocess_math(text.get_text())[1] for text in texts)
    # matplotlib removes the backslashes when it draws the text
    assert [text._preprocess_math(text.get_text())[0] for text in texts] == ["$\\frac{z$ by $a$", *names[:2]]


@pytest.mark.parametrize("argument", ["highlight", "control"])
def test_umap_blocks_unknown_label_is_named(cells, argument):
    unknown: dict[str, Any] = {argument: ["gene_00"]}
    place_cells(cells)
    with pytest.raises(ValueError, match=f"{argument}='gene_00': .* Did you mean 'gene_0'"):
        pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, **unknown)


@pytest.mark.parametrize("embedding", [np.zeros((40, 5)), np.arange(5.0)[:, None]])
def test_compute_umap_degenerate_embedding_is_finite(embedding):
    """Cases are a collapsed z_c and an embedding of five cells."""
    assert np.isfinite(compute_umap(embedding)).all()


def test_umap_blocks_long_names_are_readable(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    column = "Metadata_JCP2022_perturbation_by_name"
    cells.obs[column] = np.array(long_names(3))[np.arange(96) % 3]
    ax = pl.umap_blocks(cells, column, blocks={"z_c of the model of alpha 10, adapted": "Z"})[0, 0]
    require_readable_in_print(ax.figure)


def test_umap_blocks_many_long_names_are_readable():
    names = long_names(30)
    cells = AnnData(obs=pd.DataFrame({"gene": [names[i % 30] for i in range(90)]}, index=list(map(str, range(90)))))
    place_cells(cells)
    require_readable_in_print(pl.umap_blocks(cells, "gene", blocks={"mine": "Z"})[0, 0].figure)


def test_umap_blocks_few_labels_have_colour_blind_safe_colours(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}).flat
    shown = set(map(to_hex, ax.collections[0].get_facecolor()))
    assert shown == set(map(to_hex, COLORS[:4]))


@pytest.mark.parametrize(("color", "blocks", "named"), [("gene", None, "X_scbd_c"), ("genes", {"mine": "Z"}, "genes")])
def test_umap_blocks_missing_key_raises(cells, color, blocks, named):
    cells.obsm["Z"] = np.zeros((96, 2))
    with pytest.raises(KeyError, match=named):
        pl.umap_blocks(cells, color, blocks=blocks)


def test_umap_blocks_embedding_with_nan_raises():
    cells = AnnData(obs=pd.DataFrame({"gene": ["a", "b"] * 30}).set_axis(map(str, range(60))))
    cells.obsm["X_scbd_c"] = np.random.default_rng(0).normal(size=(60, 5))
    cells.obsm["X_scbd_c"][7] = np.nan
    with pytest.raises(ValueError, match=r"X_scbd_c.* in 1 of 60 cells"):
        pl.umap_blocks(cells, "gene", blocks={"z_c": "X_scbd_c"})
