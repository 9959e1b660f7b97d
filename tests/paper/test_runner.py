from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dataset_files import cpjump1_table, write_domains

import scbd
from paper import protocols, runner
from paper.datasets import DATASETS
from paper.loaders import PACS_CLASSES, PACS_DOMAINS
from paper.protocols import PROTOCOLS
from paper.reproduce import reproduce
from paper.runner import run_trials, with_weights
from paper.systems import NEEDED, UNTRAINED, VERSIONS
from paper.trials import Results, Trial
from scbd.data import ArraySource
from scbd.data._sources import digest_cells
from scbd.model import SCBDModel, TrainingDiverged
from scbd.model._objective import SCBDModule
from scbd.nn import build_encoder

pytestmark = [
    pytest.mark.filterwarnings("ignore:z_c has collapsed"),
    pytest.mark.usefixtures("permuted_once", "few_digits"),
]

MODEL: dict[str, Any] = {"encoder": "small", "n_latent": 8, "style_target": "ye", "standardize": False}
TRAINING: dict[str, Any] = {"max_steps": 4, "batch_size": 64, "split": "split", "enable_progress_bar": False}


def trial(system: str = "SCBD", seed: int = 0, **model: Any) -> Trial:
    return Trial("domain generalization", "colored_digits", system, seed, {}, MODEL | model, TRAINING)


@pytest.fixture
def few_digits(monkeypatch) -> None:
    """Load only every fourth digit."""
    digits = DATASETS["colored_digits"]
    few = dataclasses.replace(digits, loader=lambda **how: digits.loader(**how)[::4].copy())
    monkeypatch.setitem(DATASETS, "colored_digits", few)


def test_run_trials_finished_trials_are_not_run_again(tmp_path, monkeypatch):
    grid = [trial(alpha=0.0), trial(alpha=1.0)]
    first = run_trials(grid[:1], tmp_path)
    trained = []
    train = SCBDModel.train

    def train_and_record_alpha(self, **kwargs):
        trained.append(self.module.alpha)
        train(self, **kwargs)

    monkeypatch.setattr(SCBDModel, "train", train_and_record_alpha)
    frame = run_trials(grid, tmp_path)
    assert trained == [1.0]
    # the rows are folded into one file again, since no trial is missing
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "runs"}
    assert len(first) == 1 and list(frame.sort_values("alpha")["alpha"]) == [0, 1]
    assert (frame["steps"] == 4).all()
    # the history is kept; checkpoints, needed by interrupted runs only, are deleted
    files = {name for run in (tmp_path / "runs").iterdir() for name in os.listdir(run)}
    assert files == {"history.csv"}


def test_run_trials_same_trial_scores_are_equal(tmp_path):
    rows = [run_trials([trial(alpha=2.0)], tmp_path / name).iloc[0] for name in ("one", "two")]
    for column in ("r_c in", "r_c out", "z_c out", "supervised_c"):
        assert rows[0][column] == rows[1][column]
    assert rows[0]["key"] == rows[1]["key"]


def make_losses_nan_after(step: int, monkeypatch) -> None:
    """Make all training losses NaN after a given number of steps."""
    losses, calls = SCBDModule.forward, []

    def return_nan_loss(self, *args, **kwargs):
        found = losses(self, *args, **kwargs)
        calls.append(self.training)
        return found._replace(loss=found.loss * float("nan")) if sum(calls) > step else found

    monkeypatch.setattr(SCBDModule, "forward", return_nan_loss)


def test_run_trials_diverging_loss_row_has_warning_and_earlier_scores(tmp_path, monkeypatch):
    make_losses_nan_after(3, monkeypatch)
    diverging = dataclasses.replace(trial(alpha=1.0), training=TRAINING | {"validate_every": 2, "max_steps": 8})
    row = run_trials([diverging], tmp_path).iloc[0]
    assert row["steps"] == 2 and "step 4" in row["warnings"][0]
    assert np.isfinite([row["z_c in"], row["supervised_c"]]).all()
    assert run_trials([diverging], tmp_path)["finished"].tolist() == [row["finished"]]


def test_run_trials_loss_nan_from_start_raises(tmp_path, monkeypatch):
    make_losses_nan_after(0, monkeypatch)
    with pytest.raises(TrainingDiverged, match="training loss"):
        run_trials([trial(alpha=1.0)], tmp_path)


def test_run_trials_interrupted_trial_resumes_with_equal_scores(tmp_path, monkeypatch):
    """Interrupted during scoring, a trial resumes from its trained state and has the same scores."""
    whole = run_trials([trial(alpha=2.0)], tmp_path / "whole").iloc[0]
    protocol = PROTOCOLS["domain generalization"]

    def score_and_interrupt(*args):
        protocol(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(PROTOCOLS, "domain generalization", score_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_trials([trial(alpha=2.0)], tmp_path / "halves")
    assert Results(tmp_path / "halves").frame().empty
    row = run_trials([trial(alpha=2.0)], tmp_path / "halves").iloc[0]
    assert row["resumed"] and not whole["resumed"]
    assert row["r_c out"] == whole["r_c out"] and row["steps"] == whole["steps"]


def test_run_trials_rows_contain_digest_commit_and_version(tmp_path, monkeypatch):
    data: dict[str, Any] = {"n_cells": 300, "n_complexes": 2, "genes_per_complex": 2, "n_wells": 3, "image_size": 16}
    grid = [
        Trial("batch correction", "simulated_screen", "pixel PCA", seed, data, {"n_components": 4}) for seed in (0, 1)
    ]
    monkeypatch.setattr("paper.runner.commit", lambda: "c0ffee-dirty")
    frame = run_trials(grid, tmp_path)
    screens = [DATASETS["simulated_screen"].load(None, seed, **data) for seed in (0, 1)]
    expected = [digest_cells(ArraySource(screen.obsm["single_cell_images"]), screen.obs) for screen in screens]
    assert frame["digest"].tolist() == expected and expected[0] != expected[1]
    assert set(frame["commit"]) == {"c0ffee-dirty"} and set(frame["scbd"]) == {scbd.__version__}
    # the key of a trial does not depend on the files
    assert [trial.key for trial in grid] == frame["key"].tolist()


def test_run_trials_changed_system_version_warns_and_runs_again(tmp_path, monkeypatch):
    data: dict[str, Any] = {"n_cells": 300, "n_complexes": 2, "genes_per_complex": 2, "n_wells": 3, "image_size": 16}
    grid = [Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, {"n_components": 4})]
    before = run_trials(grid, tmp_path)
    monkeypatch.setitem(VERSIONS, "pixel PCA", 9)
    with pytest.warns(UserWarning, match="1 are of another version"):
        after = run_trials(grid, tmp_path)
    assert len(after) == 1 and after["key"].item() != before["key"].item()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


def test_run_trials_two_shards_complete_the_grid(tmp_path):
    grid = [trial(alpha=float(alpha)) for alpha in range(3)]
    first = run_trials(grid, tmp_path, shard=(1, 2))
    assert sorted(first["alpha"]) == [0, 2]
    # other shards may still be writing their rows
    assert len(list((tmp_path / "rows").iterdir())) == 2 and not (tmp_path / "rows.jsonl").exists()
    assert len(run_trials(grid, tmp_path, shard=(2, 2))) == 3
    assert not (tmp_path / "rows").exists() and len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_run_trials_loads_data_once_per_seed(tmp_path, monkeypatch):
    loaded = []
    dataset = DATASETS["colored_digits"]

    def load(path, seed, **kwargs):
        loaded.append(seed)
        return dataset.loader(seed=seed)

    monkeypatch.setattr(type(dataset), "load", lambda self, *args, **kwargs: load(*args, **kwargs))
    run_trials([trial(alpha=0.0), trial(alpha=1.0), trial(seed=1, alpha=0.0)], tmp_path)
    assert loaded == [0, 1]


def test_run_trials_batch_correction_scores_biology_and_batch(tmp_path):
    data = {"n_cells": 400, "n_complexes": 3, "genes_per_complex": 3, "n_wells": 4, "image_size": 16}
    features = Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, {"n_components": 16})
    model = {"encoder": "small", "n_latent": 8, "alpha": 1.0}
    training = {"max_steps": 4, "batch_size": 64, "enable_progress_bar": False}
    scbd = Trial("batch correction", "simulated_screen", "SCBD", 0, data, model, training)
    frame = run_trials([features, scbd], tmp_path).set_index("system")
    for column in ("relationship_area", "relationship_average_precision", "y_probe_f1", "e_probe_f1", "ilisi"):
        assert frame[column].notna().all(), column
    assert np.isnan(frame.loc["pixel PCA", "supervised_c"]) and frame.loc["SCBD", "supervised_c"] > 0


def test_run_trials_new_cells_scores_only_validation_cells(tmp_path, monkeypatch):
    scored = []
    scores = protocols.correction_scores

    def record_scored_cells(adata, embedding, **kwargs):
        scored.append((set(adata.obs_names), len(embedding)))
        return scores(adata, embedding, **kwargs)

    monkeypatch.setattr(protocols, "correction_scores", record_scored_cells)
    data: dict[str, Any] = {"n_cells": 600, "n_complexes": 3, "genes_per_complex": 3, "n_wells": 4, "image_size": 16}
    model: dict[str, Any] = {"encoder": "small", "n_latent": 8, "style_target": None}
    training: dict[str, Any] = {"max_steps": 4, "batch_size": 64, "train_size": 0.5, "enable_progress_bar": False}
    new = Trial("batch correction of new cells", "simulated_screen", "SCBD", 0, data, model, training)
    row = run_trials([new], tmp_path).iloc[0]
    assert row["relationship_area"] > 0 and row["supervised_c"] > 0
    names, n_cells = scored[0]
    adata = DATASETS["simulated_screen"].load(None, 0, **data)
    SCBDModel.setup_anndata(adata, "gene", "well")
    learned = SCBDModel(adata, **model)
    learned.train(**training, seed=0)
    assert names == set(adata.obs_names[learned.validation_indices]) and n_cells == len(names) == 300


def test_run_trials_invalid_trial_raises_before_running(tmp_path):
    for bad, message in [
        (Trial("domain generalization", "mnist", "SCBD"), "A trial names 'mnist', which is not known"),
        (Trial("domain generalization", "pixel PCA", "SCBD"), "A trial names 'pixel PCA', which is not known"),
        (Trial("pixel PCA", "simulated_screen", "SCBD"), "A trial names 'pixel PCA', which is not known"),
        (
            Trial("domain generalization", "pacs", "SCDB"),
            "A trial names 'SCDB'.*use one of SCBD, random encoder, oracle, ERM",
        ),
        (Trial("regression", "pacs", "SCBD"), "A trial names 'regression'"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_trials([trial(alpha=0.0), bad], tmp_path)
    with pytest.raises(ValueError, match="shard=3/2"):
        run_trials([trial(alpha=0.0)], tmp_path, shard=(3, 2))
    with pytest.raises(ValueError, match="pacs is not downloaded"):
        run_trials([Trial("domain generalization", "pacs", "SCBD")], tmp_path)
    assert not (tmp_path / "rows").exists()


def test_run_trials_missing_package_raises_before_running(tmp_path, monkeypatch):
    monkeypatch.setitem(NEEDED, "Harmony", "no_such_package")
    trials = [Trial("unseen perturbations", "cpjump1", system) for system in ("features", "Harmony")]
    with pytest.raises(ImportError, match="Harmony"):
        run_trials(trials, tmp_path / "out", path="nowhere.parquet")
    assert not (tmp_path / "out").exists()


def test_run_trials_rows_of_other_cells_warns(tmp_path):
    """The input file has changed between two parts of a grid."""
    table = cpjump1_table()
    table.to_parquet(tmp_path / "wells.parquet")
    trials = [Trial("unseen perturbations", "cpjump1", system, 0, {"fold": 0}) for system in ("features", "scaled")]
    run_trials(trials[:1], tmp_path / "out", path=tmp_path / "wells.parquet")
    table.loc[0, "Metadata_Well"] = "H12"
    table.to_parquet(tmp_path / "wells.parquet")
    with pytest.warns(UserWarning, match="are of other cells"):
        run_trials(trials, tmp_path / "out", path=tmp_path / "wells.parquet")


RESNET: dict[str, Any] = {"encoder": "resnet18", "standardize": False}
STEPS: dict[str, Any] = {"max_steps": 2, "lr": 1e-9, "batch_size": 16, "split": "split"}


def make_pacs_trial(model: dict[str, Any], training: dict[str, Any]) -> Trial:
    return Trial("domain generalization", "pacs", "ERM", 0, {"test_environment": "photo"}, model, training)


@pytest.fixture
def weights(tmp_path):
    """Weights file whose first layer has only the value 7, which random weights do not reach."""
    state = build_encoder("resnet18", 3).state_dict()
    state["conv1.weight"].fill_(7)
    torch.save(state, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_with_weights_trial_starts_from_and_records_weights(weights, tmp_path, monkeypatch):
    started = []
    train = type(build_encoder("resnet18", 3)).forward

    def record_first_weights(self, images):
        started.append(float(self.conv1.weight.detach().min()))
        return train(self, images)

    monkeypatch.setattr(type(build_encoder("resnet18", 3)), "forward", record_first_weights)
    path = write_domains(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES, n=5)
    plain = make_pacs_trial(RESNET, STEPS)
    (trial,) = with_weights([plain], weights)
    assert trial.key != plain.key and str(weights) not in str(trial)
    frame = run_trials([trial], tmp_path / "out", path=path, weights=weights)
    assert frame["weights"].tolist() == [trial.model["weights"]] and frame["encoder"].tolist() == ["resnet18"]
    assert min(started) == pytest.approx(7, abs=1e-3)
    with pytest.raises(ValueError, match=trial.model["weights"]):
        run_trials([trial], tmp_path / "out", path=path)


def test_with_weights_untrained_or_small_encoder_is_unchanged(weights):
    control, small, named = (
        make_pacs_trial(RESNET, STEPS | UNTRAINED),
        make_pacs_trial({"encoder": "small"}, STEPS),
        make_pacs_trial(RESNET, STEPS),
    )
    found = with_weights([control, small, named], weights)
    assert found[:2] == [control, small] and "weights" in found[2].model
    with pytest.raises(ValueError, match="No trial takes weights"):
        reproduce("pacs", budget="small", path="nowhere", weights=weights)
    with pytest.raises(ValueError, match="resnet50"):
        reproduce("pacs", budget="paper", path="nowhere", weights=weights)
    with pytest.raises(FileNotFoundError, match="none.pth"):
        with_weights([named], weights.with_name("none.pth"))


@pytest.mark.parametrize(
    ("room", "message"), [({"memory": 100_000}, "iVAE: embeddings of 300 cells"), ({"free": 10}, "are free")]
)
def test_run_trials_too_little_memory_or_disk_raises_before_running(room, message, tmp_path, monkeypatch):
    """Without this check, only the last trial would fail, after all others have run."""
    data = {"n_cells": 300, "n_complexes": 3, "genes_per_complex": 3, "n_wells": 4, "image_size": 16}
    small = Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, {"n_components": 2})
    large = Trial("batch correction", "simulated_screen", "iVAE", 0, data, {"n_latent": 64})
    monkeypatch.setattr(runner, "_total_memory", lambda: room.get("memory", 2**40))
    usage = SimpleNamespace(free=room.get("free", 2**40))
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda path: usage if path.is_dir() else pytest.fail("no folder"))
    monkeypatch.setattr(runner, "run_trial", lambda *args, **kwargs: pytest.fail("a trial was run"))
    with pytest.raises(OSError, match=message):
        run_trials([small, large], tmp_path / "not" / "there yet")
