"""Real experiments as AnnData: cell crops of Funk et al. (2022), and well features of CPJUMP1."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count, join_first
from scbd._shared.files import local_path
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.progress import progress_bar
from scbd.data._formats import read_table_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

CONTROL = "nontargeting"
_CHANNELS = ["dna_damage", "actin", "dna", "tubulin"]
# minimum size of a crop in bytes: 4 channels of 96 × 96 pixels, uint16
_MIN_CROP_BYTES = 4 * 96 * 96 * 2
# crops read at once
_CROPS_PER_READ = 1000
_WITH_GUIDES = "write a screen with a table that has sgRNA (read_crops(path, table=…))"


def funk22(
    path: str | os.PathLike[str],
    *,
    n_cells: int | None = None,
    genes: str | Sequence[str] | None = None,
    guides: bool = False,
    seed: int = 0,
) -> AnnData:
    """Read single-cell crops of Funk et al. (2022): 5,050 knockouts in 34 wells, about 26 million crops.

    The paper trains on 83 % of the cells and validates on 2 %, with images of 64 pixels. The same setting here is
    ``train(train_size=0.83, validation_size=0.02)`` and ``SCBDModel(adata, image_size=64)``. Alternatively, resize the
    images once with :func:`scbd.data.resize_images`.

    Parameters
    ----------
    path
        The crops, which take terabytes and are not downloaded by this function. One of:

        - an LMDB (folder with ``data.mdb``) with keys ``UID_plate_well_tile_gene_index`` and values of 4 × 100 × 100
          uint16, as raw bytes or ``.npy``. Requires ``pip install lmdb``.
        - an LMDB in the form used by the code of Set-DINO, with keys ``gene;guide;plate;well;tile;UID`` and values of
          4 × S × S float32 in [0, 1].
        - a screen (``.zarr``) that :func:`scbd.data.write_screen` made of the crops. If all its cells are used, images
          are not loaded into memory.
    n_cells
        Number of cells to draw at random. They are loaded into memory, 80 kB per cell. By default all cells are used.
    genes
        One gene or several genes. Only cells of these genes and of the non-targeting control are used. By default all
        genes are used.
    guides
        Whether to raise an error if the guide of each cell (``obs["sgRNA"]``) is unknown. Keys of the first form do not
        contain it. In this case, write a screen with a table that contains it, ``read_crops(path, table=…)``.
    seed
        Seed of the random choice of cells.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` and ``obs``. Images are uint16 ``(N, 4, 100, 100)``, or have the dtype
    and size in which they are stored. ``obs`` contains:

    - ``gene`` (``"nontargeting"`` for controls);
    - ``plate``;
    - ``well`` (plate and well);
    - ``tile``;
    - ``sgRNA``, if the keys contain it.

    The names of the cells are the UIDs.

    Raises
    ------
    ImportError
        If ``path`` is an LMDB and ``lmdb`` is not installed.
    FileNotFoundError
        If there is no database.
    ValueError
        If the file is no database or has no cell, a key or a crop has another form (the message names it), a requested
        gene has no cell, ``guides=True`` and guides are unknown, or the crops of an LMDB exceed the memory of this
        machine.

    References
    ----------
    Funk et al. (2022), The phenotypic landscape of essential human genes; Makino et al. (2025), section 4.2; Yao et al.
    (2024), Weakly supervised set-consistency learning improves morphological profiling of single-cell images.

    Examples
    --------
    >>> adata = scbd.datasets.funk22("data/funk22", n_cells=200_000)  # doctest: +SKIP
    """
    from anndata import AnnData

    from scbd.data._lmdb import LMDBSource, open_lmdb, parse_keys

    path = local_path(path)
    if n_cells is not None:
        check_count("n_cells", n_cells)
    genes = [genes] if isinstance(genes, str) else genes
    if path.suffix in (".h5ad", ".zarr"):
        return _read_screen(path, n_cells, genes, seed, guides=guides)
    with open_lmdb(path) as database, database.begin() as transaction:
        if genes is None:  # with genes, the number is known only after reading all keys, which takes minutes
            n = transaction.stat()["entries"]
            _check_memory(path, min(n, n if n_cells is None else n_cells), _MIN_CROP_BYTES)
        keys = _select_keys(path, transaction, n_cells, genes, seed)
    if not keys:
        msg = f"{path} has no cell."
        raise ValueError(msg)
    obs = parse_keys(keys)
    if guides and "sgRNA" not in obs:
        msg = f"The crops of {path} do not name their guides: {_WITH_GUIDES}, and give its path."
        raise ValueError(msg)
    source = LMDBSource(path, keys)
    _check_memory(path, len(keys), math.prod(source.shape[1:]) * source.dtype.itemsize)
    images = np.empty(source.shape, source.dtype)
    with progress_bar("Reading crops", len(keys)) as bar:
        for start in range(0, len(keys), _CROPS_PER_READ):
            part = images[start : start + _CROPS_PER_READ]
            source.read(slice(start, start + _CROPS_PER_READ), out=part)
            bar.update(len(part))
    return AnnData(obs=obs, var=pd.DataFrame(index=_CHANNELS), obsm={IMAGE_KEY: images})


def _select_keys(
    path: Path, transaction: Any, n_cells: int | None, genes: Sequence[str] | None, seed: int
) -> list[bytes]:
    """Return the keys of the selected cells in the order of the database, so that the disk is read sequentially."""
    from scbd.data._lmdb import parse_key

    rng = np.random.default_rng(seed)
    names = transaction.cursor().iternext(keys=True, values=False)
    if genes is not None:
        wanted = {CONTROL, *genes}
        found = [(gene, key) for key in map(bytes, names) if (gene := parse_key(key)[4]) in wanted]
        _check_genes(path, genes, {gene for gene, _ in found})
        keys = [key for _, key in found]
        if n_cells is None or n_cells >= len(keys):
            return keys
        return [keys[i] for i in np.sort(rng.choice(len(keys), n_cells, replace=False))]
    n = transaction.stat()["entries"]
    chosen = np.ones(n, dtype=bool)
    if n_cells is not None and n_cells < n:
        chosen[:] = False
        chosen[rng.choice(n, n_cells, replace=False)] = True
    return [bytes(key) for key, taken in zip(names, chosen, strict=True) if taken]


def _read_screen(path: Path, n_cells: int | None, genes: Sequence[str] | None, seed: int, *, guides: bool) -> AnnData:
    """Open a screen without loading images, or load a subset of its cells into memory."""
    from anndata import AnnData

    from scbd.data._input_location import image_source
    from scbd.data._screens import open_screen

    screen = open_screen(path)
    if guides and "sgRNA" not in screen.obs:
        msg = f"{path} does not say which guide each cell has: {_WITH_GUIDES}."
        raise ValueError(msg)
    rows = np.arange(screen.n_obs)
    if genes is not None:
        _check_genes(path, genes, set(screen.obs["gene"]))
        rows = np.flatnonzero(screen.obs["gene"].isin({CONTROL, *genes}))
    if n_cells is not None and n_cells < len(rows):
        rows = np.sort(np.random.default_rng(seed).choice(rows, n_cells, replace=False))
    if len(rows) == screen.n_obs:
        return screen
    others = {key: np.asarray(values[rows]) for key, values in screen.obsm.items() if key != IMAGE_KEY}
    images = image_source(screen, IMAGE_KEY).read(rows)
    return AnnData(obs=screen.obs.iloc[rows], var=screen.var, obsm=others | {IMAGE_KEY: images})


def _check_genes(path: Path, asked: Sequence[str], there: set[str]) -> None:
    """Raise ``ValueError`` if a requested gene has no cell."""
    if missing := [gene for gene in dict.fromkeys(asked) if gene not in there]:
        msg = f"{path} has no cell of {len(missing)} of the genes asked for ({join_first(missing)}): leave them out."
        raise ValueError(msg)


def _check_memory(path: Path, n: int, n_bytes: int) -> None:
    """Raise ``ValueError`` if ``n`` crops of ``n_bytes`` each exceed the memory of this machine."""
    needed, there = n * n_bytes, _total_memory()
    if needed > there:
        msg = (
            f"{n:,} crops of {path} take {needed / 2**30:,.0f} GiB of memory, this machine has "
            f"{there / 2**30:,.0f}: take fewer with n_cells, or write a screen of all with "
            "scbd.data.write_screen, and give its path."
        )
        raise ValueError(msg)


def _total_memory() -> int:
    """Return the total memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_CPJUMP1_COLUMNS = (
    "Metadata_Plate Metadata_Well Metadata_broad_sample Metadata_pert_iname Metadata_control_type Metadata_gene "
    "Metadata_smiles Metadata_moa Metadata_hours"
).split()


def cpjump1(path: str | os.PathLike[str]) -> AnnData:
    """Read wells of CPJUMP1: A549 cells treated with 306 compounds, as CellProfiler features.

    Parameters
    ----------
    path
        ``.parquet`` or ``.csv`` file with one row per well. Required columns:

        - ``Metadata_Plate`` and ``Metadata_Well``;
        - ``Metadata_broad_sample`` (compound, or ``DMSO``) and ``Metadata_pert_iname``;
        - ``Metadata_control_type``;
        - ``Metadata_gene`` (target);
        - ``Metadata_smiles``;
        - ``Metadata_moa`` (mechanism of action);
        - ``Metadata_hours``.

        All other columns are features. The data are CC0 (Cell Painting Gallery, cpg0000), with features selected and
        normalised to the controls of their batch, as in the benchmarks of CHAMMI-75.

    Returns
    -------
    AnnData of wells: features in ``X``, float32, and the columns above in ``obs``. The perturbation is
    ``Metadata_broad_sample``, the environment is ``Metadata_Plate``. All plates have the same layout, so each compound
    is always at the same position. A replicate score therefore includes effects of the position. Compare it with the
    score of controls when positions are used as perturbations.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If a column is missing, or a feature is not numeric.

    References
    ----------
    Chandrasekaran et al. (2024), Three million images and morphological profiles of cells treated with matched chemical
    and genetic perturbations.

    Examples
    --------
    >>> wells = scbd.datasets.cpjump1("cpjump1_cellprofiler_wells.parquet")  # doctest: +SKIP
    """
    from anndata import AnnData

    table = read_table_file(path)
    if missing := [column for column in _CPJUMP1_COLUMNS if column not in table]:
        msg = f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(map(str, table.columns[:8]))}."
        raise ValueError(msg)
    features = [column for column in table if column not in _CPJUMP1_COLUMNS]
    words = [column for column in features if table[column].dtype.kind not in "fiub"]
    if words or not features:
        msg = f"{path} has {f'columns that are no features: {words[:5]}' if words else 'no feature'}."
        raise ValueError(msg)
    obs = table[_CPJUMP1_COLUMNS].astype(
        {column: "category" for column in _CPJUMP1_COLUMNS if table[column].dtype.kind == "O"}
    )
    obs.index = [
        f"{plate}_{well}" for plate, well in zip(table[_CPJUMP1_COLUMNS[0]], table[_CPJUMP1_COLUMNS[1]], strict=True)
    ]
    wells = AnnData(X=table[features].to_numpy(np.float32, copy=True), obs=obs)
    wells.var_names = features
    return wells
