from __future__ import annotations

import io
import sys

import numpy as np
import pandas as pd
import pytest
import zarr
from official import write_lmdb

from scbd.data import add_to_screen, read_crops, write_screen
from scbd.datasets import corum, funk22, funk22_cellprofiler, funk22_guides, funk22_profiles
from scbd.datasets._networks import gene_sets
from scbd.metrics import Relations, relationship_average_precision

PLATES = ["20200202_6W-LaC024A", "20200203_6W-LaC024B"]


def crop(i):
    return np.full((4, 100, 100), i, dtype=np.uint16)


@pytest.fixture
def screen(tmp_path):
    """Forty crops; every other one as .npy."""
    values = {}
    for i in range(40):
        gene = ["nontargeting", "AAAS", "NUP107", "H2-K1"][i % 4]
        buffer = io.BytesIO()
        np.save(buffer, crop(i))
        key = f"{i:04d}_{PLATES[i % 2]}_A{i % 3}_{100 + i}_{gene}_{i}"
        values[key] = buffer.getvalue() if i % 2 else crop(i).tobytes()
    return write_lmdb(tmp_path / "crops", values)


def test_crops_and_what_their_keys_say(screen):
    adata = funk22(screen)
    images = adata.obsm["single_cell_images"]
    assert images.shape == (40, 4, 100, 100) and images.dtype == np.uint16
    np.testing.assert_array_equal(images[:, 2, 50, 50], adata.obs_names.astype(int))
    assert list(adata.obs["gene"].iloc[:4]) == ["nontargeting", "AAAS", "NUP107", "H2-K1"]
    assert adata.obs["plate"].iloc[1] == PLATES[1] and adata.obs["well"].iloc[1] == f"{PLATES[1]}_A1"
    assert adata.obs["tile"].iloc[5] == "105"


def test_a_choice_of_cells_and_genes(screen):
    some = funk22(screen, n_cells=7, seed=3)
    assert some.n_obs == 7 and list(some.obs_names) == list(funk22(screen, n_cells=7, seed=3).obs_names)
    np.testing.assert_array_equal(some.obsm["single_cell_images"][:, 0, 0, 0], some.obs_names.astype(int))
    genes = funk22(screen, genes=["AAAS"])
    assert set(genes.obs["gene"]) == {"AAAS", "nontargeting"} and genes.n_obs == 20
    assert funk22(screen, genes=["AAAS"], n_cells=6).n_obs == 6
    assert funk22(screen, genes="AAAS").obs_names.equals(genes.obs_names)  # and not its letters


@pytest.mark.parametrize("as_screen", [False, True])
def test_genes_without_a_cell_and_no_cells_are_refused(screen, tmp_path, as_screen):
    path = tmp_path / "s.zarr" if as_screen else screen
    if as_screen:
        write_screen(path, read_crops(screen), y_key="gene")
    with pytest.raises(ValueError, match=r"no cell of 2 of the genes asked for \(BRCA1, NOPE\): leave them out"):
        funk22(path, genes=["AAAS", "BRCA1", "NOPE", "BRCA1"])
    for n_cells in (0, -5):
        with pytest.raises(ValueError, match=f"n_cells={n_cells}: give a whole number, 1 or larger"):
            funk22(path, n_cells=n_cells)


def test_all_of_a_screen_stays_on_the_disk(screen, tmp_path):
    write_screen(tmp_path / "s.zarr", screen, y_key="gene")
    everything, some = funk22(tmp_path / "s.zarr"), funk22(tmp_path / "s.zarr", genes=["AAAS"], n_cells=6)
    assert isinstance(everything.obsm["single_cell_images"], zarr.Array) and everything.n_obs == 40
    assert some.n_obs == 6 and set(some.obs["gene"]) <= {"AAAS", "nontargeting"}
    np.testing.assert_array_equal(some.obsm["single_cell_images"][:, 0, 0, 0], some.obs_names.astype(int))


def test_guides_are_known_or_it_is_said_what_to_do(screen, tmp_path):
    with pytest.raises(
        ValueError, match="do not name their guides, .* scbd convert .*crops --y-key gene --out crops.zarr"
    ):
        funk22(screen, guides=True)
    with pytest.raises(ValueError, match="scbd convert '.*/two words' --y-key"):
        funk22(tmp_path / "two words", guides=True)
    store = tmp_path / "s.zarr"
    write_screen(store, screen, y_key="gene")
    with pytest.raises(ValueError, match=r"does not say which guide each cell has: add obs\['sgRNA'\]"):
        funk22(store, guides=True)
    cells = funk22(store)
    cells.obs["sgRNA"] = [f"guide {i % 3}" for i in range(40)]
    cells.obsm["X_cellprofiler"] = np.arange(80.0).reshape(40, 2)
    add_to_screen(store, cells)
    assert funk22(store, guides=True).obs["sgRNA"].nunique() == 3
    some = funk22(store, guides=True, n_cells=6)
    rows = cells.obs_names.get_indexer(some.obs_names)
    np.testing.assert_array_equal(some.obsm["X_cellprofiler"], cells.obsm["X_cellprofiler"][rows])


@pytest.mark.parametrize("genes", [None, ["AAAS"]])
def test_what_no_memory_holds_is_refused(screen, monkeypatch, genes):
    monkeypatch.setattr("scbd.datasets._funk22._memory", lambda: 10 * crop(0).nbytes)
    n = 40 if genes is None else 20
    with pytest.raises(ValueError, match=f"{n} crops of .*, this machine has .*: take fewer with n_cells, or write"):
        funk22(screen, genes=genes)
    assert funk22(screen, genes=genes, n_cells=10).n_obs == 10


def test_what_is_wrong_with_crops_is_said(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="There is no LMDB at"):
        funk22(tmp_path)
    with pytest.raises(ValueError, match="has no cell"):
        funk22(write_lmdb(tmp_path / "empty", {}))
    with pytest.raises(ValueError, match="AAAS_3' is no crop of 4 × 100 × 100 uint16 .5 bytes"):
        funk22(write_lmdb(tmp_path / "short", {"1_P_A1_7_AAAS_3": b"abcde"}))
    with pytest.raises(ValueError, match="The key b'AAAS_3' is not of the form UID_plate_well_tile_gene_index"):
        funk22(write_lmdb(tmp_path / "keys", {"AAAS_3": crop(1).tobytes()}))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match="is no LMDB, or is truncated"):
        funk22(tmp_path / "foreign")
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match="pip install lmdb"):
        funk22(tmp_path / "empty")


def test_pickled_values_are_not_unpickled(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"harm": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="is no crop"):
        funk22(write_lmdb(tmp_path / "pickled", {"1_P_A1_7_AAAS_3": buffer.getvalue()}))


def test_published_profiles_know_complexes(shared):
    """The published area and precision, see the provenance of the data."""
    profiles = funk22_profiles(shared / "funk22" / "df_standardized_mitosis.parquet")
    assert profiles.shape == (3090, 64) and (profiles.var["block"] == "salient").sum() == 32
    values = profiles.X - profiles["nontargeting"].X
    profiles.X = (values - values.mean(0)) / values.std(0, ddof=1)
    net = corum(shared / "corum" / "CORUM_clusters.tsv")
    assert net.equals(gene_sets(shared / "corum" / "CORUM_clusters.tsv"))
    assert relationship_average_precision(Relations(profiles, net)) == pytest.approx(0.19726, abs=2e-4)


def test_real_tables_of_guides_and_features(shared):
    guides = funk22_guides(shared / "funk22" / "Funk_et_al_2022_genes_with_4_guide_above_1000_cells.csv")
    assert len(guides) == 7025 and guides["n_cells"].sum() == 13_351_564
    features = funk22_cellprofiler(shared / "funk22" / "funk22-cellprofiler-univariate-ipca90.parquet")
    assert features.obsm["X_cellprofiler"].shape == (20_445, 2)
    assert features.uns["cellprofiler_features"] == ["stat", "pvalue"] and set(features.obs) == {"gene", "sgRNA"}


def test_guides_and_published_profiles(tmp_path):
    guides = pd.DataFrame({"n_guides": [2, 2], "count": [7, 9], "gene": ["A", "A"], "sgRNA_0": ["x", "y"]})
    guides.to_csv(tmp_path / "guides.csv", index=False)
    assert funk22_guides(tmp_path / "guides.csv").to_dict("list") == {
        "sgRNA": ["x", "y"],
        "gene": ["A", "A"],
        "n_cells": [7, 9],
    }
    components = [str(i) for i in range(64)]
    table = pd.DataFrame(np.arange(128.0).reshape(2, 64), index=["AAAS", "nontargeting"], columns=components)
    table[components[::-1]].assign(other=1).to_parquet(tmp_path / "profiles.parquet")  # columns are read by name
    profiles = funk22_profiles(tmp_path / "profiles.parquet")
    np.testing.assert_array_equal(profiles.X, table)
    assert list(profiles.obs_names) == ["AAAS", "nontargeting"]
    assert list(profiles.var["block"]) == ["salient"] * 32 + ["background"] * 32


def test_features_of_cells(tmp_path):
    table = pd.DataFrame({"gene_symbol_0": ["A", "B"], "sgRNA_0": ["x", "y"], "plate": [1, 2], "area": [3.0, 4.0]})
    table["well"] = "B4"
    table.to_csv(tmp_path / "features.csv", index=False)
    adata = funk22_cellprofiler(tmp_path / "features.csv")
    np.testing.assert_array_equal(adata.obsm["X_cellprofiler"], [[3], [4]])
    assert list(adata.obs) == ["gene", "sgRNA", "plate", "well"] and list(adata.obs["well"]) == ["1_B4", "2_B4"]
    assert funk22_cellprofiler(tmp_path / "features.csv", n_cells=1).obs_names[0] in ("0", "1")


def test_what_is_wrong_with_tables_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        funk22_guides(tmp_path / "guides.csv")
    (tmp_path / "guides.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="lacks the columns sgRNA_0, gene, count; it has a, b"):
        funk22_guides(tmp_path / "guides.csv")
    (tmp_path / "cells.csv").write_text("gene_symbol_0,plate\nA,2\n")
    with pytest.raises(ValueError, match="holds no features"):
        funk22_cellprofiler(tmp_path / "cells.csv")
    (tmp_path / "cells.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="cannot be read as a table, is empty, or truncated"):
        funk22_profiles(tmp_path / "cells.parquet")
    (tmp_path / "cells.txt").write_text("")
    with pytest.raises(ValueError, match="is no table: give one of .csv, .tsv"):
        funk22_profiles(tmp_path / "cells.txt")
