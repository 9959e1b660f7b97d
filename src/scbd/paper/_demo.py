"""The demo: does z_c read the digit or its colour? Minutes on real digits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd._outputs import check_directory, save_figure
from scbd.datasets import colored_digits
from scbd.model import SCBDModel
from scbd.workflows import UNTRAINED, generalization_scores, seed_everything

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.model import Alpha

SETTINGS: dict[str, Any] = {"encoder": "small", "n_latent": 128, "style_target": "ye", "standardize": False}
TRAINING: dict[str, Any] = {"max_steps": 600, "lr": 3e-4, "batch_size": 256, "split": "split", "load_best": False}
_NOT_SHOWN = ("e chance", "collapsed")


def demo(
    out: str | os.PathLike[str] = "results/demo", *, alpha: Alpha = "auto", seed: int = 0, max_steps: int = 600
) -> pd.DataFrame:
    """Train on coloured digits with and without invariance, and test on white ones.

    In training, the colour gives the digit away; white digits have none. Three systems are compared: alpha = 0, the
    given alpha, and as a control a random encoder that was never trained, which sets what a linear head can do without
    any learning. Writes ``metrics.csv``, ``digits.png``, ``training_curves.png``, ``umap.png`` and ``model/``.

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
    One row a system. Accuracy of the digit in distribution (held-out coloured digits) and on white digits, from r_c (a
    linear head) and from z_c itself (nearest class mean); accuracy of the environment from r_c (chance 0.5); the
    supervised loss of z_c and that of a point, its spread and effective rank.

    Examples
    --------
    >>> report = scbd.paper.demo("results/demo")  # minutes  # doctest: +SKIP
    """
    from scbd import pl

    out = check_directory(out)
    out.mkdir(parents=True, exist_ok=True)
    adata = colored_digits(seed=seed)
    save_figure(pl.cells(adata, label="environment", seed=seed)[0, 0].figure, out / "digits.png")
    rows = {}
    for name, system_alpha, training in (
        ("random encoder", 0.0, TRAINING | UNTRAINED),
        ("alpha = 0", 0.0, TRAINING | {"max_steps": max_steps}),
        (f"alpha = {alpha}", alpha, TRAINING | {"max_steps": max_steps}),
    ):
        model = train_digits(adata, system_alpha, seed, **training)
        scores = generalization_scores(adata, model, y_key="digit", e_key="environment")
        # what is out of distribution here are the white digits
        rows[name] = {key.replace("out", "white"): value for key, value in scores.items() if key not in _NOT_SHOWN}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("system")
    table.round(4).to_csv(out / "metrics.csv")
    model.save(str(out / "model"), overwrite=True)
    save_figure(pl.history(model.history, ceiling=model.health["ceiling"])[0].figure, out / "training_curves.png")
    for key, block in ((CONTENT_KEY, "c"), (STYLE_KEY, "s")):
        adata.obsm[key] = model.get_latent_representation(block=block)
    save_figure(pl.umap_blocks(adata, ["digit", "environment"], seed=seed)[0, 0].figure, out / "umap.png")
    return table


def train_digits(adata: AnnData, alpha: Alpha, seed: int, **training: Any) -> SCBDModel:
    """A model of the demo's size, trained on the coloured digits."""
    seed_everything(seed)
    SCBDModel.setup_anndata(adata, y_key="digit", e_key="environment")
    model = SCBDModel(adata, alpha=alpha, **SETTINGS)
    model.train(seed=seed, **training)
    return model
