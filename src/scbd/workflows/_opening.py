"""Cells at a path, whatever it holds that can be trained on as it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scbd._keys import IMAGE_KEY
from scbd.data import kind_of, open_screen, read_cellprofiler, read_profiles

if TYPE_CHECKING:
    import os

    from anndata import AnnData

# what reads tables of features, by their kind
TABLES: dict[str, Any] = {
    "profiles": read_profiles,
    "deepprofiler": read_profiles,
    "cellprofiler": read_cellprofiler,
}


def open_cells(
    path: str | os.PathLike[str],
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
) -> tuple[AnnData, dict[str, str]]:
    """Cells, and the arguments of ``setup_anndata`` that say where their images or features are.

    Parameters
    ----------
    path
        A screen, see :func:`scbd.data.open_screen`; or a table of features (CSV, TSV, Parquet), or the output of
        CellProfiler or DeepProfiler.
    image_key, layer, obsm_key
        Of a screen: where its images or features are.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError, ImportError
        If there is nothing, or it cannot be read.
    """
    where = {name: value for name, value in (("layer", layer), ("obsm_key", obsm_key)) if value is not None}
    read = TABLES.get(kind_of(path).name) if Path(path).exists() else None
    if read is None:
        return open_screen(path, image_key=image_key, **where), where or {"image_key": image_key}
    if where not in ({}, {"layer": "X"}):
        msg = f"{path} is a table of features, which has no {' and '.join(where)}: leave that out."
        raise ValueError(msg)
    return read(path), {"layer": "X"}
