"""Cells at a path, whatever it holds that can be trained on as it lies."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from scbd._keys import IMAGE_KEY
from scbd._labels import as_columns
from scbd.data import image_columns, kind_of, open_screen
from scbd.data.profiles import Missing, read_features

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

# kinds of tables of features
TABLES = ("profiles", "deepprofiler", "cellprofiler")

# images that are converted before they are trained on, and the column that is then known to be a label
LABELS: dict[str, str | None] = {"image_table": None, "image_folder": "label", "lmdb": "gene", "arrays": None}


def conversion(
    path: str | os.PathLike[str], kind: str, *, y: str | None = None, table: bool = False, image_key: str | None = None
) -> str:
    """The command that makes a screen of images, as a shell takes it.

    Parameters
    ----------
    path
        Where they are.
    kind
        One of ``LABELS``.
    y
        Columns of the perturbation, as they are typed; by default the one that is known, if any.
    table
        Whether a table of the cells has to be given.
    image_key
        Where the images are, of a kind that has keys.
    """
    columns = image_columns(path) if kind == "image_table" else []
    files = f"--file-columns {typed(columns)} " if columns else ""
    files += key_option(image_key)
    keys = y or LABELS.get(kind) or typed(())
    return f"scbd convert {typed([path])} {files}{'--table … ' * table}--y-key {keys} --out screen.h5ad"


def key_option(image_key: str | None) -> str:
    """What is typed of the key of the images: nothing, where it is the one that is taken without."""
    return "" if image_key in (None, IMAGE_KEY) else f"--image-key {typed([image_key])} "


def typed(words: Iterable[object]) -> str:
    """Words as a shell takes them; of none, a gap to fill."""
    return " ".join(shlex.quote(str(word)) for word in words) or "…"


def open_cells(
    path: str | os.PathLike[str],
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
    obs_columns: str | Sequence[str] = (),
    labels: Sequence[str] = (),
    y_key: str | Sequence[str] | None = None,
    missing: Missing = "drop",
) -> tuple[AnnData, dict[str, str]]:
    """Cells, and the arguments of ``setup_anndata`` that say where their images or features are.

    Parameters
    ----------
    path
        A screen, see :func:`scbd.data.open_screen`; or a table of features (CSV, TSV, Parquet), or the output of
        CellProfiler or DeepProfiler.
    image_key, layer, obsm_key
        Of a screen: where its images or features are.
    obs_columns
        Of a table: columns of numbers that are no features, see :func:`scbd.data.read_profiles`.
    labels
        Of a table: columns that are used as labels or covariates, and so are no features either. Without effect on a
        screen.
    y_key
        Columns of the perturbation, for the command that an error names.
    missing
        Of a table: what becomes of missing and infinite values, see :func:`scbd.data.read_profiles`.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError, ImportError
        If there is nothing, or it cannot be read.
    """
    where = {name: value for name, value in (("layer", layer), ("obsm_key", obsm_key)) if value is not None}
    kind = kind_of(path) if Path(path).exists() else None
    if kind is not None and kind.name in LABELS:
        table = Path(path).suffix == ".npy"
        y = None if y_key is None else shlex.join(as_columns(y_key))
        made = conversion(path, kind.name, y=y, table=table, image_key=image_key)
        msg = f"{path} is {kind.about}: make a screen of it first ({made})."
        raise ValueError(msg)
    if kind is None or kind.name not in TABLES:
        if obs_columns:
            msg = f"{path} is no table of features, and has its columns in obs already: leave obs_columns out."
            raise ValueError(msg)
        if missing != "drop":
            msg = f"{path} is no table of features, and is read as it is: leave missing={missing!r} out."
            raise ValueError(msg)
        return open_screen(path, image_key=image_key, **where), where or {"image_key": image_key}
    if where not in ({}, {"layer": "X"}):
        msg = f"{path} is a table of features, which has no {' and '.join(where)}: leave that out."
        raise ValueError(msg)
    return read_features(path, obs_columns=obs_columns, labels=labels, missing=missing), {"layer": "X"}
