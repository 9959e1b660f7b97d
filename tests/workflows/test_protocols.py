from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


def trained_with(monkeypatch: pytest.MonkeyPatch, protocol: str, training: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``train`` that a protocol comes to."""
    seen: list[dict[str, Any]] = []

    def noted(trial: Any, adata: Any, dataset: Any, directory: Any, **how: Any) -> None:
        seen.append(how)
        raise ZeroDivisionError

    monkeypatch.setattr("scbd.workflows._protocols.trained", noted)
    trial = Trial(protocol, "colored_mnist", "SCBD", training=training)
    with pytest.raises(ZeroDivisionError):
        PROTOCOLS[protocol](trial, None, DATASETS["colored_mnist"], None)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize("protocol", ["domain generalization", "counterfactuals"])
def test_every_system_gets_a_head_beside_it(monkeypatch, protocol):
    """No trial names it: it changes nothing else, and rows of before stay those of the same trials."""
    training = {"max_steps": 3, "decoder": {}} if protocol == "counterfactuals" else {"max_steps": 3}
    assert trained_with(monkeypatch, protocol, training) == {"max_steps": 3, "online_head": True}
    assert trained_with(monkeypatch, protocol, training | {"lr": 0.0})["online_head"] is False


def test_pixels_are_a_control_that_has_seen_no_test_cell():
    adata = DATASETS["simulated_screen"].load(None, 0, n_cells=300, n_wells=3, image_size=16)
    adata.obs["split"] = np.resize(["train", "train", "validation", "test"], 300)
    trial = Trial("domain generalization", "simulated_screen", "pixel PCA", 0, {}, {"n_components": 8})
    how = (adata, DATASETS["simulated_screen"], None)
    scores, model = PROTOCOLS[trial.protocol](trial, *how)  # type: ignore[arg-type]
    assert set(scores) == {"r_c in", "r_c out", "e from r_c", "e chance"} and model is None
    test = (adata.obs["split"] == "test").to_numpy()
    adata.obsm["single_cell_images"][test] = 255 - adata.obsm["single_cell_images"][test]  # of these alone
    again, _ = PROTOCOLS[trial.protocol](trial, *how)  # type: ignore[arg-type]
    assert again["r_c in"] == scores["r_c in"] and again["e from r_c"] == scores["e from r_c"]
    assert again["r_c out"] != scores["r_c out"]
