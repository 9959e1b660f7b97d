"""Are pictures of what a perturbation does to a cell true? In a simulated screen, where the truth is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import label_values
from scbd.datasets import simulated_effect
from scbd.workflows._variants import of_variant

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.model import SCBDModel

_GENES, _WELLS, _CELLS = 30, 6, 16
_DRAWN = 256  # for the true picture


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

    Examples
    --------
    >>> scores = scbd.workflows.effect_picture_scores(adata, model)
    >>> scores["mean difference: correlation"] > 0.3
    True
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


def _agreement(picture: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Of two pictures of an effect: how alike, and how far apart beside how large the true one is."""
    error = float(np.square(picture - true).sum() / np.square(true).sum())
    return {"correlation": float(np.corrcoef(picture.ravel(), true.ravel())[0, 1]), "error": error}
