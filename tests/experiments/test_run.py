from __future__ import annotations

import json
import os
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells

from scbd import SCBDModel
from scbd.experiments import evaluate, run
from scbd.metrics import label_probe

pytestmark = pytest.mark.filterwarnings("ignore:z_c has collapsed")
MODEL: dict[str, Any] = {"encoder": "small", "n_latent": 6}
TRAIN: dict[str, Any] = {"max_steps": 4, "batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu"}


def test_everything_is_written(tmp_path):
    cells = make_cells(300)
    out = tmp_path / "new" / "run"
    table = run(
        cells,
        y_key="gene",
        e_key=["plate", "well"],
        out=out,
        model_kwargs=MODEL,
        train_kwargs=TRAIN | {"train_size": 0.7},
    )
    names = "cells.h5ad checkpoints history.csv metrics.csv model settings.json training_curves.png umap.png"
    assert sorted(os.listdir(out)) == names.split()

    written = anndata.read_h5ad(out / "cells.h5ad")
    expected = {"X_scbd_c": 6, "X_scbd_s": 6, "X_pixel_pca": 50, "X_scbd_c_umap": 2, "X_scbd_s_umap": 2}
    assert {key: value.shape[1] for key, value in written.obsm.items()} == expected
    model = SCBDModel.load(out / "model", make_cells(300))
    np.testing.assert_array_equal(model.get_latent_representation(), written.obsm["X_scbd_c"])

    pd.testing.assert_frame_equal(pd.read_csv(out / "metrics.csv"), table)
    assert table[["embedding", "label"]].drop_duplicates().shape == (6, 2)
    assert set(table["label"]) == {"gene", "plate × well"}
    # probes learn from the cells the encoders learned from, and are tested on the others
    is_train = np.isin(np.arange(300), model.train_indices)
    assert (~is_train).sum() > 50
    expected_scores = label_probe(written.obsm["X_pixel_pca"], written.obs["gene"], train=is_train)
    row = table.query("embedding == 'pixel PCA' and label == 'gene'").iloc[0]
    assert row["tested_on"] == "held-out cells"
    assert row["f1"] == pytest.approx(expected_scores["f1"])

    settings = json.loads((out / "settings.json").read_text())
    assert settings["model"]["encoder"] == "small"
    assert settings["training"]["steps"] == 4
    assert settings["data"] == {
        "y_key": "gene",
        "e_key": ["plate", "well"],
        "image_key": "single_cell_images",
        "n_cells": 300,
    }
    assert pd.read_csv(out / "history.csv", index_col="step").index[-1] == 4


def test_results_are_not_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="already holds files: choose another directory"):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run")


def test_nothing_is_written_for_cells_that_cannot_be_trained_on(tmp_path):
    with pytest.raises(KeyError, match="obs has no 'genes'"):
        run(make_cells(), y_key="genes", e_key="well", out=tmp_path / "run")
    with pytest.raises(ValueError, match="batch_size=500 is larger"):
        run(
            make_cells(),
            y_key="gene",
            e_key="well",
            out=tmp_path / "run",
            model_kwargs=MODEL,
            train_kwargs={"batch_size": 500},
        )
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    """Stopped after training, before anything else: resumed, it ends as if it had not been."""
    out = tmp_path / "run"
    arguments: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    with monkeypatch.context() as patch:
        patch.setattr(SCBDModel, "get_latent_representation", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(make_cells(), out=out, **arguments)
    table = run(make_cells(), out=out, resume=True, **arguments)
    whole = run(make_cells(), out=tmp_path / "whole", **arguments)
    pd.testing.assert_frame_equal(table, whole)


def test_an_embedding_that_is_missing_is_named(cells):
    with pytest.raises(KeyError, match="obsm has no 'X_scbd_c'"):
        evaluate(cells, ["gene"])
