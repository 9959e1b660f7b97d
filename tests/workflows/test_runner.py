from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from official import cpjump1_table

import scbd.workflows._protocols
from scbd.data import ArraySource
from scbd.data._digests import digest_cells
from scbd.model import SCBDModel, TrainingDiverged
from scbd.model._module import SCBDModule
from scbd.workflows import DATASETS, PROTOCOLS, Results, Trial, run_trials
from scbd.workflows._rivals import NEEDED
from scbd.workflows._systems import MEANINGS

pytestmark = [
    pytest.mark.filterwarnings("ignore:z_c has collapsed"),
    pytest.mark.usefixtures("permuted_once", "few_digits"),
]

MODEL: dict[str, Any] = {"encoder": "small", "n_latent": 8, "style_target": "ye", "standardize": False}
TRAINING: dict[str, Any] = {"max_steps": 4, "batch_size": 64, "split": "split", "enable_progress_bar": False}


def trial(system: str = "SCBD", seed: int = 0, **model: Any) -> Trial:
    return Trial("domain generalization", "colored_digits", system, seed, {}, MODEL | model, TRAINING)


@pytest.fixture
def few_digits(request) -> Iterator[None]:
    """Every fourth digit, but for what compares scores."""
    digits = DATASETS["colored_digits"]
    few = dataclasses.replace(digits, loader=lambda **how: digits.loader(**how)[::4].copy())
    with pytest.MonkeyPatch.context() as patch:
        if request.function is not test_the_control_is_never_trained_and_erm_has_its_own_classifier:
            patch.setitem(DATASETS, "colored_digits", few)
        yield


def test_finished_trials_are_not_run_again(tmp_path, monkeypatch):
    grid = [trial(alpha=0.0), trial(alpha=1.0)]
    first = run_trials(grid[:1], tmp_path)
    trained = []
    train = SCBDModel.train

    def counted(self, **kwargs):
        trained.append(self.module.alpha)
        train(self, **kwargs)

    monkeypatch.setattr(SCBDModel, "train", counted)
    frame = run_trials(grid, tmp_path)
    assert trained == [1.0]
    # of the first there was a line; of both there is, now that none is missing
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "runs"}
    assert len(first) == 1 and list(frame.sort_values("alpha")["alpha"]) == [0, 1]
    assert (frame["steps"] == 4).all()
    # the history stays, the states that only an interrupted run needs do not
    files = {name for run in (tmp_path / "runs").iterdir() for name in os.listdir(run)}
    assert files == {"history.csv"}


def test_the_same_trial_gives_the_same_scores(tmp_path):
    rows = [run_trials([trial(alpha=2.0)], tmp_path / name).iloc[0] for name in ("one", "two")]
    for column in ("r_c in", "r_c out", "z_c out", "supervised_c"):
        assert rows[0][column] == rows[1][column]
    assert rows[0]["key"] == rows[1]["key"]


def spoiled_after(step: int, monkeypatch) -> None:
    """Losses that are no numbers from then on."""
    losses, calls = SCBDModule.forward, []

    def spoiled(self, *args, **kwargs):
        found = losses(self, *args, **kwargs)
        calls.append(self.training)
        return found._replace(loss=found.loss * float("nan")) if sum(calls) > step else found

    monkeypatch.setattr(SCBDModule, "forward", spoiled)


def test_a_setting_that_diverges_is_a_row_that_says_so(tmp_path, monkeypatch):
    spoiled_after(3, monkeypatch)
    diverging = dataclasses.replace(trial(alpha=1.0), training=TRAINING | {"validate_every": 2, "max_steps": 8})
    row = run_trials([diverging], tmp_path).iloc[0]
    assert row["steps"] == 2 and "The training loss became nan at step 4 of 8" in row["warnings"][0]
    assert np.isfinite([row["z_c in"], row["supervised_c"]]).all()
    assert run_trials([diverging], tmp_path)["finished"].tolist() == [row["finished"]]


def test_a_setting_that_never_worked_has_no_scores(tmp_path, monkeypatch):
    spoiled_after(0, monkeypatch)
    with pytest.raises(TrainingDiverged, match="at step 1 of 4"):
        run_trials([trial(alpha=1.0)], tmp_path)


def test_an_interrupted_trial_goes_on(tmp_path, monkeypatch):
    """Stopped while it is scored: the trained state is there, and the same scores come of it."""
    whole = run_trials([trial(alpha=2.0)], tmp_path / "whole").iloc[0]
    protocol = PROTOCOLS["domain generalization"]

    def stopped(*args):
        protocol(*args)
        raise KeyboardInterrupt

    monkeypatch.setitem(PROTOCOLS, "domain generalization", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_trials([trial(alpha=2.0)], tmp_path / "halves")
    assert Results(tmp_path / "halves").frame().empty
    monkeypatch.undo()
    row = run_trials([trial(alpha=2.0)], tmp_path / "halves").iloc[0]
    assert row["resumed"] and not whole["resumed"]
    assert row["r_c out"] == whole["r_c out"] and row["steps"] == whole["steps"]


def test_rows_say_of_which_cells_and_which_code_they_are(tmp_path, monkeypatch):
    data: dict[str, Any] = {"n_cells": 300, "n_complexes": 2, "genes_per_complex": 2, "n_wells": 3, "image_size": 16}
    grid = [
        Trial("batch correction", "simulated_screen", "pixel PCA", seed, data, {"n_components": 4}) for seed in (0, 1)
    ]
    monkeypatch.setattr("scbd.workflows._provenance.commit", lambda: "c0ffee-dirty")
    frame = run_trials(grid, tmp_path)
    screens = [DATASETS["simulated_screen"].load(None, seed, **data) for seed in (0, 1)]
    expected = [digest_cells(ArraySource(screen.obsm["single_cell_images"]), screen.obs) for screen in screens]
    assert frame["digest"].tolist() == expected and expected[0] != expected[1]
    assert set(frame["commit"]) == {"c0ffee-dirty"} and set(frame["scbd"]) == {scbd.__version__}
    # whatever files are given: a trial does not name them
    assert [trial.key for trial in grid] == frame["key"].tolist()


def test_rows_of_a_system_that_has_changed_are_run_again(tmp_path, monkeypatch):
    data: dict[str, Any] = {"n_cells": 300, "n_complexes": 2, "genes_per_complex": 2, "n_wells": 3, "image_size": 16}
    grid = [Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, {"n_components": 4})]
    before = run_trials(grid, tmp_path)
    monkeypatch.setitem(MEANINGS, "pixel PCA", MEANINGS["pixel PCA"] + 1)
    with pytest.warns(UserWarning, match="1 belong to systems that have since been changed: they are kept"):
        after = run_trials(grid, tmp_path)
    assert len(after) == 1 and after["key"].item() != before["key"].item()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


def test_shards_share_the_work(tmp_path):
    grid = [trial(alpha=float(alpha)) for alpha in range(3)]
    first = run_trials(grid, tmp_path, shard=(1, 2))
    assert sorted(first["alpha"]) == [0, 2]
    # others may still be writing theirs
    assert len(list((tmp_path / "rows").iterdir())) == 2 and not (tmp_path / "rows.jsonl").exists()
    assert len(run_trials(grid, tmp_path, shard=(2, 2))) == 3
    assert not (tmp_path / "rows").exists() and len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_data_are_loaded_once_a_seed(tmp_path, monkeypatch):
    loaded = []
    dataset = DATASETS["colored_digits"]

    def load(path, seed, **kwargs):
        loaded.append(seed)
        return dataset.loader(seed=seed)

    monkeypatch.setattr(type(dataset), "load", lambda self, *args, **kwargs: load(*args, **kwargs))
    run_trials([trial(alpha=0.0), trial(alpha=1.0), trial(seed=1, alpha=0.0)], tmp_path)
    assert loaded == [0, 1]


def test_the_control_is_never_trained_and_erm_has_its_own_classifier(tmp_path):
    control = Trial(
        "domain generalization",
        "colored_digits",
        "random encoder",
        0,
        {},
        MODEL | {"alpha": 0.0},
        TRAINING | {"lr": 0.0, "weight_decay": 0.0, "load_best": False},
    )
    erm = Trial("domain generalization", "colored_digits", "ERM", 0, {}, {"encoder": "small"}, TRAINING)
    frame = run_trials([control, erm], tmp_path).set_index("system")
    # two in three digits are told by a linear look at an untrained network
    assert frame.loc["random encoder", "r_c in"] > 0.5
    assert np.isnan(frame.loc["ERM", "z_c in"])
    # four steps teach it less than a linear look at its features
    assert 0 < frame.loc["ERM", "own in"] < frame.loc["ERM", "r_c in"]


def test_batch_correction_scores_biology_and_batch(tmp_path):
    data = {"n_cells": 400, "n_complexes": 3, "genes_per_complex": 3, "n_wells": 4, "image_size": 16}
    features = Trial("batch correction", "simulated_screen", "pixel PCA", 0, data, {"n_components": 16})
    model = {"encoder": "small", "n_latent": 8, "alpha": 1.0}
    training = {"max_steps": 4, "batch_size": 64, "enable_progress_bar": False}
    scbd = Trial("batch correction", "simulated_screen", "SCBD", 0, data, model, training)
    frame = run_trials([features, scbd], tmp_path).set_index("system")
    for column in ("relationship_area", "relationship_average_precision", "y_probe_f1", "e_probe_f1", "ilisi"):
        assert frame[column].notna().all(), column
    assert np.isnan(frame.loc["pixel PCA", "supervised_c"]) and frame.loc["SCBD", "supervised_c"] > 0


def test_new_cells_are_scored_without_those_that_were_learned_from(tmp_path, monkeypatch):
    scored = []
    scores = scbd.workflows._protocols.correction_scores

    def spied(adata, embedding, **kwargs):
        scored.append((set(adata.obs_names), len(embedding)))
        return scores(adata, embedding, **kwargs)

    monkeypatch.setattr(scbd.workflows._protocols, "correction_scores", spied)
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


def test_nothing_is_run_when_something_is_wrong(tmp_path):
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
    with pytest.raises(ValueError, match="shard=3/2: give a first number from 1 to the second"):
        run_trials([trial(alpha=0.0)], tmp_path, shard=(3, 2))
    with pytest.raises(ValueError, match="pacs is not downloaded by scbd: see scbd.datasets.pacs"):
        run_trials([Trial("domain generalization", "pacs", "SCBD")], tmp_path)
    assert not (tmp_path / "rows").exists()


def test_a_package_that_is_missing_is_named_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setitem(NEEDED, "Harmony", "no_such_package")
    trials = [Trial("unseen perturbations", "cpjump1", system) for system in ("features", "Harmony")]
    with pytest.raises(ImportError, match="Harmony, which has no row yet, needs one more package: pip install"):
        run_trials(trials, tmp_path / "out", path="nowhere.parquet")
    assert not (tmp_path / "out").exists()


def test_rows_of_other_files_under_the_same_name_are_told_of(tmp_path):
    """A file was mended, or another one was given, and the rest of a grid is run."""
    table = cpjump1_table()
    table.to_parquet(tmp_path / "wells.parquet")
    trials = [Trial("unseen perturbations", "cpjump1", system, 0, {"fold": 0}) for system in ("features", "scaled")]
    run_trials(trials[:1], tmp_path / "out", path=tmp_path / "wells.parquet")
    table.loc[0, "Metadata_Well"] = "H12"
    table.to_parquet(tmp_path / "wells.parquet")
    with pytest.warns(UserWarning, match="are of other cells than those that are loaded now, under the same name"):
        run_trials(trials, tmp_path / "out", path=tmp_path / "wells.parquet")
