"""Are exchanged blocks what they should be? A reader of digits and a reader of colours look at decoded pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import IMAGE_KEY
from scbd.baselines import ERMModel
from scbd.datasets import colorize

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.model import SCBDModel

_READER_DIGITS = 30_000
# of the reader's training: batches, and how often it sees each digit
_BATCH, _PASSES, _LEAST_STEPS = 256, 10, 60
_PAIRS = 2_000


class DigitReader:
    """A network that reads digits without their colour: the brightest channel of each pixel.

    It learns them as they are and blurred, each moved by up to two pixels, since decoded digits are blurred. Layers
    are normalised image by image: statistics of sharp pictures would mislead it on blurred ones.

    Parameters
    ----------
    images
        Intensities in [0, 1], ``(N, 3, H, W)``.
    digits
        ``(N,)``.
    seed
        Of batches, and of how digits are moved and blurred; the first weights are torch's next.
    """

    def __init__(self, images: np.ndarray, digits: np.ndarray, *, seed: int = 0) -> None:
        rng, sharp = np.random.default_rng(seed), _shapes(images)
        blurred = _blurred(sharp, rng.uniform(0.5, 2.5, len(sharp)))
        seen = _table(_moved(np.concatenate([sharp, blurred]), rng), np.tile(digits, 2))
        ERMModel.setup_anndata(seen, y_key="digit", e_key="half")
        self._network = ERMModel(seen, encoder="small", norm="group", standardize=False)
        steps = max(_LEAST_STEPS, _PASSES * len(digits) // _BATCH)
        how: dict[str, Any] = {"max_steps": steps, "batch_size": _BATCH, "lr": 1e-3, "seed": seed}
        self._network.train(**how, train_size=1.0, load_best=False, enable_progress_bar=False)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Digits of images ``(N, 3, H, W)``."""
        return self._network.predict(_table(_shapes(images)))


def read_colors(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Environment and shade of coloured digits: the nearest of the paper's twenty colours.

    Parameters
    ----------
    images
        Intensities in [0, 1], ``(N, 3, H, W)``.

    Returns
    -------
    ``"red"`` or ``"green"``, and the digit that has this shade in training, 0 to 9; ``(N,)`` each.
    """
    brightness = images.max(1, keepdims=True)
    color = (images * brightness).sum((2, 3)) / np.maximum((brightness**2).sum((2, 3)), 1e-9)
    digits = np.tile(np.arange(10), 2)
    environments = np.repeat(["red", "green"], 10)
    palette = colorize(np.ones((20, 1, 1)), digits, environments)[:, :, 0, 0] / 255
    nearest = np.square(color[:, None] - palette).sum(2).argmin(1)
    return environments[nearest], digits[nearest]


def counterfactual_scores(adata: AnnData, model: SCBDModel | Any, *, seed: int = 0) -> dict[str, float]:
    """Read reconstructions of held-out coloured digits, and pictures with the content of one and the style of another.

    Parameters
    ----------
    adata
        Coloured digits with ``digit``, ``environment`` and ``split``.
    model
        Trained on it, with a decoder.
    seed
        Of the pairs and the reader.

    Returns
    -------
    ``reader``: accuracy of the reader on these digits as they are; ``mse``: squared error of reconstructions (intensity
    in [0, 1]) and ``mse of the mean image``, that of knowing nothing; ``digit reconstructed``, ``color reconstructed``;
    and for exchanged blocks ``digit kept`` (that of the content is read), ``color moved`` (the environment of the style
    is read: 0 if the colour came with the content) and ``shade error`` (mean distance between the shade read and that
    of the style, 0 to 9), over pairs of different digit and environment: compositions that training never saw.

    Examples
    --------
    >>> digits = scbd.datasets.colored_digits()
    >>> scores = scbd.workflows.counterfactual_scores(digits, model)  # of a model of these digits  # doctest: +SKIP
    """
    rng = np.random.default_rng(seed)
    split, digit = adata.obs["split"].to_numpy(), adata.obs["digit"].astype(int).to_numpy()
    environment = adata.obs["environment"].astype(str).to_numpy()
    rows = rng.permutation(np.flatnonzero(split == "train"))[:_READER_DIGITS]
    reader = DigitReader(model.get_intensities(indices=rows), digit[rows], seed=seed)
    first = rng.permutation(np.flatnonzero(split == "validation"))[:_PAIRS]
    second = rng.permutation(first)
    original, decoded = model.get_intensities(indices=first), model.reconstruct(indices=first)
    scores = {
        "reader": float(np.mean(reader(original) == digit[first])),
        "mse": float(np.square(decoded - original).mean()),
        "mse of the mean image": float(np.square(original.mean(0) - original).mean()),
        "digit reconstructed": float(np.mean(reader(decoded) == digit[first])),
        "color reconstructed": float(np.mean(read_colors(decoded)[0] == environment[first])),
    }
    new = (digit[first] != digit[second]) & (environment[first] != environment[second])
    first, second = first[new], second[new]
    swapped = model.swap_blocks(content=first, style=second)
    color, shade = read_colors(swapped)
    return scores | {
        "digit kept": float(np.mean(reader(swapped) == digit[first])),
        "color moved": float(np.mean(color == environment[second])),
        "shade error": float(np.abs(shade - digit[second]).mean()),
    }


def _shapes(images: np.ndarray) -> np.ndarray:
    """Brightness of pixels ``(N, H, W)``, as large as the brightest of its picture: decoded digits are fainter."""
    return _as_bright(images.max(1))


def _as_bright(shapes: np.ndarray) -> np.ndarray:
    return shapes / np.maximum(shapes.max((1, 2), keepdims=True), 1e-9)


def _blurred(shapes: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Each by a normal distribution with its own standard deviation ``(N,)``."""
    from scipy.ndimage import gaussian_filter

    return _as_bright(np.stack([gaussian_filter(shape, width) for shape, width in zip(shapes, pixels, strict=True)]))


def _moved(shapes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each by up to two pixels."""
    by = rng.integers(-2, 3, (len(shapes), 2))
    return np.stack([np.roll(shape, step, (0, 1)) for shape, step in zip(shapes, by, strict=True)])


def _table(shapes: np.ndarray, digits: np.ndarray | int = 0) -> AnnData:
    """Shapes ``(N, H, W)`` as a classifier takes them."""
    from anndata import AnnData

    n = len(shapes)
    # a classifier has no use for environments, and asks for two
    obs = pd.DataFrame({"digit": np.broadcast_to(digits, n), "half": np.arange(n) % 2}, index=np.arange(n).astype(str))
    return AnnData(obs=obs.astype("category"), obsm={IMAGE_KEY: (255 * shapes).round().astype(np.uint8)[:, None]})
