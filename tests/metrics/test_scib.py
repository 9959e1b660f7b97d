from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import batch_mixing, scib_scores

KEYS: dict[str, Any] = {"y_key": "y", "e_key": "e"}
MISSING = "scib-metrics (extra benchmark) is not installed"


def screen(n: int = 600, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    y, e = np.divmod(np.arange(n) % 12, 3)
    obs = pd.DataFrame({"y": [f"gene {i}" for i in y], "e": [f"well {i}" for i in e]}, index=np.arange(n).astype(str))
    both = 8 * np.hstack([np.eye(4)[y], np.eye(4)[e]])
    obsm = {"perfect": both * ([1] * 4 + [0] * 4), "batch": both * ([0] * 4 + [1] * 4), "both": both, "noise": 0 * both}
    noise = rng.normal(size=(n, 8))
    return AnnData(obs=obs, obsm={key: x + noise for key, x in obsm.items()} | {"point": np.ones((n, 8))})


def test_where_it_is_not_installed_a_sentence_says_how(monkeypatch):
    monkeypatch.setitem(sys.modules, "scib_metrics", None)
    with pytest.raises(ImportError, match="These scores need one more package: pip install scib-metrics"):
        scib_scores(screen(), "noise", **KEYS)


class Graph:
    def __init__(self, indices: np.ndarray, distances: np.ndarray) -> None:
        self.indices, self.distances = indices, distances

    def subset_neighbors(self, n: int) -> Graph:
        return Graph(self.indices[:, :n], self.distances[:, :n])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What a package of the name is asked for, in its place."""
    calls: list[tuple] = []

    def score(name, value):
        def called(*args, **how):
            calls.append((name, args, how))
            return value

        return called

    values: dict[str, Any] = dict.fromkeys(
        [
            "clisi_knn",
            "graph_connectivity",
            "silhouette_label",
            "ilisi_knn",
            "kbet_per_label",
            "bras",
            "pcr_comparison",
        ],
        np.float32(0.5),
    )
    values |= dict.fromkeys(
        ["nmi_ari_cluster_labels_kmeans", "nmi_ari_cluster_labels_leiden"], {"nmi": 0.2, "ari": 0.1}
    )
    scib = SimpleNamespace(**{name: score(name, value) for name, value in values.items()})
    scib.nearest_neighbors = SimpleNamespace(NeighborsResults=Graph)
    monkeypatch.setitem(sys.modules, "scib_metrics", scib)
    return calls


def test_each_score_is_asked_for_twice_the_second_time_with_permuted_labels(asked):
    adata = screen()
    found = scib_scores(adata, "both", features="noise", n_neighbors=40, **KEYS)
    names = {"clisi", "graph_connectivity", "silhouette", "ilisi", "kbet", "bras", "pcr_comparison"}
    names |= {f"{clusters}_{score}" for clusters in ("kmeans", "leiden") for score in ("nmi", "ari")}
    assert set(found) == names | {f"{name}_expected" for name in names - {"pcr_comparison"}}
    assert all(type(value) is float for value in found.values())
    y, e = adata.obs["y"].to_numpy(), adata.obs["e"].to_numpy()
    n_neighbors = {"clisi_knn": 40, "ilisi_knn": 40, "kbet_per_label": 40, "graph_connectivity": 15}
    assert asked.pop()[0] == "pcr_comparison"
    for (name, first, _), (again, second, _) in zip(asked[::2], asked[1::2], strict=True):
        assert name == again
        if name in n_neighbors:
            assert first[0].indices.shape == (600, n_neighbors[name])
            assert (first[0].indices[:, 0] == np.arange(600)).all() and (first[0].distances[:, 0] == 0).all()
        labels, permuted = ([np.asarray(a) for a in args if not isinstance(a, Graph)] for args in (first, second))
        texts, others = ([a for a in of if a.dtype.kind in "UO"] for of in (labels, permuted))
        assert any((one == y).all() or (one == e).all() for one in texts)
        assert any((one != other).any() for one, other in zip(texts, others, strict=True))
        of_y = name in ("clisi_knn", "graph_connectivity", "silhouette_label") or name.startswith("nmi")
        moved = next(other for one, other in zip(texts, others, strict=True) if (one != other).any())
        if of_y:
            assert sorted(moved) == sorted(y)
        else:  # as many cells of each perturbation in each environment as before
            assert pd.crosstab(y, moved).equals(pd.crosstab(y, e))
    assert next(how for name, _, how in asked if name.endswith("leiden")) == {"seed": 0}


def test_a_subset_and_some_scores(asked):
    adata = screen()
    found = scib_scores(adata, "both", scores=["bras"], max_cells=200, n_neighbors=20, seed=3, **KEYS)
    assert set(found) == {"bras", "bras_expected"} and len(asked) == 2 and asked[0][1][0].shape == (200, 8)
    scib_scores(adata, "both", scores=["bras"], max_cells=200, n_neighbors=20, seed=3, **KEYS)
    for one, other in zip(asked[:2], asked[2:], strict=True):
        assert all((a == b).all() for a, b in zip(one[1], other[1], strict=True))
    with pytest.warns(UserWarning, match=r"one place of obsm\['point'\]: the embedding has collapsed"):
        found = scib_scores(adata, "point", scores=["bras", "clisi"], **KEYS)
    assert np.isnan(found["bras"]) and found["clisi"] == found["bras_expected"] == 0.5


def test_bad_input_gets_a_sentence(asked):
    adata = screen()
    adata.obs["one"] = "a"
    with pytest.raises(ValueError, match="The score 'iLISI' is not known: use some of 'clisi'"):
        scib_scores(adata, "both", scores=["iLISI"], **KEYS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="pcr_comparison compares .* give features"):
        scib_scores(adata, "both", scores=["pcr_comparison"], **KEYS)
    with pytest.raises(ValueError, match=r"n_neighbors=90 asks for more cells than there are \(80\)"):
        scib_scores(adata, "both", max_cells=80, **KEYS)
    with pytest.raises(ValueError, match="Every cell has the one perturbation 'a'"):
        scib_scores(adata, "both", y_key="one", e_key="e")
    for key in ("one", "y"):
        with pytest.raises(ValueError, match=f"No y has several cells in one environment of '{key}'"):
            scib_scores(adata, "both", y_key="y", e_key=key)
    with pytest.raises(KeyError, match="obsm has no 'best'"):
        scib_scores(adata, "best", **KEYS)
    adata.obsm["both"][0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 600 rows"):
        scib_scores(adata, "both", **KEYS)
    assert not asked


OF_Y = ["clisi", "graph_connectivity", "silhouette", "kmeans_nmi", "kmeans_ari", "leiden_ari"]
OF_E = ["ilisi", "kbet", "bras"]


@pytest.mark.filterwarnings("ignore")
def test_scores_of_embeddings_that_are_known():
    """Each against what permuted labels give: what holds y alone, e alone, both, nothing, and a point."""
    pytest.importorskip("scib_metrics", reason=MISSING)
    adata = screen()
    found = {key: scib_scores(adata, key, features="both", **KEYS) for key in ("perfect", "batch", "both", "noise")}
    above = pd.DataFrame(
        {key: {name: of[name] - of[f"{name}_expected"] for name in OF_Y + OF_E} for key, of in found.items()}
    )
    assert above.loc[OF_Y, "perfect"].min() > 0.3 and above.loc[OF_Y, "both"].min() > 0.03
    assert above.loc[OF_Y, ["batch", "noise"]].abs().max(axis=None) < 0.1
    assert above.loc[OF_E, ["batch", "both"]].max(axis=None) < -0.3
    assert above.loc[OF_E, ["perfect", "noise"]].abs().max(axis=None) < 0.1
    assert found["perfect"]["pcr_comparison"] > 0.95 and found["noise"]["pcr_comparison"] > 0.95
    assert found["batch"]["pcr_comparison"] < 0.05
    mixing = batch_mixing(adata, "perfect", "e", n_neighbors=89)["ilisi"]
    assert found["perfect"]["ilisi"] == pytest.approx(mixing, abs=0.01)
    assert found["perfect"] == scib_scores(adata, "perfect", features="both", **KEYS)


@pytest.mark.filterwarnings("ignore")
def test_a_point_and_many_small_perturbations():
    pytest.importorskip("scib_metrics", reason=MISSING)
    adata = screen()
    point = scib_scores(adata, "point", **KEYS)
    assert np.isnan([point[name] for name in OF_E]).all()
    assert max(abs(point[name] - point[f"{name}_expected"]) for name in OF_Y) < 0.05
    adata.obs["y"] = (np.arange(600) // 6).astype(str)
    few = scib_scores(adata, "noise", **KEYS)
    assert np.isnan(few["kbet"]) and few["clisi"] > 0.8 and few["kmeans_nmi"] > 0.3 > 0.05 > abs(few["kmeans_ari"])
    assert few["clisi"] == pytest.approx(few["clisi_expected"], abs=0.02)
