"""Reader of tables with image-based features of cells or wells, which selects features and handles missing values."""

from __future__ import annotations

import logging
import os
import re
import warnings
import zipfile
from collections.abc import Iterable
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype

from scbd._shared.checks import check_choice, format_count, inflect, join_first
from scbd._shared.files import check_plates_distinct, local_path
from scbd._shared.labels import label_text
from scbd._shared.messages import warn_user
from scbd._shared.numeric_tables import is_number_dtype, is_sparse, parse_numbers
from scbd.data._formats import (
    FEATURE_PREFIXES,
    SOURCE_COLUMN,
    describe_reader,
    detect_kind,
    list_tables,
    unique_file_names,
    walk_folders,
)
from scbd.data._hdf5_source import open_h5
from scbd.data._plates_and_wells import (
    check_rows_distinct,
    find_position_columns,
    join_table,
    plain_name,
    plates_of_rows,
)
from scbd.data._storable import storable_column
from scbd.data._tables import (
    Table,
    concat_tables,
    detect_encoding,
    hold_whole_numbers,
    is_table,
    log_columns,
    read_first_rows,
    read_table,
    read_table_file,
    settle_types,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import anndata

logger = logging.getLogger(__name__)

Missing: TypeAlias = Literal["drop", "median", "keep"]

# pattern of the names of numeric columns that are not measurements: positions, identifiers and parents of objects
_NOT_A_MEASUREMENT = re.compile(
    r"(^|_)(location|center|centroid|boundingbox(max|min)imum|bbox|bounds|parent|children|barcodes?|\w*(image|object)_?number|fov"
    r"|tile|id|index)(_|$)|(^|_)[ijxyz](_\d+)?$|^(cell|nucleus|nuclei|object|label)s?(_\d+)?$|^q_",
    re.IGNORECASE,
)
# pattern of the names of numeric columns that label rows, in the form that plain_name returns
_LABEL = re.compile(
    r"(dose|conc(entration)?|time(point)?|batch|fold|split|week|day|(bio|tech)?_?rep(licate)?)(_\w{1,6})?"
)
# Maximum fraction of missing values with which a feature or a row is kept. Features and rows with a larger fraction are
# excluded.
_MAX_MISSING_FRACTION = 0.5
# names of the columns with plate, well and site that are derived from the paths of DeepProfiler's files
_FOLDER_COLUMNS = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")
# endings of tables that are not read from a folder of tables
_UNREAD_TABLES = (".h5ad", ".txt", ".xls", ".xlsx", ".feather", ".rds")
# number of rows at the top of a table that show whether a column of text holds numbers
_N_ROWS_OF_TYPES = 100
# column of obs that holds names of rows if several rows have the same name
_ROW_NAMES = "row_name"


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = FEATURE_PREFIXES,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    on: str | Sequence[str] | None = None,
    missing: Missing = "median",
) -> anndata.AnnData:
    """Read features of cells or wells, as written by pycytominer, CytoTable, DeepProfiler and others.

    A column is a feature if ``features`` names it or its prefix. With the default prefixes, columns whose name
    indicates a position, bounding box, number or parent of an object are not features. All columns that are not
    features become columns of ``obs``. The user guide explains :doc:`how tables are read </user_guide/data>`. Constant
    features are kept; :meth:`~scbd.SCBDModel.setup_anndata` later excludes them with a warning.

    Parameters
    ----------
    path
        One of the following, or a list of several, which are concatenated:

        - ``.parquet``, ``.csv``, ``.tsv`` (also packed, such as ``.csv.gz``): a table with one row per cell or well;
        - a folder of such tables;
        - ``.h5ad`` or ``.zarr``: an AnnData with features in ``X``;
        - ``.npz`` of DeepProfiler, or the folder that contains such files in folders named by plate and well.

        If several files are read and no column names the plate, ``obs["source"]`` holds the name of each row's file.
    features
        Names of features, their prefixes, or ranges of columns: ``"0:63"`` names all columns from ``0`` to ``63``, in
        the order of the table. The name of a column names only this column. Default: all columns of ``X`` in an
        AnnData; in other files, CellProfiler's compartments
        ``Cells_``, ``Cytoplasm_`` and ``Nuclei_``, and ``feature_``, the prefix that features of DeepProfiler get.
    table
        Further columns for ``obs``, such as a plate map: a data frame or a file. None of its columns becomes a feature.
    on
        Columns by which rows of ``table`` are matched to cells or wells. The features at ``path`` and ``table`` must
        both have columns of these names. Default: the plate, well and site columns that both have, whatever their
        naming style (``Metadata_Well``, ``well_position``). A1 and A01 are the same well, 24277 and 24277.0 are the
        same plate.
    missing
        Treatment of missing values. Infinite values, and text in a column of numbers, count as missing. ``"drop"`` and
        ``"median"`` (the default) first exclude, in this order:

        1. rows without any value, for example all rows of a plate that was not measured; then features that have no
           value in one of the remaining plates or files;
        2. rows that lack all features of one of the prefixes in ``features``, for example the row of a nucleus without
           a cell, which lacks all features ``Cells_…`` (a prefix of a single feature is ignored);
        3. features that lack more than half of their values, and then rows that lack more than half of the remaining
           features.

        ``"median"`` then replaces each remaining missing value by the median of its feature. ``"drop"`` excludes all
        rows that still lack a value. ``"keep"`` excludes and replaces nothing, and leaves NaN, which models do not
        accept.

    Returns
    -------
    AnnData with float32 ``X``, cells or wells by features, ready for ``setup_anndata(…, layer="X")``.

    Raises
    ------
    FileNotFoundError
        If files are missing. The message names the first ones.
    KeyError
        If the features at ``path`` or ``table`` lack the columns by which rows are to be matched.
    TypeError
        If at least half of the values of a feature are not numbers, or if ``path`` is not a path.
    ValueError
        If a file is of a kind that this function does not read, is truncated, has no feature, or has two columns with
        the same name and different values. If two files hold the same features, or the same wells or cells, such as raw
        and normalised profiles of one plate. If ``table`` has several rows for one well (or another key), no row for a
        cell or well with features, or a column that ``obs`` has, too, but with different values.

    Warns
    -----
    UserWarning
        If features, rows, empty files or columns that hold lists are excluded, or if missing values are replaced. The
        message states how many, and names plates and files of which all rows are excluded. A warning is also raised if
        most numeric columns are not features, if features that ``features`` names are named like positions, if an entry
        of ``features`` matches no column, or if a folder of tables holds files of other kinds.

    References
    ----------
    Serrano et al. (2025), Reproducible image-based profiling with Pycytominer. Moshkov et al. (2024), Learning
    representations for image-based profiling of perturbations.

    Examples
    --------
    >>> wells = pd.DataFrame({"Metadata_Plate": ["P1", "P1"], "Metadata_Well": ["A01", "A02"], "dose": [1, 10]})
    >>> wells = wells.assign(Cells_AreaShape_Area=[410.0, 392.0], Nuclei_Texture_Contrast_DNA=[0.2, 0.4])
    >>> wells.to_csv("plate_1.csv.gz", index=False)
    >>> profiles = scbd.data.read_profiles("plate_1.csv.gz")
    >>> profiles.shape, list(profiles.obs)
    ((2, 2), ['Metadata_Plate', 'Metadata_Well', 'dose'])
    """
    found = read_table_of_features(path, features=features, table=table, on=on, missing=missing)
    import anndata

    cells = anndata.AnnData(X=found.values, obs=found.obs)
    cells.var_names = found.names
    return cells


class FeatureTable(NamedTuple):
    """Features of cells or wells as an array, and a table of all columns that are not features."""

    values: np.ndarray
    """Values of the F features of N cells or wells, float32 ``(N, F)``."""
    names: np.ndarray
    """Names of the features, ``(F,)``."""
    obs: pd.DataFrame
    """Table of all columns that are not features, with one row per cell or well."""


def read_table_of_features(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = FEATURE_PREFIXES,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    on: str | Sequence[str] | None = None,
    missing: Missing = "median",
) -> FeatureTable:
    """Read features of cells or wells like :func:`read_profiles`, but return an array and a table, not an AnnData.

    The package anndata, whose import takes about a second, is then only imported if a file is an AnnData. Parameters,
    errors and warnings are those of :func:`read_profiles`.
    """
    check_choice("missing", missing, Missing)
    paths = _list_files(path)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {format_count(len(paths) - 1, 'other')}"
    entries = [features] if isinstance(features, str) else list(map(str, features))
    is_default = features is FEATURE_PREFIXES
    messages: list[str] = []
    parts = _read_files(paths, entries, where, messages, is_default=is_default)
    tables = [part.table for part in parts.values()]
    found = concat_tables([one.frame for one in tables])
    if not is_default and (
        unused := [one for one, columns in _named_columns(list(found), entries).items() if not columns]
    ):
        messages.append(f"features=… names columns that no file has ({join_first(unused)}): check the spelling")
    chosen = {name for part in parts.values() for name in part.features}
    names = [name for name in found if name in chosen]
    of_objects = list(dict.fromkeys(name for part in parts.values() for name in part.of_objects))
    if of_objects:
        messages.append(_describe_object_columns(of_objects, is_default=is_default))
    obs = found.drop(columns=names)
    obs = settle_types(obs, [name for name in obs if all(name in one.spelled for one in tables if name in one.frame)])
    if not obs.index.is_unique:  # names of rows that repeat, such as labels, become a column; row numbers do not
        obs = obs.rename_axis(_ROW_NAMES).reset_index(drop=hold_whole_numbers(obs.index) or _ROW_NAMES in obs)
    if is_default and chosen <= {name for name in names if name.startswith(FEATURE_PREFIXES)}:
        messages += _warn_of_other_numbers(obs, names, of_objects)
    obs = _drop_lists(obs, messages)
    lengths = [len(one.frame) for one in tables]
    file_of = np.repeat(np.array(list(map(str, parts)), dtype=object), lengths)
    if len(parts) > 1:
        check_rows_distinct(obs, {one: part.table for one, part in parts.items()})
        if not {"plate", SOURCE_COLUMN} & {*find_position_columns(obs), *obs}:
            short_names = np.array(unique_file_names([*map(str, parts)], set()), dtype=object)
            obs[SOURCE_COLUMN] = np.repeat(short_names, lengths)
    if table is not None:
        obs = join_table(obs, table if isinstance(table, pd.DataFrame) else read_table_file(table), on, where)
    log_columns(where, obs, list(dict.fromkeys(name for one in tables for name in one.dropped)), len(names))
    groups = plates_of_rows(obs, where, len(parts), messages)
    if len(parts) > 1:
        groups["file"] = pd.Series(file_of, obs.index)
    values = _feature_values(found, names, where, messages, {one: part.table for one, part in parts.items()})
    if SOURCE_COLUMN in obs:
        _check_values_distinct(values, list(parts), lengths)
    rows, kept = np.ones(len(values), dtype=bool), np.ones(len(names), dtype=bool)
    if missing != "keep":
        named = _named_columns(names, entries).items()
        blocks = {entry: pd.Index(names).isin(columns) for entry, columns in named if len(columns) > 1}
        rows, kept = _handle_missing(values, pd.Index(names), missing, where, groups, blocks, messages)
    if messages:
        warn_user(f"{where}: {'; '.join(messages)}.")
    return FeatureTable(values[np.ix_(rows, kept)], np.array(names, dtype=object)[kept], _to_storable(obs[rows]))


def _read_files(
    paths: Sequence[Path], entries: Sequence[str], where: str, messages: list[str], *, is_default: bool
) -> dict[Path, _Part]:
    """Read all files that have rows and features, and append a message on the other files to ``messages``.

    Raises
    ------
    ValueError
        If no file has a row, or no file with rows has a feature.
    """
    parts = {path: _read_file(path, entries, is_default=is_default) for path in paths if not _is_empty(path)}
    without_rows = [path for path in paths if path not in parts or not len(parts[path].table.frame)]
    if len(without_rows) == len(paths):
        msg = f"{where} has no row: there is nothing to read."
        raise ValueError(msg)
    without_features = [path for path in parts if path not in without_rows and not parts[path].features]
    if len(without_rows) + len(without_features) == len(paths):
        first = without_features[0]
        raise ValueError(_describe_lack_of_features(first, parts[first].of_objects, entries))
    for lacking, files in (("row", without_rows), ("feature", without_features)):
        if files:
            have = inflect(len(files), "has", "have")
            messages.append(f"{len(files)} of {len(paths)} files {have} no {lacking} ({join_first(files)})")
    return {path: part for path, part in parts.items() if path not in [*without_rows, *without_features]}


def _describe_object_columns(names: Sequence[str], *, is_default: bool) -> str:
    """Return a message on columns that begin like features, and are named like positions of objects."""
    n = len(names)
    columns = inflect(
        n,
        "column named like a position, box or number of an object",
        "columns named like positions, boxes or numbers of objects",
    )
    if is_default:
        return f"{n} {columns} {inflect(n, 'goes', 'go')} to obs ({join_first(names, 20)})"
    return f"{n} {columns} {inflect(n, 'is a feature', 'are features')}, as given ({join_first(names, 20)})"


def _list_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the files from which features are read; a folder of tables is replaced by the tables in it.

    Raises
    ------
    FileNotFoundError
        If a path does not exist.
    ValueError
        If no path is given, or if a path is given twice.
    """
    several = [path] if isinstance(path, (str, os.PathLike)) else path
    if isinstance(several, pd.DataFrame) or not isinstance(several, Iterable):
        msg = f"The path is a {type(path).__name__}: give the name of a file of features, or a list of such names."
        raise TypeError(msg)
    given = list(map(local_path, several))
    if not given:
        msg = "There is no file to read: give at least one."
        raise ValueError(msg)
    absent = [one for one in given if not one.exists()]
    if absent:
        msg = (
            f"{len(absent)} of {len(given)} files {inflect(len(absent), 'is', 'are')} not there ({join_first(absent)})."
        )
        raise FileNotFoundError(msg)
    check_plates_distinct(given)
    files = []
    for one in given:
        tables = list_tables(one)
        names = [name for _, inside in walk_folders(one) for name in inside] if tables != [one] else []
        if others := [name for name in names if name.lower().endswith(_UNREAD_TABLES)]:
            warn_user(
                f"{format_count(len(others), 'file')} in {one} {inflect(len(others), 'is', 'are')} not read "
                f"({join_first(others)}): save all tables as .csv or .parquet, or move other files to another folder."
            )
        files += tables
    return files


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


class _Part(NamedTuple):
    """Content of one file of features."""

    table: Table
    features: list[str]
    of_objects: list[str]
    """Columns that begin like features, and are named like a position, box, number or parent of an object."""


def _read_file(path: Path, entries: Sequence[str], *, is_default: bool) -> _Part:
    """Read a file of features, with one row per cell or well.

    Parameters
    ----------
    path
        File, or folder of an AnnData, of DeepProfiler or of a partitioned table.
    entries
        Names or prefixes of features.
    is_default
        Whether the user named no features. Then, all columns of ``X`` of an AnnData are features, and columns of a
        table that are named like positions of objects are not.
    """
    kind = detect_kind(path)

    def choose_features(names: Sequence[str]) -> tuple[list[str], list[str]]:
        named = set(chain.from_iterable(_named_columns(names, entries).values()))
        by_prefix = named.difference(entries)
        of_objects = [name for name in names if name in by_prefix and _NOT_A_MEASUREMENT.search(name)]
        excluded = set(of_objects) if is_default else set()
        return [name for name in names if name in named and name not in excluded], of_objects

    if kind.name == "anndata":
        table, in_x = _read_anndata_features(path)
        return _Part(table, in_x if is_default else choose_features(list(table.frame))[0], [])
    if kind.name in ("profiles", "image_table", "tables"):
        table = read_table(path, lambda names: choose_features(names)[0])
    elif kind.name == "deepprofiler":
        table = Table(_read_deepprofiler(path), [], [], None)
    else:
        raise ValueError(describe_reader(path, kind))
    return _Part(table, *choose_features(list(table.frame)))


def _named_columns(names: Sequence[str], entries: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns that each entry of ``features`` names.

    An entry is the whole name of a column, a prefix, or the first and the last column, ``"0:63"``.
    """
    places = {name: place for place, name in enumerate(names)}
    named = {}
    for entry in entries:
        first, _, last = entry.partition(":")
        columns = [entry] if entry in places else [name for name in names if name.startswith(entry)]
        if not columns and first in places and last in places:
            columns = list(names[places[first] : places[last] + 1])
        named[entry] = columns
    return named


def _read_anndata_features(path: Path) -> tuple[Table, list[str]]:
    """Read a table of ``obs`` and ``X`` of an AnnData, and the names of the columns of ``X``.

    Row i of ``obs`` belongs to row i of ``X``, whatever the names of rows.
    """
    import anndata

    if path.is_file():
        open_h5(path).close()  # a damaged file raises a clear error here
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Observation|Variable) names are not unique")
        try:
            cells = (anndata.read_zarr if path.is_dir() else anndata.read_h5ad)(path)
        except TypeError as error:  # raised if the file contains other arrays than those of an AnnData
            msg = f"{path} is not an AnnData ({error}): give a table, or write features with AnnData(X=…, obs=…)."
            raise ValueError(msg) from error
    obs = cells.obs.rename(columns=str)
    if cells.X is None:
        msg = f"{path} has no X, which holds the features: write it with AnnData(X=features, obs=…)."
        raise ValueError(msg)
    if repeated := [*cells.var_names[cells.var_names.duplicated()], *cells.var_names.intersection(obs.columns)]:
        msg = (
            f"{path} has several columns of one name in X and obs ({join_first(repeated)}): rename or drop one of each."
        )
        raise ValueError(msg)
    values = pd.DataFrame(cells.X.toarray() if is_sparse(cells.X) else cells.X, columns=cells.var_names)
    frame = pd.concat([obs.reset_index(drop=True), values], axis=1).set_axis(obs.index)
    return Table(frame, [], [], None), cells.var_names.tolist()


def _describe_lack_of_features(path: Path, of_objects: Sequence[str], entries: Sequence[str]) -> str:
    """Return a message about a file without the features that are wanted, with advice on how to name its features."""
    table = read_first_rows(path) if is_table(path) else pd.DataFrame(columns=[])
    proposed = propose_features(table)
    lists = [name for name in table if _holds_lists(table[name])]
    encoding = detect_encoding(path) if path.is_file() else "utf-8"
    read_as = "" if encoding == "utf-8" else f" (read in the encoding {encoding.upper()})"
    return (
        f"{path}{read_as} has no feature, which is a column that begins with {' or '.join(entries)}; it has: "
        f"{join_first(table.columns, 8)}. Name features, or how they begin, with features=…"
        + (f", such as features={proposed[:5]}" if proposed else "")
        + (f"; {join_first(of_objects)} are named like positions or numbers of objects" if of_objects else "")
        + (f". {_advice_on_lists(lists[0])}" if lists else "")
        + "."
    )


def propose_features(first_rows: pd.DataFrame) -> list[str]:
    """Propose values of ``features`` for a table: prefixes of numeric columns, or first and last column of a range.

    A prefix is the first word of the names of three or more numeric columns. A range is proposed in place of a prefix
    that other columns have, too, and if most names do not share their first word, such as names of genes. Columns named
    "Metadata…" or like plates, wells, doses and similar are not proposed. Columns named like positions are only
    proposed if all numeric columns are. The list is empty if columns have CellProfiler's names, because these are taken
    as features by default.
    """
    names = first_rows.columns.tolist()
    if any(name.startswith(FEATURE_PREFIXES) for name in names):
        return []
    positions = find_position_columns(first_rows).values()
    numbers = [
        name
        for name in names
        if _holds_numbers(first_rows[name])
        and not name.lower().startswith("metadata")
        and name not in positions
        and not _LABEL.fullmatch(plain_name(name))
    ]
    numbers = [name for name in numbers if not _NOT_A_MEASUREMENT.search(name)] or numbers
    begun: dict[str, list[str]] = {}
    for name in numbers:
        if word := re.match(r"[A-Za-z]+", name):
            begun.setdefault(word[0], []).append(name)
    groups = dict(
        sorted(((word, some) for word, some in begun.items() if len(some) >= 3), key=lambda one: -len(one[1]))
    )
    if 2 * sum(map(len, groups.values())) < len(numbers):
        groups = {"": numbers}
    # columns that are empty in the first rows may be numeric further down, so their common prefix is still proposed
    is_empty = first_rows.isna().all()
    return [
        part
        for word, some in groups.items()
        for part in (
            [word]
            if word and all(is_empty[name] for name in set(names).difference(some) if name.startswith(word))
            else _ranges(names, some)
        )
    ]


def _holds_numbers(column: pd.Series) -> bool:
    """Return whether a column holds a number, stored as a number or as text, and no other text."""
    numbers, is_text = parse_numbers(column)
    return not is_text.any() and bool(np.isfinite(numbers).any()) and not pd.api.types.is_bool_dtype(column)


def _ranges(names: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return columns as ranges, ``"first:last"``, of columns that follow one another in a table."""
    places = np.flatnonzero(np.isin(names, chosen))
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [names[run[0]] if len(run) == 1 else f"{names[run[0]]}:{names[run[-1]]}" for run in runs]


def _warn_of_other_numbers(obs: pd.DataFrame, features: Sequence[str], of_objects: Sequence[str]) -> list[str]:
    """Return a list with a warning text if most numeric columns are not features; otherwise, an empty list."""
    others = [
        name
        for name in obs.columns.difference([*of_objects], sort=False).astype(str)
        if not name.startswith(("Metadata_", "Image_", *_FOLDER_COLUMNS, "Location_Center_"))
        and _holds_numbers(obs[name].head(_N_ROWS_OF_TYPES))
    ]
    if len(others) <= len(features):
        return []
    are = inflect(len(features), "is a feature", "are features")
    return [
        f"only {len(features)} of {len(features) + len(others)} columns of numbers {are} ({join_first(features, 3)}) "
        f"and the others go to obs ({join_first(others)}): name what features begin with (features=…)"
    ]


def _holds_lists(column: pd.Series) -> bool:
    # this test of the whole column is faster than the test of each value below
    if column.dtype != object or infer_dtype(column, skipna=True) != "mixed":
        return False
    return bool(column.map(lambda value: isinstance(value, (list, tuple, np.ndarray))).any())


def _advice_on_lists(name: str) -> str:
    """Return advice on how to convert a column that holds a list of numbers in each row into feature columns."""
    return (
        f"{name!r} holds a list in each row: make a column of each of its numbers, "
        f"table.join(pandas.DataFrame(table.pop({name!r}).tolist(), table.index).add_prefix('feature_'))"
    )


def _drop_lists(obs: pd.DataFrame, messages: list[str]) -> pd.DataFrame:
    """Drop columns that hold a list in each row from ``obs``, and append a warning per column to ``messages``.

    Lists cannot be labels of cells.
    """
    lists = [name for name in obs if _holds_lists(obs[name])]
    messages += [f"dropped: {_advice_on_lists(name)}" for name in lists]
    return obs.drop(columns=lists)


def _check_values_distinct(values: np.ndarray, paths: Sequence[Path], lengths: Sequence[int]) -> None:
    """Raise ``ValueError`` if two files hold the same features, such as a table saved in two formats."""
    parts = np.split(values, np.cumsum(lengths)[:-1])
    seen: dict[tuple[int, bytes], int] = {}
    for number, part in enumerate(parts):
        first = seen.setdefault((len(part), part[:1].tobytes()), number)
        if first != number and np.isfinite(part).any() and np.array_equal(parts[first], part, equal_nan=True):
            msg = f"{paths[first]} and {paths[number]} hold the same features: give only one of these files."
            raise ValueError(msg)


def _describe_place(row: int, tables: Mapping[Path, Table]) -> str:
    """Return the line of a row in its text file, or its number in another file, with the name of the file."""
    *before, _ = accumulate((len(table.frame) for table in tables.values()), initial=0)
    path, start = next((path, start) for path, start in reversed([*zip(tables, before, strict=True)]) if start <= row)
    lines = tables[path].lines
    place = f"row {row - start}" if lines is None else f"line {lines[row - start]}"
    return f"{place} of {path}" if len(tables) > 1 else place


def _feature_values(
    table: pd.DataFrame, features: list[str], where: str, messages: list[str], tables: Mapping[Path, Table]
) -> np.ndarray:
    """Return the values of the features, float32 ``(N, F)``; missing values, infinite values and text become NaN.

    Raises
    ------
    TypeError
        If at least half of the values of a feature that are not missing are text.
    ValueError
        If text stands in the first row of at least half of the features, and of each such feature only there.
    """
    found, n_first = table[features], 0
    no_numbers: dict[str, str] = {}
    with_text: dict[str, str] = {}
    for place in np.flatnonzero(~found.dtypes.map(is_number_dtype).to_numpy(bool)):
        column = found.iloc[:, place]
        numbers, is_text = parse_numbers(column)
        found.isetitem(place, numbers)
        if not is_text.any():
            continue
        first = int(np.argmax(is_text))
        n_first += first == 0 and is_text.sum() == 1 and np.isfinite(numbers).any()
        is_none = 2 * is_text.sum() >= max(1, len(column) - np.count_nonzero(column.isna()))
        (no_numbers if is_none else with_text)[features[place]] = (
            f"{features[place]} in {format_count(is_text.sum(), 'row')}, such as {column.iloc[first]!r} in "
            f"{_describe_place(first, tables)}"
        )
    if n_first >= max(2, len(features) / 2):
        msg = (
            f"{where} has words in the first row of values, where other rows have numbers: "
            f"{join_first(with_text.values())}. These are units, or the second of two rows of names: remove this row, "
            "or make one row of both, pandas.read_csv(…, header=[0, 1])."
        )
        raise ValueError(msg)
    if no_numbers:
        name = next(iter(no_numbers))
        what = _advice_on_lists(name) if _holds_lists(table[name]) else "name the others with features=…"
        texts = pd.concat([table[one].astype(str) for one in no_numbers])
        if texts.str.fullmatch(r"-?\d[\d.]*(,\d+)+(\.\d+)?").any():
            what = "commas are decimal there, or separate thousands: pandas.read_csv(…, decimal=','), or thousands=','"
        elif texts.str.fullmatch(r"-?[\d.]+\s*%").any():
            what = "remove the percent signs"
        msg = f"{where} has features that hold no numbers ({join_first(no_numbers.values())}): {what}."
        raise TypeError(msg)
    if with_text:
        messages.append(f"text among numbers counts as missing ({join_first(with_text.values())})")
    values = found.to_numpy(np.float32, copy=True, na_value=np.nan)  # copied, because a view may be read-only
    values[~np.isfinite(values)] = np.nan
    return values


def _handle_missing(
    values: np.ndarray,
    features: pd.Index,
    missing: Missing,
    where: str,
    groups: Mapping[str, pd.Series],
    blocks: Mapping[str, np.ndarray],
    messages: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Select the rows (cells or wells) and features to keep, and replace missing values that remain.

    Parameters
    ----------
    values
        Values of the features, ``(N, F)``, with NaN where missing. If ``missing`` is ``"median"``, missing values in
        the rows and features to keep are replaced in place.
    features
        Names of the features.
    missing
        ``"median"`` or ``"drop"``, see :func:`read_profiles`.
    where
        Name of the table in errors.
    groups
        Plate of each row, and file of each row if several files are read, with N values each. A feature that has no
        value in one of the plates or files, of which other features have values, is excluded.
    blocks
        Masks ``(F,)`` of the features of each compartment of the cell, by the prefix of their names. Rows that lack all
        features of a compartment are excluded.
    messages
        List of warning texts, to which descriptions of all changes are appended.

    Returns
    -------
    Masks of the rows ``(N,)`` and of the features ``(F,)`` to keep.

    Raises
    ------
    ValueError
        If no row or no feature remains.
    """
    absent = np.isnan(values)
    rows = np.ones(len(values), dtype=bool)

    def exclude_rows(lacking: np.ndarray, what: str, advice: str = "") -> None:
        nonlocal rows
        lacking = lacking & rows
        if n := int(lacking.sum()):
            rows = rows & ~lacking
            have, are = inflect(n, "has", "have"), inflect(n, "is", "are")
            whole = {kind: pd.Series(rows).groupby(names.to_numpy()).any() for kind, names in groups.items()}
            lost = [f"{kind} {join_first(there.index[~there])}" for kind, there in whole.items() if not there.all()]
            among = f", among them all of {' and of '.join(lost)}" if lost else ""
            messages.append(f"{n:,} of {len(rows):,} rows {have} {what}, and {are} excluded{among}{advice}")

    # rows of a plate that was not measured cost no feature
    exclude_rows(absent.all(axis=1), "no value")
    lacked, lacking_groups = np.zeros(len(features), dtype=bool), []
    # a feature without any value on a plate is excluded, since it would otherwise exclude all rows of the plate
    for kind, names in groups.items():
        for name in names[rows].dropna().unique():
            is_absent = absent[(names == name).to_numpy(bool, na_value=False) & rows].all(axis=0)
            lacking_groups += [f"{kind} {name}"] if (is_absent & ~lacked).any() else []
            lacked |= is_absent
    for entry, block in blocks.items():  # a nucleus without a cell lacks all features of the compartment Cells_
        block = block & ~lacked
        incomplete = absent[:, block].all(axis=1)
        if block.sum() > 1 and not incomplete[rows].all():
            exclude_rows(incomplete, f"no value of {entry}…")
    kept = ~lacked & (absent[rows].mean(axis=0) <= _MAX_MISSING_FRACTION if rows.any() else False)
    if not kept.all() and rows.any():
        are = inflect((~kept).sum(), "is", "are")
        messages.append(
            f"{(~kept).sum()} of {len(features)} features {are} missing in a whole plate or file or in more than "
            f"{_MAX_MISSING_FRACTION:.0%} of the rows, and {are} excluded ({join_first(features[~kept])})"
            + (f": no value in {join_first(lacking_groups)}" if lacking_groups else "")
        )
    holes = absent[:, kept]
    if missing == "drop":
        exclude_rows(holes.any(axis=1), "missing or infinite values", "; missing='median' keeps them")
    elif kept.any():
        exclude_rows(holes.mean(axis=1) > _MAX_MISSING_FRACTION, "less than half of the values")
    if not (kept.any() and rows.any()):
        msg = (
            f"{where}: {'; '.join(messages)}. No row or feature is left: read the table with missing='keep' to inspect "
            "it."
        )
        raise ValueError(msg)
    holes = holes & rows[:, None]
    if holes.any():
        n, n_rows = holes.sum(), holes.any(axis=1).sum()
        messages.append(
            f"{format_count(n, 'missing value')} in {format_count(n_rows, 'row')} {inflect(n, 'is', 'are')} replaced "
            "by the feature's median"
        )
        for column in np.flatnonzero(kept)[holes.any(axis=0)]:
            values[absent[:, column], column] = np.nanmedian(values[rows, column])
    return rows, kept


def _to_storable(obs: pd.DataFrame) -> pd.DataFrame:
    """Convert columns of text, dates and similar to categories of text, and the index to text, as files require."""
    text = {name: obs[name].map(label_text, na_action="ignore") for name in obs if obs[name].dtype.kind == "O"}
    others = {name: storable_column(obs[name], name) for name in obs if name not in text}
    columns = {name: values.astype("category") for name, values in text.items()} | others
    return obs.assign(**columns).set_axis(obs.index.astype(str))


def _read_deepprofiler(path: Path) -> pd.DataFrame:
    """Read features that DeepProfiler wrote, from one file or a folder of files, with one row per cell.

    The columns are the features; the position of the cell, ``Location_Center_X`` and ``Location_Center_Y``, in pixels;
    and plate, well and site, which are taken from the names of folders and files. The array ``metadata`` in the files
    is not read: it is a pickled object, which could run arbitrary code when it is loaded.
    """
    files, root = ([path], path.parent) if path.is_file() else (sorted(path.rglob("*.npz")), path)
    there = [file for file in files if not _is_empty(file)]
    if len(there) < len(files):
        n = len(files) - len(there)
        are = inflect(n, "is empty, and its field is excluded", "are empty, and their fields are excluded")
        msg = f"{path}: {n} of {len(files)} files {are}."
        warn_user(msg)
    tables = [
        table for table in (_read_deepprofiler_field(file, file.relative_to(root)) for file in there) if len(table)
    ]
    if 0 < len(tables) < len(files):
        n = len(files) - len(tables)
        logger.info("%s: %d of %d fields %s no cell.", path, n, len(files), inflect(n, "has", "have"))
    if not tables:
        msg = f"{path}: none of {len(files)} files of DeepProfiler (.npz) has a cell."
        raise ValueError(msg)
    return pd.concat(tables, ignore_index=True)


def _read_deepprofiler_field(file: Path, name: Path) -> pd.DataFrame:
    """Read the features and positions of the cells in one field of view, from one file of DeepProfiler."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            features = archive["features"]
            locations = archive["locations"] if "locations" in archive.files else np.empty((len(features), 0))
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        msg = f"{file} cannot be read as features of DeepProfiler ({error}): it is truncated, or foreign."
        raise ValueError(msg) from error
    if features.ndim != 2 or len(locations) != len(features):
        msg = f"{file} has features {features.shape} and locations {locations.shape}: both must have one row per cell."
        raise ValueError(msg)
    table = pd.DataFrame(features).add_prefix("feature_")
    if locations.shape[1] >= 2:
        table = table.assign(Location_Center_X=locations[:, 0], Location_Center_Y=locations[:, 1])
    # path of a file: DeepProfiler writes plate/well/site.npz, earlier versions wrote plate/well_site.npz
    parts = [*name.parent.parts, *([name.stem] if len(name.parts) > 2 else name.stem.rsplit("_", 1))]
    folders = dict(zip(_FOLDER_COLUMNS, parts[-3:], strict=True)) if len(parts) >= 3 else {}
    return table.assign(Metadata_File=name.as_posix(), **folders)
