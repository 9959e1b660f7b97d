from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_screen

from paper import picture_scores
from paper.picture_scores import (
    DigitReader,
    counterfactual_pictures,
    counterfactual_scores,
    effect_picture_scores,
    read_colors,
    simulated_effect,
)
from scbd.datasets import colored_digits, simulated_screen
from scbd.datasets._digits import colorize


@pytest.fixture(scope="module")
def digits():
    return colored_digits()


def images_of(adata, rows):
    return adata.obsm["single_cell_images"][rows] / np.float32(255)


@pytest.fixture(scope="module")
def reader(digits):
    torch.manual_seed(0)  # the initial weights must not depend on earlier tests
    rows = (digits.obs["split"] == "train").to_numpy()
    return DigitReader(images_of(digits, rows), digits.obs["digit"].astype(int).to_numpy()[rows])


@pytest.mark.parametrize("part", ["validation", "test"])  # the validation part is coloured, the test part is white
def test_digit_reader_coloured_or_white_digits_ignores_intensity(digits, reader, part):
    rows = (digits.obs["split"] == part).to_numpy()
    images, digit = images_of(digits, rows), digits.obs["digit"].astype(int).to_numpy()[rows]
    assert np.mean(reader(images) == digit) > 0.97
    np.testing.assert_array_equal(reader(0.3 * images), reader(images))


def test_digit_reader_mean_image_of_each_digit_returns_the_digit(digits, reader):
    """Mean images of each digit are read correctly. Decoders of frozen encoders return similarly blurred images."""
    rows, digit = (digits.obs["split"] == "validation").to_numpy(), digits.obs["digit"].astype(int).to_numpy()
    images, digit = images_of(digits, rows), digit[rows]
    means = np.stack([images[digit == i].max(1, keepdims=True).mean(0) for i in range(10)])
    np.testing.assert_array_equal(reader(np.repeat(means, 3, axis=1)), np.arange(10))


def test_read_colors_coloured_digits_returns_environment_and_shade(digits):
    coloured = (digits.obs["split"] != "test").to_numpy()
    environment, shade = read_colors(images_of(digits, coloured))
    np.testing.assert_array_equal(environment, digits.obs["environment"].to_numpy()[coloured])
    assert np.mean(shade == digits.obs["digit"].astype(int).to_numpy()[coloured]) > 0.99


class IdealModel:
    """Exact model: `swap_blocks` returns the exact picture, or with `moves=False` the same colour."""

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
def test_counterfactual_scores_ideal_and_no_swap_are_best_and_worst(digits, reader, moves, monkeypatch):
    def return_fixture_reader(images, digit, *, seed):
        """Return the reader of the fixture, already trained on these digits: training takes seconds."""
        assert len(images) == np.sum(digits.obs["split"] == "train") and np.mean(reader(images) == digit) > 0.97
        return reader

    monkeypatch.setattr(picture_scores, "DigitReader", return_fixture_reader)
    scores = counterfactual_scores(digits, IdealModel(digits, moves))
    assert scores["reader"] > 0.9 and scores["digit kept"] > 0.9
    assert scores["mse"] == 0 and scores["mse of the mean image"] > 0.01
    assert scores["digit reconstructed"] == scores["reader"] and scores["color reconstructed"] == 1
    assert scores["color moved"] == (1 if moves else 0)
    assert scores["shade error"] < 0.1 if moves else scores["shade error"] > 2


def test_counterfactual_pictures_ideal_swap_exchanges_colour_or_shape(digits, reader):
    lines = counterfactual_pictures(digits, IdealModel(digits, moves=True))
    assert list(lines) == ["original", "reconstruction", "content of the next", "style of the next"]
    color, shade = read_colors(lines["original"])
    assert len(set(shade)) == 6 and (color != np.roll(color, 1)).all()
    np.testing.assert_array_equal(lines["reconstruction"], lines["original"])
    # colour and shade, or else the shape, come from the next digit
    np.testing.assert_array_equal(read_colors(lines["content of the next"]), (color, shade))
    np.testing.assert_array_equal(read_colors(lines["style of the next"]), np.roll((color, shade), -1, axis=1))
    shapes = lines["original"].max(1) > 0.5
    np.testing.assert_array_equal(lines["content of the next"].max(1) > 0.5, np.roll(shapes, -1, axis=0))
    np.testing.assert_array_equal(lines["style of the next"].max(1) > 0.5, shapes)
    still = counterfactual_pictures(digits, IdealModel(digits, moves=False))
    np.testing.assert_array_equal(still["original"], lines["original"])


class EffectModel:
    """Model that adds a share of the true effect of a gene to cells, and noise."""

    def __init__(self, adata: Any, share: float = 1.0, noise: float = 0.0) -> None:
        self.truth, self.well = adata.uns["truth"], adata.obs["well"].astype(str).to_numpy()
        self.share, self.noise = share, noise
        self.painted: dict[tuple[str, str], np.ndarray] = {}

    def get_intensities(self, adata, indices=None):
        return adata.obsm["single_cell_images"][slice(None) if indices is None else indices] / np.float32(255)

    def traverse(self, rows, to, adata, *, n_steps):
        images = self.get_intensities(adata, rows)
        effects = np.stack([self.effect(to, well, images.shape[-1]) for well in self.well[rows]])
        effects = self.share * effects + self.noise * np.random.default_rng(0).normal(size=effects.shape)
        return np.linspace(0, 1, n_steps)[:, None, None, None] * effects[:, None] + images[:, None]

    def effect(self, gene, well, image_size):
        if (gene, well) not in self.painted:
            effect = simulated_effect(self.truth, gene, well, image_size=image_size, n_cells=64) / 255
            self.painted[gene, well] = effect
        return self.painted[gene, well]


@pytest.fixture(scope="module")
def screen():
    return make_screen()


def test_effect_picture_scores_true_effect_correlation_is_high(screen):
    scores = effect_picture_scores(screen, EffectModel(screen))
    assert scores["correlation"] > 0.95 and scores["error"] < 0.1
    assert 0 < scores["mean difference: correlation"] < scores["correlation"]


def test_effect_picture_scores_half_effect_error_rises_not_correlation(screen):
    scores = effect_picture_scores(screen, EffectModel(screen, share=0.5))
    assert scores["correlation"] > 0.95 and 0.2 < scores["error"] < 0.35


def test_effect_picture_scores_noise_correlation_is_zero(screen):
    scores = effect_picture_scores(screen, EffectModel(screen, share=0.0, noise=0.1))
    assert abs(scores["correlation"]) < 0.1 and scores["error"] > 1


def test_effect_picture_scores_well_without_gene_is_scored_separately(screen):
    apart = screen[
        ~((screen.obs["gene"] != "nontargeting") & (screen.obs["well"] == screen.obs["well"].iloc[0]))
    ].copy()
    scores = effect_picture_scores(apart, EffectModel(apart))
    assert scores["gene not in the well: correlation"] > 0.95
    assert not any(name.startswith("gene not") for name in effect_picture_scores(screen[:], EffectModel(screen)))


def test_effect_picture_scores_no_truth_or_no_controls_raises(screen):
    real = screen.copy()
    del real.uns["truth"]
    with pytest.raises(KeyError, match="truth"):
        effect_picture_scores(real, EffectModel(screen))
    with pytest.raises(KeyError, match="DMSO"):
        effect_picture_scores(screen, EffectModel(screen), control="DMSO")


_SCREEN = {"n_complexes": 2, "genes_per_complex": 2, "guides_per_gene": 1, "n_wells": 2, "image_size": 24, "seed": 3}


@pytest.mark.parametrize("neighbours", [0, 3])
def test_simulated_effect_equals_mean_difference_of_many_cells(neighbours):
    setting: dict[str, Any] = _SCREEN | {"control_fraction": 0.4, "effect_size": 1.5, "well_effect": 0.5}
    screen = simulated_screen(6000, neighbours=neighbours, **setting)
    effect = simulated_effect(screen.uns["truth"], "GENE1", "P1_W2", image_size=24)
    images = screen.obsm["single_cell_images"].astype(np.float64)
    here = (screen.obs["well"] == "P1_W2").to_numpy()
    of_gene, controls = (here & (screen.obs["gene"] == name).to_numpy() for name in ("GENE1", "nontargeting"))
    seen = images[of_gene].mean(0) - images[controls].mean(0)
    assert effect.shape == (4, 24, 24) and effect.dtype == np.float32
    assert np.corrcoef(effect.ravel(), seen.ravel())[0, 1] > 0.95
    assert 0.8 < np.abs(effect).mean() / np.abs(seen).mean() < 1.25


def test_simulated_effect_depends_on_well_strength_and_density():
    setting = _SCREEN | {"n_wells": 12, "plate_wells": 6}
    truth = simulated_screen(50, interaction=1.0, density_effect=2.0, **setting).uns["truth"]
    strongest, weakest = (truth["strengths"].sum(axis=1).sort_values().index[i] for i in (-1, 0))
    loud, quiet = (
        np.abs(simulated_effect(truth, "GENE1", well, image_size=24)).mean() for well in (strongest, weakest)
    )
    assert loud > quiet
    alone = truth | {"wells": truth["wells"].assign(density=1.0)}
    one, other = (simulated_effect(t, "GENE1", strongest, image_size=24) for t in (truth, alone))
    assert not np.allclose(one, other)


def test_simulated_effect_control_is_zero_unknown_name_raises():
    truth = simulated_screen(50, **_SCREEN).uns["truth"]
    assert not simulated_effect(truth, "nontargeting", "P1_W1", image_size=24).any()
    with pytest.raises(KeyError, match="There is no gene 'GENE9' in this screen: it has 'GENE1' to 'nontargeting'"):
        simulated_effect(truth, "GENE9", "P1_W1", image_size=24)
    with pytest.raises(KeyError, match="There is no well 'P9'"):
        simulated_effect(truth, "GENE1", "P9", image_size=24)
