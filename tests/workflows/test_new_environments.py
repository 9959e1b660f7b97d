from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from scbd.workflows import DATASETS, PROTOCOLS, Trial
from scbd.workflows._new_environments import transfer_scores

SCREEN = {"n_cells": 1200, "n_wells": 18, "plate_wells": 6, "image_size": 16, "n_complexes": 2, "guides_per_gene": 2}


def scored(tmp_path, fold: int = 1) -> dict[str, Any]:
    training = {"max_steps": 3, "batch_size": 64}
    trial = Trial("new environments", "simulated_screen_plates", "ERM", 0, {}, {"encoder": "small"}, training)
    dataset = DATASETS[trial.dataset]
    adata = dataset.load(None, 0, fold=fold, **SCREEN)
    assert set(adata.obs.loc[adata.obs["split"] == "test", "plate"]) == {f"P{fold + 1}"}
    scores, model = PROTOCOLS[trial.protocol](trial, adata, dataset, tmp_path)
    assert model is not None and not np.isin(model.train_indices, np.flatnonzero(adata.obs["split"] == "test")).any()
    return scores


@pytest.mark.filterwarnings("ignore:.*did not converge", "ignore:.*not converged")
def test_a_new_plate_is_scored_by_each_way_to_embed_it(tmp_path):
    scores = scored(tmp_path)
    ways = {name.split(": ")[0] for name in scores if ": " in name}
    adapted = {"adapted on controls", "adapted on controls, with a map", "adapted on all cells"}
    corrected = {"z standardised on controls", "z standardised"} | ({"z Harmony"} if find_spec("harmonypy") else set())
    assert ways == adapted | corrected
    assert {name for name in scores if ": " not in name} == {"y AUROC", "y F1", "new or old"}
    assert all(scores[f"{way}: y AUROC"] != scores["y AUROC"] for way in ways)  # none is the embedding as it is


def test_a_screen_without_that_plate_gets_a_sentence():
    with pytest.raises(ValueError, match="fold=3: the screen has 3 plates"):
        DATASETS["simulated_screen_plates"].load(None, 0, fold=3, **SCREEN)


def test_new_cells_that_stand_apart_are_told_and_labels_that_move_are_lost():
    """Known answers: labels are two directions; the new plate is shifted, or has them exchanged."""
    dataset = DATASETS["simulated_screen_plates"]
    adata = dataset.load(None, 0, fold=0, **SCREEN)
    rng = np.random.default_rng(0)
    genes = adata.obs["gene"].astype(str).to_numpy()
    new = (adata.obs["split"] == "test").to_numpy()
    truth = np.eye(len(np.unique(genes)))[np.unique(genes, return_inverse=True)[1]]
    z = 5 * truth + rng.normal(size=truth.shape)
    right = transfer_scores(adata, z, dataset, new)
    assert right["y AUROC"] > 0.95 and 0.3 < right["new or old"] < 0.7
    shifted = z + 20.0 * new[:, None] * rng.normal(size=z.shape[1])
    assert transfer_scores(adata, shifted, dataset, new)["new or old"] == 1
    exchanged = np.where(new[:, None], np.roll(z, 1, axis=1), z)
    assert transfer_scores(adata, exchanged, dataset, new)["y AUROC"] < 0.6
