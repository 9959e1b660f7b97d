"""Scores of profiles: what they tell apart, and what takes no part."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from official import breinig2015_table, cpjump1_table

from scbd.workflows import DATASETS
from scbd.workflows._profile_scores import across_environments, profile_scores
from scbd.workflows._rivals import RIVALS, Table


@pytest.fixture
def wells(tmp_path):
    cpjump1_table(n_compounds=130).to_parquet(tmp_path / "wells.parquet")
    return DATASETS["cpjump1"].load(tmp_path / "wells.parquet", 0, fold=0)


def test_a_perfect_embedding_and_one_that_says_nothing(wells):
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    codes = wells.obs["Metadata_broad_sample"].cat.codes.to_numpy()
    perfect = rng.normal(size=(codes.max() + 1, 40))[codes]
    perfect[wells.obs["Metadata_broad_sample"] == "DMSO"] = rng.normal(
        size=((wells.obs["Metadata_broad_sample"] == "DMSO").sum(), 40)
    )
    scores = profile_scores(wells, perfect, dataset)
    assert scores["replicates unseen"] == scores["replicates seen"] == scores["across positions"] == 1
    assert scores["floor"] < 0.5 and scores["floor-corrected"] == 1
    noise = profile_scores(wells, rng.normal(size=(len(codes), 40)), dataset)
    assert noise["across positions"] < 0.1 and noise["mechanism"] < 0.4 and noise["e, linear, new"] < 0.4


def test_controls_at_positions_that_were_learned_from_take_no_part(wells):
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    z = rng.normal(size=(wells.n_obs, 20))
    before = profile_scores(wells, z, dataset)
    control, learned = wells.obs["Metadata_broad_sample"] == "DMSO", wells.obs["split"] == "train"
    fitted = (control & wells.obs["Metadata_Well"].isin(wells.obs.loc[control & learned, "Metadata_Well"])).to_numpy()
    assert (fitted & ~learned).any()  # on new plates
    z[fitted] = 100 * rng.normal(size=(fitted.sum(), 20))
    assert profile_scores(wells, z, dataset) == before


def test_plates_are_read_from_wells_that_were_not_learned_from(wells):
    """Of its training wells an embedding that knows the compounds by heart hides the plate."""
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    codes = wells.obs[dataset.e_key].cat.codes.to_numpy()
    z = np.eye(codes.max() + 1)[codes] + rng.normal(0, 0.01, (wells.n_obs, codes.max() + 1))
    learned = (wells.obs["split"] == "train").to_numpy()
    assert 0.2 < learned.mean() < 0.8
    z[learned] = rng.normal(size=z[learned].shape)
    scores = profile_scores(wells, z, dataset)
    assert scores["e, linear, new"] > 0.99 and scores["e, neighbours, new"] > 0.99


@pytest.mark.parametrize("name", RIVALS)
def test_corrections_learn_from_the_rows_they_are_given(wells, name):
    if name == "Harmony":
        pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    dataset, fit = DATASETS["cpjump1"], (wells.obs["split"] == "train").to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = RIVALS[name](Table(wells, dataset, fit))
        assert len(z) == wells.n_obs and np.isfinite(z).all()
        if name in ("scaled", "sphering", "WCCN", "LDA", "PLDA"):
            wells.X[~fit] += np.random.default_rng(0).normal(size=wells.X[~fit].shape).astype(np.float32)
            other = RIVALS[name](Table(wells, dataset, fit))
            np.testing.assert_allclose(other[fit], z[fit], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"), [("sphering", {}), ("TVN", {}), ("WCCN", {}), ("standardised", {"on_controls": True})]
)
def test_controls_that_are_scored_against_teach_nothing(wells, name, settings):
    """On new plates neither: negatives that were fitted on would be told apart by that."""
    dataset, fit = DATASETS["cpjump1"], (wells.obs["split"] == "train").to_numpy()
    scored = ((wells.obs["Metadata_broad_sample"] == "DMSO") & ~wells.obs["known_position"]).to_numpy()
    z = RIVALS[name](Table(wells, dataset, fit), **settings)
    wells.X[scored] += np.random.default_rng(0).normal(size=wells.X[scored].shape).astype(np.float32)
    np.testing.assert_allclose(RIVALS[name](Table(wells, dataset, fit), **settings)[~scored], z[~scored], atol=1e-4)


def test_labels_are_read_in_one_replicate_by_the_other(tmp_path):
    breinig2015_table(n=1200).to_parquet(tmp_path / "cells.parquet")
    dataset = DATASETS["breinig2015"]
    cells = dataset.load(tmp_path / "cells.parquet", 0, fold=0)
    codes = cells.obs["target"].cat.codes.to_numpy()
    told = across_environments(
        cells, np.eye(5)[codes] + 0.01 * np.random.default_rng(0).normal(size=(1200, 5)), dataset
    )
    assert told["y across e"] == 1 and told["y chance"] == 0.2 and told["e, linear"] < 0.6
