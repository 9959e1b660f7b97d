from __future__ import annotations

from unittest import mock

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

import scbd.metrics._ranks as module
import scbd.metrics._relations as relations_module
from scbd.metrics import (
    Relations,
    relationship_average_precision,
    relationship_chance,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics._ranks import Ranks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    seed=st.integers(0, 100_000),
    n=st.integers(1, 300),
    n_bins=st.sampled_from([2, 64, 1 << 12]),
    kind=st.sampled_from(["apart", "ties", "a point", "beyond 1"]),
)
def test_places_and_values_are_those_of_the_sorted_array(dtype, seed, n, n_bins, kind):
    """Of values that were said before and of others, present or not, in any order of asking."""
    rng = np.random.default_rng(seed)
    values = {
        "apart": rng.uniform(-1, 1, n),
        "ties": rng.integers(-3, 4, n) / 3,
        "a point": np.full(n, 0.3),
        "beyond 1": rng.choice([-1 - 1e-6, -1, -1e-9, 0, 1, 1 + 1e-6], n),
    }[kind].astype(dtype)
    ordered = np.sort(values)
    with mock.patch.object(module, "_N_BINS", n_bins), mock.patch.object(module, "_BLOCK", 7):
        ranks = Ranks(values, ordered[:: int(rng.integers(1, 9))])
        assert len(ranks) == n and ranks.dtype == ordered.dtype
        others = rng.uniform(-1.1, 1.1, 5)
        for asked in (others, np.nextafter(values, 2), values, np.nextafter(values, -2), [1.0], [-2.0, 2.0]):
            asked = np.asarray(asked, dtype=dtype)
            for side in ("left", "right"):
                np.testing.assert_array_equal(ranks.searchsorted(asked, side=side), ordered.searchsorted(asked, side))
        places = rng.integers(0, n, (2, 5))
        np.testing.assert_array_equal(ranks[places], ordered[places])
        np.testing.assert_array_equal(np.asarray(ranks), ordered)


def test_percentiles_and_what_was_said_are_found_without_reading_all_again(monkeypatch):
    values = np.random.default_rng(0).normal(scale=0.2, size=200_000).astype(np.float32).clip(-1, 1)
    asked = values[:50]
    ranks = Ranks(values, asked)
    monkeypatch.setattr(ranks, "_blocks", None)  # whatever reads all values fails
    ordered = np.sort(values)
    np.testing.assert_array_equal(ranks.searchsorted(asked), ordered.searchsorted(asked))
    places = np.floor(np.arange(101) / 100 * (len(values) - 1)).astype(int)
    np.testing.assert_array_equal(ranks[places], ordered[places])
    with pytest.raises(TypeError):
        ranks.searchsorted(ordered)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["apart", "ties", "a point"])
def test_scores_of_large_maps_are_those_of_small_ones_to_the_last_bit(dtype, kind, monkeypatch):
    rng = np.random.default_rng(0)
    x = {"apart": rng.normal(size=(120, 6)), "ties": rng.integers(-1, 2, (120, 3)), "a point": np.ones((120, 2))}[kind]
    genes = [f"G{i}" for i in range(120)]
    net = pd.DataFrame({"source": [f"c{i // 4}" for i in range(120)], "target": genes})

    def scores() -> tuple[pd.DataFrame, dict[str, float]]:
        relations = Relations(AnnData(X=x.astype(dtype), obs=pd.DataFrame(index=genes)), net)
        assert isinstance(relations.ranked[0], kinds)
        curves = [
            relationship_curve(relations, diagonal=diagonal).assign(diagonal=diagonal) for diagonal in (False, True)
        ]
        found = {
            "average_precision": relationship_average_precision(relations),
            "recall": relationship_recall(relations, tail=0.07),
        }
        return pd.concat(curves), found | {f"{k} by chance": v for k, v in relationship_chance(relations).items()}

    kinds: type = np.ndarray
    small = scores()
    monkeypatch.setattr(relations_module, "_SORTED", 0)
    kinds = Ranks
    large = scores()
    pd.testing.assert_frame_equal(large[0], small[0], check_exact=True)
    assert large[1] == small[1]
