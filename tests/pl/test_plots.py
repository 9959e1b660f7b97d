from __future__ import annotations

from typing import Any

import anndata
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells
from readable import long_names, require_readable

from scbd import pl


def legend_of(ax):
    return ax.get_legend().get_texts(), ax.get_legend().legend_handles


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_umaps_of_both_blocks_by_each_label(cells):
    rng = np.random.default_rng(0)
    for block in "cs":
        cells.obsm[f"X_scbd_{block}"] = rng.normal(size=(96, 4)).astype("float32")
    axes = pl.umap_blocks(cells, ["gene", "well"])
    assert axes.shape == (2, 2)
    assert [ax.get_title() for ax in axes.flat] == ["z_c by gene", "z_c by well", "z_s by gene", "z_s by well"]
    assert len(axes[1, 0].get_legend().get_texts()) == 4
    assert axes[0, 0].get_legend() is None  # that of a column stands below it, once
    assert axes[0, 0].figure.get_size_inches()[0] <= 7
    points = axes[0, 0].collections[0].get_offsets()
    assert len(points) == 96
    np.testing.assert_array_equal(points, axes[0, 1].collections[0].get_offsets())


def test_a_umap_that_is_there_is_drawn(cells):
    cells.obsm["Z"] = np.zeros((96, 3))
    cells.obsm["Z_umap"] = np.stack([np.arange(96), np.zeros(96)], axis=1)
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}, max_cells=50).flat
    drawn = np.asarray(ax.collections[0].get_offsets())[:, 0].astype(int)
    assert len(set(drawn)) == 50
    assert set(drawn) <= set(range(96))
    # each in the colour of its own label
    shades = pd.Series(list(map(tuple, ax.collections[0].get_facecolor())), index=cells.obs["gene"].iloc[drawn])
    legend = {text.get_text(): tuple(handle.get_facecolor()[0]) for text, handle in zip(*legend_of(ax), strict=True)}
    assert shades.to_dict() == legend and shades.groupby(level=0, observed=True).nunique().eq(1).all()


def test_a_umap_that_was_kept_is_drawn_as_long_as_the_embedding_is_the_same(cells, monkeypatch, tmp_path):
    computed: list[int] = []

    def umap(embedding, *, seed):
        computed.append(len(embedding))
        return np.stack([embedding[:, 0], np.full(len(embedding), seed)], axis=1).astype("float32")

    def drawn(adata, **how):
        (ax,) = pl.umap_blocks(adata, "gene", blocks={"mine": "Z"}, **how).flat
        return sorted(np.asarray(ax.collections[0].get_offsets())[:, 0])

    monkeypatch.setattr("scbd.pl._umap.umap", umap)
    cells.obsm["Z"] = np.arange(96 * 3, dtype="float32").reshape(96, 3)
    drawn(cells)
    assert list(cells.obsm) == ["single_cell_images", "Z"] and not cells.uns  # unless it is asked for
    assert len(drawn(cells, keep=True, max_cells=10)) == 10
    np.testing.assert_array_equal(cells.obsm["Z_umap"][:, 0], cells.obsm["Z"][:, 0])
    assert computed == [96, 96]
    cells.write_h5ad(tmp_path / "cells.h5ad")
    again = anndata.read_h5ad(tmp_path / "cells.h5ad")
    assert drawn(again) == sorted(cells.obsm["Z"][:, 0]) and computed == [96, 96]
    again.obsm["Z"] = again.obsm["Z"] + 1
    assert drawn(again) == sorted(again.obsm["Z"][:, 0]) and computed == [96, 96, 96]
    few = cells[:20].copy()
    assert drawn(few) == sorted(few.obsm["Z"][:, 0]) and computed == [96, 96, 96, 20]
    drawn(again, keep=True)  # in place of the old one
    assert drawn(again) == sorted(again.obsm["Z"][:, 0]) and computed[4:] == [96]


def test_many_labels_have_no_legend(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.zeros((96, 2))
    cells.obs["cell"] = cells.obs_names
    (ax,) = pl.umap_blocks(cells, "cell", blocks={"mine": "Z"}).flat
    assert ax.get_legend() is None and ax.get_title() == "mine by cell (96 labels)"


def test_numbers_have_a_colour_bar(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    cells.obs["area"] = np.arange(96.0)
    cells.obs.loc[cells.obs_names[:10], "area"] = np.nan
    cells.obs["few"] = np.arange(96) % 3
    area, few = pl.umap_blocks(cells, ["area", "few"], blocks={"mine": "Z"}).flat
    missing, drawn = area.collections[:2]
    assert len(missing.get_offsets()) == 10 and drawn.colorbar is not None
    assert [text.get_text() for text in area.get_legend().get_texts()] == ["missing"]
    assert sorted(drawn.get_array()) == list(range(10, 96))
    assert [text.get_text() for text in few.get_legend().get_texts()] == ["0", "1", "2"]


@pytest.mark.parametrize("n", [1, 20])
def test_long_names_of_columns_embeddings_and_labels_can_be_read(cells, n):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.random.default_rng(0).normal(size=(96, 2))
    column, other = "Metadata_JCP2022_perturbation_by_name", "plate, source and batch of the whole screen"
    cells.obs[column] = np.array(long_names(n))[np.arange(96) % n]
    cells.obs[other] = np.where(np.arange(96) % 3, np.arange(96.0), np.nan)
    blocks = {"z_c of the model of alpha 10, adapted": "Z", "z_s": "Z"}
    for color in ([column], [column, other]):
        figure = pl.umap_blocks(cells, color, blocks=blocks)[0, 0].figure
        require_readable(figure)
        heights = [ax.bbox.height / figure.dpi for ax in figure.axes]
        assert min(heights) > 1.8 and figure.get_size_inches()[0] <= 3.5 * len(color)


def test_missing_cells_are_named_among_labels_that_are_not(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.zeros((96, 2))
    cells.obs["sixty"] = pd.Categorical([f"g{i % 60}" for i in range(96)])
    (ax,) = pl.umap_blocks(cells, "sixty", blocks={"mine": "Z"}).flat
    assert ax.get_legend() is None
    cells.obs.loc[cells.obs_names[70:], "sixty"] = np.nan
    (ax,) = pl.umap_blocks(cells, "sixty", blocks={"mine": "Z"}).flat
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["missing"]
    assert ax.get_title() == "mine by sixty (60 labels)"


@pytest.mark.parametrize("n", [1, 9, 12, 19, 20, 40])
def test_no_label_has_the_grey_of_missing_cells(cells, n):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.zeros((96, 2))
    cells.obs["label"] = [f"g{i % n}" for i in range(96)]
    (ax,) = pl.umap_blocks(cells, "label", blocks={"mine": "Z"}).flat
    shades = np.unique(np.asarray(ax.collections[0].get_facecolor())[:, :3], axis=0)
    assert len(shades) == n and np.abs(shades - 0.8).max(axis=1).min() > 0.1


def test_cells_without_a_label_are_grey(cells):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.stack([np.arange(96), np.zeros(96)], axis=1)
    cells.obs.loc[cells.obs_names[:10], "gene"] = np.nan
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}).flat
    first = np.asarray(ax.collections[0].get_offsets())[:, 0] < 10
    shades = np.asarray(ax.collections[0].get_facecolor())
    assert (shades[first, :3] == 0.8).all() and (shades[~first, :3] != 0.8).any(axis=1).all()
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "missing"


@pytest.mark.parametrize("kept", [False, True])
def test_labels_that_no_cell_has_are_not_counted(cells, kept):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.zeros((96, 2))
    names = [f"gene_{i}" for i in range(27)]
    cells.obs["gene"] = cells.obs["gene"].cat.set_categories(names[::-1])
    if kept:  # as scanpy keeps them, one a category
        cells.uns["gene_colors"] = [f"#{i:02x}0000" for i in range(27)]
    (ax,) = pl.umap_blocks(cells, "gene", blocks={"mine": "Z"}).flat
    texts, handles = legend_of(ax)
    assert ax.get_title() == "mine by gene" and [text.get_text() for text in texts] == names[3::-1]
    reds = [round(255 * handle.get_facecolor()[0][0]) for handle in handles]
    assert (reds == [23, 24, 25, 26]) == kept


@pytest.mark.parametrize("missing", [np.nan, None])
def test_a_column_without_any_value_is_grey(cells, missing):
    cells.obsm["Z"] = cells.obsm["Z_umap"] = np.zeros((96, 2))
    cells.obs["empty"] = missing
    (ax,) = pl.umap_blocks(cells, "empty", blocks={"mine": "Z"}).flat
    assert (np.asarray(ax.collections[0].get_facecolor())[:, :3] == 0.8).all()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["missing"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_umap_takes_four_cells(cells, n):
    few = cells[:n].copy()
    few.obsm["Z"] = np.zeros((n, 3))
    with pytest.raises(ValueError, match=f"A UMAP takes 4 cells or more, there are {n}"):
        pl.umap_blocks(few, "gene", blocks={"mine": "Z"})
    assert not plt.get_fignums()
    few.obsm["Z_umap"] = np.zeros((n, 2))  # one of the user's own is drawn
    assert pl.umap_blocks(few, "gene", blocks={"mine": "Z"}).shape == (1, 1)


def test_what_cannot_be_drawn(cells):
    with pytest.raises(KeyError, match=r"obsm has no 'X_scbd_c' to draw \(its keys: single_cell_images\)"):
        pl.umap_blocks(cells, "gene")
    empty: tuple[Any, ...] = ({}, None)  # as a model has it before training
    for history in empty:
        with pytest.raises(ValueError, match="The history is empty: train the model first"):
            pl.history(history)
    with pytest.raises(KeyError, match="obsm has no 'images' to draw"):
        pl.cells(cells, image_key="images")


def make_history(*names):
    steps = pd.Index([1, 2, 3], name="step")
    return {name: pd.DataFrame({name: [3.0, 2.0, 1.0]}, index=steps) for name in names}


def test_training_curves_and_the_line_of_a_collapsed_embedding():
    axes = pl.history(make_history("train_loss", "validation_loss", "train_supervised_c", "z_c_spread"), ceiling=5.5)
    assert [ax.get_title() for ax in axes] == ["loss", "supervised loss of z_c", "spread of z_c (0: collapsed)"]
    assert [line.get_label() for line in axes[1].lines] == ["train", "collapsed (train)"]
    assert axes[0].figure.get_size_inches()[0] <= 7
    np.testing.assert_array_equal(axes[0].lines[1].get_ydata(), [3, 2, 1])


def test_a_single_step_is_seen():
    """A line of one point has no length."""
    history = {name: curve.head(1) for name, curve in make_history("train_loss", "validation_loss").items()}
    assert all(line.get_marker() == "o" for line in pl.history(history)[0].lines)
    assert pl.history(make_history("train_loss"))[0].lines[0].get_marker() == "None"


def test_the_legend_of_training_curves_lies_on_no_line():
    figure = pl.history(make_history("train_loss", "train_supervised_c", "validation_supervised_c"), ceiling=3)[
        0
    ].figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train", "validation", "collapsed (validation)"]
    assert all(ax.get_legend() is None and not legend.get_window_extent().overlaps(ax.bbox) for ax in figure.axes)
    assert legend.get_window_extent().width < figure.bbox.width


def test_the_line_of_a_collapsed_embedding_is_that_of_validation():
    """Batches of training may be larger, and a loss that lies above the line is not one that has collapsed."""
    names = [f"{part}_{name}" for part in ("train", "validation") for name in ("loss", "supervised_c")]
    _, ax = pl.history(make_history(*names), ceiling=3.8)
    train, validation, line = ax.lines
    assert line.get_label() == "collapsed (validation)" and line.get_ydata()[0] == 3.8
    assert line.get_color() == validation.get_color() != train.get_color()


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["decoder_train_loss", "decoder_validation_loss"], "loss of the decoder"),
        (["train_reconstruction", "validation_reconstruction"], "reconstruction loss"),
    ],
)
def test_curves_of_a_decoder(names, title):
    axes = pl.history(make_history("train_loss", *names))
    assert [ax.get_title() for ax in axes] == ["loss", title]
    assert [line.get_label() for line in axes[1].lines] == ["train", "validation"]


@pytest.mark.parametrize(("channels", "lines"), [(1, 1), (3, 1), (4, 4)])
def test_cells(channels, lines):
    axes = pl.cells(make_cells(12, shape=(channels, 16, 16)), label="gene", rows=[0, 5, 7])
    assert axes.shape == (lines, 3)
    assert all(ax.images[0].get_array().max() <= 1 for ax in axes.flat)
    assert axes[0, 0].get_title().startswith("gene_")


@pytest.mark.parametrize(("channels", "n"), [(1, 1), (2, 2), (3, 6)])
def test_long_names_of_channels_and_labels_can_be_read(channels, n):
    cells = make_cells(12, shape=(channels, 16, 16))
    cells.obs["long"] = [np.nan, *long_names(11)]
    cells.var_names = ["Hoechst 33342, nuclei, 2x2", "Concanavalin A, ER", "MitoTracker deep red"][:channels]
    axes = pl.cells(cells, label="long", rows=range(n))
    require_readable(axes[0, 0].figure)
    assert axes[0, 0].get_title() == "missing" and min(ax.bbox.height for ax in axes.flat) > 50


def test_no_cells_and_no_such_column():
    cells = make_cells(12, shape=(1, 16, 16))
    empty: tuple[Any, ...] = ([], np.zeros(12, bool))
    for rows in empty:
        with pytest.raises(ValueError, match="rows names no cell: name one or more to draw"):
            pl.cells(cells, rows=rows)
    with pytest.raises(KeyError, match=r"obs has no 'genes' to write \(its keys: gene, well, plate\)"):
        pl.cells(cells, label="genes")


def test_six_cells_are_drawn_unless_others_are_asked_for():
    """More would not be seen on a phone."""
    axes = pl.cells(make_cells(12, shape=(1, 16, 16)))
    assert axes.shape == (1, 6) and axes[0, 0].figure.get_size_inches()[0] <= 7
    assert pl.cells(make_cells(4, shape=(1, 16, 16))).shape == (1, 4)


def test_each_channel_is_as_bright_as_the_others():
    """A dim stain would not be seen beside a bright one."""
    dim = make_cells(4, shape=(2, 16, 16))
    dim.obsm["single_cell_images"][:, 1] //= 20
    axes = pl.cells(dim, rows=range(4))
    assert [max(ax.images[0].get_array().max() for ax in line) for line in axes] == [1, 1]


def test_a_hot_pixel_leaves_the_others_bright_and_channels_have_names():
    hot = make_cells(4, shape=(2, 64, 64))
    hot.obsm["single_cell_images"] = hot.obsm["single_cell_images"].astype(np.float32)
    hot.obsm["single_cell_images"][0, 1, 5, 5] = 1e6
    axes = pl.cells(hot, rows=range(4))
    assert all(np.median(np.asarray(ax.images[0].get_array())) > 0.2 for ax in axes.flat)
    assert [line[0].texts[0].get_text() for line in axes] == ["channel_0", "channel_1"]
    one_spot = make_cells(4, shape=(1, 64, 64))
    one_spot.obsm["single_cell_images"][:] = 0
    one_spot.obsm["single_cell_images"][:, 0, 3, 3] = 9
    assert pl.cells(one_spot, rows=range(4))[0, 0].images[0].get_array().max() == 1
    assert pl.cells(make_cells(4, shape=(3, 16, 16)), rows=[0])[0, 0].texts[0].get_text().count(",") == 2


@pytest.mark.parametrize("channels", [1, 3])
def test_negative_values_are_not_cut(channels):
    """Standardised images would be black in half of their pixels."""
    cells = make_cells(6, shape=(channels, 32, 32))
    cells.obsm["single_cell_images"] = np.random.default_rng(0).normal(size=(6, channels, 32, 32)).astype(np.float32)
    drawn = np.concatenate([np.ravel(ax.images[0].get_array()) for ax in pl.cells(cells, rows=range(6)).flat])
    assert (drawn == 0).mean() < 0.01 and (drawn == 1).mean() < 0.01
    cells.obsm["single_cell_images"] = np.abs(cells.obsm["single_cell_images"]) + 1
    assert np.min(pl.cells(cells, rows=[0])[0, 0].images[0].get_array()) > 0.1  # black is 0 where nothing is below


def test_cells_by_a_mask():
    cells = make_cells(12, shape=(1, 16, 16))
    by_mask = pl.cells(cells, label="gene", rows=np.isin(np.arange(12), [5, 7]))
    assert [ax.get_title() for ax in by_mask[0]] == list(cells.obs["gene"].iloc[[5, 7]])
    by_number = pl.cells(cells, rows=[5, -5])
    for ours, theirs in zip(by_mask[0], by_number[0], strict=True):
        np.testing.assert_array_equal(ours.images[0].get_array(), theirs.images[0].get_array())


def test_components_in_use():
    health = pd.DataFrame(
        {"block": ["c", "c", "s"], "component": [0, 1, 0], "divergence": [0.1, 2.0, 3.0], "variance": [0.0, 1.0, 2.0]}
    )
    health = health.assign(active=health["variance"] > 0.01, prior_variance=0.5)
    axes = pl.latent_health(health)
    assert axes.shape == (2, 3) and axes[0, 0].get_title(loc="left") == "$z_c$: 1 of 2 components in use"
    assert axes[0, 0].figure.get_size_inches()[0] <= 7
    assert [bar.get_height() for bar in axes[0, 0].patches] == [2.0, 0.1]
    assert {bar.get_width() for bar in axes[0, 0].patches} == {1}  # of hundreds, gaps would be a pattern
    with pytest.raises(ValueError, match="train the model first"):
        pl.latent_health(pd.DataFrame())
