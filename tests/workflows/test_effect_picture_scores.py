from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_screen

from scbd.datasets import simulated_effect
from scbd.workflows import effect_picture_scores


class Painter:
    """Adds the true effect of a gene to cells, as much of it as told; or one of noise."""

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


def test_who_paints_the_truth_scores_full_marks(screen):
    scores = effect_picture_scores(screen, Painter(screen))
    assert scores["correlation"] > 0.95 and scores["error"] < 0.1
    assert 0 < scores["mean difference: correlation"] < scores["correlation"]


def test_half_of_an_effect_has_its_shape_and_not_its_size(screen):
    scores = effect_picture_scores(screen, Painter(screen, share=0.5))
    assert scores["correlation"] > 0.95 and 0.2 < scores["error"] < 0.35


def test_noise_is_no_effect(screen):
    scores = effect_picture_scores(screen, Painter(screen, share=0.0, noise=0.1))
    assert abs(scores["correlation"]) < 0.1 and scores["error"] > 1


def test_wells_without_the_gene_are_scored_apart(screen):
    apart = screen[
        ~((screen.obs["gene"] != "nontargeting") & (screen.obs["well"] == screen.obs["well"].iloc[0]))
    ].copy()
    scores = effect_picture_scores(apart, Painter(apart))
    assert scores["gene not in the well: correlation"] > 0.95
    assert not any(name.startswith("gene not") for name in effect_picture_scores(screen[:], Painter(screen)))


def test_screens_that_are_real_or_have_no_controls_get_a_sentence(screen):
    real = screen.copy()
    del real.uns["truth"]
    with pytest.raises(KeyError, match="uns has no 'truth'"):
        effect_picture_scores(real, Painter(screen))
    with pytest.raises(KeyError, match="No cell has the gene 'DMSO'"):
        effect_picture_scores(screen, Painter(screen), control="DMSO")
