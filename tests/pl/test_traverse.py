from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from readable import long_names, require_readable

from scbd import pl


class Model:
    """Cells that become brighter by a step, in their second row of pixels."""

    def __init__(self, n_channels: int) -> None:
        self.n_channels = n_channels

    def get_intensities(self, adata, rows):
        return np.full((len(rows), self.n_channels, 2, 2), 1.0, dtype=np.float32)

    def traverse(self, rows, to, adata, *, n_steps, adapt_key):
        assert adapt_key == "plate"
        images = np.zeros((len(rows), n_steps, self.n_channels, 2, 2), dtype=np.float32)
        images[..., 1, :] = np.linspace(0, 0.5, n_steps)[:, None, None]
        return images


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.mark.parametrize(("n_channels", "channels"), [(3, None), (4, None), (4, [3, 1, 0])])
def test_cell_path_and_change(n_channels, channels):
    axes = pl.traverse(Model(n_channels), [4, 7], "GENE1", n_steps=3, channels=channels, adapt_key="plate")
    assert axes.shape == (2, 5)
    assert [ax.get_title() for ax in axes[0]] == ["cell", "decoded", "", "GENE1", "change"]
    images = [np.asarray(ax.images[0].get_array()) for ax in axes[0]]
    assert images[1].ndim == (3 if n_channels == 3 or channels else 2)
    bottom = [float(np.ravel(image[1])[0]) for image in images]
    np.testing.assert_allclose(bottom, [1, 0, 0.25, 0.5, 0.5], atol=1e-6)
    # what does not change is in the middle of the colours
    assert np.ravel(images[-1][0])[0] == 0 and axes[0, -1].images[0].norm.vmin == -axes[0, -1].images[0].norm.vmax


def test_nothing_changes_where_nothing_does():
    class Still(Model):
        def traverse(self, rows, to, adata, *, n_steps, adapt_key):
            return np.zeros((len(rows), n_steps, self.n_channels, 2, 2), dtype=np.float32)

    axes = pl.traverse(Still(3), [0], "GENE1")
    assert not np.asarray(axes[0, -1].images[0].get_array()).any()


def test_channels_are_one_or_three():
    with pytest.raises(ValueError, match=r"channels=\[0, 1\]: name one channel to show in grey, or three"):
        pl.traverse(Model(4), [0], "GENE1", channels=[0, 1])


@pytest.mark.parametrize(("n", "n_steps"), [(1, 2), (3, 5)])
def test_a_long_name_of_the_goal_lies_on_no_other(n, n_steps):
    rows, (goal, *_) = list(range(n)), long_names(1)
    require_readable(pl.traverse(Model(3), rows, goal, n_steps=n_steps, adapt_key="plate")[0, 0].figure)
