"""Draw real_cells.png, what a phenotype would change in cells of MitoCheck: python docs/images/real_cells.py FOLDER

The folder holds the crops and labels that WayScience/phenotypic_profiling publishes (CC BY 4.0), as
``mitocheck_crops_1x64x64.npz`` (``images``) and ``mitocheck_obs.csv`` (``phenotype``, ``plate``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import scvi
from anndata import AnnData

import scbd

CONTROL, SHOWN = "Interphase", "Binuclear"
_LEAST = 15  # cells of a phenotype that were not trained on


def cells(folder: Path) -> AnnData:
    """Crops that are in focus, with phenotype and plate."""
    obs = pd.read_csv(folder / "mitocheck_obs.csv")[["phenotype", "plate"]]
    images = np.load(folder / "mitocheck_crops_1x64x64.npz")["images"]
    in_focus = (obs["phenotype"] != "OutOfFocus").to_numpy()
    obs = obs[in_focus].reset_index(drop=True).astype("category")
    return AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"single_cell_images": images[in_focus]})


def trained(adata: AnnData) -> scbd.SCBDModel:
    """On seven cells in ten; the decoder afterwards."""
    scvi.settings.seed = 0
    scbd.SCBDModel.setup_anndata(adata, y_key="phenotype", e_key="plate", control=CONTROL)
    model = scbd.SCBDModel(adata, encoder="small")
    model.train(max_steps=300, batch_size=256, lr=1e-3, train_size=0.7)
    model.train_decoder(max_steps=600, width=32, likelihood="bernoulli")
    return model


def agreement(model: scbd.SCBDModel) -> pd.DataFrame:
    """Correlation of the change that is decoded, and of the difference of training means, with that of new cells."""
    images, phenotype = model.get_intensities(), model.adata.obs["phenotype"].astype(str).to_numpy()
    train, new = model.train_indices, model.validation_indices
    starts, rows = new[phenotype[new] == CONTROL], {}
    for name in np.unique(phenotype[new]):
        if name != CONTROL and (phenotype[new] == name).sum() >= _LEAST:
            truth, learned = (
                images[part[phenotype[part] == name]].mean(0) - images[part[phenotype[part] == CONTROL]].mean(0)
                for part in (new, train)
            )
            path = model.traverse(starts[:60], name, n_steps=2)
            pictures = {"traverse": (path[:, 1] - path[:, 0]).mean(0), "difference of means": learned}
            rows[name] = {way: np.corrcoef(one.ravel(), truth.ravel())[0, 1] for way, one in pictures.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


if __name__ == "__main__":
    model = trained(cells(Path(sys.argv[1])))
    found = agreement(model)
    print(found.round(2).to_string(), found.mean().round(2).to_string(), sep="\n")  # the numbers of the caption
    new = model.validation_indices
    first = new[(model.adata.obs["phenotype"] == CONTROL).to_numpy()[new]][1:4]
    axes = scbd.pl.traverse(model, rows=first.tolist(), to=SHOWN)
    axes[0, 0].figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
