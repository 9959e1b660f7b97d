from __future__ import annotations

from dataclasses import replace

import pytest
from official import write_mnist

from scbd.cli import main
from scbd.paper import EXPERIMENTS, reproduce
from scbd.paper._budgets import SIZES, Budget
from scbd.paper._protocol import as_authors
from scbd.workflows import UNTRAINED, run_trials

pytestmark = pytest.mark.filterwarnings("ignore:z_c has collapsed")


def authors(name: str, budget: Budget = "paper"):
    return as_authors(name, EXPERIMENTS[name].trials(budget, 1))


def test_25_000_of_their_steps_are_12_500_batches_with_two_validations():
    trials = [trial for trial in authors("cmnist") if trial.system == "SCBD"]
    assert {trial.training["max_steps"] for trial in trials} == {12_500}
    assert {trial.training["validate_every"] for trial in trials} == {4992}
    assert all(trial.data == {"protocol": "authors"} and trial.training["load_best"] for trial in trials)
    assert {trial.training["max_steps"] for trial in authors("funk22") if trial.system == "SCBD"} == {75_000}


def test_what_has_one_optimiser_or_is_never_trained_is_as_long_as_it_was():
    ours = {trial.system: trial for trial in EXPERIMENTS["camelyon17-systems"].trials("paper", 1)}
    theirs = {trial.system: trial for trial in authors("camelyon17-systems")}
    for system in set(ours) - {"SCBD"}:
        assert theirs[system].key == ours[system].key, system
    assert theirs["SCBD"].training["load_best"] and not ours["SCBD"].training["load_best"]


def test_their_digits_are_one_data_set():
    """A part of them is not; an oracle learns from white ones."""
    assert {trial.data["protocol"] for trial in authors("cmnist", "smoke")} == {"authors"}
    oracles = [trial.data for trial in authors("cmnist-variance") if trial.system == "oracle"]
    assert oracles == [{"colored": False, "protocol": "authors"}]
    with pytest.raises(ValueError, match="cmnist-map varies n_environments"):
        authors("cmnist-map", "smoke")
    with pytest.raises(ValueError, match="cpjump1 has no protocol of the authors: it is of unseen perturbations"):
        authors("cpjump1")


@pytest.mark.parametrize("name", ["camelyon17", "pacs-systems", "screen", "screen-systems", "funk22", "cmnist-systems"])
def test_every_experiment_of_the_paper_has_it(name):
    trials = authors(name, "small")
    assert len({trial.key for trial in trials}) == len(trials) > 0


def test_from_files_to_a_row_with_both_heads(tmp_path):
    path = write_mnist(tmp_path / "mnist")
    trial = next(trial for trial in authors("cmnist", "smoke") if trial.system == "SCBD")
    frame = run_trials([replace(trial, training={**trial.training, "max_steps": 2})], tmp_path / "out", path=path)
    assert frame[["own in", "own out", "r_c in", "r_c out"]].notna().all(axis=None)


def test_both_probes_of_the_well(tmp_path, monkeypatch):
    small = {"n_cells": 400, "n_wells": 2, "image_size": 16, "n_complexes": 3, "guides_per_gene": 1}
    monkeypatch.setattr("scbd.paper._screens.SCREENS", {"smoke": small})
    model, training = SIZES["smoke"]
    monkeypatch.setitem(SIZES, "smoke", (model, training | {"max_steps": 4, "batch_size": 64}))
    monkeypatch.setattr("scbd.paper._screens.UNTRAINED", UNTRAINED | {"max_steps": 2})
    frame = reproduce("screen", out=tmp_path / "out", protocol="authors", n_seeds=1)
    assert frame[["e_probe_f1", "e_probe_f1_unstandardised"]].notna().all(axis=None)
    assert "well F1, unstandardised" in (tmp_path / "out" / "table.md").read_text()
    assert frame.loc[frame["system"] == "SCBD", "steps"].tolist() == [2] * 3


def test_the_command_line_knows_it(capsys):
    assert main(["reproduce", "cpjump1", "--protocol", "authors"]) == 2
    assert "cpjump1 has no protocol of the authors" in capsys.readouterr().err
    assert main(["reproduce", "cmnist", "--protocol", "theirs"]) == 2
    assert "There is no protocol 'theirs': use one of ours, authors" in capsys.readouterr().err
