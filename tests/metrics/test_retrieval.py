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

from scbd.corrections import standardize_by_environment
from scbd.datasets import cpjump1
from scbd.metrics import replicate_retrieval, retrieval
from scbd.metrics._retrieval import MIN_NEGATIVES_IN_ENVIRONMENTS

# perturbations of one mechanism

LABELS = ["kinase", "kinase|GPCR", "GPCR", "channel", "channel | kinase", "", None, "alone"]
HOW: dict[str, Any] = {"label_key": "moa", "y_key": "y", "control": "DMSO", "n_permutations": 10}


def make_profiles(seed: int = 0, n_wells: int = 3, signal: float = 0.0) -> AnnData:
    """Make controls and eight perturbations with no, one or two mechanisms each."""
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(len(LABELS))] + ["DMSO"]
    mechanism = pd.Series([*LABELS, "vehicle"], index=names)
    obs = pd.DataFrame({"y": np.tile(names, n_wells)}, index=[str(i) for i in range(n_wells * len(names))])
    obs["moa"] = mechanism.loc[obs["y"]].to_numpy()
    effect = rng.normal(size=(4, 6))
    kinds = ["kinase", "GPCR", "channel", "alone"]
    mean = [sum((effect[k] for k, kind in enumerate(kinds) if kind in str(moa)), np.zeros(6)) for moa in obs["moa"]]
    return AnnData(obs=obs, obsm={"Z": rng.normal(size=(len(obs), 6)) + signal * np.array(mean)})


@given(st.integers(0, 200))
def test_retrieval_random_profiles_are_equal_to_naive(seed):
    wells = make_profiles(seed)
    consensus = pd.DataFrame(wells.obsm["Z"]).groupby(wells.obs["y"].to_numpy()).mean().drop("DMSO")
    labels = [{part.strip() for part in (label or "").split("|")} - {""} for label in LABELS]
    expected = naive.related(consensus.to_numpy(), labels)
    found = retrieval(wells, "Z", **HOW)
    assert found.table.index.to_list() == [f"p{i}" for i in expected]
    np.testing.assert_allclose(found.table["average_precision"], list(expected.values()), rtol=1e-12)
    assert found.left_out == ("p5", "p6", "p7")  # p5 and p6 have no label, p7 has no partner


@pytest.mark.parametrize("separator", ["|", ";"])
def test_retrieval_separator_returns_known_counts(separator):
    wells = make_profiles()
    wells.obs["moa"] = wells.obs["moa"].str.replace("|", separator)
    found = retrieval(wells, "Z", **HOW, separator=separator)
    assert found.table["n_positives"].to_list() == [2, 3, 1, 1, 3]
    assert found.table["n_negatives"].to_list() == [3, 2, 4, 4, 2]
    assert set(found.table["n_queries"]) == {1}


def test_retrieval_perturbations_linked_by_labels_are_one_unit():
    found = retrieval(make_profiles(), "Z", **HOW)
    units = pd.Series(found.units, index=found.table.index)
    assert (
        units[["p0", "p1", "p4"]].nunique() == 1 and len(units) == 5
    )  # kinase inhibitors, and perturbations that share a label with them
    apart = AnnData(obs=pd.DataFrame({"moa": [*"aabbb", "", "c"]}, index=[*"tuvwxyz"]), obsm={"Z": np.eye(7)})
    units = retrieval(apart, "Z", label_key="moa", n_permutations=10).units
    assert units is not None and pd.factorize(units)[0].tolist() == [0, 0, 1, 1, 1]


def test_retrieval_strong_signal_is_found_and_point_is_at_chance():
    found = retrieval(make_profiles(signal=50), "Z", **HOW)
    assert found.mean_average_precision > 0.85 > 0.7 > found.chance
    assert repr(found).startswith("Retrieval of 5 perturbations: average precision 0.")
    assert set(found.scores()) == {"mean_average_precision", "chance", "n_called"}
    wells = make_profiles()
    point = retrieval(wells, np.ones((wells.n_obs, 3)), **HOW).table
    np.testing.assert_allclose(point["average_precision"], point["chance"], rtol=1e-12)


def test_retrieval_queries_select_perturbations_of_their_rows():
    wells = make_profiles()
    everyone = retrieval(wells, "Z", **HOW).table
    found = retrieval(wells, "Z", **HOW, queries=[0, 6])
    pd.testing.assert_frame_equal(found.table.drop(columns="q_value"), everyone.loc[["p0"]].drop(columns="q_value"))
    assert found.left_out == ("p6",)


def test_retrieval_without_y_key_rows_are_profiles():
    """This also holds if names of rows repeat, as in concatenated plates."""
    wells = make_profiles(n_wells=1)
    by_name = retrieval(wells, "Z", **HOW)
    rows = wells[:-1].copy()
    by_row = retrieval(rows, "Z", label_key="moa", n_permutations=10)
    assert by_row.table.index.to_list() == ["0", "1", "2", "3", "4"]
    rows.obs_names = ["0", "0", "1", "1", "2", *map(str, range(3, rows.n_obs - 2))]
    for found in (by_row, retrieval(rows, "Z", label_key="moa", n_permutations=10)):
        np.testing.assert_array_equal(found.table, by_name.table)


@pytest.mark.parametrize("control", [0, [0], "0", np.int64(0)])
def test_retrieval_numeric_control_is_equal_to_text(control):
    wells = make_profiles()
    expected = retrieval(wells, "Z", **HOW).table
    wells.obs["y"] = wells.obs["y"].map({"DMSO": 0} | {f"p{i}": i + 1 for i in range(9)}).astype(int)
    np.testing.assert_array_equal(retrieval(wells, "Z", **HOW | {"control": control}).table, expected)


def test_retrieval_rows_with_different_labels_are_united():
    wells = make_profiles()
    wells.obs["moa"] = wells.obs["moa"].astype("category")
    first = wells.obs["y"].duplicated().to_numpy()
    wells.obs.loc[first & (wells.obs["y"] == "p1").to_numpy(), "moa"] = "GPCR"
    assert retrieval(wells, "Z", **HOW).table.loc["p1", "n_positives"] == 3  # the labels of all its rows


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ({"label_key": "target"}, KeyError, "target"),
        ({"label_key": "y"}, ValueError, "share a label.*8 of 8"),
        ({"label_key": "one", "control": None}, ValueError, "share a label"),
        ({"control": "dmso"}, ValueError, "dmso"),
        ({"y_key": None}, ValueError, "y_key"),
    ],
)
def test_retrieval_invalid_arguments_raise(how, error, named):
    wells = make_profiles()
    wells.obs["one"] = "all the same"
    with pytest.raises(error, match=named):
        retrieval(wells, "Z", **HOW | how)


# replicates

KEYS: dict[str, Any] = {"y_key": "y", "e_key": "e", "control": "DMSO", "n_permutations": 10}


def make_wells(n_plates: int = 3, seed: int = 0, signal: float = 1.0, position: float = 0.0) -> AnnData:
    """Make plates of one layout: six controls and four compounds, the last one at two positions."""
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


@given(st.integers(0, 100), st.integers(2, 4))
def test_replicate_retrieval_random_wells_are_equal_to_naive(seed, n_plates):
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
    found = replicate_retrieval(wells, "Z", **KEYS, position_key="well", queries=asked)
    across = naive.across_positions(x, y, e, place, "DMSO", queries)
    for table, scores in (
        (found.table, naive.per_label(expected, y)),
        (found.floor_table, naive.per_label(floor, place)),
        (found.cross_position_table, naive.per_label(across, y)),
    ):
        assert table.index.to_list() == list(scores)
        if len(scores):
            np.testing.assert_allclose(table["average_precision"], list(scores.values()), rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("control", [None, "DMSO"])
@pytest.mark.parametrize("n", [30, 90])
def test_replicate_retrieval_against_perturbations_equals_loops(n, control, seed):
    """Batches have different layouts, so scores depend on which environments negatives come from."""
    rng = np.random.default_rng(seed)
    y = rng.choice(["DMSO", "a", "b", "c", "d", "f"], size=n)
    e = np.where(np.isin(y, ["a", "b"]), rng.integers(0, 3, n), rng.integers(2, 6, n)).astype(str)
    wells = AnnData(
        obs=pd.DataFrame({"y": y, "e": e}, index=np.arange(n).astype(str)), obsm={"Z": rng.normal(size=(n, 5))}
    )
    found = replicate_retrieval(wells, "Z", y_key="y", e_key="e", control=control, against="perturbations")
    queries = np.flatnonzero(y != control)
    n_others = [np.sum((y != y[q]) & (y != control) & np.isin(e, e[y == y[q]])) for q in queries]
    expected = naive.against_perturbations(
        wells.obsm["Z"], y, e, control, queries, everywhere=np.median(n_others) < MIN_NEGATIVES_IN_ENVIRONMENTS
    )
    scores = naive.per_label(expected, y)
    assert found.table.index.to_list() == list(scores) and not len(found.floor_table)
    np.testing.assert_allclose(found.table["average_precision"], list(scores.values()), rtol=1e-12)


def test_replicate_retrieval_against_perturbations_plate_effect_is_worse():
    wells = make_wells(4, signal=1)
    kept = wells.obsm["Z"] + 9 * np.random.default_rng(0).normal(size=(4, 8))[pd.factorize(wells.obs["e"])[0]]
    one, two = (replicate_retrieval(wells, z, **KEYS, against="perturbations") for z in (wells.obsm["Z"], kept))
    assert two.mean_average_precision < one.mean_average_precision - 0.1


def test_replicate_retrieval_control_none_raises():
    with pytest.raises(ValueError, match="against='perturbations'"):
        replicate_retrieval(make_wells(), "Z", **(KEYS | {"control": None}))


@given(st.integers(0, 100), st.floats(0.01, 100))
def test_replicate_retrieval_row_order_and_length_change_nothing(seed, factor):
    wells = make_wells(seed=seed)
    rng = np.random.default_rng(seed)
    shuffled = wells[rng.permutation(wells.n_obs)].copy()
    lengths = factor * rng.uniform(0.5, 2, (wells.n_obs, 1))
    one = replicate_retrieval(wells, "Z", **KEYS, position_key="well")
    two = replicate_retrieval(shuffled, shuffled.obsm["Z"] * lengths, **KEYS, position_key="well")
    for name in ("table", "floor_table", "cross_position_table"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_replicate_retrieval_point_is_at_chance(value):
    """The order of rows does not matter; here they are sorted by environment, controls first."""
    wells = make_wells()
    found = replicate_retrieval(wells, np.full((wells.n_obs, 7), value, dtype=np.float32), **KEYS, position_key="well")
    for table in (found.table, found.floor_table, found.cross_position_table):
        np.testing.assert_allclose(table["average_precision"], table["chance"], rtol=1e-12)
    assert found.n_called == 0 and 0.1 < found.chance < 0.4


def test_replicate_retrieval_position_effect_raises_score_and_floor():
    how = KEYS | {"position_key": "well", "n_permutations": 1_000}
    found = replicate_retrieval(make_wells(5, signal=0, position=5), "Z", **how)
    assert found.mean_average_precision > 0.7 and found.floor > 0.9
    assert found.cross_position < 0.5 < 0.8 < found.table["average_precision"].loc["a"]
    signal = replicate_retrieval(make_wells(5, signal=5), "Z", **how)
    assert signal.mean_average_precision > 0.95 and signal.floor < 0.5 and signal.cross_position > 0.9
    assert signal.floor_corrected > 0.9 and signal.n_called == 4


def test_replicate_retrieval_batch_effect_alone_is_at_chance():
    """No well has an effect of its own: wells and controls of a batch are similar through the batch effect only."""
    rng = np.random.default_rng(0)
    rows = []
    for plate in range(20):
        # each compound alternates between two positions
        rows += [(f"k{i} of {plate // 4}", f"plate {plate}", f"P{i + 20 * (plate % 2)}") for i in range(20)]
        rows += [("DMSO", f"plate {plate}", f"C{i}") for i in range(6)]
    obs = pd.DataFrame(rows, columns=["y", "e", "well"], index=[str(i) for i in range(len(rows))])
    of_batch = np.repeat(2 * rng.normal(size=(5, 32)), 4 * 26, axis=0)
    adata = AnnData(obs=obs, obsm={"Z": rng.normal(size=(len(obs), 32)) + of_batch})
    found = replicate_retrieval(adata, "Z", **KEYS | {"n_permutations": 2_000}, position_key="well")
    assert len(found.table) == 100 and found.n_called < 5
    assert found.mean_average_precision == pytest.approx(found.chance, rel=0.15)
    assert found.cross_position < 1.15 * found.cross_position_chance
    assert set(found.table["n_negatives"]) == {3 * 6}


def test_replicate_retrieval_plates_return_known_counts():
    """Counts by hand, for three plates with six controls and one or two wells per compound."""
    found = replicate_retrieval(make_wells(), "Z", **KEYS, position_key="well")
    assert found.table["n_positives"].to_dict() == {"a": 2, "b": 2, "c": 2, "d": 4}
    assert set(found.table["n_negatives"]) == {12} and found.table["n_queries"].to_list() == [3, 3, 3, 6]
    floor = found.floor_table
    assert len(floor) == 6 and set(floor["n_positives"]) == {2} and set(floor["n_negatives"]) == {10}
    across = found.cross_position_table.loc["d"]
    assert len(found.cross_position_table) == 1 and (across["n_positives"], across["n_negatives"]) == (2, 9)


def test_replicate_retrieval_queries_and_subset_of_rows_are_used():
    """A mask or row numbers select the scored rows; a subset of the table limits the rows they are ranked among."""
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


def test_replicate_retrieval_perturbation_on_one_plate_is_left_out():
    wells = make_wells()
    wells = wells[~((wells.obs["y"] == "c") & (wells.obs["e"] != "plate 1"))].copy()
    found = replicate_retrieval(wells, "Z", **KEYS)
    assert found.left_out == ("c",) and "c" not in found.table.index
    assert np.isnan([found.floor, found.floor_corrected, found.cross_position, found.cross_position_chance]).all()


def test_replicate_retrieval_several_controls_and_columns_are_crossed():
    wells = make_wells()
    one = replicate_retrieval(wells, "Z", **KEYS, position_key="well")
    wells.obs["y"] = np.where(np.arange(wells.n_obs) % 11 < 3, "empty", wells.obs["y"])
    wells.obs["row"] = wells.obs["well"].str[0]
    two = replicate_retrieval(wells, "Z", **KEYS | {"control": ["DMSO", "empty"]}, position_key=["row", "well"])
    pd.testing.assert_frame_equal(one.table, two.table)
    assert one.floor == two.floor and two.floor_table.index[0] == "A × A0"


@pytest.mark.parametrize("of_others", [False, True], ids=["all controls alone", "some controls"])
def test_replicate_retrieval_trained_on_negatives_warns(of_others):
    wells = make_wells()
    y = wells.obs["y"].to_numpy()
    fitted = (y == "a") | ((y == "DMSO") & (np.arange(33) < 11)) if of_others else y == "DMSO"
    with pytest.warns(UserWarning, match=f"Negatives were used in the fit: {6 if of_others else 18} of 18"):
        replicate_retrieval(wells, "Z", **KEYS, trained_on=fitted, queries=y != "a")


def test_replicate_retrieval_held_out_queries_no_warning():
    """Held-out perturbations are scored against controls used in training, as the split recommends."""
    wells = make_wells()
    trained = wells.obs["y"].isin(["DMSO", "a", "b"]).to_numpy()
    found = replicate_retrieval(wells, "Z", **KEYS, trained_on=trained, queries=~trained)
    assert found.table.index.tolist() == ["c", "d"]


def test_replicate_retrieval_trained_on_queries_warns():
    """Replicates of training perturbations are retrieved even without an effect, which q values do not reveal."""
    wells = make_wells()
    rows = np.flatnonzero(wells.obs["y"] == "b")[:1]
    with pytest.warns(UserWarning, match=r"trained on 1 of 4 perturbations that are scored \(b\)") as told:
        replicate_retrieval(wells, "Z", **KEYS, trained_on=rows)
    assert [warning.filename for warning in told] == [__file__]
    others = np.flatnonzero(wells.obs["y"] != "b")
    found = replicate_retrieval(wells, "Z", **KEYS, trained_on=rows, queries=others)
    assert "b" not in found.table.index


def test_replicate_retrieval_repr_and_scores_return_summary():
    found = replicate_retrieval(make_wells(5, signal=5), "Z", **KEYS, position_key="well")
    first, floor, corrected, across = repr(found).splitlines()
    assert "4 perturbations" in first and "6 positions" in floor
    assert f"{found.floor_corrected:.3f}" in corrected and "1 perturbations" in across
    scores = found.scores()
    assert scores["mean_average_precision"] == found.table["average_precision"].mean()
    assert scores["floor_corrected"] == pytest.approx(
        (scores["mean_average_precision"] - scores["floor"]) / (1 - scores["floor"])
    )
    assert set(scores) == {
        *("mean_average_precision", "chance", "n_called", "floor", "floor_corrected", "n_floor_called"),
        *("cross_position", "cross_position_chance"),
    }


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ({"rep": "X"}, KeyError, "'X'"),
        ({"rep": np.ones((3, 8))}, ValueError, r"\(3, 8\).*33 rows"),
        ({"rep": np.full((33, 2), np.nan)}, ValueError, "NaN.*33 of 33"),
        ({"e_key": "plate"}, KeyError, "'plate'"),
        ({"e_key": "one"}, ValueError, "another environment of 'one'"),
        ({"control": 7}, ValueError, "'7'"),
        ({"queries": np.ones(33)}, ValueError, "queries is float64"),
        ({"trained_on": [33]}, ValueError, "trained_on has the row numbers"),
        ({"n_permutations": 0}, ValueError, "n_permutations=0"),
    ],
)
def test_replicate_retrieval_invalid_arguments_raise(how, error, named):
    wells = make_wells()
    wells.obs["one"] = "plate"
    with pytest.raises(error, match=named):
        replicate_retrieval(wells, **{"rep": "Z"} | KEYS | how)


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


def test_replicate_retrieval_real_wells_are_equal_to_known(cpjump):
    """Known values come from independent code: raw features, and features standardised by each plate's controls."""
    plates = cpjump.obs["Metadata_Plate"].to_numpy()
    controls = (cpjump.obs["Metadata_broad_sample"] == "DMSO").to_numpy()
    scaled = standardize_by_environment(cpjump.X, plates, controls=controls)
    for x, expected in ((cpjump.X, 0.5579), (scaled, 0.5509)):
        found = replicate_retrieval(cpjump, x, **COMPOUNDS, n_permutations=100)
        assert found.mean_average_precision == pytest.approx(expected, abs=6e-5)
        assert len(found.table) == 306 and not found.left_out


def test_replicate_retrieval_real_wells_floor_is_above_chance(cpjump):
    """With raw features, controls at the same position retrieve each other far above chance."""
    found = replicate_retrieval(cpjump, cpjump.X, **COMPOUNDS, position_key="Metadata_Well", n_permutations=100)
    assert len(found.floor_table) == 64
    assert 0.2 < found.floor < 0.32 and found.floor_table["chance"].mean() < 0.06
    assert len(found.cross_position_table) == 14 and 0.3 < found.cross_position < 0.7
    assert found.cross_position_chance < 0.01


def test_replicate_retrieval_real_wells_are_equal_to_copairs(cpjump):
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
