"""Test the method file for the JUMP batch-correction workflow against the interface of the workflow."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi

FOLDER = Path(__file__).parents[1] / "benchmarks" / "jump"
pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks are not part of this copy"),
    pytest.mark.filterwarnings("ignore"),  # two steps do not train a model
]
COMPOUNDS = [f"JCP2022_{i:06}" for i in range(10)]


@pytest.fixture
def method(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("correct_with_scbd")
    scvi.settings.seed = None


def make_wells(controls: bool = True) -> pd.DataFrame:
    """Return a table as in the workflow, with wells of two laboratories with two batches each."""
    rng = np.random.default_rng(0)
    layout = COMPOUNDS + ["DMSO"] * 6 * controls
    meta = pd.DataFrame(
        [
            {
                "Metadata_Source": f"source_{source}",
                "Metadata_Batch": f"batch_{source}_{batch}",
                "Metadata_Plate": f"plate_{source}_{batch}",
                "Metadata_Well": f"{'ABCDEFGH'[i % 8]}{i // 8 + 1:02}",
                "Metadata_JCP2022": compound,
            }
            for source in (2, 6)
            for batch in (1, 2)
            for i, compound in enumerate(layout)
        ]
    ).astype("category")
    effect = dict(zip(layout, 2 * rng.normal(size=(len(layout), 12)), strict=True)) | {"DMSO": np.zeros(12)}
    shift = {batch: 3 * rng.normal(size=12) for batch in meta["Metadata_Batch"].unique()}
    x = [effect[y] + shift[e] for y, e in zip(meta["Metadata_JCP2022"], meta["Metadata_Batch"], strict=True)]
    features = pd.DataFrame(np.array(x) + rng.normal(size=(len(meta), 12)), columns=[f"Cells_{i}" for i in range(12)])
    return pd.concat([features, meta], axis=1).sample(frac=1, random_state=0)


@pytest.fixture
def wells(tmp_path) -> pd.DataFrame:
    wells = make_wells()
    wells.to_parquet(tmp_path / "in.parquet")
    return wells


def run(method: Any, folder: Path, *more: str, batch_key: str = "Metadata_Source Metadata_Batch") -> pd.DataFrame:
    paths = [str(folder / name) for name in ("in.parquet", "out.parquet")]
    method.main([paths[0], batch_key, "Metadata_JCP2022", paths[1], *more])
    return pd.read_parquet(paths[1])


def test_main_keeps_rows_and_metadata_and_writes_model_features(method, wells, tmp_path):
    found = run(method, tmp_path, "--smoketest=True")
    meta = [name for name in wells if name.startswith("Meta")]
    pd.testing.assert_frame_equal(found[meta], wells[meta].reset_index(drop=True))
    features = [name for name in found if not name.startswith("Meta")]
    assert features == [f"scbd_{i}" for i in range(len(features))] and len(features) > 1
    assert np.isfinite(found[features].to_numpy()).all() and set(found.dtypes[features].astype(str)) == {"float32"}


def test_main_full_run_compounds_match_across_batches_more_often(method, wells, tmp_path):
    """After a full run, the nearest well of another batch has the same compound more often than with raw features."""
    found = run(method, tmp_path, batch_key="Metadata_Batch")
    before = share_matched_across_batches(wells.reset_index(drop=True))
    after = share_matched_across_batches(found)
    assert after > before + 0.2


def share_matched_across_batches(table: pd.DataFrame) -> float:
    """Return the share of treated wells whose nearest well of another batch has the same compound."""
    table = table[table["Metadata_JCP2022"] != "DMSO"]
    x = table[[name for name in table if not name.startswith("Meta")]].to_numpy()
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    y, e = (table[f"Metadata_{name}"].astype(str).to_numpy() for name in ("JCP2022", "Batch"))
    similar = np.where(e[:, None] == e, -np.inf, x @ x.T)
    return float((y[similar.argmax(1)] == y).mean())


def test_main_train_share_excludes_compounds_from_training(method, wells, tmp_path):
    found = run(method, tmp_path, "--smoketest=1", "--train-share=0.5")
    trained = found.groupby("Metadata_JCP2022", observed=True)["Metadata_ScbdTrained"]
    assert (trained.nunique() == 1).all() and trained.first()["DMSO"]
    assert trained.first().drop("DMSO").sum() == 5
    again = run(method, tmp_path, "--smoketest=1", "--train-share=0.5")
    pd.testing.assert_frame_equal(found, again)


def test_main_table_without_controls_writes_features(method, tmp_path):
    make_wells(controls=False).to_parquet(tmp_path / "in.parquet")
    assert "scbd_0" in run(method, tmp_path, "--smoketest=1")


def test_main_missing_batch_key_raises(method, wells, tmp_path):
    with pytest.raises(KeyError, match="Metadata_Batches"):
        run(method, tmp_path, batch_key="Metadata_Batches")
    assert not (tmp_path / "out.parquet").exists()


def test_rule_passes_arguments_in_order_of_method(method):
    rule = (FOLDER / "scbd.smk").read_text(encoding="utf-8")
    parts = ["{input.script}", "{input.data}", "'{params.batch_key}'", "{params.label_key}", "{output}", "--smoketest="]
    places = [rule.index(part) for part in parts]
    assert places == sorted(places) and 'script="scripts/correct_with_scbd.py"' in rule
