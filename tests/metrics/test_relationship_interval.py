from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)
from scbd.metrics._relationship_interval import _Ordered


def screen(n_sets: int = 20, size: int = 4, found: int = 5, seed: int = 0) -> tuple[AnnData, pd.DataFrame]:
    """The first complexes share a direction, the others do not."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_sets * size, 16))
    for i in range(found):
        x[i * size : (i + 1) * size] += 3 * rng.normal(size=16)
    genes = [f"G{i}" for i in range(len(x))]
    net = pd.DataFrame({"source": [f"complex {i // size}" for i in range(len(x))], "target": genes})
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), net


@pytest.mark.parametrize("seed", range(5))
def test_a_resample_of_each_gene_once_gives_the_scores_themselves(seed):
    profiles, net = screen(seed=seed)
    relations = Relations(profiles, net)
    one, two = np.triu_indices(len(relations.genes), k=1)
    cosine, related = relations.pairs()
    order = np.argsort(cosine, kind="stable")
    ordered = _Ordered(cosine[order], related[order], one[order], two[order])
    each = np.ones(len(relations.genes), dtype=int)
    assert ordered.score(each, "average_precision", 0.05) == pytest.approx(relationship_average_precision(relations))
    assert ordered.score(each, "recall", 0.05) == pytest.approx(relationship_recall(relations))
    area = relationship_area(relationship_curve(relations))
    assert ordered.score(each, "area", 0.05) == pytest.approx(area)


@pytest.mark.parametrize("score", ["average_precision", "recall", "area"])
def test_intervals_hold_the_score_and_shrink_with_more_genes(score):
    widths = []
    for n_sets in (15, 60):
        profiles, net = screen(n_sets=n_sets, found=n_sets // 3)
        low, high = relationship_interval(profiles, net, score=score, n_bootstrap=60)
        assert low < high
        widths.append(high - low)
    assert widths[1] < widths[0]
    assert relationship_interval(profiles, net, score=score, n_bootstrap=60) == (low, high)


def test_an_interval_leaves_as_many_on_either_side():
    profiles, net = screen()
    ends = {level: relationship_interval(profiles, net, level=level, n_bootstrap=41) for level in (0.0, 0.5, 0.9, 1.0)}
    low, high = np.array(list(ends.values())).T
    assert low[0] == high[0]  # of no coverage: the median
    assert (np.diff(low) < 0).all() and (np.diff(high) > 0).all()


def test_unknown_score():
    with pytest.raises(ValueError, match="score='f1' is not known"):
        relationship_interval(*screen(), score="f1")  # type: ignore[arg-type]
