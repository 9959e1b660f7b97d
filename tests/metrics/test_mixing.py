from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pynndescent
import pytest
import torch
from anndata import AnnData
from sklearn.neighbors import NearestNeighbors

import scbd.metrics._mixing as module
from scbd.metrics import batch_mixing
from scbd.metrics._mixing import lisi, nearest_neighbors


def make_cells(distance: float, n: int = 600, n_wells: int = 3, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    well, gene = rng.integers(n_wells, size=n), rng.integers(2, size=n)
    z = rng.normal(size=(n, 6)) + distance * np.eye(6)[well] + 20 * gene[:, None]
    obs = pd.DataFrame({"well": well.astype(str), "gene": gene.astype(str)}, index=[str(i) for i in range(n)])
    return AnnData(obs=obs, obsm={"Z": z})


def test_batch_mixing_mixed_and_separate_environments_are_distinguished():
    mixed, apart = (batch_mixing(make_cells(distance), "Z", "well", n_neighbors=60) for distance in (0, 15))
    assert mixed["ilisi"] > 0.7 and apart["ilisi"] < 0.05
    assert mixed["same_environment_neighbours"] == pytest.approx(mixed["same_environment_expected"], abs=0.02)
    assert apart["same_environment_neighbours"] > 0.99
    assert apart["same_environment_expected"] == pytest.approx(1 / 3, abs=0.02)
    assert abs(mixed["silhouette"]) < 0.1


def test_batch_mixing_same_environment_expected_excludes_the_cell():
    adata = make_cells(0, n=30)
    adata.obs["well"] = ["small"] * 10 + ["large"] * 20
    expected = (10 * 9 + 20 * 19) / (30 * 29)
    assert batch_mixing(adata, "Z", "well", n_neighbors=5)["same_environment_expected"] == pytest.approx(expected)


def naive_lisi(distances: np.ndarray, labels: np.ndarray, perplexity: float) -> float:
    """Compute LISI of one cell: bisect its bandwidth, then sum the squared label masses."""
    low, high = 0.0, 1e6
    for _ in range(200):
        beta = (low + high) / 2
        p = np.exp(-(distances - distances[0]) * beta)
        p /= p.sum()
        entropy = -sum(q * np.log(q) for q in p if q > 0)
        low, high = (beta, high) if entropy > np.log(perplexity) else (low, beta)
    return 1 / sum(p[labels == label].sum() ** 2 for label in np.unique(labels))


def test_lisi_any_block_size_is_equal_to_naive(monkeypatch):
    rng = np.random.default_rng(0)
    distances = np.sort(rng.exponential(size=(20, 45)), axis=1)
    labels = rng.integers(4, size=(20, 45))
    neighbors, others = np.arange(900).reshape(20, 45), rng.permutation(labels.ravel())
    expected = [
        [naive_lisi(d, of_all[rows], 15) for d, rows in zip(distances, neighbors, strict=True)]
        for of_all in (labels.ravel(), others)
    ]
    for size in (1 << 13, 7):  # cells per block
        monkeypatch.setattr(module, "_ROWS_PER_BLOCK_OF_NEIGHBOURS", size)
        found = lisi(distances, neighbors, [labels.ravel(), others], 15)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize(("n_wells", "known"), [(2, 0.907), (8, 0.61), (34, 0.26), (96, 0.11)])
def test_batch_mixing_perfect_mixing_is_equal_to_expected(n_wells, known):
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"well": (np.arange(2000) % n_wells).astype(str)}, index=map(str, range(2000)))
    adata = AnnData(obs=obs, obsm={"Z": rng.normal(size=(2000, 16))})
    scores = batch_mixing(adata, "Z", "well")
    assert scores["ilisi"] == pytest.approx(known, rel=0.1)
    assert scores["ilisi_expected"] == pytest.approx(scores["ilisi"], abs=0.01)
    assert scores["silhouette_expected"] == pytest.approx(scores["silhouette"], abs=0.01)
    adata.obsm["Z"] = rng.normal(size=(2000, 16)) + 9 * rng.normal(size=(n_wells, 16))[np.arange(2000) % n_wells]
    apart = batch_mixing(adata, "Z", "well")
    assert apart["ilisi"] < 0.5 * known < 0.7 * apart["ilisi_expected"]


def make_collapsed_cells(at: np.ndarray, n: int = 900, dtype: str = "float32") -> AnnData:
    """Make cells at one of a few positions, sorted by environment."""
    wells = np.sort(np.arange(n) % 3)
    obs = pd.DataFrame({"well": wells.astype(str)}, index=map(str, range(n)))
    place = np.random.default_rng(0).integers(len(at), size=n)
    return AnnData(obs=obs, obsm={"Z": at[place].astype(dtype)})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("at", [0.0, 7.3, 1e6])
def test_batch_mixing_single_point_warns_and_returns_nan(at, dtype):
    adata = make_collapsed_cells(np.full((1, 5), at), dtype=dtype)
    with pytest.warns(UserWarning, match=r"one place of obsm"):
        scores = batch_mixing(adata, "Z", "well", n_neighbors=30)
    assert np.isnan([scores[name] for name in ("ilisi", "same_environment_neighbours", "silhouette")]).all()
    assert scores["ilisi_expected"] > 0.5


@pytest.mark.parametrize("sort", [True, False])
def test_batch_mixing_tied_cells_any_row_order_is_at_chance(sort):
    """Six positions, each with cells of all wells, are perfectly mixed, however rows are sorted."""
    adata = make_collapsed_cells(1e3 + np.random.default_rng(1).normal(size=(6, 5)))
    adata = adata if sort else adata[np.random.default_rng(2).permutation(900)].copy()
    scores = batch_mixing(adata, "Z", "well", n_neighbors=30)
    assert scores["ilisi"] == pytest.approx(scores["ilisi_expected"], abs=0.05)
    assert scores["same_environment_neighbours"] == pytest.approx(scores["same_environment_expected"], abs=0.03)
    assert scores["silhouette"] == pytest.approx(scores["silhouette_expected"], abs=0.02)


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_batch_mixing_row_order_and_offset_change_nothing(shift):
    adata = make_cells(1.5)
    first = batch_mixing(adata, "Z", "well", n_neighbors=60)
    order = np.random.default_rng(3).permutation(600)
    again = adata[order].copy()
    again.obsm["Z"] = again.obsm["Z"] + shift
    scores = batch_mixing(again, "Z", "well", n_neighbors=60)
    for name in ("ilisi", "same_environment_neighbours", "silhouette"):
        assert scores[name] == pytest.approx(first[name], abs=1e-3)


def test_batch_mixing_max_cells_scores_a_subset():
    adata = make_cells(1.5, n=900)
    part = batch_mixing(adata, "Z", "well", n_neighbors=30, max_cells=300)
    assert part != batch_mixing(adata, "Z", "well", n_neighbors=30)
    assert part == batch_mixing(adata, "Z", "well", n_neighbors=30, max_cells=300)
    assert batch_mixing(adata, "Z", "well", n_neighbors=30, max_cells=900) == batch_mixing(
        adata, "Z", "well", n_neighbors=30
    )
    with pytest.raises(ValueError, match=r"needs more cells than there are \(80\)"):
        batch_mixing(adata, "Z", "well", n_neighbors=90, max_cells=80)


def test_batch_mixing_ilisi_is_equal_to_scib_metrics():
    scib = pytest.importorskip("scib_metrics", reason="scib-metrics (extra benchmark) is not installed")
    adata = make_cells(1.5)
    distances, indices = nearest_neighbors(adata.obsm["Z"], 60)
    own = np.arange(len(indices))[:, None]
    graph = scib.nearest_neighbors.NeighborsResults(
        indices=np.hstack([own, indices]), distances=np.hstack([np.zeros_like(own, dtype=float), distances])
    )
    theirs = scib.ilisi_knn(graph, adata.obs["well"].to_numpy(), perplexity=20)
    assert batch_mixing(adata, "Z", "well", n_neighbors=60)["ilisi"] == pytest.approx(float(theirs), abs=0.02)


def test_nearest_neighbors_exact_is_equal_to_naive():
    x = np.random.default_rng(0).normal(size=(80, 3))
    x[1] = x[0]  # a duplicate is a neighbour, the cell itself is not
    distances, indices = nearest_neighbors(x, 5)
    square = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.fill_diagonal(square, np.inf)
    np.testing.assert_allclose(distances, np.sort(square, axis=1)[:, :5], atol=1e-6)
    assert indices[0, 0] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*numba.*")
def test_nearest_neighbors_approximate_has_high_recall(monkeypatch):
    x = np.random.default_rng(0).normal(size=(900, 4)).astype(np.float32)
    exact = nearest_neighbors(x, 10)[1]
    monkeypatch.setattr(module, "_MAX_CELLS_EXACT_NEIGHBOURS", 100)
    distances, indices = nearest_neighbors(x, 10)
    assert indices.shape == distances.shape == (900, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact, indices, strict=True)])
    assert recall > 0.9


class Approximate:
    """Exact replacement of ``pynndescent.NNDescent``, in which a cell is among its own neighbours.

    With many cells, numba changes the number of OpenMP threads, and with it that of torch.
    """

    def __init__(self, data: np.ndarray, n_neighbors: int, random_state: int) -> None:
        self._found = NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(data).kneighbors(data)

    @property
    def neighbor_graph(self) -> tuple[np.ndarray, np.ndarray]:
        torch.set_num_threads(2)
        distances, indices = self._found
        return indices, distances


def test_nearest_neighbors_approximate_excludes_self_keeps_threads(monkeypatch):
    x = np.random.default_rng(0).normal(size=(900, 4))
    x[:15] = x[0]  # more cells at one position than neighbours, so some are not among their own neighbours
    exact_distances, exact = nearest_neighbors(x, 10)
    monkeypatch.setattr(pynndescent, "NNDescent", Approximate)
    monkeypatch.setattr(module, "_MAX_CELLS_EXACT_NEIGHBOURS", 100)
    distances, indices = nearest_neighbors(x, 10)
    assert indices.shape == distances.shape == (900, 10)
    assert not (indices == np.arange(900)[:, None]).any()
    assert set(indices[:15].flat) <= set(range(15))
    np.testing.assert_array_equal(indices[15:], exact[15:])
    np.testing.assert_allclose(distances, exact_distances, atol=1e-6)
    assert torch.get_num_threads() == 1


def test_batch_mixing_y_key_confounded_design_is_at_chance():
    """Wells hold different genes: over all cells they look separate, within a gene they are mixed."""
    rng = np.random.default_rng(0)
    gene = rng.integers(2, size=800)
    well = np.where(rng.random(800) < 0.9, gene, 1 - gene)
    z = rng.normal(size=(800, 3)) + 20 * gene[:, None]
    adata = AnnData(obs=pd.DataFrame({"gene": gene.astype(str), "well": well.astype(str)}, index=map(str, range(800))))
    adata.obsm["Z"] = z
    overall, within = (batch_mixing(adata, "Z", "well", y_key=key, n_neighbors=30) for key in (None, "gene"))
    assert overall["same_environment_neighbours"] > overall["same_environment_expected"] + 0.2
    assert within["same_environment_neighbours"] == pytest.approx(within["same_environment_expected"], abs=0.03)
    assert within["n_left_out"] == 0 and "n_left_out" not in overall


def test_batch_mixing_excluded_perturbations_are_counted_and_logged(caplog):
    adata = make_cells(0, n=400)
    adata.obs["gene"] = np.repeat(["large", "small", "one well"], [250, 30, 120])
    adata.obs.loc[adata.obs["gene"] == "one well", "well"] = "0"
    with caplog.at_level(logging.WARNING, logger="scbd"):
        scores = batch_mixing(adata, "Z", "well", y_key="gene", n_neighbors=20)
    assert scores["n_left_out"] == 2
    assert "2 of 3 values of gene" in caplog.text
    alone = batch_mixing(adata[:250].copy(), "Z", "well", n_neighbors=20)
    assert scores["same_environment_neighbours"] == pytest.approx(alone["same_environment_neighbours"], abs=1e-3)


@pytest.mark.parametrize(
    ("names", "e_key", "how"),
    [
        (r"n_neighbors=90 .*\(60\)", "well", {}),
        ("n_neighbors=90", "well", {"y_key": "gene"}),
        ("one environment 'w'", "one", {}),
        ("Each well is in one", "well", {"y_key": "well", "n_neighbors": 3}),
    ],
)
def test_batch_mixing_invalid_design_raises(names, e_key, how):
    adata = make_cells(0, n=60)
    adata.obs["one"] = "w"
    with pytest.raises(ValueError, match=names):
        batch_mixing(adata, "Z", e_key, **how)


def test_batch_mixing_missing_column_or_nan_raises():
    adata = make_cells(0, n=60)
    with pytest.raises(KeyError, match="plate"):
        batch_mixing(adata, "Z", "plate")
    with pytest.raises(KeyError, match="'y'"):
        batch_mixing(adata, "Z", "well", y_key="y", n_neighbors=5)
    adata.obsm["Z"][4] = np.nan
    with pytest.raises(ValueError, match="in 1 of 60 cells"):
        batch_mixing(adata, "Z", "well", n_neighbors=5)
