from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import novelty

TRAIN, KNOWN = np.arange(400), np.arange(400, 600)


def make_table(n: int = 1600, seed: int = 0) -> AnnData:
    """Two clusters of cells; of unequal scale, so that one component would outweigh the others."""
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=(n, 5)) + 6 * (np.arange(n) % 2)[:, None]) * [1, 1, 1, 1, 100]
    obs = pd.DataFrame({"split": np.where(np.arange(n) < 400, "train", "test")}, index=[f"c{i}" for i in range(n)])
    return AnnData(obs=obs, obsm={"X": z})


def test_of_cells_like_the_known_ones_values_are_uniform():
    """A share of p of them has p or less, on average over data."""
    found = np.concatenate(
        [novelty(make_table(seed=seed), "X", trained_on="split", held_out=KNOWN)[600:] for seed in range(30)]
    )
    for p in (0.05, 0.2, 0.5):
        assert np.mean(found <= p) == pytest.approx(p, abs=0.03)


@pytest.mark.parametrize("constant", [0.0, -3.5])
def test_what_no_training_cell_has_is_new(constant):
    """Such a component was left out: a hundred in place of nothing was a cell like all others."""
    adata = make_table()
    adata.obsm["X"] = np.column_stack([adata.obsm["X"], np.full(1600, constant)]).astype(np.float32)
    before = novelty(adata, "X", trained_on=TRAIN, held_out=KNOWN)
    adata.obsm["X"][600:700, 5] += 100
    adata.obsm["X"][700:800, 5] += 1e-6  # rounding
    found = novelty(adata, "X", trained_on=TRAIN, held_out=KNOWN)
    assert (found[600:700] == 1 / 201).all()
    np.testing.assert_array_equal(np.delete(found, np.s_[600:700]), np.delete(before, np.s_[600:700]))


def test_cells_between_and_beyond_are_told():
    adata = make_table()
    adata.obsm["X"][600:700] = 3 * np.array([1, 1, 1, 1, 100])  # between both clusters: near their common mean
    adata.obsm["X"][700:800, 0] += 30
    adata.obsm["X"][800:900, 4] += 5  # nothing, in its component's unit
    found = novelty(adata, "X", trained_on=TRAIN, held_out=KNOWN)
    assert found[600:800].max() < 0.02 and found[800:900].mean() == pytest.approx(0.5, abs=0.1)
    assert found.min() == pytest.approx(1 / 201) and found.max() <= 1
    np.testing.assert_array_equal(found, novelty(adata, adata.obsm["X"], trained_on=TRAIN, held_out=KNOWN))


def test_values_are_those_of_the_naive_form():
    adata = make_table(60)
    z, train, known = adata.obsm["X"], np.arange(20), np.arange(20, 35)
    scaled = (z - z[train].mean(0)) / z[train].std(0, ddof=1)
    far = [np.sort(np.linalg.norm(scaled[train] - cell, axis=1))[:3].mean() for cell in scaled]
    wanted = [(1 + sum(far[k] >= far[i] for k in known)) / 16 for i in range(35, 60)]
    found = novelty(adata, "X", trained_on=train, held_out=known, n_neighbors=3)
    np.testing.assert_allclose(found[35:], wanted)
    np.testing.assert_allclose(np.sort(found[known]), np.arange(1, 16) / 15)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"held_out": np.zeros(1600, dtype=bool)}, "held_out names no cell"),
        ({"held_out": [3, 500]}, "held_out names 1 cells that were trained on"),
        ({"trained_on": [1, 2, 3]}, "There are 3 training cells, and n_neighbors=10"),
        ({"n_neighbors": 0}, "n_neighbors=0: give"),
        ({"held_out": [1600]}, "held_out is int64"),
    ],
)
def test_bad_input_gets_a_sentence(change, said):
    with pytest.raises(ValueError, match=said):
        novelty(make_table(), "X", **{"trained_on": "split", "held_out": KNOWN} | change)


def test_a_constant_component_in_small_units_is_seen_beside_large_ones():
    rng = np.random.default_rng(0)
    values = np.column_stack([1e7 * rng.normal(size=(400, 3)), np.ones(400)])
    values[390:, 3] = 5
    cells = AnnData(obs=pd.DataFrame(index=[f"c{i}" for i in range(400)]))
    found = novelty(cells, values, trained_on=np.arange(200), held_out=np.arange(200, 390))
    assert (found[390:] < 0.01).all()
