"""Tables of features, whoever has measured them: which columns are features, and what becomes of missing values."""

from __future__ import annotations

import logging
import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype

from scbd._anndata import column_numbers, is_number_type, label_text
from scbd._checks import check_choice, counted, head, inflect
from scbd._files import check_distinct, local_path
from scbd.data._formats import SOURCE, kind_of, read_frame, source_names, tables_in, taken_elsewhere
from scbd.data._sources import open_h5

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import anndata

logger = logging.getLogger(__name__)

Missing: TypeAlias = Literal["drop", "median", "keep"]

# CellProfiler's compartments, and what features of DeepProfiler are called here
COMPARTMENTS = ("Cells_", "Cytoplasm_", "Nuclei_", "feature_")
# what programs write before the names of columns of plates and wells; those of pooled screens name spots of barcodes
_BEFORE = r"^(image_)?(metadata_)?(foci_)?"
_PLATE = re.compile(rf"{_BEFORE}plate$", re.IGNORECASE)
# names of numbers that say where an object lies, which it is, or what it belongs to
_ABOUT_OBJECTS = re.compile(
    r"(^|_)(location|center|centroid|boundingbox(max|min)imum|bbox|bounds|parent|children|barcodes?|\w*(image|object)_?number|fov"
    r"|tile|id|index)(_|$)|(^|_)[ijxyz](_\d+)?$|^(cell|nucleus|nuclei|object|label)s?(_\d+)?$|^q_",
    re.IGNORECASE,
)
# what columns of plates, wells and sites are called, without the word Metadata before it
_KEYS = {
    "plate": ("plate", "plate_id", "plate_name", "plate_barcode", "assay_plate_barcode", "barcode"),
    "well": ("well", "well_id", "well_name", "well_position"),
    "site": ("site", "field", "fov"),
}
_WELL = re.compile(r"^([A-Za-z]{1,2})[ -]*0*(\d+)$")
_ROW_NUMBERS = re.compile(r"^Unnamed: \d+$")
# features and rows that lack more than this share of their values are left out
_MOSTLY_THERE = 0.5
# where DeepProfiler's files lie
_FOLDERS = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = COMPARTMENTS,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    on: str | Sequence[str] | None = None,
    missing: Missing = "median",
) -> anndata.AnnData:
    """Features of cells or wells, as pycytominer, CytoTable, DeepProfiler and others write them.

    A column is a feature if its name begins with one of ``features``, unless it is called like a position, a box, a
    number or a parent of an object; all others go to ``obs``. Features of one value stay;
    :meth:`~scbd.SCBDModel.setup_anndata` leaves them out, and says so.

    Parameters
    ----------
    path
        ``.parquet``, ``.csv``, ``.tsv`` (also ``.csv.gz``, ``.tsv.gz``) with a cell or well a row, or a folder of such;
        ``.h5ad`` or ``.zarr`` of an AnnData, whose ``X`` are the features; an ``.npz`` of DeepProfiler, or the folder
        of them, where folders are called by plate and well. Several, such as a file for each plate, are put together;
        where no column is one of plates, ``obs["source"]`` says which file each row is from, by its name.
    features
        Beginnings of the names of features, or whole names. By default those of CellProfiler's compartments, and
        ``feature_``, as those of DeepProfiler are called here.
    table
        What else is known, such as a plate map: a frame or a file. None of its columns is a feature.
    on
        Columns, of one name in both, by which ``table`` is joined. By default those of plate, well and site that both
        have, however they are called (``Metadata_Well``, ``well_position``). A1 and A01 are one well, 24277 and 24277.0
        one plate.
    missing
        Of values that are missing, infinite, or text among numbers. Rows in which a whole compartment is missing are
        left out, as are features without any value in a plate or file, and features and rows that lack more than half
        of their values; ``"median"`` then fills in the feature's median, ``"drop"`` leaves out all rows that still
        lack some. ``"keep"`` does nothing: models refuse such features.

    Returns
    -------
    AnnData with float32 ``X``, cells or wells by features, ready for ``setup_anndata(…, layer="X")``.

    Raises
    ------
    FileNotFoundError
        If files are missing (which).
    KeyError
        If ``table`` has none of the columns to join by.
    TypeError, ValueError
        If it is of another kind, truncated, or has no feature; if a feature holds no numbers, or two have one name; if
        ``table`` has several rows for one, or none, or other values in a column of the same name.

    Warns
    -----
    UserWarning
        If features, rows or empty files are left out, or values filled in: how many, and the plates or files that are
        lost; if most columns of numbers are no features.

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
    """Features of cells or wells, and everything else that is known of them."""

    values: np.ndarray
    """Values of the features, float32 ``(N, F)``."""
    names: np.ndarray
    """Names of the features, ``(F,)``."""
    obs: pd.DataFrame
    """All other columns, N rows."""


def read_table_of_features(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = COMPARTMENTS,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    on: str | Sequence[str] | None = None,
    missing: Missing = "median",
) -> FeatureTable:
    """Read what :func:`read_profiles` puts into an AnnData, without importing anndata, which takes a second."""
    check_choice("missing", missing, Missing)
    paths = _files(path)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {counted(len(paths) - 1, 'other')}"
    read = {one: _read(one) for one in paths if not _is_empty(one)}
    without = [one for one in paths if one not in read or read[one][0].empty]
    if len(without) == len(paths):
        msg = f"{where} has no row: there is nothing to read."
        raise ValueError(msg)
    have = inflect(len(without), "has", "have")
    said = [f"{len(without)} of {len(paths)} files {have} no row ({head(without)})"] if without else []
    read = {one: part for one, part in read.items() if one not in without}
    found = pd.concat([frame for frame, _ in read.values()], ignore_index=len(read) > 1)
    beginnings = (features,) if isinstance(features, str) else tuple(features)
    known = {name for _, names in read.values() for name in names}
    names, about = _features(found, beginnings, known, where)
    if about:
        columns = inflect(
            len(about),
            "column named like a position, box or number of an object goes",
            "columns named like positions, boxes or numbers of objects go",
        )
        said.append(f"{len(about)} {columns} to obs ({head(about)})")
    obs = found.drop(columns=names)
    if features is COMPARTMENTS and not known:
        said += _other_numbers(obs, names, about)
    obs = _without_lists(obs, said)
    lengths = [len(frame) for frame, _ in read.values()]
    if len(read) > 1 and not {"plate", SOURCE} & {*_meanings(obs), *obs}:
        obs[SOURCE] = np.repeat(np.array(source_names([*map(str, read)], set()), dtype=object), lengths)
    if table is not None:
        obs = _joined(obs, table if isinstance(table, pd.DataFrame) else read_frame(table), on, where)
    logger.info("%s: %d features; in obs: %s.", where, len(names), head(obs.columns, 20))
    groups = {str(column): obs[column].to_numpy() for column in obs if _PLATE.search(str(column))}
    if len(read) > 1:
        groups["file"] = np.repeat(np.array(list(map(str, read)), dtype=object), lengths)
    values = _numbers(found, names, where, said)
    rows, kept = np.ones(len(values), dtype=bool), np.ones(len(names), dtype=bool)
    if missing != "keep":
        rows, kept = _mended(values, pd.Index(names), missing, where, groups, beginnings, said)
    if said:
        warnings.warn(f"{where}: {'; '.join(said)}.", UserWarning, stacklevel=3)
    return FeatureTable(values[np.ix_(rows, kept)], np.array(names, dtype=object)[kept], _tidy(obs[rows]))


def _files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """All of them are there, and each once; a folder of tables stands for these."""
    given = [local_path(one) for one in ([path] if isinstance(path, (str, os.PathLike)) else path)]
    if not given:
        msg = "There is no file to read: give at least one."
        raise ValueError(msg)
    absent = [one for one in given if not one.exists()]
    if absent:
        msg = f"{len(absent)} of {len(given)} files {inflect(len(absent), 'is', 'are')} not there ({head(absent)})."
        raise FileNotFoundError(msg)
    check_distinct(given)
    return [file for one in given for file in tables_in(one)]


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def _read(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """A row a cell or well, and names of columns that are features whatever they begin with."""
    kind = kind_of(path)
    if kind.name in ("profiles", "image_table", "tables"):
        table = _without_row_numbers(read_frame(path).rename(columns=str))
        # levels of an index are columns like others; the name of a row is none
        return (table if table.index.names == [None] else table.reset_index(allow_duplicates=True)), []
    if kind.name == "anndata":
        import anndata

        if path.is_file():
            open_h5(path).close()  # says what is wrong with it
        cells = (anndata.read_zarr if path.is_dir() else anndata.read_h5ad)(path)
        return cells.obs.join(cells.to_df()), cells.var_names.tolist()
    if kind.name == "deepprofiler":
        return _deepprofiler(path), []
    raise ValueError(taken_elsewhere(path, kind))


def _features(
    table: pd.DataFrame, beginnings: tuple[str, ...], known: set[str], where: str
) -> tuple[list[str], list[str]]:
    """Columns that are features, and those that only begin so, being called like what is no measurement."""
    if not table.columns.is_unique:
        msg = f"{where} has columns whose name is there twice ({head(table.columns[table.columns.duplicated()])})."
        raise ValueError(msg)
    begun = [name for name in table if name in known or str(name).startswith(beginnings)]
    about = [name for name in begun if name not in (*known, *beginnings) and _ABOUT_OBJECTS.search(str(name))]
    features = [name for name in begun if name not in set(about)]
    if not features:
        numbers = [f"{start!r} ({len(names)})" for start, names in number_beginnings(table).items()]
        lists = [name for name in table if _holds_lists(table[name])]
        msg = (
            f"{where} has no feature, which is a column that begins with {' or '.join(beginnings)}; it has: "
            f"{head(table.columns, 8)}. Name features, or how they begin, with features=…"
            + (f"; most numbers begin with {head(numbers)}" if numbers else "")
            + (f". {_of_lists(lists[0])}" if lists else "")
            + "."
        )
        raise ValueError(msg)
    return features, about


def number_beginnings(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return words that three or more columns of numbers begin with, and these columns; the most frequent word first.

    Columns that are named like positions, boxes or numbers of objects do not count.
    """
    numbers = [name for name in map(str, table.select_dtypes("number")) if not _ABOUT_OBJECTS.search(name)]
    begun: dict[str, list[str]] = {}
    for name in numbers:
        if (word := re.match(r"[A-Za-z]+", name)) and word[0].lower() != "metadata":
            begun.setdefault(word[0], []).append(name)
    several = {word: names for word, names in begun.items() if len(names) >= 3}
    return dict(sorted(several.items(), key=lambda item: -len(item[1])))


def _other_numbers(obs: pd.DataFrame, features: Sequence[str], about: Sequence[str]) -> list[str]:
    """That most numbers are no features, where it is so."""
    numbers = obs.select_dtypes("number").columns.difference(about, sort=False).astype(str)
    others = [name for name in numbers if not name.startswith(("Metadata_", "Image_", *_FOLDERS, "Location_Center_"))]
    if len(others) <= len(features):
        return []
    are = inflect(len(features), "is a feature", "are features")
    return [
        f"only {len(features)} of {len(features) + len(others)} columns of numbers {are} ({head(features, 3)}) and the "
        f"others go to obs ({head(others)}): name what features begin with (features=…)"
    ]


def _holds_lists(column: pd.Series) -> bool:
    if column.dtype != object or infer_dtype(column, skipna=True) != "mixed":  # which is fast, as of text
        return False
    return bool(column.map(lambda value: isinstance(value, (list, tuple, np.ndarray))).any())


def _of_lists(name: str) -> str:
    return (
        f"{name!r} holds a list in each row: make a column of each of its numbers, "
        f"table.join(pandas.DataFrame(table.pop({name!r}).tolist(), table.index).add_prefix('feature_'))"
    )


def _without_lists(obs: pd.DataFrame, said: list[str]) -> pd.DataFrame:
    """Lists are no labels."""
    lists = [name for name in obs if _holds_lists(obs[name])]
    said += [f"left out: {_of_lists(name)}" for name in lists]
    return obs.drop(columns=lists)


def _without_row_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Without the column that ``to_csv`` writes of an index of numbers: it says nothing of the rows."""
    numbers = [name for name in table if _ROW_NUMBERS.match(name) and table[name].dtype.kind in "iu"]
    return table.drop(columns=numbers)


def _numbers(table: pd.DataFrame, features: list[str], where: str, said: list[str]) -> np.ndarray:
    """Values of features, float32 ``(N, F)``, NaN where there is none."""
    found, no_numbers, with_text = table[features], [], []
    for place, name in enumerate(features):
        if is_number_type(table[name].dtype):
            continue
        numbers, text = column_numbers(table[name])
        found.isetitem(place, numbers)
        if 2 * text.sum() >= max(1, len(text) - np.count_nonzero(table[name].isna())):
            no_numbers.append(name)
        elif text.any():
            with_text.append(f"{name} in {counted(text.sum(), 'row')}, such as {table[name][text].iloc[0]!r}")
    if no_numbers:
        first = table[no_numbers[0]]
        what = _of_lists(no_numbers[0]) if _holds_lists(first) else "name the others with features=…"
        if first.astype(str).str.fullmatch(r"-?\d+,\d+").any():
            what = "commas are decimal there, pandas.read_csv(…, decimal=',')"
        msg = f"{where} has features that are no numbers ({head(sorted(no_numbers))}): {what}."
        raise TypeError(msg)
    if with_text:
        said.append(f"text among numbers counts as missing ({head(sorted(with_text))})")
    values = found.to_numpy(np.float32, copy=True, na_value=np.nan)  # what pandas hands out may be read-only
    values[~np.isfinite(values)] = np.nan
    return values


def _mended(
    values: np.ndarray,
    features: pd.Index,
    missing: Missing,
    where: str,
    groups: Mapping[str, np.ndarray],
    beginnings: tuple[str, ...],
    said: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows and features are kept; what is missing in those is filled in place where that was asked for."""
    absent = np.isnan(values)
    lacked = np.zeros(len(features), dtype=bool)
    for names in groups.values():  # to keep what a plate or file lacks would cost all of its rows
        for name in pd.unique(names):
            lacked |= absent[names == name].all(axis=0)
    rows = np.ones(len(values), dtype=bool)
    for beginning in beginnings:  # nuclei without a cell lack all that was measured of cells
        block = features.str.startswith(beginning) & ~lacked
        incomplete = absent[:, block].all(axis=1) & rows
        if block.sum() > 1 and incomplete.any() and not incomplete.all():
            rows &= ~incomplete
            n = incomplete.sum()
            have, are = inflect(n, "has", "have"), inflect(n, "is", "are")
            said.append(f"{n:,} of {len(rows):,} rows {have} no value of {beginning}…, and {are} excluded")
    kept = ~lacked & (absent[rows].mean(axis=0) <= _MOSTLY_THERE)
    if not kept.all():
        are = inflect((~kept).sum(), "is", "are")
        said.append(
            f"{(~kept).sum()} of {len(features)} features {are} missing in a whole plate or file or in more than "
            f"{_MOSTLY_THERE:.0%} of the rows, and {are} excluded ({head(features[~kept])})"
        )
    holes = absent[:, kept]
    lacking = holes.any(axis=1) if missing == "drop" else holes.mean(axis=1) > _MOSTLY_THERE if kept.any() else ~rows
    if (rows & lacking).any():
        left = rows & ~lacking
        whole = {kind: pd.Series(left).groupby(names).any() for kind, names in groups.items()}
        lost = [f"{kind} {head(there.index[~there])}" for kind, there in whole.items() if not there.all()]
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
        msg = f"{where}: {'; '.join(said)}. Nothing is left: look at it with missing='keep'."
        raise ValueError(msg)
    holes = holes & rows[:, None]
    if holes.any():
        n, n_rows = holes.sum(), holes.any(axis=1).sum()
        said.append(
            f"{counted(n, 'missing value')} in {counted(n_rows, 'row')} {inflect(n, 'is', 'are')} replaced by "
            "the feature's median"
        )
        for column in np.flatnonzero(kept)[holes.any(axis=0)]:
            values[absent[:, column], column] = np.nanmedian(values[rows, column])
    return rows, kept


def _tidy(obs: pd.DataFrame) -> pd.DataFrame:
    """Text as categories, which can be written to any file."""
    text = [column for column in obs if obs[column].dtype.kind == "O"]
    obs = obs.assign(**{column: obs[column].map(str, na_action="ignore").astype("category") for column in text})
    return obs.set_axis(obs.index.astype(str))


def _joined(obs: pd.DataFrame, table: pd.DataFrame, on: str | Sequence[str] | None, where: str) -> pd.DataFrame:
    """Rows with what a table knows of them."""
    table = _without_row_numbers(table.rename(columns=str))
    keys = _shared_keys(obs, table, on, where)
    names = ", ".join(keys.values())
    left, right = (
        pd.DataFrame({one: _alike(frame[name]) for one, name in zip(keys, own, strict=True)})
        for frame, own in ((obs, keys), (table, keys.values()))
    )
    if right.duplicated().any():
        first = _said(table[list(keys.values())], right.duplicated())
        msg = f"The table has several rows for one {names} (such as {first}): keep one of each, or name more with on=…."
        raise ValueError(msg)
    rows = left.merge(right.assign(row=range(len(right))), how="left", on=list(keys))["row"]
    if rows.isna().any():
        first, there = _said(obs[list(keys)], rows.isna()), _said(table[list(keys.values())], [True] * len(table))
        msg = (
            f"{rows.isna().sum():,} of {len(rows):,} rows of {where} are not in the table: of {names} it has no "
            f"{first} (but {there}, …)."
        )
        raise ValueError(msg)
    new = table.drop(columns=list(keys.values())).iloc[rows.astype(int)].set_axis(obs.index)
    both = [name for name in new if name in obs]
    if clash := [name for name in both if not _alike(obs[name]).equals(_alike(new[name]))]:
        msg = f"{where} and the table have different values of {head(clash)}: drop it in one of them, or rename it."
        raise ValueError(msg)
    return pd.concat([obs, new.drop(columns=both)], axis=1)


def _said(rows: pd.DataFrame, chosen: Sequence[bool] | pd.Series) -> str:
    """The first of some rows, for a sentence."""
    return " ".join(rows[np.asarray(chosen)].iloc[0].astype(str))


def _shared_keys(obs: pd.DataFrame, table: pd.DataFrame, on: str | Sequence[str] | None, where: str) -> dict[str, str]:
    """Columns to join by, and what the table calls them."""
    if on is not None:
        keys = {name: name for name in ([on] if isinstance(on, str) else on)}
        absent = [name for name in keys if name not in obs or name not in table]
    else:
        meant, theirs = _meanings(obs), _meanings(table)
        keys = {meant[key]: theirs[key] for key in meant if key in theirs}
        absent = [] if keys else ["column of plates, wells or sites"]
    if absent:
        msg = (
            f"{where} and the table share no {absent[0]} ({head(obs.columns, 8)}; {head(table.columns, 8)}): name "
            "columns alike, and give them with on=…."
        )
        raise KeyError(msg)
    return keys


def _meanings(table: pd.DataFrame) -> dict[str, str]:
    """Of plate, well and site the column that says it."""
    plain = {re.sub(_BEFORE, "", re.sub(r"\W", "_", str(name).lower())): name for name in table}
    found = {key: [plain[name] for name in names if name in plain] for key, names in _KEYS.items()}
    return {key: names[0] for key, names in found.items() if names}


def _alike(values: pd.Series) -> pd.Series:
    """As text, in one of the ways to write it: A1 and A01 are one, 24277 and 24277.0."""

    def plain(value: Any) -> str:
        text = label_text(value).strip()
        text = re.sub(r"^(\d+)\.0+$", r"\1", text)
        well = _WELL.match(text)
        return f"{well[1].upper()}{int(well[2])}" if well else text

    values = values.astype(object)
    return values.map({value: plain(value) for value in pd.unique(values)})


def _deepprofiler(path: Path) -> pd.DataFrame:
    """A row a cell: features, ``Location_Center_X`` and ``_Y`` in pixels, plate, well and site by the names of folders.

    What the files say themselves of a field (their ``metadata``) is a pickled object, which could run code, and is not
    read.
    """
    files, root = ([path], path.parent) if path.is_file() else (sorted(path.rglob("*.npz")), path)
    there = [file for file in files if not _is_empty(file)]
    if len(there) < len(files):
        n = len(files) - len(there)
        are = inflect(n, "is empty, and its field is excluded", "are empty, and their fields are excluded")
        msg = f"{path}: {n} of {len(files)} files {are}."
        warnings.warn(msg, UserWarning, stacklevel=5)
    tables = [table for table in (_deepprofiler_field(file, file.relative_to(root)) for file in there) if len(table)]
    if 0 < len(tables) < len(files):
        n = len(files) - len(tables)
        logger.info("%s: %d of %d fields %s no cell.", path, n, len(files), inflect(n, "has", "have"))
    if not tables:
        msg = f"{path}: none of {len(files)} files of DeepProfiler (.npz) has a cell."
        raise ValueError(msg)
    return pd.concat(tables, ignore_index=True)


def _deepprofiler_field(file: Path, name: Path) -> pd.DataFrame:
    try:
        with np.load(file, allow_pickle=False) as archive:
            features = archive["features"]
            locations = archive["locations"] if "locations" in archive.files else np.empty((len(features), 0))
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        msg = f"{file} cannot be read as features of DeepProfiler ({error}): it is truncated, or foreign."
        raise ValueError(msg) from error
    if features.ndim != 2 or len(locations) != len(features):
        msg = f"{file} has features {features.shape} and locations {locations.shape}: they must have a row a cell each."
        raise ValueError(msg)
    table = pd.DataFrame(features).add_prefix("feature_")
    if locations.shape[1] >= 2:
        table = table.assign(Location_Center_X=locations[:, 0], Location_Center_Y=locations[:, 1])
    # plate/well/site.npz, as it writes them, or plate/well_site.npz, as it did before
    parts = [*name.parent.parts, *([name.stem] if len(name.parts) > 2 else name.stem.rsplit("_", 1))]
    folders = dict(zip(_FOLDERS, parts[-3:], strict=True)) if len(parts) >= 3 else {}
    return table.assign(Metadata_File=name.as_posix(), **folders)
