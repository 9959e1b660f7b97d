"""Published screens as AnnData: images of single cells of Funk et al. (2022), and features of wells of CPJUMP1."""

from __future__ import annotations

import math
import os
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count, join_first
from scbd._shared.files import local_path
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.progress import progress_bar
from scbd.data._tables import read_table_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

CONTROL = "nontargeting"
_CHANNELS = ["dna_damage", "actin", "dna", "tubulin"]
# minimum size of a single-cell image (crop) in bytes: 4 channels of 96 × 96 pixels, uint16. It is used to estimate the
# memory that the crops need.
_MIN_CROP_BYTES = 4 * 96 * 96 * 2
# number of single-cell images (crops) read from the database at once
_CROPS_PER_READ = 1000
_CPJUMP1_COLUMNS = (
    "Metadata_Plate Metadata_Well Metadata_broad_sample Metadata_pert_iname Metadata_control_type Metadata_gene "
    "Metadata_smiles Metadata_moa Metadata_hours"
).split()
_WITH_GUIDES = "write a screen with a table that has sgRNA (read_crops(path, table=…))"


def funk22(
    path: str | os.PathLike[str],
    *,
    n_cells: int | None = None,
    genes: str | Sequence[str] | None = None,
    guides: bool = False,
    seed: int = 0,
) -> AnnData:
    """Read images of single cells (crops) of Funk et al. (2022): 5,050 knockouts in 34 wells, about 26 million crops.

    Makino et al. (2025) train on 83 % of the cells and validate on 2 %, with images of 64 pixels. To do the same, use
    ``train(train_size=0.83, validation_size=0.02)`` and ``SCBDModel(adata, image_size=64)``. Instead of ``image_size``,
    one can resize the images once with :func:`scbd.data.resize_images`.

    Parameters
    ----------
    path
        Path of the crops, which take terabytes and are not downloaded by this function. It is one of:

        - an LMDB (folder with ``data.mdb``) with keys ``UID_plate_well_tile_gene_index`` and values of 4 × 100 × 100
          uint16, as raw bytes or ``.npy``. Requires ``pip install lmdb``.
        - an LMDB in the form used by the code of Set-DINO, with keys ``gene;guide;plate;well;tile;UID`` and values of
          4 × S × S float32 in [0, 1].
        - a file (``.zarr``) in which :func:`scbd.data.write_screen` stored the crops. If all of its cells are used,
          images are not loaded into memory.
    n_cells
        Number of cells to draw at random. Their crops are loaded into memory, 80 kB per cell. By default all cells are
        used.
    genes
        One gene or several genes. Only cells of these genes and of the non-targeting control are used. By default all
        genes are used.
    guides
        Whether to raise an error if the guides of cells (``obs["sgRNA"]``) are unknown. LMDB keys of the first form
        above do not contain the guide. For such a database, store the crops in a file with
        :func:`scbd.data.write_screen`, together with a table of guides: ``read_crops(path, table=…)``.
    seed
        Seed of the random choice of cells.

    Returns
    -------
    AnnData of the cells. The crops in ``obsm["single_cell_images"]`` are uint16 ``(N, 4, 100, 100)``, or have the dtype
    and size in which they are stored. ``obs`` contains:

    - ``gene`` (``"nontargeting"`` for controls);
    - ``plate``;
    - ``well`` (plate and well);
    - ``tile``;
    - ``sgRNA`` (guide), if the database contains the guides.

    The names of the cells (``obs_names``) are the unique identifiers (UIDs) in the database.

    Raises
    ------
    ImportError
        If ``path`` is an LMDB and ``lmdb`` is not installed.
    FileNotFoundError
        If there is no database.
    ValueError
        If the file is no database or has no cell, a key or a crop does not have one of the forms above (the message
        names it), a requested gene has no cell, guides are unknown with ``guides=True``, or the crops of an LMDB exceed
        the memory of this machine.

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
        # Check the memory before the keys are read, since reading all keys takes minutes. If only some genes are
        # selected, the number of their cells is known only after all keys have been read.
        if genes is None:
            n = transaction.stat()["entries"]
            _check_memory(path, min(n, n_cells or n), _MIN_CROP_BYTES)
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
    """Return the database keys of the selected cells, in the order of the database.

    In this order, the crops are read sequentially from disk.
    """
    from scbd.data._lmdb import parse_key

    n, keys = transaction.stat()["entries"], transaction.cursor().iternext(keys=True, values=False)
    if genes is not None:
        wanted = {CONTROL, *genes}
        found = [(gene, key) for key in map(bytes, keys) if (gene := parse_key(key)[4]) in wanted]
        _check_genes(path, genes, {gene for gene, _ in found})
        n, keys = len(found), (key for _, key in found)
    is_drawn = np.zeros(n, dtype=bool)
    is_drawn[_draw_rows(n, n_cells, seed)] = True
    # all keys of the database would take gigabytes of memory, so that only those of the drawn cells are kept
    return [bytes(key) for key in compress(keys, is_drawn)]


def _read_screen(path: Path, n_cells: int | None, genes: Sequence[str] | None, seed: int, *, guides: bool) -> AnnData:
    """Open the file of a screen without loading its images, or load a subset of its cells with their images."""
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
    rows = rows[_draw_rows(len(rows), n_cells, seed)]
    if len(rows) == screen.n_obs:
        return screen
    others = {key: np.asarray(values[rows]) for key, values in screen.obsm.items() if key != IMAGE_KEY}
    images = image_source(screen, IMAGE_KEY).read(rows)
    return AnnData(obs=screen.obs.iloc[rows], var=screen.var, obsm=others | {IMAGE_KEY: images})


def _draw_rows(n: int, n_drawn: int | None, seed: int) -> np.ndarray:
    """Draw ``n_drawn`` of ``n`` row numbers, in ascending order; return all if there are fewer, or for `None`."""
    if n_drawn is None or n_drawn >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, n_drawn, replace=False))


def _check_genes(path: Path, asked: Sequence[str], there: set[str]) -> None:
    """Raise a ``ValueError`` that names the requested genes without any cell in the data."""
    if missing := [gene for gene in dict.fromkeys(asked) if gene not in there]:
        msg = f"{path} has no cell of {len(missing)} of the requested genes ({join_first(missing)}): drop these genes."
        raise ValueError(msg)


def _check_memory(path: Path, n: int, n_bytes: int) -> None:
    """Raise ``ValueError`` if ``n`` crops of ``n_bytes`` bytes each exceed the memory of this machine."""
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


def cpjump1(path: str | os.PathLike[str]) -> AnnData:
    """Read the wells of CPJUMP1: CellProfiler features of U2OS cells that were treated with 306 compounds.

    Parameters
    ----------
    path
        ``.parquet`` or ``.csv`` file with one row per well. Required columns:

        - ``Metadata_Plate`` and ``Metadata_Well``;
        - ``Metadata_broad_sample`` (identifier of the compound, or ``DMSO``) and ``Metadata_pert_iname`` (its name);
        - ``Metadata_control_type``;
        - ``Metadata_gene`` (target of the compound);
        - ``Metadata_smiles`` (chemical structure);
        - ``Metadata_moa`` (mechanism of action);
        - ``Metadata_hours``.

        All other columns are features. The data are in the public domain (CC0; Cell Painting Gallery, cpg0000).
        The table is that of the benchmarks of CHAMMI-75: features are selected, and normalised to the controls of their
        plate, so that the median of the controls is 0 on each plate.

    Returns
    -------
    AnnData of wells: features in ``X``, float32, and the columns above in ``obs``. The perturbation is
    ``Metadata_broad_sample``, the environment is ``Metadata_Plate``. All plates have the same layout, so that each
    compound is always at the same position. Scores of replicates therefore include effects of the position. To estimate
    these effects, score the controls with their positions in place of perturbations.

    Cells were treated for 24 h on two plates and for 48 h on three (``Metadata_hours``). Differences between these
    plates are therefore partly effects of the duration: compare plates of one duration to measure effects of plates.
    Nine of the 64 controls of plate BR00117012 are outliers (wells A02, C03, G04, G10, I02, K05, K06, M04 and O07).

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
    obs.index = [f"{plate}_{well}" for plate, well in zip(obs["Metadata_Plate"], obs["Metadata_Well"], strict=True)]
    wells = AnnData(X=table[features].to_numpy(np.float32, copy=True), obs=obs)
    wells.var_names = features
    return wells
