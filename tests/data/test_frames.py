from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data._frames import TABLES, head_of, is_table, read_frame


@pytest.mark.parametrize("ending", TABLES)
@given(st.integers(0, 12), st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True))
def test_written_and_read(tmp_path_factory, ending, n, columns):
    frame = pd.DataFrame({column: range(place, n + place) for place, column in enumerate(columns)})
    path = tmp_path_factory.mktemp("tables") / f"t{ending}"
    write(frame, path)
    pd.testing.assert_frame_equal(read_frame(path), frame, check_dtype=n > 0)
    pd.testing.assert_frame_equal(head_of(path), frame.head(5), check_dtype=n > 0)


@pytest.mark.parametrize("ending", TABLES)
def test_names_that_are_numbers_keep_their_zeros(tmp_path, ending):
    plates = pd.DataFrame({"plate": ["0012", "113", "0014"], "dose": [0.5, 0, 10.25], "n": [0, 10, 7]})
    write(plates, tmp_path / f"t{ending}")
    for read in (read_frame, head_of):
        pd.testing.assert_frame_equal(read(tmp_path / f"t{ending}"), plates)


def write(frame: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")


def test_names_of_tables(tmp_path):
    assert is_table("A.CSV") and is_table(Path("x/a.tsv.gz")) and not is_table("a.csv.zip") and not is_table("csv")
    with pytest.raises(ValueError, match="a.txt is no table: give one of .csv, .tsv"):
        read_frame(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_frame(tmp_path / "a.csv")


def test_parquet_without_pyarrow_is_told_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "wells.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for read in (read_frame, head_of):
        with pytest.raises(ImportError, match=r"wells.parquet is read by pyarrow: pip install pyarrow, or save"):
            read(path)
