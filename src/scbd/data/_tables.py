"""Reader of tables in text and Parquet files. Its rules stand in docs/user_guide/data.md, "How tables are read"."""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import logging
import lzma
import math
import os
import re
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pandas as pd

from scbd._shared.checks import format_count, join_first
from scbd._shared.files import check_file, local_path
from scbd._shared.labels import MISSING_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

# delimiter of the columns, by the ending of the file, and all delimiters that are recognised
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ANY_DELIMITER = ",\t;|"
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", ".zst")
TABLE_ENDINGS = (*(ending + packed for ending in _DELIMITERS for packed in ("", *COMPRESSIONS)), ".parquet")
# encodings that are recognised by the first bytes of a file; any other file must be UTF-8
_BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# first bytes of files that hold no text
_OTHER_FORMATS = {b"\x1f\x8b": ".csv.gz", b"PK\3\4": ".csv.zip or .xlsx", b"PAR1\x15": ".parquet"}
# errors of packed files that are damaged, truncated, encrypted, or packed by an unknown method
_UNPACKING_ERRORS = (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
# maximum length of a field in characters; Python's default, 131,072, is too short for lists of numbers in a field
_FIELD_LIMIT = 2**31 - 1
# first line in which a spreadsheet states the delimiter
_STATED_DELIMITER = re.compile(r'"?sep=(.)"?\s*')
# Most frequent words for missing values in columns of features, for which columns are read as numbers at once. A column
# with other words is read as text, which is slower, and converted later.
_FREQUENT_MISSING_WORDS = ["", "NA", "nan", "NaN"]
# number of rows at the top of a table that are read to detect what the table holds, such as features
N_HEAD_ROWS = 5
# name that pandas gives to a column if the file states no name for it
_UNNAMED = re.compile(r"Unnamed: \d+")
_ADVICE_ON_TWO_ROWS = (
    "If the table has two rows of names, make one of them: table = pandas.read_csv(…, header=[0, 1]), "
    "table.columns = ['_'.join(name) for name in table.columns]."
)


class Table(NamedTuple):
    """Columns of a file, as spelled in the file."""

    frame: pd.DataFrame
    """Table whose index holds the names of rows, if the file has any."""
    spelled: list[str]
    """Columns of text from a text file, for which :func:`settle_types` decides whether they hold numbers."""
    dropped: list[str]
    """Columns that were removed because they are empty or repeated, or hold numbers or names of rows."""
    lines: np.ndarray | None
    """Line of each row in a text file, counted from 1. `None`: the file is not text."""


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether the name of a file ends like that of a table, such as ``.csv`` or ``.parquet``."""
    return str(path).lower().endswith(TABLE_ENDINGS)


def is_partitioned_table(path: Path) -> bool:
    """Return whether a folder holds a single table that is split into several files.

    The name of such a folder ends with ``.parquet``, or its subfolders are named by a column and its value, such as
    ``plate=P1``.
    """
    return path.is_dir() and (path.suffix.lower() == ".parquet" or any(path.glob("*=*/")))


def read_table_file(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a table from a text or Parquet file, or from a folder of parts as written by Spark and pandas.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ImportError
        If the table is in Parquet format and pyarrow is not installed, or is packed by a method that Python lacks.
    ValueError
        If the file is not a table, is not encoded as UTF-8 or UTF-16, is empty or truncated, has lines with other
        numbers of fields than the first line, or has two columns of one name with different values.
    """
    table = read_table(path)
    frame = settle_types(table.frame, table.spelled)
    log_columns(path, frame, table.dropped)
    return frame


def read_first_rows(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read only the first five rows of a table; errors are those of :func:`read_table_file`."""
    table = read_table(path, n_rows=N_HEAD_ROWS)
    return settle_types(table.frame, table.spelled)


def read_table(
    path: str | os.PathLike[str],
    choose_features: Callable[[Sequence[str]], Iterable[str]] = lambda names: (),
    n_rows: int | None = None,
) -> Table:
    """Read a table without deciding which columns of text hold numbers; errors are those of :func:`read_table_file`.

    Parameters
    ----------
    path
        Text or Parquet file, or folder of Parquet files.
    choose_features
        Function that returns the features among the names of columns. Features in text are read as numbers, with NaN
        for words such as ``NA``. A feature that holds other words as well stays text.
    n_rows
        Number of rows to read. Default: all.
    """
    where = local_path(path)
    in_parts = is_partitioned_table(where)
    if not (is_table(where) or in_parts):
        msg = f"{where} is no table: give .csv or .tsv (also {', '.join(COMPRESSIONS)}), or .parquet."
        raise ValueError(msg)
    if not in_parts:
        check_file(where)
    try:
        if in_parts or where.suffix.lower() == ".parquet":
            return _read_parquet(where, n_rows)
        return read_text(where, choose_features, n_rows)
    except TableError:
        raise
    except (ValueError, NotImplementedError) as error:
        msg = f"{where} cannot be read as a table ({error})."
        raise ValueError(msg) from error


class TableError(ValueError):
    """Error about the content of a table, whose message needs no addition."""


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file, also a packed one, in UTF-8, or in UTF-16 if the file begins with a byte order mark.

    Raises
    ------
    ImportError
        If the file is packed by Zstandard, and no package can unpack it.
    ValueError
        If the file is damaged, encrypted or no text, or has another encoding; the message then names the line.
    """
    field_limit = csv.field_size_limit(_FIELD_LIMIT)
    try:
        encoding = detect_encoding(path)
        with _open_bytes(path) as file:
            start = file.read(max(map(len, _OTHER_FORMATS)))
        if kinds := [kind for mark, kind in _OTHER_FORMATS.items() if start.startswith(mark)]:
            msg = f"{path} is not text, but probably {kinds[0]}: correct the ending of its name, or save it as .csv."
            raise TableError(msg)
        try:
            with _open_bytes(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
                yield text
        except UnicodeDecodeError as error:
            raise TableError(_describe_encoding(path, encoding)) from error
    except _UNPACKING_ERRORS as error:
        msg = (
            f"{path} cannot be read ({error}): it may be damaged, truncated or encrypted. Save or download it again, "
            "without a password."
        )
        raise TableError(msg) from error
    finally:
        csv.field_size_limit(field_limit)


def detect_encoding(path: Path) -> str:
    """Return the encoding that a file states by its byte order mark, or UTF-8 if it has none."""
    with _open_bytes(path) as file:
        start = file.read(4)
    return next((name for mark, name in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")


def _open_bytes(path: Path) -> IO[bytes]:
    openers: dict[str, Any] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
        ".zip": _open_zip,
        ".zst": _open_zst,
    }
    return openers.get(path.suffix.lower(), open)(path, "rb")


def _open_zip(path: Path, mode: str) -> IO[bytes]:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
    if len(names) != 1:
        msg = f"{path} holds {len(names)} files ({join_first(names)}), and a packed table is one: unpack it first."
        raise TableError(msg)
    return archive.open(names[0])


def _open_zst(path: Path, mode: str) -> IO[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        msg = f"{path} is packed by Zstandard: pip install zstandard, or unpack it (zstd -d)."
        raise ImportError(msg) from error
    return zstandard.open(path, mode)


def _describe_encoding(path: Path, encoding: str) -> str:
    """Return a message that names the first line of a file that cannot be decoded."""
    with _open_bytes(path) as file:
        content = file.read()
    try:
        content.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + len(re.findall(rb"\r\n?|\n", content[: error.start]))
        return (
            f"{path}, line {line}: text of another encoding than {encoding.upper()} ({error.reason}): save the file "
            "as UTF-8. pandas reads it with encoding='cp1252', or 'utf-16' where a spreadsheet wrote Unicode text."
        )
    return f"{path} is truncated, or changes while it is read."


def read_text(
    path: Path,
    choose_features: Callable[[Sequence[str]], Iterable[str]] = lambda names: (),
    n_rows: int | None = None,
    *,
    tidy: bool = True,
) -> Table:
    """Read a text file with names of columns in its first line; parameters are those of :func:`read_table`.

    If ``tidy`` is false, columns without a name, and several columns of one name, are returned unmodified.

    The structure of all lines is checked before values are parsed, because the parser of pandas shifts or cuts lines
    with other numbers of fields.
    """
    delimiter, names, n_fields, lines, is_empty = _check_structure(path, n_rows)
    chosen = set(choose_features(names)) - {""}
    with open_text(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)  # of features with words, which are reported later
        read_header(file, path)
        frame = pd.read_csv(
            file,
            sep=delimiter,
            header=None,
            names=range(n_fields),
            usecols=range(len(names)),
            index_col=False,
            nrows=n_rows,
            dtype={place: str for place, name in enumerate(names) if name not in chosen},
            na_values={place: _FREQUENT_MISSING_WORDS if name in chosen else [""] for place, name in enumerate(names)},
            keep_default_na=False,
        )
    if len(frame) != len(lines):
        msg = f"{path} has {len(lines)} lines of values, of which pandas reads {len(frame)}: save it again."
        raise TableError(msg)
    if is_empty.any():
        frame = frame[~is_empty].reset_index(drop=True)
        logger.info("%s: %s ignored.", path, format_count(is_empty.sum(), "empty line"))
    frame.columns = pd.Index([name or f"Unnamed: {place}" for place, name in enumerate(names)])
    frame, dropped = _tidy_columns(frame, path) if tidy else (frame, [])
    return Table(frame, [name for name in frame if name not in chosen], dropped, lines[~is_empty])


def read_header(file: IO[str], path: Path) -> tuple[list[str], str, int]:
    """Read the names of columns from an open text file, and leave the file at the first line of values.

    Returns
    -------
    Names of the columns, delimiter, and number of lines that were read. A line ``sep=`` sets the delimiter. Otherwise,
    the ending of the file name does. If the line of names lacks this delimiter, its most frequent mark is used. If the
    line has this delimiter and another one, the one that gives the most columns is used.
    """
    line, n_lines = file.readline(), 1
    while line and not line.strip():
        line, n_lines = file.readline(), n_lines + 1
    if stated := _STATED_DELIMITER.fullmatch(line):
        line, n_lines = file.readline(), n_lines + 1
    if not line:
        msg = f"{path} is empty: its first line must name the columns."
        raise TableError(msg)
    delimiter = next((mark for ending, mark in _DELIMITERS.items() if ending in path.name.lower()), ",")
    if stated or delimiter not in line:
        delimiter = stated[1] if stated else max(_ANY_DELIMITER, key=line.count)
    elif any(mark in line for mark in _ANY_DELIMITER.replace(delimiter, "")):
        delimiter = max(delimiter + _ANY_DELIMITER, key=lambda mark: _count_columns(path, mark))
    rows = csv.reader(chain([line], file), delimiter=delimiter, strict=True)
    try:
        return next(rows), delimiter, n_lines - 1 + rows.line_num
    except csv.Error as error:
        raise TableError(_describe_quotes(path, n_lines, error)) from error


def _count_columns(path: Path, delimiter: str) -> int:
    """Return how many columns the first line names, or 0 if a line below has fewer fields with this delimiter."""
    with open_text(path) as file:
        try:
            rows = islice((len(row) for row in csv.reader(file, delimiter=delimiter, strict=True) if any(row)), 10)
            n_columns = next(rows, 0)
            return n_columns if min(rows, default=0) >= n_columns else 0
        except csv.Error:
            return 0


def _check_structure(path: Path, n_rows: int | None) -> tuple[str, list[str], int, np.ndarray, np.ndarray]:
    """Determine the structure of a text file, and check that all its lines have it.

    Returns
    -------
    Delimiter; names of the columns to read, which are empty where the file states none; largest number of fields of a
    row; line on which each row ends, counted from 1; and whether all fields of a row are empty.
    """
    lines, is_empty, irregular, row_names = [], [], [], []
    is_wider = True  # whether each row has one field more than the first line
    with open_text(path) as file:
        names, delimiter, n_above = read_header(file, path)
        n_names = len(names)
        rows = csv.reader(_check_lines(file, path, n_above), delimiter=delimiter, strict=True)
        try:
            for row in rows:
                if len(row) != n_names:
                    if not row or (len(row) == 1 and row[0] and not row[0].strip(" \t")):
                        continue  # a blank line
                    irregular.append((len(row), any(row[n_names:]), n_above + rows.line_num))
                lines.append(n_above + rows.line_num)
                is_empty.append(not any(row))
                is_wider = is_wider and len(row) == n_names + 1
                if is_wider and any(row):
                    row_names.append(row[0])
                # only all rows together show whether the first fields are names of rows
                if not is_wider and len(lines) == n_rows:
                    break
        except csv.Error as error:
            raise TableError(_describe_quotes(path, n_above + rows.line_num, error)) from error
    n_fields = max((n for n, _, _ in irregular), default=n_names)
    n_fields = n_fields if len(irregular) == len(lines) > 0 else max(n_fields, n_names)
    is_full = any(full for _, full, _ in irregular)
    if is_wider and row_names and (is_full or names[-1]):
        if _have_row_names(path, delimiter, row_names, is_full):
            names = ["", *names]
    else:
        n_named = max((place for place, name in enumerate(names, 1) if name), default=0)
        for n, full, line in irregular:
            if full or n < n_named:
                msg = (
                    f"{path}, line {line}: {format_count(n, 'field')} separated by {delimiter!r}, but the first line "
                    f"has {n_names}. Names of columns must be in the first line, so remove lines and comments above "
                    "them; otherwise mend this line, which is truncated or has a delimiter too many."
                )
                raise TableError(msg)
    ends, emptiness = np.array(lines[:n_rows], dtype=int), np.array(is_empty[:n_rows], dtype=bool)
    return delimiter, names[:n_fields], n_fields, ends, emptiness


def _have_row_names(path: Path, delimiter: str, first_fields: Sequence[str], is_full: bool) -> bool:
    """Return whether the first fields of rows name the rows, if each row has one field more than the first line.

    Names of rows that R writes are all different, and usually numbers. If all last fields are empty (``is_full`` is
    false), lines may end with a superfluous delimiter instead.

    Raises
    ------
    ValueError
        If both readings are possible, and a wrong choice would shift columns. If the second one is more likely, it is
        used, and a warning is logged.
    """
    is_distinct = len(set(first_fields)) == len(first_fields)
    if is_full == is_distinct:
        return is_full
    other = "If the last column has no name, add its name to"
    if not is_full:
        other = f"If lines only end with a superfluous {delimiter!r}, put {delimiter!r} at"
    msg = (
        f"{path}: each line has one field more than the first line. If the first fields, such as {first_fields[0]!r}, "
        f"are names of rows, put {delimiter!r} at the beginning of the first line. {other} the end of the first line."
    )
    if is_full or all(map(str.isdecimal, first_fields)):
        raise TableError(msg)
    logger.warning("%s Until then, the first fields are read as a column.", msg)
    return False


def _check_lines(file: IO[str], path: Path, n_above: int) -> Iterator[str]:
    for number, line in enumerate(file, n_above + 1):
        if "\0" in line:
            msg = f"{path}, line {number}: null bytes, as in a damaged file or in UTF-16 without a mark: save it again."
            raise TableError(msg)
        yield line


def _describe_quotes(path: Path, line: int, error: csv.Error) -> str:
    return f"{path}, line {line}: a field in quotation marks does not end, or text follows its end ({error})."


def _read_parquet(path: Path, n_rows: int | None) -> Table:
    """Read a table in Parquet format, from a file or from a folder of parts, or only its first ``n_rows`` rows.

    A column that a part lacks is missing there. A column becomes text if its types in the parts have no common type
    that holds all values exactly.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        msg = f"{path} is read by pyarrow: pip install pyarrow, or save the table as .csv."
        raise ImportError(msg) from error
    names = sorted(glob.glob("**", root_dir=path, recursive=True)) if path.is_dir() else [""]
    # files such as _SUCCESS and .part.crc, which Spark writes, hold no rows
    files = [path / name for name in names if not re.search(r"(^|/)_[^=/]*(/|$)", Path(name).as_posix())]
    parts = [_read_part(file, path, n_rows) for file in files if file.is_file()]
    is_uniform = all(part.schema.equals(parts[0].schema) for part in parts)
    for name in [] if is_uniform else {name: None for part in parts for name in part.column_names}:
        having = {place: part.select([name]) for place, part in enumerate(parts) if name in part.column_names}
        try:
            pyarrow.concat_tables(having.values(), promote_options="permissive")
        except pyarrow.ArrowException:
            for place, part in having.items():
                column = parts[place].column_names.index(name)
                parts[place] = parts[place].set_column(column, name, part[name].cast(pyarrow.string()))
    table = pyarrow.concat_tables(parts, promote_options="none" if is_uniform else "permissive").slice(0, n_rows)
    if not is_uniform:  # an index without a name, which some parts may lack, is dropped
        table = table.drop_columns([name for name in table.column_names if re.fullmatch(r"__index_level_\d__", name)])
    # By default, whole numbers with missing values become floating-point numbers, in which large ones become equal.
    types = {column.type for column in table.columns if column.null_count and pyarrow.types.is_integer(column.type)}
    nullable = {kind: pd.api.types.pandas_dtype(str(kind).replace("i", "I").replace("u", "U")) for kind in types}
    frame = table.to_pandas(types_mapper=nullable.get, ignore_metadata=not is_uniform)
    if frame.columns.nlevels > 1:
        msg = f"{path} has {frame.columns.nlevels} levels of column names. {_ADVICE_ON_TWO_ROWS}"
        raise TableError(msg)
    # a named index holds data, and its levels become columns; an index without a name only names the rows
    frame = frame if frame.index.names == [None] else frame.reset_index(allow_duplicates=True)
    frame, dropped = _tidy_columns(frame.rename(columns=str), path)
    return Table(frame, [], dropped, None)


def _read_part(path: Path, folder: Path, n_rows: int | None) -> Any:
    """Read a Parquet file as a table of pyarrow.

    Each folder ``name=value`` between ``folder`` and the file adds a column of text.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(check_file(path)) as file:
            batches = None if n_rows is None else [*islice(file.iter_batches(n_rows), 1)]
            part = file.read() if batches is None else pyarrow.Table.from_batches(batches, file.schema_arrow)
    except (OSError, pyarrow.ArrowException) as error:
        what = "is not a complete Parquet file"
        advice = ": a folder of parts must hold Parquet files only, so give files of other formats one by one"
        msg = f"{path} {what} ({error}){advice if path != folder else ''}."
        raise TableError(msg) from error
    for name, value in (name.split("=", 1) for name in path.parent.parts[len(folder.parts) :] if "=" in name):
        if unquote(name) not in part.column_names:
            text = None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
            part = part.append_column(unquote(name), pyarrow.array([text] * len(part), pyarrow.string()))
    return part


def _tidy_columns(frame: pd.DataFrame, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Make the first column the names of rows if it has no name, and drop columns without content of their own.

    Returns
    -------
    The table, and the names of the dropped columns. These are columns without a name that are empty or hold whole
    numbers, such as the row numbers that pandas writes, and columns that repeat another column of the same name.

    Raises
    ------
    ValueError
        If two columns have the same name and different values, or if a column other than the first one has labels or
        features, but no name.
    """
    dropped = []
    if len(frame.columns) and _UNNAMED.fullmatch(frame.columns[0]):
        dropped.append(frame.columns[0])
        frame = frame.iloc[:, 1:].set_axis(frame.iloc[:, 0].astype(str), axis=0).rename_axis(None)
    is_unnamed = frame.columns.str.fullmatch(_UNNAMED.pattern) if len(frame.columns) else np.zeros(0, dtype=bool)
    is_left_out = frame.columns.duplicated() | is_unnamed
    for place in np.flatnonzero(is_left_out):
        column = frame.iloc[:, place]
        if is_unnamed[place]:
            is_last = place == len(frame.columns) - 1
            if not (column.isna().all() or (hold_whole_numbers(column) and not is_last)):
                msg = (
                    f"{path} has no name for a column in its first line, which holds {column.dropna().iloc[0]!r}: "
                    "remove lines above the names of columns, name the column, or delete it."
                )
                raise TableError(msg)
        elif not frame.iloc[:, frame.columns.get_indexer_for([frame.columns[place]])[0]].equals(column):
            msg = (
                f"{path} has two columns named {frame.columns[place]!r} with different values: rename or drop one. "
                f"{_ADVICE_ON_TWO_ROWS}"
            )
            raise TableError(msg)
    dropped += frame.columns[is_left_out].tolist()
    return (frame.loc[:, ~is_left_out] if is_left_out.any() else frame), dropped


def concat_tables(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Put the rows of tables one below the other; a column that some tables lack is missing in their rows.

    Whole numbers stay integers, also if some tables lack their column. pandas alone would convert them to
    floating-point numbers, and different large numbers, such as barcodes, could become equal.
    """
    # pandas would let an empty column of one table decide on the type of the column
    empty = [{name for name in frame.select_dtypes(object) if frame[name].isna().all()} for frame in frames]
    filled = {name for frame, without in zip(frames, empty, strict=True) for name in frame if name not in without}
    frames = [frame.drop(columns=[*(without & filled)]) for frame, without in zip(frames, empty, strict=True)]
    everywhere = set(frames[0]).intersection(*frames)
    nullable = [
        {
            name: "UInt64" if frame[name].dtype.kind == "u" else "Int64"
            for name in frame
            if name not in everywhere and frame[name].dtype.kind in "iu"
        }
        for frame in frames
    ]
    return pd.concat([frame.astype(types) if types else frame for frame, types in zip(frames, nullable, strict=True)])


def hold_whole_numbers(values: pd.Series | pd.Index) -> bool:
    """Return whether all values, stored as numbers or as text, are whole numbers, such as numbers of rows."""
    return bool(values.dtype.kind in "iu" or values.astype(str).str.fullmatch(r"\d+").all())


def settle_types(frame: pd.DataFrame, spelled: Iterable[str]) -> pd.DataFrame:
    """Convert columns of text to numbers or truth values if this changes no spelling.

    Parameters
    ----------
    frame
        Table whose columns have different names.
    spelled
        Columns of text that may be converted. A column is converted if each of its values is equal to the text of a
        number, such as ``12``, ``-0.5`` or ``1e-05``. A column with ``0012`` or ``1.10`` stays text, so that different
        names of plates never become equal. Words for missing values are missing in columns of numbers, and stay text in
        all other columns.
    """
    texts = set(spelled)
    return pd.DataFrame(
        {name: _exact_numbers(values) if name in texts else values for name, values in frame.items()}, frame.index
    )


def _exact_numbers(texts: pd.Series) -> pd.Series | np.ndarray:
    """Convert a column as described for :func:`settle_types`."""
    spellings = pd.unique(texts)
    words = [text for text in spellings if isinstance(text, str) and text.strip().lower() not in MISSING_WORDS]
    is_complete = len(words) == len(spellings)
    if not words:
        return texts.astype(float) if texts.isna().all() else texts
    if is_complete and set(words) <= {"True", "False"}:
        return (texts == "True").to_numpy()
    numbers: dict[str, int | float] = {}
    for word in words:
        try:
            numbers[word] = int(word) if word.lstrip("-").isdecimal() else float(word)
        except ValueError:
            return texts
        if str(numbers[word]) != word or not math.isfinite(numbers[word]):
            return texts
    whole = {number for number in numbers.values() if isinstance(number, int)}
    fractional = {number for number in numbers.values() if isinstance(number, float)}
    # whole numbers become floating-point numbers if other numbers do, or if values are missing
    largest = 2**63 if is_complete and not fractional else 2**53
    if whole & fractional or any(abs(number) >= largest for number in whole):
        return texts
    return np.array([numbers.get(text, np.nan) for text in texts])


def log_columns(where: object, frame: pd.DataFrame, dropped: Sequence[str], n_features: int = 0) -> None:
    """Log how the columns of a table were interpreted."""
    is_number = frame.dtypes.map(pd.api.types.is_numeric_dtype).to_numpy(bool)
    kinds = {"numbers": frame.columns[is_number], "labels": frame.columns[~is_number], "dropped": dropped}
    columns = "; ".join(f"{kind}: {join_first(names, 20)}" for kind, names in kinds.items() if len(names))
    logger.info("%s: %s, %s; %s.", where, format_count(len(frame), "row"), format_count(n_features, "feature"), columns)
