"""Images of coloured handwritten digits, as a test of methods that should ignore the environment (the colour).

In the training environments, the paleness of the colour predicts the digit. In the test environment, all digits are
white.
"""

from __future__ import annotations

import colorsys
import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from scipy.ndimage import zoom

from scbd._shared.checks import check_choice
from scbd._shared.files import local_path
from scbd._shared.keys import IMAGE_KEY
from scbd.datasets._download import download_cached

if TYPE_CHECKING:
    from anndata import AnnData

Protocol = Literal["balanced", "authors"]

# fraction of the official training digits that is used for training; the rest is used for validation
_TRAIN_FRACTION = 0.8
# side of the digit images in pixels
_SIZE = 32
# colours in which plots show the red and the green training environment
_ENVIRONMENT_PLOT_COLORS = ("#D62728", "#2CA02C")
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}


def colored_digits(*, seed: int = 0) -> AnnData:
    """Load the 1,797 handwritten digits that come with scikit-learn, in colour, without a download in about a second.

    In each of the two training environments (red and green), the paleness of the colour predicts the digit perfectly.
    In the test environment, all digits are white, so that the colour carries no information. A model that uses the
    colour fails in the test environment.

    Parameters
    ----------
    seed
        Seed of the split into training, validation and test digits, and of the environments.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(1797, 3, 32, 32)`` and ``obs``:

    - ``digit``;
    - ``environment``: ``red``, ``green`` or ``white``;
    - ``split``: ``train`` (1,100), ``validation`` (297) or ``test`` (400, all white).

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
    # enlarge images from 8 to 32 pixels, by bilinear interpolation between pixel centres as in image libraries
    grey = zoom(images.reshape(-1, 8, 8) / 16, (1, 4, 4), order=1, grid_mode=True, mode="nearest")
    order = np.random.default_rng(seed).permutation(len(digits))
    split = np.empty(len(digits), dtype=object)
    for name, part in zip(("train", "validation", "test"), np.split(order, [1100, 1397]), strict=True):
        split[part] = name
    return _build_digits(grey, digits, split, _draw_environments(len(digits), seed))


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
    """Load Colored MNIST as in Makino et al. (2025): red and green training digits, white test digits.

    The two training environments are red and green. Within an environment, the paleness of the colour determines the
    digit: paleness increases from digit 0 to digit 9 in red, and decreases in green. With more than two environments,
    paleness has a random order of its own in each additional colour. Hues are equally spaced on the colour circle; with
    two environments, they differ by a third of the circle.

    Parameters
    ----------
    path
        Folder with the four official MNIST files, ``*-ubyte.gz``. By default these files are downloaded once (11 MB,
        with verified checksums) into the user's cache.
    n_train, n_test
        Numbers of digits drawn at random. ``n_train`` digits are drawn from the 60,000 official training digits, and
        are then split 80/20 into training and validation digits. ``n_test`` digits are drawn from the 10,000 official
        test digits, and become white. By default all digits are used.
    colored
        Whether training digits are coloured. With `False`, training digits are white, too, and the environment has no
        effect. A model trained on white digits shows the best possible result on the white test digits (an oracle).
    n_environments
        Number of training environments, each of which has its own hue.
    imbalance
        Coefficient of variation of the expected numbers of digits per environment; 0 for environments of equal size.
    n_digits
        Number of digit classes. Only digits below this number are used.
    protocol
        - ``"balanced"`` (default): environments are equally large if ``imbalance`` is 0. Environments and split are
          drawn at random with ``seed``.
        - ``"authors"``: the data on which the paper's authors trained, whatever the seed. The environment of each digit
          is one throw of a fair coin, 48,000 digits are for training, and colours are not rounded to 8-bit levels. All
          digits are used, in the order of the files.
    seed
        Seed of the split, of the environments and of the random choice of digits.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(N, 3, 32, 32)``, or float32 from 0 to 1 with
    ``protocol="authors"`` (0.9 GB), and ``obs``:

    - ``digit``;
    - ``environment``: ``red``, ``green`` (``hue_0``, ``hue_1``, … with more than two environments) or ``white``;
    - ``split``: ``train``, ``validation`` or ``test``.

    Raises
    ------
    FileNotFoundError
        If a file is missing in ``path``.
    ConnectionError
        If the files cannot be downloaded.
    ValueError
        If a file is not the official one, a number is out of range, ``protocol`` is unknown, or an argument other than
        ``path``, ``colored`` and ``seed`` differs from its default with ``protocol="authors"``.

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
        given = {"n_train": n_train, "n_test": n_test, "n_environments": n_environments, "imbalance": imbalance}
        given |= {"n_digits": n_digits}
        usual = {"n_train": None, "n_test": None, "n_environments": 2, "imbalance": 0.0, "n_digits": 10}
        if changed := [f"{name}={value!r}" for name, value in given.items() if value != usual[name]]:
            msg = f"protocol='authors' is one fixed data set of all digits: drop {', '.join(changed)}."
            raise ValueError(msg)
    folder = _mnist_folder(path)
    images, digits = (
        [read_idx(folder / f"{part}-{content}-ubyte.gz") for part in ("train", "t10k")]
        for content in ("images-idx3", "labels-idx1")
    )

    # Choose digits of the official training and test digits, and draw split and environments. The authors' digits are
    # in the order of the files.
    if protocol == "authors":
        rows = [np.arange(len(labels)) for labels in digits]
        codes, is_train = draw_authors_split(len(rows[0]))
        codes = np.append(codes, np.full(len(rows[1]), -1))
    else:
        rng, rows = np.random.default_rng(seed), []
        for part, labels, n in zip(("train", "t10k"), digits, (n_train, n_test), strict=True):
            if n is not None and not 0 < n <= len(labels):
                msg = f"There are {len(labels):,} {part} digits, but {n:,} were requested."
                raise ValueError(msg)
            drawn = rng.permutation(len(labels))[:n]
            rows.append(drawn[labels[drawn] < n_digits])
        is_train = np.arange(len(rows[0])) < round(_TRAIN_FRACTION * len(rows[0]))
        codes = _draw_environments(len(rows[0]) + len(rows[1]), seed, n_environments, imbalance)

    split = np.append(np.where(is_train, "train", "validation"), np.full(len(rows[1]), "test"))
    grey = _resize_nearest(np.concatenate([part[chosen] for part, chosen in zip(images, rows, strict=True)]))
    return _build_digits(
        grey / np.float32(255),
        np.concatenate([labels[chosen] for labels, chosen in zip(digits, rows, strict=True)]),
        split,
        codes,
        n_environments=n_environments,
        seed=seed,
        colored=colored,
        rounded=protocol != "authors",
    )


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped file of unsigned bytes in the IDX format, the format of the official MNIST files.

    Raises
    ------
    ValueError
        If the file does not have the IDX format, or is truncated.
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
        licence = "by no stated terms (LeCun et al.)"
        for name, checksum in _MNIST.items():
            file = download_cached(_MNIST_URL + name, checksum=checksum, folder="mnist", licence=licence)
        return file.parent
    folder = local_path(path)
    missing = [name for name in _MNIST if not (folder / name).is_file()]
    if missing:
        msg = f"{folder} lacks {', '.join(missing)}: give the folder of the four official MNIST files."
        raise FileNotFoundError(msg)
    return folder


def _resize_nearest(images: np.ndarray) -> np.ndarray:
    """Resize square images ``(N, H, H)`` to 32 × 32 pixels by nearest-neighbour interpolation."""
    index = np.arange(_SIZE) * images.shape[1] // _SIZE
    return images[:, index][:, :, index]


def _draw_environments(n_digits: int, seed: int, n_environments: int = 2, imbalance: float = 0.0) -> np.ndarray:
    """Draw the training environment of each digit, as an integer code.

    ``imbalance`` is the coefficient of variation of the expected numbers of digits per environment. With 0,
    environments are equally large.
    """
    # use a separate random generator, so that the environments do not depend on the random split
    rng = np.random.default_rng([seed, 1])
    if imbalance:
        weight = rng.gamma(imbalance**-2, size=n_environments)
        return rng.choice(n_environments, size=n_digits, p=weight / weight.sum())
    return rng.permutation(np.resize(np.arange(n_environments), n_digits))


def _build_digits(
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
    """Build the AnnData of grey digits, which are painted in the colours of their environments if ``colored`` is true.

    Test digits are white, whatever their environment in ``codes``. If ``colored`` is false, all digits are white.
    """
    from anndata import AnnData

    names, hues, shades = environment_colours(n_environments, seed)
    codes = np.where(split == "test", -1, codes)
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
        obsm={IMAGE_KEY: paint(grey, np.asarray(digits), painted_by, hues, shades, rounded=rounded)},
        # plot colours of the environments, stored where scanpy reads them. The white environment is plotted in grey,
        # because white would be invisible on paper.
        uns={"environment_colors": [*_ENVIRONMENT_PLOT_COLORS, "#B0B0B0"]} if n_environments == 2 else {},
    )


def colorize(grey: np.ndarray, digits: np.ndarray, environments: np.ndarray) -> np.ndarray:
    """Colour grey digits by the recipe of Makino et al. (2025), appendix on Colored MNIST.

    Parameters
    ----------
    grey
        Grey images of digits, with intensities in [0, 1], ``(N, H, W)``.
    digits
        Digits ``y`` from 0 to 9, ``(N,)``.
    environments
        Name of the environment of each digit, ``(N,)``. It determines the factors by which intensities are multiplied:

        - ``"red"``: 1 in the red channel, ``y / 10`` in the other channels;
        - ``"green"``: 1 in the green channel, ``(9 - y) / 10`` in the other channels;
        - ``"white"``: 1 in all channels.

    Returns
    -------
    Colour images, uint8 ``(N, 3, H, W)``.
    """
    names, hues, shades = environment_colours(2, seed=0)
    return paint(grey, digits, pd.Index(names).get_indexer(environments), hues, shades)


def environment_colours(n: int, seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names, hues and palenesses of ``n`` training environments.

    Hues are RGB colours, one per environment, ``(n, 3)``. Palenesses range from 0 (pure hue) to 1 (white), and are
    given for each environment and each of the ten digits, ``(n, 10)``.
    """
    pale = np.arange(10) / 10
    # With two environments, the hues are red and green, as in the paper. Red and green differ by a third of the colour
    # circle.
    hues = np.array([colorsys.hsv_to_rgb(k / max(n, 3), 1.0, 1.0) for k in range(n)])
    rng = np.random.default_rng([seed, 2])
    shades = np.stack([pale, pale[::-1], *(rng.permutation(pale) for _ in range(n - 2))])
    return ["red", "green"] if n == 2 else [f"hue_{k}" for k in range(n)], hues, shades


def paint(
    grey: np.ndarray,
    digits: np.ndarray,
    environments: np.ndarray,
    hues: np.ndarray,
    shades: np.ndarray,
    *,
    rounded: bool = True,
) -> np.ndarray:
    """Paint grey digits in the hue of their environment, with the paleness of the digit.

    Digits with the environment code -1 are painted white.

    Returns
    -------
    Colour images ``(N, 3, H, W)``, uint8 if ``rounded`` is true, otherwise float32 from 0 to 1.
    """
    hue, shade = hues[environments], shades[environments, digits][:, None]
    color = (hue + shade * (1 - hue)).astype(np.float32)
    color[environments < 0] = 1
    grey, color = grey[:, None].astype(np.float32), color[:, :, None, None]
    return np.rint(255 * grey * color).astype(np.uint8) if rounded else grey * color


def draw_authors_split(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the environments and the split of the official training digits exactly as Makino et al. (2025) did.

    Parameters
    ----------
    n
        Number of official training digits.

    Returns
    -------
    - Environment codes, int64 ``(n,)``: one throw of a fair coin per digit, from the first draw of PyTorch's generator
      with seed 0.
    - Mask of the digits used for training, boolean ``(n,)``: four fifths of the digits, drawn without replacement by
      NumPy's legacy generator (``RandomState``) with seed 0.
    """
    # imported inside this function, so that other functions of the module do not require torch
    import torch

    codes = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).numpy()
    is_train = np.zeros(n, dtype=bool)
    is_train[np.random.RandomState(0).choice(n, round(_TRAIN_FRACTION * n), replace=False)] = True
    return codes, is_train
