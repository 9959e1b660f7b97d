from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

import scbd
from scbd._seen import mark_seen
from scbd.data import to_mantispy

KEYS: dict[str, Any] = {"y_key": "compound", "plate_key": "plate", "well_key": "well"}
CPJUMP1 = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles" / "cpjump1_cellprofiler_wells.parquet"


def make_plates(n_compounds: int = 8, n_controls: int = 6, n_plates: int = 3, cells: int = 1, seed: int = 0) -> AnnData:
    """Plates of one layout: a compound a well, and controls; one row a cell."""
    rng = np.random.default_rng(seed)
    n_wells = n_compounds + n_controls
    compound = [f"c{i}" for i in range(n_compounds)] + ["DMSO"] * n_controls
    well = [f"{'ABCDEFGH'[i % 8]}{i // 8 + 1}" for i in range(n_wells)]
    effect = rng.normal(size=(n_wells, 5))
    effect[n_compounds:] = 0
    shape = (n_plates, n_wells, cells)
    z = (effect[None, :, None] + 0.7 * rng.normal(size=(*shape, 5))).reshape(-1, 5)
    plate, place, _ = (index.ravel() for index in np.indices(shape))
    obs = pd.DataFrame(
        {
            "compound": pd.Categorical(np.array(compound)[place]),
            "plate": [f"P{i}" for i in plate],
            "well": np.array(well)[place],
            "moa": [f"moa_{i // 2}" for i in place],
            "Metadata_Batch": "week_1",
            "Metadata_Site": np.arange(len(z)),
        },
        index=[f"row_{i}" for i in range(len(z))],
    )
    return AnnData(obs=obs, obsm={"X_scbd_c": z})


def hide_mantispy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "mantispy" else find(name, *a))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_mantispy(monkeypatch)


def test_wells_stay_as_they_are(alone):
    plates = make_plates()
    wells = to_mantispy(plates, control="DMSO", columns={"moa": "Metadata_MOA"}, **KEYS)
    assert wells.X.dtype == np.float32
    np.testing.assert_array_equal(wells.X, plates.obsm["X_scbd_c"].astype(np.float32))
    assert list(wells.obs_names) == list(plates.obs_names)
    assert list(wells.var_names) == [f"X_scbd_c_{i}" for i in range(5)]
    obs = wells.obs.astype(str)
    assert obs["Metadata_Perturbation"].tolist() == plates.obs["compound"].tolist()
    assert obs["Metadata_Plate"].tolist() == plates.obs["plate"].tolist()
    assert obs["Metadata_MOA"].tolist() == plates.obs["moa"].tolist()
    assert obs["Metadata_Well"].tolist()[:9] == ["A01", "B01", "C01", "D01", "E01", "F01", "G01", "H01", "A02"]
    assert set(obs["Metadata_Batch"]) == {"week_1"} and "moa" not in obs and "Metadata_CellCount" not in obs
    is_control = plates.obs["compound"].eq("DMSO").to_numpy()
    np.testing.assert_array_equal(wells.obs["Metadata_Control"], is_control)
    np.testing.assert_array_equal(obs["Metadata_Control_Type"], np.where(is_control, "negcon", "treatment"))
    assert wells.uns["mantispy"] == {
        "schema_version": "2.0",
        "resolution": "well",
        "grouped_by": ["Metadata_Plate", "Metadata_Well"],
        "perturbation": {"column": "Metadata_Perturbation", "control_column": "Metadata_Control_Type"},
    }
    assert wells.obs[["Metadata_Row", "Metadata_Col"]].values.tolist()[7:9] == [[7, 0], [0, 1]]
    assert set(wells.var["feature_kind"]) == {"embedding"} and wells.var["is_feature"].all()


def test_names_of_the_field_are_the_defaults(alone):
    plates = make_plates()
    named = plates.copy()
    named.obs = plates.obs.rename(
        columns={"compound": "Metadata_broad_sample", "plate": "Metadata_Plate", "well": "Metadata_Well"}
    )
    wells = to_mantispy(named, y_key="Metadata_broad_sample")
    expected = to_mantispy(plates, **KEYS)
    pd.testing.assert_frame_equal(wells.obs[expected.obs.columns], expected.obs)
    assert "Metadata_broad_sample" in wells.obs and "Metadata_Control" not in wells.obs
    assert wells.uns["mantispy"]["perturbation"] == {"column": "Metadata_Perturbation"}


def test_cells_are_averaged_to_wells(alone):
    cells = make_plates(cells=3)
    order = np.random.default_rng(1).permutation(cells.n_obs)
    cells = cells[order[:-1]].copy()
    wells = to_mantispy(cells, control="DMSO", columns={"moa": "Metadata_MOA"}, **KEYS)
    expected = (
        pd.DataFrame(cells.obsm["X_scbd_c"]).groupby([cells.obs["plate"].tolist(), cells.obs["well"].tolist()]).mean()
    )
    assert wells.n_obs == len(expected) == 42
    found = pd.MultiIndex.from_arrays([wells.obs["Metadata_Plate"].astype(str), _short(wells.obs["Metadata_Well"])])
    np.testing.assert_allclose(wells.X, expected.loc[found], rtol=0, atol=1e-6)
    assert sorted(wells.obs["Metadata_CellCount"]) == [2, *[3] * 41]
    assert "Metadata_Site" not in wells.obs, "cells of a well differ in it"
    assert wells.obs_names[0] == "_".join(
        wells.obs.iloc[0][["Metadata_Plate", "Metadata_Well", "Metadata_Perturbation"]]
    )
    assert dict(zip(_short(wells.obs["Metadata_Well"]), wells.obs["Metadata_MOA"], strict=True)) == dict(
        zip(cells.obs["well"], cells.obs["moa"], strict=True)
    )


def _short(wells: pd.Series) -> list[str]:
    return [f"{well[0]}{int(well[1:])}" for well in wells.astype(str)]


def test_a_pooled_well_has_a_row_for_each_perturbation(alone):
    cells = make_plates(cells=2)
    cells.obs["well"] = "B2"
    wells = to_mantispy(cells, **KEYS)
    assert wells.n_obs == 3 * 9
    assert wells.uns["mantispy"]["grouped_by"] == ["Metadata_Plate", "Metadata_Well", "Metadata_Perturbation"]


def test_wells_of_any_spelling(alone):
    plates = make_plates(n_compounds=3, n_controls=2, n_plates=1)
    plates.obs["well"] = ["a1", "B_02", "P24", "AF 48", "c-003"]
    wells = to_mantispy(plates, **KEYS)
    assert wells.obs["Metadata_Well"].tolist() == ["A01", "B02", "P24", "AF48", "C03"]
    assert wells.obs["Metadata_Row"].tolist() == [0, 1, 15, 31, 2]
    assert wells.obs["Metadata_Col"].tolist() == [0, 1, 23, 47, 2]


def test_a_file_holds_all_of_it(alone, tmp_path):
    wells = to_mantispy(make_plates(), control="DMSO", **KEYS)
    wells.write_h5ad(tmp_path / "wells.h5ad")
    found = anndata.read_h5ad(tmp_path / "wells.h5ad")
    np.testing.assert_array_equal(found.X, wells.X)
    assert list(found.obs.columns) == list(wells.obs.columns) and list(found.var.columns) == list(wells.var.columns)
    assert list(found.uns["mantispy"].pop("grouped_by")) == wells.uns["mantispy"].pop("grouped_by")
    assert found.uns["mantispy"] == wells.uns["mantispy"]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"embedding_key": "X_scbd"}, KeyError, "Did you mean 'X_scbd_c'"),
        ({"y_key": "compounds"}, KeyError, "Did you mean 'compound'"),
        ({"plate_key": "Metadata_Plate"}, KeyError, "obs has no 'Metadata_Plate'"),
        ({"well_key": "moa"}, ValueError, "moa_0, moa_1.*such as A01"),
        ({"control": "dmso"}, ValueError, "No row has the control 'dmso'"),
        ({"columns": {"moa": "moa"}}, ValueError, "begin with 'Metadata_'"),
        ({"columns": {"mo": "Metadata_MOA"}}, KeyError, "Did you mean 'moa'"),
        ({"columns": {"Metadata_Site": "Metadata_Field"}}, ValueError, "several values in one well"),
    ],
)
def test_what_cannot_be_is_said(change, error, said):
    with pytest.raises(error, match=said):
        to_mantispy(make_plates(cells=2), **(KEYS | change))


def test_embeddings_that_cannot_be_ranked():
    plates = make_plates()
    plates.obsm["flat"], plates.obsm["text"] = np.zeros((plates.n_obs, 2, 2)), np.full((plates.n_obs, 2), "a")
    for key in ("flat", "text"):
        with pytest.raises(ValueError, match="give a dense matrix of numbers"):
            to_mantispy(plates, key, **KEYS)
    plates.obsm["X_scbd_c"][3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 42 rows"):
        to_mantispy(plates, **KEYS)
    plates.obs.loc["row_2", "well"] = None
    with pytest.raises(ValueError, match="no value for 1 of 3 cells"):
        to_mantispy(plates[[0, 1, 2]].copy(), **KEYS)


def test_mantispy_stamps_where_it_is_installed(monkeypatch):
    """Its own ``io.stamp`` is asked, with what one row is."""
    asked: list[dict[str, Any]] = []
    peer = SimpleNamespace(stamp=lambda wells, **how: asked.append({"n": wells.n_obs, **how}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "mantispy")
    monkeypatch.setattr(importlib, "import_module", lambda name: peer if name == "mantispy.io" else None)
    wells = to_mantispy(make_plates(), **KEYS)
    assert "mantispy" not in wells.uns, "nothing is stamped twice"
    assert asked == [
        {
            "n": 42,
            "resolution": "well",
            "feature_kind": "embedding",
            "grouped_by": ["Metadata_Plate", "Metadata_Well"],
            "perturbation": {"column": "Metadata_Perturbation"},
        }
    ]


# the same score as scbd.metrics.replicate_retrieval, in copairs' terms
PAIRS: dict[str, Any] = {
    "pos_sameby": ["Metadata_Perturbation"],
    "pos_diffby": ["Metadata_Plate"],
    "neg_diffby": ["Metadata_Plate", "Metadata_Control"],
}


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_stamp_is_that_of_mantispy(tmp_path, monkeypatch):
    mantispy = pytest.importorskip("mantispy", reason="mantispy is not installed: it needs Python 3.12")
    for cells in (1, 2):
        plates = make_plates(cells=cells)
        stamped = to_mantispy(plates, control="DMSO", **KEYS)
        with monkeypatch.context() as patch:
            hide_mantispy(patch)
            ours = to_mantispy(plates, control="DMSO", **KEYS)
        assert ours.uns["mantispy"] == stamped.uns["mantispy"]
        pd.testing.assert_frame_equal(ours.obs, stamped.obs, check_like=True)
        pd.testing.assert_frame_equal(ours.var.astype(object), stamped.var.astype(object), check_like=True)
        assert mantispy.io.validate(ours).ok
        ours.write_h5ad(tmp_path / f"{cells}.h5ad")
        assert mantispy.io.validate(mantispy.io.read(tmp_path / f"{cells}.h5ad")).ok


@pytest.mark.filterwarnings("ignore")
def test_mantispy_scores_replicates_alike():
    mantispy = pytest.importorskip("mantispy", reason="mantispy is not installed: it needs Python 3.12")
    pytest.importorskip("copairs", reason="mantispy.tl.map needs copairs")
    wells = to_mantispy(make_plates(), control="DMSO", **KEYS)
    _assert_scored_alike(mantispy, wells)


@pytest.mark.filterwarnings("ignore")
def test_mantispy_scores_replicates_of_real_plates_alike():
    mantispy = pytest.importorskip("mantispy", reason="mantispy is not installed: it needs Python 3.12")
    pytest.importorskip("copairs", reason="mantispy.tl.map needs copairs")
    if not CPJUMP1.is_file():
        pytest.skip("the real data are not here: no folder ../shared/data beside the checkout")
    plates = scbd.datasets.cpjump1(CPJUMP1)
    plates.obsm["X"] = plates.X
    _assert_scored_alike(mantispy, to_mantispy(plates, "X", y_key="Metadata_broad_sample", control="DMSO"))


def _assert_scored_alike(mantispy: Any, wells: AnnData) -> None:
    keys: dict[str, Any] = {"y_key": "Metadata_Perturbation", "e_key": "Metadata_Plate", "control": "DMSO"}
    ours = scbd.metrics.replicate_retrieval(wells, wells.X, **keys, n_permutations=100).table["average_precision"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mantispy.tl.map(wells, **PAIRS, null_size=100)
    theirs = wells.uns["mantispy"]["map"].set_index("Metadata_Perturbation")["score"].drop("DMSO", errors="ignore")
    np.testing.assert_allclose(ours, theirs.loc[ours.index], rtol=0, atol=1e-6)
    assert len(ours) == len(theirs) > 5


def test_perturbations_that_were_trained_on_are_marked_and_warned_of(alone):
    plates = make_plates(cells=2)
    to_mantispy(plates, control="DMSO", **KEYS)
    mark_seen(plates.obs, plates.obs["compound"].isin(["c1", "c5", "DMSO"]).to_numpy(), plates.obsm["X_scbd_c"])
    with pytest.warns(UserWarning, match=r"trained on 2 of 8 perturbations that are scored \(c1, c5\)"):
        wells = to_mantispy(plates, control="DMSO", **KEYS)
    marked = wells.obs.loc[wells.obs["Metadata_scbd_seen"], "Metadata_Perturbation"]
    assert set(marked) == {"c1", "c5", "DMSO"}
    new = plates[~plates.obs["scbd_seen"]]
    assert not to_mantispy(new, **KEYS).obs["Metadata_scbd_seen"].any()
    plates.obsm["mine"] = -plates.obsm["X_scbd_c"]
    assert "Metadata_scbd_seen" not in to_mantispy(plates, "mine", **KEYS).obs


def test_a_frame_is_an_embedding_like_any_other(alone):
    plates = make_plates()
    expected = to_mantispy(plates, **KEYS).X
    frame = pd.DataFrame(plates.obsm["X_scbd_c"], index=plates.obs_names).astype("Float64")
    plates.obsm["X_scbd_c"] = frame.rename(columns=str)
    np.testing.assert_array_equal(to_mantispy(plates, **KEYS).X, expected)
