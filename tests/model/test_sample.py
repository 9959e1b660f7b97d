from __future__ import annotations

import numpy as np
import pytest
import torch

from scbd.data import FEATURES, ArraySource
from scbd.data.sources import IMAGES
from scbd.model._sample import draw_sample


@pytest.mark.parametrize("of_features", [True, False])
def test_training_cells_are_drawn_with_what_is_known_of_each(monkeypatch, of_features):
    monkeypatch.setattr("scbd.model._sample._ROWS", 20)
    monkeypatch.setattr("scbd.model._sample._IMAGES", 20)
    monkeypatch.setattr("scbd.model._sample._BLOCK", 7)
    cell = np.arange(90)
    values = cell.astype(np.float32)[:, None] if of_features else cell.astype(np.uint8)[:, None, None, None]
    rows, controls = cell[cell % 3 > 0], cell % 10 == 1
    source = ArraySource(values, kind=FEATURES if of_features else IMAGES)
    sample = draw_sample(source, rows, cell + 100, cell + 200, controls, cell + 300, seed=1)
    drawn = torch.cat(list(sample.batches())).flatten().numpy().astype(int)
    assert len(list(sample.batches())) > 1  # read as often as it is asked for
    assert set(drawn) <= set(rows) and len(set(drawn)) == len(drawn)
    there = np.isin(rows[controls[rows]], drawn)
    assert there.all() and 20 <= len(drawn) < 30 if of_features else not there.all() and len(drawn) == 20
    assert sample.controls is not None and sample.positions is not None
    np.testing.assert_array_equal(sample.y, drawn + 100)
    np.testing.assert_array_equal(sample.e, drawn + 200)
    np.testing.assert_array_equal(sample.controls, controls[drawn])
    np.testing.assert_array_equal(sample.positions, drawn + 300)
