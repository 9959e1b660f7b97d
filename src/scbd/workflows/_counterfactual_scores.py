"""Are exchanged blocks what they should be? A reader of digits and a reader of colours look at decoded pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.datasets import colorize

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.model import SCBDModel

_READER_DIGITS = 10_000
_PAIRS = 2_000


class DigitReader:
    """A small network that reads digits without their colour: the brightest channel of each pixel.

    Parameters
    ----------
    images
        Intensities in [0, 1], ``(N, 3, H, W)``.
    digits
        ``(N,)``.
    seed
        Of the network.
    """

    def __init__(self, images: np.ndarray, digits: np.ndarray, *, seed: int = 0) -> None:
        from sklearn.neural_network import MLPClassifier

        self._network = MLPClassifier((128,), alpha=1e-3, early_stopping=True, max_iter=60, random_state=seed)
        self._network.fit(_shapes(images), digits)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Digits of images ``(N, 3, H, W)``."""
        return self._network.predict(_shapes(images))


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
    """Brightness of each pixel, as large as the brightest one of its picture: decoded digits are fainter."""
    brightness = images.max(1).reshape(len(images), -1)
    return brightness / np.maximum(brightness.max(1, keepdims=True), 1e-9)
