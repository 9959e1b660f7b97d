"""Numbers of frames, whatever they are stored as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from scbd._matrices import dense, frame_numbers

# of pandas, of pandas with missing values, of PyArrow
NUMBERS = ["float32", "float64", "int16", "uint8", "Float32", "Int64", "float[pyarrow]", "int64[pyarrow]"]
TRUTH = ["bool", "boolean", "bool[pyarrow]"]


@given(st.lists(st.sampled_from(NUMBERS + TRUTH), min_size=1, max_size=5), st.integers(0, 100))
def test_numbers_and_truth_values_are_numbers_however_they_are_stored(dtypes, seed):
    values = np.random.default_rng(seed).integers(0, 2, size=(4, len(dtypes)))
    frame = pd.DataFrame({number: pd.Series(values[:, number], dtype=dtype) for number, dtype in enumerate(dtypes)})
    found = frame_numbers(frame, "obsm['x']")
    assert found.dtype.kind in "biuf"
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", ["Float64", "Int64", "boolean", "int64[pyarrow]", "bool[pyarrow]"])
def test_what_is_missing_is_no_number(dtype):
    frame = pd.DataFrame({"a": pd.Series([1, None], dtype=dtype), "b": [0.5, 2.0]})
    np.testing.assert_array_equal(frame_numbers(frame, "x"), [[1, 0.5], [np.nan, 2]])


def test_a_frame_of_one_dtype_keeps_it():
    assert frame_numbers(pd.DataFrame(np.zeros((2, 3), np.float32)), "x").dtype == np.float32


OTHERS: dict[str, Any] = {
    "text": ["1", "2"],
    "objects": np.array([1, 2.5], dtype=object),
    "days": pd.to_datetime(["2026-01-01", "2026-01-02"]),
    "labels": pd.Categorical([True, False]),
    "complex": [1j, 2],
}


@pytest.mark.parametrize("name", OTHERS)
def test_columns_that_hold_no_numbers_are_named(name):
    frame = pd.DataFrame({"a": [1.0, 2.0], name: OTHERS[name]})
    with pytest.raises(TypeError, match=rf"obsm\['x'\] has columns that hold no numbers \({name}\): leave"):
        frame_numbers(frame, "obsm['x']")


def test_what_is_read_by_row_is_left_where_it_is(tmp_path):
    np.save(tmp_path / "z.npy", np.eye(3))
    stored = np.load(tmp_path / "z.npy", mmap_mode="r")
    assert dense(stored, "z") is stored
    for matrix in (sparse.csr_matrix(np.eye(3)), sparse.coo_array(np.eye(3))):
        with pytest.raises(ValueError, match=r"z is a sparse matrix, .*: give z.toarray\(\)"):
            dense(matrix, "z")
