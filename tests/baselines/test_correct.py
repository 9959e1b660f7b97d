"""Corrections by name are the functions, told what they learn from and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_tables import wells

from scbd import baselines
from scbd.baselines import CORRECTIONS, correct

CELLS, WELL, CONTROL = wells(400)
LABELS = np.where(CONTROL, "control", np.resize(["a", "b", "c"], len(CONTROL)))
FIT = np.arange(len(CELLS)) // 9 % 3 > 0
KNOWN: dict[str, Any] = {"environments": WELL, "labels": LABELS, "controls": CONTROL, "fit": FIT}

OF_CONTROLS: dict[str, Any] = {"controls": CONTROL, "fit": FIT}
BY_HAND: dict[str, Callable[[], np.ndarray]] = {
    "centred": lambda: baselines.standardize_by_environment(CELLS, WELL, scale=False, **OF_CONTROLS),
    "standardised": lambda: baselines.standardize_by_environment(CELLS, WELL, fit=FIT),
    "standardised on controls": lambda: baselines.standardize_by_environment(CELLS, WELL, **OF_CONTROLS),
    "ComBat": lambda: baselines.combat(CELLS, WELL),
    "Harmony": lambda: baselines.harmony(CELLS, WELL),
    "sphering": lambda: baselines.sphering(CELLS, **OF_CONTROLS),
    "TVN": lambda: baselines.tvn(CELLS, WELL, **OF_CONTROLS),
    "WCCN": lambda: baselines.wccn(CELLS, LABELS, **OF_CONTROLS),
    "LDA": lambda: baselines.lda(CELLS, LABELS, **OF_CONTROLS),
    "PLDA": lambda: baselines.plda(CELLS, LABELS, **OF_CONTROLS),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_name_is_its_function(name):
    if name == "Harmony":
        pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    np.testing.assert_array_equal(correct(CELLS, name, **KNOWN), BY_HAND[name]())


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name not in ("ComBat", "Harmony")])
def test_what_is_not_learned_from_changes_nothing(name):
    other = CELLS.copy()
    other[~FIT] = 100 + 10 * np.random.default_rng(0).normal(size=other[~FIT].shape)
    one, two = (correct(features, name, **KNOWN)[FIT] for features in (CELLS, other))
    np.testing.assert_array_equal(one, two)


def test_settings_are_the_function_s():
    assert correct(CELLS, "LDA", **KNOWN, n_components=2).shape == (len(CELLS), 2)
    positions = np.resize(["A01", "A02"], len(CELLS))
    told = correct(CELLS, "WCCN", **KNOWN, positions=positions)
    np.testing.assert_array_equal(told, baselines.wccn(CELLS, LABELS, positions=positions, **OF_CONTROLS))


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("Combat", KNOWN, "There is no correction 'Combat': use one of centred, standardised, .*ComBat"),
        ("TVN", {"environments": WELL}, r"TVN learns from controls, and none are given: say which .* \(controls=...\)"),
        ("LDA", {"environments": WELL}, r"LDA learns from labels, .* the perturbation of each cell \(labels=...\)"),
        ("ComBat", {"controls": CONTROL}, "ComBat learns from environments"),
    ],
)
def test_what_is_missing_is_said(name, known, message):
    with pytest.raises(ValueError, match=message):
        correct(CELLS, name, **known)
