from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest

from scbd.workflows import evaluate


def test_an_embedding_that_is_missing_is_named(cells):
    with pytest.raises(KeyError, match="obsm has no 'X_scbd_c'"):
        evaluate(cells, ["gene"])


@pytest.mark.parametrize("left", [50, 49, 0])
def test_a_few_cells_are_too_few_to_be_tested_on_alone(cells, left):
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))
    said = f"they are of all cells, as {left} of 96 were not trained on, .* train with train_size=0.7 or split"
    told = pytest.warns(UserWarning, match=said) if left < 50 else nullcontext()
    with told:
        table = evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(cells.n_obs - left))
    assert table["tested_on"].tolist() == ["all cells" if left < 50 else "held-out cells"]
    assert evaluate(cells, ["gene"], embeddings={"z": "z"})["tested_on"].tolist() == ["all cells"]


def test_a_mask_says_what_row_numbers_say(cells):
    """Its length was taken for the number of rows that were learned from: all cells were scored."""
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))
    rows = np.random.default_rng(1).permutation(cells.n_obs)[:40]
    by_number, by_mask = (
        evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=given)
        for given in (rows, np.isin(np.arange(cells.n_obs), rows))
    )
    assert by_mask["tested_on"].tolist() == ["held-out cells"]
    pd.testing.assert_frame_equal(by_number, by_mask)


def test_arrays_and_columns_say_what_keys_and_rows_say(cells):
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(cells.n_obs, 2))
    cells.obs["part"] = np.where(np.arange(cells.n_obs) < 40, "train", "test")
    by_key = evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(40))
    by_array = evaluate(cells, ["gene"], embeddings={"z": cells.obsm["z"]}, train_indices="part")
    pd.testing.assert_frame_equal(by_key, by_array)
