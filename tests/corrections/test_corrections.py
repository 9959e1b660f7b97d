from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import scanpy
import torch
from anndata import AnnData
from helpers.small_tables import Plates, plates, wells
from hypothesis import given
from hypothesis import strategies as st
from reference.rivals import means_of, retrieval, same, within
from scipy.linalg import eigh, sqrtm
from scipy.sparse import csr_matrix
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from scbd import corrections
from scbd._shared.linear_maps import LinearMap, random_rotation
from scbd.corrections import combat, correct, harmony, lda, plda, sphering, standardize_by_environment, tvn, wccn
from scbd.corrections._correct import CORRECTIONS
from scbd.datasets import cpjump1
from scbd.nn import InputTransform

WELLS = plates()
SEEN = (WELLS.compounds != "3") & ((WELLS.plates != "plate 3") | (WELLS.controls & (WELLS.positions < 20)))


def make_corrections_with_fit(wells: Plates) -> dict[str, Any]:
    """Make the corrections that accept ``fit``, by name."""
    by_label: dict[str, Any] = {"labels": wells.compounds, "controls": wells.controls, "positions": wells.positions}
    return {
        "standardize": partial(corrections.standardize_by_environment, environments=wells.plates),
        "standardize, controls": partial(
            corrections.standardize_by_environment, environments=wells.plates, controls=wells.controls
        ),
        "sphering": partial(corrections.sphering, controls=wells.controls),
        "tvn": partial(corrections.tvn, environments=wells.plates, controls=wells.controls),
        "wccn": partial(corrections.wccn, labels=wells.compounds),
        "wccn, positions": partial(corrections.wccn, **by_label),
        "lda": partial(corrections.lda, **by_label),
        "plda": partial(corrections.plda, **by_label),
    }


OF_FIT = make_corrections_with_fit(WELLS)
ALL = OF_FIT | {"combat": partial(corrections.combat, environments=WELLS.plates)}


@pytest.mark.parametrize("name", ALL)
def test_corrections_any_table_type_returns_float32_table(name):
    features = WELLS.features.copy()
    found = ALL[name](features)
    assert found.dtype == np.float32 and len(found) == len(features) and found.ndim == 2
    np.testing.assert_array_equal(features, WELLS.features)
    np.testing.assert_array_equal(ALL[name](features), found)
    table = pd.DataFrame(features, columns=list("abcdef"))
    np.testing.assert_array_equal(ALL[name](table), found)
    single = ALL[name](features.astype(np.float32))
    np.testing.assert_allclose(np.abs(single), np.abs(found), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", OF_FIT)
def test_corrections_rows_outside_fit_change_nothing(name):
    learned = OF_FIT[name](WELLS.features, fit=SEEN)
    np.testing.assert_array_equal(OF_FIT[name](WELLS.features, fit=np.flatnonzero(SEEN)), learned)
    assert not np.array_equal(OF_FIT[name](WELLS.features), learned)
    others = WELLS._replace(
        features=np.where(SEEN[:, None], WELLS.features, -3.0),
        compounds=np.where(SEEN, WELLS.compounds.astype(object), None),  # type: ignore[call-overload]
    )
    np.testing.assert_array_equal(
        make_corrections_with_fit(others)[name](others.features, fit=SEEN)[SEEN], learned[SEEN]
    )


OFFSETS: dict[Any, list[int]] = {np.float64: [0, 4, 7, 9, 11, 13, 15], np.float32: [0, 3, 5, 7, 9]}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "power"), [(dtype, power) for dtype, powers in OFFSETS.items() for power in powers])
def test_corrections_offset_changes_nothing_or_is_logged(name, dtype, power, caplog):
    """Features that vary by 1 around 2,000,000 were once dropped silently, or half of their values were."""
    caplog.set_level(logging.INFO, logger="scbd")
    far = (WELLS.features / WELLS.features[WELLS.controls].std(0)).astype(dtype)
    offset = dtype(10.0**power)
    far[:, 2] += offset
    near = far.astype(np.float64)
    near[:, 2] -= offset  # the rounding error of storing the offset is not tested
    found = ALL[name](pd.DataFrame(far, columns=list("abcdef"))).astype(np.float64)
    named = "1 of 6 features that are constant among" in caplog.text and "(c)" in caplog.text
    assert named == bool(caplog.text) == (power > (6 if dtype == np.float32 else 12))
    expected = ALL[name](np.where(np.arange(6) == 2, 0, near) if named else near).astype(np.float64)
    rounding = 1e-5 + 50 * np.finfo(np.float64).eps * float(offset)
    if name == "combat":  # combat adds the offset back and rounds to float32
        found, expected = found - found.mean(0), expected - expected.mean(0)
        rounding += np.finfo(np.float32).eps * float(offset)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=rounding * np.square(expected).sum(1).max())


def test_standardize_by_environment_offset_keeps_distinct_values():
    """Values near the mean once became 0, while others kept their value."""
    far = (WELLS.features[:, :1] / WELLS.features[:, 0].std()).astype(np.float32) + np.float32(1.5e6)
    column = standardize_by_environment(far, ["one plate"] * len(far))[:, 0]
    assert len(np.unique(column)) == len(np.unique(far))


def make_invalid_features(**values: float) -> pd.DataFrame:
    table = pd.DataFrame(WELLS.features.copy(), columns=[f"feature {i}" for i in range(6)])
    for row, (column, value) in enumerate(values.items()):
        table.loc[[row, row + 10], f"feature {column[-1]}"] = value
    return table


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            make_invalid_features(f2=np.nan, f4=np.inf),
            "in 4 of 92 rows \\(rows 0, 1, 10, 11\\) and 2 of 6 features \\(feature 2, feature 4\\): drop these",
        ),
        (WELLS.features[:, 0], "features must be a table \\(N, D\\) with rows and columns, got shape \\(92,\\)"),
        (WELLS.features[:, :0], "got shape \\(92, 0\\)"),
        (WELLS.features.astype(str), "features are of type <U32, not numbers: drop columns of names"),
        (pd.DataFrame({"name": WELLS.compounds, "size": 1.0}), "features are of type object, not numbers"),
        (csr_matrix(WELLS.features), "features are a sparse matrix: give them dense, as features.toarray\\(\\)"),
        (WELLS.features[:50], "92|50"),
    ],
    ids=["NaN", "1-D", "no column", "strings", "names", "sparse", "rows"],
)
def test_corrections_invalid_features_raise(name, features, message):
    with pytest.raises(ValueError, match=message):
        ALL[name](features)


@pytest.mark.parametrize("name", OF_FIT)
@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ([], "fit selects no row of 92"),
        (np.zeros(92, dtype=bool), "fit selects no row of 92"),
        (np.ones(5, dtype=bool), "fit is bool of shape \\(5,\\): give a mask of the 92 rows"),
        ([0, 92], "fit has the row numbers 0 to 92: there are 92 rows, counted from 0"),
        ([-1, 3], "fit has the row numbers -1 to 3: there are 92 rows"),
        (np.zeros(92, dtype=int), "fit names a row twice: give each row number once, or a mask of type bool"),
        (["a"], "fit is str.* of shape \\(1,\\): give a mask of the 92 rows, or row numbers"),
        ([0], "(There are|fewer than two)"),
    ],
)
def test_corrections_invalid_fit_raises(name, fit, message):
    with pytest.raises(ValueError, match=message):
        OF_FIT[name](WELLS.features, fit=fit)


GIVEN: dict[str, Any] = {
    "features": WELLS.features,
    "environments": WELLS.plates,
    "labels": WELLS.compounds,
    "controls": WELLS.controls,
    "positions": WELLS.positions,
    "fit": SEEN,
}
TAKEN = {name: set(signature(getattr(corrections, name)).parameters) for name in corrections.__all__}


@pytest.mark.parametrize(
    ("name", "masked"),
    [(name, each) for name, taken in TAKEN.items() if "features" in taken for each in GIVEN if each in taken],
)
def test_corrections_masked_array_raises(name, masked, monkeypatch):
    monkeypatch.setitem(sys.modules, "harmonypy", SimpleNamespace())
    given = GIVEN | {masked: np.ma.masked_array(GIVEN[masked], mask=np.zeros(GIVEN[masked].shape, dtype=bool))}
    given = {each: values for each, values in given.items() if each in TAKEN[name]}
    how = {"correction": "TVN" if masked == "environments" else "WCCN"} if name == "correct" else {}
    with pytest.raises(TypeError, match=f"{masked} is a masked array, and .* drop the rows of hidden values, or fill"):
        getattr(corrections, name)(**given, **how)


def test_sphering_too_few_controls_raises():
    with pytest.raises(ValueError, match="There are 1 of 92 rows to learn from \\(controls\\): at least two"):
        corrections.sphering(WELLS.features, controls=[3])
    with pytest.raises(ValueError, match="There are 0 of 92 rows to learn from \\(controls in fit\\)"):
        corrections.sphering(WELLS.features, controls=WELLS.controls, fit=~WELLS.controls)


def test_corrections_missing_labels_raise():
    labels = WELLS.compounds.astype(object)
    labels[[2, 5]] = None
    with pytest.raises(ValueError, match="labels has no value for 2 rows \\(2, 5\\): leave them out, or out of fit"):
        corrections.wccn(WELLS.features, labels)
    assert corrections.wccn(WELLS.features, labels, fit=np.arange(6, 92)).shape == (92, 6)
    places: Any = ["A1", np.nan] * 46
    with pytest.raises(ValueError, match="environments has no value for 46 rows \\(1, 3, 5, 7, 9, …\\)"):
        corrections.standardize_by_environment(WELLS.features, places)


def test_sphering_integers_and_objects_are_equal_to_floats():
    counts = np.random.default_rng(0).integers(0, 50, (92, 3))
    found = corrections.sphering(counts, controls=WELLS.controls)
    np.testing.assert_array_equal(found, corrections.sphering(counts.astype(float), controls=WELLS.controls))
    boxed = pd.DataFrame(counts).astype(object)
    np.testing.assert_array_equal(found, corrections.sphering(boxed, controls=WELLS.controls))


def test_standardize_by_environment_controls_are_standardised():
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


def test_standardize_by_environment_fit_transforms_all_rows():
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
def test_standardize_by_environment_constant_feature_returns_zero(unit):
    rng = np.random.default_rng(0)
    cells = np.stack([rng.normal(size=60), np.full(60, 0.1)], axis=1) * unit
    found = standardize_by_environment(cells, np.repeat(["a", "b"], 30))
    np.testing.assert_allclose(found[:30].std(0, ddof=1), [1, 0], atol=1e-6)
    np.testing.assert_allclose(found[:, 1], 0, atol=1e-6 * unit)


@pytest.mark.parametrize("scale", [True, False])
def test_standardize_by_environment_offsets_alone_return_zero(scale):
    """A probe rescales its input, and rounding errors of 6e-15 distinguished 34 wells with an F1 of 0.24."""
    rng = np.random.default_rng(1)
    well = rng.integers(0, 34, 5000)
    constant = rng.normal(size=34)[well][:, None]
    assert not standardize_by_environment(constant, well, scale=scale).any()
    # differences of cells outside of fit are kept
    odd = np.r_[constant, constant[:1] + 1.0]
    moved = standardize_by_environment(odd, np.r_[well, well[:1]], fit=np.arange(5000), scale=scale)
    assert moved[-1] == pytest.approx(1.0) and not moved[:-1].any()


def test_standardize_by_environment_too_few_rows_raises():
    cells, well, control = wells(30)
    with pytest.raises(ValueError, match="1 environment has fewer than two controls \\(such as '2'\\)"):
        standardize_by_environment(cells, well, controls=control & (well != "2"))
    with pytest.raises(ValueError, match="1 environment has fewer than two controls in fit \\(such as '2'\\)"):
        standardize_by_environment(cells, well, controls=control, fit=well != "2")
    with pytest.raises(ValueError, match="2 environments have fewer than two rows in fit \\(such as '1'\\)"):
        standardize_by_environment(cells, well, fit=well == "0")


@given(st.integers(0, 100), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
def test_sphering_distances_are_equal_to_inverse_covariance(seed, regularization, held_out):
    wells = plates(seed=seed)
    fit = wells.plates != "plate 0" if held_out else np.ones(len(wells.plates), dtype=bool)
    reference = wells.features[wells.controls & fit]
    scaled = (wells.features - reference.mean(0)) / reference.std(0, ddof=1)
    metric = np.linalg.inv(np.corrcoef(reference.T) + regularization * np.eye(6))
    found = sphering(wells.features, controls=wells.controls, fit=fit, regularization=regularization)
    np.testing.assert_allclose(found @ found.T, scaled @ metric @ scaled.T, rtol=1e-3, atol=1e-3)


def test_sphering_controls_are_white_and_centred():
    wells = plates(n_plates=40)
    white = sphering(wells.features, controls=wells.controls, regularization=0)[wells.controls]
    np.testing.assert_allclose(np.cov(white.T), np.eye(6), atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-5)
    part = sphering(wells.features, controls=wells.controls, regularization=1)[wells.controls]
    assert (np.diff(part.var(0)) < 0).all()  # the order of variances is kept


def test_sphering_feature_constant_in_controls_returns_zero():
    wells = plates()
    flat = np.concatenate([wells.features, np.where(wells.controls, 0.3, 5)[:, None]], axis=1)
    found = sphering(flat, controls=wells.controls, regularization=0)
    np.testing.assert_allclose(found[:, :6], sphering(wells.features, controls=wells.controls, regularization=0))
    assert (found[:, 6] == 0).all()
    with pytest.raises(ValueError, match="all features are constant in the rows of the fit"):
        sphering(flat[:, 6:], controls=wells.controls)


def test_sphering_few_controls_without_regularization_raises():
    wells = plates(d=40)
    with pytest.raises(ValueError, match="regularization=0: the covariance has no inverse, as rows are fewer"):
        sphering(wells.features, controls=wells.controls, regularization=0)
    with pytest.raises(ValueError, match="regularization=-1: give"):
        sphering(wells.features, controls=wells.controls, regularization=-1)
    assert np.isfinite(sphering(wells.features, controls=wells.controls, regularization=1e-3)).all()


def test_tvn_controls_are_white_in_each_environment():
    cells, well, control = wells(30_000)
    found = tvn(cells, well, controls=control, regularization=1e-6)
    np.testing.assert_allclose(np.cov(found[control].T), np.eye(4), atol=0.02)
    for w in "012":
        here = found[(well == w) & control]
        np.testing.assert_allclose(here.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(np.cov(here.T), np.eye(4), atol=0.03)
    # perturbed cells differ from controls by the same shift in every well
    shifts = np.stack([np.linalg.norm(found[(well == w) & ~control].mean(0)) for w in "012"])
    assert shifts.min() > 1 and np.ptp(shifts) / shifts.mean() < 0.1
    # all controls together stay white, however strongly single wells are regularised
    for regularization in (0.5, 100):
        found = tvn(cells, well, controls=control, regularization=regularization)
        np.testing.assert_allclose(np.cov(found[control].T), np.eye(4), atol=0.02)


def naive_tvn(cells: np.ndarray, well: np.ndarray, control: np.ndarray, regularization: float) -> np.ndarray:
    """Apply TVN in the space where controls are white, up to a rotation."""
    identity = np.eye(cells.shape[1])
    centred = cells.astype(float)
    for w in set(well):
        centred[well == w] -= centred[(well == w) & control].mean(0)
    free = control.sum() - len(set(well))
    centred /= np.sqrt((centred[control] ** 2).sum(0) / free)
    share = len(identity) / (len(identity) + free)
    pooled = (1 - share) * centred[control].T @ centred[control] / free + share * identity
    root = np.linalg.inv(sqrtm(pooled))
    expected, total = np.empty_like(centred), np.zeros_like(identity)
    for w in set(well):
        own = centred[(well == w) & control]
        spread = root @ ((1 - share) * np.cov(own.T) + share * identity) @ root
        aligned = np.linalg.inv(sqrtm(spread + regularization * identity))
        expected[well == w] = centred[well == w] @ root @ aligned
        total += (len(own) - 1) / free * aligned @ spread @ aligned
    return expected @ np.linalg.inv(sqrtm(total))


@given(st.integers(0, 100), st.sampled_from([0.01, 0.5, 10.0]), st.sampled_from([90, 300]))
def test_tvn_random_cells_are_equal_to_naive(seed, regularization, n):
    cells, well, control = wells(n, seed=seed)
    found, expected = (
        tvn(cells, well, controls=control, regularization=regularization),
        naive_tvn(cells, well, control, regularization),
    )
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


def test_tvn_units_of_features_change_nothing():
    cells, well, control = wells()
    found = tvn(cells, well, controls=control)
    other = tvn(cells * [1e4, 1e-3, 1, 1e-9], well, controls=control)
    assert other.shape == found.shape
    np.testing.assert_allclose(other @ other.T, found @ found.T, rtol=1e-3, atol=1e-3)


def test_tvn_few_controls_variance_is_bounded():
    """With as many controls as features, directions without control variance were scaled to a variance of 3,000."""
    rng = np.random.default_rng(0)
    cells, control = rng.normal(size=(1_000, 24)), np.arange(1_000) < 24
    found = tvn(cells, ["plate"] * 1_000, controls=control)
    assert 0.5 < found[~control].var() < 3
    two = tvn(cells, ["plate"] * 1_000, controls=[0, 1])
    assert np.isfinite(two).all()


def test_tvn_features_constant_in_controls_are_excluded_and_logged(caplog):
    cells, well, control = wells()
    flat = np.concatenate([cells, np.where(control, 0.3, cells[:, 0])[:, None]], axis=1)
    with caplog.at_level(logging.INFO, logger="scbd"):
        found = tvn(flat, well, controls=control)
    assert "Left out 1 of 5 features that are constant among controls" in caplog.text
    np.testing.assert_allclose(found, tvn(cells, well, controls=control), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="No feature varies among the controls"):
        tvn(np.ones((30, 2)), well[:30], controls=control[:30])


def test_tvn_fit_needs_controls_of_each_environment():
    cells, well, control = wells()
    seen = (well != "2") | control
    changed = np.where(seen[:, None], cells, 7.0)
    np.testing.assert_array_equal(
        tvn(changed, well, controls=control, fit=seen)[seen], tvn(cells, well, controls=control, fit=seen)[seen]
    )
    with pytest.raises(ValueError, match="1 environment has fewer than two controls in fit \\(such as '2'\\)"):
        tvn(cells, well, controls=control, fit=well != "2")
    with pytest.raises(ValueError, match="regularization=0"):
        tvn(cells, well, controls=control, regularization=0)


@given(st.integers(0, 100), st.sampled_from([0.1, 3.0]), st.sampled_from([0.0, 1.0, 3.0]), st.booleans())
def test_wccn_distances_are_equal_to_inverse_covariance(seed, regularization, weight, by_controls):
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


def test_wccn_replicates_are_white():
    wells = plates(n_plates=40)
    white = wccn(wells.features, wells.compounds, controls=wells.controls, regularization=0)
    for compound in np.unique(wells.compounds):
        white[wells.compounds == compound] -= white[wells.compounds == compound].mean(0)
    np.testing.assert_allclose(white.T @ white / (len(white) - 16), np.eye(6), atol=1e-4)


def test_wccn_positions_reduce_the_position_effect():
    """Directions in which controls differ by position are down-weighted, since compounds would differ there, too."""
    wells = plates(n_plates=8, n_controls=40)
    how: dict[str, Any] = {"controls": wells.controls, "regularization": 0.1}
    plain = wccn(wells.features, wells.compounds, **how)
    aware = wccn(wells.features, wells.compounds, positions=wells.positions, position_weight=100, **how)

    def compute_position_share(z):
        means = np.stack([z[wells.controls & (wells.positions == p)].mean(0) for p in range(15, 55)])
        return means.var(0).sum() / z[wells.controls].var(0).sum()

    assert compute_position_share(aware) < 0.5 * compute_position_share(plain)


def test_wccn_one_label_is_equal_to_sphering():
    wells = plates()
    found = wccn(wells.features, wells.compounds, fit=wells.controls, controls=wells.controls)
    expected = sphering(wells.features, controls=wells.controls, regularization=3)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fit": np.arange(15)}, "Each of 15 labels has one row to learn from"),
        ({"positions": np.zeros(92)}, "positions need controls"),
        ({"positions": np.zeros(92), "controls": np.arange(15, 23)}, "All controls have the same position"),
        (
            {"positions": np.zeros(5), "controls": np.arange(15, 23)},
            "positions must have one value for each of 92 rows",
        ),
        ({"position_weight": -1}, "position_weight=-1: give a number, 0 or larger"),
        ({"regularization": float("nan")}, "regularization=nan: give"),
    ],
)
def test_wccn_invalid_arguments_raise(given, message):
    wells = plates()
    with pytest.raises(ValueError, match=message):
        wccn(wells.features, wells.compounds, **given)


def test_lda_discriminants_are_equal_to_scikit_learn():
    wells = plates(n_controls=1)  # equally many rows per label
    features = wells.features / wells.features.std(0)
    n, n_labels = len(wells.features), len(set(wells.compounds))
    theirs = LinearDiscriminantAnalysis(solver="eigen", n_components=3).fit(features, wells.compounds)
    expected = theirs.transform(features) * np.sqrt((n - n_labels) / n)  # scikit-learn uses the biased covariance
    found = lda(wells.features, wells.compounds, n_components=3, regularization=0)
    expected -= expected.mean(0)
    np.testing.assert_allclose(found * np.sign((found * expected).sum(0)), expected, rtol=1e-3, atol=1e-4)


@given(st.integers(0, 100), st.sampled_from([0.1, 1.0]), st.sampled_from([0.0, 2.0]))
def test_lda_is_equal_to_generalised_eigenproblem(seed, regularization, weight):
    wells = plates(seed=seed)
    fit = (wells.plates != "plate 0") & (wells.compounds != "3")
    scaled, spread = within(wells, fit, weight, by_controls=True)
    between = np.cov(means_of(scaled, wells, fit).T)
    _, axes = eigh(between, spread + regularization * np.eye(6))
    expected = scaled @ axes[:, ::-1][:, :3]
    how = {"controls": wells.controls, "positions": wells.positions, "position_weight": weight}
    found = lda(wells.features, wells.compounds, n_components=3, fit=fit, regularization=regularization, **how)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


@given(st.integers(0, 100), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 2.0]))
def test_plda_is_equal_to_naive(seed, shrinkage, weight):
    wells = plates(seed=seed)
    fit = (wells.plates != "plate 0") & (wells.compounds != "3")
    scaled, spread = within(wells, fit, weight, by_controls=True)
    root = np.linalg.inv(sqrtm(spread + np.eye(6)))
    between = root @ np.cov(means_of(scaled, wells, fit).T) @ root
    between = (1 - shrinkage) * between + shrinkage * np.trace(between) / 6 * np.eye(6)
    of_label = np.unique(wells.compounds[fit], return_counts=True)[1]
    gains = between @ np.linalg.inv(
        between + np.eye(6) / np.median(of_label)
    )  # profiles are means of the median number of rows per label
    expected = scaled @ root @ gains
    how = {"controls": wells.controls, "positions": wells.positions, "position_weight": weight}
    found = plda(wells.features, wells.compounds, fit=fit, shrinkage=shrinkage, **how)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


def test_lda_and_plda_three_labels_return_expected_shapes():
    wells = plates(n_compounds=2)
    assert lda(wells.features, wells.compounds).shape == (40, 2)  # three labels: two compounds and the controls
    assert plda(wells.features, wells.compounds).shape == (40, 6)
    whole = lda(wells.features, wells.compounds, n_components=2)
    np.testing.assert_allclose(lda(wells.features, wells.compounds, n_components=1), whole[:, :1], rtol=1e-5)


def test_lda_all_components_is_equal_to_wccn():
    wells = plates()
    white = wccn(wells.features, wells.compounds, regularization=1)
    found = lda(wells.features, wells.compounds, n_components=6)
    np.testing.assert_allclose(found @ found.T, white @ white.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rival", [lda, plda])
def test_lda_and_plda_one_label_raises(rival):
    wells = plates()
    with pytest.raises(ValueError, match="There is one label to learn from"):
        rival(wells.features, wells.compounds, fit=wells.controls)


@pytest.mark.parametrize(
    ("name", "correction"), [("within", wccn), ("lda", lda), ("plda", plda), ("controls", sphering)]
)
def test_input_transform_and_correction_give_the_same_map(monkeypatch, name, correction):
    # maps are compared in float64; corrections return float32
    monkeypatch.setattr(LinearMap, "__call__", lambda self, features: features @ self.matrix + self.offset)
    wells = plates()
    features = wells.features / wells.features[wells.controls].std(0, ddof=1)  # the scale that corrections use
    transform = InputTransform(6, name, regularization=0.5, position_weight=0.7).double()
    transform.fit(features, wells.compounds, wells.controls, wells.positions)
    mapped = transform(torch.from_numpy(features)).numpy()
    if name == "plda":  # undo the random rotation of the axes, which the correction does not apply
        mapped = mapped @ random_rotation(6).T
    how: dict[str, Any] = {"controls": wells.controls, "regularization": 0.5}
    if name != "controls":
        how |= {"labels": wells.compounds, "positions": wells.positions, "position_weight": 0.7}
    np.testing.assert_allclose(correction(features, **how), mapped, rtol=1e-12, atol=1e-12 * np.abs(mapped).max())


def test_lda_and_plda_settings_out_of_range_raise():
    wells = plates()
    with pytest.raises(ValueError, match="n_components=0: give"):
        lda(wells.features, wells.compounds, n_components=0)
    with pytest.raises(ValueError, match="shrinkage=2: give a number from 0 to 1"):
        plda(wells.features, wells.compounds, shrinkage=2)


def test_combat_is_equal_to_scanpy():
    cells, well, _ = wells(d=6)
    table = AnnData(cells, obs=pd.DataFrame({"well": pd.Categorical(well)}, index=np.arange(900).astype(str)))
    np.testing.assert_allclose(combat(cells, well), scanpy.pp.combat(table, "well", inplace=False), rtol=1e-5)
    means = np.stack([combat(cells, well)[well == w].mean(0) for w in "012"])
    assert np.ptp(means, axis=0).max() < 0.02 * np.ptp([cells[well == w].mean(0) for w in "012"], axis=0).max()


def test_combat_features_constant_within_wells_change_no_others():
    cells, well, _ = wells(d=6)
    flat = np.concatenate([cells, np.ones((900, 1)), (well == "1")[:, None]], axis=1)
    found = combat(flat, well)
    np.testing.assert_array_equal(found[:, :6], combat(cells, well))
    np.testing.assert_allclose(found[:, 6:], [[1, 1 / 3]] * 900, rtol=1e-6)
    partly = np.concatenate([cells, np.where(well == "1", 0.0, cells[:, 0])[:, None]], axis=1)
    assert np.isfinite(combat(partly, well)).all()


def test_combat_invalid_input_raises():
    cells, well, _ = wells(30)
    with pytest.raises(ValueError, match="There is only one environment \\(plate 1\\)"):
        combat(cells, ["plate 1"] * 30)
    with pytest.raises(ValueError, match="1 environment has fewer than two rows \\(such as 'alone'\\)"):
        combat(cells, np.where(np.arange(30) == 3, "alone", well.astype(object)))
    with pytest.raises(ValueError, match="1 features vary within environments: ComBat learns from one feature about"):
        combat(cells[:, :1], well)


def test_harmony_not_installed_raises(monkeypatch):
    cells, well, _ = wells()
    monkeypatch.setitem(sys.modules, "harmonypy", None)
    with pytest.raises(ImportError, match="Harmony needs one more package: pip install harmonypy"):
        harmony(cells, well)


def make_identity_harmonypy(asked, turned):
    def run_harmony(values, obs, key, **how):
        asked.append((values, obs[key].to_numpy(), how))
        return SimpleNamespace(Z_corr=values.T if turned else values)

    return SimpleNamespace(run_harmony=run_harmony)


@pytest.mark.parametrize("turned", [False, True])  # harmonypy before version 2 returns the transpose
def test_harmony_receives_principal_components_or_features(monkeypatch, turned):
    cells, well, _ = wells()
    asked: list = []
    monkeypatch.setitem(sys.modules, "harmonypy", make_identity_harmonypy(asked, turned))
    found = harmony(cells * [1, 1e3, 1e-3, 1], well, n_components=3, seed=7)
    scaled = (cells - cells.mean(0)) / cells.std(0, ddof=1)
    _, _, axes = np.linalg.svd(scaled, full_matrices=False)
    np.testing.assert_allclose(found @ found.T, (expected := scaled @ axes[:3].T) @ expected.T, rtol=1e-3, atol=1e-4)
    assert found.dtype == np.float32 and (np.diff(found.var(0)) < 0).all()
    values, environments, how = asked[0]
    assert values.dtype == np.float64 and how == {"random_state": 7, "verbose": False}
    assert len(set(environments)) == 3 and len(set(zip(environments, well, strict=True))) == 3
    assert harmony(cells, well).shape == cells.shape
    np.testing.assert_allclose(harmony(cells, well, n_components=None), cells.astype(np.float32))
    with pytest.raises(ValueError, match="Harmony needs more rows than columns, got \\(4, 4\\): give n_components"):
        harmony(cells[[0, 1, 3, 4]], well[[0, 1, 3, 4]], n_components=None)
    assert harmony(cells[[0, 1, 3, 4]], well[[0, 1, 3, 4]]).shape == (4, 3)
    with pytest.raises(ValueError, match="There is only one environment"):
        harmony(cells, well.astype(int) * 0)
    with pytest.raises(ValueError, match="n_components=0: give"):
        harmony(cells, well, n_components=0)


def test_harmony_reduces_plate_shift_within_kinds():
    pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    rng = np.random.default_rng(0)
    kind, plate = rng.integers(0, 3, 600), rng.integers(0, 2, 600)
    cells = 4 * rng.normal(size=(3, 5))[kind] + rng.normal(size=(600, 5)) + rng.normal(size=(2, 5))[plate]

    def compute_plate_shift(z):
        gaps = [z[(kind == k) & (plate == 1)].mean(0) - z[(kind == k) & (plate == 0)].mean(0) for k in range(3)]
        return np.linalg.norm(np.mean(gaps, axis=0))

    found = harmony(cells, plate, n_components=None)
    assert compute_plate_shift(found) < 0.4 * compute_plate_shift(cells)
    np.testing.assert_array_equal(harmony(cells, plate, n_components=None), found)


CELLS, WELL, CONTROL = wells(400)
LABELS = np.where(CONTROL, "control", np.resize(["a", "b", "c"], len(CONTROL)))
FIT = np.arange(len(CELLS)) // 9 % 3 > 0
KNOWN: dict[str, Any] = {"environments": WELL, "labels": LABELS, "controls": CONTROL, "fit": FIT}

OF_CONTROLS: dict[str, Any] = {"controls": CONTROL, "fit": FIT}
BY_HAND: dict[str, Callable[[], np.ndarray]] = {
    "centred": lambda: corrections.standardize_by_environment(CELLS, WELL, scale=False, **OF_CONTROLS),
    "standardised": lambda: corrections.standardize_by_environment(CELLS, WELL, fit=FIT),
    "standardised on controls": lambda: corrections.standardize_by_environment(CELLS, WELL, **OF_CONTROLS),
    "ComBat": lambda: corrections.combat(CELLS, WELL),
    "Harmony": lambda: corrections.harmony(CELLS, WELL),
    "sphering": lambda: corrections.sphering(CELLS, **OF_CONTROLS),
    "TVN": lambda: corrections.tvn(CELLS, WELL, **OF_CONTROLS),
    "WCCN": lambda: corrections.wccn(CELLS, LABELS, **OF_CONTROLS),
    "LDA": lambda: corrections.lda(CELLS, LABELS, **OF_CONTROLS),
    "PLDA": lambda: corrections.plda(CELLS, LABELS, **OF_CONTROLS),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correct_each_name_is_equal_to_its_function(name):
    if name == "Harmony":
        pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    np.testing.assert_array_equal(correct(CELLS, name, **KNOWN), BY_HAND[name]())


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name not in ("ComBat", "Harmony")])
def test_correct_rows_outside_fit_change_nothing(name):
    other = CELLS.copy()
    other[~FIT] = 100 + 10 * np.random.default_rng(0).normal(size=other[~FIT].shape)
    one, two = (correct(features, name, **KNOWN)[FIT] for features in (CELLS, other))
    np.testing.assert_array_equal(one, two)


def test_correct_settings_are_passed_to_function():
    assert correct(CELLS, "LDA", **KNOWN, n_components=2).shape == (len(CELLS), 2)
    positions = np.resize(["A01", "A02"], len(CELLS))
    told = correct(CELLS, "WCCN", **KNOWN, positions=positions)
    np.testing.assert_array_equal(told, corrections.wccn(CELLS, LABELS, positions=positions, **OF_CONTROLS))


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("Combat", KNOWN, "correction='Combat' is not known: use 'centred', 'standardised', .*'ComBat'"),
        ("TVN", {"environments": WELL}, r"TVN learns from controls, and none are given: say which .* \(controls=...\)"),
        ("LDA", {"environments": WELL}, r"LDA learns from labels, .* the perturbation of each cell \(labels=...\)"),
        ("ComBat", {"controls": CONTROL}, "ComBat learns from environments"),
    ],
)
def test_correct_unknown_name_or_missing_argument_raises(name, known, message):
    with pytest.raises(ValueError, match=message):
        correct(CELLS, name, **known)


class Wells(NamedTuple):
    features: np.ndarray
    compounds: np.ndarray
    plates: np.ndarray
    positions: np.ndarray


@pytest.fixture
def real_wells(shared: Path) -> Wells:
    pytest.importorskip("pyarrow", reason="reading the real profiles needs pyarrow")
    table = cpjump1(shared / "profiles" / "cpjump1_cellprofiler_wells.parquet")
    columns = ("Metadata_broad_sample", "Metadata_Plate", "Metadata_Well")
    return Wells(table.X.clip(-20, 20), *(table.obs[column].astype(str).to_numpy() for column in columns))


def test_corrections_real_wells_retrieval_is_equal_to_known(real_wells):
    """The expected scores were supplied with the data."""
    controls, other = real_wells.compounds == "DMSO", ~same(real_wells.plates)
    positive, negative = same(real_wells.compounds) & other & ~controls, other & ~controls[:, None] & controls
    corrected = {
        0.5579: real_wells.features,
        0.5509: standardize_by_environment(real_wells.features, real_wells.plates, controls=controls),
        0.5213: standardize_by_environment(real_wells.features, real_wells.plates),
        0.6151: sphering(real_wells.features, controls=controls, regularization=1),
    }
    scores = [retrieval(z, positive, negative, real_wells.compounds) for z in corrected.values()]
    np.testing.assert_allclose(scores[:3], list(corrected)[:3], atol=5e-5)
    np.testing.assert_allclose(scores[3], 0.6151, atol=1e-3)  # the scaling used for this score is not documented


def test_wccn_and_plda_real_wells_improve_held_out_retrieval(real_wells):
    """As in a pilot, WCCN and PLDA retrieve compounds, and also positions unless these are estimated from controls."""
    controls, other = real_wells.compounds == "DMSO", ~same(real_wells.plates)
    places = {
        compound: set(real_wells.positions[real_wells.compounds == compound]) for compound in set(real_wells.compounds)
    }
    twice = np.array([len(places[compound]) == 2 for compound in real_wells.compounds])
    held_out = np.isin(real_wells.positions, sorted(places["DMSO"])[::2]) & controls
    fit = ~twice & ~held_out & (real_wells.plates != min(real_wells.plates))
    how = {"fit": fit, "controls": controls}
    tables = {
        "raw": real_wells.features,
        "wccn": wccn(real_wells.features, real_wells.compounds, **how),
        "plda": plda(real_wells.features, real_wells.compounds, **how),
        "plda, positions": plda(real_wells.features, real_wells.compounds, positions=real_wells.positions, **how),
    }
    elsewhere = same(real_wells.compounds) & other & ~same(real_wells.positions) & twice
    others = ~same(real_wells.compounds) & other & ~controls
    found = {name: retrieval(z, elsewhere, others, real_wells.compounds) for name, z in tables.items()}
    assert (
        found["raw"] + 0.02 < found["wccn"] < found["plda"] - 0.02 and found["plda, positions"] > found["wccn"] + 0.02
    )
    both = held_out & held_out[:, None] & other
    floor = {
        name: retrieval(z, both & same(real_wells.positions), both & ~same(real_wells.positions), real_wells.positions)
        for name, z in tables.items()
    }
    assert floor["raw"] < floor["wccn"] and floor["plda, positions"] < min(floor["wccn"], floor["plda"]) - 0.05
