"""Tables of features that others have measured: wells of a Cell Painting experiment, and single cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.datasets._files import read_table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from anndata import AnnData

_CPJUMP1 = (
    "Metadata_Plate Metadata_Well Metadata_broad_sample Metadata_pert_iname Metadata_control_type Metadata_gene "
    "Metadata_smiles Metadata_moa Metadata_hours"
).split()
_BREINIG = "cell_code cell_id plate replicate well field target split".split()


def cpjump1(path: str | os.PathLike[str]) -> AnnData:
    """CPJUMP1: wells of A549 cells under 306 compounds, as CellProfiler features.

    Parameters
    ----------
    path
        ``.parquet`` or ``.csv`` with a well a row: columns ``Metadata_Plate``, ``Metadata_Well``,
        ``Metadata_broad_sample`` (compound, or ``DMSO``), ``Metadata_pert_iname``, ``Metadata_control_type``,
        ``Metadata_gene`` (target), ``Metadata_smiles``, ``Metadata_moa`` (mechanism) and ``Metadata_hours``; all others
        are features. The data are CC0 (Cell Painting Gallery, cpg0000), feature-selected and normalised to the controls
        of their batch, as in CHAMMI-75's benchmarks.

    Returns
    -------
    AnnData of wells: float32 ``X`` by features, and ``obs`` with the columns above under their names. The perturbation
    is ``Metadata_broad_sample``, the environment ``Metadata_Plate``. Plates share a layout, so that a compound is a
    position, too: a score of replicates says little without that of controls scored by their position.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a column is missing, or a feature is no number.

    References
    ----------
    Chandrasekaran et al. (2024), Three million images and morphological profiles of cells treated with matched chemical
    and genetic perturbations.

    Examples
    --------
    >>> wells = scbd.datasets.cpjump1("cpjump1_cellprofiler_wells.parquet")  # doctest: +SKIP
    """
    return _profiles(path, _CPJUMP1, lambda row: f"{row.Metadata_Plate}_{row.Metadata_Well}")


def breinig2015(path: str | os.PathLike[str]) -> AnnData:
    """Breinig et al. (2015): 51,267 cells under drugs of 17 targets, as 26 EBImage features.

    Parameters
    ----------
    path
        ``.parquet`` or ``.csv`` with a cell a row: columns ``cell_code``, ``cell_id``, ``plate``, ``replicate``,
        ``well``, ``field``, ``target`` (of the drug) and ``split``; all others are features. The data are CC BY 4.0
        (cytodata, single-cell-classifier): name the paper below when you show them.

    Returns
    -------
    AnnData of cells: float32 ``X`` by features, and ``obs`` with the columns above. The perturbation is ``target``;
    most targets are on one plate only, so that the environment is ``replicate``.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a column is missing, or a feature is no number.

    References
    ----------
    Breinig et al. (2015), A chemical-genetic interaction map of small molecules using high-throughput imaging in cancer
    cells.

    Examples
    --------
    >>> cells = scbd.datasets.breinig2015("breinig2015_single_cells.parquet")  # doctest: +SKIP
    """
    cells = _profiles(path, _BREINIG, lambda row: row.cell_code)
    cells.obs["replicate"] = cells.obs["replicate"].astype(str).astype("category")
    return cells


def _profiles(path: str | os.PathLike[str], about: Sequence[str], name: Callable[..., str]) -> AnnData:
    """A table whose columns say what a row is about, or are features of it."""
    from anndata import AnnData

    table = read_table(path, about)
    features = [column for column in table if column not in about]
    words = [column for column in features if table[column].dtype.kind not in "fiub"]
    if words or not features:
        msg = f"{path} has {f'columns that are no features: {words[:5]}' if words else 'no feature'}."
        raise ValueError(msg)
    obs = table[list(about)].astype({column: "category" for column in about if table[column].dtype.kind == "O"})
    obs.index = [name(row) for row in table[list(about)].itertuples(index=False)]
    cells = AnnData(X=table[features].to_numpy(np.float32), obs=obs)
    cells.var_names = features
    return cells
