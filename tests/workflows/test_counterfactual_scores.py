from __future__ import annotations

import numpy as np
import pytest

from scbd.datasets import colored_digits, colorize
from scbd.workflows import counterfactual_scores
from scbd.workflows._counterfactual_scores import DigitReader, read_colors


@pytest.fixture(scope="module")
def digits():
    return colored_digits()


def images_of(adata, rows):
    return adata.obsm["single_cell_images"][rows] / np.float32(255)


@pytest.fixture(scope="module")
def reader(digits):
    rows = (digits.obs["split"] == "train").to_numpy()
    return DigitReader(images_of(digits, rows), digits.obs["digit"].astype(int).to_numpy()[rows])


@pytest.mark.parametrize("part", ["validation", "test"])  # coloured, and white
def test_the_reader_of_digits_does_not_see_colour(digits, reader, part):
    rows = (digits.obs["split"] == part).to_numpy()
    images, digit = images_of(digits, rows), digits.obs["digit"].astype(int).to_numpy()[rows]
    assert np.mean(reader(images) == digit) > 0.97
    np.testing.assert_array_equal(reader(0.3 * images), reader(images))


def test_the_reader_of_digits_reads_prototypes(digits, reader):
    """What frozen encoders decode: pictures that no pen has drawn, as blurred as a mean of many."""
    rows, digit = (digits.obs["split"] == "validation").to_numpy(), digits.obs["digit"].astype(int).to_numpy()
    images, digit = images_of(digits, rows), digit[rows]
    means = np.stack([images[digit == i].max(1, keepdims=True).mean(0) for i in range(10)])
    np.testing.assert_array_equal(reader(np.repeat(means, 3, axis=1)), np.arange(10))


def test_the_reader_of_colours_knows_the_paper_s(digits):
    coloured = (digits.obs["split"] != "test").to_numpy()
    environment, shade = read_colors(images_of(digits, coloured))
    np.testing.assert_array_equal(environment, digits.obs["environment"].to_numpy()[coloured])
    assert np.mean(shade == digits.obs["digit"].astype(int).to_numpy()[coloured]) > 0.99


class Ideal:
    """Paints any digit in any colour; or leaves the colour where it was."""

    def __init__(self, adata, moves: bool) -> None:
        self.images = adata.obsm["single_cell_images"] / np.float32(255)
        self.digit = adata.obs["digit"].astype(int).to_numpy()
        self.environment = adata.obs["environment"].astype(str).to_numpy()
        self.moves = moves

    def get_intensities(self, indices):
        return self.images[indices]

    reconstruct = get_intensities

    def swap_blocks(self, content, style):
        color = style if self.moves else content
        grey = self.images[content].max(1)
        return colorize(grey, self.digit[color], self.environment[color]) / np.float32(255)


@pytest.mark.parametrize("moves", [True, False])
def test_an_ideal_exchange_scores_full_marks_and_none_scores_none(digits, moves):
    scores = counterfactual_scores(digits, Ideal(digits, moves))
    assert scores["reader"] > 0.9 and scores["digit kept"] > 0.9
    assert scores["mse"] == 0 and scores["mse of the mean image"] > 0.01
    assert scores["digit reconstructed"] == scores["reader"] and scores["color reconstructed"] == 1
    assert scores["color moved"] == (1 if moves else 0)
    assert scores["shade error"] < 0.1 if moves else scores["shade error"] > 2
