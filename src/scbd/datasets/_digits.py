"""Colored digits: real handwritten digits whose colour betrays them in training and says nothing in the test."""

from __future__ import annotations

import colorsys
import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from scipy.ndimage import zoom

from scbd._anndata import IMAGE_KEY
from scbd._checks import check_choice
from scbd._files import local_path
from scbd.datasets._download import fetch

if TYPE_CHECKING:
    from anndata import AnnData

Protocol = Literal["balanced", "authors"]

_SIZE = 32
_PLOTTED = ("#D62728", "#2CA02C")
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}


def colored_digits(*, seed: int = 0) -> AnnData:
    """The 1,797 real handwritten digits that come with scikit-learn, coloured; works offline, in a second.

    The colour predicts the digit perfectly in the two training environments (red and green), and not at all in the
    white test environment: a model that reads the colour fails there.

    Parameters
    ----------
    seed
        Seed of the split and of the environments.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(1797, 3, 32, 32)`` and ``obs``: ``digit``, ``environment``
    (``red``, ``green``, ``white``), ``split`` (1,100 ``train``, 297 ``validation``, 400 white ``test``).

    References
    ----------
    Alpaydin and Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (CC BY 4.0).

    Examples
    --------
    >>> digits = scbd.datasets.colored_digits()
    >>> digits.obsm["single_cell_images"].shape
    (1797, 3, 32, 32)
    >>> digits.obs["environment"].cat.categories.to_list()
    ['red', 'green', 'white']
    """
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    # bilinear from pixel centre to pixel centre, as image libraries do
    grey = zoom(images.reshape(-1, 8, 8) / 16, (1, 4, 4), order=1, grid_mode=True, mode="nearest")
    order = np.random.default_rng(seed).permutation(len(digits))
    split = np.empty(len(digits), dtype=object)
    for name, part in zip(("train", "validation", "test"), np.split(order, [1100, 1397]), strict=True):
        split[part] = name
    return _table(grey, digits, split, _environments(split, seed), seed=seed)


def colored_mnist(
    path: str | os.PathLike[str] | None = None,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
    colored: bool = True,
    n_environments: int = 2,
    imbalance: float = 0.0,
    n_digits: int = 10,
    protocol: Protocol = "balanced",
    seed: int = 0,
) -> AnnData:
    """Colored MNIST as in the paper: red and green training digits, white test digits.

    Or more colours, or fewer digits. In each colour, how pale a digit is painted tells which one it is: from 0 to 9 in
    red, from 9 to 0 in green, in an order of its own in every further colour. Hues are equally far apart.

    Parameters
    ----------
    path
        Folder with the four official ``*-ubyte.gz`` files. By default they are downloaded once (11 MB, checksummed)
        into the user's cache.
    n_train, n_test
        Take this many of the 60,000 training digits (split 80/20 into training and validation) and of the 10,000
        white test digits, at random; all by default.
    colored
        Whether training digits are. Where they are white too, what is learned from them is the best possible on white
        digits (an oracle), and the environment means nothing.
    n_environments
        Number of training environments.
    imbalance
        How unequal they are: coefficient of variation of their expected numbers of digits; 0 for equal ones.
    n_digits
        Only digits below this one.
    protocol
        ``"balanced"``: environments are equally large, and drawn by the seed, as is the split. ``"authors"``: what the
        paper's authors trained on, whatever the seed: environments by one throw of a fair coin a digit, 48,000 digits
        to train on, colours that are not rounded to whole levels. All digits, in the order of the files.
    seed
        Seed of the split, the environments and the subset.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, 32, 32)``, float32 from 0 to 1 with
    ``protocol="authors"`` (0.9 GB), and ``obs``: ``digit``, ``environment``
    (``red``, ``green`` or, if they are more than two, ``hue_0`` …; and ``white``), ``split``.

    Raises
    ------
    FileNotFoundError
        If a file is not in ``path``.
    ValueError
        If a file is not the official one, a number is out of range, or another data set is asked for beside
        ``protocol="authors"``.

    References
    ----------
    LeCun et al. (1998); Arjovsky et al. (2019); Makino et al. (2025), appendix, Colored MNIST.

    Examples
    --------
    >>> adata = scbd.datasets.colored_mnist("data/mnist")  # doctest: +SKIP
    """
    if n_environments < 2 or imbalance < 0 or not 2 <= n_digits <= 10:
        msg = (
            f"n_environments={n_environments}, imbalance={imbalance}, n_digits={n_digits}: give at least 2 "
            "environments, an imbalance that is not negative, and between 2 and 10 digits."
        )
        raise ValueError(msg)
    check_choice("protocol", protocol, Protocol)
    if protocol == "authors":
        others = {"n_train": n_train, "n_test": n_test, "n_environments": n_environments, "imbalance": imbalance}
        _check_authors(others | {"n_digits": n_digits})
        return _authors_mnist(_mnist_folder(path), colored=colored)
    folder = _mnist_folder(path)
    rng = np.random.default_rng(seed)
    grey, digits, split = [], [], []
    for part, wanted in (("train", n_train), ("t10k", n_test)):
        images, labels = _official(folder, part)
        if wanted is not None and not 0 < wanted <= len(labels):
            msg = f"There are {len(labels):,} {part} digits, {wanted:,} were asked for."
            raise ValueError(msg)
        keep = rng.permutation(len(labels))[:wanted]
        keep = keep[labels[keep] < n_digits]
        grey.append(_nearest(images[keep]) / np.float32(255))
        digits.append(labels[keep])
        n_first = round(TRAIN_SHARE * len(keep)) if part == "train" else 0
        rest = "validation" if part == "train" else "test"
        split.append(np.array(["train"] * n_first + [rest] * (len(keep) - n_first), dtype=object))
    parts = np.concatenate(split)
    codes = _environments(parts, seed, n_environments, imbalance)
    how: dict[str, Any] = {"n_environments": n_environments, "seed": seed, "colored": colored}
    return _table(np.concatenate(grey), np.concatenate(digits), parts, codes, **how)


def _check_authors(given: dict[str, Any]) -> None:
    """Raise ``ValueError`` if another data set is asked for."""
    usual = {"n_train": None, "n_test": None, "n_environments": 2, "imbalance": 0.0, "n_digits": 10}
    if changed := [f"{name}={value!r}" for name, value in given.items() if value != usual[name]]:
        msg = f"protocol='authors' is one data set, of all digits: leave out {', '.join(changed)}."
        raise ValueError(msg)


def _authors_mnist(folder: Path, *, colored: bool) -> AnnData:
    """All digits in the order of the files."""
    (images, labels), (test_images, test_labels) = (_official(folder, part) for part in ("train", "t10k"))
    codes, is_train = authors_draw(len(labels))
    split = np.where(is_train, "train", "validation").astype(object)
    return _table(
        _nearest(np.concatenate([images, test_images])) / np.float32(255),
        np.concatenate([labels, test_labels]),
        np.concatenate([split, np.full(len(test_labels), "test", dtype=object)]),
        np.concatenate([codes, np.full(len(test_labels), -1)]),
        colored=colored,
        rounded=False,
    )


def _official(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a part, ``"train"`` or ``"t10k"``."""
    return read_idx(folder / f"{part}-images-idx3-ubyte.gz"), read_idx(folder / f"{part}-labels-idx1-ubyte.gz")


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped IDX file of unsigned bytes.

    Raises
    ------
    ValueError
        If it is not one, or truncated.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        zero, kind, n_dims = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{n_dims}I", data[4 : 4 + 4 * n_dims])
        if (zero, kind) != (0, 8):
            raise ValueError("not of unsigned bytes")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * n_dims).reshape(shape)
    except (gzip.BadGzipFile, zlib.error, EOFError, struct.error, ValueError) as error:
        msg = f"{path} is not a gzipped IDX file of bytes, or is truncated ({error}): fetch it again."
        raise ValueError(msg) from error


def _mnist_folder(path: str | os.PathLike[str] | None) -> Path:
    if path is None:
        files = [
            fetch(_MNIST_URL + name, checksum=checksum, folder="mnist", licence="by no stated terms (LeCun et al.)")
            for name, checksum in _MNIST.items()
        ]
        return files[0].parent
    folder = local_path(path)
    missing = [name for name in _MNIST if not (folder / name).is_file()]
    if missing:
        msg = f"{folder} lacks {', '.join(missing)}: give the folder of the four official MNIST files."
        raise FileNotFoundError(msg)
    return folder


def _nearest(images: np.ndarray) -> np.ndarray:
    """Resize square images to 32 pixels by nearest neighbour."""
    index = np.arange(_SIZE) * images.shape[1] // _SIZE
    return images[:, index][:, :, index]


def _environments(split: np.ndarray, seed: int, n: int = 2, imbalance: float = 0.0) -> np.ndarray:
    """A code each, of equally large environments or as unequal ones as that; -1 of the test."""
    # a stream of its own: the environment must not depend on how the split was drawn
    rng = np.random.default_rng([seed, 1])
    if imbalance:
        weight = rng.gamma(imbalance**-2, size=n)
        codes = rng.choice(n, size=len(split), p=weight / weight.sum())
    else:
        codes = rng.permutation(np.resize(np.arange(n), len(split)))
    codes[split == "test"] = -1
    return codes


def _table(
    grey: np.ndarray,
    digits: np.ndarray,
    split: np.ndarray,
    codes: np.ndarray,
    *,
    n_environments: int = 2,
    seed: int = 0,
    colored: bool = True,
    rounded: bool = True,
) -> AnnData:
    """Cells with these codes of environments, painted by them if they are to be coloured."""
    from anndata import AnnData

    names, hues, shades = paints(n_environments, seed)
    obs = pd.DataFrame(
        {
            "digit": pd.Categorical([str(d) for d in digits]),
            "environment": pd.Categorical.from_codes(np.where(codes < 0, n_environments, codes), [*names, "white"]),
            "split": pd.Categorical(split, ["train", "validation", "test"]),
        },
        index=[f"digit_{i}" for i in range(len(digits))],
    )
    painted_by = codes if colored else np.full_like(codes, -1)
    return AnnData(
        obs=obs,
        var=pd.DataFrame(index=["red", "green", "blue"]),
        obsm={IMAGE_KEY: painted(grey, np.asarray(digits), painted_by, hues, shades, rounded=rounded)},
        # where scanpy looks for colours; white would not be seen on paper
        uns={"environment_colors": [*_PLOTTED, "#B0B0B0"]} if n_environments == 2 else {},
    )


def colorize(grey: np.ndarray, digits: np.ndarray, environments: np.ndarray) -> np.ndarray:
    """Colour grey digits by the paper's recipe (appendix, Colored MNIST).

    Parameters
    ----------
    grey
        Intensities in [0, 1], ``(N, H, W)``.
    digits
        0 to 9, ``(N,)``.
    environments
        ``"red"``: the red channel 1, the others ``y / 10``; ``"green"``: the green channel 1, the others
        ``(9 - y) / 10``; ``"white"``: all channels 1. ``(N,)``.

    Returns
    -------
    uint8 ``(N, 3, H, W)``.
    """
    names, hues, shades = paints(2, seed=0)
    return painted(grey, digits, pd.Index(names).get_indexer(environments), hues, shades)


def paints(n: int, seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Name, hue ``(n, 3)``, and how pale each digit is ``(n, 10)``, of n environments."""
    pale = np.arange(10) / 10
    # a third of the circle from red to green, as published
    hues = np.array([colorsys.hsv_to_rgb(k / max(n, 3), 1.0, 1.0) for k in range(n)])
    rng = np.random.default_rng([seed, 2])
    shades = np.stack([pale, pale[::-1], *(rng.permutation(pale) for _ in range(n - 2))])
    return ["red", "green"] if n == 2 else [f"hue_{k}" for k in range(n)], hues, shades


def painted(
    grey: np.ndarray,
    digits: np.ndarray,
    environments: np.ndarray,
    hues: np.ndarray,
    shades: np.ndarray,
    *,
    rounded: bool = True,
) -> np.ndarray:
    """``(N, 3, H, W)``, uint8 or, where they are not rounded, float32 from 0 to 1; environment -1 stays white."""
    hue, shade = hues[environments], shades[environments, digits][:, None]
    color = (hue + shade * (1 - hue)).astype(np.float32)
    color[environments < 0] = 1
    grey, color = grey[:, None].astype(np.float32), color[:, :, None, None]
    return np.rint(255 * grey * color).astype(np.uint8) if rounded else grey * color


# of the training digits; the rest validate
TRAIN_SHARE = 0.8


def authors_draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Environments of the training digits, and which of them are trained on, as the paper's authors drew them.

    Parameters
    ----------
    n
        How many there are.

    Returns
    -------
    Codes, int64 ``(n,)``: an independent fair coin each, the first draw of torch's generator with seed 0; and a boolean
    ``(n,)``: four fifths without replacement, by NumPy's older generator with seed 0.
    """
    import torch  # data are read without it

    codes = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).numpy()
    is_train = np.zeros(n, dtype=bool)
    is_train[np.random.RandomState(0).choice(n, round(TRAIN_SHARE * n), replace=False)] = True
    return codes, is_train
