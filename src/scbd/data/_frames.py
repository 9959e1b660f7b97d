"""Tables in files: CSV, TSV and Parquet, by the name's ending, and what columns they have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from scbd._files import check_file

if TYPE_CHECKING:
    import os

_SEPARATORS = {".csv": ",", ".tsv": "\t", ".csv.gz": ",", ".tsv.gz": "\t"}
TABLES = (*_SEPARATORS, ".parquet")
_HEAD = 5
# rows by which it is told whether numbers are names, and what such a name is like
_LOOKED_AT = 1_000
_PADDED = r"0\d+"


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a table."""
    return str(path).lower().endswith(TABLES)


def read_frame(path: str | os.PathLike[str]) -> pd.DataFrame:
    """A table as it is written; numbers with zeros before them, such as plate ``0012``, are text.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is of another kind, empty, or truncated.
    """
    return _read(path, None)


def head_of(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The first few rows of a table, for little more than their price; errors are those of :func:`read_frame`."""
    return _read(path, _HEAD)


def _read(path: str | os.PathLike[str], n_rows: int | None) -> pd.DataFrame:
    where = Path(path)
    if not is_table(where):
        msg = f"{where} is no table: give one of {', '.join(TABLES)}."
        raise ValueError(msg)
    check_file(where)
    try:
        if where.suffix.lower() == ".parquet":
            try:
                import pyarrow.parquet
            except ImportError as error:
                msg = f"{where} is read by pyarrow: pip install pyarrow, or save the table as .csv."
                raise ImportError(msg) from error
            if n_rows is None:
                return pd.read_parquet(where)
            with pyarrow.parquet.ParquetFile(where) as file:
                return next(file.iter_batches(n_rows), file.schema_arrow.empty_table()).to_pandas()
        name = where.name.lower()
        separator = next(mark for ending, mark in _SEPARATORS.items() if name.endswith(ending))
        as_text = dict.fromkeys(_padded(where, separator), str)
        return pd.read_csv(where, sep=separator, nrows=n_rows, low_memory=False, dtype=as_text)
    except (OSError, EOFError, ValueError) as error:
        msg = f"{where} cannot be read as a table, is empty, or truncated ({error})."
        raise ValueError(msg) from error


def _padded(path: Path, separator: str) -> list[str]:
    """Columns with numbers that begin with zeros: names of plates and wells, which would be others without."""
    rows = pd.read_csv(path, sep=separator, nrows=_LOOKED_AT, dtype=str)
    return [name for name in rows if rows[name].str.fullmatch(_PADDED, na=False).any()]
