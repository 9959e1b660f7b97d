"""Colored digits: real handwritten digits whose colour betrays them in training and says nothing in the test."""

from __future__ import annotations

import colorsys
import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.ndimage import zoom

from scbd._keys import IMAGE_KEY
from scbd.datasets._download import fetch

if TYPE_CHECKING:
    from anndata import AnnData

_SIZE = 32
_PLOTTED = ("#D62728", "#2CA02C")
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}


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
    names, hues, shades = _paints(2, seed=0)
    return _painted(grey, digits, pd.Categorical(environments, names).codes, hues, shades)


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
    return _colored(grey, digits, split, seed)


def colored_mnist(
    path: str | os.PathLike[str] | None = None,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
    colored: bool = True,
    n_environments: int = 2,
    imbalance: float = 0.0,
    n_digits: int = 10,
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
        Whether training digits are. Where they are white too, what is learned from them is the best that is to be had
        on white digits (an oracle), and the environment stands for nothing.
    n_environments
        Number of training environments.
    imbalance
        How unequal they are: coefficient of variation of their expected numbers of digits; 0 for equal ones.
    n_digits
        Only digits below this one.
    seed
        Seed of the split, the environments and the subset.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, 32, 32)`` and ``obs``: ``digit``, ``environment``
    (``red``, ``green`` or, if they are more than two, ``hue_0`` …; and ``white``), ``split``.

    Raises
    ------
    FileNotFoundError
        If a file is not in ``path``.
    ValueError
        If a file is not the official one, or a number is out of range.

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
    folder = _mnist_folder(path)
    rng = np.random.default_rng(seed)
    grey, digits, split = [], [], []
    for part, wanted in (("train", n_train), ("t10k", n_test)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        if wanted is not None and not 0 < wanted <= len(labels):
            msg = f"There are {len(labels):,} {part} digits, {wanted:,} were asked for."
            raise ValueError(msg)
        keep = rng.permutation(len(labels))[:wanted]
        keep = keep[labels[keep] < n_digits]
        grey.append(_nearest(images[keep]) / np.float32(255))
        digits.append(labels[keep])
        n_first = round(0.8 * len(keep)) if part == "train" else 0
        rest = "validation" if part == "train" else "test"
        split.append(np.array(["train"] * n_first + [rest] * (len(keep) - n_first), dtype=object))
    return _colored(
        np.concatenate(grey),
        np.concatenate(digits),
        np.concatenate(split),
        seed,
        colored=colored,
        n_environments=n_environments,
        imbalance=imbalance,
    )


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
    folder = Path(path)
    missing = [name for name in _MNIST if not (folder / name).is_file()]
    if missing:
        msg = f"{folder} lacks {', '.join(missing)}: give the folder of the four official MNIST files."
        raise FileNotFoundError(msg)
    return folder


def _nearest(images: np.ndarray) -> np.ndarray:
    """Resize square images to 32 pixels by nearest neighbour."""
    index = np.arange(_SIZE) * images.shape[1] // _SIZE
    return images[:, index][:, :, index]


def _colored(
    grey: np.ndarray,
    digits: np.ndarray,
    split: np.ndarray,
    seed: int,
    *,
    colored: bool = True,
    n_environments: int = 2,
    imbalance: float = 0.0,
) -> AnnData:
    from anndata import AnnData

    # a stream of its own: the environment must not depend on how the split was drawn
    rng = np.random.default_rng([seed, 1])
    names, hues, shades = _paints(n_environments, seed)
    if imbalance:
        weight = rng.gamma(imbalance**-2, size=n_environments)
        codes = rng.choice(n_environments, size=len(digits), p=weight / weight.sum())
    else:
        codes = rng.permutation(np.resize(np.arange(n_environments), len(digits)))
    codes[split == "test"] = -1
    obs = pd.DataFrame(
        {
            "digit": pd.Categorical([str(d) for d in digits]),
            "environment": pd.Categorical.from_codes(np.where(codes < 0, n_environments, codes), [*names, "white"]),
            "split": pd.Categorical(split, ["train", "validation", "test"]),
        },
        index=[f"digit_{i}" for i in range(len(digits))],
    )
    return AnnData(
        obs=obs,
        var=pd.DataFrame(index=["red", "green", "blue"]),
        obsm={
            IMAGE_KEY: _painted(grey, np.asarray(digits), codes if colored else np.full_like(codes, -1), hues, shades)
        },
        # where scanpy looks for colours; white would not be seen on paper
        uns={"environment_colors": [*_PLOTTED, "#B0B0B0"]} if n_environments == 2 else {},
    )


def _paints(n: int, seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Name, hue ``(n, 3)``, and how pale each digit is ``(n, 10)``, of n environments."""
    pale = np.arange(10) / 10
    # a third of the circle from red to green, as published
    hues = np.array([colorsys.hsv_to_rgb(k / max(n, 3), 1.0, 1.0) for k in range(n)])
    rng = np.random.default_rng([seed, 2])
    shades = np.stack([pale, pale[::-1], *(rng.permutation(pale) for _ in range(n - 2))])
    return ["red", "green"] if n == 2 else [f"hue_{k}" for k in range(n)], hues, shades


def _painted(
    grey: np.ndarray, digits: np.ndarray, environments: np.ndarray, hues: np.ndarray, shades: np.ndarray
) -> np.ndarray:
    """uint8 ``(N, 3, H, W)``; environment -1 stays white."""
    hue, shade = hues[environments], shades[environments, digits][:, None]
    color = (hue + shade * (1 - hue)).astype(np.float32)
    color[environments < 0] = 1
    return np.rint(255 * grey[:, None].astype(np.float32) * color[:, :, None, None]).astype(np.uint8)
