"""Which components of a latent-variable model are in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_TITLES = {"c": "$z_c$", "s": "$z_s$"}
_PANELS = {
    "divergence": "divergence from the prior, nats",
    "variance": "variance of the posterior mean",
    "prior_variance": "variance of the prior mean",
}


def latent_health(health: pd.DataFrame) -> np.ndarray:
    """Draw the components of each block, the most used first.

    A posterior that has collapsed to its prior shows as divergences and variances near 0; priors that have collapsed to
    one, as prior variances near 0 (always so for a VAE, which has a single one).

    Parameters
    ----------
    health
        ``model.latent_health`` of a latent-variable model.

    Returns
    -------
    Axes, one row a block.

    Raises
    ------
    ValueError
        If there are no components to draw.

    Examples
    --------
    >>> scbd.baselines.VAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> vae = scbd.baselines.VAEModel(adata)
    >>> vae.train(max_steps=1000)
    >>> axes = scbd.pl.latent_health(vae.latent_health)
    """
    import matplotlib.pyplot as plt

    if health.empty:
        msg = "There are no components to draw: train the model first."
        raise ValueError(msg)
    blocks = list(health["block"].unique())
    figure = plt.figure(figsize=(2.3 * len(_PANELS), 2.8 * len(blocks)), layout="constrained")
    axes = figure.subplots(len(blocks), len(_PANELS), squeeze=False)
    for block, row in zip(blocks, axes, strict=True):
        part = health[health["block"] == block].sort_values("divergence", ascending=False)
        used = f"{int(part['active'].sum())} of {len(part)} components in use"
        for ax, (column, label) in zip(row, _PANELS.items(), strict=True):
            ax.bar(np.arange(len(part)), part[column], width=1, color=np.where(part["active"], "#0072B2", "0.75"))
            ax.set_xlabel("component")
            ax.set_ylabel(label, fontsize="small")
        row[0].set_title(f"{_TITLES.get(block, block)}: {used}", fontsize="medium", loc="left")
    return axes
