from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from scbd._shared.labels import (
    CROSS_SEPARATOR,
    as_columns,
    check_control_labels,
    encode_crossed_columns,
    encode_labels,
    label_text,
    label_values,
    split_crossed_label,
)
from scbd._shared.numeric_tables import (
    check_dense,
    frame_to_array,
    is_numeric_column,
    parse_numbers,
    read_numeric_column,
)


def make_table(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_label_values_ordered_column_keeps_order_and_drops_unused():
    obs = make_table(well=pd.Categorical(["P10", "P2", "P2"], categories=["P1", "P2", "P10"], ordered=True))
    assert label_values(obs, "well").cat.categories.tolist() == ["P2", "P10"]


values = st.sampled_from(["a", "b", "a × b", "×", "\\", "\\×", "b × a", ""])


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=30))
def test_label_values_several_columns_have_unique_crossed_labels(rows):
    obs = pd.DataFrame(rows, columns=["x", "y", "z"])
    labels = label_values(obs, ["x", "y", "z"])
    names = labels.tolist()
    assert len(set(names)) == len(set(rows))
    assert len(set(zip(names, rows, strict=True))) == len(set(rows))
    assert labels.cat.categories.tolist() == sorted(set(names))


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=30))
def test_split_crossed_label_and_codes_return_original_values(rows):
    labels = label_values(pd.DataFrame(rows, columns=["x", "y", "z"]), ["x", "y", "z"])
    codes = encode_crossed_columns(labels.cat.categories)[labels.cat.codes]
    for found, column in zip(codes.T, zip(*rows, strict=True), strict=True):
        assert len(set(found)) == len(set(column)) == len(set(zip(found, column, strict=True)))
    assert [tuple(split_crossed_label(label)) for label in labels] == rows


def test_encode_crossed_columns_added_labels_keep_codes():
    known, added = ["P1 × A1", "P1 × B2"], ["P0 × A1", "P1 × C3"]
    assert encode_crossed_columns(known + added).tolist() == [[0, 0], [0, 1], [1, 0], [0, 2]]
    assert encode_crossed_columns(known).tolist() == encode_crossed_columns(known + added)[:2].tolist()


def test_label_values_several_columns_join_their_values():
    obs = make_table(plate=["1", "1", "2"], well=pd.Categorical(["A1", "B2", "A1"]), day=[1.0, 2.0, 1.5])
    assert label_values(obs, ["plate", "well", "day"]).tolist() == ["1 × A1 × 1", "1 × B2 × 2", "2 × A1 × 1.5"]
    assert CROSS_SEPARATOR == " × "


def test_encode_labels_whole_floats_are_equal_to_integers():
    obs = make_table(plate=[1, 2, 1], well=["A1", "A1", "B2"])
    floats = obs.assign(plate=obs["plate"].astype(float))
    for columns in (["plate"], ["plate", "well"]):
        known = label_values(obs, columns).cat.categories.tolist()
        codes, unknown = encode_labels(label_values(floats, columns), known)
        assert unknown == []
        np.testing.assert_array_equal(codes, encode_labels(label_values(obs, columns), known)[0])


def test_encode_labels_known_and_unknown_labels_return_codes():
    labels = label_values(make_table(gene=["c", "x", "a", "c", "y"]), "gene")
    codes, unknown = encode_labels(labels, ["a", "b", "c"])
    assert codes.dtype == np.int64
    assert codes.tolist() == [2, 3, 0, 2, 4]
    assert unknown == ["x", "y"]


@pytest.mark.parametrize(
    ("stored", "label"),
    [
        (pd.to_datetime(["2026-01-02", "2026-01-03"]), "2026-01-02 00:00:00"),
        (pd.cut([1, 9], [0, 5, 10]), "(0, 5]"),
        ([Decimal("1.5"), Decimal("2.5")], "1.5"),
        ([date(2026, 1, 2), date(2026, 1, 3)], "2026-01-02"),
        ([("a", 1), ("b", 2)], "('a', 1)"),
        (np.array([2.5, 1.5]), 1.5),
        ([True, False], False),
        ([b"x", b"y"], b"x"),
    ],
)
def test_label_values_any_type_returns_plain_values(stored, label):
    categories = label_values(pd.DataFrame({"day": pd.Series(stored)}), "day").cat.categories.tolist()
    assert label in categories
    assert all(type(category) in (str, bytes, bool, int, float) for category in categories)


def test_label_values_date_and_its_text_are_one_label():
    labels = label_values(make_table(day=pd.Series([date(2026, 1, 2), "2026-01-02"], dtype="category")), "day")
    assert labels.tolist() == ["2026-01-02", "2026-01-02"]


def test_label_values_number_and_its_text_are_one_label():
    """This happens if a table with numbers is concatenated with one with text."""
    labels = label_values(make_table(well=pd.Series([1, 2, "1", 2.0, "3"], dtype=object)), "well")
    assert labels.tolist() == [1, 2, 1, 2, "3"]
    codes, unknown = encode_labels(label_values(make_table(well=["2", "4", "1"]), "well"), [1, 2])
    assert codes.tolist() == [1, 2, 0] and unknown == ["4"]


def test_label_values_allow_missing_returns_missing():
    obs = make_table(plate=["a", None, "b", "b"], well=["x", "y", None, "x"])
    assert label_values(obs, "plate", allow_missing=True).isna().tolist() == [False, True, False, False]
    crossed = label_values(obs, ["plate", "well"], allow_missing=True)
    assert crossed.isna().tolist() == [False, True, True, False]
    assert encode_labels(crossed, ["b × x"])[0].tolist() == [1, -1, -1, 0]


def test_label_values_and_as_columns_invalid_columns_raise(cells):
    with pytest.raises(KeyError, match=r"obs has no 'genes' .*Did you mean 'gene'\?"):
        label_values(cells.obs, "genes")
    with pytest.raises(ValueError, match="An empty list of obs columns"):
        as_columns([])
    with pytest.raises(TypeError, match="a name or a list of names, got None"):
        as_columns(None)
    cells.obs["holes"] = pd.Series(["a", None] * 48, index=cells.obs_names)
    with pytest.raises(ValueError, match=r"no value for 48 of 96 cells \(rows 1, 3, 5, 7, 9, …\): give"):
        label_values(cells.obs, ["gene", "holes"])
    twice = pd.concat([cells.obs, cells.obs[["gene"]]], axis=1)
    with pytest.raises(ValueError, match="2 columns of the name 'gene': rename or drop"):
        label_values(twice, "gene")


@pytest.mark.parametrize("stored", [0, 0.0, np.int8(0), np.float32(0), "0"], ids=repr)
@pytest.mark.parametrize("control", [0, 0.0, np.int64(0), np.float64(0), "0", [0], np.zeros(1), (0, "0")], ids=repr)
def test_check_control_labels_any_number_type_returns_text(stored, control):
    assert check_control_labels(control, [label_text(stored), "1.5"], "y") == ["0"]


def test_check_control_labels_one_or_several_return_list():
    labels = np.array(["DMSO", "a", "water", "a", "True"], dtype=object)
    assert check_control_labels("DMSO", labels, "y") == ["DMSO"]
    assert check_control_labels(["water", "DMSO", "water"], labels, "y") == ["water", "DMSO"]
    assert check_control_labels(pd.Series(["water"]), labels, "y") == ["water"]
    assert check_control_labels(True, labels, "y") == ["True"]
    assert check_control_labels([], labels, "y") == []


@pytest.mark.parametrize("control", [None, np.nan, pd.NA, ["DMSO", None], [np.nan]], ids=repr)
def test_check_control_labels_missing_value_raises(control):
    with pytest.raises(ValueError, match="is no value: give control the value of 'y' for unperturbed"):
        check_control_labels(control, ["DMSO", "nan", "None", "<NA>"], "y")


def test_check_control_labels_absent_control_raises():
    with pytest.raises(
        ValueError, match=r"No row has the control 'dmso' in 'y' \(it holds DMSO, a, b, c, d, …\).* Did you mean 'DMSO'"
    ):
        check_control_labels(["DMSO", "dmso"], ["DMSO", *"aabcdef"], "y")


def make_time_column(values: object) -> pd.DataFrame:
    return pd.DataFrame({"t": values})


@pytest.mark.parametrize(
    "values", [[3, 1], [3.0, 1.0], pd.array([3, 1], dtype="Int64"), np.array([3, 1], np.float32)], ids=str
)
def test_read_numeric_column_any_number_type_returns_float64(values):
    obs = make_time_column(values)
    assert is_numeric_column(obs["t"])
    assert read_numeric_column(obs, "t").tolist() == [3.0, 1.0]
    assert read_numeric_column(obs, "t").dtype == np.float64


@pytest.mark.parametrize(
    "values",
    [["3", "1"], [True, False], pd.Categorical([3, 1]), pd.to_datetime(["2024-01-02", "2024-01-01"])],
    ids=["text", "truth values", "labels", "dates"],
)
def test_read_numeric_column_non_numeric_raises(values):
    obs = make_time_column(values)
    assert not is_numeric_column(obs["t"])
    with pytest.raises(TypeError, match=r"obs\['t'\] holds no numbers .*astype\(float\)"):
        read_numeric_column(obs, "t")


@pytest.mark.parametrize("values", [[1.0, np.nan, np.inf], pd.array([1, None, None], dtype="Int64")], ids=str)
def test_read_numeric_column_non_finite_raises(values):
    with pytest.raises(ValueError, match=r"obs\['t'\] has no finite value for 2 of 3 cells \(rows 1, 2\): give"):
        read_numeric_column(make_time_column(values), "t")


def test_read_numeric_column_missing_or_repeated_column_raises():
    with pytest.raises(KeyError, match="obs has no 'Time'"):
        read_numeric_column(pd.DataFrame({"time": [1.0]}), "Time")
    with pytest.raises(ValueError, match="obs has 2 columns of the name 't'"):
        read_numeric_column(pd.DataFrame([[1.0, 2.0]], columns=["t", "t"]), "t")


# dtypes of NumPy, of pandas with missing values, and of PyArrow
NUMBERS = ["float32", "float64", "int16", "uint8", "Float32", "Int64", "float[pyarrow]", "int64[pyarrow]"]
TRUTH = ["bool", "boolean", "bool[pyarrow]"]


@given(st.lists(st.sampled_from(NUMBERS + TRUTH), min_size=1, max_size=5), st.integers(0, 100))
def test_frame_to_array_numbers_and_booleans_return_numbers(dtypes, seed):
    values = np.random.default_rng(seed).integers(0, 2, size=(4, len(dtypes)))
    frame = pd.DataFrame({number: pd.Series(values[:, number], dtype=dtype) for number, dtype in enumerate(dtypes)})
    found = frame_to_array(frame, "obsm['x']")
    assert found.dtype.kind in "biuf"
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", ["Float64", "Int64", "boolean", "int64[pyarrow]", "bool[pyarrow]"])
def test_frame_to_array_missing_values_return_nan(dtype):
    frame = pd.DataFrame({"a": pd.Series([1, None], dtype=dtype), "b": [0.5, 2.0]})
    np.testing.assert_array_equal(frame_to_array(frame, "x"), [[1, 0.5], [np.nan, 2]])


@pytest.mark.parametrize("values", [[1, 2.5], [Decimal(1), Decimal("2.5")], [np.float32(1), np.float64(2.5)]])
def test_frame_to_array_numbers_as_objects_return_numbers(values):
    frame = pd.DataFrame({"a": [0, 1], "b": np.array([*values], dtype=object)})
    np.testing.assert_array_equal(frame_to_array(frame, "x"), [[0, 1], [1, 2.5]])
    assert frame["b"].dtype == object


def test_frame_to_array_single_dtype_is_kept():
    assert frame_to_array(pd.DataFrame(np.zeros((2, 3), np.float32)), "x").dtype == np.float32


OTHERS: dict[str, Any] = {
    "text": ["1", "2"],
    "mixed": np.array([1, "?"], dtype=object),
    "days": pd.to_datetime(["2026-01-01", "2026-01-02"]),
    "labels": pd.Categorical([True, False]),
    "complex": [1j, 2],
}


@pytest.mark.parametrize("name", OTHERS)
def test_frame_to_array_non_numeric_columns_raise(name):
    frame = pd.DataFrame({"a": [1.0, 2.0], name: OTHERS[name]})
    with pytest.raises(TypeError, match=rf"obsm\['x'\] has columns that hold no numbers \({name} in [12] of 2 rows"):
        frame_to_array(frame, "obsm['x']")


def test_check_dense_memory_map_is_returned_and_sparse_raises(tmp_path):
    np.save(tmp_path / "z.npy", np.eye(3))
    stored = np.load(tmp_path / "z.npy", mmap_mode="r")
    assert check_dense(stored, "z") is stored
    for matrix in (sparse.csr_matrix(np.eye(3)), sparse.coo_array(np.eye(3))):
        with pytest.raises(ValueError, match=r"z is a sparse matrix, .*: give z.toarray\(\)"):
            check_dense(matrix, "z")


def test_read_numeric_column_and_parse_numbers_return_copies():
    """In pandas 3, arrays of a column are read-only, and torch warns if it shares their memory."""
    kept = np.arange(3.0)
    kept.flags.writeable = False
    obs = pd.DataFrame({"time": pd.Series(kept, copy=False)}, copy=False)
    for found in (read_numeric_column(obs, "time"), parse_numbers(obs["time"])[0]):
        assert found.flags.writeable and not np.shares_memory(found, kept)
