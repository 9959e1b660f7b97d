"""Are exchanged blocks what they should be? A reader of digits and a reader of colours look at decoded pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.datasets import colorize

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor

    from scbd.model import SCBDModel

# of the reader of digits: how many it learns from, how often it sees each (few are seen more often), and how
_READER_DIGITS, _READER_EPOCHS, _READER_STEPS = 30_000, 4, 100
_READER_BATCH, _READER_LR, _READER_SHIFT = 128, 4e-3, 2
_PAIRS = 2_000


class DigitReader:
    """A small convolutional network that reads digits without their colour: the brightest channel of each pixel.

    It must hardly err on handwriting: one that does finds fault with a decoder that shows how a digit was written, and
    none with one that shows prototypes.

    Parameters
    ----------
    images
        Intensities in [0, 1], ``(N, 3, H, W)``.
    digits
        ``(N,)``.
    seed
        Of the network, and of what it sees when.
    """

    def __init__(self, images: np.ndarray, digits: np.ndarray, *, seed: int = 0) -> None:
        import torch
        from torch import nn
        from torch.nn import functional as F

        from scbd.nn import Features

        shapes, names = _shapes(images), torch.from_numpy(np.asarray(digits, dtype=np.int64))
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # the random numbers of all others stay theirs
            torch.manual_seed(seed)
            features = Features("small", shapes.shape[1:])
            self._network = nn.Sequential(features, nn.Linear(features.n_features, int(names.max()) + 1))
        steps = max(_READER_STEPS, _READER_EPOCHS * len(shapes) // _READER_BATCH)
        optimizer = torch.optim.AdamW(self._network.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _READER_LR, total_steps=steps)
        for _ in range(steps):
            rows = torch.randint(len(shapes), (_READER_BATCH,), generator=generator)
            shift = torch.randint(-_READER_SHIFT, _READER_SHIFT + 1, (2,), generator=generator).tolist()
            loss = F.cross_entropy(self._network(shapes[rows].roll(shift, (2, 3))), names[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self._network.eval()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Digits of images ``(N, 3, H, W)``."""
        import torch

        with torch.inference_mode():
            return self._network(_shapes(images)).argmax(1).numpy()


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


def _shapes(images: np.ndarray) -> Tensor:
    """Brightness of each pixel, as large as the brightest one of its picture: decoded digits are fainter."""
    import torch

    brightness = images.max(1, keepdims=True)
    return torch.from_numpy(brightness / np.maximum(brightness.max((2, 3), keepdims=True), 1e-9).astype(np.float32))
