from __future__ import annotations

import numpy as np
import pytest

from scbd.baselines import pixel_pca
from scbd.data import Inputs
from scbd.workflows import evaluate
from scbd.workflows._evaluate import input_pca


def test_an_embedding_that_is_missing_is_named(cells):
    with pytest.raises(KeyError, match="obsm has no 'X_scbd_c'"):
        evaluate(cells, ["gene"])


@pytest.mark.parametrize(("left", "told"), [(50, "held-out cells"), (49, "all cells")])
def test_a_few_cells_are_too_few_to_be_tested_on_alone(cells, left, told):
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))
    table = evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(cells.n_obs - left))
    assert table["tested_on"].tolist() == [told]


def test_the_pca_is_that_of_the_channels_a_model_looks_at(cells):
    inputs = Inputs.found(cells, channels=["channel_1"])
    found = input_pca(cells, inputs, seed=0)
    np.testing.assert_array_equal(found, pixel_pca(cells, channels=["channel_1"]))
    assert np.abs(found - pixel_pca(cells)).max() > 1
