"""The demo: does z_c read the digit or its colour? Minutes on real digits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd._outputs import check_directory, save_figure
from scbd.baselines import pixel_pca
from scbd.datasets import colored_digits
from scbd.model import SCBDModel
from scbd.workflows import UNTRAINED, embedding_scores, generalization_scores, seed_everything

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.model import Alpha

SETTINGS: dict[str, Any] = {"encoder": "small", "n_latent": 128, "style_target": "ye", "standardize": False}
TRAINING: dict[str, Any] = {
    **{"max_steps": 600, "lr": 3e-4, "batch_size": 256, "split": "split", "load_best": False},
    "online_head": True,
}
_NOT_SHOWN = ("e chance", "e chance, new", "collapsed")


def demo(
    out: str | os.PathLike[str] = "results/demo", *, alpha: Alpha = "auto", seed: int = 0, max_steps: int = 600
) -> pd.DataFrame:
    """Train on coloured digits with and without invariance, and test on white ones.

    In training, the colour gives the digit away; white digits have none. Two systems are compared, alpha = 0 and the
    given alpha. Two controls say what a linear head can do where nothing was learned of labels: principal components of
    the pixels, and a random encoder that was never trained. Writes ``metrics.csv``, ``digits.png``,
    ``training_curves.png``, ``umap.png`` and ``model/``.

    Parameters
    ----------
    out
        Directory for table, pictures and model; files of an earlier demo are replaced.
    alpha
        Weight of the invariance loss, see :class:`scbd.SCBDModel`.
    seed
        Seed of data, weights and batches.
    max_steps
        Steps of each training run.

    Returns
    -------
    One row a system. Accuracy of the digit in distribution (held-out coloured digits) and on white digits: from r_c by
    a linear head that is fitted afterwards, and (``own``) by one that learned with the encoder; from z_c itself by the
    nearest class mean. Accuracy of the environment from both (chance 0.5); the supervised loss of z_c and that of a
    point, its spread and effective rank.

    Examples
    --------
    >>> report = scbd.paper.demo("results/demo")  # minutes  # doctest: +SKIP
    """
    from scbd import pl

    out = check_directory(out)
    out.mkdir(parents=True, exist_ok=True)
    adata = colored_digits(seed=seed)
    save_figure(pl.cells(adata, label="environment", seed=seed)[0, 0].figure, out / "digits.png")
    keys: dict[str, Any] = {"y_key": "digit", "e_key": "environment"}
    pixels = pixel_pca(adata, n_components=64, fit=(adata.obs["split"] == "train").to_numpy(), seed=seed)
    rows = {"pixel PCA": _shown(embedding_scores(adata, pixels, **keys))}
    for name, system_alpha, training in (
        ("random encoder", 0.0, TRAINING | UNTRAINED | {"online_head": False}),
        ("alpha = 0", 0.0, TRAINING | {"max_steps": max_steps}),
        (f"alpha = {alpha}", alpha, TRAINING | {"max_steps": max_steps}),
    ):
        model = train_digits(adata, system_alpha, seed, **training)
        rows[name] = _shown(generalization_scores(adata, model, **keys))
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("system")
    table.round(4).to_csv(out / "metrics.csv")
    model.save(str(out / "model"), overwrite=True)
    save_figure(pl.history(model.history, ceiling=model.health["ceiling"])[0].figure, out / "training_curves.png")
    for key, block in ((CONTENT_KEY, "c"), (STYLE_KEY, "s")):
        adata.obsm[key] = model.get_latent_representation(block=block)
    save_figure(pl.umap_blocks(adata, ["digit", "environment"], seed=seed)[0, 0].figure, out / "umap.png")
    return table


def _shown(scores: dict[str, float]) -> dict[str, float]:
    # what is out of distribution here are the white digits
    return {key.replace("out", "white"): value for key, value in scores.items() if key not in _NOT_SHOWN}


def train_digits(adata: AnnData, alpha: Alpha, seed: int, **training: Any) -> SCBDModel:
    """A model of the demo's size, trained on the coloured digits."""
    seed_everything(seed)
    SCBDModel.setup_anndata(adata, y_key="digit", e_key="environment")
    model = SCBDModel(adata, alpha=alpha, **SETTINGS)
    model.train(seed=seed, **training)
    return model
