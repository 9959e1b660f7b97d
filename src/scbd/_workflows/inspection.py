"""Open a file or folder of cells, or describe its content and propose the command with which it can be analysed.

This module holds the functions of the command ``scbd inspect``. It imports neither torch nor other slow packages. The
command therefore answers at once, and other commands report mistakes at once.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import format_count, join_first
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.labels import find_likely_controls, label_text, normalise_name
from scbd.data._formats import FEATURE_PREFIXES, SOURCE_COLUMN, DataKind, detect_kind, image_columns
from scbd.data._plates_and_wells import find_position_columns
from scbd.data._profiles import (
    Missing,
    propose_features,
    read_profiles,
    read_table_of_features,
)
from scbd.data._readers import has_mask_word, read_crops
from scbd.data._tables import is_table, read_first_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from anndata import AnnData

# Kinds of files that hold tables of features of cells or wells, by the names that scbd.data._formats gives to these
# kinds.
_KINDS_OF_TABLES = ("profiles", "tables", "deepprofiler")
# Kinds of files that hold crops (images of single cells), by the names that scbd.data._formats gives to these kinds.
# Crops must be converted with "scbd convert" before training.
_KINDS_OF_CROPS = ("image_table", "image_folder", "lmdb", "arrays")
# number of randomly drawn cells from whose images the range of pixel values is computed
_N_SAMPLED_CELLS = 64
# Maximum number of names to list of numeric columns that are not taken as features, because these names do not begin
# with a prefix of features.
_MAX_LISTED_COLUMNS = 12

# Names of columns in the constants below have the form that normalise_name returns: lower case, letters and digits
# only.

# Usual names of the column with the perturbation of each cell.
_PERTURBATIONS = "gene genesymbol genename targetgene perturbation pert compound compoundname treatment drug".split()
# Pattern of usual names of the column with the well of each cell.
_WELL = re.compile(r"(image)?(metadata)?(foci)?well(id|name|position)?")
# Pattern of usual names of the column with the site (field of view within a well) of each cell.
_SITE = re.compile(r"(image)?(metadata)?(foci)?(site|field|fov)(id|number|no)?")
# Patterns of usual names of columns that can serve as the environment, in decreasing order of preference. The first
# pattern is for plates, batches, days and similar, the second for wells, the third for replicates, and the fourth for
# sites.
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
# Maximum fraction of the perturbations that may occur in only one environment, for a column to be preferred as the
# environment. With a larger fraction, the column is proposed only if no other column is better.
_MAX_CONFOUNDED_FRACTION = 0.1
# Pattern of values that mark negative or positive controls in a column with the kind of treatment, such as a column
# "control_type".
_CONTROL_KIND = re.compile(r"control|ctrl|ctl|negcon|poscon")
# pattern of names of features that count objects, such as cells
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
    """Open cells as an AnnData, from a screen (AnnData file with images or features) or a table of features.

    Parameters
    ----------
    path
        A screen, see :func:`scbd.data.open_screen`; or a table of features, see :func:`scbd.data.read_profiles`.
    image_key, layer, obsm_key
        Location of the images or features in a screen: key of the images in ``obsm``; name of the layer of the
        features; or key of the features in ``obsm``. Not used for a table.
    features
        Prefixes of the names of features in a table, see :func:`scbd.data.read_profiles`. Only for a table.
    missing
        Treatment of missing and infinite values in a table, see :func:`scbd.data.read_profiles`. Only for a table.

    Returns
    -------
    The cells; and the arguments of ``setup_anndata`` that state where in the AnnData the images or features are stored.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    ValueError, KeyError, ImportError
        If the path cannot be read; if it holds crops, which must be converted to a screen first; or if an argument for
        tables is given with a screen, or an argument for screens with a table.
    """
    where = {name: value for name, value in (("layer", layer), ("obsm_key", obsm_key)) if value is not None}
    kind = detect_kind(path)
    is_feature_table = kind.name in _KINDS_OF_TABLES or (
        kind.name == "image_table" and features is not FEATURE_PREFIXES
    )
    if kind.name in _KINDS_OF_CROPS and not is_feature_table:
        msg = f"{path} is {kind.about}: make a screen of it first, {_conversion_command(path, kind)}."
        raise ValueError(msg)
    if not is_feature_table:
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
    """Describe the content of a file or folder, and propose the command with which it can be converted or analysed.

    No file is written.

    Parameters
    ----------
    path
        File or folder of any kind. The formats that can be read are listed in :func:`scbd.data.read_crops` and
        :func:`scbd.data.read_profiles`.
    image_key
        Key of the images in ``obsm`` of an AnnData, or in an ``.npz``.

    Returns
    -------
    Lines of text. They contain, as far as it applies:

    - the kind of file;
    - the number of cells;
    - for images, the channels, and the range of pixel values of each channel in a sample of 64 cells;
    - for features, the names of the first features, and the numeric columns that are not taken as features;
    - columns whose values are shared by several cells, so that they may be labels;
    - other columns and labels that may be meant as environment and controls;
    - the proposed command.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    ValueError, KeyError, ImportError
        If the path cannot be read.
    """
    kind = detect_kind(path)
    if kind.name in _KINDS_OF_TABLES:
        lines = _describe_table(path)
    elif kind.name in (*_KINDS_OF_CROPS, "anndata"):
        lines = _describe_images(path, kind, image_key)
    else:
        lines = iter([f"Next: {kind.advice}."])
    return "\n".join([f"{path} is {kind.about}.", *lines])


def _describe_table(path: str | os.PathLike[str]) -> Iterator[str]:
    first_rows = read_first_rows(path) if is_table(path) else pd.DataFrame(columns=[])
    words = propose_features(first_rows)
    table = read_table_of_features(path, features=words) if words else read_table_of_features(path)
    yield _describe_features(len(table.obs), table.names.tolist())
    if counts := [name for name in table.names if _COUNT_FEATURE.search(str(name).replace("_", " "))]:
        yield f"Among the features are counts, which depend on how many cells were seeded: {join_first(counts)}."
    values = _count_values(table.obs)
    unused = [name for name in table.obs.select_dtypes("number") if name not in values]
    if unused:
        columns = f"{format_count(len(unused), 'column')} of numbers"
        how = "; to take them, add their names, or what they begin with, to --features" if words else ""
        yield f"Not taken as features: {columns} ({join_first(unused, _MAX_LISTED_COLUMNS if words else 5)}){how}."
    places = find_position_columns(table.obs)
    if absent := [key for key in ("plate", "well") if key not in places and SOURCE_COLUMN not in table.obs]:
        columns = ", ".join(f"Metadata_{key.capitalize()}=…" for key in absent)
        yield (
            f"The table has no column of {' and '.join(f'{key}s' for key in absent)}. If you know them, add them with "
            f"pandas, table.assign({columns}), save the table, and inspect it again."
        )
    named = f" --features {shlex.join(words)}" if words else ""
    yield from _describe_labels_of_features(table.obs, values, f"{_quote_word(path)}{named}", "the table")


def _describe_features(n: int, names: Sequence[str]) -> str:
    return f"{n:,} cells or wells of {len(names):,} features: {join_first(names)}"


def _describe_labels_of_features(
    obs: pd.DataFrame, values: dict[str, pd.Series], given: str, table: str
) -> Iterator[str]:
    """Describe the columns of a data set of features that may be labels, and propose a command ``scbd run``.

    Parameters
    ----------
    obs
        Table of the labels of the cells or wells.
    values
        Number of rows with each value, for each column that may be a label.
    given
        File and options with which the proposed command begins.
    table
        Name of the table to which the user can add labels, for messages.

    Yields
    ------
    Lines of text.
    """
    if not values:
        yield "No column has values that several rows share, such as a compound or a plate."
        yield f"Next: add columns with the perturbation and the environment to {table}, and inspect it again."
        return
    options, notes = propose_options(obs, values, of_features=True)
    yield from (*_describe_columns(values), *notes, f"Next: scbd run {given} {options}")


def _describe_images(path: str | os.PathLike[str], kind: DataKind, image_key: str) -> Iterator[str]:
    """Describe images of cells, or the features of an AnnData without images, and propose the next command.

    The command is ``scbd run`` for a screen, and ``scbd convert`` for crops that must be converted first. If no column
    may be a label, the lines explain how the user can add labels.
    """
    try:
        files: dict[str, Any] = {"file_columns": _channel_columns(path)} if kind.name == "image_table" else {}
        crops = read_crops(path, image_key=image_key, **files)
    except KeyError:
        if kind.name != "anndata" or image_key != IMAGE_KEY:
            raise
        from scbd.data._screens import open_screen

        # If the AnnData has neither images nor features, open_screen raises an error.
        cells = open_screen(path, layer="X")
        yield _describe_features(cells.n_obs, cells.var_names.tolist())
        given = f"{_quote_word(path)} --layer X"
        yield from _describe_labels_of_features(cells.obs, _count_values(cells.obs), given, "obs")
        return
    n, *shape = crops.images.shape
    yield f"{n:,} cells of {' × '.join(map(str, shape))} {crops.images.dtype}"
    n_sampled = min(n, _N_SAMPLED_CELLS)
    sample = crops.images.read(np.sort(np.random.default_rng(0).choice(n, n_sampled, replace=False)))
    where = f" in a random sample of {n_sampled} cells" if n_sampled < n else ""
    for name, low, high in zip(crops.channels, sample.min((0, 2, 3)), sample.max((0, 2, 3)), strict=True):
        yield f"  channel {name}: {low:g} to {high:g}{where}"
    if files and (masks := [column for column in image_columns(path) if column not in files["file_columns"]]):
        yield f"Not taken as channels, because the names are those of masks: {join_first(masks)}."

    key = "" if image_key == IMAGE_KEY else f"--image-key {shlex.quote(image_key)} "
    values = _count_values(crops.obs)
    yield from _describe_columns(values)
    if values and Path(path).suffix in (".h5ad", ".zarr"):
        options, notes = propose_options(crops.obs, values, of_features=False)
        yield from (*notes, f"Next: scbd run {_quote_word(path)} {key}{options}")
    elif values:
        y_key = _propose_perturbation(values)
        yield from _describe_missing(crops.obs, [y_key])
        yield f"Next: {_conversion_command(path, kind, f'{key}--y-key {_quote_word(y_key)}')}"
    else:
        yield "No column has values that several cells share, and training needs labels of the perturbation."
        if kind.name == "image_table":
            yield f"Next: add columns with the perturbation and the environment to {path}, and inspect it again."
            return
        order = (
            "in their order" if kind.name == "arrays" else f"and a column with its name, such as {crops.obs.index[0]}"
        )
        yield f"Write a table with columns for perturbation and environment, one row per image, {order}."
        yield f"Next: {_conversion_command(path, kind, f'{key}--table labels.csv --y-key …')}"


def _channel_columns(path: str | os.PathLike[str]) -> list[str]:
    """Return the columns of a table that name image files, without the columns that name segmentation masks."""
    columns, first_rows = image_columns(path), read_first_rows(path).rename(columns=str)
    channels = [
        column
        for column in columns
        if not (has_mask_word(column) or first_rows[column].map(lambda file: has_mask_word(str(file))).any())
    ]
    return channels or columns


def _conversion_command(path: str | os.PathLike[str], kind: DataKind, options: str = "--y-key …") -> str:
    """Return the command ``scbd convert`` that converts the crops at ``path`` to a screen, quoted for a shell."""
    files = f"--file-columns {shlex.join(_channel_columns(path))} " if kind.name == "image_table" else ""
    return f"scbd convert {_quote_word(path)} {files}{options} --out screen.zarr"


def _quote_word(word: object) -> str:
    """Quote a word of a proposed command for a shell; `None` becomes an ellipsis, for the user to fill in."""
    return "…" if word is None else shlex.quote(str(word))


def _describe_columns(values: dict[str, pd.Series]) -> list[str]:
    return [
        f"  column {column}: {len(counts):,} values "
        f"({join_first(f'{value} {count:,}' for value, count in counts.items())})"
        for column, counts in values.items()
    ]


def _describe_missing(obs: pd.DataFrame, columns: Sequence[str | None]) -> list[str]:
    """Return a line of advice for each of the given columns of labels that has missing values.

    The user must fill in these values or remove the rows, because training raises an error for cells without a label.
    """
    return [
        f"Column {column} has no value in {n_missing:,} of {len(obs):,} rows: fill it in, or remove these rows."
        for column in columns
        if column is not None and (n_missing := int(obs[column].isna().sum()))
    ]


def _count_values(obs: pd.DataFrame) -> dict[str, pd.Series]:
    """Find the columns of ``obs`` that may be labels of cells, and count the cells with each value of such a column.

    A column may be a label if it does not hold fractional numbers, if it has more than one value, and if each value has
    at least two cells on average.

    Returns
    -------
    Mapping from the name of each such column to its values (index) with their numbers of cells.
    """
    found = {
        column: obs[column].value_counts().rename(label_text)  # plates with missing values are floats; show 1, not 1.0
        for column in obs
        if obs[column].dtype.kind != "f" or (obs[column].dropna() % 1 == 0).all()
    }
    return {column: counts for column, counts in found.items() if 1 < len(counts) <= len(obs) / 2}


def propose_options(obs: pd.DataFrame, values: dict[str, pd.Series], *, of_features: bool) -> tuple[str, list[str]]:
    """Propose options of ``scbd run`` for the columns of perturbation and environment, and for the controls.

    Parameters
    ----------
    obs
        Table of the cells with their labels.
    values
        Number of cells with each value, for each column that may be a label.
    of_features
        Whether the data are features; otherwise, they are images. For features, a column of wells is proposed as the
        position on the plate; for images, it is proposed as the environment.

    Returns
    -------
    The options as one text, and lines of advice about other columns. The value of an option is an ellipsis, for the
    user to fill in, if no column is found for it, or if several columns may be the perturbation.
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
    """Return the column that is probably the perturbation, or `None` if no column or several columns qualify.

    There are two signs: the column has a usual name, such as "gene" or "compound", or its values include a usual name
    of controls, such as "DMSO". Columns with both signs are preferred. Columns with a usual name only are the second
    choice, and columns with controls only the third.
    """
    have_controls = [column for column, counts in values.items() if find_likely_controls(counts.index)]
    named = [column for column in values if normalise_name(column) in _PERTURBATIONS]
    found = [column for column in named if column in have_controls] or named or have_controls
    return found[0] if len(found) == 1 else None


def _propose_environment(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str | None, *, of_features: bool
) -> tuple[str | None, list[str]]:
    """Choose the column to propose as the environment, and word at most one line of advice about alternatives.

    Columns are recognised by their names. Plates, batches, days and similar are preferred; if there are none, wells
    (for images), replicates or sites are candidates, in this order. Of the candidates in which at most a tenth of the
    perturbations occur in only one environment, the one with the fewest environments is chosen. If there is no such
    candidate, the one in which the fewest perturbations occur in only one environment is chosen.
    """
    named = [
        [column for column in values if column != y_key and pattern.fullmatch(normalise_name(column))]
        for pattern in _ENVIRONMENTS
        if not (of_features and pattern is _WELL)
    ]
    candidates = [column for columns in named for column in columns]
    if not candidates:
        return None, ["No column has the name of a plate, batch, day, donor or the like: fill in --e-key."]
    # number of perturbations that occur in only one environment, for each column
    confounded, limit = dict.fromkeys(candidates, 0), 0.0
    if y_key is not None:
        by_perturbation = obs.groupby(y_key, observed=True, sort=False)
        confounded = {column: int((by_perturbation[column].nunique() == 1).sum()) for column in candidates}
        limit = _MAX_CONFOUNDED_FRACTION * len(values[y_key])
    e_key = min(
        next(columns for columns in named if columns),
        key=lambda column: (0, len(values[column])) if confounded[column] <= limit else (confounded[column], 0),
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
    """Return the columns whose names are those of plates, batches, days, wells or replicates.

    Cells with different values in such a column belong to different replicates. Columns of sites (fields of view) are
    not included, because the sites of a well belong to the same replicate.
    """
    patterns = [pattern for pattern in _ENVIRONMENTS if pattern is not _SITE]
    return [column for pattern in patterns for column in columns if pattern.fullmatch(normalise_name(column))]


def _describe_controls(
    obs: pd.DataFrame, values: dict[str, pd.Series], y_key: str, controls: Sequence[str]
) -> Iterator[str]:
    """Yield a line of advice for each column that marks perturbations as controls, such as a column "control_type".

    A column is skipped if all perturbations that it marks as controls are already proposed for ``--control``.
    """
    for column, counts in values.items():
        kinds = [
            kind for kind in counts.index if _CONTROL_KIND.search(normalise_name(kind)) or find_likely_controls([kind])
        ]
        marked = {kind: obs.loc[(obs[column] == kind).to_numpy(), y_key].dropna().unique() for kind in kinds}
        if column == y_key or {str(label) for labels in marked.values() for label in labels} <= set(controls):
            continue
        kinds_of_labels = "; ".join(f"{kind}: {join_first(labels)}" for kind, labels in marked.items() if len(labels))
        yield (
            f"Column {column} marks controls of {y_key} ({kinds_of_labels}). Name the labels of unperturbed cells with "
            "--control; all others count as perturbations, unless you remove their rows."
        )
