"""Environments and controls of a table; and whether y and e can be told apart there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_cells, make_wells
from helpers.small_models import QUICK
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

import scbd
from scbd import SCBDModel
from scbd._shared.labels import warn_if_labels_are_similar
from scbd.baselines import ERMModel
from scbd.datasets import simulated_profiles
from scbd.model._design import (
    ExperimentalDesign,
    check_design,
    resolvable_fraction,
)

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=2, max_size=40)


def said(
    obs: pd.DataFrame,
    e_key: Any = "plate",
    e_columns: Any = None,
    controls: Iterable[str] = (),
) -> list[str]:
    """What is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_design(ExperimentalDesign.of(obs, "gene", e_key, e_columns, controls or None))
    return [str(warning.message) for warning in caught]


def following(share: float, n_y: int, n_e: int) -> tuple[np.ndarray, np.ndarray]:
    """So many of the cells are where a rule puts them, the finer label in one of the coarser; others anywhere."""
    rng = np.random.default_rng(0)
    fine, rule = rng.integers(max(n_y, n_e), size=20_000), rng.random(20_000) < share
    coarse = np.where(rule, fine % min(n_y, n_e), rng.integers(min(n_y, n_e), size=20_000))
    return (fine, coarse) if n_y >= n_e else (coarse, fine)


@given(PAIRS)
def test_resolvable_fraction_equals_trace_formula(cells):
    y, e = (np.unique(column, return_inverse=True)[1] for column in np.array(cells).T)
    if max(y) < max(e):
        y, e = e, y
    of_y, of_e = np.eye(max(y) + 1)[y], np.eye(max(e) + 1)[e]
    apart = np.eye(len(y)) - of_y @ np.linalg.pinv(of_y)
    seen = np.trace(apart @ of_e @ np.linalg.pinv(of_e) @ apart)
    expected = seen / max(e) if max(e) else 0
    assert resolvable_fraction(y, e) == pytest.approx(expected, abs=1e-9)
    assert resolvable_fraction(e, y) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("n_cells", [(40, 4), (10, 10), (2, 76)])
def test_resolvable_fraction_falls_with_square_of_fixed_rule(n_cells):
    for share in (0, 0.5, 0.9, 0.95, 1):
        assert resolvable_fraction(*following(share, *n_cells)) == pytest.approx(1 - share**2, abs=0.04)
    assert resolvable_fraction(np.arange(72), np.repeat(np.arange(4), 18)) == 0  # rounding leaves no less than nothing


@pytest.mark.parametrize(
    ("obs", "warned"),
    [
        ({"gene": [0, 1, 2, 3] * 10, "plate": [0, 1] * 20}, True),
        ({"gene": np.arange(600) % 30, "plate": np.arange(600) // 30 % 4}, False),
        # one of thirty in one environment
        ({"gene": np.arange(600) % 30, "plate": np.arange(600) // 30 % 4 * (np.arange(600) % 30 > 0)}, False),
        *((dict(zip(("gene", "plate"), following(0.95, *n), strict=True)), True) for n in ((40, 4), (2, 76))),
        *((dict(zip(("gene", "plate"), following(0.8, *n), strict=True)), False) for n in ((40, 4), (2, 76))),
    ],
    ids=["a rule", "balanced", "one of many", "nearly, of few", "nearly, of many", "half, of few", "half, of many"],
)
def test_check_design_confounded_labels_warns(obs, warned):
    found = said(pd.DataFrame(obs).astype(str))
    assert len(found) == warned and all("y and e are confounded (plate)" in text for text in found)


@pytest.mark.parametrize(
    ("without", "control", "remedy"),
    [
        ("", "control", "Only controls link .*plate_[1-4] has the fewest, 80 rows.*predicts plate can be high"),
        ("all but one on plate_2", "control", r"plate_2 has the fewest, 1 row\)"),
        ("", None, r"lies in several environments .*\(control\).*name them"),
        ("control on plate_3", "control", r"without controls: plate_3\)"),
        ("control on every plate", None, "cannot be compared"),
    ],
)
def test_check_design_one_plate_per_perturbation_names_links(without, control, remedy):
    obs = simulated_profiles(20, 4, cells_per_well=10, n_controls=8, n_features=4, n_plate_maps=4).obs
    few = {"": [], "all but one on plate_2": ["plate_2"], "control on plate_3": ["plate_3"]}
    gone = few.get(without, obs["plate"].unique())
    lost = (obs["perturbation"] == "control") & obs["plate"].isin(gone)
    if without == "all but one on plate_2":
        lost[lost.idxmax()] = False
    obs = obs[~lost].rename(columns={"perturbation": "gene"})
    found = said(obs, controls=[] if control is None else [control])
    assert len(found) == 1 and re.search(remedy, found[0])


def test_check_design_perturbation_next_to_controls_in_all_environments_is_named_as_link():
    obs = simulated_profiles(20, 4, cells_per_well=10, n_controls=8, n_features=4, n_plate_maps=4).obs
    obs = obs.rename(columns={"perturbation": "gene"})
    rows = obs[obs["gene"] == "control"].groupby("plate", observed=True).head(5)
    obs = pd.concat([obs, rows.assign(gene="taxol")]).astype(str)
    (found,) = said(obs, controls=["control"])
    assert "Only controls and taxol link" in found


def test_check_design_perturbation_filling_environment_advises_coarser_e_key():
    obs = pd.DataFrame({"gene": ["wild type", "mutant"] * 20, "plate": ["day 1", "day 2"] * 20})
    assert "coarser e_key" in said(obs)[0] and said(obs) == said(obs, controls=["wild type"])
    assert not said(obs.assign(plate=["day 1"] * 20 + ["day 2"] * 20))


def test_check_design_separate_columns_are_checked_one_by_one():
    """Each position has another compound on each plate, and each plate all compounds; their cross has one each."""
    wells = simulated_profiles(64, 12, n_features=4, one_layout=False).obs.rename(columns={"perturbation": "gene"})
    both = ["plate", "well"]
    assert not said(wells, both, e_columns="side_by_side")
    assert "1,152 of 1,152 environments" in said(wells, both, e_columns="crossed")[0]
    same = simulated_profiles(64, 12, n_features=4).obs.rename(columns={"perturbation": "gene"})
    assert ["(well)" in text for text in said(same, both, e_columns="side_by_side")] == [True]


def test_check_design_column_with_one_value_advises_to_leave_it_out():
    obs = pd.DataFrame({"gene": list("ab") * 20, "plate": "P1", "well": ["A1"] * 20 + ["A2"] * 20})
    (found,) = said(obs, ["plate", "well"], e_columns="side_by_side")
    assert "'plate' of e_key has a single value" in found and "confounded" not in found


def test_check_design_quantity_as_environment_warns():
    gene, within = np.repeat([0, 1], 40), np.tile(np.arange(40.0), 2)
    obs = pd.DataFrame({"gene": gene.astype(str), "plate": (within % 2).astype(str)})
    assert any("e_key='time'" in text and "numbers" in text for text in said(obs.assign(time=within * 7.3), "time"))
    assert not said(obs.assign(day=within % 3 + 0.5), "day")  # names that are numbers


def bright_days() -> AnnData:
    """Every other cell was photographed on a brighter day that nobody wrote down."""
    cells = make_cells()
    images = cells.obsm["single_cell_images"].astype(int)
    cells.obs["day"] = [f"day_{i % 2}" for i in range(cells.n_obs)]
    images[1::2, 1] += 100
    cells.obsm["single_cell_images"] = np.clip(images, 0, 255).astype("uint8")
    return cells


def test_setup_infer_environments_writes_inferred_column():
    cells = bright_days()
    SCBDModel.setup_anndata(cells, y_key="gene", infer_environments=2)
    assert adjusted_rand_score(cells.obs["day"], cells.obs["inferred_environment"]) == 1
    model = SCBDModel(cells, encoder="small", n_latent=6)
    assert model.registry_["setup_args"]["e_key"] == "inferred_environment"
    model.train(**QUICK)
    new = make_cells(12, seed=3)
    assert model.get_latent_representation(new).shape == (12, 6) and "inferred_environment" not in new.obs
    model.adata = new
    with pytest.raises(KeyError, match="inferred_environment"):
        model.train(max_steps=1)


def test_setup_infer_environments_adds_to_recorded_e_key():
    cells = bright_days()
    for _ in range(2):  # setting up again does not take the inferred for known ones
        SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", infer_environments=2)
        assert adjusted_rand_score(cells.obs["day"], cells.obs["inferred_environment"]) == 1
        model = SCBDModel(cells, encoder="small", n_latent=6)
        assert model.registry_["setup_args"]["e_key"] == ["well", "inferred_environment"]
        assert model.module.covariates is not None and model.module.covariates.shape[1] == 2
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well", infer_environments=2)
    assert ERMModel(cells, encoder="small").registry_["setup_args"]["e_columns"] == "crossed"


@pytest.mark.parametrize("several", [["DMSO"], ["DMSO", "compound_0"]])
def test_control_mask_of_any_table_marks_controls(several):
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", control=several, layer="X")
    model = SCBDModel(wells)
    for table in (wells, wells[wells.obs["compound"] != "compound_0"]):
        np.testing.assert_array_equal(model._control_mask(table), table.obs["compound"].isin(several))
    assert model._control_mask(AnnData(obs=wells.obs[["plate"]])) is None


def test_control_given_as_number_is_matched():
    wells = make_wells()
    wells.obs["compound"] = wells.obs["compound"].cat.codes.astype(int)
    for control in (0, "0"):
        SCBDModel.setup_anndata(wells, "compound", "plate", control=control)
        np.testing.assert_array_equal(SCBDModel(wells)._control_mask(wells), wells.obs["compound"] == 0)


@pytest.mark.parametrize(
    ("system", "keys", "error", "named"),
    [
        (SCBDModel, {"e_key": None}, ValueError, "e_key=None"),
        (SCBDModel, {"infer_environments": 1}, ValueError, "n_environments=1"),
        (SCBDModel, {"e_key": ["plate", "well"], "e_columns": "both"}, ValueError, "e_columns='both'"),
        (ERMModel, {"e_key": ["plate", "well"], "e_columns": "side_by_side"}, ValueError, "ERMModel"),
        (SCBDModel, {"e_key": []}, ValueError, "empty"),
        (SCBDModel, {"e_key": ["well", "well"]}, ValueError, "e_key=.* names a column twice"),
        (SCBDModel, {"y_key": ["gene", "gene"]}, ValueError, "y_key=.* names a column twice"),
        (SCBDModel, {"e_key": 3}, TypeError, "got 3"),
        (SCBDModel, {"e_key": "one"}, ValueError, "one"),
        (SCBDModel, {"control": "Gene_0"}, ValueError, "Did you mean 'gene_0'"),
        (SCBDModel, {"control": ["gene_0", "EMPTY"]}, ValueError, "EMPTY"),
        (SCBDModel, {"control": float("nan")}, ValueError, "control=nan"),
        (SCBDModel, {"position_key": "wells"}, KeyError, "Did you mean 'well'"),
        (SCBDModel, {"y_key": "well", "e_key": "gene", "control": "gene_0"}, ValueError, "are the two exchanged"),
        (SCBDModel, {"y_key": "well", "e_key": ["plate", "gene"], "control": "gene_0"}, ValueError, "exchanged"),
        (SCBDModel, {"y_key": "time"}, ValueError, "no two cells are replicates"),
    ],
)
def test_setup_invalid_design_raises(system, keys, error, named):
    cells = make_cells()
    cells.obs = cells.obs.assign(time=np.arange(96.0), one="plate")
    with pytest.raises(error, match=named):
        system.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | keys)


@pytest.mark.parametrize(
    ("y", "e", "message"),
    [
        (["DMSO", "DMSO ", "dmso", "a"], "PQPQ", "3 labels of 'y' .*'DMSO', 'DMSO ', 'dmso'"),
        (["TP 53", "TP53", "a", "a"], "PQPQ", "2 labels of 'y'"),
        (["a", "b", "a", "b"], ["P1", "P1", "p1", "P2"], "2 labels of 'e' .*environments"),
        (["None", "a", "b", "b"], "PQPQ", "'None' of 'y' .* 12 cells"),
        (["na", "DMSO", "b", "b"], "PQPQ", "'na'"),
        ([" ", "a", "b", "b"], "PQPQ", "' '"),
    ],
)
def test_setup_similar_or_missing_labels_warn(y, e, message):
    cells = AnnData(np.random.default_rng(0).normal(size=(48, 3)).astype("float32"))
    cells.obs["y"], cells.obs["e"] = np.tile(y, 12), np.repeat(list(e), 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.warns(UserWarning, match=message):
            SCBDModel.setup_anndata(cells, "y", "e", control="DMSO" if "DMSO" in y else None)


@pytest.mark.parametrize(("key", "remedy"), [("y", "into classes"), ("e", "five levels")])
def test_setup_quantity_as_perturbation_warns(key, remedy):
    cells = make_cells()
    cells.obs["dose"] = np.repeat(np.linspace(0.1, 5, 48), 2)
    keys: dict[str, Any] = {"y_key": "gene", "e_key": "well"} | {f"{key}_key": "dose"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.warns(UserWarning, match=f"{key}_key='dose' makes .* 48 numbers in 96 cells: .*{remedy}"):
            SCBDModel.setup_anndata(cells, **keys)


@pytest.mark.parametrize(
    ("name", "control", "named"), [("DMSO", None, True), ("DMSO", "DMSO", False), ("a", None, False)]
)
def test_setup_without_control_logs_likely_control(name, control, named, caplog):
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.rename_categories({"gene_0": name})
    SCBDModel.setup_anndata(cells, "gene", "well", control=control)
    assert ("control='DMSO'" in caplog.text) == named


@pytest.mark.parametrize(("other", "is_logged"), [("non-targeting", True), ("ntc", False), ("gene_9", False)])
def test_setup_other_usual_control_than_named_is_logged(other, is_logged, caplog):
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.rename_categories({"gene_0": "NTC", "gene_1": other})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of similar labels
        SCBDModel.setup_anndata(cells, "gene", "well", control="NTC")
    assert caplog.text.count("look like controls, but are not named as controls: non-targeting") == is_logged
    assert ("control=['NTC', 'non-targeting']" in caplog.text) == is_logged == bool(caplog.text)


def test_setup_labels_of_numpy_are_named_as_text():
    cells = AnnData(np.random.default_rng(0).normal(size=(48, 3)).astype("float32"))
    names = {"y": np.tile(["a", "b"], 24), "e": np.repeat(["P1", "p1"], 24)}
    for column, values in names.items():
        cells.obs[column] = pd.Series(list(values), index=cells.obs_names, dtype=object)
    with pytest.warns(UserWarning, match=r"\('P1', 'p1'\)"):
        SCBDModel.setup_anndata(cells, "y", "e")


def test_setup_intended_labels_do_not_warn():
    cells = AnnData(np.random.default_rng(0).normal(size=(48, 3)).astype("float32"))
    cells.obs["y"], cells.obs["e"] = np.tile(["None", "a", "A", "b"], 12), np.repeat(["p", "P"], 24)
    SCBDModel.setup_anndata(cells, "y", "e", control="None")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_key": "plate"}, "batch_key.*e_key"),
        ({"labels_key": "gene"}, "labels_key.*y_key"),
        ({"categorical_covariate_keys": ["plate"]}, "categorical_covariate_keys.*e_key"),
        ({"continuous_covariate_keys": "time"}, "continuous_covariate_keys.*qcut.*e_key .*recipe"),
        ({"contol": "a"}, "Did you mean 'control'"),
        ({"xyz": 1}, "xyz.*It has: .*y_key"),
    ],
)
@pytest.mark.parametrize("model", [SCBDModel, ERMModel])
def test_setup_unknown_arguments_raise(model, arguments, message):
    with pytest.raises(TypeError, match=message):
        model.setup_anndata(make_cells(), "gene", "well", **arguments)


@pytest.mark.parametrize(
    "use",
    [
        lambda cells: scbd.run(cells, y_key="gene", e_key="well", out="none"),
        lambda cells: scbd.select_alpha(cells, y_key="gene", e_key="well"),
        lambda cells: scbd.cross_fit(cells, y_key="gene", e_key="well", control="a"),
        lambda cells: scbd.metrics.batch_mixing(cells, "X", e_key="well"),
        lambda cells: scbd.metrics.aggregate(cells, "X", gene_key="gene", control="a"),
        lambda cells: scbd.data.infer_environments(cells, "gene", 2),
        lambda cells: scbd.baselines.pixel_pca(cells),
        lambda cells: scbd.pl.umap_blocks(cells, "gene"),
    ],
)
def test_functions_of_cells_other_type_than_anndata_raises(use):
    with pytest.raises(TypeError, match="given as an AnnData, got DataFrame"):
        use(pd.DataFrame({"gene": ["a", "b"], "well": ["A", "B"]}))


@pytest.mark.parametrize("cells", ["cells.h5ad", pd.DataFrame({"gene": ["a"]}), np.ones((3, 2)), None, 5])
def test_setup_other_type_than_anndata_raises(cells):
    with pytest.raises(TypeError, match="given as an AnnData, got"):
        SCBDModel.setup_anndata(cells, "gene", "well")


@pytest.mark.parametrize(
    "other", ["non-targeting", "Non_Targeting", "non targeting", "nontargeting\u200b", "NONTARGETING"]
)
def test_check_design_control_in_two_spellings_warns(other):
    labels = ["nontargeting", other, "A-1", "A1"]
    with pytest.warns(UserWarning, match="2 labels of 'gene' differ .*targeting"):
        warn_if_labels_are_similar(labels, "gene", "perturbations", ["nontargeting"])
    warn_if_labels_are_similar(labels[2:], "gene", "perturbations", ["nontargeting"])
    warn_if_labels_are_similar(labels, "gene", "perturbations", ["nontargeting", other])  # both are named
