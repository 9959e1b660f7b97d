from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from scbd.metrics._auroc import mean_auroc


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(2, 6), st.integers(1, 70), st.sampled_from([1, 2, 50]))
def test_the_area_is_scikit_learns(seed, n, n_labels, size, n_values):
    """Scores that tie, labels that no cell has, and cells of no label."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(-1, n_labels + 1, size=n)
    scores = (rng.integers(n_values, size=(n, n_labels)) / 7).astype(np.float32)
    expected = [
        roc_auc_score(truth == label, scores[:, label]) for label in range(n_labels) if 0 < (truth == label).sum() < n
    ]
    found = mean_auroc(lambda: (scores[start : start + size] for start in range(0, n, size)), truth, n_labels)
    assert found == pytest.approx(np.mean(expected) if expected else np.nan, abs=1e-12, nan_ok=True)
