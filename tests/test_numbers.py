from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd._numbers import is_number, number_values


def table(values: object) -> pd.DataFrame:
    return pd.DataFrame({"t": values})


@pytest.mark.parametrize(
    "values", [[3, 1], [3.0, 1.0], pd.array([3, 1], dtype="Int64"), np.array([3, 1], np.float32)], ids=str
)
def test_numbers_of_any_kind(values):
    obs = table(values)
    assert is_number(obs["t"])
    assert number_values(obs, "t").tolist() == [3.0, 1.0]
    assert number_values(obs, "t").dtype == np.float64


@pytest.mark.parametrize(
    "values",
    [["3", "1"], [True, False], pd.Categorical([3, 1]), pd.to_datetime(["2024-01-02", "2024-01-01"])],
    ids=["text", "truth values", "labels", "dates"],
)
def test_what_is_no_number_is_said(values):
    obs = table(values)
    assert not is_number(obs["t"])
    with pytest.raises(TypeError, match=r"obs\['t'\] holds no numbers .*adata.obs\['t'\].astype\(float\)"):
        number_values(obs, "t")


@pytest.mark.parametrize("values", [[1.0, np.nan, np.inf], pd.array([1, None, None], dtype="Int64")], ids=str)
def test_missing_numbers_are_said(values):
    with pytest.raises(ValueError, match=r"obs\['t'\] has no finite value for 2 of 3 cells \(rows 1, 2\): drop"):
        number_values(table(values), "t")


def test_missing_columns_are_said():
    with pytest.raises(KeyError, match="obs has no 'Time'"):
        number_values(pd.DataFrame({"time": [1.0]}), "Time")
    with pytest.raises(ValueError, match="obs has 2 columns of the name 't'"):
        number_values(pd.DataFrame([[1.0, 2.0]], columns=["t", "t"]), "t")
