from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paper.datasets import DATASETS
from paper.protocols import PROTOCOLS
from paper.systems import computed
from paper.trials import Trial


@pytest.mark.parametrize("training", [{"train_size": 0.8, "validation_size": 0.02}, {}])
def test_batch_correction_of_new_cells_features_score_held_out_share(monkeypatch, training):
    small = {"n_cells": 1500, "n_wells": 3, "image_size": 16}
    pixels = {"n_components": 64, "y_key": "gene", "e_key": "well", "control": "nontargeting"}
    trial = Trial("batch correction of new cells", "simulated_screen", "pixel PCA, TVN", 0, small, pixels, training)
    dataset = DATASETS["simulated_screen"]
    adata = dataset.load(None, 0, **small)
    seen: list[tuple[Any, Any]] = []

    def record_embedding(cells: Any, embedding: Any, dataset: Any) -> dict[str, Any]:
        seen.append((cells, embedding))
        return {}

    monkeypatch.setattr("paper.protocols._correction", record_embedding)
    scores, model = PROTOCOLS[trial.protocol](trial, adata, dataset, None)  # type: ignore[arg-type]
    assert scores == {} and model is None
    ((cells, embedding),) = seen
    assert cells.n_obs == len(embedding)
    assert cells.n_obs / 1500 == pytest.approx(0.2 if training else 0.1, abs=0.05)
    assert (
        cells.obs["well"].value_counts(normalize=True).sub(adata.obs["well"].value_counts(normalize=True)).abs().max()
        < 0.02
    )


def record_train_arguments(monkeypatch: pytest.MonkeyPatch, protocol: str, training: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a protocol passes to ``train``."""
    seen: list[dict[str, Any]] = []

    def record_and_stop(trial: Any, adata: Any, dataset: Any, directory: Any, **how: Any) -> None:
        seen.append(how)
        raise ZeroDivisionError

    monkeypatch.setattr("paper.protocols.trained", record_and_stop)
    trial = Trial(protocol, "colored_mnist", "SCBD", training=training)
    with pytest.raises(ZeroDivisionError):
        PROTOCOLS[protocol](trial, None, DATASETS["colored_mnist"], None)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize("protocol", ["domain generalization", "counterfactuals"])
def test_protocol_trained_system_passes_online_head_to_train(monkeypatch, protocol):
    """Trials do not contain this option, so that keys of earlier rows stay valid."""
    training = {"max_steps": 3, "decoder": {}} if protocol == "counterfactuals" else {"max_steps": 3}
    assert record_train_arguments(monkeypatch, protocol, training) == {
        "max_steps": 3,
        "online_head": True,
        "split": "split",
    }
    assert record_train_arguments(monkeypatch, protocol, training | {"lr": 0.0})["online_head"] is False


def test_domain_generalization_pixel_pca_ignores_test_cells_in_fit():
    adata = DATASETS["simulated_screen"].load(None, 0, n_cells=300, n_wells=3, image_size=16)
    adata.obs["split"] = np.resize(["train", "train", "validation", "test"], 300)
    trial = Trial("domain generalization", "simulated_screen", "pixel PCA", 0, {}, {"n_components": 8})
    how = (adata, DATASETS["simulated_screen"], None)
    scores, model = PROTOCOLS[trial.protocol](trial, *how)  # type: ignore[arg-type]
    environments = {"e from r_c", "e chance", "e from r_c, new", "e chance, new"}
    assert set(scores) == {"r_c in", "r_c out"} | environments and model is None
    test = (adata.obs["split"] == "test").to_numpy()
    adata.obsm["single_cell_images"][test] = 255 - adata.obsm["single_cell_images"][test]  # change only the test cells
    again, _ = PROTOCOLS[trial.protocol](trial, *how)  # type: ignore[arg-type]
    assert again["r_c in"] == scores["r_c in"] and again["e from r_c"] == scores["e from r_c"]
    assert again["r_c out"] != scores["r_c out"]


FOLD = {"n_cells": 1500, "n_wells": 8, "plate_wells": 6, "image_size": 16, "n_complexes": 3, "guides_per_gene": 2}


def score_unseen_genes(system: str, model: dict[str, Any], training: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the scores of the protocol with unseen genes."""
    trial = Trial("new cells and perturbations", "simulated_screen_fold", system, 0, FOLD, model, training or {})
    dataset = DATASETS[trial.dataset]
    return PROTOCOLS[trial.protocol](trial, dataset.load(None, 0, **FOLD), dataset, None)[0]  # type: ignore[arg-type]


def test_new_cells_and_perturbations_unaligned_also_scored_standardised():
    truth = score_unseen_genes("obsm", {"obsm_key": "X_oracle"})
    assert truth["relationship_map_unseen"] > truth["chance: relationship_map_unseen"]
    assert {name.removeprefix("standardised: ") for name in truth if name.startswith("standardised")} == {
        name for name in truth if ": " not in name
    }
    aligned = score_unseen_genes("obsm, sphering, TVN", {"obsm_key": "X_oracle"})
    assert not any(name.startswith("standardised") for name in aligned) and "chance: e_probe_f1" in aligned
    assert aligned["e_probe_quadratic_f1"] != truth["e_probe_quadratic_f1"]


def test_new_cells_and_perturbations_pixel_pca_ignores_new_cells_in_fit(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr("paper.protocols.compare", lambda adata, z, **how: seen.append((adata, z)))
    monkeypatch.setattr("paper.protocols.side_by_side", lambda frame: {})
    load = DATASETS["simulated_screen_fold"].load

    def changed(self: Any, path: Any, seed: int, **how: Any) -> Any:
        adata = load(path, seed, **how)
        new = (adata.obs["split"] != "train").to_numpy()
        adata.obsm["single_cell_images"][new] = 255 - adata.obsm["single_cell_images"][new]
        return adata

    settings = {"n_components": 6, "LDA": {"n_components": 2}}
    score_unseen_genes("pixel PCA, TVN, LDA", settings)
    monkeypatch.setattr(type(DATASETS["simulated_screen_fold"]), "load", changed)
    score_unseen_genes("pixel PCA, TVN, LDA", settings)
    (adata, one), (_, two) = seen
    train = (adata.obs["split"] == "train").to_numpy()
    assert set(adata.obs["split"]) == {"train", "test"}  # without the validation cells
    np.testing.assert_array_equal(one["as it is"][train], two["as it is"][train])
    assert one["as it is"].shape == (adata.n_obs, 2) and (one["as it is"][~train] != two["as it is"][~train]).any()


def test_computed_explicit_default_columns_equal_implicit_ones():
    dataset = DATASETS["simulated_screen"]
    adata = dataset.load(None, 0, n_cells=400, n_wells=3, image_size=16)
    told = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    one, two, other = (
        computed(Trial("batch correction", "simulated_screen", "pixel PCA, TVN", 0, {}, {"n_components": 5} | how), *by)
        for how, by in (({}, (adata, dataset)), (told, (adata, dataset)), (told | {"e_key": "plate"}, (adata, dataset)))
    )
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()
