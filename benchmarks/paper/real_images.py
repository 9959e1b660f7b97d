"""Small crops of real cells with real environments, some of which are held out: scanners, and plates."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from anndata import AnnData
from PIL import Image

from paper.loaders import leave_out
from scbd._shared.keys import IMAGE_KEY
from scbd.data import resize_images

if TYPE_CHECKING:
    import os

# Crops are halved to 32 pixels per side, so that one training takes about a minute on one core.
_IMAGE_SIZE = 32
# fraction of the plates that are held out in one fold
_HELD_OUT_PLATES = 0.25
# fraction of the cells outside of the held-out environments that are not trained on
_VALIDATION_SHARE = 0.2
MITOSIS_FILE = "mitosis_scanners.parquet"
BBBC021_FILES = ("bbbc021_many_plates.npz", "bbbc021_many_plates_obs.csv")
MITOCHECK_FILES = ("mitocheck_crops_1x64x64.npz", "mitocheck_obs.csv")


def mitosis_scanners(path: str | os.PathLike[str], *, seed: int = 0, fold: int = 0) -> AnnData:
    """Load mitotic figures (AMi-Br, arXiv:2506.21444) with one of six scanners held out.

    Parameters
    ----------
    path
        Folder with ``mitosis_scanners.parquet``: ``jpeg`` (bytes of an RGB image), ``label``, ``set`` and ``scanner``.
    seed
        Seed of the validation cells.
    fold
        Number of the held-out scanner, in alphabetical order, from 0 on.

    Returns
    -------
    3,720 crops of the set AMi-Br, with ``obs["label"]`` (normal or atypical), ``obs["scanner"]`` and ``obs["split"]``.
    """
    table = pd.read_parquet(Path(path) / MITOSIS_FILE)
    table = table[table["set"] == "AMi-Br"].reset_index(drop=True)
    images = np.stack([np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in table["jpeg"]])
    cells = _halved(table.drop(columns="jpeg"), images.transpose(0, 3, 1, 2))
    scanners = np.unique(cells.obs["scanner"].astype(str))
    return _with_split(cells, (cells.obs["scanner"] == scanners[fold]).to_numpy(), seed)


def bbbc021_crops(path: str | os.PathLike[str], *, seed: int = 0, fold: int = 0) -> AnnData:
    """Load crops of BBBC021 (MCF-7 cells under drugs; Caie et al., 2010) with a quarter of the plates held out.

    Parameters
    ----------
    path
        Folder with ``bbbc021_many_plates.npz`` (``images``) and ``bbbc021_many_plates_obs.csv``.
    seed
        Seed of the validation cells.
    fold
        Number of the random choice of plates.

    Returns
    -------
    1,996 crops, with ``obs["moa"]`` (mechanism, or ``"DMSO"``), ``obs["week"]``, ``obs["plate"]`` and ``obs["split"]``.
    """
    return _hold_out_plates(_read(path, *BBBC021_FILES), seed, fold)


def mitocheck_crops(path: str | os.PathLike[str], *, seed: int = 0, fold: int = 0) -> AnnData:
    """Load HeLa nuclei of MitoCheck (Neumann et al., 2010) with a quarter of the plates held out.

    Parameters
    ----------
    path
        Folder with ``mitocheck_crops_1x64x64.npz`` (``images``) and ``mitocheck_obs.csv``.
    seed, fold
        See :func:`bbbc021_crops`.

    Returns
    -------
    2,342 crops, with ``obs["phenotype"]``, ``obs["plate"]`` and ``obs["split"]``. Crops out of focus are dropped.
    """
    cells = _read(path, *MITOCHECK_FILES)
    return _hold_out_plates(cells[(cells.obs["phenotype"] != "OutOfFocus").to_numpy()].copy(), seed, fold)


def _read(path: str | os.PathLike[str], images: str, table: str) -> AnnData:
    with np.load(Path(path) / images) as arrays:
        pixels = arrays["images"]
    # BBBC021 has its channels last
    pixels = pixels if pixels.shape[1] < pixels.shape[-1] else pixels.transpose(0, 3, 1, 2)
    return _halved(pd.read_csv(Path(path) / table, dtype=str, keep_default_na=False), pixels)


def _halved(obs: pd.DataFrame, images: np.ndarray) -> AnnData:
    obs = obs.set_index(np.arange(len(obs)).astype(str))
    return AnnData(obs=obs, obsm={IMAGE_KEY: resize_images(np.ascontiguousarray(images), _IMAGE_SIZE)})


def _hold_out_plates(cells: AnnData, seed: int, fold: int) -> AnnData:
    plates = cells.obs["plate"].astype(str)
    names = np.random.default_rng(fold).permutation(np.unique(plates))
    return _with_split(cells, plates.isin(names[: round(_HELD_OUT_PLATES * len(names))]).to_numpy(), seed)


def _with_split(cells: AnnData, held_out: np.ndarray, seed: int) -> AnnData:
    cells.obs["split"] = leave_out(held_out, seed, _VALIDATION_SHARE)
    return cells
