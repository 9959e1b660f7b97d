"""Test statements of the notebook on a map of real genes, with the code of the notebook."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from conftest import run_cells

import scbd
from scbd.corrections import correct


@pytest.fixture(scope="module")
def page(shared) -> Any:
    """Names that the cells before the embeddings define."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SCBD_DATA", str(shared))
        return run_cells("real_map", lambda _, source: source.startswith("embeddings"))


def test_real_map_notebook_reads_all_wells_and_genes(page):
    assert page.wells.shape == (31_032, 21) and np.isfinite(page.wells.X).all()
    assert len(page.genes) == 1_293 and page.wells.obs["batch"].nunique() == 12
    assert (page.wells.obs.groupby("reagent").size() == 12).all()
    assert [str(said.message).partition(": ")[2][:32] for said in page.said] == ["17 missing values in 17 rows are"]
    assert page.net.attrs["kind"] == "pairs" and page.net.isin(page.genes).all(axis=1).sum() == 719


@pytest.mark.filterwarnings("ignore:4 labels of 'gene' differ")  # in flies, Mio and mio are two genes
def test_real_map_notebook_unseen_genes_score_higher_than_features(page):
    """Training takes three epochs instead of the thirteen of the notebook."""
    fit = page.half_of_genes(30)
    page.SYSTEMS["brief"] = (scbd.SCBDModel, page.linear, page.long | {"max_epochs": 3})
    learned = page.scores(page.trained(fit, "brief", seed=30), fit)
    plain = page.wells.X
    for z in (plain, correct(plain, "standardised", environments=page.plate, fit=fit)):
        scores = page.scores(z, fit)
        assert learned["interactions"] > scores["interactions"] + 0.05 > 0.2
        assert learned["AUROC"] > scores["AUROC"] + 0.05
        assert learned["other reagent"] > scores["other reagent"] + 0.02
    assert learned["batch"] < 0.25
