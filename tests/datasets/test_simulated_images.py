from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd.datasets._simulated_images import CHANNELS, PHENOTYPES, draw, photograph

PLAIN = {f"gain_{channel}": 1.0 for channel in CHANNELS} | {"tilt_x": 0.0, "tilt_y": 0.0, "blur": 0.5}
PLAIN |= {"background": 0.02, "gamma": 1.0, "saturation": 0.0}


def photographed(**changed: float) -> tuple[np.ndarray, np.ndarray]:
    """The same cells, ideal and in a well that differs in this, both of one channel and flat."""
    ideal = draw(np.random.default_rng(0), np.ones((64, len(PHENOTYPES))), 32)
    wells = pd.DataFrame([PLAIN | {"blur": 1e-6} | changed] * 64)
    return ideal[:, 1].ravel(), photograph(np.random.default_rng(1), ideal.copy(), wells, 32)[:, 1].ravel() / 120


def test_a_nucleus_that_is_elongated_is_as_large_as_before():
    """Its two axes change by one factor, each in its own direction."""
    plain = np.ones((64, len(PHENOTYPES)))
    stretched = plain.copy()
    stretched[:, list(PHENOTYPES).index("nucleus_elongation")] = 1.6
    bright, as_bright = (draw(np.random.default_rng(0), cells, 64)[:, 2].mean() for cells in (plain, stretched))
    assert as_bright == pytest.approx(bright, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "formula"),
    [
        ({}, lambda light: light),
        ({"gain_F-actin": 1.5}, lambda light: 1.5 * light),
        ({"gamma": 1.4}, lambda light: light**1.4),
        ({"saturation": 0.5}, lambda light: light / (1 + 0.5 * light)),
    ],
)
def test_a_camera_makes_of_light_what_its_formula_says(changed, formula):
    ideal, image = photographed(background=0.0, **changed)
    seen = ideal > 0.1  # darker ones are cut off at 0
    by_light = pd.DataFrame({"ideal": ideal, "image": image})[seen].groupby(np.round(ideal[seen], 1)).mean()
    np.testing.assert_allclose(by_light["image"], formula(by_light["ideal"]), atol=0.02)
