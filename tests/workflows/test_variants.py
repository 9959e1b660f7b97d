"""Several scores of one run side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells

from scbd.baselines import ERMModel, MCVAEModel
from scbd.workflows._variants import blocks_of, side_by_side

QUICK: dict[str, Any] = {"max_steps": 2, "batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu"}


def test_the_mcvae_is_scored_as_its_paper_and_as_its_code_do():
    cells = make_cells()
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = MCVAEModel(cells, control="gene_2", n_latent=5)
    model.train(**QUICK)
    rows = np.array([3, 1, 40])
    blocks = blocks_of(model, rows)
    salient, background = (model.get_latent_representation(indices=rows, block=block) for block in "cs")
    assert list(blocks) == ["salient block", "both blocks"]
    np.testing.assert_array_equal(blocks["salient block"], salient)
    np.testing.assert_array_equal(blocks["both blocks"], np.hstack([salient, background]))


def test_others_have_one_block():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(**QUICK)
    ((name, z),) = blocks_of(model).items()
    assert name == "as it is"
    np.testing.assert_array_equal(z, model.get_latent_representation())


def test_scores_have_the_names_of_their_variant_and_chance_is_that_of_all():
    rows = [
        ("as it is", "e_probe_f1", 0.5, 0.1),
        ("as it is", "effective_rank", 3.0, np.nan),
        ("as it is, standardised", "e_probe_f1", 0.2, 0.3),
        ("as it is, standardised", "silhouette", np.nan, np.nan),
        ("both blocks, standardised", "e_probe_f1", 0.4, 0.2),
    ]
    frame = pd.DataFrame(rows, columns=["representation", "metric", "value", "chance"])
    scores = side_by_side(frame)
    assert scores.pop("chance: e_probe_f1") == pytest.approx(0.2)
    assert scores == {
        "e_probe_f1": 0.5,
        "standardised: e_probe_f1": 0.2,
        "both blocks, standardised: e_probe_f1": 0.4,
    }
