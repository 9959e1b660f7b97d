"""Which columns of a table are features, and what becomes of values that are missing."""

from __future__ import annotations

import difflib
import logging
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._messages import head, missing_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

Missing: TypeAlias = Literal["drop", "median", "keep"]

# what CellProfiler, pycytominer and CytoTable call columns that number, name or place things
_ABOUT = re.compile(
    r"^(Metadata|Image)_|(^|_)(Location|Parent|FileName|PathName|URL)_|(^|_)(Image|Object|Table)Number$"
    r"|^Unnamed: |Number_Object_Number|ClosestObjectNumber|AreaShape_Center_|BoundingBox(Minimum|Maximum)_"
)
# and what others call them
_NAMES = set(
    "plate well site field tile fov replicate batch row col column cell cell_id object index label uid barcode count "
    "i j x y z path image".split()
)
# how CellProfiler calls a measurement: by its own objects, or by the module that has measured
_MEASURED = re.compile(
    r"^(Cells|Cytoplasm|Nuclei)_|(^|_)(AreaShape|Children|Colocalization|Correlation|Granularity|Intensity|Neighbors"
    r"|ObjectSkeleton|RadialDistribution|Texture)_"
)
# words in what others call labels, treatments and numbers of cells
_LABELS = re.compile(
    r"(^|[^a-z])(dose|dosage|conc|concentration|donor|patient|time|timepoint|day|hours?|passage|moa|compound|drug|gene"
    r"|guide|target|cluster|id|cell_count|n_cells)([^a-z]|$)",
    re.IGNORECASE,
)
_PLATE = re.compile(r"^(Image_)?(Metadata_)?plate$", re.IGNORECASE)
# features that are missing in more of the rows are left out, rather than the rows
_MOSTLY_THERE = 0.05
_FILE = "file"
# rows that a plate has lost if it is named, and standard errors by which these are more than others have
_SEVERAL, _ERRORS = 3, 3.0


def profiles_of(
    table: pd.DataFrame,
    obs_columns: Sequence[str],
    missing: Missing,
    where: str,
    files: Sequence[str] | np.ndarray | None = None,
) -> AnnData:
    """Features of a table in ``X``, what else it says in ``obs``.

    Parameters
    ----------
    table
        A row a cell or a well; its index becomes the names.
    obs_columns
        Columns of numbers that are no features, beside those that go by a known name.
    missing
        What becomes of missing and infinite values, see :func:`scbd.data.read_profiles`.
    where
        What errors call the table.
    files
        Of each row the file that it comes from, where several were read.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If there is no row or no feature, no row is left, or two columns have one name.
    """
    if missing not in get_args(Missing):
        msg = f"missing={missing!r} is not known: use {', '.join(map(repr, get_args(Missing)))}."
        raise ValueError(msg)
    table = table.rename(columns=str)
    _check(table, obs_columns, where)
    said = set(obs_columns)
    is_feature = [
        table[column].dtype.kind in "fiu" and column not in said and not is_about(column) for column in table.columns
    ]
    features = table.columns[is_feature]
    if not len(features):
        msg = f"{where} has no column of numbers that is a feature; it has: {head(table.columns, 8)}."
        raise ValueError(msg)
    obs = table.drop(columns=features)
    logger.info("%s: %d features; in obs: %s.", where, len(features), head(obs.columns, 20))
    values = table[features].to_numpy(np.float32, copy=True)  # what pandas hands out itself may be read-only
    values[~np.isfinite(values)] = np.nan
    rows, kept = np.ones(len(values), dtype=bool), np.ones(len(features), dtype=bool)
    if missing != "keep":
        groups = {column: obs[column].to_numpy() for column in obs if _PLATE.search(column)}
        groups |= {} if files is None else {_FILE: np.asarray(files)}
        rows, kept = _mended(values, features, missing, where, groups, table.index)
    cells = AnnData(X=values[np.ix_(rows, kept)], obs=_tidy(obs[rows]))
    cells.var_names = features[kept]
    return cells


def is_about(column: str) -> bool:
    """Whether a column goes by the name of something that is no measurement."""
    return bool(_ABOUT.search(column)) or column.lower() in _NAMES


def odd_names(features: Sequence[str] | pd.Index) -> list[str]:
    """Features that may be none by their names, but labels, doses or numbers of cells.

    Parameters
    ----------
    features
        All names. If more than half are alike (those of CellProfiler, or such as differ in their digits), the others
        are odd; else those that have a word for a label in them.
    """
    families = [_family(name) for name in features]
    largest, n = max(Counter(families).items(), key=lambda found: found[1], default=("", 0))
    if 2 * n > len(families):
        return [name for name, family in zip(features, families, strict=True) if family != largest]
    return [name for name, family in zip(features, families, strict=True) if _LABELS.search(family)]


def _family(name: str) -> str:
    return "CellProfiler" if _MEASURED.search(name) else re.sub(r"\d+", "0", name)


def _check(table: pd.DataFrame, obs_columns: Sequence[str], where: str) -> None:
    if table.empty:
        msg = f"{where} has no row: there is nothing to read."
        raise ValueError(msg)
    if not table.columns.is_unique:
        twice = table.columns[table.columns.duplicated()]
        msg = f"{where} has {len(twice)} columns whose name is there twice ({head(twice)}): rename or drop them."
        raise ValueError(msg)
    for column in obs_columns:
        if column not in table:
            # of a thousand features those that may have been meant
            alike = difflib.get_close_matches(column, table.columns, n=20, cutoff=0)
            raise KeyError(missing_key(f"{where} (columns)", column, alike, "obs_columns"))


def _mended(
    values: np.ndarray,
    features: pd.Index,
    missing: Missing,
    where: str,
    groups: Mapping[str, np.ndarray],
    names: pd.Index,
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows and features are kept; what is missing in those is filled in place where that was asked for."""
    absent = np.isnan(values)
    kept, said = _kept_features(absent, features, groups.get(_FILE))
    holes = absent[:, kept]
    rows = ~holes.any(axis=1)
    if missing == "median" and not rows.all():
        said.append(f"{holes.sum():,} missing values in {(~rows).sum():,} rows are replaced by the feature's median")
        for column in np.flatnonzero(kept)[holes.any(axis=0)]:
            values[absent[:, column], column] = np.nanmedian(values[:, column])
        rows[:] = True
    elif not rows.all():
        said.append(
            f"{(~rows).sum():,} of {len(rows):,} rows have missing or infinite values, and are left out "
            f"({head(names[~rows])}){_lost(rows, groups)}; missing='median' keeps them"
        )
    if not (kept.any() and rows.any()):
        msg = (
            f"{where}: {'; '.join(said)}. Nothing is left: look at it with scbd.data.read_profiles(…, missing='keep')."
        )
        raise ValueError(msg)
    if said:
        warnings.warn(f"{where}: {'; '.join(said)}.", UserWarning, stacklevel=4)
    return rows, kept


def _kept_features(absent: np.ndarray, features: pd.Index, files: np.ndarray | None) -> tuple[np.ndarray, list[str]]:
    """Which features are there in most rows and in some of each file, and why others are not kept."""
    lacking = {} if files is None else _lacking(absent, files)
    lacked = np.isin(np.arange(len(features)), list(lacking))
    sparse = (absent.mean(axis=0) > _MOSTLY_THERE) & ~lacked
    said = []
    if lacked.any():
        where = head(f"{features[number]} in {head(names)}" for number, names in sorted(lacking.items()))
        said.append(
            f"{lacked.sum()} of {len(features)} features have no value in a whole file, and are left out ({where})"
        )
    if sparse.any():
        said.append(
            f"{sparse.sum()} of {len(features)} features are missing in more than {_MOSTLY_THERE:.0%} of the rows, and "
            f"are left out ({head(features[sparse])})"
        )
    return ~(lacked | sparse), said


def _lacking(absent: np.ndarray, files: np.ndarray) -> dict[int, list[str]]:
    """By the number of a feature the files without any value of it: to keep it would cost all of their rows."""
    codes, names = pd.factorize(files)
    lacking: dict[int, list[str]] = {}
    for code, name in enumerate(names if len(names) > 1 else ()):
        for number in np.flatnonzero(absent[codes == code].all(axis=0)):
            lacking.setdefault(int(number), []).append(name)
    return lacking


def _lost(rows: np.ndarray, groups: Mapping[str, np.ndarray]) -> str:
    """Files and plates of which no row is kept, and those that have lost more than others."""
    said, many = [], []
    for kind, names in groups.items():
        of_each = pd.Series(~rows).groupby(names, sort=False).agg(["sum", "size"])
        whole = of_each["sum"] == of_each["size"]
        said += [f"{kind} {head(of_each.index[whole])}"] if whole.any() else []
        others = of_each[~whole]
        by_chance = others["size"] * others["sum"].sum() / max(1, others["size"].sum())
        worst = others[(others["sum"] >= _SEVERAL) & (others["sum"] > by_chance + _ERRORS * np.sqrt(by_chance))]
        lost = worst.sort_values("sum", ascending=False, kind="stable")
        if len(lost):
            each = zip(lost.index, lost["sum"], lost["size"], strict=True)
            many.append(f"{kind} {head(f'{name} ({n:,} of {n_rows:,})' for name, n, n_rows in each)}")
    whole_said = f", among them all rows of {' and of '.join(said)}" if said else ""
    return whole_said + (f", above all of {' and of '.join(many)}" if many else "")


def _tidy(obs: pd.DataFrame) -> pd.DataFrame:
    """Text as categories, which can be written to any file."""
    text = [column for column in obs if obs[column].dtype.kind == "O"]
    obs = obs.assign(**{column: obs[column].map(str, na_action="ignore").astype("category") for column in text})
    return obs.set_axis(obs.index.astype(str))
