"""PACS and VLCS: photographs and drawings of a few classes in four domains, as DomainBed lays them out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._files import check_file
from scbd._keys import IMAGE_KEY
from scbd.datasets._files import existing_folder, read_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
VLCS_DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")

_PACKED = ("X", "y", "e", "classes", "domains")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff"}


def pacs(
    path: str | os.PathLike[str],
    *,
    test_environment: str = "sketch",
    image_size: int = 32,
    validation_size: float = 0.2,
    seed: int = 0,
) -> AnnData:
    """PACS: seven classes in photographs, art, cartoons and sketches; 9,991 images.

    Parameters
    ----------
    path
        Folder ``PACS/<domain>/<class>/*.jpg`` as DomainBed lays it out (its source is a form of the authors', without
        a stated licence, so it is not downloaded here); or an ``.npz`` that packs it: ``X`` uint8 ``(N, H, W, 3)``,
        codes ``y`` and ``e``, names ``classes`` and ``domains``.
    test_environment
        Domain to test on, never trained on: ``"art_painting"``, ``"cartoon"``, ``"photo"`` or ``"sketch"``.
    image_size
        Pixels a side.
    validation_size
        Fraction of each class and domain, of those trained on, that validates.
    seed
        Seed of the split.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, image_size, image_size)`` and ``obs``: ``class``,
    ``domain``, ``split`` (``train``, ``validation``, ``test``).

    Raises
    ------
    FileNotFoundError
        If a domain or a class has no folder there.
    ValueError
        If a file cannot be read, or the test environment is not a domain.

    References
    ----------
    Li et al. (2017), Deeper, broader and artier domain generalization; Gulrajani and Lopez-Paz (2020), DomainBed.

    Examples
    --------
    >>> adata = scbd.datasets.pacs("data/PACS", test_environment="sketch")  # doctest: +SKIP
    """
    return _domains("PACS", path, PACS_DOMAINS, PACS_CLASSES, test_environment, image_size, validation_size, seed)


def vlcs(
    path: str | os.PathLike[str],
    *,
    test_environment: str = "VOC2007",
    image_size: int = 32,
    validation_size: float = 0.2,
    seed: int = 0,
) -> AnnData:
    """VLCS: five classes of photographs in four older data sets; 10,729 images.

    Parameters
    ----------
    path
        Folder ``VLCS/<domain>/<class>/*.jpg`` as DomainBed lays it out (not downloaded here: its source states no
        licence), or an ``.npz`` that packs it, see :func:`pacs`.
    test_environment
        ``"Caltech101"``, ``"LabelMe"``, ``"SUN09"`` or ``"VOC2007"``.
    image_size, validation_size, seed
        See :func:`pacs`.

    Returns
    -------
    AnnData, see :func:`pacs`.

    Raises
    ------
    FileNotFoundError
        If a domain or a class has no folder there.
    ValueError
        If a file cannot be read, or the test environment is not a domain.

    References
    ----------
    Fang et al. (2013), Unbiased metric learning; Gulrajani and Lopez-Paz (2020), DomainBed.

    Examples
    --------
    >>> adata = scbd.datasets.vlcs("data/VLCS", test_environment="VOC2007")  # doctest: +SKIP
    """
    return _domains("VLCS", path, VLCS_DOMAINS, VLCS_CLASSES, test_environment, image_size, validation_size, seed)


def _domains(
    name: str,
    path: str | os.PathLike[str],
    domains: Sequence[str],
    classes: Sequence[str],
    test_environment: str,
    image_size: int,
    validation_size: float,
    seed: int,
) -> AnnData:
    from anndata import AnnData
    from sklearn.model_selection import train_test_split

    if test_environment not in domains:
        msg = f"{name} has no domain {test_environment!r} to test on: use one of {', '.join(domains)}."
        raise ValueError(msg)
    if not 0 < validation_size < 1:
        msg = f"validation_size={validation_size} must lie between 0 and 1."
        raise ValueError(msg)
    load = _packed if Path(path).suffix == ".npz" else _folders
    images, labels, places, names = load(name, Path(path), domains, classes, image_size)
    split = np.where(places == test_environment, "test", "train").astype(object)
    inside = np.flatnonzero(split == "train")
    strata = labels[inside].astype(str) + np.char.add("/", places[inside].astype(str))
    _, held_out = train_test_split(inside, test_size=validation_size, stratify=strata, random_state=seed)
    split[held_out] = "validation"
    obs = pd.DataFrame(
        {
            "class": pd.Categorical(labels, classes),
            "domain": pd.Categorical(places, domains),
            "split": pd.Categorical(split, ["train", "validation", "test"]),
        },
        index=pd.Index(names, dtype=str),
    )
    return AnnData(obs=obs, var=pd.DataFrame(index=["red", "green", "blue"]), obsm={IMAGE_KEY: images})


def _folders(
    name: str, path: Path, domains: Sequence[str], classes: Sequence[str], image_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    folder = existing_folder(path, name, domains[0])
    missing = [f"{d}/{c}" for d in domains for c in classes if not (folder / d / c).is_dir()]
    if missing:
        msg = (
            f"{folder} lacks {len(missing)} of the {len(domains) * len(classes)} folders of {name} "
            f"({', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}): give the whole data set."
        )
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
    check_file(path)
    try:
        with np.load(path, allow_pickle=False) as packed:
            x, y, e, its_classes, its_domains = (packed[key] for key in _PACKED)
    except (OSError, ValueError, KeyError, EOFError) as error:
        msg = f"{path} is no packed {name} ({error}): it must hold {', '.join(_PACKED)}."
        raise ValueError(msg) from error
    for kind, found, wanted in (("classes", its_classes, classes), ("domains", its_domains, domains)):
        if sorted(map(str, found)) != sorted(wanted):
            msg = f"{path} holds other {kind} than {name}: {', '.join(map(str, found))}, not {', '.join(wanted)}."
            raise ValueError(msg)
    if x.ndim != 4 or x.shape[-1] != 3 or x.dtype != np.uint8 or not len(x) == len(y) == len(e):
        msg = f"{path}: X must be uint8 (N, H, W, 3) with one y and e each, it is {x.dtype} {x.shape}."
        raise ValueError(msg)
    images = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if images.shape[-2:] != (image_size, image_size):
        msg = f"{path} packs images of {x.shape[1]} × {x.shape[2]} pixels: use image_size={x.shape[1]}, or the folder."
        raise ValueError(msg)
    return (
        images,
        np.array(its_classes, dtype=object)[y],
        np.array(its_domains, dtype=object)[e],
        [f"image_{i}" for i in range(len(x))],
    )
