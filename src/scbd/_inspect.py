"""Open cells of any kind, and inspect a file or folder: its kind, its content, and the command that takes it.

Nothing heavy is imported here: ``scbd inspect`` and mistakes on the command line should be answered at once.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._anndata import IMAGE_KEY, bare_name, likely_controls
from scbd._checks import counted, head
from scbd.data._formats import Kind, head_of, image_columns, is_table, kind_of
from scbd.data._profiles import COMPARTMENTS, Missing, number_beginnings, read_profiles, read_table_of_features
from scbd.data._readers import read_crops

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

    from scbd.data._readers import Crops

# kinds of tables of features, and of images that are converted to a screen before they are trained on
_TABLES = ("profiles", "tables", "deepprofiler")
_CROPS = ("image_table", "image_folder", "lmdb", "arrays")
# cells whose range of pixels is reported
_N_SAMPLED = 64
# columns to name where the proposed beginnings of features do not include them
_N_NAMED = 12

# names of columns, as bare_name returns them
_PERTURBATIONS = "gene genesymbol genename targetgene perturbation pert compound compoundname treatment drug".split()
_WELL = re.compile(r"(image)?(metadata)?(foci)?well(id|name|position)?")
_SITE = re.compile(r"(image)?(metadata)?(foci)?(site|field|fov)(id|number|no)?")
# columns of a later group are proposed only where there is none of an earlier one
_ENVIRONMENTS = (
    re.compile(
        r"(image)?(metadata)?(foci)?(assay|imaging|acquisition)?"
        r"(plate|barcode|batch|week|day|date|run|experiment|session|donor|patient|slide|scanner|microscope|lab|source)"
        r"(id|name|number|no|barcode)?"
    ),
    _WELL,
    re.compile(r"(metadata)?(bio|biological|tech|technical)?rep(l|licate)?(id|number|no)?"),
    _SITE,
)
# share of perturbations in one environment only, above which a finer environment is proposed
_MAX_CONFOUNDED = 0.1
# values that mark controls of any sort
_CONTROL_KIND = re.compile(r"control|ctrl|ctl|negcon|poscon")
# names of features that count objects
_COUNT = re.compile(r"\b(number of|counts?)\b", re.IGNORECASE)


def open_cells(
    path: str | os.PathLike[str],
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
    features: str | Sequence[str] = COMPARTMENTS,
    missing: Missing = "median",
) -> tuple[AnnData, dict[str, str]]:
    """Open a screen or a table of features.

    Parameters
    ----------
    path
        A screen, see :func:`scbd.data.open_screen`; or a table of features, see :func:`scbd.data.read_profiles`.
    image_key, layer, obsm_key
        Of a screen: where its images or features are.
    features
        Of a table: beginnings of the names of features, see :func:`scbd.data.read_profiles`.
    missing
        Of a table: what replaces missing and infinite values.

    Returns
    -------
    The cells, and the arguments of ``setup_anndata`` that name the place of their images or features.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError, ImportError
        If there is nothing, or it cannot be read.
    """
    where = {name: value for name, value in (("layer", layer), ("obsm_key", obsm_key)) if value is not None}
    kind = kind_of(path)
    if kind.name in _CROPS:
        msg = f"{path} is {kind.about}: make a screen of it first, {_conversion(path, kind)}."
        raise ValueError(msg)
    if kind.name not in _TABLES:
        if features is not COMPARTMENTS or missing != "median":
            msg = f"{path} is not a table of features: remove features and missing."
            raise ValueError(msg)
        from scbd.data._screens import open_screen

        return open_screen(path, image_key=image_key, **where), where or {"image_key": image_key}
    if where not in ({}, {"layer": "X"}):
        msg = f"{path} is a table of features, which has no {' and '.join(where)}: remove that."
        raise ValueError(msg)
    return read_profiles(path, features=features, missing=missing), {"layer": "X"}


def inspect(path: str | os.PathLike[str], *, image_key: str = IMAGE_KEY) -> str:
    """Describe a file or folder, and propose the command that takes it. Nothing is written.

    Parameters
    ----------
    path
        Anything; see :func:`scbd.data.read_crops` and :func:`scbd.data.read_profiles` for what can be read.
    image_key
        Key of the images in ``obsm`` of an AnnData, or in an ``.npz``.

    Returns
    -------
    Lines: kind; number of cells; channels with the range of their pixels in a sample of 64 cells, or the first
    features, and columns of numbers that are not taken as features; columns with values that several cells share;
    environments and controls that may be meant; and the next command.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError, ImportError
        If there is nothing, or it cannot be read.
    """
    kind = kind_of(path)
    lines = [f"{path} is {kind.about}."]
    if kind.name in _TABLES:
        return "\n".join([*lines, *_describe_table(path)])
    if kind.name not in (*_CROPS, "anndata"):
        return "\n".join([*lines, f"Next: {kind.advice}."])
    try:
        crops = read_crops(path, image_key=image_key, file_columns=_file_columns(path, kind) or "path")
    except KeyError:
        if kind.name != "anndata" or image_key != IMAGE_KEY:
            raise
        from scbd.data._screens import open_screen

        cells = open_screen(path, layer="X")  # raises as well, if there are no features either
        lines.append(_describe_features(cells.n_obs, cells.var_names.tolist()))
        given = f"{_quoted(path)} --layer X"
        return "\n".join([*lines, *_describe_labels_of_features(cells.obs, _count_values(cells.obs), given, "obs")])
    return "\n".join([*lines, *_describe_pixels(crops), *_describe_labels_of_images(path, kind, crops, image_key)])


def _describe_table(path: str | os.PathLike[str]) -> list[str]:
    first_rows = head_of(path) if is_table(path) else pd.DataFrame()
    words = _propose_features(first_rows)
    table = read_table_of_features(path, features=words) if words else read_table_of_features(path)
    lines = [_describe_features(len(table.obs), table.names.tolist())]
    if counts := [name for name in table.names if _COUNT.search(str(name).replace("_", " "))]:
        lines.append(f"Among the features are counts, which depend on how many cells were seeded: {head(counts)}.")
    values = _count_values(table.obs)
    unused = [name for name in table.obs.select_dtypes("number") if name not in values]
    if unused:
        columns = f"{counted(len(unused), 'column')} of numbers"
        how = "; to take them, add their names, or what they begin with, to --features" if words else ""
        lines.append(f"Not taken as features: {columns} ({head(unused, _N_NAMED if words else 5)}){how}.")
    named = f" --features {shlex.join(words)}" if words else ""
    return lines + _describe_labels_of_features(table.obs, values, f"{_quoted(path)}{named}", "the table")


def _propose_features(first_rows: pd.DataFrame) -> list[str]:
    """Return beginnings of the names of features, or whole names where columns without numbers begin alike.

    Nothing where features have the names of CellProfiler's compartments, which are taken by default.
    """
    if any(str(name).startswith(COMPARTMENTS) for name in first_rows):
        return []
    others = list(map(str, first_rows.select_dtypes(exclude="number")))
    return [
        part
        for word, names in number_beginnings(first_rows).items()
        for part in (names if any(other.startswith(word) for other in others) else [word])
    ]


def _describe_features(n: int, names: Sequence[str]) -> str:
    return f"{n:,} cells or wells of {len(names):,} features: {head(names)}"


def _describe_labels_of_features(obs: pd.DataFrame, values: dict[str, pd.Series], given: str, table: str) -> list[str]:
    """Return lines about labels, and the command, which begins with what is ``given``; ``table`` holds the labels."""
    if not values:
        return [
            "No column has values that several rows share, such as a compound or a plate.",
            f"Next: add columns with the perturbation and the environment to {table}, and inspect it again.",
        ]
    options, notes = propose_options(obs, values, of_features=True)
    return [*_describe_columns(values), *notes, f"Next: scbd run {given} {options}"]


def _describe_pixels(crops: Crops) -> list[str]:
    n, *shape = crops.images.shape
    n_sampled = min(n, _N_SAMPLED)
    sample = crops.images.read(np.sort(np.random.default_rng(0).choice(n, n_sampled, replace=False)))
    where = f" in a random sample of {n_sampled} cells" if n_sampled < n else ""
    ranges = zip(crops.channels, sample.min((0, 2, 3)), sample.max((0, 2, 3)), strict=True)
    return [
        f"{n:,} cells of {' × '.join(map(str, shape))} {crops.images.dtype}",
        *(f"  channel {name}: {low:g} to {high:g}{where}" for name, low, high in ranges),
    ]


def _describe_labels_of_images(path: str | os.PathLike[str], kind: Kind, crops: Crops, image_key: str) -> list[str]:
    """Return lines about labels, and the command."""
    key = "" if image_key == IMAGE_KEY else f"--image-key {shlex.quote(image_key)} "
    values = _count_values(crops.obs)
    columns = _describe_columns(values)
    if columns and Path(path).suffix in (".h5ad", ".zarr"):
        options, notes = propose_options(crops.obs, values, of_features=False)
        return [*columns, *notes, f"Next: scbd run {_quoted(path)} {key}{options}"]
    if columns:
        y_key = _propose_perturbation(values)
        notes = _describe_missing(crops.obs, [y_key])
        return [*columns, *notes, f"Next: {_conversion(path, kind, f'{key}--y-key {_quoted(y_key)}')}"]
    lines = ["No column has values that several cells share, and training needs labels of the perturbation."]
    if kind.name == "image_table":
        return [*lines, f"Next: add columns with the perturbation and the environment to {path}, and inspect it again."]
    order = "in their order" if kind.name == "arrays" else f"and a column with its name, such as {crops.obs.index[0]}"
    return [
        *lines,
        f"Write a table with columns for perturbation and environment, one row per image, {order}.",
        f"Next: {_conversion(path, kind, f'{key}--table labels.csv --y-key …')}",
    ]


def _conversion(path: str | os.PathLike[str], kind: Kind, options: str = "--y-key …") -> str:
    """Return the command that makes a screen of images, quoted for a shell."""
    columns = _file_columns(path, kind)
    files = f"--file-columns {shlex.join(columns)} " if columns else ""
    return f"scbd convert {_quoted(path)} {files}{options} --out screen.zarr"


def _file_columns(path: str | os.PathLike[str], kind: Kind) -> list[str]:
    return image_columns(path) if kind.name == "image_table" else []


def _quoted(word: object) -> str:
    """Return a word quoted for a shell, or an ellipsis in place of `None`, for the user to fill in."""
    return "…" if word is None else shlex.quote(str(word))


def _describe_columns(values: dict[str, pd.Series]) -> list[str]:
    return [
        f"  column {column}: {len(counts):,} values ({head(f'{value} {count:,}' for value, count in counts.items())})"
        for column, counts in values.items()
    ]


def _describe_missing(obs: pd.DataFrame, columns: Sequence[str | None]) -> list[str]:
    """Return a line for each column that lacks values: training refuses such rows."""
    return [
        f"Column {column} has no value in {n_missing:,} of {len(obs):,} rows: fill it in, or remove these rows."
        for column in columns
        if column is not None and (n_missing := int(obs[column].isna().sum()))
    ]


def _count_values(obs: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the number of cells with each value, for all columns that may be labels."""
    found = {column: obs[column].value_counts() for column in obs if obs[column].dtype.kind != "f"}
    return {column: counts for column, counts in found.items() if 1 < len(counts) <= len(obs) / 2}


def propose_options(obs: pd.DataFrame, values: dict[str, pd.Series], *, of_features: bool) -> tuple[str, list[str]]:
    """Propose columns and controls for ``scbd run``.

    Parameters
    ----------
    obs, values
        Table of the cells, and the number of cells with each value of the columns that may be labels.
    of_features
        Whether rows have features. Then the well is taken as a position, otherwise as an environment.

    Returns
    -------
    The options, with an ellipsis for the user to fill in where no column, or more than one, may be the perturbation;
    and lines about other columns that the user may mean.
    """
    y_key = _propose_perturbation(values)
    e_key, notes = _propose_environment(obs, values, y_key, of_features=of_features)
    controls = [] if y_key is None else likely_controls(values[y_key].index)
    options: dict[str, Sequence[str | None]] = {"y-key": [y_key], "e-key": [e_key]}
    if controls:
        options["control"] = controls
        wells = [column for column in values if _WELL.fullmatch(bare_name(column))]
        if of_features and len(wells) == 1:
            options["position-key"] = wells
    if y_key is not None:
        notes += _describe_controls(obs, values, y_key, controls)
    notes += _describe_missing(obs, [y_key, e_key, *options.get("position-key", [])])
    typed = [f"--{name} {' '.join(map(_quoted, words))}" for name, words in options.items()]
    return " ".join([*typed, "--out results"]), notes


def _propose_perturbation(values: dict[str, pd.Series]) -> str | None:
    """Return the column of the perturbation, if one alone has the name or the controls of one."""
    have_controls = [column for column, counts in values.items() if likely_controls(counts.index)]
    named = [column for column in values if bare_name(column) in _PERTURBATIONS]
    found = [column for column in named if column in have_controls] or named or have_controls
    return found[0] if len(found) == 1 else None


def _propose_environment(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str | None, *, of_features: bool
) -> tuple[str | None, list[str]]:
    """Return the coarsest column of an environment in which perturbations repeat, and a line with the alternatives."""
    named = [
        [column for column in values if column != y_key and pattern.fullmatch(bare_name(column))]
        for pattern in _ENVIRONMENTS
        if not (of_features and pattern is _WELL)
    ]
    candidates = [column for columns in named for column in columns]
    if not candidates:
        return None, ["No column has the name of a plate, batch, day, donor or the like: fill in --e-key."]
    confounded = {column: _count_confounded(obs, y_key, column) for column in candidates}
    first = next(columns for columns in named if columns)
    limit = 0 if y_key is None else _MAX_CONFOUNDED * len(values[y_key])
    repeated = [column for column in first if confounded[column] <= limit]
    e_key = (
        min(repeated, key=lambda column: len(values[column])) if repeated else min(first, key=confounded.__getitem__)
    )

    def describe(column: str) -> str:
        n = confounded[column]
        rest = f"; {n:,} of {len(values[str(y_key)]):,} values of {y_key} occur in only one" if n > limit else ""
        return f"{column} ({len(values[column]):,} values{rest})"

    others = [describe(column) for column in candidates if column != e_key]
    if not others and confounded[e_key] <= limit:
        return e_key, []
    alternatives = f" Other columns that may be meant: {', '.join(others)}." if others else ""
    return e_key, [f"Proposed environment: {describe(e_key)}.{alternatives}"]


def columns_of_places(columns: Iterable[str]) -> list[str]:
    """Return the columns with names of plates, batches, days, wells or replicates, which separate replicates.

    Sites of a well do not: their cells share the well.
    """
    patterns = [pattern for pattern in _ENVIRONMENTS if pattern is not _SITE]
    return [column for pattern in patterns for column in columns if pattern.fullmatch(bare_name(column))]


def _count_confounded(obs: pd.DataFrame, y_key: str | None, column: str) -> int:
    """Return the number of perturbations that lie in one environment only."""
    if y_key is None:
        return 0
    pairs = obs[[y_key, column]].dropna().drop_duplicates()
    return int((pairs[y_key].value_counts() == 1).sum())


def _describe_controls(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str, controls: Sequence[str]
) -> list[str]:
    """Return a line for each column, other than the perturbation's, that marks controls which are not proposed."""
    lines = []
    for column, counts in values.items():
        kinds = [kind for kind in counts.index if _CONTROL_KIND.search(bare_name(kind)) or likely_controls([kind])]
        marked = {kind: obs.loc[(obs[column] == kind).to_numpy(), y_key].dropna().unique() for kind in kinds}
        if column == y_key or {str(label) for labels in marked.values() for label in labels} <= set(controls):
            continue
        kinds_of_labels = "; ".join(f"{kind}: {head(labels)}" for kind, labels in marked.items() if len(labels))
        lines.append(
            f"Column {column} marks controls of {y_key} ({kinds_of_labels}). Name the labels of unperturbed cells with "
            "--control; all others count as perturbations, unless you remove their rows."
        )
    return lines
