"""What all corrections of tables have in common: one shape, and sentences for what they cannot take."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix
from small_tables import Plates, plates

from scbd import baselines

WELLS = plates()
SEEN = (WELLS.compounds != "3") & ((WELLS.plates != "plate 3") | (WELLS.controls & (WELLS.positions < 20)))


def of_fit(wells: Plates) -> dict[str, Any]:
    """Those that learn from some rows."""
    by_label: dict[str, Any] = {"labels": wells.compounds, "controls": wells.controls, "positions": wells.positions}
    return {
        "standardize": partial(baselines.standardize_by_environment, environments=wells.plates),
        "standardize, controls": partial(
            baselines.standardize_by_environment, environments=wells.plates, controls=wells.controls
        ),
        "sphering": partial(baselines.sphering, controls=wells.controls),
        "tvn": partial(baselines.tvn, environments=wells.plates, controls=wells.controls),
        "wccn": partial(baselines.wccn, labels=wells.compounds),
        "wccn, positions": partial(baselines.wccn, **by_label),
        "lda": partial(baselines.lda, **by_label),
        "plda": partial(baselines.plda, **by_label),
    }


OF_FIT = of_fit(WELLS)
ALL = OF_FIT | {"combat": partial(baselines.combat, environments=WELLS.plates)}


@pytest.mark.parametrize("name", ALL)
def test_one_shape(name):
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
def test_rows_outside_of_fit_are_not_learned_from(name):
    learned = OF_FIT[name](WELLS.features, fit=SEEN)
    np.testing.assert_array_equal(OF_FIT[name](WELLS.features, fit=np.flatnonzero(SEEN)), learned)
    assert not np.array_equal(OF_FIT[name](WELLS.features), learned)
    others = WELLS._replace(
        features=np.where(SEEN[:, None], WELLS.features, -3.0),
        compounds=np.where(SEEN, WELLS.compounds.astype(object), None),  # type: ignore[call-overload]
    )
    np.testing.assert_array_equal(of_fit(others)[name](others.features, fit=SEEN)[SEEN], learned[SEEN])


def spoiled(**values: float) -> pd.DataFrame:
    table = pd.DataFrame(WELLS.features.copy(), columns=[f"feature {i}" for i in range(6)])
    for row, (column, value) in enumerate(values.items()):
        table.loc[[row, row + 10], f"feature {column[-1]}"] = value
    return table


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            spoiled(f2=np.nan, f4=np.inf),
            "in 4 of 92 rows \\(rows 0, 1, 10, 11\\) and 2 of 6 features \\(feature 2, feature 4\\): drop these",
        ),
        (WELLS.features[:, 0], "features must be a table \\(N, D\\) with rows and columns, got shape \\(92,\\)"),
        (WELLS.features[:, :0], "got shape \\(92, 0\\)"),
        (WELLS.features.astype(str), "features are of type <U32, not numbers: leave out columns of names"),
        (pd.DataFrame({"name": WELLS.compounds, "size": 1.0}), "features are of type object, not numbers"),
        (csr_matrix(WELLS.features), "features are a sparse matrix: give them dense, as features.toarray\\(\\)"),
        (WELLS.features[:50], "92|50"),
    ],
    ids=["NaN", "1-D", "no column", "strings", "names", "sparse", "rows"],
)
def test_features_that_are_none_are_refused(name, features, message):
    with pytest.raises(ValueError, match=message):
        ALL[name](features)


@pytest.mark.parametrize("name", OF_FIT)
@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ([], "fit is empty: nothing can be learned from no row"),
        (np.zeros(92, dtype=bool), "fit is True for none of 92 rows"),
        (np.ones(5, dtype=bool), "fit is a mask of shape \\(5,\\) for 92 rows"),
        ([0, 92], "fit must be row numbers from 0 to 91, each once"),
        ([-1, 3], "fit must be row numbers from 0 to 91, each once"),
        (np.zeros(92, dtype=int), "fit must be row numbers from 0 to 91, each once \\(or truth values"),
        (["a"], "fit must be truth values \\(92,\\) or row numbers, got <U1 of shape \\(1,\\)"),
        ([0], "(There are|fewer than two)"),
    ],
)
def test_rows_to_learn_from_are_rows(name, fit, message):
    with pytest.raises(ValueError, match=message):
        OF_FIT[name](WELLS.features, fit=fit)


def test_too_few_controls_are_counted():
    with pytest.raises(ValueError, match="There are 1 of 92 rows to learn from \\(controls\\): at least two"):
        baselines.sphering(WELLS.features, controls=[3])
    with pytest.raises(ValueError, match="There are 0 of 92 rows to learn from \\(controls in fit\\)"):
        baselines.sphering(WELLS.features, controls=WELLS.controls, fit=~WELLS.controls)


def test_rows_without_a_label_are_named():
    labels = WELLS.compounds.astype(object)
    labels[[2, 5]] = None
    with pytest.raises(ValueError, match="labels has no value for 2 rows \\(2, 5\\): leave them out, or out of fit"):
        baselines.wccn(WELLS.features, labels)
    assert baselines.wccn(WELLS.features, labels, fit=np.arange(6, 92)).shape == (92, 6)
    places: Any = ["A1", np.nan] * 46
    with pytest.raises(ValueError, match="environments has no value for 46 rows \\(1, 3, 5, 7, 9, …\\)"):
        baselines.standardize_by_environment(WELLS.features, places)


def test_numbers_of_any_kind_are_features():
    counts = np.random.default_rng(0).integers(0, 50, (92, 3))
    found = baselines.sphering(counts, controls=WELLS.controls)
    np.testing.assert_array_equal(found, baselines.sphering(counts.astype(float), controls=WELLS.controls))
    boxed = pd.DataFrame(counts).astype(object)
    np.testing.assert_array_equal(found, baselines.sphering(boxed, controls=WELLS.controls))
