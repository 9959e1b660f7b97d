"""The data sets that only the paper's experiments need, from files in the layouts in which they are published.

None is downloaded here: each function says where its files come from. All return AnnData, images as
``obsm["single_cell_images"]`` uint8 ``(N, 3, image_size, image_size)``.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from anndata import AnnData
from PIL import Image
from sklearn.model_selection import train_test_split

from scbd._shared.keys import IMAGE_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
VLCS_DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
_PACKED = ("X", "y", "e", "classes", "domains")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"}
# hospitals of WILDS' two unseen parts
_VALIDATION_HOSPITAL, _TEST_HOSPITAL = 1, 2
_SPLITS = ["train", "validation", "ood_validation", "test"]
# columns of wells that are no features, and names of the files that hold the wells
_BBBC021 = "week plate well replicate compound concentration moa".split()
_RHOGTPASE = "screen cell_line library plate well row column gene control_type sirna_pool n_cells".split()
BBBC021_FILE, RHOGTPASE_FILE = "bbbc021_ljosa_wells.parquet", "rhogtpase_wells.parquet"
_BREINIG = "cell_code cell_id plate replicate well field target split".split()
# numbers in a table of cells that are no features
_NO_FEATURES = {"uid", "plate", "well", "tile", "site", "cell", "index", "label", "i", "j", "count", "n_guides"}


def pacs(
    path: str | os.PathLike[str], *, test_environment: str = "sketch", image_size: int = 32, seed: int = 0
) -> AnnData:
    """PACS (Li et al., 2017): seven classes in photographs, art, cartoons and sketches; 9,991 images.

    Parameters
    ----------
    path
        Folder ``PACS/<domain>/<class>/*.jpg`` as DomainBed lays it out; or an ``.npz`` that packs it: ``X`` uint8
        ``(N, H, W, 3)``, codes ``y`` and ``e``, names ``classes`` and ``domains``.
    test_environment
        Domain to test on, never trained on. Of the others, a fifth of each class and domain validates.
    image_size
        Pixels a side.
    seed
        Seed of the split.

    Returns
    -------
    ``obs``: ``class``, ``domain``, ``split`` (``train``, ``validation``, ``test``).

    Raises
    ------
    FileNotFoundError
        If a domain or a class has no folder there.
    ValueError
        If a file cannot be read, or the test environment is not a domain.
    """
    return _domains("PACS", Path(path), PACS_DOMAINS, PACS_CLASSES, test_environment, image_size, seed)


def vlcs(
    path: str | os.PathLike[str], *, test_environment: str = "VOC2007", image_size: int = 32, seed: int = 0
) -> AnnData:
    """VLCS (Fang et al., 2013): five classes in four older sets of photographs; 10,729 images; see :func:`pacs`."""
    return _domains("VLCS", Path(path), VLCS_DOMAINS, VLCS_CLASSES, test_environment, image_size, seed)


def _domains(
    name: str,
    path: Path,
    domains: Sequence[str],
    classes: Sequence[str],
    test_environment: str,
    image_size: int,
    seed: int,
) -> AnnData:
    if test_environment not in domains:
        msg = f"{name} has no domain {test_environment!r} to test on: use one of {', '.join(domains)}."
        raise ValueError(msg)
    load = _packed if path.suffix == ".npz" else _folders
    images, labels, places, names = load(name, path, domains, classes, image_size)
    split = np.where(places == test_environment, "test", "train").astype(object)
    inside = np.flatnonzero(split == "train")
    strata = labels[inside].astype(str) + np.char.add("/", places[inside].astype(str))
    _, held_out = train_test_split(inside, test_size=0.2, stratify=strata, random_state=seed)
    split[held_out] = "validation"
    obs = pd.DataFrame(
        {
            "class": pd.Categorical(labels, classes),
            "domain": pd.Categorical(places, domains),
            "split": pd.Categorical(split, ["train", "validation", "test"]),
        },
        index=pd.Index(names, dtype=str),
    )
    return _pictures(obs, images)


def _folders(
    name: str, path: Path, domains: Sequence[str], classes: Sequence[str], image_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    folder = _existing_folder(path, name, domains[0])
    missing = [f"{d}/{c}" for d in domains for c in classes if not (folder / d / c).is_dir()]
    if missing:
        msg = f"{folder} lacks {len(missing)} folders of {name} ({', '.join(missing[:4])}): give the whole data set."
        raise FileNotFoundError(msg)
    files = [
        (d, c, file)
        for d in domains
        for c in classes
        for file in sorted((folder / d / c).iterdir())
        if file.suffix.lower() in _SUFFIXES
    ]
    images = read_images([file for _, _, file in files], image_size)
    labels, places = (np.array([entry[i] for entry in files], dtype=object) for i in (1, 0))
    return images, labels, places, [f"{d}/{c}/{file.name}" for d, c, file in files]


def _packed(
    name: str, path: Path, domains: Sequence[str], classes: Sequence[str], image_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    try:
        with np.load(path, allow_pickle=False) as packed:
            x, y, e, its_classes, its_domains = (packed[key] for key in _PACKED)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError) as error:
        msg = f"{path} is no packed {name} ({error}): it must hold {', '.join(_PACKED)}."
        raise ValueError(msg) from error
    for kind, found, wanted in (("classes", its_classes, classes), ("domains", its_domains, domains)):
        if sorted(map(str, found)) != sorted(wanted):
            msg = f"{path} holds other {kind} than {name}: {', '.join(map(str, found))}, not {', '.join(wanted)}."
            raise ValueError(msg)
    if x.shape[1:] != (image_size, image_size, 3) or x.dtype != np.uint8 or not len(x) == len(y) == len(e):
        msg = (
            f"{path}: X must be uint8 (N, {image_size}, {image_size}, 3), with a y and an e each: {x.dtype} {x.shape}."
        )
        raise ValueError(msg)
    labels, places = np.array(its_classes, dtype=object)[y], np.array(its_domains, dtype=object)[e]
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), labels, places, [f"image_{i}" for i in range(len(x))]


def camelyon17(
    path: str | os.PathLike[str], *, image_size: int = 32, n_per_split: int | None = None, seed: int = 0
) -> AnnData:
    """Camelyon17-WILDS (Bandi et al., 2019; Koh et al., 2021): a tumor in a patch of a lymph node? 455,954 patches.

    Parameters
    ----------
    path
        Folder ``camelyon17_v1.0`` (or the one above) with ``metadata.csv`` and ``patches/``, as the ``wilds`` package
        downloads it (10 GB; CC0).
    image_size
        Pixels a side; the paper uses 32.
    n_per_split
        At most so many random patches of each part; all by default.
    seed
        Seed of that choice.

    Returns
    -------
    ``obs``: ``tumor`` (``"0"``, ``"1"``), ``hospital``, ``patient``, ``slide``, and ``split``: ``train`` and
    ``validation`` from three hospitals, ``ood_validation`` from a fourth (not used by the paper), ``test`` from the
    fifth.

    Raises
    ------
    FileNotFoundError
        If the table or a patch is missing.
    ValueError
        If the table is not that of Camelyon17, or lacks a part of the split.
    """
    folder = _existing_folder(Path(path), "camelyon17_v1.0", "metadata.csv")
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
    return _of_wilds(folder, obs, files, image_size, n_per_split, seed)


def rxrx1(
    path: str | os.PathLike[str], *, image_size: int = 64, n_per_split: int | None = None, seed: int = 0
) -> AnnData:
    """RxRx1-WILDS (Sypetkowski et al., 2023): which of 1,139 siRNAs was in the well? 51 experiments, 125,510 images.

    Parameters
    ----------
    path
        Folder ``rxrx1_v1.0`` (or the one above) with ``metadata.csv`` and ``images/``, as the ``wilds`` package
        downloads it (7 GB; CC-BY-NC-SA 4.0).
    image_size, n_per_split, seed
        See :func:`camelyon17`.

    Returns
    -------
    ``obs``: ``sirna``, ``experiment``, ``plate``, ``well``, ``cell_type``, and ``split``, the official one: ``train``
    (first site of the training experiments), ``validation`` (their second site; "id_test" in WILDS),
    ``ood_validation`` and ``test`` (other experiments).

    Raises
    ------
    FileNotFoundError
        If the table or an image is missing.
    ValueError
        If the table is not that of RxRx1, or lacks a part of the split.
    """
    folder = _existing_folder(Path(path), "rxrx1_v1.0", "metadata.csv")
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
    return _of_wilds(folder, obs, files, image_size, n_per_split, seed)


def _metadata(folder: Path, columns: list[str], text: list[str]) -> pd.DataFrame:
    # identifiers with leading zeros must not become numbers
    return _with_columns(pd.read_csv(folder / "metadata.csv", dtype=dict.fromkeys(text, str)), columns, folder)[columns]


def _of_wilds(
    folder: Path, obs: pd.DataFrame, files: pd.Series, image_size: int, n_per_split: int | None, seed: int
) -> AnnData:
    missing = [part for part in ("train", "validation", "test") if not (obs["split"] == part).any()]
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
    return _pictures(obs, images)


def breinig2015(path: str | os.PathLike[str]) -> AnnData:
    """Breinig et al. (2015): 51,267 cells under drugs of 17 targets, as 26 EBImage features.

    Parameters
    ----------
    path
        ``.parquet`` or ``.csv`` with a cell a row (CC BY 4.0; cytodata, single-cell-classifier): ``cell_code``,
        ``cell_id``, ``plate``, ``replicate``, ``well``, ``field``, ``target`` (of the drug), ``split``; all others are
        features.

    Returns
    -------
    Cells by features, float32. Most targets are on one plate only, so that the environment is ``replicate``.
    """
    table = _table(path, _BREINIG)
    features = [column for column in table if column not in _BREINIG]
    obs = table[_BREINIG].astype({column: "category" for column in _BREINIG if table[column].dtype.kind == "O"})
    obs["replicate"] = obs["replicate"].astype(str).astype("category")
    cells = AnnData(X=table[features].to_numpy(np.float32), obs=obs.set_index(table["cell_code"].to_numpy()))
    cells.var_names = features
    return cells


def bbbc021_wells(path: str | os.PathLike[str]) -> AnnData:
    """Load BBBC021 (Caie et al., 2010) as the features of Ljosa et al. (2013): 632 wells of MCF-7 cells under drugs.

    Parameters
    ----------
    path
        Table with one row per well (``ljosa_jbiomolscreen_2013_per_well_mean`` of cytomining/cytominergallery, with the
        columns ``week``, ``plate``, ``well``, ``replicate``, ``compound``, ``concentration`` and ``moa``; all others
        are features), or the folder that holds it as ``bbbc021_ljosa_wells.parquet``.

    Returns
    -------
    Wells by features, float32. ``obs["treatment"]`` is the compound with its concentration, or ``"DMSO"``.
    """
    wells = _feature_wells(path, BBBC021_FILE, _BBBC021)
    compound, dose = wells.obs["compound"].astype(str), wells.obs["concentration"].astype(str)
    wells.obs["treatment"] = compound.where(compound == "DMSO", compound + " " + dose)
    return wells


def rhogtpase_wells(path: str | os.PathLike[str]) -> AnnData:
    """Load the RhoGTPase screens of Pascual-Vargas et al. (2017; IDR 0028): two cell lines, two siRNA libraries.

    Parameters
    ----------
    path
        Table with one row per well (features of IDR/idr-metadata, CC BY 4.0, with the columns ``screen``,
        ``cell_line``, ``library``, ``plate``, ``well``, ``row``, ``column``, ``gene``, ``control_type``,
        ``sirna_pool`` and ``n_cells``; all others are features), or the folder that holds it as
        ``rhogtpase_wells.parquet``.

    Returns
    -------
    Wells by features, float32; ``obs["gene"]`` of negative controls is ``"control"``. Wells that differ in the number
    of seeded cells are dropped.
    """
    wells = _feature_wells(path, RHOGTPASE_FILE, _RHOGTPASE)
    return wells[(wells.obs["control_type"] != "technical control").to_numpy()].copy()


def _feature_wells(path: str | os.PathLike[str], name: str, columns: Sequence[str]) -> AnnData:
    """Load the table at this path, or the one of this name in this folder; ``columns`` go to ``obs``."""
    path = Path(path)
    table = _table(path / name if path.is_dir() else path, columns)
    obs = table[[*columns]].set_index(np.arange(len(table)).astype(str))
    features = table.drop(columns=columns)
    return AnnData(X=features.to_numpy(np.float32), obs=obs, var=pd.DataFrame(index=features.columns))


def funk22_cellprofiler(path: str | os.PathLike[str], *, n_cells: int | None = None, seed: int = 0) -> AnnData:
    """CellProfiler features of the screen of Funk et al. (2022), one row a cell or a guide.

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
    ``obsm["X_cellprofiler"]``, float32, and ``obs``: ``gene``, ``sgRNA`` and what else was no feature; ``well`` names
    plate and well where there are both, as in the crops.
    """
    table = _table(path, ["gene_symbol_0"])
    numbers = table.select_dtypes("number").columns
    features = [column for column in numbers if column.lower() not in _NO_FEATURES and "Unnamed" not in column]
    if not features:
        msg = f"{path} has no column of numbers beside places and counts: it holds no features."
        raise ValueError(msg)
    if n_cells is not None and n_cells < len(table):
        table = table.iloc[np.sort(np.random.default_rng(seed).choice(len(table), n_cells, replace=False))]
    obs = table.drop(columns=features).rename(columns={"gene_symbol_0": "gene", "sgRNA_0": "sgRNA"})
    obs.index = obs.index.astype(str)
    if {"plate", "well"} <= set(obs):
        obs["well"] = obs["plate"].astype(str) + "_" + obs["well"].astype(str)
    return AnnData(obs=obs, obsm={"X_cellprofiler": table[features].to_numpy(np.float32)})


def leave_out(left_out: np.ndarray, seed: int | Sequence[int], validation_share: float = 0.025) -> np.ndarray:
    """Return the part of each cell: ``"test"`` if left out, otherwise ``"train"`` or, at random, ``"validation"``."""
    validation = np.random.default_rng(seed).random(len(left_out)) < validation_share
    return np.where(left_out, "test", np.where(validation, "validation", "train"))


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Image files as RGB, resized to a square (bilinear, antialiased): uint8 ``(N, 3, size, size)``.

    Raises
    ------
    FileNotFoundError
        If a file is missing: the first one.
    ValueError
        If a file is no image or truncated (which).
    """
    images = np.empty((len(paths), 3, size, size), dtype=np.uint8)

    def read(row: int) -> None:
        try:
            with Image.open(paths[row]) as image:
                square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        except FileNotFoundError:
            raise
        except (OSError, SyntaxError, ValueError) as error:
            msg = f"{paths[row]} is no image, or is truncated ({error}): fetch it again."
            raise ValueError(msg) from error
        images[row] = np.asarray(square).transpose(2, 0, 1)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(read, range(len(paths))))
    return images


def _existing_folder(path: Path, name: str, marker: str) -> Path:
    """The folder of a data set: the path itself, or what lies in it under its official name."""
    for folder in (path, path / name):
        if (folder / marker).exists():
            return folder
    msg = f"{path} is not {name}: it holds no {marker}. Give the folder that has it, or the one above."
    raise FileNotFoundError(msg)


def _table(path: str | os.PathLike[str], columns: Sequence[str]) -> pd.DataFrame:
    table = pd.read_parquet(path) if Path(path).suffix == ".parquet" else pd.read_csv(path)
    return _with_columns(table, columns, path)


def _with_columns(table: pd.DataFrame, columns: Sequence[str], path: object) -> pd.DataFrame:
    if missing := [column for column in columns if column not in table]:
        msg = f"{path} lacks the columns {', '.join(missing)}: it is not the table that was published."
        raise ValueError(msg)
    return table


def _pictures(obs: pd.DataFrame, images: np.ndarray) -> AnnData:
    return AnnData(obs=obs, var=pd.DataFrame(index=["red", "green", "blue"]), obsm={IMAGE_KEY: images})
