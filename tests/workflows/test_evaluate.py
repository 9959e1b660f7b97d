from __future__ import annotations

import numpy as np
import pytest

from scbd.workflows import evaluate


def test_an_embedding_that_is_missing_is_named(cells):
    with pytest.raises(KeyError, match="obsm has no 'X_scbd_c'"):
        evaluate(cells, ["gene"])


@pytest.mark.parametrize(("left", "told"), [(50, "held-out cells"), (49, "all cells")])
def test_a_few_cells_are_too_few_to_be_tested_on_alone(cells, left, told):
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))
    table = evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(cells.n_obs - left))
    assert table["tested_on"].tolist() == [told]
