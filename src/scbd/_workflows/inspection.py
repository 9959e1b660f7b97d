"""Open cells of any format, and inspect a file or folder: its kind, its content, and a command that accepts it.

This module does not import torch or other slow packages, so that ``scbd inspect`` and mistakes on the command line are
answered at once.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._shared.checks import format_count, join_first
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.labels import find_likely_controls, normalise_name
from scbd.data._formats import DataKind, detect_kind, image_columns, is_table, read_first_rows
from scbd.data._profiles import FEATURE_PREFIXES, Missing, number_beginnings, read_profiles, read_table_of_features
from scbd.data._readers import read_crops

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

    from scbd.data._readers import Crops

# kinds of files (see scbd.data._formats): tables of features, and crops that must be converted to a screen first
_KINDS_OF_TABLES = ("profiles", "tables", "deepprofiler")
_KINDS_OF_CROPS = ("image_table", "image_folder", "lmdb", "arrays")
# number of randomly drawn cells from which the range of pixel values is reported
_N_SAMPLED_CELLS = 64
# maximum number of numeric columns to list that the proposed prefixes of features do not include
_MAX_LISTED_COLUMNS = 12

# usual names of columns (in the form of bare_name): perturbation, well, and site (field of view) in a well
_PERTURBATIONS = "gene genesymbol genename targetgene perturbation pert compound compoundname treatment drug".split()
_WELL = re.compile(r"(image)?(metadata)?(foci)?well(id|name|position)?")
_SITE = re.compile(r"(image)?(metadata)?(foci)?(site|field|fov)(id|number|no)?")
# names of environments, in order of preference: plates, batches, days and the like; wells; replicates; sites
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
# maximum fraction of perturbations that may lie in a single environment; above it, another column is proposed
_MAX_CONFOUNDED_FRACTION = 0.1
# values of a column that mark controls of any sort, positive ones included
_CONTROL_KIND = re.compile(r"control|ctrl|ctl|negcon|poscon")
# names of features that are counts of objects
_COUNT_FEATURE = re.compile(r"\b(number of|counts?)\b", re.IGNORECASE)


def open_cells(
    path: str | os.PathLike[str],
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
    features: str | Sequence[str] = FEATURE_PREFIXES,
    missing: Missing = "median",
) -> tuple[AnnData, dict[str, str]]:
    """Open a screen or a table of features.

    Parameters
    ----------
    path
        A screen, see :func:`scbd.data.open_screen`; or a table of features, see :func:`scbd.data.read_profiles`.
    image_key, layer, obsm_key
        Only for a screen: key of its images in ``obsm``, or the layer or the key in ``obsm`` of its features.
    features
        Only for a table: prefixes of the names of features, see :func:`scbd.data.read_profiles`.
    missing
        Only for a table: treatment of missing and infinite values, see :func:`scbd.data.read_profiles`.

    Returns
    -------
    The cells, and the arguments of ``setup_anndata`` that state where in the AnnData the images or features are.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    ValueError, KeyError, ImportError
        If the path cannot be read, holds crops that must be converted to a screen first, or an argument is for the
        other kind of cells.
    """
    where = {name: value for name, value in (("layer", layer), ("obsm_key", obsm_key)) if value is not None}
    kind = detect_kind(path)
    if kind.name in _KINDS_OF_CROPS:
        msg = f"{path} is {kind.about}: make a screen of it first, {_conversion_command(path, kind)}."
        raise ValueError(msg)
    if kind.name not in _KINDS_OF_TABLES:
        if features is not FEATURE_PREFIXES or missing != "median":
            msg = f"{path} is not a table of features: remove features and missing."
            raise ValueError(msg)
        from scbd.data._screens import open_screen

        return open_screen(path, image_key=image_key, **where), where or {"image_key": image_key}
    if where not in ({}, {"layer": "X"}):
        msg = f"{path} is a table of features, which has no {' and '.join(where)}: remove that."
        raise ValueError(msg)
    return read_profiles(path, features=features, missing=missing), {"layer": "X"}


def describe_path(path: str | os.PathLike[str], *, image_key: str = IMAGE_KEY) -> str:
    """Describe a file or folder, and propose the command that accepts it, without writing any file.

    Parameters
    ----------
    path
        File or folder of any kind. The formats that can be read are listed in :func:`scbd.data.read_crops` and
        :func:`scbd.data.read_profiles`.
    image_key
        Key of the images in ``obsm`` of an AnnData, or in an ``.npz``.

    Returns
    -------
    Lines of text, where they apply:

    - the kind of file;
    - the number of cells;
    - for images, the channels with the range of their pixels in a sample of 64 cells;
    - for features, the names of the first ones, and the numeric columns that are not taken as features;
    - columns with values that several cells share, which may be labels;
    - alternatives for environment and controls;
    - the next command.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    ValueError, KeyError, ImportError
        If the path cannot be read.
    """
    kind = detect_kind(path)
    lines = [f"{path} is {kind.about}."]
    if kind.name in _KINDS_OF_TABLES:
        return "\n".join([*lines, *_describe_table(path)])
    if kind.name not in (*_KINDS_OF_CROPS, "anndata"):
        return "\n".join([*lines, f"Next: {kind.advice}."])
    try:
        crops = read_crops(path, image_key=image_key, file_columns=_file_columns(path, kind) or "path")
    except KeyError:
        if kind.name != "anndata" or image_key != IMAGE_KEY:
            raise
        from scbd.data._screens import open_screen

        cells = open_screen(path, layer="X")  # raises an error if there are no features either
        lines.append(_describe_features(cells.n_obs, cells.var_names.tolist()))
        given = f"{_quote_word(path)} --layer X"
        return "\n".join([*lines, *_describe_labels_of_features(cells.obs, _count_values(cells.obs), given, "obs")])
    return "\n".join([*lines, *_describe_pixels(crops), *_describe_labels_of_images(path, kind, crops, image_key)])


def _describe_table(path: str | os.PathLike[str]) -> list[str]:
    first_rows = read_first_rows(path) if is_table(path) else pd.DataFrame()
    words = _propose_features(first_rows)
    table = read_table_of_features(path, features=words) if words else read_table_of_features(path)
    lines = [_describe_features(len(table.obs), table.names.tolist())]
    if counts := [name for name in table.names if _COUNT_FEATURE.search(str(name).replace("_", " "))]:
        lines.append(
            f"Among the features are counts, which depend on how many cells were seeded: {join_first(counts)}."
        )
    values = _count_values(table.obs)
    unused = [name for name in table.obs.select_dtypes("number") if name not in values]
    if unused:
        columns = f"{format_count(len(unused), 'column')} of numbers"
        how = "; to take them, add their names, or what they begin with, to --features" if words else ""
        lines.append(
            f"Not taken as features: {columns} ({join_first(unused, _MAX_LISTED_COLUMNS if words else 5)}){how}."
        )
    named = f" --features {shlex.join(words)}" if words else ""
    return lines + _describe_labels_of_features(table.obs, values, f"{_quote_word(path)}{named}", "the table")


def _propose_features(first_rows: pd.DataFrame) -> list[str]:
    """Return prefixes of the names of features, for the option ``--features``.

    If a column without numbers has the same prefix, the whole names of the features are returned instead. The list is
    empty if features have CellProfiler's names, which are taken as features by default.
    """
    if any(str(name).startswith(FEATURE_PREFIXES) for name in first_rows):
        return []
    others = list(map(str, first_rows.select_dtypes(exclude="number")))
    return [
        part
        for word, names in number_beginnings(first_rows).items()
        for part in (names if any(other.startswith(word) for other in others) else [word])
    ]


def _describe_features(n: int, names: Sequence[str]) -> str:
    return f"{n:,} cells or wells of {len(names):,} features: {join_first(names)}"


def _describe_labels_of_features(obs: pd.DataFrame, values: dict[str, pd.Series], given: str, table: str) -> list[str]:
    """Return lines that describe the labels of features, and propose the next command.

    Parameters
    ----------
    obs
        Table of the cells or wells.
    values
        Number of rows with each value, for each column that may be a label.
    given
        File and options with which the proposed command begins.
    table
        Name of the table to which the user can add labels, for messages.
    """
    if not values:
        return [
            "No column has values that several rows share, such as a compound or a plate.",
            f"Next: add columns with the perturbation and the environment to {table}, and inspect it again.",
        ]
    options, notes = propose_options(obs, values, of_features=True)
    return [*_describe_columns(values), *notes, f"Next: scbd run {given} {options}"]


def _describe_pixels(crops: Crops) -> list[str]:
    n, *shape = crops.images.shape
    n_sampled = min(n, _N_SAMPLED_CELLS)
    sample = crops.images.read(np.sort(np.random.default_rng(0).choice(n, n_sampled, replace=False)))
    where = f" in a random sample of {n_sampled} cells" if n_sampled < n else ""
    ranges = zip(crops.channels, sample.min((0, 2, 3)), sample.max((0, 2, 3)), strict=True)
    return [
        f"{n:,} cells of {' × '.join(map(str, shape))} {crops.images.dtype}",
        *(f"  channel {name}: {low:g} to {high:g}{where}" for name, low, high in ranges),
    ]


def _describe_labels_of_images(path: str | os.PathLike[str], kind: DataKind, crops: Crops, image_key: str) -> list[str]:
    """Return lines that describe the labels of images, and propose the next command."""
    key = "" if image_key == IMAGE_KEY else f"--image-key {shlex.quote(image_key)} "
    values = _count_values(crops.obs)
    columns = _describe_columns(values)
    if columns and Path(path).suffix in (".h5ad", ".zarr"):
        options, notes = propose_options(crops.obs, values, of_features=False)
        return [*columns, *notes, f"Next: scbd run {_quote_word(path)} {key}{options}"]
    if columns:
        y_key = _propose_perturbation(values)
        notes = _describe_missing(crops.obs, [y_key])
        return [*columns, *notes, f"Next: {_conversion_command(path, kind, f'{key}--y-key {_quote_word(y_key)}')}"]
    lines = ["No column has values that several cells share, and training needs labels of the perturbation."]
    if kind.name == "image_table":
        return [*lines, f"Next: add columns with the perturbation and the environment to {path}, and inspect it again."]
    order = "in their order" if kind.name == "arrays" else f"and a column with its name, such as {crops.obs.index[0]}"
    return [
        *lines,
        f"Write a table with columns for perturbation and environment, one row per image, {order}.",
        f"Next: {_conversion_command(path, kind, f'{key}--table labels.csv --y-key …')}",
    ]


def _conversion_command(path: str | os.PathLike[str], kind: DataKind, options: str = "--y-key …") -> str:
    """Return the command that converts images to a screen, quoted for a shell."""
    columns = _file_columns(path, kind)
    files = f"--file-columns {shlex.join(columns)} " if columns else ""
    return f"scbd convert {_quote_word(path)} {files}{options} --out screen.zarr"


def _file_columns(path: str | os.PathLike[str], kind: DataKind) -> list[str]:
    return image_columns(path) if kind.name == "image_table" else []


def _quote_word(word: object) -> str:
    """Return a word quoted for a shell, or an ellipsis in place of `None`, for the user to fill in."""
    return "…" if word is None else shlex.quote(str(word))


def _describe_columns(values: dict[str, pd.Series]) -> list[str]:
    return [
        f"  column {column}: {len(counts):,} values "
        f"({join_first(f'{value} {count:,}' for value, count in counts.items())})"
        for column, counts in values.items()
    ]


def _describe_missing(obs: pd.DataFrame, columns: Sequence[str | None]) -> list[str]:
    """Return a line for each column with missing values, because training refuses rows without a label."""
    return [
        f"Column {column} has no value in {n_missing:,} of {len(obs):,} rows: fill it in, or remove these rows."
        for column in columns
        if column is not None and (n_missing := int(obs[column].isna().sum()))
    ]


def _count_values(obs: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the number of cells with each value, for each column that may be a label.

    A column may be a label if it has no floating-point numbers, more than one value, and at least two cells per value
    on average.
    """
    found = {column: obs[column].value_counts() for column in obs if obs[column].dtype.kind != "f"}
    return {column: counts for column, counts in found.items() if 1 < len(counts) <= len(obs) / 2}


def propose_options(obs: pd.DataFrame, values: dict[str, pd.Series], *, of_features: bool) -> tuple[str, list[str]]:
    """Propose the perturbation, the environment and the controls as options of ``scbd run``.

    Parameters
    ----------
    obs
        Table of the cells.
    values
        Number of cells with each value, for each column that may be a label.
    of_features
        Whether cells have features and not images. With features, a column of wells is proposed as the position on the
        plate; with images, as an environment.

    Returns
    -------
    The options as text, and lines of advice about other columns. An option is an ellipsis, for the user to fill in, if
    no column is found for it, or if several columns may be the perturbation.
    """
    y_key = _propose_perturbation(values)
    e_key, notes = _propose_environment(obs, values, y_key, of_features=of_features)
    controls = [] if y_key is None else find_likely_controls(values[y_key].index)
    options: dict[str, Sequence[str | None]] = {"y-key": [y_key], "e-key": [e_key]}
    if controls:
        options["control"] = controls
        wells = [column for column in values if _WELL.fullmatch(normalise_name(column))]
        if of_features and len(wells) == 1:
            options["position-key"] = wells
    if y_key is not None:
        notes += _describe_controls(obs, values, y_key, controls)
    notes += _describe_missing(obs, [y_key, e_key, *options.get("position-key", [])])
    typed = [f"--{name} {' '.join(map(_quote_word, words))}" for name, words in options.items()]
    return " ".join([*typed, "--out results"]), notes


def _propose_perturbation(values: dict[str, pd.Series]) -> str | None:
    """Return the column that has the name of a perturbation or contains controls; `None` unless it is the only one.

    Columns with both take precedence over columns with the name alone, and these over columns with controls alone.
    """
    have_controls = [column for column, counts in values.items() if find_likely_controls(counts.index)]
    named = [column for column in values if normalise_name(column) in _PERTURBATIONS]
    found = [column for column in named if column in have_controls] or named or have_controls
    return found[0] if len(found) == 1 else None


def _propose_environment(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str | None, *, of_features: bool
) -> tuple[str | None, list[str]]:
    """Return the proposed column of the environment, and at most one line of advice with the alternatives.

    Candidates are the columns of the most preferred group of names that occurs (plates, batches and the like come
    first). Perturbations repeat across a column if at most a tenth of them lie in a single environment. Of the
    candidates across which perturbations repeat, the one with the fewest environments is proposed. If no candidate
    qualifies, the one with the fewest perturbations in a single environment is proposed.
    """
    named = [
        [column for column in values if column != y_key and pattern.fullmatch(normalise_name(column))]
        for pattern in _ENVIRONMENTS
        if not (of_features and pattern is _WELL)
    ]
    candidates = [column for columns in named for column in columns]
    if not candidates:
        return None, ["No column has the name of a plate, batch, day, donor or the like: fill in --e-key."]
    confounded = {column: _count_confounded(obs, y_key, column) for column in candidates}
    first = next(columns for columns in named if columns)
    limit = 0 if y_key is None else _MAX_CONFOUNDED_FRACTION * len(values[y_key])
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


def find_place_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns with names of plates, batches, days, wells or replicates, which distinguish replicates.

    Sites (fields of view) are not included, because the sites of a well belong to the same replicate.
    """
    patterns = [pattern for pattern in _ENVIRONMENTS if pattern is not _SITE]
    return [column for pattern in patterns for column in columns if pattern.fullmatch(normalise_name(column))]


def _count_confounded(obs: pd.DataFrame, y_key: str | None, column: str) -> int:
    """Return the number of perturbations that lie in a single environment of the column."""
    if y_key is None:
        return 0
    pairs = obs[[y_key, column]].dropna().drop_duplicates()
    return int((pairs[y_key].value_counts() == 1).sum())


def _describe_controls(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str, controls: Sequence[str]
) -> list[str]:
    """Return a line for each further column that marks labels as controls which ``--control`` does not yet include."""
    lines = []
    for column, counts in values.items():
        kinds = [
            kind for kind in counts.index if _CONTROL_KIND.search(normalise_name(kind)) or find_likely_controls([kind])
        ]
        marked = {kind: obs.loc[(obs[column] == kind).to_numpy(), y_key].dropna().unique() for kind in kinds}
        if column == y_key or {str(label) for labels in marked.values() for label in labels} <= set(controls):
            continue
        kinds_of_labels = "; ".join(f"{kind}: {join_first(labels)}" for kind, labels in marked.items() if len(labels))
        lines.append(
            f"Column {column} marks controls of {y_key} ({kinds_of_labels}). Name the labels of unperturbed cells with "
            "--control; all others count as perturbations, unless you remove their rows."
        )
    return lines
