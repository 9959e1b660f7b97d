from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from scbd._shared.linear_maps import within_covariance
from scbd.corrections import plda
from scbd.datasets import simulated_profiles
from scbd.metrics import replicate_retrieval

SMALL: dict[str, Any] = {"n_perturbations": 40, "n_plates": 4, "n_controls": 16, "n_features": 24}


def test_simulated_profiles_shapes_labels_and_wells_are_consistent(tmp_path):
    cells = simulated_profiles(**SMALL, cells_per_well=3)
    assert cells.shape == (4 * 56 * 3, 24) and cells.X.dtype == np.float32
    wells = cells.obs.groupby(["plate", "well"], observed=True)["perturbation"].agg(["nunique", "size", "first"])
    assert (wells["nunique"] == 1).all() and (wells["size"] == 3).all()
    assert (wells["first"] == "control").groupby("plate", observed=True).sum().eq(16).all()
    places = cells.obs.groupby("perturbation", observed=True)["well"].nunique()
    assert places.pop("control") == 16 and (places == 1).all()  # one layout
    assert cells.obs["well"].str.fullmatch(r"[A-H](0[1-9]|1[0-2])").all()
    cells.write_h5ad(tmp_path / "cells.h5ad")


def test_simulated_profiles_several_layouts_vary_positions():
    obs = simulated_profiles(**SMALL, one_layout=False).obs
    assert (obs.groupby("perturbation", observed=True)["well"].nunique() > 1).all()


def test_simulated_profiles_plate_maps_split_perturbations_not_controls():
    obs = simulated_profiles(**SMALL, n_plate_maps=2).obs
    maps = obs.groupby("perturbation", observed=True)["plate_map"].nunique()
    assert maps.pop("control") == 2 and (maps == 1).all()
    assert obs.groupby("perturbation", observed=True)["plate"].nunique().drop("control").eq(2).all()


@pytest.mark.parametrize(("n", "rows", "last"), [(80, "H", "H12"), (300, "P", "P24"), (1500, "AF", "AF48")])
def test_simulated_profiles_plate_size_fits_number_of_wells(n, rows, last):
    wells = simulated_profiles(n, 1, n_controls=16, n_features=2).obs["well"].astype(str)
    assert max(wells, key=lambda well: (len(well), well)) <= last
    assert wells.str.extract(r"([A-Z]+)\d+")[0].map(lambda r: (len(r), r)).max() == (len(rows), rows)


def test_simulated_profiles_equal_seed_returns_equal_features():
    one, two, three = (simulated_profiles(**SMALL, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.X, two.X)
    assert one.obs.equals(two.obs) and not np.array_equal(one.X, three.X)


def test_simulated_profiles_effect_sizes_are_standard_deviations():
    """Effects are in units of the standard deviation between cells of a well, which is 1."""
    nothing: dict[str, Any] = dict.fromkeys(["effect_size", "plate_effect", "position_effect", "well_effect"], 0.0)
    size: dict[str, Any] = {"n_perturbations": 300, "n_plates": 40, "n_controls": 20, "n_features": 60}
    sd = simulated_profiles(**size, **nothing).X.std(0)
    assert np.sqrt(np.mean(sd**2)) == pytest.approx(1, abs=0.02)
    for name in [*nothing, "interaction"]:
        cells = simulated_profiles(**size, **nothing | {name: 2.0})
        total = np.sqrt(np.mean(cells.X.var(0)))
        assert total == pytest.approx(np.sqrt(1 + 2.0**2), rel=0.25), name
    cells = simulated_profiles(**size, **nothing, gain_effect=0.5)
    by_plate = pd.DataFrame(cells.X).groupby(cells.obs["plate"].to_numpy()).std()
    assert np.log(by_plate).std().mean() == pytest.approx(0.5, rel=0.15)


def test_simulated_profiles_inactive_complexes_have_no_effects():
    truth = simulated_profiles(**SMALL, active=0.5).uns["truth"]
    does = (truth["effects"] != 0).any(axis=1)
    assert does.sum() == 20 and set(truth["network"]["target"]) == set(truth["effects"].index[does])
    assert truth["network"]["source"].value_counts().eq(4).all()


def test_simulated_profiles_effects_correlate_within_complexes():
    effects = simulated_profiles(200, 1, n_controls=1).uns["truth"]["effects"]
    alike = np.corrcoef(effects)
    same = np.arange(200)[:, None] // 4 == np.arange(200) // 4
    assert alike[same & ~np.eye(200, dtype=bool)].mean() == pytest.approx(0.8, abs=0.05)
    assert abs(alike[~same].mean()) < 0.02


def test_simulated_profiles_oracle_is_white_up_to_its_weights():
    cells = simulated_profiles(400, 40, n_features=20, n_controls=100, effect_size=1.0, position_effect=0.0)
    oracle = cells.X @ cells.uns["truth"]["oracle"].to_numpy()
    within = within_covariance(oracle, cells.obs["perturbation"].to_numpy())
    between = np.cov(pd.DataFrame(oracle).groupby(cells.obs["perturbation"].to_numpy()).mean().drop("control").T)
    ratio = np.diag(between) / np.diag(within)
    # the weight of an axis is the label's share of its variance
    np.testing.assert_allclose(np.sqrt(np.diag(within)), ratio / (ratio + 1), atol=0.1)
    assert np.abs(within - np.diag(np.diag(within))).max() < 0.3 * np.diag(within).max()


@pytest.mark.filterwarnings("ignore:.*one position")
@pytest.mark.parametrize("changed", [{}, {"interaction": 0.3}, {"one_layout": False}, {"active": 0.5}])
def test_simulated_profiles_oracle_retrieves_replicates_best(changed):
    """Scores on two plates, corrected for positions: features, PLDA fitted on five other plates, oracle."""
    wells = simulated_profiles(n_plates=7, effect_size=0.35, **changed)
    new = wells.obs["plate"].isin(["plate_6", "plate_7"]).to_numpy()
    y = wells.obs["perturbation"].to_numpy()
    keys: dict[str, Any] = {"y_key": "perturbation", "e_key": "plate", "control": "control", "position_key": "well"}
    embeddings = {
        "features": wells.X,
        "learned": plda(wells.X, y, fit=~new),
        "oracle": wells.X @ wells.uns["truth"]["oracle"].to_numpy(),
    }
    found = [replicate_retrieval(wells[new], x[new], **keys, n_permutations=10) for x in embeddings.values()]
    scores = [each.floor_corrected for each in found]
    assert scores[0] < scores[1] < scores[2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_plates": 0}, "n_plates=0: give a whole number, 1 or larger"),
        ({"plate_effect": -1.0}, "plate_effect=-1.0: give a number, 0 or larger"),
        ({"n_controls": -1}, "n_controls=-1: give a number, 0 or larger"),
        ({"active": 1.5}, "active=1.5: give a number from 0 to 1"),
        ({"n_plate_maps": 9}, "n_plate_maps=9: there are fewer plates"),
        ({"n_perturbations": 2000}, "2,032 wells do not fit on a plate of 1,536: ask for more plate maps"),
    ],
)
def test_simulated_profiles_invalid_number_raises(wrong, said):
    with pytest.raises(ValueError, match=said):
        simulated_profiles(**wrong)
