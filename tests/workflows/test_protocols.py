from __future__ import annotations

from typing import Any

from scbd.workflows import DATASETS, PROTOCOLS, Trial


def test_features_are_scored_on_the_same_new_cells(monkeypatch):
    small = {"n_cells": 1500, "n_wells": 3, "image_size": 16}
    pixels = {"n_components": 64, "y_key": "gene", "e_key": "well", "control": "nontargeting"}
    training = {"train_size": 0.8, "validation_size": 0.02}
    trial = Trial("batch correction of new cells", "simulated_screen", "pixel PCA, TVN", 0, small, pixels, training)
    dataset = DATASETS["simulated_screen"]
    adata = dataset.load(None, 0, **small)
    seen: list[tuple[Any, Any]] = []

    def watched(cells: Any, embedding: Any, dataset: Any) -> dict[str, Any]:
        seen.append((cells, embedding))
        return {}

    monkeypatch.setattr("scbd.workflows._protocols._correction", watched)
    scores, model = PROTOCOLS[trial.protocol](trial, adata, dataset, None)  # type: ignore[arg-type]
    assert scores == {} and model is None
    ((cells, embedding),) = seen
    assert cells.n_obs == len(embedding) and 0.15 < cells.n_obs / 1500 < 0.25
    assert (
        cells.obs["well"].value_counts(normalize=True).sub(adata.obs["well"].value_counts(normalize=True)).abs().max()
        < 0.02
    )
