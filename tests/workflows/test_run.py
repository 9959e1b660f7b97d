from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells

import scbd
from scbd import SCBDModel, run
from scbd._shared.files import hold_directory
from scbd._workflows import run as run_module
from scbd._workflows.evidence import SCORE_COLUMNS
from scbd._workflows.run import compute_input_pca
from scbd._workflows.verdict import Verdict
from scbd.baselines import ERMModel, pixel_pca
from scbd.data._input_location import InputLocation
from scbd.data._sources import digest_cells
from scbd.metrics import label_probe
from scbd.model._objective import SCBDModule

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
MODEL: dict[str, Any] = {"encoder": "small", "n_latent": 6}
TRAIN: dict[str, Any] = {"max_steps": 4, "batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu"}


NAMES = (
    "cells.h5ad checkpoints history.csv metrics.csv model replicates.csv report.html settings.json training_curves.png "
    "umap.png verdict.csv verdict.txt"
)
NO_VERDICT = Verdict(
    None, "No embedding is called best.", (), pd.DataFrame(columns=list(SCORE_COLUMNS)), pd.DataFrame()
)


@pytest.fixture(autouse=True)
def quick_umap(request, monkeypatch):
    """Replace the UMAP, the slowest part of a short run, in all tests that do not inspect it."""
    if request.function not in (test_run_all_outputs_are_written, test_run_labels_of_any_type_are_drawn):
        monkeypatch.setattr("scbd.pl.umap_blocks", lambda *args, **how: plt.subplots(squeeze=False)[1])


@pytest.fixture
def only_training(monkeypatch):
    """Replace scores, verdict and report, for tests of training and files."""
    monkeypatch.setattr("scbd._workflows.run.evaluate", lambda *args, **how: pd.DataFrame({"f1": [0.5]}))
    monkeypatch.setattr("scbd._workflows.run.judge_embeddings", lambda *args, **how: NO_VERDICT)
    monkeypatch.setattr("scbd._workflows.run.compute_input_pca", lambda adata, *rest: np.zeros((adata.n_obs, 2)))
    monkeypatch.setattr("scbd._workflows.run._write_pictures", lambda *args: None)
    monkeypatch.setattr("scbd._workflows.run.write_report", lambda report, path: path.write_text(report.verdict))


def test_run_all_outputs_are_written(tmp_path):
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
    assert sorted(os.listdir(out)) == NAMES.split()

    written = anndata.read_h5ad(out / "cells.h5ad")
    best = written.obsm["X_scbd_best"]
    expected = {"X_scbd_c": 6, "X_scbd_s": 6, "X_pixel_pca": 50, "X_scbd_best": best.shape[1]}
    assert {key: value.shape[1] for key, value in written.obsm.items()} == expected
    sentence = (out / "verdict.txt").read_text().strip()
    assert sentence == table.attrs["verdict"]
    assert ("'z_c' is best" in sentence) == np.array_equal(best, written.obsm["X_scbd_c"])
    scores = pd.read_csv(out / "verdict.csv")
    pd.testing.assert_frame_equal(scores, table.attrs["scores"])
    names = set(scores.loc[scores["unit"] == "perturbations", "embedding"])
    assert {"pixel PCA", "z_c", "z_c, standardised by well"} <= names
    assert set(pd.read_csv(out / "replicates.csv", index_col="label").columns) == names
    assert sentence.splitlines()[0] in html.unescape((out / "report.html").read_text())
    model = SCBDModel.load(out / "model", make_cells(300))
    np.testing.assert_array_equal(model.get_latent_representation(), written.obsm["X_scbd_c"])

    pd.testing.assert_frame_equal(pd.read_csv(out / "metrics.csv"), table)
    assert table[["embedding", "label"]].drop_duplicates().shape == (15, 2)
    assert set(table["label"]) == {"gene", "plate", "well"}
    # probes are trained on the encoders' training cells, and tested on all other cells
    is_train = np.isin(np.arange(300), model.train_indices)
    assert (~is_train).sum() > 50
    expected_scores = label_probe(written.obsm["X_pixel_pca"], written.obs["gene"], train=is_train)
    assert ((written.obs["scbd_split"] == "train") == is_train).all()
    assert (written.obs["scbd_split"] == "validation").sum() == (~is_train).sum()
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
        "digest": digest_cells(
            InputLocation.found(cells).source(cells), make_cells(300).obs[["gene", "plate", "well"]]
        ),
    }
    assert settings["asked"] == {"model": MODEL, "training": TRAIN | {"train_size": 0.7}}
    assert settings["versions"]["scbd"] == scbd.__version__
    assert pd.read_csv(out / "history.csv", index_col="step").index[-1] == 4


@pytest.mark.parametrize("labels", [[0, 1, 2], [False, True, True], ["$\\frac{a$", "b", "c"]])
def test_run_labels_of_any_type_are_drawn(tmp_path, monkeypatch, labels):
    monkeypatch.setattr("scbd.pl._umap.compute_umap", lambda embedding, seed: np.asarray(embedding)[:, :2])
    wells = make_wells()
    wells.obs["treatment"] = np.array(labels)[np.arange(wells.n_obs) % 3]
    setup, training = {"layer": "X", "control": labels[0]}, {"max_steps": 2, "enable_progress_bar": False}
    how: dict[str, Any] = {"setup_kwargs": setup, "train_kwargs": training, "erm": False}
    run(wells, y_key="treatment", e_key="plate", out=tmp_path, **how)
    assert sorted(os.listdir(tmp_path)) == NAMES.split()


@pytest.mark.parametrize("precious", ["metrics.csv", "model", "checkpoints/last.ckpt"])
def test_run_directory_with_results_raises(tmp_path, precious):
    path = tmp_path / "run" / precious
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="already holds files of a run: choose another directory"):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run")
    assert path.read_text() == "precious"


def test_run_directory_with_input_cells_raises(tmp_path):
    """The input file may lie in the output directory."""
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    before = (tmp_path / "cells.h5ad").read_bytes()
    for resume in (False, True):
        with pytest.raises(FileExistsError):
            run(make_cells(), y_key="gene", e_key="well", out=tmp_path, resume=resume)
    assert (tmp_path / "cells.h5ad").read_bytes() == before


def test_run_out_is_a_file_raises(tmp_path):
    (tmp_path / "cells.h5ad").write_text("precious")
    with pytest.raises(FileExistsError, match="cells.h5ad is a file: give a directory to write to"):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "cells.h5ad")


@pytest.mark.usefixtures("only_training")
def test_run_second_run_in_the_directory_raises_at_once(tmp_path, monkeypatch):
    how: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    out, refused = tmp_path / "run", []

    def another(stage: str, function: Any) -> Any:
        def run_another_first(*args: Any, **kwargs: Any) -> Any:
            for resume in (False, True):
                with pytest.raises(OSError, match="is writing to"):
                    run(make_cells(), out=out, resume=resume, **how)
            refused.append(stage)
            return function(*args, **kwargs)

        return run_another_first

    with monkeypatch.context() as patch:
        for stage in ("seed_everything", "train_or_load", "judge_embeddings", "write_report"):
            name = f"scbd._workflows.run.{stage}"
            patch.setattr(name, another(stage, getattr(run_module, stage)))
        run(make_cells(), out=out, **how)
    assert refused == ["seed_everything", "train_or_load", "judge_embeddings", "write_report"]
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []
    run(make_cells(), out=out, resume=True, **how)


def test_hold_directory_of_a_killed_process_is_free_again(tmp_path):
    code = "import sys, time; from pathlib import Path; from scbd._shared.files import hold_directory\n"
    code += "with hold_directory(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match="is writing to"), hold_directory(tmp_path / "run"):
            pass
        process.kill()
    with hold_directory(tmp_path / "run"):
        pass
    with hold_directory(tmp_path / "new" / "run"):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["gene", "a/b", "_index", 0])
@pytest.mark.usefixtures("only_training")
def test_run_index_name_that_cannot_be_written_is_dropped(tmp_path, name):
    cells = make_cells()
    cells.obs.index.name = name
    names = list(cells.obs_names)
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    written = anndata.read_h5ad(tmp_path / "cells.h5ad")
    assert list(written.obs_names) == names and cells.obs.index.name == name
    pd.testing.assert_series_equal(written.obs["gene"], cells.obs["gene"], check_index=False)


@pytest.mark.usefixtures("only_training")
def test_run_cells_keep_all_parts_but_the_inputs(tmp_path):
    cells = make_cells()
    counts = np.arange(96 * cells.n_vars, dtype="float32").reshape(96, -1)
    cells.X, cells.layers["counts"], cells.raw = counts, counts + 1, anndata.AnnData(counts)
    cells.obsp["distances"], cells.varm["loadings"] = np.eye(96), counts[: cells.n_vars, :1]
    cells.varp["correlations"], cells.obsm["dino"] = np.eye(cells.n_vars), counts
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    written = anndata.read_h5ad(tmp_path / "cells.h5ad")
    np.testing.assert_array_equal(written.X, counts)
    np.testing.assert_array_equal(written.raw.X, counts)
    for slot, key in (("layers", "counts"), ("obsp", "distances"), ("varm", "loadings"), ("varp", "correlations")):
        np.testing.assert_array_equal(getattr(written, slot)[key], getattr(cells, slot)[key])
    assert "dino" in written.obsm and "single_cell_images" not in written.obsm


@pytest.mark.usefixtures("only_training")
def test_run_raw_with_column_named_like_its_index_is_written(tmp_path):
    cells = make_cells()
    genes = pd.Index([f"gene_{i}" for i in range(3)], name="gene_id")
    var = pd.DataFrame({"gene_id": list("xyz"), "a/b": pd.period_range("2024", periods=3, freq="D")}, index=genes)
    cells.raw = anndata.AnnData(np.ones((96, 3), "float32"), obs=cells.obs[[]], var=var)
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    written = anndata.read_h5ad(tmp_path / "cells.h5ad").raw
    assert written.var["gene_id"].tolist() == list("xyz") and list(written.var_names) == list(genes)
    assert cells.raw.var.index.name == "gene_id"


def test_run_raw_that_cannot_be_written_raises_before_training(tmp_path):
    cells = make_cells()
    raw = anndata.AnnData(np.ones((96, 3), "float32"), varm={"x": np.full((3, 1), None)})
    cells.raw = raw
    with pytest.raises(ValueError, match=r"raw.varm\['x'\]"):
        run(cells, y_key="gene", e_key="well", out=tmp_path / "out", model_kwargs=MODEL, train_kwargs=TRAIN)
    assert not (tmp_path / "out").exists()


def test_run_scores_fail_cells_are_written_before(tmp_path, monkeypatch):
    monkeypatch.setattr("scbd._workflows.run.judge_embeddings", lambda *args, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    assert anndata.read_h5ad(tmp_path / "cells.h5ad").obsm["X_scbd_c"].shape == (96, 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", [False, True])
def test_run_one_well_per_compound_reports_the_missing_score(tmp_path, mechanism):
    compounds = ["DMSO"] * 40 + [f"compound {i}" for i in range(80)]
    obs = pd.DataFrame({"compound": compounds, "plate": [f"P{i % 4}" for i in range(120)]}).rename(str)
    obs["moa"] = [f"m{i % 3}" for i in range(120)]
    wells = anndata.AnnData(np.random.default_rng(0).normal(size=(120, 6)).astype("float32"), obs=obs)
    setup, training = {"layer": "X", "control": "DMSO"}, {"max_steps": 2, "enable_progress_bar": False}
    key = "moa" if mechanism else None
    how: dict[str, Any] = {"setup_kwargs": setup, "train_kwargs": training, "mechanism_key": key}
    table = run(wells, y_key="compound", e_key="plate", out=tmp_path, **how)
    assert set(table["label"]) == {"plate"}
    assert "probe of 'compound'" in (tmp_path / "verdict.txt").read_text()
    assert "probe of 'compound'" in html.unescape((tmp_path / "report.html").read_text())
    assert anndata.read_h5ad(tmp_path / "cells.h5ad").n_obs == 120


@pytest.mark.usefixtures("only_training")
def test_run_after_failed_attempt_succeeds(tmp_path, monkeypatch):
    arguments: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    with monkeypatch.context() as patch:
        patch.setattr(SCBDModule, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(make_cells(), out=tmp_path / "run", **arguments)
    assert len(run(make_cells(), out=tmp_path / "run", **arguments)) == 1


def test_run_invalid_input_raises_and_writes_nothing(tmp_path):
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
    for wrong, said in (({"n_latent": 0}, "n_latent=0: give"), ({"temperature": 0}, "temperature must be")):
        with pytest.raises(ValueError, match=said):
            run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run", model_kwargs=MODEL | wrong)
    for name, value in (("resume", True), ("resume", False), ("checkpoint_dir", "x")):
        with pytest.raises(ValueError, match=f"{name} is set for each run here"):
            run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run", train_kwargs=TRAIN | {name: value})
    with pytest.raises(ValueError, match="seed=-1: give a whole number, 0 or larger"):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run", seed=-1)
    for repeated in ({"y_key": "well"}, {"e_key": "well"}):
        with pytest.raises(ValueError, match=f"setup_kwargs repeats {next(iter(repeated))}"):
            run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "run", setup_kwargs=repeated)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("only_training")
def test_run_columns_of_unsupported_type_are_written_as_text(tmp_path):
    cells = make_cells()
    cells.obs["date"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(np.arange(96) % 3, "D")
    cells.obs["row"] = pd.Series([1 if row % 2 else "A" for row in range(96)], dtype=object).to_numpy()
    cells.obsm["frame"] = cells.obs[["date"]].copy()
    given = cells.obs.copy()
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    written = anndata.read_h5ad(tmp_path / "cells.h5ad")
    for table in (written.obs, written.obsm["frame"]):
        assert list(table["date"]) == list(map(str, given["date"]))
    assert list(written.obs["row"]) == list(map(str, given["row"]))
    pd.testing.assert_frame_equal(cells.obs[["date", "row"]], given[["date", "row"]])


@pytest.mark.usefixtures("only_training")
def test_run_names_that_cannot_be_written_are_replaced(tmp_path):
    cells = make_cells()
    values, table = np.arange(96.0)[:, None], pd.DataFrame({"c/d": range(3)}, index=list("xyz"))
    cells.obsm["dino/vits"], cells.obsm["dino_vits"], cells.obsm["dino"] = values, values + 1, values + 2
    cells.layers["a/b"], cells.varm["a/b"] = np.ones(cells.shape), np.ones((cells.n_vars, 1))
    cells.uns |= {"a/b": 1, "a": {"b": 2, "c/d": 3}, "table": table}
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN)
    written = anndata.read_h5ad(tmp_path / "cells.h5ad")
    for number, key in enumerate(("dino_vits_2", "dino_vits", "dino")):
        np.testing.assert_array_equal(written.obsm[key], values + number)
    assert "a_b" in written.layers and "a_b" in written.varm
    assert written.uns["a_b"] == 1 and written.uns["a"] == {"b": 2, "c_d": 3}
    assert written.uns["table"]["c_d"].tolist() == [0, 1, 2]
    assert {"dino/vits", "dino_vits"} <= set(cells.obsm) and list(cells.uns["a"]) == ["b", "c/d"]


@pytest.mark.parametrize("e_key", ["plateno", ["plateno", "well"]])
def test_run_numeric_columns_caller_table_is_unchanged(tmp_path, e_key):
    """Regression: a numeric column of plates became categorical in the caller's table."""
    cells = make_cells()
    cells.obs["plateno"], cells.obs["dose"] = np.arange(96) % 3 + 1, np.arange(96) // 3 % 2
    cells.obs["gene"] = cells.obs["gene"].astype(str)
    given = cells.obs.copy()
    how: dict[str, Any] = {"model_kwargs": MODEL, "train_kwargs": TRAIN}
    table = run(cells, y_key=["gene", "dose"], e_key=e_key, out=tmp_path, **how)
    pd.testing.assert_frame_equal(cells.obs[given.columns], given)
    assert cells.obs.columns.difference(given.columns).tolist() == [
        "gene × dose",
        "scbd_split",
    ]
    assert set(table["label"]) == {"gene × dose", *([e_key] if isinstance(e_key, str) else e_key)}
    assert anndata.read_h5ad(tmp_path / "cells.h5ad").obs["plateno"].tolist() == given["plateno"].tolist()


def test_run_unwritable_values_raises_before_training(tmp_path):
    cases: dict[str, tuple[str, str, Any]] = {
        r"obs\['crop'\] holds values of the type ndarray": ("obs", "crop", [np.zeros(2)] * 96),
        r"uns\['made_by'\] \(object\) cannot be written to cells.h5ad": ("uns", "made_by", object()),
        r"obsm\['text'\] \(ndarray\) cannot be written .*remove it, with del adata.obsm\['text'\]": (
            "obsm",
            "text",
            np.full((96, 2), object()),
        ),
    }
    for message, (slot, key, value) in cases.items():
        cells = make_cells()
        getattr(cells, slot)[key] = value
        with pytest.raises(ValueError, match=message):
            run(cells, y_key="gene", e_key="well", out=tmp_path / "run", model_kwargs=MODEL, train_kwargs=TRAIN)
    assert not (tmp_path / "run").exists()


def test_run_channels_given_pca_uses_the_same_channels(tmp_path):
    cells = make_cells()
    setup = {"channels": ["channel_1"]}
    run(cells, y_key="gene", e_key="well", out=tmp_path, setup_kwargs=setup, model_kwargs=MODEL, train_kwargs=TRAIN)
    np.testing.assert_array_equal(cells.obsm["X_pixel_pca"], scbd.baselines.pixel_pca(cells, channels=["channel_1"]))


def make_stage_fail(patch: pytest.MonkeyPatch, where: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    if where == "embedding":
        embed = SCBDModel.get_latent_representation  # training calls this, too, without `block`, and must not fail
        patch.setattr(
            SCBDModel,
            "get_latent_representation",
            lambda self, *args, **how: fails() if "block" in how else embed(self, *args, **how),
        )
    elif where == "saving":
        patch.setattr(SCBDModel, "save", fails)
    else:
        patch.setattr(f"scbd._workflows.run.{where}", fails)


# early stopping, since a model that is trained again would stop at another step
STOPPING: dict[str, Any] = {"max_steps": 6, "early_stopping": True, "validate_every": 1}
WHOLE: dict[str, Any] = {
    "y_key": "gene",
    "e_key": "well",
    "model_kwargs": MODEL,
    "train_kwargs": TRAIN | STOPPING | {"lr": 0.0},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the table and the folder of a run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    return run(make_cells(), out=out, **WHOLE), out


@pytest.mark.parametrize("where", ["embedding", "evaluate", "write_report", "write_atomically"])
def test_run_failed_after_training_resumes_without_training(tmp_path, monkeypatch, whole, where):
    with monkeypatch.context() as patch:
        make_stage_fail(patch, where)
        with pytest.raises(OSError, match="No space left"):
            run(make_cells(), out=tmp_path / "run", **WHOLE)
    with monkeypatch.context() as patch:
        patch.setattr(SCBDModel, "train", None)  # nothing is left to train
        table = run(make_cells(), out=tmp_path / "run", resume=True, **WHOLE)
    pd.testing.assert_frame_equal(table, whole[0])
    written = [anndata.read_h5ad(folder / "cells.h5ad").obsm["X_scbd_c"] for folder in (tmp_path / "run", whole[1])]
    np.testing.assert_array_equal(*written)
    assert sorted(os.listdir(tmp_path / "run")) == NAMES.split()


@pytest.mark.usefixtures("only_training")
def test_run_model_not_saved_resumes_from_checkpoint(tmp_path, monkeypatch):
    how: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    with monkeypatch.context() as patch:
        make_stage_fail(patch, "saving")
        with pytest.raises(OSError, match="No space left"):
            run(make_cells(), out=tmp_path / "run", **how)
        patch.setattr(SCBDModule, "forward", lambda *args, **kwargs: 1 / 0)  # no step is left to train
        with pytest.raises(OSError, match="No space left"):
            run(make_cells(), out=tmp_path / "run", resume=True, **how)
    run(make_cells(), out=tmp_path / "run", resume=True, **how)
    assert (tmp_path / "run" / "model" / "model.pt").is_file()


@pytest.mark.usefixtures("only_training")
def test_run_damaged_settings_file_is_named(tmp_path):
    how: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    run(make_cells(), out=tmp_path, **how)
    whole = (tmp_path / "settings.json").read_bytes()
    for damaged in (whole[:50], b"", b"\xff" + whole):
        (tmp_path / "settings.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"settings.json is damaged \(.*delete it"):
            run(make_cells(), out=tmp_path, resume=True, **how)
    (tmp_path / "settings.json").unlink()
    run(make_cells(), out=tmp_path, resume=True, **how)
    assert json.loads((tmp_path / "settings.json").read_text()) == json.loads(whole)


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(
    ("training", "is_automatic"),
    [
        ({}, True),
        ({"max_steps": None, "max_epochs": None, "early_stopping": False}, True),  # the command line gives all options
        ({"max_steps": 2}, False),
        ({"max_epochs": 1}, False),
        ({"early_stopping": True, "train_size": 0.7}, False),
    ],
)
def test_run_report_lists_only_an_automatic_length(tmp_path, monkeypatch, training, is_automatic):
    decisions: list[str] = []
    record = lambda report, path: decisions.extend(report.decisions["decision"])
    monkeypatch.setattr("scbd._workflows.run.write_report", record)
    how: dict[str, Any] = {"setup_kwargs": {"layer": "X", "control": "DMSO"}, "erm": False}
    training = {"enable_progress_bar": False} | training
    run(make_wells(), y_key="compound", e_key="plate", out=tmp_path, train_kwargs=training, **how)
    assert ("length of training" in decisions) == is_automatic


@pytest.mark.usefixtures("only_training")
def test_run_resume_with_other_settings_raises(tmp_path, monkeypatch):
    out = tmp_path / "run"
    how: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": MODEL, "train_kwargs": TRAIN}
    how["train_kwargs"] = constant = TRAIN | {"plan_kwargs": {"lr_decay": False}}
    run(make_cells(), out=out, **how)
    with pytest.raises(ValueError, match="other settings .*smoothing"):
        run(make_cells(), out=out, resume=True, **how | {"model_kwargs": MODEL | {"smoothing": 0.1}})
    # more steps are accepted, unless the learning rate decays over the length of training
    with pytest.raises(ValueError, match="length: None → 6"):
        run(make_cells(), out=out, resume=True, **how | {"train_kwargs": TRAIN | {"max_steps": 6}})
    longer = how | {"train_kwargs": constant | {"max_steps": 6}}
    run(make_cells(), out=out, resume=True, **longer)
    assert json.loads((out / "settings.json").read_text())["training"]["steps"] == 6
    others = make_cells(seed=1)
    monkeypatch.setattr(SCBDModel, "train", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the saved model is not used for other cells
        run(others, out=out, resume=True, **longer)


def test_run_single_block_model_writes_no_style_embedding(tmp_path):
    cells = make_cells()
    cells.obsm["X_scbd_s"] = np.zeros((96, 2))  # left by another model
    table = run(
        cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL | {"style_target": None}, train_kwargs=TRAIN
    )
    simple = ["pixel PCA", "pixel PCA, standardised by well", "pixel PCA, standardised by well, WCCN"]
    assert table["embedding"].unique().tolist() == ["z_c", *simple]
    assert len(table) == 8
    assert set(anndata.read_h5ad(tmp_path / "cells.h5ad").obsm) == {"X_scbd_c", "X_pixel_pca"}
    assert sorted(os.listdir(tmp_path)) == NAMES.split()


@pytest.mark.usefixtures("only_training")
def test_run_split_given_is_written_to_cells(tmp_path):
    """Replicate scores are meaningless for perturbations that were trained on, so the split is written."""
    cells = make_cells()
    genes = cells.obs["gene"].unique().tolist()
    cells.obs["part"] = np.where(cells.obs["gene"] == genes[0], "test", "train")
    cells.obs.loc[cells.obs.index[:5], "part"] = "validation"
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN | {"split": "part"})
    obs = anndata.read_h5ad(tmp_path / "cells.h5ad").obs
    assert (obs["scbd_split"].astype(str) == obs["part"].astype(str)).all()


@pytest.mark.parametrize("where", [{"layer": "X"}, {"obsm_key": "dino"}])
def test_run_features_writes_embeddings_and_loadable_model(tmp_path, where):
    wells = make_wells()
    wells.obsm["dino"] = wells.X.copy()
    columns: dict[str, Any] = {"y_key": "compound", "e_key": "plate"}
    setup = {"control": "DMSO", "position_key": "well"} | where
    training = {"max_steps": 3, "enable_progress_bar": False, "accelerator": "cpu"}
    table = run(wells, **columns, out=tmp_path, setup_kwargs=setup, train_kwargs=training)
    simple = ["features", "features, standardised by plate", "features, standardised by plate, WCCN"]
    assert table["embedding"].unique().tolist() == ["z_c", "z_s", *simple]
    written = anndata.read_h5ad(tmp_path / "cells.h5ad")
    # the inputs themselves are not written
    expected = {"X_scbd_c", "X_scbd_s", "X_feature_pca"}
    assert set(written.obsm) == expected | {"dino"} - set(where.values())
    assert (written.X is None) == (where == {"layer": "X"})
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["data"].items() >= (setup | columns | {"e_key": ["plate"]}).items()
    model = SCBDModel.load(tmp_path / "model", wells)
    np.testing.assert_array_equal(model.get_latent_representation(), written.obsm["X_scbd_c"])


def test_compute_input_pca_channels_given_is_equal_to_pixel_pca(cells):
    inputs = InputLocation.found(cells, channels=["channel_1"])
    found = compute_input_pca(cells, inputs, seed=0)
    np.testing.assert_array_equal(found, pixel_pca(cells, channels=["channel_1"]))
    assert np.abs(found - pixel_pca(cells)).max() > 1


def run_and_return_split(cells: anndata.AnnData, out: Path, **how: Any) -> pd.Series:
    run(cells, y_key="gene", e_key="well", out=out, model_kwargs=MODEL, **{"train_kwargs": TRAIN} | how)
    return cells.obs["scbd_split"].astype(str)


@pytest.mark.usefixtures("only_training")
def test_run_passes_labels_of_the_design_to_the_verdict(tmp_path, monkeypatch):
    cells = make_cells(240)
    cells.obs["moa"] = pd.Categorical(["known" if gene != "gene_1" else None for gene in cells.obs["gene"]])
    cells.obs["sgRNA"], cells.obs["Metadata_Week"], cells.obs["field"] = cells.obs["gene"], "w1", 1
    judged: list[Any] = []

    def judge(labels: Any, *args: Any, **how: Any) -> Verdict:
        judged.append(labels)
        return NO_VERDICT

    monkeypatch.setattr("scbd._workflows.run.judge_embeddings", judge)
    how: dict[str, Any] = {"mechanism_key": "moa", "guide_key": "sgRNA", "setup_kwargs": {"control": "gene_0"}}
    run(cells, y_key="gene", e_key="well", out=tmp_path, model_kwargs=MODEL, train_kwargs=TRAIN, **how)
    (labels,) = judged
    gene = cells.obs["gene"].astype(str).to_numpy()
    assert (labels.y == gene).all() and (labels.is_control == (gene == "gene_0")).all()
    assert (labels.mechanisms["moa"] == np.where(gene == "gene_1", "", "known")).all()
    assert [*labels.guides] == ["sgRNA"] and [*labels.environments] == ["well"]
    # columns with names of places, without the environment itself and the fields of a well
    assert {"Metadata_Week", "plate"} <= set(labels.places) and not {"well", "field"} & set(labels.places)
    with pytest.raises(KeyError, match="obs has no 'mao'"):
        run(cells, y_key="gene", e_key="well", out=tmp_path / "new", mechanism_key="mao")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("only_training")
def test_run_default_split_holds_out_a_fifth_of_the_cells(tmp_path):
    cells = make_cells(240)
    part = run_and_return_split(cells, tmp_path / "a")
    sizes = part.value_counts()
    assert abs(sizes["test"] - 48) < 8 and abs(sizes["validation"] - 19) < 8
    share = (part == "test").groupby([cells.obs["gene"], cells.obs["well"]], observed=True).mean()
    assert (abs(share - 0.2) < 0.1).all()
    for name, size in (("b", 1.0), ("c", 0.5)):
        part = run_and_return_split(make_cells(240), tmp_path / name, train_kwargs=TRAIN | {"train_size": size})
        assert (part == "train").mean() == pytest.approx(size, abs=0.02) and not (part == "test").any()


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(("n", "named", "n_whole"), [(30, True, 6), (30, False, 6), (29, True, 0)])
def test_run_many_perturbations_holds_out_a_fifth_but_no_controls(tmp_path, n, named, n_whole):
    cells = make_cells(300)
    cells.obs["gene"] = pd.Categorical([f"gene_{i}" if i < n else "Non-targeting" for i in np.arange(300) % (n + 1)])
    part = run_and_return_split(cells, tmp_path, setup_kwargs={"control": "Non-targeting"} if named else {})
    whole = (part == "test").groupby(cells.obs["gene"], observed=True).all()
    assert whole.sum() == n_whole and not whole["Non-targeting"]


def test_run_control_named_draws_no_ceiling_of_the_loss(tmp_path, monkeypatch):
    drawn: list[Any] = []

    def draw(history: Any, *, ceiling: float | None) -> Any:
        drawn.append(ceiling)
        return plt.subplots(squeeze=False)[1][0]

    monkeypatch.setattr("scbd.pl.history", draw)
    monkeypatch.setattr("scbd._workflows.run.evaluate", lambda *args, **how: pd.DataFrame({"f1": [0.5]}))
    for control in ({}, {"control": "gene_0"}):
        how: dict[str, Any] = {"model_kwargs": MODEL, "train_kwargs": TRAIN, "setup_kwargs": control}
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / str(len(drawn)), **how)
    assert drawn[0] > 0 and drawn[-1] is None


@pytest.mark.parametrize("out", ["", "new/run"])
def test_run_unwritable_directory_raises_before_training(tmp_path, monkeypatch, out):
    monkeypatch.setattr("scbd._workflows.training_runs.train_or_load", None)
    monkeypatch.setattr("os.access", lambda path, how: path != tmp_path)  # simulated, since root may write
    with pytest.raises(PermissionError, match="cannot be written to: give another directory"):
        run(make_cells(), y_key="gene", e_key="well", out=tmp_path / out, model_kwargs=MODEL, train_kwargs=TRAIN)


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(
    ("preset", "length"),
    [
        ("domain_generalization", {"max_steps": 2}),
        ("domain_generalization", {"max_epochs": 2}),
        # the command line gives all options, as None if the user has not given them
        ("domain_generalization", {"max_steps": None, "max_epochs": 2, "batch_size": None, "lr": None}),
        ("paper", {"max_steps": 2, "max_epochs": None, "batch_size": None, "lr": None}),
        ("screen", {"max_epochs": 3, "batch_size": 24}),
    ],
)
def test_run_classifier_has_the_same_inputs_and_length(tmp_path, monkeypatch, preset, length):
    trained: list[ERMModel] = []
    train = ERMModel.train

    def train_and_record(model: ERMModel, **training: Any) -> None:
        train(model, **training)
        trained.append(model)

    monkeypatch.setattr(ERMModel, "train", train_and_record)
    how: dict[str, Any] = {"model_kwargs": {**MODEL, "preset": preset}, "erm": True}
    training = {"enable_progress_bar": False, "accelerator": "cpu"} | length
    run(make_cells(), y_key="gene", e_key="well", out=tmp_path / "out", train_kwargs=training, **how)
    preprocess, used = trained[0].module.preprocess, json.loads((tmp_path / "out" / "settings.json").read_text())
    for name in ("standardize", "augment"):
        assert getattr(preprocess, name) == used["model"].get(name, True)
    for name in ("steps", "batch_size", "lr"):
        assert trained[0].training_settings_[name] == used["training"][name]
