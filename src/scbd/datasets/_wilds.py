"""Camelyon17 and RxRx1 as WILDS lays them out and splits them (Koh et al., 2021)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._keys import IMAGE_KEY
from scbd.datasets._files import existing_folder, read_images

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

# hospitals of WILDS' two unseen parts
_VALIDATION_HOSPITAL, _TEST_HOSPITAL = 1, 2
_SPLITS = ["train", "validation", "ood_validation", "test"]


def camelyon17(
    path: str | os.PathLike[str], *, image_size: int = 32, n_per_split: int | None = None, seed: int = 0
) -> AnnData:
    """Camelyon17-WILDS: is there a tumor in a patch of a lymph node? Five hospitals; 455,954 patches.

    Parameters
    ----------
    path
        Folder ``camelyon17_v1.0`` (or the one above) with ``metadata.csv`` and ``patches/``, as the ``wilds`` package
        downloads it (10 GB; CC0). Reading all of it takes minutes: write the result once with
        ``adata.write_h5ad``, and open that with :func:`scbd.data.open_screen`.
    image_size
        Pixels a side; the paper uses 32.
    n_per_split
        At most so many random patches of each part; all by default.
    seed
        Seed of that choice.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, image_size, image_size)`` and ``obs``: ``tumor``
    (``"0"``, ``"1"``), ``hospital``, ``patient``, ``slide``, and ``split``: ``train`` and ``validation`` from three
    hospitals, ``ood_validation`` from a fourth (not used by the paper), ``test`` from the fifth.

    Raises
    ------
    FileNotFoundError
        If the table or a patch is missing.
    ValueError
        If the table is not that of Camelyon17, or lacks a part of the split.

    References
    ----------
    Bandi et al. (2019); Koh et al. (2021), WILDS: a benchmark of in-the-wild distribution shifts.

    Examples
    --------
    >>> adata = scbd.datasets.camelyon17("data/camelyon17_v1.0", n_per_split=10_000)  # doctest: +SKIP
    """
    folder = existing_folder(path, "camelyon17_v1.0", "metadata.csv")
    columns = ["patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    table = _metadata(folder, columns, text=["patient"])
    center = table["center"].to_numpy()
    split = np.where(table["split"].to_numpy() == 0, "train", "validation").astype(object)
    split[center == _VALIDATION_HOSPITAL] = "ood_validation"
    split[center == _TEST_HOSPITAL] = "test"
    node = "patient_" + table["patient"] + "_node_" + table["node"].astype(str)
    place = "_x_" + table["x_coord"].astype(str) + "_y_" + table["y_coord"].astype(str)
    files = "patches/" + node + "/patch_" + node + place + ".png"
    obs = pd.DataFrame(
        {
            "tumor": table["tumor"].astype(str),
            "hospital": "hospital_" + table["center"].astype(str),
            "patient": table["patient"],
            "slide": table["slide"].astype(str),
            "split": split,
        }
    )
    return _table(folder, obs, files, image_size, n_per_split, seed, ["train", "validation", "test"])


def rxrx1(
    path: str | os.PathLike[str], *, image_size: int = 64, n_per_split: int | None = None, seed: int = 0
) -> AnnData:
    """RxRx1-WILDS: which of 1,139 siRNAs was in the well? 51 experiments in four cell types; 125,510 images.

    Parameters
    ----------
    path
        Folder ``rxrx1_v1.0`` (or the one above) with ``metadata.csv`` and ``images/``, as the ``wilds`` package
        downloads it (7 GB; CC-BY-NC-SA 4.0).
    image_size
        Pixels a side, of 256.
    n_per_split
        At most so many random images of each part; all by default.
    seed
        Seed of that choice.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, image_size, image_size)`` and ``obs``: ``sirna``,
    ``experiment``, ``plate``, ``well``, ``cell_type``, and ``split``, the official one: ``train`` (first site of the
    training experiments), ``validation`` (their second site; "id_test" in WILDS), ``ood_validation`` and ``test``
    (other experiments).

    Raises
    ------
    FileNotFoundError
        If the table or an image is missing.
    ValueError
        If the table is not that of RxRx1, or lacks a part of the split.

    References
    ----------
    Sypetkowski et al. (2023), RxRx1; Koh et al. (2021), WILDS.

    Examples
    --------
    >>> adata = scbd.datasets.rxrx1("data/rxrx1_v1.0", n_per_split=10_000)  # doctest: +SKIP
    """
    folder = existing_folder(path, "rxrx1_v1.0", "metadata.csv")
    columns = ["cell_type", "experiment", "plate", "well", "site", "sirna_id", "dataset"]
    table = _metadata(folder, columns, text=["well", "experiment"])
    split = table["dataset"].map({"train": "train", "val": "ood_validation", "test": "test"}).fillna("")
    split[(split == "train") & (table["site"] != 1)] = "validation"
    plate = table["plate"].astype(str)
    files = "images/" + table["experiment"] + "/Plate" + plate + "/" + table["well"] + "_s"
    files += table["site"].astype(str) + ".png"
    obs = pd.DataFrame(
        {
            "sirna": "sirna_" + table["sirna_id"].astype(str),
            "experiment": table["experiment"],
            "plate": table["experiment"] + "_" + plate,
            "well": table["experiment"] + "_" + plate + "_" + table["well"],
            "cell_type": table["cell_type"].astype(str),
            "split": split,
        }
    )
    return _table(folder, obs, files, image_size, n_per_split, seed, ["train", "validation", "test"])


def _metadata(folder: Path, columns: list[str], text: list[str]) -> pd.DataFrame:
    path = folder / "metadata.csv"
    # identifiers with leading zeros must not become numbers
    table = pd.read_csv(path, dtype=dict.fromkeys(text, str))
    missing = [column for column in columns if column not in table]
    if missing:
        msg = f"{path} lacks the columns {', '.join(missing)}: it is not the table that WILDS distributes."
        raise ValueError(msg)
    return table[columns]


def _table(
    folder: Path,
    obs: pd.DataFrame,
    files: pd.Series,
    image_size: int,
    n_per_split: int | None,
    seed: int,
    needed: list[str],
) -> AnnData:
    from anndata import AnnData

    missing = [part for part in needed if not (obs["split"] == part).any()]
    if missing:
        msg = f"{folder / 'metadata.csv'} has no image for the {' and '.join(missing)} part of the official split."
        raise ValueError(msg)
    obs = obs[obs["split"] != ""]
    if n_per_split is not None:
        shuffled = obs.sample(frac=1, random_state=seed)
        obs = obs.loc[shuffled.groupby("split").head(n_per_split).index.sort_values()]
    images = read_images([folder / file for file in files[obs.index]], image_size)
    obs = obs.set_index(files[obs.index].astype(str)).rename_axis(None).astype("category")
    obs["split"] = obs["split"].cat.set_categories(_SPLITS)
    return AnnData(obs=obs, var=pd.DataFrame(index=["red", "green", "blue"]), obsm={IMAGE_KEY: images})
