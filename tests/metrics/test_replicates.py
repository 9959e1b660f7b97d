from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import retrieval as naive

from scbd._linear_maps import LinearMap, covariance, mean_and_factor, whitening
from scbd._seen import mark_seen
from scbd.datasets import cpjump1
from scbd.metrics import replicate_retrieval

KEYS: dict[str, Any] = {"y_key": "y", "e_key": "e", "control": "DMSO"}


def make_wells(n_plates: int = 3, seed: int = 0, signal: float = 1.0, position: float = 0.0) -> AnnData:
    """Plates of one layout: six controls, four compounds, the last one at two positions."""
    rng = np.random.default_rng(seed)
    layout = ["DMSO"] * 6 + ["a", "b", "c", "d", "d"]
    obs = pd.DataFrame(
        [{"y": y, "e": f"plate {e}", "well": f"A{well}"} for e in range(n_plates) for well, y in enumerate(layout)],
        index=[str(i) for i in range(n_plates * len(layout))],
    )
    effect = pd.DataFrame(rng.normal(size=(5, 8)), index=["DMSO", "a", "b", "c", "d"])
    effect.loc["DMSO"] = 0
    place = pd.DataFrame(rng.normal(size=(11, 8)), index=obs["well"].unique())
    x = rng.normal(size=(len(obs), 8)) + signal * effect.loc[obs["y"]].to_numpy()
    return AnnData(obs=obs, obsm={"Z": x + position * place.loc[obs["well"]].to_numpy()})


@pytest.mark.filterwarnings("ignore:Every perturbation is at one position")
@given(st.integers(0, 100), st.integers(2, 4))
def test_all_scores_are_those_of_loops(seed, n_plates):
    wells = make_wells(n_plates, seed)
    rng = np.random.default_rng(seed)
    keep = np.sort(rng.permutation(wells.n_obs)[: wells.n_obs - 6])
    wells = wells[keep].copy()
    asked = rng.random(wells.n_obs) < 0.8
    x, (y, e, place) = wells.obsm["Z"], (wells.obs[key].to_numpy() for key in ("y", "e", "well"))
    queries = np.flatnonzero(asked & (y != "DMSO"))
    expected = naive.replicates(x, y, e, "DMSO", queries)
    assume(expected)
    floor = naive.floor(x, y, e, place, "DMSO", {e[query] for query in expected})
    found = replicate_retrieval(wells, "Z", **KEYS, position_key="well", queries=asked, n_permutations=10)
    across = naive.across_positions(x, y, e, place, "DMSO", queries)
    for table, scores in (
        (found.table, naive.per_label(expected, y)),
        (found.floor_table, naive.per_label(floor, place)),
        (found.cross_position_table, naive.per_label(across, y)),
    ):
        assert table.index.to_list() == list(scores)
        if len(scores):
            np.testing.assert_allclose(table["average_precision"], list(scores.values()), rtol=1e-12)


@given(st.integers(0, 100), st.floats(0.01, 100))
def test_neither_order_of_rows_nor_length_of_vectors_matters(seed, factor):
    wells = make_wells(seed=seed)
    rng = np.random.default_rng(seed)
    order = rng.permutation(wells.n_obs)
    shuffled = wells[order].copy()
    lengths = factor * rng.uniform(0.5, 2, (wells.n_obs, 1))
    one = replicate_retrieval(wells, "Z", **KEYS, position_key="well", n_permutations=50)
    two = replicate_retrieval(shuffled, shuffled.obsm["Z"] * lengths, **KEYS, position_key="well", n_permutations=50)
    for first, second in (
        (one.table, two.table),
        (one.floor_table, two.floor_table),
        (one.cross_position_table, two.cross_position_table),
    ):
        pd.testing.assert_frame_equal(first, second)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_point_scores_chance(value):
    """However rows are sorted: here by environment, and within it controls first."""
    wells = make_wells()
    found = replicate_retrieval(wells, np.full((wells.n_obs, 7), value, dtype=np.float32), **KEYS, position_key="well")
    for table in (found.table, found.floor_table, found.cross_position_table):
        np.testing.assert_allclose(table["average_precision"], table["chance"], rtol=1e-12)
    assert found.n_called == 0 and 0.1 < found.chance < 0.4


def test_position_alone_makes_a_score_and_a_floor():
    wells = make_wells(5, signal=0, position=5)
    found = replicate_retrieval(wells, "Z", **KEYS, position_key="well")
    assert found.mean_average_precision > 0.7 and found.floor > 0.9
    assert found.cross_position < 0.5 < 0.8 < (found.table["average_precision"]).loc["a"]
    signal = replicate_retrieval(make_wells(5, signal=5), "Z", **KEYS, position_key="well")
    assert signal.mean_average_precision > 0.95 and signal.floor < 0.5 and signal.cross_position > 0.9
    assert signal.floor_corrected > 0.9 and signal.n_called == 4
    assert np.mean(signal.floor_table["p_value"] < 0.05) < 0.5


def test_batches_of_other_layouts_tell_nothing():
    """Nothing was done to any well: wells of a batch are alike by what it adds, and so are its controls."""
    rng = np.random.default_rng(0)
    rows = []
    for plate in range(20):
        # each compound at two positions, by turns
        rows += [(f"k{i} of {plate // 4}", f"plate {plate}", f"P{i + 20 * (plate % 2)}") for i in range(20)]
        rows += [("DMSO", f"plate {plate}", f"C{i}") for i in range(6)]
    obs = pd.DataFrame(rows, columns=["y", "e", "well"], index=[str(i) for i in range(len(rows))])
    of_batch = np.repeat(2 * rng.normal(size=(5, 32)), 4 * 26, axis=0)
    adata = AnnData(obs=obs, obsm={"Z": rng.normal(size=(len(obs), 32)) + of_batch})
    found = replicate_retrieval(adata, "Z", **KEYS, position_key="well", n_permutations=2_000)
    assert len(found.table) == 100 and found.n_called < 5
    assert found.mean_average_precision == pytest.approx(found.chance, rel=0.15)
    assert found.cross_position < 1.15 * found.cross_position_chance
    assert set(found.table["n_negatives"]) == {3 * 6}


def test_what_a_query_ranks():
    """Numbers by hand: three plates of six controls, and of compounds one well each, or two."""
    found = replicate_retrieval(make_wells(), "Z", **KEYS, position_key="well", n_permutations=10)
    assert found.table["n_positives"].to_dict() == {"a": 2, "b": 2, "c": 2, "d": 4}
    assert set(found.table["n_negatives"]) == {12} and found.table["n_queries"].to_list() == [3, 3, 3, 6]
    floor = found.floor_table
    assert len(floor) == 6 and set(floor["n_positives"]) == {2} and set(floor["n_negatives"]) == {10}
    across = found.cross_position_table.loc["d"]
    assert len(found.cross_position_table) == 1 and (across["n_positives"], across["n_negatives"]) == (2, 9)


def test_queries_and_gallery():
    """Who is scored, and among whom: a mask or rows for the one, a part of the table for the other."""
    wells = make_wells(4)
    unseen = wells.obs["y"].isin(["b", "d"]).to_numpy()
    found = replicate_retrieval(wells, "Z", **KEYS, queries=unseen)
    assert found.table.index.to_list() == ["b", "d"] and found.table.loc["b", "n_positives"] == 3
    rows = replicate_retrieval(wells, "Z", **KEYS, queries=np.flatnonzero(unseen))
    pd.testing.assert_frame_equal(rows.table, found.table)
    everyone = replicate_retrieval(wells, "Z", **KEYS)
    assert found.table.loc["b", "average_precision"] == everyone.table.loc["b", "average_precision"]
    new_plates = wells[wells.obs["e"].isin(["plate 0", "plate 1"])].copy()
    assert replicate_retrieval(new_plates, "Z", **KEYS).table.loc["b", "n_positives"] == 1
    on_one = replicate_retrieval(wells, "Z", **KEYS, position_key="well", queries=(wells.obs["e"] == "plate 1"))
    assert set(on_one.table.loc[["a", "b", "c"], "n_queries"]) == {1} == set(on_one.floor_table["n_queries"])


def test_perturbations_in_one_environment_are_left_out_and_named():
    wells = make_wells()
    wells = wells[~((wells.obs["y"] == "c") & (wells.obs["e"] != "plate 1"))].copy()
    found = replicate_retrieval(wells, "Z", **KEYS, n_permutations=10)
    assert found.left_out == ("c",) and "c" not in found.table.index
    assert np.isnan(found.floor) and np.isnan(found.cross_position) and np.isnan(found.floor_corrected)


def test_several_controls_and_crossed_columns():
    wells = make_wells()
    one = replicate_retrieval(wells, "Z", **KEYS, position_key="well", n_permutations=10)
    wells.obs["y"] = np.where(np.arange(wells.n_obs) % 11 < 3, "empty", wells.obs["y"])
    wells.obs["row"] = wells.obs["well"].str[0]
    keys = {**KEYS, "control": ["DMSO", "empty"]}
    two = replicate_retrieval(wells, "Z", **keys, position_key=["row", "well"], n_permutations=10)
    pd.testing.assert_frame_equal(one.table, two.table)
    assert one.floor == two.floor and two.floor_table.index[0] == "A × A0"


def test_negatives_that_were_fitted_on_are_warned_of():
    wells = make_wells()
    controls = (wells.obs["y"] == "DMSO").to_numpy()
    with pytest.warns(UserWarning, match=r"Negatives were used in the fit: 18 of 18 controls.* half of the positions"):
        replicate_retrieval(wells, "Z", **KEYS, trained_on=controls, n_permutations=10)
    is_a = (wells.obs["y"] == "a").to_numpy()
    fitted = is_a | (controls & (np.arange(33) < 11))
    with pytest.warns(UserWarning, match="Negatives were used in the fit: 6 of 18 controls"):
        replicate_retrieval(wells, "Z", **KEYS, trained_on=fitted, queries=~is_a, n_permutations=10)


def test_an_encoder_that_was_trained_on_all_controls_is_no_transform(recwarn):
    """Held-out perturbations are scored against controls that are kept in the training, as the split advises."""
    wells = make_wells()
    trained = wells.obs["y"].isin(["DMSO", "a", "b"]).to_numpy()
    found = replicate_retrieval(wells, "Z", **KEYS, trained_on=trained, queries=~trained, n_permutations=10)
    assert found.table.index.tolist() == ["c", "d"] and not len(recwarn)


def test_perturbations_that_were_trained_on_are_warned_of():
    """Of them an embedding finds replicates that mean nothing, and no q value shows it."""
    wells = make_wells()
    rows = np.flatnonzero(wells.obs["y"] == "b")[:1]
    with pytest.warns(UserWarning, match=r"trained on 1 of 4 perturbations that are scored \(b\).*hold_out_pert"):
        replicate_retrieval(wells, "Z", **KEYS, trained_on=rows, n_permutations=10)
    others = np.flatnonzero(wells.obs["y"] != "b")
    found = replicate_retrieval(wells, "Z", **KEYS, trained_on=rows, queries=others, n_permutations=10)
    assert "b" not in found.table.index


def test_what_a_run_wrote_says_what_was_trained_on():
    wells = make_wells()
    wells.obsm["X_scbd_c"] = wells.obsm["Z"].astype(np.float32)
    mark_seen(wells.obs, wells.obs["y"].isin(["a", "DMSO"]).to_numpy(), wells.obsm["X_scbd_c"])
    with pytest.warns(UserWarning, match=r"trained on 1 of 4 perturbations that are scored \(a\)") as told:
        replicate_retrieval(wells, "X_scbd_c", **KEYS, n_permutations=10)
    assert len(told) == 1 and told[0].filename == __file__  # of controls it does not say which rows
    with pytest.warns(UserWarning, match="trained on 1 of 4 perturbations"):
        replicate_retrieval(wells, wells.obsm["X_scbd_c"], **KEYS, n_permutations=10)
    unseen = wells[~wells.obs["scbd_seen"] | (wells.obs["y"] == "DMSO")]
    replicate_retrieval(unseen, "X_scbd_c", **KEYS, n_permutations=10)
    no_a = (wells.obs["y"] != "a").to_numpy()
    replicate_retrieval(wells, "X_scbd_c", **KEYS, trained_on="scbd_seen", queries=no_a, n_permutations=10)
    # of a model that was trained later, it says nothing
    wells.obsm["X_scbd_c"] = -wells.obsm["X_scbd_c"]
    replicate_retrieval(wells, "X_scbd_c", **KEYS, n_permutations=10)


def test_one_position_a_perturbation_is_warned_of():
    wells = make_wells()
    wells = wells[wells.obs["well"] != "A10"].copy()
    with pytest.warns(UserWarning, match="Every perturbation is at one position: .* Look at the floor"):
        found = replicate_retrieval(wells, "Z", **KEYS, position_key="well", n_permutations=10)
    assert found.cross_position_table.empty
    replicate_retrieval(wells, "Z", **KEYS, n_permutations=10)


def test_the_result_speaks():
    found = replicate_retrieval(make_wells(5, signal=5), "Z", **KEYS, position_key="well", n_permutations=200)
    first, floor, corrected, across = repr(found).splitlines()
    assert first.startswith("ReplicateRetrieval of 4 perturbations: average precision ")
    assert "floor of 6 positions of controls" in floor and corrected.startswith("  floor-corrected: ")
    assert "across positions of 1 perturbations" in across
    scores = found.scores()
    assert scores["mean_average_precision"] == found.table["average_precision"].mean()
    assert scores["cross_position_chance"] == found.cross_position_chance
    assert scores["floor_corrected"] == pytest.approx(
        (scores["mean_average_precision"] - scores["floor"]) / (1 - scores["floor"])
    )
    assert set(scores) == {
        *("mean_average_precision", "chance", "n_called", "floor", "floor_corrected", "n_floor_called"),
        *("cross_position", "cross_position_chance"),
    }


def test_bad_input_gets_a_sentence():
    wells = make_wells()
    with pytest.raises(KeyError, match=r"obsm has no 'X' \(its keys: Z\)"):
        replicate_retrieval(wells, "X", **KEYS)
    with pytest.raises(KeyError, match="obs has no 'plate'"):
        replicate_retrieval(wells, "Z", **{**KEYS, "e_key": "plate"})
    with pytest.raises(ValueError, match=r"No row has the control 'water' in 'y' \(it holds DMSO, a, b, c, d\)"):
        replicate_retrieval(wells, "Z", **{**KEYS, "control": "water"})
    with pytest.raises(ValueError, match="No row has the control '7' in 'y'"):
        replicate_retrieval(wells, "Z", **{**KEYS, "control": 7})
    with pytest.raises(ValueError, match=r"rep has the shape \(3, 8\): give one row for each of the 33 rows"):
        replicate_retrieval(wells, wells.obsm["Z"][:3], **KEYS)
    with pytest.raises(ValueError, match="queries is float64 of shape .* give a mask of the 33 rows, or row numbers"):
        replicate_retrieval(wells, "Z", **KEYS, queries=np.ones(33))
    with pytest.raises(ValueError, match="trained_on is int64 .* row numbers from 0 to 32"):
        replicate_retrieval(wells, "Z", **KEYS, trained_on=[33])
    with pytest.raises(ValueError, match="n_permutations=0: give"):
        replicate_retrieval(wells, "Z", **KEYS, n_permutations=0)
    one = wells[wells.obs["e"] == "plate 0"].copy()
    with pytest.raises(ValueError, match="None of 5 wells has both a replicate and controls in another environment"):
        replicate_retrieval(one, "Z", **KEYS)
    wells.obsm["Z"][4] = np.nan
    with pytest.raises(ValueError, match="rep has NaN or infinite values in 1 of 33 rows"):
        replicate_retrieval(wells, "Z", **KEYS)


@pytest.fixture(scope="module")
def cpjump() -> AnnData:
    from conftest import SHARED

    path = SHARED / "profiles" / "cpjump1_cellprofiler_wells.parquet"
    if not path.is_file():
        pytest.skip("the real wells are not here: no ../shared/data/profiles beside the checkout")
    wells = cpjump1(path)
    wells.X = np.clip(wells.X, -20, 20)
    return wells


COMPOUNDS: dict[str, Any] = {"y_key": "Metadata_broad_sample", "e_key": "Metadata_Plate", "control": "DMSO"}


def standardised(wells: AnnData, rows: np.ndarray) -> np.ndarray:
    """By plate, on some of its wells."""
    x = np.array(wells.X)
    for plate in wells.obs["Metadata_Plate"].unique():
        of_plate = (wells.obs["Metadata_Plate"] == plate).to_numpy()
        mean, factor = mean_and_factor(x[of_plate & rows])
        x[of_plate] = (x[of_plate] - mean) * factor
    return x


def test_known_answers_of_real_wells(cpjump):
    """Computed elsewhere, by other code."""
    controls = (cpjump.obs["Metadata_broad_sample"] == "DMSO").to_numpy()
    mean = cpjump.X[controls].mean(0, dtype=np.float64)
    # in the directions in which controls vary
    sphere = whitening(covariance(cpjump.X[controls]), 1.0)[:, : controls.sum() - 1]
    sphered = LinearMap(sphere, -mean @ sphere)(cpjump.X)
    for x, expected in (
        (cpjump.X, 0.5579),
        (standardised(cpjump, controls), 0.5509),
        (standardised(cpjump, np.ones(len(controls), dtype=bool)), 0.5213),
        (sphered, 0.6151),
    ):
        found = replicate_retrieval(cpjump, x, **COMPOUNDS, n_permutations=100)
        assert found.mean_average_precision == pytest.approx(expected, abs=6e-5)
        assert len(found.table) == 306 and not found.left_out


def test_the_floor_of_real_wells(cpjump):
    """Controls of a position find each other far above chance, from raw features."""
    found = replicate_retrieval(cpjump, cpjump.X, **COMPOUNDS, position_key="Metadata_Well")
    assert len(found.floor_table) == 64
    assert 0.2 < found.floor < 0.32 and found.floor_table["chance"].mean() < 0.06
    assert len(found.cross_position_table) == 14 and 0.3 < found.cross_position < 0.7
    assert found.cross_position_chance < 0.01


def test_the_same_as_a_peer(cpjump):
    copairs = pytest.importorskip("copairs.map")
    meta = cpjump.obs.astype(str).assign(is_control=cpjump.obs["Metadata_broad_sample"] == "DMSO")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = copairs.average_precision(
            meta,
            cpjump.X.astype(np.float64),
            pos_sameby=["Metadata_broad_sample"],
            pos_diffby=["Metadata_Plate"],
            neg_sameby=[],
            neg_diffby=["is_control", "Metadata_Plate"],
        )
    expected = peer[~peer["is_control"]].groupby("Metadata_broad_sample")["average_precision"].mean()
    found = replicate_retrieval(cpjump, cpjump.X, **COMPOUNDS, n_permutations=10).table["average_precision"]
    np.testing.assert_allclose(found, expected.loc[found.index], rtol=0, atol=1e-6)
