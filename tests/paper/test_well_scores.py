"""Test the scores of real wells: on tables with a known answer, and on the published tables where these are present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.dataset_files import bbbc021_table, rhogtpase_table, write_real_wells

from paper.datasets import DATASETS, bbbc021_wells_fold, in_part, rhogtpase_wells_fold
from paper.grids.wells import wells_report
from paper.systems import TABLES, Table
from paper.well_scores import control_position_scores, control_week_scores, gene_scores, mechanism_scores
from scbd.corrections import correct


@pytest.fixture
def folder(tmp_path):
    return write_real_wells(tmp_path / "wells")


@pytest.fixture(scope="session")
def real(shared) -> Path:
    folder: Path = shared / "real"
    if not folder.is_dir():
        pytest.skip("the published tables of wells are not here: no folder shared/data/real beside the checkout")
    return folder


def make_wells(rows: list[tuple[str, str, str, str, list[float]]]) -> tuple[AnnData, np.ndarray]:
    """Return wells with compound, treatment, mechanism and week, and their embedding."""
    *columns, embedding = zip(*rows, strict=True)
    obs = pd.DataFrame(dict(zip(("compound", "treatment", "moa", "week"), columns, strict=True)))
    obs.index = obs.index.astype(str)
    return AnnData(obs=obs.assign(split="train")), np.array(embedding)


# a1 and a2 have one compound; b is the only other compound of its mechanism, in the same week
WELLS: list[tuple[str, str, str, str, list[float]]] = [
    ("A", "a1", "one", "1", [1.0, 0.0, 0.0]),
    ("A", "a1", "one", "1", [1.0, 0.2, 0.0]),
    ("A", "a2", "one", "1", [1.0, 0.1, 0.1]),
    ("B", "b1", "one", "1", [1.0, 0.3, 0.0]),
    ("C", "c1", "one", "2", [0.0, 1.0, 0.0]),
    ("D", "d1", "two", "2", [0.2, 1.0, 0.0]),
    ("E", "e1", "three", "2", [0.0, 0.0, 1.0]),
    ("DMSO", "DMSO", "DMSO", "1", [1.0, 0.1, 0.0]),
]


def test_mechanism_scores_hand_made_table_returns_known_fractions():
    wells, z = make_wells(WELLS)
    # A and B find each other; c1 finds D, d1 finds c1, e1 finds A's second treatment: three of six
    # another week: A and B find D, not the only match c1; c1 finds B. d1 and e1 have no match
    assert mechanism_scores(wells, z) == {"NSC": 3 / 6, "NSC n": 6, "NSCB": 1 / 4, "NSCB n": 4}


def test_mechanism_scores_test_wells_are_scored_among_all_treatments():
    wells, z = make_wells(WELLS)
    wells.obs["split"] = np.where(wells.obs["compound"].isin(["B", "D"]), "test", "train")
    assert mechanism_scores(wells, z) == {"NSC": 1 / 2, "NSC n": 2, "NSCB": 0, "NSCB n": 1}
    wells.obs["split"] = np.where(wells.obs["compound"] == "D", "test", "train")
    assert mechanism_scores(wells, z) == {"NSC": 0, "NSC n": 1, "NSCB": 0, "NSCB n": 0}


def test_mechanism_scores_mechanism_embedding_returns_one(folder):
    wells = bbbc021_wells_fold(folder)
    z = pd.get_dummies(wells.obs["moa"]).to_numpy(float)
    assert mechanism_scores(wells, z) == {"NSC": 1, "NSC n": 20, "NSCB": 1, "NSCB n": 20}


def test_control_week_scores_week_embedding_returns_one_and_noise_returns_chance(folder):
    wells = bbbc021_wells_fold(folder)
    noise = np.random.default_rng(0).normal(size=(wells.n_obs, 4))
    week = (wells.obs["week"] == "Week1").to_numpy(float)[:, None] + 0.01 * noise
    assert control_week_scores(wells, week) == {"week": 1, "week chance": 0.5}
    assert 0.2 < control_week_scores(wells, noise)["week"] < 0.8


def test_control_week_scores_new_controls_are_scored_alone(folder):
    wells = bbbc021_wells_fold(folder, new_controls=True)
    week = (wells.obs["week"] == "Week1").to_numpy(float)
    swapped = np.where(in_part(wells, "train"), np.random.default_rng(0).permutation(week), week)
    assert control_week_scores(wells, swapped[:, None])["week"] == 1


def test_gene_scores_gene_embedding_returns_one(folder):
    wells = rhogtpase_wells_fold(folder)
    scores = gene_scores(wells, pd.get_dummies(wells.obs["gene"]).to_numpy(float))
    pairs = ("other library, LM2", "other library, MDA-MB-231", "other line, ONTARGETPlus", "other line, siGENOME")
    # the last gene is missing in one library
    assert scores == dict.fromkeys(pairs, 1) | {"chance": 1 / 7}


def test_gene_scores_position_embedding_finds_genes_in_the_other_line_alone(folder):
    wells = rhogtpase_wells_fold(folder)
    scores = gene_scores(wells, pd.get_dummies(wells.obs["well"]).to_numpy(float))
    assert scores["other line, siGENOME"] == scores["other line, ONTARGETPlus"] == 1
    assert scores["other library, LM2"] == scores["other library, MDA-MB-231"] <= 1 / 7


def test_gene_scores_library_learned_from_is_not_scored_across_lines(folder):
    wells = rhogtpase_wells_fold(folder, library="siGENOME")
    scores = gene_scores(wells, pd.get_dummies(wells.obs["gene"]).to_numpy(float))
    assert "other line, siGENOME" not in scores and scores["other line, ONTARGETPlus"] == 1


def test_control_position_scores_position_embedding_returns_one(folder):
    wells = rhogtpase_wells_fold(folder)
    scores = control_position_scores(wells, pd.get_dummies(wells.obs["well"]).to_numpy(float))
    assert scores == {"ONTARGETPlus": 1, "ONTARGETPlus n": 16, "siGENOME": 1, "siGENOME n": 16}


def test_bbbc021_wells_fold_each_compound_is_held_out_once(folder):
    folds = [bbbc021_wells_fold(folder, fold=fold).obs for fold in range(5)]
    held = [set(obs.loc[obs["split"] == "test", "compound"]) for obs in folds]
    assert sorted(name for compounds in held for name in compounds) == sorted(
        set(bbbc021_table()["compound"]) - {"DMSO"}
    )
    assert [len(compounds) for compounds in held] == [2] * 5
    for obs, compounds in zip(folds, held, strict=True):
        assert (obs["compound"].isin(compounds) == (obs["split"] == "test")).all()
    assert (bbbc021_wells_fold(folder).obs["split"] == "train").all()


def test_bbbc021_wells_fold_new_controls_holds_out_two_positions(folder):
    obs = bbbc021_wells_fold(folder, new_controls=True).obs
    held = obs[obs["split"] == "test"]
    assert set(held["compound"]) == {"DMSO"} and held["well"].nunique() == 2 and len(held) == 12
    assert (obs["known_position"] == ((obs["compound"] == "DMSO") & (obs["split"] == "train"))).all()


def test_rhogtpase_wells_fold_holds_out_genes_of_the_other_library(folder):
    obs = rhogtpase_wells_fold(folder, library="siGENOME").obs
    assert len(obs) == len(rhogtpase_table()) - 8  # without wells that differ in the number of cells
    held = obs[obs["split"] == "test"]
    assert set(held["library"]) == {"ONTARGETPlus"} and "control" not in set(held["gene"])
    assert (obs.loc[obs["library"] == "siGENOME", "split"] == "train").all()


def test_wells_report_folds_are_pooled_by_scored_treatments():
    rows = [{"fold": 0.0, "NSC": 1.0, "NSC n": 3.0}, {"fold": 1.0, "NSC": 0.0, "NSC n": 1.0}, {"NSC": 0.25, "NSC n": 4}]
    frame = pd.DataFrame(rows).assign(system="WCCN", seed=0, dataset="bbbc021_wells", **{"week chance": 0.1})
    lines = wells_report(frame, Path()).splitlines()
    assert lines[2] == "| system | NSC, all wells | NSC, compounds left out | runs |"
    assert lines[4] == "| WCCN | 0.250 | 0.750 | 1 |" and lines[-1] == "Chance of the week: 0.1000."


def test_mechanism_scores_published_wells_equal_known_answers(real):
    dataset = DATASETS["bbbc021_wells"]
    wells = dataset.load(real, 0)
    assert wells.shape == (632, 516) and wells.obs["plate"].nunique() == 55
    table = Table(wells, dataset, in_part(wells, "train"))
    scaled = TABLES["scaled over all wells"](table)
    for z, nsc, nscb in ((scaled, 0.864, 0.696), (correct(scaled, "sphering", **table.known), 0.932, 0.761)):
        scores = mechanism_scores(wells, z)
        assert (scores["NSC n"], scores["NSCB n"]) == (103, 92)
        assert scores["NSC"] == pytest.approx(nsc, abs=5e-4) and scores["NSCB"] == pytest.approx(nscb, abs=5e-4)
    assert 0.93 < control_week_scores(wells, scaled)["week"] < 0.96


def test_gene_scores_and_control_position_scores_published_wells_equal_known_answers(real):
    dataset = DATASETS["rhogtpase_wells"]
    wells = dataset.load(real, 0)
    assert wells.shape == (5197, 132) and wells.obs["gene"].nunique() == 180
    table = Table(wells, dataset, in_part(wells, "train"))
    known = table.known | {"positions": None}
    standardised = correct(table.stored, "standardised on controls", **known)
    whitened = correct(standardised, "WCCN", **known, regularization=0.5)
    pairs = ("other library, LM2", "other library, MDA-MB-231", "other line, siGENOME")
    for z, expected, tolerance in (
        (standardised, (0.030, 0.075, 0.293), 0.005),
        (whitened, (0.071, 0.124, 0.699), 0.02),
    ):
        scores = gene_scores(wells, z)
        assert scores["chance"] == pytest.approx(1 / 133)
        assert [scores[pair] for pair in pairs] == pytest.approx(expected, abs=tolerance)
        assert scores["other line, siGENOME"] > 0.25
        # position alone explains little of this: controls at the same position find each other less often
        of_positions = control_position_scores(wells, z)
        assert of_positions["siGENOME n"] == 135 and of_positions["siGENOME"] < 0.05
