"""Test statements of the notebook on a real plate, with its first cells.

The effect of the drugs on this plate can be measured in the images.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
from conftest import run_cells
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import scbd


@pytest.fixture(scope="module")
def plate(shared) -> Any:
    """Names that the first two code cells define: the crops, and the ratio of nucleus and ring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SCBD_DATA", str(shared))
        return run_cells("real_plate", lambda number, _: number == 2)


def test_ratio_drawn_discs_returns_ratio_of_brightness(plate):
    """For a disc within a larger disc, the ratio of their brightness is returned, whatever is farther out."""
    y, x = np.mgrid[:32, :32] - 16
    radius = np.hypot(y, x)
    for inside, outside in ((0.8, 0.2), (0.1, 0.4)):
        gfp = np.where(radius < 7, inside, np.where(radius < 14, outside, 1.0))
        image = np.stack([gfp, np.where(radius < 7, 0.9, 0.1)])[None]
        assert plate.ratio(image)[0] == pytest.approx(inside / outside, rel=0.05)


def test_ratio_real_plate_rises_with_dose(plate):
    of_well = plate.adata.obs.groupby(["drug", "dose", "well"])["ratio"].median()
    for drug, ratios in of_well.groupby(["drug", "dose"]).mean().groupby("drug"):
        assert ratios[drug, 0] < 0.85 and 5 < ratios[drug, 10] < 6.5
        rising = ratios[drug].loc[2:6]
        assert (np.diff(rising) > 0).all() and spearmanr(ratios[drug].index, ratios[drug])[0] > 0.8


def test_train_unseen_rows_separates_controls_and_orders_doses(plate):
    """Few cells and few steps suffice.

    Cells are scored by the position of z_c between untreated and positive controls, without a further classifier.
    """
    adata = plate.adata[plate.adata.obs["row"].isin(list("AEDH"))].copy()
    obs = adata.obs
    scvi.settings.seed = 0
    split = scbd.data.hold_out_environments(obs["row"], ["D", "H"], strata=[obs["dose"]])
    scbd.SCBDModel.setup_anndata(adata, y_key="dose", e_key="row", control=0)
    model = scbd.SCBDModel(adata, encoder="small")
    model.train(split=split, max_steps=30, batch_size=128, enable_progress_bar=False)
    z, dose = model.get_latent_representation(), obs["dose"].to_numpy()
    train, test = (np.isin(np.arange(len(obs)), rows) for rows in (split.train, split.test))
    position = z @ (z[train & (dose == 10)].mean(0) - z[train & (dose == 0)].mean(0))
    ends = test & np.isin(dose, [0, 10])
    assert roc_auc_score(dose[ends] == 10, position[ends]) > 0.95
    held_out = pd.DataFrame({"position": position, "dose": dose, "ratio": obs["ratio"]})[test]
    of_well = held_out.groupby(obs["well"][test].astype(str)).median()
    assert spearmanr(of_well["position"], of_well["ratio"])[0] > 0.7
