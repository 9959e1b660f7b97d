from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from small_tables import map_of_complexes

from scbd.metrics import (
    Relations,
    relationship_average_precision,
    relationship_difference,
    relationship_interval,
)


@pytest.mark.parametrize("score", ["average_precision", "recall", "area"])
def test_intervals_hold_the_score_and_shrink_with_more_genes(score):
    widths = []
    for n_sets in (15, 60):
        profiles, net = map_of_complexes(n_sets=n_sets, found=n_sets // 3)
        low, high = relationship_interval(profiles, net, score=score, n_bootstrap=60)
        assert low < high
        widths.append(high - low)
    assert widths[1] < widths[0]
    assert relationship_interval(profiles, net, score=score, n_bootstrap=60) == (low, high)


def test_an_interval_leaves_as_many_on_either_side():
    profiles, net = map_of_complexes()
    ends = {level: relationship_interval(profiles, net, level=level, n_bootstrap=41) for level in (0.0, 0.5, 0.9, 1.0)}
    low, high = np.array(list(ends.values())).T
    assert low[0] == high[0]  # of no coverage: the median
    assert (np.diff(low) < 0).all() and (np.diff(high) > 0).all()


def test_unknown_score():
    with pytest.raises(ValueError, match="score='f1' is not known"):
        relationship_interval(*map_of_complexes(), score="f1")  # type: ignore[arg-type]


def noisy(profiles: AnnData, sd: float, seed: int) -> AnnData:
    x = profiles.X + sd * np.random.default_rng(seed).normal(size=profiles.shape)
    return AnnData(X=x, obs=profiles.obs)


def test_a_difference_is_surer_than_the_scores_it_is_of():
    profiles, net = map_of_complexes(n_sets=40, found=20)
    better, worse = (Relations(noisy(profiles, sd, 1), net) for sd in (0.1, 3))
    found = relationship_difference(better, worse, n_bootstrap=100)
    expected = relationship_average_precision(better) - relationship_average_precision(worse)
    assert found.difference == pytest.approx(expected)
    assert 0 < found.low < found.difference < found.high
    widths = [np.diff(relationship_interval(one, n_bootstrap=100))[0] for one in (better, worse)]
    assert found.high - found.low < 0.9 * np.hypot(*widths)  # as wide as were the two drawn apart
    assert relationship_difference(better, better, n_bootstrap=20) == (0, 0, 0)


def test_only_maps_of_the_same_relations_differ_by_something():
    profiles, net = map_of_complexes()
    relations = Relations(profiles, net)
    for other in (Relations(profiles[::-1], net), Relations(profiles, net[:8]), Relations(profiles, net[4:8])):
        with pytest.raises(ValueError, match="The genes or relations of the two differ"):
            relationship_difference(relations, other)
    with pytest.raises(TypeError, match="Differences are of two Relations, not of AnnData"):
        relationship_difference(relations, profiles)


def test_one_complex_does_not_tell_of_others():
    profiles, net = map_of_complexes()
    with pytest.raises(ValueError, match="All relations are of one complex"):
        relationship_interval(profiles, net[:4], universe="profiles")


def heavy(seed: int) -> tuple[AnnData, pd.DataFrame]:
    """Twenty complexes of twelve genes, of which each has a strength of its own."""
    rng = np.random.default_rng(seed)
    of_complex = 0.9 * np.abs(rng.normal(size=(20, 1))) * rng.normal(size=(20, 16))
    x = np.repeat(of_complex, 12, axis=0) + rng.normal(size=(240, 16))
    genes = [f"G{i}" for i in range(240)]
    net = pd.DataFrame({"source": [f"complex {i // 12}" for i in range(240)], "target": genes})
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), net


def test_few_large_complexes_are_as_uncertain_as_they_are():
    """Genes drawn one by one gave intervals of little more than half of this width."""
    scores = [relationship_average_precision(*heavy(seed)) for seed in range(100)]
    widths = [np.diff(relationship_interval(*heavy(seed), n_bootstrap=100))[0] for seed in range(10)]
    assert np.mean(widths) > 0.85 * 3.92 * np.std(scores)


def test_differences_are_as_uncertain_as_they_are():
    """Neither as sure as were single genes drawn, nor as unsure as were each of the two drawn apart."""

    def both(seed: int) -> tuple[Relations, Relations]:
        profiles, net = heavy(seed)
        return Relations(profiles, net), Relations(noisy(profiles, 1, seed + 1_000), net)

    scores = np.array([[relationship_average_precision(one) for one in both(seed)] for seed in range(100)])
    found = [relationship_difference(*both(seed), n_bootstrap=100) for seed in range(20)]
    assert 0.75 < np.mean([one.high - one.low for one in found]) / (3.92 * np.std(scores[:, 0] - scores[:, 1])) < 1.25
