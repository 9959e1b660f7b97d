"""Are decoded pictures what they should be: exchanged blocks of digits, and what a perturbation does to a cell?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.ndimage import gaussian_filter

from paper.scores import of_variant
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.labels import label_values
from scbd.baselines import ERMModel
from scbd.datasets._digits import colorize
from scbd.datasets._simulated import PHENOTYPES, apply_density, draw_ideal_images, photograph

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scbd.model import SCBDModel

_READER_DIGITS = 30_000
# of the reader's training: batches, and how often it sees each digit
_BATCH, _PASSES, _LEAST_STEPS = 256, 10, 60
_PAIRS = 2_000
# genes, wells and cells of a simulated screen; cells of the true picture
_GENES, _WELLS, _CELLS = 30, 6, 16
_DRAWN = 256  # for the true picture
# digits of a figure, and the file of a run that keeps them
_SHOWN = 6
PICTURES = "pictures.npz"


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
        self._network = ERMModel(seen, encoder="small", norm="group", standardize=False, augment=False)
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
    """
    rng = np.random.default_rng(seed)
    split, digit, environment = _labels(adata)
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


def counterfactual_pictures(adata: AnnData, model: SCBDModel | Any) -> dict[str, np.ndarray]:
    """Lines of a figure: held-out digits, all of them different, in colours that take turns; the same for all models.

    Parameters
    ----------
    adata, model
        As for :func:`counterfactual_scores`.

    Returns
    -------
    ``original``, ``reconstruction``, ``content of the next`` and ``style of the next``: images ``(6, 3, H, W)``, fewer
    where there are fewer digits.
    """
    split, digit, environment = _labels(adata)
    rows = np.random.default_rng(0).permutation(np.flatnonzero(split == "validation"))
    turns = np.resize(np.unique(environment[rows]), _SHOWN)
    shown: list[int] = []
    for turn in turns:
        shown.extend(rows[(environment[rows] == turn) & ~np.isin(digit[rows], digit[shown])][:1])
    following = np.roll(shown, -1)
    return {
        "original": model.get_intensities(indices=shown),
        "reconstruction": model.reconstruct(indices=shown),
        "content of the next": model.swap_blocks(content=following, style=shown),
        "style of the next": model.swap_blocks(content=shown, style=following),
    }


def _labels(adata: AnnData) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Part of the split, digit and environment, ``(N,)`` each."""
    obs = adata.obs
    return obs["split"].to_numpy(), obs["digit"].astype(int).to_numpy(), obs["environment"].astype(str).to_numpy()


def _shapes(images: np.ndarray) -> np.ndarray:
    """Brightness of pixels ``(N, H, W)``, as large as the brightest of its picture: decoded digits are fainter."""
    return _as_bright(images.max(1))


def _as_bright(shapes: np.ndarray) -> np.ndarray:
    return shapes / np.maximum(shapes.max((1, 2), keepdims=True), 1e-9)


def _blurred(shapes: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Each by a normal distribution with its own standard deviation ``(N,)``."""
    return _as_bright(np.stack([gaussian_filter(shape, width) for shape, width in zip(shapes, pixels, strict=True)]))


def _moved(shapes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each by up to two pixels."""
    by = rng.integers(-2, 3, (len(shapes), 2))
    return np.stack([np.roll(shape, step, (0, 1)) for shape, step in zip(shapes, by, strict=True)])


def _table(shapes: np.ndarray, digits: np.ndarray | int = 0) -> AnnData:
    """Shapes ``(N, H, W)`` as a classifier takes them."""
    n = len(shapes)
    # a classifier has no use for environments, and asks for two
    obs = pd.DataFrame({"digit": np.broadcast_to(digits, n), "half": np.arange(n) % 2}, index=np.arange(n).astype(str))
    return AnnData(obs=obs.astype("category"), obsm={IMAGE_KEY: (255 * shapes).round().astype(np.uint8)[:, None]})


def effect_picture_scores(
    adata: AnnData, model: SCBDModel | Any, *, control: str = "nontargeting", seed: int = 0
) -> dict[str, float]:
    """Compare pictures of :meth:`scbd.SCBDModel.traverse` with the true effect of a gene on the cells of a well.

    Up to 30 genes that do something, in six wells each, on 16 control cells of the well that set out.

    Parameters
    ----------
    adata
        A simulated screen with its ``uns["truth"]``, see :func:`scbd.datasets.simulated_screen`.
    model
        Trained on it, with a decoder.
    control
        The gene of control cells.
    seed
        Of the choice of genes, wells and cells.

    Returns
    -------
    ``correlation`` over pixels and channels of the predicted and the true picture, and ``error``, their squared
    distance as a share of the squared size of the truth (1: as good as a picture of nothing). Means over genes and
    wells; and the same under ``"gene not in the well: "``, of wells where no cell has the gene, if there are any; and
    under the names of two controls that need no model: ``"mean difference: "`` of all cells of the gene and all
    controls, and ``"mean difference in the well: "`` of those in the well, where there are any.

    Raises
    ------
    KeyError
        If the screen has no truth, or no well has a control.
    ValueError
        If the model has no decoder.
    """
    if "truth" not in adata.uns:
        msg = "uns has no 'truth': what a gene does is known of cells of scbd.datasets.simulated_screen alone."
        raise KeyError(msg)
    truth, rng = adata.uns["truth"], np.random.default_rng(seed)
    gene, well = (label_values(adata.obs, key).astype(str).to_numpy() for key in ("gene", "well"))
    acting = truth["phenotypes"].index[(truth["phenotypes"] != 0).any(axis=1)]
    genes = rng.permutation(np.intersect1d(acting.astype(str), gene))[:_GENES]
    is_control = gene == control
    wells = rng.permutation(np.unique(well[is_control]))[:_WELLS]
    if not len(wells):
        msg = f"No cell has the gene {control!r}, from which cells would set out."
        raise KeyError(msg)
    starts = {name: rng.permutation(np.flatnonzero(is_control & (well == name)))[:_CELLS] for name in wells}
    rows = np.concatenate(list(starts.values()))
    place = well[rows]
    images = model.get_intensities(adata)
    scores: dict[str, list[dict[str, float]]] = {}
    for name in genes:
        path = model.traverse(rows, name, adata, n_steps=2)
        changed = path[:, 1] - path[:, 0]
        has_gene = gene == name
        anywhere = images[has_gene].mean(0) - images[is_control].mean(0)
        for where in wells:
            # decoded pictures are in [0, 1]
            true = simulated_effect(truth, name, where, image_size=images.shape[-1], n_cells=_DRAWN, seed=seed) / 255
            here = well == where
            there = has_gene & here
            known = there.any()
            found = {"as it is" if known else "gene not in the well": changed[place == where].mean(0)}
            found["mean difference"] = anywhere
            if known:
                found["mean difference in the well"] = images[there].mean(0) - images[is_control & here].mean(0)
            for way, picture in found.items():
                scores.setdefault(way, []).append(_agreement(picture, true))
    means = {way: {key: float(np.mean([one[key] for one in each])) for key in each[0]} for way, each in scores.items()}
    return {key: value for way, each in means.items() for key, value in of_variant(way, each).items()}


def simulated_effect(
    truth: Mapping[str, Any], gene: str, well: str, *, image_size: int, n_cells: int = 512, seed: int = 0
) -> np.ndarray:
    """Mean picture of cells of a gene less that of the same cells without it, in the same well.

    Parameters
    ----------
    truth
        ``uns["truth"]`` of :func:`simulated_screen`.
    gene, well
        Their names there.
    image_size
        Pixels a side, as of the screen.
    n_cells
        To average over.
    seed
        Of these cells, and of their noise.

    Returns
    -------
    float32 ``(4, image_size, image_size)``, in units of the stored images (0 to 255).

    Raises
    ------
    KeyError
        If there is no such gene or well.
    """
    for what, name, table in (("gene", gene, truth["phenotypes"]), ("well", well, truth["wells"])):
        if name not in table.index:
            msg = f"There is no {what} {name!r} in this screen: it has {table.index[0]!r} to {table.index[-1]!r}."
            raise KeyError(msg)
    guides = truth["efficacy"]
    efficacy = guides.loc[guides.index.str.startswith(f"{gene}_sg"), "efficacy"].mean()
    effect = truth["phenotypes"].loc[gene] * efficacy * truth["strengths"].loc[well]
    here = truth["wells"].loc[[well] * n_cells]
    means = []
    for mean in (effect.to_numpy(), np.zeros(len(PHENOTYPES))):
        rng = np.random.default_rng(seed)  # the same cells, and the same noise
        shown = mean + rng.normal(size=(n_cells, len(mean))) * np.array(list(PHENOTYPES.values()))
        drawn = draw_ideal_images(rng, apply_density(shown, here["density"].to_numpy()), image_size)
        means.append(photograph(rng, drawn, here, image_size).mean(0, dtype=np.float64))
    return (means[0] - means[1]).astype(np.float32)


def _agreement(picture: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Of two pictures of an effect: how alike, and how far apart beside how large the true one is."""
    error = float(np.square(picture - true).sum() / np.square(true).sum())
    return {"correlation": float(np.corrcoef(picture.ravel(), true.ravel())[0, 1]), "error": error}
