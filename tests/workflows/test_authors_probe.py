from __future__ import annotations

import numpy as np
import pytest
from known_answers import known_answers

from scbd.workflows._authors_probe import unstandardised_f1


def test_it_is_the_original_s():
    known = known_answers("scbd_data")
    labels = 6 * known["probe_plate"] + known["probe_well"]
    found = unstandardised_f1(known["probe_z"], labels)
    assert found == pytest.approx(float(known["probe_well_macro_f1"]), abs=1e-6)


def test_a_smaller_embedding_tells_less():
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 6
    z = rng.normal(size=(600, 6)) + 2 * np.eye(6)[labels]
    large, small = unstandardised_f1(z, labels), unstandardised_f1(0.001 * z, labels)
    assert large > 0.7 and small < large - 0.1
