"""Reader of tables with image-based features of cells or wells, which selects features and handles missing values."""

from __future__ import annotations

import logging
import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype

from scbd._shared.checks import check_choice, format_count, inflect, join_first
from scbd._shared.files import check_plates_distinct, local_path
from scbd._shared.labels import label_text
from scbd._shared.messages import warn_user
from scbd._shared.numeric_tables import is_number_dtype, parse_numbers
from scbd.data._formats import (
    SOURCE_COLUMN,
    describe_reader,
    detect_kind,
    list_tables,
    read_table_file,
    unique_file_names,
)
from scbd.data._hdf5_source import open_h5

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import anndata

logger = logging.getLogger(__name__)

Missing: TypeAlias = Literal["drop", "median", "keep"]

# Default prefixes of the names of feature columns. "Cells_", "Cytoplasm_" and "Nuclei_" are the compartments of
# CellProfiler. "feature_" is the prefix that this package adds to the numbered features of DeepProfiler.
FEATURE_PREFIXES = ("Cells_", "Cytoplasm_", "Nuclei_", "feature_")
# Pattern of the prefixes, such as "Metadata_", that names of plate, well and site columns may have. The prefix "foci_"
# stands for the barcode spots of pooled screens.
_COLUMN_PREFIX = r"^(image_)?(metadata_)?(foci_)?"
_PLATE = re.compile(rf"{_COLUMN_PREFIX}plate$", re.IGNORECASE)
# pattern of the names of numeric columns that are not measurements: positions, identifiers and parents of objects
_NOT_A_MEASUREMENT = re.compile(
    r"(^|_)(location|center|centroid|boundingbox(max|min)imum|bbox|bounds|parent|children|barcodes?|\w*(image|object)_?number|fov"
    r"|tile|id|index)(_|$)|(^|_)[ijxyz](_\d+)?$|^(cell|nucleus|nuclei|object|label)s?(_\d+)?$|^q_",
    re.IGNORECASE,
)
# Accepted names of the columns with plate, well and site, in lower case and without the prefixes in _COLUMN_PREFIX. If
# a table has several plate columns, for example, the column whose name stands first in this list is used.
_POSITION_COLUMNS = {
    "plate": ("plate", "plate_id", "plate_name", "plate_barcode", "assay_plate_barcode", "barcode"),
    "well": ("well", "well_id", "well_name", "well_position"),
    "site": ("site", "field", "fov"),
}
_WELL = re.compile(r"^([A-Za-z]{1,2})[ -]*0*(\d+)$")
_ROW_NUMBERS = re.compile(r"^Unnamed: \d+$")
# Maximum fraction of missing values with which a feature or a row is kept. Features and rows with a larger fraction are
# excluded.
_MAX_MISSING_FRACTION = 0.5
# names of the columns with plate, well and site that are derived from the paths of DeepProfiler's files
_FOLDER_COLUMNS = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = FEATURE_PREFIXES,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    on: str | Sequence[str] | None = None,
    missing: Missing = "median",
) -> anndata.AnnData:
    """Read features of cells or wells, as written by pycytominer, CytoTable, DeepProfiler and others.

    A column is a feature if its name begins with one of the prefixes in ``features``. Columns whose name indicates a
    position, bounding box, number or parent of an object are not features. All columns that are not features become
    columns of ``obs``. Constant features are kept; :meth:`~scbd.SCBDModel.setup_anndata` later excludes them with a
    warning.

    Parameters
    ----------
    path
        One of the following, or a list of several, which are concatenated:

        - ``.parquet``, ``.csv``, ``.tsv`` (also ``.csv.gz``, ``.tsv.gz``): a table with one row per cell or well;
        - a folder of such tables;
        - ``.h5ad`` or ``.zarr``: an AnnData with features in ``X``;
        - ``.npz`` of DeepProfiler, or the folder that contains such files in folders named by plate and well.

        If several files are read and no column names the plate, ``obs["source"]`` holds the name of each row's file.
    features
        Prefixes of the names of features, or whole names. Default: CellProfiler's compartments ``Cells_``,
        ``Cytoplasm_`` and ``Nuclei_``, and ``feature_``, the prefix that features of DeepProfiler get.
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

        1. features that have no value in a whole plate or file;
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
        If at least half of the values of a feature are not numbers.
    ValueError
        If a file is of a kind that this function does not read, is truncated, has no feature, or has two columns with
        the same name. If ``table`` has several rows for one well (or another key), no row for a cell or well with
        features, or a column that ``obs`` has, too, but with different values.

    Warns
    -----
    UserWarning
        If features, rows, empty files or columns that hold lists are excluded, or if missing values are replaced. The
        message states how many, and names plates and files of which all rows are excluded. A warning is also raised if
        most numeric columns are not features.

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
    read = {one: _read_file(one) for one in paths if not _is_empty(one)}
    without = [one for one in paths if one not in read or read[one][0].empty]
    if len(without) == len(paths):
        msg = f"{where} has no row: there is nothing to read."
        raise ValueError(msg)
    have = inflect(len(without), "has", "have")
    said = [f"{len(without)} of {len(paths)} files {have} no row ({join_first(without)})"] if without else []
    read = {one: part for one, part in read.items() if one not in without}
    found = pd.concat([frame for frame, _ in read.values()], ignore_index=len(read) > 1)
    beginnings = (features,) if isinstance(features, str) else tuple(features)
    known = {name for _, names in read.values() for name in names}
    names, about = _select_features(found, beginnings, known, where)
    if about:
        columns = inflect(
            len(about),
            "column named like a position, box or number of an object goes",
            "columns named like positions, boxes or numbers of objects go",
        )
        said.append(f"{len(about)} {columns} to obs ({join_first(about)})")
    obs = found.drop(columns=names)
    if features is FEATURE_PREFIXES and not known:
        said += _warn_of_other_numbers(obs, names, about)
    obs = _drop_lists(obs, said)
    lengths = [len(frame) for frame, _ in read.values()]
    if len(read) > 1 and not {"plate", SOURCE_COLUMN} & {*_position_columns(obs), *obs}:
        obs[SOURCE_COLUMN] = np.repeat(np.array(unique_file_names([*map(str, read)], set()), dtype=object), lengths)
    if table is not None:
        obs = _join_table(obs, table if isinstance(table, pd.DataFrame) else read_table_file(table), on, where)
    logger.info("%s: %d features; in obs: %s.", where, len(names), join_first(obs.columns, 20))
    groups = {str(column): obs[column].to_numpy() for column in obs if _PLATE.search(str(column))}
    if len(read) > 1:
        groups["file"] = np.repeat(np.array(list(map(str, read)), dtype=object), lengths)
    values = _feature_values(found, names, where, said)
    rows, kept = np.ones(len(values), dtype=bool), np.ones(len(names), dtype=bool)
    if missing != "keep":
        rows, kept = _handle_missing(values, pd.Index(names), missing, where, groups, beginnings, said)
    if said:
        warn_user(f"{where}: {'; '.join(said)}.")
    return FeatureTable(values[np.ix_(rows, kept)], np.array(names, dtype=object)[kept], _to_storable(obs[rows]))


def _list_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the files from which features are read; a folder of tables is replaced by the tables in it.

    Raises
    ------
    FileNotFoundError
        If a path does not exist.
    ValueError
        If no path is given, or if a path is given twice.
    """
    given = [local_path(one) for one in ([path] if isinstance(path, (str, os.PathLike)) else path)]
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
    return [file for one in given for file in list_tables(one)]


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def _read_file(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read a file of features into a table with one row per cell or well.

    Returns
    -------
    The table, and the names of columns that are features whatever their prefix (the columns of ``X``, if the file is an
    AnnData).
    """
    kind = detect_kind(path)
    if kind.name in ("profiles", "image_table", "tables"):
        table = _drop_row_numbers(read_table_file(path).rename(columns=str))
        # a named index holds data, and its levels become columns; an index without a name only names the rows
        return (table if table.index.names == [None] else table.reset_index(allow_duplicates=True)), []
    if kind.name == "anndata":
        import anndata

        if path.is_file():
            open_h5(path).close()  # a damaged file raises a clear error here
        cells = (anndata.read_zarr if path.is_dir() else anndata.read_h5ad)(path)
        return cells.obs.join(cells.to_df()), cells.var_names.tolist()
    if kind.name == "deepprofiler":
        return _read_deepprofiler(path), []
    raise ValueError(describe_reader(path, kind))


def _select_features(
    table: pd.DataFrame, beginnings: tuple[str, ...], known: set[str], where: str
) -> tuple[list[str], list[str]]:
    """Select the columns of a table that are features.

    Parameters
    ----------
    table
        Table with one row per cell or well.
    beginnings
        Prefixes of the names of features.
    known
        Names of columns that are features whatever their prefix.
    where
        Name of the table in errors.

    Returns
    -------
    Names of the features; and names of the columns that have the prefix of a feature but are not features, because
    their name indicates a position, box, number or parent of an object.

    Raises
    ------
    ValueError
        If no column is a feature, or if two columns have the same name.
    """
    if not table.columns.is_unique:
        msg = (
            f"{where} has columns whose name is there twice ({join_first(table.columns[table.columns.duplicated()])})."
        )
        raise ValueError(msg)
    begun = [name for name in table if name in known or str(name).startswith(beginnings)]
    about = [name for name in begun if name not in (*known, *beginnings) and _NOT_A_MEASUREMENT.search(str(name))]
    features = [name for name in begun if name not in set(about)]
    if not features:
        numbers = [f"{start!r} ({len(names)})" for start, names in number_beginnings(table).items()]
        lists = [name for name in table if _holds_lists(table[name])]
        msg = (
            f"{where} has no feature, which is a column that begins with {' or '.join(beginnings)}; it has: "
            f"{join_first(table.columns, 8)}. Name features, or how they begin, with features=…"
            + (f"; most numbers begin with {join_first(numbers)}" if numbers else "")
            + (f". {_advice_on_lists(lists[0])}" if lists else "")
            + "."
        )
        raise ValueError(msg)
    return features, about


def number_beginnings(table: pd.DataFrame) -> dict[str, list[str]]:
    """Group the numeric columns of a table by the first word of their name, and return groups of three or more columns.

    Columns whose name indicates a position, bounding box, number or parent of an object are ignored, as are columns
    whose name begins with "Metadata".

    Returns
    -------
    Dictionary from the first word to the names of the columns, sorted from the largest to the smallest group.
    """
    numbers = [name for name in map(str, table.select_dtypes("number")) if not _NOT_A_MEASUREMENT.search(name)]
    begun: dict[str, list[str]] = {}
    for name in numbers:
        if (word := re.match(r"[A-Za-z]+", name)) and word[0].lower() != "metadata":
            begun.setdefault(word[0], []).append(name)
    several = {word: names for word, names in begun.items() if len(names) >= 3}
    return dict(sorted(several.items(), key=lambda item: -len(item[1])))


def _warn_of_other_numbers(obs: pd.DataFrame, features: Sequence[str], about: Sequence[str]) -> list[str]:
    """Return a list with a warning text if most numeric columns are not features; otherwise, an empty list."""
    numbers = obs.select_dtypes("number").columns.difference(about, sort=False).astype(str)
    others = [
        name for name in numbers if not name.startswith(("Metadata_", "Image_", *_FOLDER_COLUMNS, "Location_Center_"))
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


def _drop_lists(obs: pd.DataFrame, said: list[str]) -> pd.DataFrame:
    """Drop columns that hold a list in each row from ``obs``, and append a warning per column to ``said``.

    Lists cannot be labels of cells.
    """
    lists = [name for name in obs if _holds_lists(obs[name])]
    said += [f"dropped: {_advice_on_lists(name)}" for name in lists]
    return obs.drop(columns=lists)


def _drop_row_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Drop a column without a name that holds the row numbers of a table.

    ``DataFrame.to_csv`` writes such a column (``Unnamed: 0``) if the index of the table has no name.
    """
    numbers = [name for name in table if _ROW_NUMBERS.match(name) and table[name].dtype.kind in "iu"]
    return table.drop(columns=numbers)


def _feature_values(table: pd.DataFrame, features: list[str], where: str, said: list[str]) -> np.ndarray:
    """Return the values of the features, float32 ``(N, F)``; missing values, infinite values and text become NaN.

    Raises
    ------
    TypeError
        If at least half of the values of a feature that are not missing are text.
    """
    found, no_numbers, with_text = table[features], [], []
    for place, name in enumerate(features):
        if is_number_dtype(table[name].dtype):
            continue
        numbers, text = parse_numbers(table[name])
        found.isetitem(place, numbers)
        if 2 * text.sum() >= max(1, len(text) - np.count_nonzero(table[name].isna())):
            no_numbers.append(name)
        elif text.any():
            with_text.append(f"{name} in {format_count(text.sum(), 'row')}, such as {table[name][text].iloc[0]!r}")
    if no_numbers:
        first = table[no_numbers[0]]
        what = _advice_on_lists(no_numbers[0]) if _holds_lists(first) else "name the others with features=…"
        if first.astype(str).str.fullmatch(r"-?\d+,\d+").any():
            what = "commas are decimal there, pandas.read_csv(…, decimal=',')"
        msg = f"{where} has features that are no numbers ({join_first(sorted(no_numbers))}): {what}."
        raise TypeError(msg)
    if with_text:
        said.append(f"text among numbers counts as missing ({join_first(sorted(with_text))})")
    values = found.to_numpy(np.float32, copy=True, na_value=np.nan)  # copied, because a view may be read-only
    values[~np.isfinite(values)] = np.nan
    return values


def _handle_missing(
    values: np.ndarray,
    features: pd.Index,
    missing: Missing,
    where: str,
    groups: Mapping[str, np.ndarray],
    beginnings: tuple[str, ...],
    said: list[str],
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
        Plate of each row, and file of each row if several files are read, as one array ``(N,)`` each. A feature that
        has no value in one of the plates or files is excluded.
    beginnings
        Prefixes of the names of features, one per compartment of the cell. Rows that lack all features of a compartment
        are excluded.
    said
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
    lacked = np.zeros(len(features), dtype=bool)
    # a feature without any value on a plate is excluded, since it would otherwise exclude all rows of the plate
    for names in groups.values():
        for name in pd.unique(names):
            lacked |= absent[names == name].all(axis=0)
    rows = np.ones(len(values), dtype=bool)
    for beginning in beginnings:  # a nucleus without a cell lacks all features of the compartment Cells_
        block = features.str.startswith(beginning) & ~lacked
        incomplete = absent[:, block].all(axis=1) & rows
        if block.sum() > 1 and incomplete.any() and not incomplete.all():
            rows &= ~incomplete
            n = incomplete.sum()
            have, are = inflect(n, "has", "have"), inflect(n, "is", "are")
            said.append(f"{n:,} of {len(rows):,} rows {have} no value of {beginning}…, and {are} excluded")
    kept = ~lacked & (absent[rows].mean(axis=0) <= _MAX_MISSING_FRACTION)
    if not kept.all():
        are = inflect((~kept).sum(), "is", "are")
        said.append(
            f"{(~kept).sum()} of {len(features)} features {are} missing in a whole plate or file or in more than "
            f"{_MAX_MISSING_FRACTION:.0%} of the rows, and {are} excluded ({join_first(features[~kept])})"
        )
    holes = absent[:, kept]
    lacking = (
        holes.any(axis=1) if missing == "drop" else holes.mean(axis=1) > _MAX_MISSING_FRACTION if kept.any() else ~rows
    )
    if (rows & lacking).any():
        left = rows & ~lacking
        whole = {kind: pd.Series(left).groupby(names).any() for kind, names in groups.items()}
        lost = [f"{kind} {join_first(there.index[~there])}" for kind, there in whole.items() if not there.all()]
        n = (rows & lacking).sum()
        said.append(
            f"{n:,} of {len(rows):,} rows {inflect(n, 'has', 'have')} "
            + ("missing or infinite values" if missing == "drop" else "less than half of the values")
            + f", and {inflect(n, 'is', 'are')} excluded"
            + (f", among them all of {' and of '.join(lost)}" if lost else "")
            + ("; missing='median' keeps them" if missing == "drop" else "")
        )
        rows = left
    if not (kept.any() and rows.any()):
        msg = (
            f"{where}: {'; '.join(said)}. No row or feature is left: read the table with missing='keep' to inspect it."
        )
        raise ValueError(msg)
    holes = holes & rows[:, None]
    if holes.any():
        n, n_rows = holes.sum(), holes.any(axis=1).sum()
        said.append(
            f"{format_count(n, 'missing value')} in {format_count(n_rows, 'row')} {inflect(n, 'is', 'are')} replaced "
            "by the feature's median"
        )
        for column in np.flatnonzero(kept)[holes.any(axis=0)]:
            values[absent[:, column], column] = np.nanmedian(values[rows, column])
    return rows, kept


def _to_storable(obs: pd.DataFrame) -> pd.DataFrame:
    """Convert text columns of a table to categories and its index to text, so that any file format can store them."""
    text = [column for column in obs if obs[column].dtype.kind == "O"]
    obs = obs.assign(**{column: obs[column].map(str, na_action="ignore").astype("category") for column in text})
    return obs.set_axis(obs.index.astype(str))


def _join_table(obs: pd.DataFrame, table: pd.DataFrame, on: str | Sequence[str] | None, where: str) -> pd.DataFrame:
    """Add the columns of ``table``, such as a plate map, to ``obs``.

    Rows are matched by the columns ``on``, or by plate, well and site if ``on`` is `None`.

    Raises
    ------
    KeyError
        If ``obs`` and ``table`` have no common columns by which rows can be matched.
    ValueError
        If several rows of ``table`` have the same key, if a row of ``obs`` matches no row of ``table``, or if both
        tables have a column of the same name with different values.
    """
    table = _drop_row_numbers(table.rename(columns=str))
    keys = _join_columns(obs, table, on, where)
    names = ", ".join(keys.values())
    left, right = (
        pd.DataFrame({one: _normalised_text(frame[name]) for one, name in zip(keys, own, strict=True)})
        for frame, own in ((obs, keys), (table, keys.values()))
    )
    if right.duplicated().any():
        first = _row_text(table[list(keys.values())], right.duplicated())
        msg = f"The table has several rows for one {names} (such as {first}): keep one of each, or name more with on=…."
        raise ValueError(msg)
    rows = left.merge(right.assign(row=range(len(right))), how="left", on=list(keys))["row"]
    if rows.isna().any():
        first, there = (
            _row_text(obs[list(keys)], rows.isna()),
            _row_text(table[list(keys.values())], [True] * len(table)),
        )
        msg = (
            f"{rows.isna().sum():,} of {len(rows):,} rows of {where} are not in the table: of {names} it has no "
            f"{first} (but {there}, …)."
        )
        raise ValueError(msg)
    new = table.drop(columns=list(keys.values())).iloc[rows.astype(int)].set_axis(obs.index)
    both = [name for name in new if name in obs]
    if clash := [name for name in both if not _normalised_text(obs[name]).equals(_normalised_text(new[name]))]:
        msg = (
            f"{where} and the table have different values of {join_first(clash)}: drop it in one of them, or rename it."
        )
        raise ValueError(msg)
    return pd.concat([obs, new.drop(columns=both)], axis=1)


def _row_text(rows: pd.DataFrame, chosen: Sequence[bool] | pd.Series) -> str:
    """Return the values of the first row that ``chosen`` marks, joined by blanks, for a message."""
    return " ".join(rows[np.asarray(chosen)].iloc[0].astype(str))


def _join_columns(obs: pd.DataFrame, table: pd.DataFrame, on: str | Sequence[str] | None, where: str) -> dict[str, str]:
    """Return the columns by which rows of ``obs`` and ``table`` are matched.

    The keys of the dictionary are names of columns in ``obs``; the values are their names in ``table``.

    Raises
    ------
    KeyError
        If a column of ``on`` is missing in ``obs`` or ``table``, or, without ``on``, if they have no common plate, well
        or site column.
    """
    if on is not None:
        keys = {name: name for name in ([on] if isinstance(on, str) else on)}
        absent = [name for name in keys if name not in obs or name not in table]
    else:
        meant, theirs = _position_columns(obs), _position_columns(table)
        keys = {meant[key]: theirs[key] for key in meant if key in theirs}
        absent = [] if keys else ["column of plates, wells or sites"]
    if absent:
        msg = (
            f"{where} and the table share no {absent[0]} ({join_first(obs.columns, 8)}; "
            f"{join_first(table.columns, 8)}): give columns with the same meaning the same name, and list them in on=…."
        )
        raise KeyError(msg)
    return keys


def _position_columns(table: pd.DataFrame) -> dict[str, str]:
    """Return the names of the plate, well and site columns of a table, by the keys "plate", "well" and "site".

    If the table lacks one of these columns, the dictionary lacks its key.
    """
    plain = {re.sub(_COLUMN_PREFIX, "", re.sub(r"\W", "_", str(name).lower())): name for name in table}
    found = {key: [plain[name] for name in names if name in plain] for key, names in _POSITION_COLUMNS.items()}
    return {key: names[0] for key, names in found.items() if names}


def _normalised_text(values: pd.Series) -> pd.Series:
    """Return values, such as names of wells, as text in one spelling: A01 becomes A1, and 24277.0 becomes 24277."""

    def plain(value: Any) -> str:
        text = label_text(value).strip()
        text = re.sub(r"^(\d+)\.0+$", r"\1", text)
        well = _WELL.match(text)
        return f"{well[1].upper()}{int(well[2])}" if well else text

    values = values.astype(object)
    return values.map({value: plain(value) for value in pd.unique(values)})


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
