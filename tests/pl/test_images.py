from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import make_cells
from helpers.figure_checks import long_names, require_readable

from scbd import pl
from scbd.pl._images import check_channels


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.mark.parametrize(("channels", "lines"), [(1, 1), (3, 1), (4, 4)])
def test_cells_any_number_of_channels_returns_axes(channels, lines):
    axes = pl.cells(make_cells(12, shape=(channels, 16, 16)), label="gene", rows=[0, 5, 7])
    assert axes.shape == (lines, 3)
    assert all(ax.images[0].get_array().max() <= 1 for ax in axes.flat)
    assert axes[0, 0].get_title().startswith("gene_")


@pytest.mark.parametrize(("channels", "n"), [(1, 1), (2, 2), (3, 6)])
def test_cells_long_channel_and_label_names_are_readable(channels, n):
    cells = make_cells(12, shape=(channels, 16, 16))
    cells.obs["long"] = [np.nan, *long_names(11)]
    cells.var_names = ["Hoechst 33342, nuclei, 2x2", "Concanavalin A, ER", "MitoTracker deep red"][:channels]
    axes = pl.cells(cells, label="long", rows=range(n))
    require_readable(axes[0, 0].figure)
    assert axes[0, 0].get_title() == "missing" and min(ax.bbox.height for ax in axes.flat) > 50


def test_image_grids_in_one_journal_column_are_readable():
    cells = make_cells(12, shape=(2, 16, 16))
    cells.obs["long"] = long_names(12)
    for axes in (
        pl.cells(cells, label="long", rows=range(3)),
        pl.counterfactuals(Model(3), [0, 5, 10]),
        pl.traverse(Path(3), [0, 5], long_names(1)[0], n_steps=2),
    ):
        axes[0, 0].figure.set_figwidth(3.5)
        require_readable(axes[0, 0].figure)


def test_cells_no_rows_or_missing_column_raises():
    cells = make_cells(12, shape=(1, 16, 16))
    empty: tuple = ([], np.zeros(12, bool))
    for rows in empty:
        with pytest.raises(ValueError, match="rows names no cell: name one or more to draw"):
            pl.cells(cells, rows=rows)
    with pytest.raises(KeyError, match="genes"):
        pl.cells(cells, label="genes")


def test_cells_default_draws_at_most_six():
    """More cells would be too small on the screen of a phone."""
    axes = pl.cells(make_cells(12, shape=(1, 16, 16)))
    assert axes.shape == (1, 6) and axes[0, 0].figure.get_size_inches()[0] <= 7
    assert pl.cells(make_cells(4, shape=(1, 16, 16))).shape == (1, 4)


def test_cells_dim_channel_is_as_bright_as_others():
    """On a common scale, a dim stain would be invisible next to a bright one."""
    dim = make_cells(4, shape=(2, 16, 16))
    dim.obsm["single_cell_images"][:, 1] //= 20
    axes = pl.cells(dim, rows=range(4))
    assert [max(ax.images[0].get_array().max() for ax in line) for line in axes] == [1, 1]


def test_cells_hot_pixel_keeps_brightness_and_channels_are_named():
    hot = make_cells(4, shape=(2, 64, 64))
    hot.obsm["single_cell_images"] = hot.obsm["single_cell_images"].astype(np.float32)
    hot.obsm["single_cell_images"][0, 1, 5, 5] = 1e6
    axes = pl.cells(hot, rows=range(4))
    assert all(np.median(np.asarray(ax.images[0].get_array())) > 0.2 for ax in axes.flat)
    assert [line[0].get_ylabel() for line in axes] == ["channel_0", "channel_1"]
    one_spot = make_cells(4, shape=(1, 64, 64))
    one_spot.obsm["single_cell_images"][:] = 0
    one_spot.obsm["single_cell_images"][:, 0, 3, 3] = 9
    assert pl.cells(one_spot, rows=range(4))[0, 0].images[0].get_array().max() == 1
    assert pl.cells(make_cells(4, shape=(3, 16, 16)), rows=[0])[0, 0].get_ylabel().count(",") == 2


@pytest.mark.parametrize("channels", [1, 3])
def test_cells_negative_values_are_not_clipped(channels):
    """If they were, half of the pixels of standardised images would be black."""
    cells = make_cells(6, shape=(channels, 32, 32))
    cells.obsm["single_cell_images"] = np.random.default_rng(0).normal(size=(6, channels, 32, 32)).astype(np.float32)
    drawn = np.concatenate([np.ravel(ax.images[0].get_array()) for ax in pl.cells(cells, rows=range(6)).flat])
    assert (drawn == 0).mean() < 0.01 and (drawn == 1).mean() < 0.01
    cells.obsm["single_cell_images"] = np.abs(cells.obsm["single_cell_images"]) + 1
    assert np.min(pl.cells(cells, rows=[0])[0, 0].images[0].get_array()) > 0.1  # without negative values, black is 0


def test_cells_mask_is_equal_to_row_numbers():
    cells = make_cells(12, shape=(1, 16, 16))
    by_mask = pl.cells(cells, label="gene", rows=np.isin(np.arange(12), [5, 7]))
    assert [ax.get_title() for ax in by_mask[0]] == list(cells.obs["gene"].iloc[[5, 7]])
    by_number = pl.cells(cells, rows=[5, -5])
    for ours, theirs in zip(by_mask[0], by_number[0], strict=True):
        np.testing.assert_array_equal(ours.images[0].get_array(), theirs.images[0].get_array())


class Model:
    """Model whose images encode the content cell in their first row of pixels and the style cell in their second."""

    def __init__(self, n_channels: int) -> None:
        self.n_channels = n_channels
        self.decoded: list[str] = []

    def rows(self, rows):
        """Return row numbers, given row numbers or a mask over eleven cells."""
        return np.arange(11)[np.asarray(rows)]

    def picture(self, content, style):
        content, style = self.rows(content), self.rows(style)
        images = np.zeros((len(content), self.n_channels, 2, 2), dtype=np.float32)
        images[:, :, 0] = np.asarray(content)[:, None, None] / 10
        images[:, :, 1] = np.asarray(style)[:, None, None] / 10
        return images

    def get_intensities(self, adata, rows):
        return self.picture(rows, rows)

    def reconstruct(self, adata, rows):
        self.decoded.append("own")
        return self.picture(rows, rows)

    def swap_blocks(self, content, style, adata):
        self.decoded.append("swapped")
        return self.picture(content, style)


def get_shown_values(ax) -> np.ndarray:
    image = np.asarray(ax.images[0].get_array())
    return image[..., 0] if image.ndim == 3 else image


@pytest.mark.parametrize("n_channels", [3, 4])
def test_counterfactuals_three_cells_return_grid_of_the_paper(n_channels):
    axes = pl.counterfactuals(Model(n_channels), [0, 5, 10])
    assert axes.shape == (5, 3)
    names = ["original", "partner", "reconstruction", "content\nof partner", "style\nof partner"]
    assert [line[0].get_ylabel() for line in axes] == names
    # the first cell is row 0 and its partner row 5; a pixel is the row divided by 10
    for line, (content, style) in zip(axes, [(0, 0), (5, 5), (0, 0), (5, 0), (0, 5)], strict=True):
        np.testing.assert_allclose(get_shown_values(line[0])[:, 0], [content / 10, style / 10], atol=1e-6)


def test_counterfactuals_partners_and_channels_are_used_or_raise():
    axes = pl.counterfactuals(Model(4), [0, 10], partners=[10, 5], channels=[2])
    np.testing.assert_allclose(get_shown_values(axes[4, 1])[:, 0], [1, 0.5])
    assert np.asarray(pl.counterfactuals(Model(4), [0, 10], channels=[3, 1, 0])[0, 0].images[0].get_array()).ndim == 3
    with pytest.raises(ValueError, match="There are 2 cells and 1 partners"):
        pl.counterfactuals(Model(3), [0, 1], partners=[1])
    with pytest.raises(ValueError, match=r"channels=\[0, 1\]: name one channel to show in grey, or three"):
        pl.counterfactuals(Model(3), [0, 1], channels=[0, 1])


def test_counterfactuals_mask_is_equal_to_row_numbers():
    rows = np.isin(np.arange(11), [0, 10])
    by_number, by_mask = (pl.counterfactuals(Model(3), cells) for cells in ([0, 10], rows))
    assert by_mask.shape == (5, 2)
    for ours, theirs in zip(by_mask.flat, by_number.flat, strict=True):
        np.testing.assert_array_equal(get_shown_values(ours), get_shown_values(theirs))
    axes = pl.counterfactuals(Model(3), rows, partners=~rows & (np.arange(11) < 3))
    np.testing.assert_allclose(get_shown_values(axes[1, 0])[:, 0], [0.1, 0.1], atol=1e-6)


class OneBlock(Model):
    def swap_blocks(self, content, style, adata):
        raise ValueError("a single block")


def test_counterfactuals_single_block_raises_before_decoding():
    model = OneBlock(3)
    with pytest.raises(ValueError, match="a single block"):
        pl.counterfactuals(model, [0, 1])
    assert not model.decoded


class Features:
    """Model of features, without methods that decode."""

    def get_intensities(self, adata, rows):
        return np.ones((len(rows), 12), dtype=np.float32)


def test_counterfactuals_and_traverse_model_of_features_raises():
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        pl.counterfactuals(Features(), [0, 1])
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        pl.traverse(Features(), [0, 1], "GENE1")


@pytest.mark.parametrize("n", [1, 4])
def test_counterfactuals_labels_of_lines_are_readable(n):
    require_readable(pl.counterfactuals(Model(3), list(range(n)))[0, 0].figure)


class Path:
    """Model whose images become brighter with each step, in their second row of pixels."""

    def __init__(self, n_channels: int) -> None:
        self.n_channels = n_channels

    def get_intensities(self, adata, rows):
        return np.full((len(rows), self.n_channels, 2, 2), 1.0, dtype=np.float32)

    def traverse(self, rows, to, adata, *, n_steps):
        images = np.zeros((len(rows), n_steps, self.n_channels, 2, 2), dtype=np.float32)
        images[..., 1, :] = np.linspace(0, 0.5, n_steps)[:, None, None]
        return images


@pytest.mark.parametrize(("n_channels", "channels"), [(3, None), (4, None), (4, [3, 1, 0])])
def test_traverse_draws_cell_path_and_change(n_channels, channels):
    axes = pl.traverse(Path(n_channels), [4, 7], "GENE1", n_steps=3, channels=channels)
    assert axes.shape == (2, 5)
    assert [ax.get_title() for ax in axes[0]] == ["cell", "decoded", "", "GENE1", "change"]
    images = [np.asarray(ax.images[0].get_array()) for ax in axes[0]]
    assert images[1].ndim == (3 if n_channels == 3 or channels else 2)
    bottom = [float(np.ravel(image[1])[0]) for image in images]
    np.testing.assert_allclose(bottom, [1, 0, 0.25, 0.5, 0.5], atol=1e-6)
    # unchanged pixels have the middle colour
    assert np.ravel(images[-1][0])[0] == 0 and axes[0, -1].images[0].norm.vmin == -axes[0, -1].images[0].norm.vmax


def test_traverse_constant_images_show_no_change():
    class Still(Path):
        def traverse(self, rows, to, adata, *, n_steps):
            return np.zeros((len(rows), n_steps, self.n_channels, 2, 2), dtype=np.float32)

    axes = pl.traverse(Still(3), [0], "GENE1")
    assert not np.asarray(axes[0, -1].images[0].get_array()).any()


def test_traverse_two_channels_raises():
    with pytest.raises(ValueError, match=r"channels=\[0, 1\]: name one channel to show in grey, or three"):
        pl.traverse(Path(4), [0], "GENE1", channels=[0, 1])


@pytest.mark.parametrize(("n", "n_steps"), [(1, 2), (3, 5)])
def test_traverse_long_goal_name_is_readable(n, n_steps):
    rows, (goal, *_) = list(range(n)), long_names(1)
    require_readable(pl.traverse(Path(3), rows, goal, n_steps=n_steps)[0, 0].figure)


@pytest.mark.parametrize(
    ("asked", "n", "shown"),
    [(None, 3, [0, 1, 2]), (None, 1, [0]), (None, 5, [0]), ([3, 1, 0], 4, [3, 1, 0]), (2, 3, [2]), ((-1,), 4, [-1])],
)
def test_check_channels_valid_channels_return_one_or_three(asked, n, shown):
    assert check_channels(asked, np.zeros((2, n, 4, 4))) == shown


@pytest.mark.parametrize("asked", [[0, 1], [], [4], [0, 1, -5], [True, False, True], ["DNA"], "DNA", 1.5, [[0, 1, 2]]])
def test_check_channels_invalid_channels_raise(asked):
    with pytest.raises(
        ValueError, match="name one channel to show in grey, or three as .* numbers from 0 to 3"
    ) as raised:
        check_channels(asked, np.zeros((2, 4, 4, 4)))
    assert str(raised.value).startswith(f"channels={asked!r}: ")


def test_check_channels_features_or_no_cells_raises():
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        check_channels(None, np.zeros((2, 12)))
    with pytest.raises(ValueError, match="rows names no cell"):
        check_channels(None, np.zeros((0, 3, 4, 4)))
