from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from readable import require_readable

from scbd import pl


class Model:
    """Pictures that tell where they come from: content in the first row of pixels, style in the second."""

    def __init__(self, n_channels: int) -> None:
        self.n_channels = n_channels
        self.adapted: list[str | None] = []

    def rows(self, rows):
        """A model takes masks, too: here of eleven cells."""
        return np.arange(11)[np.asarray(rows)]

    def picture(self, content, style):
        content, style = self.rows(content), self.rows(style)
        images = np.zeros((len(content), self.n_channels, 2, 2), dtype=np.float32)
        images[:, :, 0] = np.asarray(content)[:, None, None] / 10
        images[:, :, 1] = np.asarray(style)[:, None, None] / 10
        return images

    def get_intensities(self, adata, rows):
        return self.picture(rows, rows)

    def reconstruct(self, adata, rows, adapt_key):
        self.adapted.append(adapt_key)
        return self.picture(rows, rows)

    def swap_blocks(self, content, style, adata, adapt_key):
        self.adapted.append(adapt_key)
        return self.picture(content, style)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def shown(ax) -> np.ndarray:
    image = np.asarray(ax.images[0].get_array())
    return image[..., 0] if image.ndim == 3 else image


@pytest.mark.parametrize("n_channels", [3, 4])
def test_the_grid_of_the_paper(n_channels):
    axes = pl.counterfactuals(Model(n_channels), [0, 5, 10])
    assert axes.shape == (5, 3)
    names = ["original", "partner", "reconstruction", "content\nof partner", "style\nof partner"]
    assert [line[0].get_ylabel() for line in axes] == names
    # the first cell is 0, its partner 5, of at most 10
    for line, (content, style) in zip(axes, [(0, 0), (5, 5), (0, 0), (5, 0), (0, 5)], strict=True):
        np.testing.assert_allclose(shown(line[0])[:, 0], [content / 10, style / 10], atol=1e-6)


@pytest.mark.parametrize("key", [None, "plate"])
def test_all_that_is_decoded_is_adapted(key):
    model = Model(3)
    pl.counterfactuals(model, [0, 5], adapt_key=key)
    assert model.adapted == [key] * 3


def test_partners_and_channels():
    axes = pl.counterfactuals(Model(4), [0, 10], partners=[10, 5], channels=[2])
    np.testing.assert_allclose(shown(axes[4, 1])[:, 0], [1, 0.5])
    assert np.asarray(pl.counterfactuals(Model(4), [0, 10], channels=[3, 1, 0])[0, 0].images[0].get_array()).ndim == 3
    with pytest.raises(ValueError, match="There are 2 cells and 1 partners"):
        pl.counterfactuals(Model(3), [0, 1], partners=[1])
    with pytest.raises(ValueError, match=r"channels=\[0, 1\]: name one channel to show in grey, or three"):
        pl.counterfactuals(Model(3), [0, 1], channels=[0, 1])


def test_cells_by_a_mask():
    rows = np.isin(np.arange(11), [0, 10])
    by_number, by_mask = (pl.counterfactuals(Model(3), cells) for cells in ([0, 10], rows))
    assert by_mask.shape == (5, 2)
    for ours, theirs in zip(by_mask.flat, by_number.flat, strict=True):
        np.testing.assert_array_equal(shown(ours), shown(theirs))
    axes = pl.counterfactuals(Model(3), rows, partners=~rows & (np.arange(11) < 3))
    np.testing.assert_allclose(shown(axes[1, 0])[:, 0], [0.1, 0.1], atol=1e-6)


class OneBlock(Model):
    def swap_blocks(self, content, style, adata, adapt_key):
        raise ValueError("a single block")


def test_a_single_block_is_refused_before_anything_is_decoded():
    model = OneBlock(3)
    with pytest.raises(ValueError, match="a single block"):
        pl.counterfactuals(model, [0, 1])
    assert not model.adapted


class Features:
    """A model of features, which should not have to decode any."""

    def get_intensities(self, adata, rows):
        return np.ones((len(rows), 12), dtype=np.float32)


def test_features_make_no_pictures():
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        pl.counterfactuals(Features(), [0, 1])
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        pl.traverse(Features(), [0, 1], "GENE1")


@pytest.mark.parametrize("n", [1, 4])
def test_what_lines_are_can_be_read(n):
    require_readable(pl.counterfactuals(Model(3), list(range(n)))[0, 0].figure)
