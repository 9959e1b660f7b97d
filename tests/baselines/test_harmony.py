from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from small_tables import wells

from scbd.baselines import harmony


def test_where_it_is_not_installed_a_sentence_says_how(monkeypatch):
    cells, well, _ = wells()
    monkeypatch.setitem(sys.modules, "harmonypy", None)
    with pytest.raises(ImportError, match="Harmony needs one more package: pip install harmonypy"):
        harmony(cells, well)


def moves_nothing(asked, turned):
    def run_harmony(values, obs, key, **how):
        asked.append((values, obs[key].to_numpy(), how))
        return SimpleNamespace(Z_corr=values.T if turned else values)

    return SimpleNamespace(run_harmony=run_harmony)


@pytest.mark.parametrize("turned", [False, True])  # as before its version 2
def test_it_is_given_principal_components_or_the_features(monkeypatch, turned):
    cells, well, _ = wells()
    asked: list = []
    monkeypatch.setitem(sys.modules, "harmonypy", moves_nothing(asked, turned))
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
    with pytest.raises(ValueError, match="There is one environment"):
        harmony(cells, well.astype(int) * 0)
    with pytest.raises(ValueError, match="n_components=0: give"):
        harmony(cells, well, n_components=0)


def test_cells_of_a_kind_are_moved_onto_each_other():
    pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    rng = np.random.default_rng(0)
    kind, plate = rng.integers(0, 3, 600), rng.integers(0, 2, 600)
    cells = 4 * rng.normal(size=(3, 5))[kind] + rng.normal(size=(600, 5)) + rng.normal(size=(2, 5))[plate]

    def apart(z):
        gaps = [z[(kind == k) & (plate == 1)].mean(0) - z[(kind == k) & (plate == 0)].mean(0) for k in range(3)]
        return np.linalg.norm(np.mean(gaps, axis=0))

    found = harmony(cells, plate, n_components=None)
    assert apart(found) < 0.4 * apart(cells)
    np.testing.assert_array_equal(harmony(cells, plate, n_components=None), found)
