"""The optical pooled screen of Funk et al. (2022): crops, CellProfiler features, guides, published profiles."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd._keys import IMAGE_KEY
from scbd._messages import head
from scbd._progress import progress_bar
from scbd.datasets._files import read_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

CONTROL = "nontargeting"
_CHANNELS = ["dna_damage", "actin", "dna", "tubulin"]
_CROP = (4, 100, 100)
_BLOCK = 1000
_ADD_GUIDES = "add obs['sgRNA'] to it with scbd.data.add_to_screen"
_NAMES = {"gene_symbol_0": "gene", "sgRNA_0": "sgRNA"}
# numbers in a table of cells that are no features
_NO_FEATURES = {"uid", "plate", "well", "tile", "site", "cell", "index", "label", "i", "j", "count", "n_guides"}


def funk22(
    path: str | os.PathLike[str],
    *,
    n_cells: int | None = None,
    genes: str | Sequence[str] | None = None,
    guides: bool = False,
    seed: int = 0,
) -> AnnData:
    """Crops of single cells of Funk et al. (2022): 5,050 knockouts, 34 wells, about 26 million crops.

    The paper trains on 83 % and validates on 2 %, ``train(train_size=0.83, validation_size=0.02)``, at 64 pixels,
    ``SCBDModel(adata, image_size=64)`` or once with :func:`scbd.data.resize_images`.

    Parameters
    ----------
    path
        LMDB of the crops (a folder with ``data.mdb``): keys ``UID_plate_well_tile_gene_index``, values 4 × 100 × 100
        uint16, as raw bytes or ``.npy``. It is terabytes, and not downloaded here. Needs ``pip install lmdb``. Or what
        :func:`scbd.data.write_screen` made of it, ``.h5ad`` or ``.zarr``: all cells of that stay on the disk.
    n_cells
        Take so many random cells: they are in memory, 80 kB a cell.
    genes
        Take only these (or this one), and the non-targeting control.
    guides
        Raise unless each cell's guide is known, ``obs["sgRNA"]``. Keys of the LMDB do not name it: add it to a screen
        with :func:`scbd.data.add_to_screen`, as CellProfiler's features, ``obsm["X_cellprofiler"]``.
    seed
        Seed of the choice.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint16 ``(N, 4, 100, 100)`` and ``obs``: ``gene`` (the control is
    ``"nontargeting"``), ``plate``, ``well`` (plate and well), ``tile``; its names are the UIDs.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError
        If there is no database.
    ValueError
        If it is none, a key or a crop is not of this form (which), a gene that is asked for has no cell, guides are to
        be known and are not, or crops of an LMDB are more than this machine's memory.

    References
    ----------
    Funk et al. (2022), The phenotypic landscape of essential human genes; Makino et al. (2025), section 4.2.

    Examples
    --------
    >>> adata = scbd.datasets.funk22("data/funk22", n_cells=200_000)  # doctest: +SKIP
    """
    from anndata import AnnData

    from scbd.data.sources import LMDBSource, open_lmdb, parsed_keys

    path = Path(path)
    if n_cells is not None:
        check_count("n_cells", n_cells)
    genes = [genes] if isinstance(genes, str) else genes
    if path.suffix in (".h5ad", ".zarr"):
        return _of_screen(path, n_cells, genes, seed, guides=guides)
    if guides:
        convert = f"scbd convert {shlex.quote(str(path))} --y-key gene --out crops.zarr"
        msg = (
            f"The crops of {path} do not name their guides, and all of them are more than memory holds: write a "
            f"screen, {convert}, {_ADD_GUIDES}, and give crops.zarr."
        )
        raise ValueError(msg)
    with open_lmdb(path) as database, database.begin() as transaction:
        if genes is None:  # else it is known once keys were read, which takes minutes
            n = transaction.stat()["entries"]
            _check_memory(path, min(n, n if n_cells is None else n_cells))
        keys = _chosen_keys(path, transaction, n_cells, genes, seed)
    _check_memory(path, len(keys))
    if not keys:
        msg = f"{path} has no cell."
        raise ValueError(msg)
    obs = parsed_keys(keys)
    source = LMDBSource(path, keys)
    images = np.empty(source.shape, source.dtype)
    with progress_bar("Reading crops", len(keys)) as bar:
        for start in range(0, len(keys), _BLOCK):
            part = images[start : start + _BLOCK]
            source.read(slice(start, start + _BLOCK), out=part)
            bar.update(len(part))
    return AnnData(obs=obs, var=pd.DataFrame(index=_CHANNELS), obsm={IMAGE_KEY: images})


def funk22_cellprofiler(path: str | os.PathLike[str], *, n_cells: int | None = None, seed: int = 0) -> AnnData:
    """CellProfiler features of the screen, one row a cell or a guide.

    Parameters
    ----------
    path
        Parquet or CSV with ``gene_symbol_0``, ``sgRNA_0``, and features: every other column of numbers that is not a
        place (plate, well, tile, …) or a count.
    n_cells
        Take so many random rows.
    seed
        Seed of the choice.

    Returns
    -------
    AnnData with ``obsm["X_cellprofiler"]``, float32, with the features' names in ``uns["cellprofiler_features"]``, and
    ``obs``: ``gene``, ``sgRNA`` and what else was no feature; ``well`` names plate and well where there are both.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it has no gene or no feature, or is neither Parquet nor CSV.

    Examples
    --------
    >>> adata = scbd.datasets.funk22_cellprofiler("data/funk22", n_cells=200_000)  # doctest: +SKIP
    """
    from anndata import AnnData

    table = read_table(path, ["gene_symbol_0"])
    numbers = table.select_dtypes("number").columns
    features = [column for column in numbers if column.lower() not in _NO_FEATURES and "Unnamed" not in column]
    if not features:
        msg = f"{path} has no column of numbers beside places and counts: it holds no features."
        raise ValueError(msg)
    if n_cells is not None and n_cells < len(table):
        chosen = np.random.default_rng(seed).choice(len(table), n_cells, replace=False)
        table = table.iloc[np.sort(chosen)]
    obs = table.drop(columns=features).rename(columns=_NAMES)
    obs.index = obs.index.astype(str)
    if {"plate", "well"} <= set(obs):  # as in the crops: a well is one of its plate
        obs["well"] = obs["plate"].astype(str) + "_" + obs["well"].astype(str)
    return AnnData(
        obs=obs,
        obsm={"X_cellprofiler": table[features].to_numpy(np.float32)},
        uns={"cellprofiler_features": features},
    )


def funk22_guides(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The library of guides: which gene each is against, and in how many cells it was seen.

    Parameters
    ----------
    path
        CSV with ``sgRNA_0``, ``gene``, ``count`` and ``n_guides`` (of the gene), a supplement of Funk et al. (2022).

    Returns
    -------
    Frame ``sgRNA, gene, n_cells``.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a column is missing.

    Examples
    --------
    >>> guides = scbd.datasets.funk22_guides("data/funk22")  # doctest: +SKIP
    """
    table = read_table(path, ["sgRNA_0", "gene", "count"])
    return table.rename(columns=_NAMES | {"count": "n_cells"})[["sgRNA", "gene", "n_cells"]]


def funk22_profiles(path: str | os.PathLike[str]) -> AnnData:
    """Published profiles of genes: 64 components of a multi-contrastive variational autoencoder.

    Parameters
    ----------
    path
        ``df_standardized_mitosis.parquet`` (contrastive-ops repository, Apache-2.0): components ``"0"`` to ``"63"``,
        genes as index.

    Returns
    -------
    AnnData of genes, ``"nontargeting"`` among them, by components, with ``var["block"]``: ``salient`` or
    ``background``. Subtract the control and standardise before comparing genes.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a component is missing.

    References
    ----------
    Wang et al. (2023), Multi-contrastive VAE disentangles perturbation effects in single-cell images.

    Examples
    --------
    >>> adata = scbd.datasets.funk22_profiles("df_standardized_mitosis.parquet")  # doctest: +SKIP
    """
    from anndata import AnnData

    components = [str(i) for i in range(64)]
    table = read_table(path, components)
    blocks = pd.DataFrame({"block": ["salient"] * 32 + ["background"] * 32}, index=components)
    return AnnData(
        X=table[components].to_numpy(np.float32), obs=pd.DataFrame(index=table.index.astype(str)), var=blocks
    )


def _chosen_keys(
    path: Path, transaction: Any, n_cells: int | None, genes: Sequence[str] | None, seed: int
) -> list[bytes]:
    """Keys in the order of the database, which is the one that disks like."""
    from scbd.data.sources import parsed_key

    rng = np.random.default_rng(seed)
    names = transaction.cursor().iternext(keys=True, values=False)
    if genes is not None:
        wanted = {CONTROL, *genes}
        found = [(gene, key) for key in map(bytes, names) if (gene := parsed_key(key)[4]) in wanted]
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


def _of_screen(path: Path, n_cells: int | None, genes: Sequence[str] | None, seed: int, *, guides: bool) -> AnnData:
    """A screen where it lies, or some of its cells in memory."""
    from anndata import AnnData

    from scbd.data import image_source, open_screen

    screen = open_screen(path)
    if guides and "sgRNA" not in screen.obs:
        msg = f"{path} does not say which guide each cell has: {_ADD_GUIDES}."
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
    """Raise if a gene that is asked for has no cell."""
    if missing := [gene for gene in dict.fromkeys(asked) if gene not in there]:
        msg = f"{path} has no cell of {len(missing)} of the genes asked for ({head(missing)}): leave them out."
        raise ValueError(msg)


def _check_memory(path: Path, n: int) -> None:
    """Raise if so many crops can never be in memory."""
    needed, there = n * math.prod(_CROP) * 2, _memory()
    if needed > there:
        msg = (
            f"{n:,} crops of {path} take {needed / 2**30:,.0f} GiB of memory, this machine has "
            f"{there / 2**30:,.0f}: take fewer with n_cells, or write a screen of all with "
            "scbd.data.write_screen, and give its path."
        )
        raise ValueError(msg)


def _memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
