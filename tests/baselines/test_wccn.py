from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.rivals import within
from small_tables import plates

from scbd.baselines import sphering, wccn


@given(st.integers(0, 100), st.sampled_from([0.1, 3.0]), st.sampled_from([0.0, 1.0, 3.0]), st.booleans())
def test_distances_are_those_of_an_inverse_covariance(seed, regularization, weight, by_controls):
    wells = plates(seed=seed)
    fit = (wells.plates != "plate 0") & (wells.compounds != "3")
    scaled, spread = within(wells, fit, weight if by_controls else 0, by_controls)
    how = {"controls": wells.controls, "positions": wells.positions} if by_controls else {}
    found = wccn(
        wells.features,
        wells.compounds,
        fit=fit,
        position_weight=weight,
        regularization=regularization,
        **how,
    )
    metric = np.linalg.inv(spread + regularization * np.eye(6))
    np.testing.assert_allclose(found @ found.T, scaled @ metric @ scaled.T, rtol=1e-3, atol=1e-3)


def test_replicates_are_white():
    wells = plates(n_plates=40)
    white = wccn(wells.features, wells.compounds, controls=wells.controls, regularization=0)
    for compound in np.unique(wells.compounds):
        white[wells.compounds == compound] -= white[wells.compounds == compound].mean(0)
    np.testing.assert_allclose(white.T @ white / (len(white) - 16), np.eye(6), atol=1e-4)


def test_position_is_what_controls_say_it_is():
    """Controls differ by position, and so would compounds: their directions count less."""
    wells = plates(n_plates=8, n_controls=40)
    how: dict[str, Any] = {"controls": wells.controls, "regularization": 0.1}
    plain = wccn(wells.features, wells.compounds, **how)
    aware = wccn(wells.features, wells.compounds, positions=wells.positions, position_weight=100, **how)

    def by_position(z):
        means = np.stack([z[wells.controls & (wells.positions == p)].mean(0) for p in range(15, 55)])
        return means.var(0).sum() / z[wells.controls].var(0).sum()

    assert by_position(aware) < 0.5 * by_position(plain)


def test_one_label_is_sphering():
    wells = plates()
    found = wccn(wells.features, wells.compounds, fit=wells.controls, controls=wells.controls)
    expected = sphering(wells.features, controls=wells.controls, regularization=3)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fit": np.arange(15)}, "Each of 15 labels has one row to learn from"),
        ({"positions": np.zeros(92)}, "say which rows are controls"),
        ({"positions": np.zeros(92), "controls": np.arange(15, 23)}, "Controls have one position"),
        (
            {"positions": np.zeros(5), "controls": np.arange(15, 23)},
            "positions must have one value for each of 92 rows",
        ),
        ({"position_weight": -1}, "position_weight is how much of the positions' covariance is added"),
        ({"regularization": float("nan")}, "regularization=nan: give"),
    ],
)
def test_what_cannot_be_learned_is_said(given, message):
    wells = plates()
    with pytest.raises(ValueError, match=message):
        wccn(wells.features, wells.compounds, **given)
