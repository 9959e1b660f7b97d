from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scbd.metrics._permutations import permuted_within


@given(seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_labels_stay_in_their_groups(seed):
    rng = np.random.default_rng(seed)
    e, labels = rng.integers(3, size=20), rng.integers(4, size=20)
    for permuted in permuted_within(labels, e, 5, rng):
        for environment in range(3):
            of = e == environment
            assert sorted(permuted[of]) == sorted(labels[of])


def test_all_orders_are_as_likely():
    permuted = permuted_within(np.arange(3), np.zeros(3, dtype=int), 6_000, np.random.default_rng(0))
    assert (np.abs(np.unique(permuted, axis=0, return_counts=True)[1] - 1000) < 150).all()
