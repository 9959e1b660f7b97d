"""Plates, wells and sites of the rows of tables: find their columns, join plate maps, and detect repeated wells."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import format_count, inflect, join_first
from scbd._shared.labels import label_text
from scbd._shared.numeric_tables import parse_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from scbd.data._tables import Table

# Pattern of the prefixes, such as "Metadata_", that names of plate, well and site columns may have. The prefix "foci_"
# stands for the barcode spots of pooled screens.
_COLUMN_PREFIX = r"^(image_)?(metadata_)?(foci_)?"
# Accepted names of the columns with plate, well and site, in lower case, without the prefixes in _COLUMN_PREFIX, and
# without underscores and other signs. If a table has several plate columns, for example, the column whose name stands
# first in this list is used.
_POSITION_COLUMNS = {
    "plate": ("plate", "plateid", "platename", "platebarcode", "assayplatebarcode", "barcode"),
    "well": ("well", "wellid", "wellname", "wellposition"),
    "site": ("site", "field", "fov"),
}
# minimum fraction of the wells of two tables of cells that must hold equally many cells, for the tables to be taken as
# two versions of one table, such as raw and normalised
_MIN_FRACTION_OF_EQUAL_WELLS = 0.9
# name of a well, which may be spelled in several ways
_WELL = re.compile(r"^([A-Za-z]{1,2})[ -]*0*(\d+)$")


def find_position_columns(table: pd.DataFrame) -> dict[str, str]:
    """Return the names of the plate, well and site columns of a table, by the keys "plate", "well" and "site".

    If the table lacks one of these columns, the dictionary lacks its key.
    """
    plain = {_compact_name(name): name for name in table}
    found = {key: [plain[name] for name in names if name in plain] for key, names in _POSITION_COLUMNS.items()}
    return {key: names[0] for key, names in found.items() if names}


def plain_name(name: object) -> str:
    """Return the name of a column in lower case, without a prefix such as "Metadata_"."""
    return re.sub(_COLUMN_PREFIX, "", re.sub(r"\W", "_", str(name).lower()))


def _compact_name(name: object) -> str:
    """Return the name of a column in the form of the names in ``_POSITION_COLUMNS``."""
    return plain_name(name).replace("_", "")


def plates_of_rows(obs: pd.DataFrame, where: str, n_files: int, messages: list[str]) -> dict[str, pd.Series]:
    """Return the columns of plates, and append a message on each plate column with missing values to ``messages``.

    Raises
    ------
    ValueError
        If some files have a column of plates of one name, and other files have one of another name.
    """
    # a column "barcode" is excluded, because it may hold the barcodes of cells in a pooled screen
    accepted = set(_POSITION_COLUMNS["plate"]) - {"barcode"}
    plates = {column: obs[column] for column in obs if _compact_name(column) in accepted}
    # a column that has another name in some files has no values in these files
    in_part = [column for column, values in plates.items() if values.isna().any()]
    if n_files > 1 and len(in_part) > 1 and obs[in_part].notna().sum(axis=1).max() <= 1:
        msg = (
            f"{where} have different names for the column of plates ({join_first(in_part)}): give the column the same "
            "name in all files, with table.rename(columns=…)."
        )
        raise ValueError(msg)
    for column in in_part:
        n = plates[column].isna().sum()
        messages.append(f"{format_count(n, 'row')} {inflect(n, 'has', 'have')} no {column}")
    return plates


def join_table(obs: pd.DataFrame, table: pd.DataFrame, on: str | Sequence[str] | None, where: str) -> pd.DataFrame:
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
    table = table.rename(columns=str)
    if on is None:  # a template may have an empty column of plates
        table = table.drop(columns=[name for name in find_position_columns(table).values() if table[name].isna().all()])
    keys = _join_columns(obs, table, on, where)
    names = ", ".join(keys.values())
    table = table.dropna(subset=[*keys.values()])  # rows without a key belong to no cell or well
    if not len(table):
        msg = f"The table has no row with a value in {names}, by which it is joined: fill these columns in."
        raise ValueError(msg)
    left, right = (
        pd.DataFrame(
            {one: _normalised_text(frame[name], are_wells=_is_well(one)) for one, name in zip(keys, own, strict=True)}
        )
        for frame, own in ((obs, keys), (table, keys.values()))
    )
    if right.duplicated().any():
        first = _row_text(table[list(keys.values())], right.duplicated())
        msg = (
            f"The table has several rows for one {names} (such as {first}): keep one row of each, or list more columns "
            "in on=…."
        )
        raise ValueError(msg)
    rows = left.merge(right.assign(row=range(len(right))), how="left", on=list(keys))["row"]
    if rows.isna().any():
        first, there = (
            _row_text(obs[list(keys)], rows.isna()),
            _row_text(table[list(keys.values())], [True] * len(table)),
        )
        msg = (
            f"{rows.isna().sum():,} of {len(rows):,} rows of {where} have no match in the table, such as {names} = "
            f"{first} (the first row of the table has {there}): add the missing rows, or correct the spelling."
        )
        raise ValueError(msg)
    new = table.drop(columns=list(keys.values())).iloc[rows.astype(int)].set_axis(obs.index)
    both = [name for name in new if name in obs]
    texts = {name: [_normalised_text(one[name], are_wells=_is_well(name)) for one in (obs, new)] for name in both}
    if clash := [name for name, (one, other) in texts.items() if not one.equals(other)]:
        msg = (
            f"{where} and the table have different values of {join_first(clash)}: drop or rename these columns in one "
            "of them."
        )
        raise ValueError(msg)
    return pd.concat([obs, new.drop(columns=both)], axis=1)


def _is_well(column: str) -> bool:
    return "well" in plain_name(column)


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
        meant, theirs = find_position_columns(obs), find_position_columns(table)
        keys = {meant[key]: theirs[key] for key in meant if key in theirs}
        absent = [] if keys else ["column of plates, wells or sites"]
    if absent:
        msg = (
            f"{where} and the table share no {absent[0]} ({join_first(obs.columns, 8)}; "
            f"{join_first(table.columns, 8)}): give columns with the same meaning the same name, and list them in on=…."
        )
        raise KeyError(msg)
    return keys


def check_rows_distinct(obs: pd.DataFrame, tables: Mapping[Path, Table]) -> None:
    """Raise ``ValueError`` if two files hold the same wells or cells, such as raw and normalised profiles of a plate.

    Files are compared if they have a plate column, and the same of the columns well and site. Two rows are equal if
    they agree in these columns and in all labels that all compared files have. A column of fractional numbers is a
    label if it is constant in each file, such as a time. Parts of one table of cells are accepted, because their
    numbers of cells in a shared well differ.
    """
    paths, lengths = list(map(str, tables)), [len(table.frame) for table in tables.values()]
    file_of = np.repeat(np.arange(len(paths)), lengths)
    by_columns: dict[tuple[str, ...], list[int]] = {}
    for number, table in enumerate(tables.values()):
        columns = table.frame.columns
        by_columns.setdefault(tuple(columns[columns.isin(obs.columns)]), []).append(number)
    positions = {columns: find_position_columns(pd.DataFrame(columns=columns)) for columns in by_columns}
    for kinds in {tuple(found) for found in positions.values() if "plate" in found}:
        comparable = [columns for columns, found in positions.items() if tuple(found) == kinds]
        is_compared = np.isin(file_of, [number for columns in comparable for number in by_columns[columns]])
        rows, files = obs[is_compared], file_of[is_compared]
        names_of = {kind: {positions[columns][kind] for columns in comparable} for kind in kinds}
        keys: dict[str, pd.Series] = {}
        for kind, names in names_of.items():
            # a column that has another name in some files has no values in these files
            values = pd.Series(None, rows.index, dtype=object)
            for name in names:
                values = values.where(values.notna(), rows[name].astype(object))
            keys[kind] = _normalised_text(values, are_wells=kind == "well")
        for name in set.intersection(*map(set, comparable)).difference(*names_of.values()):
            if not _is_quantity(rows[name]):
                keys[name] = _normalised_text(rows[name], are_wells=False)
            elif rows[name].groupby(files).nunique().max() <= 1:
                keys[name] = pd.Series(parse_numbers(rows[name])[0], rows.index)
        if len(keys) > 1:  # the plate alone does not identify wells
            codes = pd.DataFrame({name: pd.factorize(values)[0] for name, values in keys.items()})
            _check_rows_shared(codes.groupby(list(codes), sort=False).ngroup().to_numpy(), files, paths)


def _is_quantity(values: pd.Series) -> bool:
    """Return whether a column, such as a dose, holds numbers that are not all whole."""
    numbers, is_text = parse_numbers(pd.Series(values.unique()))
    return not is_text.any() and bool((numbers[np.isfinite(numbers)] % 1 != 0).any())


def _check_rows_shared(row: np.ndarray, file_of: np.ndarray, paths: Sequence[str]) -> None:
    """Raise ``ValueError`` if two files share most of their rows.

    A file of profiles holds each row once. It shares a row with any file that holds the row, also several times, as a
    table of cells does. Two tables of cells share a row if both hold it equally often.

    Parameters
    ----------
    row
        Number of each row, which is equal for equal rows.
    file_of
        Number of the file of each row, which is the place of its name in ``paths``.
    """
    counts = pd.DataFrame({"file": file_of, "row": row}).value_counts(sort=False).rename("n").reset_index()
    files = counts["file"].to_numpy()
    size = np.bincount(files, minlength=len(paths))
    is_profile = np.bincount(files, weights=counts["n"] > 1, minlength=len(paths)) == 0
    in_common = _count_common(files, counts["row"].to_numpy())
    equally_often = _count_common(files, counts.groupby(["row", "n"]).ngroup().to_numpy())
    for (one, other), n_common in in_common.items():
        of_cells = not (is_profile[one] or is_profile[other])
        n_shared = equally_often.get((one, other), 0) if of_cells else n_common
        sizes = sorted(size[[one, other]])
        if n_shared >= _MIN_FRACTION_OF_EQUAL_WELLS * sizes[1] if of_cells else 2 * n_shared > sizes[0]:
            msg = (
                f"{paths[one]} and {paths[other]} hold the same wells or cells ({format_count(n_shared, 'row')}), "
                "perhaps raw and normalised, and each would count as a replicate. Give only one of these files; if the "
                "rows are different measurements, add a column that distinguishes them."
            )
            raise ValueError(msg)


def _count_common(files: np.ndarray, codes: np.ndarray) -> dict[tuple[int, int], int]:
    """Return the number of codes that two files have in common, for each pair of files that share a code."""
    has_code = sparse.csr_array((np.ones(len(files), dtype=np.int64), (files, codes)))
    common = sparse.triu(has_code @ has_code.T, k=1).tocoo()
    return dict(zip(zip(common.row.tolist(), common.col.tolist(), strict=True), common.data.tolist(), strict=True))


def _normalised_text(values: pd.Series, *, are_wells: bool) -> pd.Series:
    """Return values as text in one spelling: 24277.0 becomes 24277 and, if they are names of wells, A01 becomes A1."""

    def plain(value: Any) -> str:
        text = label_text(value).strip()
        text = re.sub(r"^(\d+)\.0+$", r"\1", text)
        well = _WELL.match(text) if are_wells else None
        return f"{well[1].upper()}{int(well[2])}" if well else text

    values = values.astype(object)
    values = values.where(values.notna())  # missing values may be NaN or None
    return values.map({value: plain(value) for value in pd.unique(values)})
