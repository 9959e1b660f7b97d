"""Test which rows of profile tables and simulated screens are held out from training."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.dataset_files import breinig2015_table, cpjump1_table

from paper.datasets import DATASETS, breinig2015_fold, cpjump1_fold, simulated_screen_fold
from scbd.datasets import simulated_screen


@pytest.fixture
def wells(tmp_path):
    cpjump1_table(n_compounds=230).to_parquet(tmp_path / "wells.parquet")
    return tmp_path / "wells.parquet"


@pytest.mark.parametrize("fold", range(5))
def test_cpjump1_fold_holds_out_plates_compounds_and_control_positions(wells, fold):
    obs = cpjump1_fold(wells, fold=fold).obs
    train, control = obs["split"] == "train", obs["Metadata_broad_sample"] == "DMSO"
    held = obs.loc[obs["new_plate"], ["Metadata_Plate", "Metadata_hours"]].drop_duplicates()
    assert sorted(held["Metadata_hours"]) == [24, 48]  # one plate per time point
    unseen = set(obs.loc[obs["unseen"], "Metadata_broad_sample"])
    assert {"BRD-000", "BRD-001"} <= unseen and len(
        unseen
    ) == 102  # the two compounds with two positions, and 100 others
    assert not train[obs["unseen"] | obs["new_plate"]].any()
    known = obs.loc[train & control, "Metadata_Well"].unique()
    assert len(known) == 4 and obs.loc[control, "Metadata_Well"].nunique() == 8
    assert train[~obs["unseen"] & ~obs["new_plate"] & ~control].all()
    assert (obs["known_position"] == (control & obs["Metadata_Well"].isin(known))).all()


def test_cpjump1_fold_other_fold_differs_other_seed_is_equal(wells):
    one, again, other = (cpjump1_fold(wells, fold=fold, seed=seed).obs for fold, seed in ((0, 0), (0, 1), (1, 0)))
    assert (one["split"] == again["split"]).all() and (one["unseen"] != other["unseen"]).any()


@pytest.mark.parametrize("inner", range(3))
def test_cpjump1_fold_inner_contains_only_outer_training_wells(wells, inner):
    outer, obs = cpjump1_fold(wells).obs, cpjump1_fold(wells, inner=inner).obs
    assert set(obs.index) == set(outer.index[outer["split"] == "train"])
    assert obs.loc[obs["new_plate"], "Metadata_Plate"].nunique() == 1
    assert 0.2 < obs["unseen"].mean() < 0.4 and (obs["split"] == "train").any()


def test_breinig2015_fold_half_of_each_target_and_replicate_is_test(tmp_path):
    breinig2015_table().to_parquet(tmp_path / "cells.parquet")
    obs = breinig2015_fold(tmp_path / "cells.parquet", fold=1).obs
    shares = obs.groupby(["target", "replicate"], observed=True)["split"].agg(lambda part: np.mean(part == "test"))
    assert shares.between(0.45, 0.55).all()


def test_check_path_missing_path_raises_with_dataset_name():
    with pytest.raises(ValueError, match="cpjump1 is not downloaded"):
        DATASETS["cpjump1"].check_path(None)


def test_simulated_screen_fold_holds_out_a_third_of_genes_and_cells():
    screen = {"n_cells": 3000, "n_complexes": 3, "genes_per_complex": 3, "n_wells": 6, "image_size": 16}
    cells = simulated_screen_fold(seed=1, **screen)
    obs, whole = cells.obs, simulated_screen(seed=1, **screen).obs
    assert obs["gene"][obs["unseen"]].nunique() == 3 and not (obs["unseen"] & (obs["gene"] == "nontargeting")).any()
    assert set(obs["split"][obs["unseen"]]) == {"test"} and set(obs["split"]) == {"train", "validation", "test"}
    # the share of test cells is the same for genes seen and unseen in training
    shares = (obs[obs["split"] == "test"]["gene"].value_counts() / whole["gene"].value_counts()).dropna()
    assert shares.between(0.28, 0.39).all()
    seen = obs[~obs["unseen"]]
    assert 0.005 < (seen["split"] == "validation").mean() < 0.03
    assert seen["gene"].astype(str).value_counts().to_dict().items() <= whole["gene"].value_counts().to_dict().items()
    # equal seeds give equal splits; another seed gives other unseen genes
    assert simulated_screen_fold(seed=1, **screen).obs.equals(obs)
    again = simulated_screen_fold(seed=2, **screen).obs
    assert set(again["gene"][again["unseen"]]) != set(obs["gene"][obs["unseen"]])
