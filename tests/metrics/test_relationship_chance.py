from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.datasets import gene_sets
from scbd.metrics import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_chance,
    relationship_curve,
    relationship_recall,
)


def scores(relations: Relations) -> dict[str, float]:
    return {
        "area": relationship_area(relationship_curve(relations)),
        "recall": relationship_recall(relations),
        "average_precision": relationship_average_precision(relations),
    }


def a_map(x: np.ndarray, size: int) -> Relations:
    genes = [f"G{i}" for i in range(len(x))]
    net = pd.DataFrame({"source": [f"c{i // size}" for i in range(len(x))], "target": genes})
    return Relations(AnnData(X=x, obs=pd.DataFrame(index=genes)), net)


@pytest.mark.parametrize("ties", [False, True])
def test_chance_is_the_mean_over_relations_of_random_pairs(ties):
    """Of few pairs, where the prevalence alone would be half of it."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (10, 2)) if ties else rng.normal(size=(10, 3))
    relations = a_map(x.astype(float), size=2)
    ordered, known = relations.ranked
    drawn = []
    for _ in range(400):
        relations.__dict__["ranked"] = ordered, np.sort(rng.choice(ordered, len(known), replace=False))
        drawn.append(scores(relations))
    table = pd.DataFrame(drawn)
    for score, expected in relationship_chance(relations).items():
        assert table[score].mean() == pytest.approx(expected, abs=4 * table[score].std() / np.sqrt(len(table)))
    assert relationship_chance(relations)["average_precision"] > len(known) / len(ordered)


def test_profiles_in_random_order_score_at_chance():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(40, 8)), 6, axis=0) + 0.5 * rng.normal(size=(240, 8))
    table = pd.DataFrame([scores(a_map(x[rng.permutation(240)], size=6)) for _ in range(20)])
    expected = relationship_chance(a_map(x, size=6))
    for score, value in expected.items():
        assert table[score].mean() == pytest.approx(value, rel=0.1)
        assert scores(a_map(x, size=6))[score] > 2 * value
    prevalence = a_map(x, size=6).pairs()[1].mean()
    assert expected["area"] == pytest.approx(0.38 * prevalence, rel=0.02)
    assert expected["recall"] == pytest.approx(0.1, rel=0.01)
    assert expected["average_precision"] == pytest.approx(prevalence, rel=0.02)


def test_a_map_of_one_point_scores_its_chance():
    relations = a_map(np.ones((8, 3)), size=4)
    assert relationship_chance(relations) == pytest.approx(scores(relations))


def test_a_map_of_one_pair_scores_its_chance():
    relations = a_map(np.array([[1.0, 0.0], [0.6, 0.8]]), size=2)
    assert relationship_chance(relations, percentiles=[0]) == pytest.approx(
        {"area": np.nan, "recall": relationship_recall(relations), "average_precision": 1}, nan_ok=True
    )


def test_the_curve_that_is_asked_for_decides_the_area():
    relations = a_map(np.random.default_rng(0).normal(size=(60, 4)), size=6)
    narrow = relationship_chance(relations, percentiles=range(90, 100))["area"]
    assert narrow == pytest.approx(relationship_chance(relations)["area"] * 0.18 / 0.38, rel=0.05)
    assert np.isnan(relationship_chance(relations, percentiles=[90])["area"])
    assert relationship_chance(relations, tail=0.1)["recall"] == pytest.approx(0.2, rel=0.02)
    with pytest.raises(ValueError, match="must lie between 0 and 100"):
        relationship_chance(relations, percentiles=[90, 101])
    with pytest.raises(ValueError, match="tail=0 must lie between"):
        relationship_chance(relations, tail=0)


def test_real_complexes(shared):
    pytest.importorskip("pyarrow", reason="reading the real profiles needs pyarrow")
    frame = pd.read_parquet(shared / "funk22" / "df_standardized_mitosis.parquet")
    frame = frame[[str(i) for i in range(64)]] - frame.loc["nontargeting", [str(i) for i in range(64)]]
    adata = AnnData(X=((frame - frame.mean()) / frame.std()).to_numpy(), obs=pd.DataFrame(index=frame.index))
    chance = relationship_chance(adata, gene_sets(shared / "corum" / "CORUM_clusters.tsv"))
    rounded = {score: round(value, 4) for score, value in chance.items()}
    assert rounded == {"area": 0.0102, "recall": 0.1, "average_precision": 0.0267}
