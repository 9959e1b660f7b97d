from __future__ import annotations

import numpy as np
import pytest
from small_tables import wells

from scbd.baselines import standardize_by_environment


def test_wells_are_standardised_on_their_controls():
    cells, well, control = wells()
    found = standardize_by_environment(cells, well, controls=control)
    for w in "012":
        here = found[(well == w) & control]
        np.testing.assert_allclose(here.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(here.std(0, ddof=1), 1, atol=1e-5)
        own = cells[(well == w) & control]
        np.testing.assert_allclose(found[well == w], (cells[well == w] - own.mean(0)) / own.std(0, ddof=1), rtol=1e-4)
    centred = standardize_by_environment(cells, well, scale=False)
    np.testing.assert_allclose(
        centred[well == "1"], cells[well == "1"] - cells[well == "1"].mean(0), rtol=1e-4, atol=1e-5
    )


def test_rows_outside_of_fit_are_moved_as_those_in_it():
    cells, well, control = wells()
    seen = np.arange(900) % 2 == 0
    found = standardize_by_environment(cells, well, fit=seen)
    for w in "012":
        own = cells[(well == w) & seen]
        np.testing.assert_allclose(
            found[well == w], (cells[well == w] - own.mean(0)) / own.std(0, ddof=1), rtol=1e-4, atol=1e-5
        )
    np.testing.assert_array_equal(
        standardize_by_environment(cells, well, controls=control, fit=seen),
        standardize_by_environment(cells, well, controls=control & seen),
    )


@pytest.mark.parametrize("unit", [1.0, 1e-9, 1e9])
def test_constant_is_what_varies_by_rounding_whatever_the_unit(unit):
    rng = np.random.default_rng(0)
    cells = np.stack([rng.normal(size=60), np.full(60, 0.1)], axis=1) * unit
    found = standardize_by_environment(cells, np.repeat(["a", "b"], 30))
    np.testing.assert_allclose(found[:30].std(0, ddof=1), [1, 0], atol=1e-6)
    np.testing.assert_allclose(found[:, 1], 0, atol=1e-6 * unit)


@pytest.mark.parametrize("scale", [True, False])
def test_nothing_is_left_of_what_environments_alone_differ_in(scale):
    """A probe scales what it reads: the rounding of 6e-15 told 34 wells apart with an F1 of .24."""
    rng = np.random.default_rng(1)
    well = rng.integers(0, 34, 5000)
    constant = rng.normal(size=34)[well][:, None]
    assert not standardize_by_environment(constant, well, scale=scale).any()
    # of cells that nothing was learned from, a difference is kept
    odd = np.r_[constant, constant[:1] + 1.0]
    moved = standardize_by_environment(odd, np.r_[well, well[:1]], fit=np.arange(5000), scale=scale)
    assert moved[-1] == pytest.approx(1.0) and not moved[:-1].any()


def test_an_environment_without_rows_to_learn_from_is_named():
    cells, well, control = wells(30)
    with pytest.raises(ValueError, match="1 environments have fewer than two controls \\(such as '2'\\)"):
        standardize_by_environment(cells, well, controls=control & (well != "2"))
    with pytest.raises(ValueError, match="1 environments have fewer than two controls in fit \\(such as '2'\\)"):
        standardize_by_environment(cells, well, controls=control, fit=well != "2")
    with pytest.raises(ValueError, match="2 environments have fewer than two rows in fit \\(such as '1'\\)"):
        standardize_by_environment(cells, well, fit=well == "0")
