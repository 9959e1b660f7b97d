from __future__ import annotations

import io
import sys

import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import AnnData
from helpers.dataset_files import write_lmdb

from scbd.data import read_crops, write_screen
from scbd.datasets import corum, cpjump1, funk22
from scbd.datasets._networks import gene_sets
from scbd.metrics import Relations, relationship_average_precision

PLATES = ["20200202_6W-LaC024A", "20200203_6W-LaC024B"]


def crop(i):
    return np.full((4, 100, 100), i, dtype=np.uint16)


@pytest.fixture
def screen(tmp_path):
    """Write a database of forty crops, every second one in the format of .npy."""
    values = {}
    for i in range(40):
        gene = ["nontargeting", "AAAS", "NUP107", "H2-K1"][i % 4]
        buffer = io.BytesIO()
        np.save(buffer, crop(i))
        key = f"{i:04d}_{PLATES[i % 2]}_A{i % 3}_{100 + i}_{gene}_{i}"
        values[key] = buffer.getvalue() if i % 2 else crop(i).tobytes()
    return write_lmdb(tmp_path / "crops", values)


def test_funk22_lmdb_returns_crops_and_labels_of_keys(screen):
    adata = funk22(screen)
    images = adata.obsm["single_cell_images"]
    assert images.shape == (40, 4, 100, 100) and images.dtype == np.uint16
    np.testing.assert_array_equal(images[:, 2, 50, 50], adata.obs_names.astype(int))
    assert list(adata.obs["gene"].iloc[:4]) == ["nontargeting", "AAAS", "NUP107", "H2-K1"]
    assert adata.obs["plate"].iloc[1] == PLATES[1] and adata.obs["well"].iloc[1] == f"{PLATES[1]}_A1"
    assert adata.obs["tile"].iloc[5] == "105"


def test_funk22_n_cells_and_genes_given_returns_subset(screen):
    some = funk22(screen, n_cells=7, seed=3)
    assert some.n_obs == 7 and list(some.obs_names) == list(funk22(screen, n_cells=7, seed=3).obs_names)
    np.testing.assert_array_equal(some.obsm["single_cell_images"][:, 0, 0, 0], some.obs_names.astype(int))
    genes = funk22(screen, genes=["AAAS"])
    assert set(genes.obs["gene"]) == {"AAAS", "nontargeting"} and genes.n_obs == 20
    assert funk22(screen, genes=["AAAS"], n_cells=6).n_obs == 6
    assert funk22(screen, genes="AAAS").obs_names.equals(genes.obs_names)  # one gene, not its letters


@pytest.mark.parametrize("as_screen", [False, True])
def test_funk22_unknown_genes_or_invalid_n_cells_raises(screen, tmp_path, as_screen):
    path = tmp_path / "s.zarr" if as_screen else screen
    if as_screen:
        write_screen(path, read_crops(screen), y_key="gene")
    with pytest.raises(ValueError, match=r"no cell of 2 of the requested genes \(BRCA1, NOPE\)"):
        funk22(path, genes=["AAAS", "BRCA1", "NOPE", "BRCA1"])
    for n_cells in (0, -5):
        with pytest.raises(ValueError, match=f"n_cells={n_cells}: give a whole number, 1 or larger"):
            funk22(path, n_cells=n_cells)


def test_funk22_whole_screen_stays_on_disk(screen, tmp_path):
    write_screen(tmp_path / "s.zarr", screen, y_key="gene")
    everything, some = funk22(tmp_path / "s.zarr"), funk22(tmp_path / "s.zarr", genes=["AAAS"], n_cells=6)
    assert isinstance(everything.obsm["single_cell_images"], zarr.Array) and everything.n_obs == 40
    assert some.n_obs == 6 and set(some.obs["gene"]) <= {"AAAS", "nontargeting"}
    np.testing.assert_array_equal(some.obsm["single_cell_images"][:, 0, 0, 0], some.obs_names.astype(int))


def test_funk22_guides_missing_raises(screen, tmp_path):
    with pytest.raises(ValueError, match="do not name their guides"):
        funk22(screen, guides=True)
    write_screen(tmp_path / "s.zarr", screen, y_key="gene")
    with pytest.raises(ValueError, match="which guide"):
        funk22(tmp_path / "s.zarr", guides=True)
    table = read_crops(screen).obs
    guides = table.assign(sgRNA=[f"guide {name}" for name in table.index])
    write_screen(tmp_path / "g.zarr", read_crops(screen, table=guides), y_key="gene")
    for n_cells in (None, 6):
        found = funk22(tmp_path / "g.zarr", guides=True, n_cells=n_cells).obs
        assert (found["sgRNA"] == "guide " + found.index).all()


@pytest.mark.parametrize("genes", [None, ["AAAS"]])
def test_funk22_more_crops_than_memory_raises(screen, monkeypatch, genes):
    monkeypatch.setattr("scbd.datasets._published_screens._total_memory", lambda: 10 * crop(0).nbytes)
    n = 40 if genes is None else 20
    with pytest.raises(ValueError, match=f"{n} crops of .*, this machine has .*: take fewer with n_cells, or write"):
        funk22(screen, genes=genes)
    assert funk22(screen, genes=genes, n_cells=10).n_obs == 10


def test_funk22_invalid_database_raises(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="There is no LMDB at"):
        funk22(tmp_path)
    with pytest.raises(ValueError, match="has no cell"):
        funk22(write_lmdb(tmp_path / "empty", {}))
    with pytest.raises(ValueError, match="AAAS_3' is no crop of 4 × 100 × 100 uint16 .5 bytes"):
        funk22(write_lmdb(tmp_path / "short", {"1_P_A1_7_AAAS_3": b"abcde"}))
    with pytest.raises(ValueError, match="The key b'AAAS_3' is neither UID_plate_well_tile_gene_index nor gene;guide;"):
        funk22(write_lmdb(tmp_path / "keys", {"AAAS_3": crop(1).tobytes()}))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match="is no LMDB, or is truncated"):
        funk22(tmp_path / "foreign")
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match="pip install lmdb"):
        funk22(tmp_path / "empty")


def test_funk22_keys_with_guides_returns_crops_and_guides(tmp_path):
    """The layout of Set-DINO's code: values in [0, 1], of any size."""
    images = np.random.default_rng(0).random((6, 4, 12, 12), dtype=np.float32)
    keys = [f"G{i % 2};ACGT{i};20200202_6W-LaC024B;B{i % 3};{40 + i};{100 + i}" for i in range(6)]
    path = write_lmdb(tmp_path / "crops", {key: image.tobytes() for key, image in zip(keys, images, strict=True)})
    adata = funk22(path, guides=True)
    rows = adata.obs_names.astype(int) - 100
    np.testing.assert_array_equal(adata.obsm["single_cell_images"], images[rows])
    assert adata.obs["sgRNA"].tolist() == [f"ACGT{i}" for i in rows]
    assert adata.obs["well"].tolist() == [f"20200202_6W-LaC024B_B{i % 3}" for i in rows]
    assert set(funk22(path, genes="G1").obs["gene"]) == {"G1"}
    with pytest.raises(ValueError, match="is neither UID_plate_well_tile_gene_index nor gene;guide;plate;well;tile"):
        funk22(write_lmdb(tmp_path / "short", {"G1;ACGT;P;B1;4": images[0].tobytes()}))
    with pytest.raises(ValueError, match="is no crop of 4 × 12 × 12 float32"):
        funk22(write_lmdb(tmp_path / "sizes", {keys[0]: images[0].tobytes(), keys[1]: b"abc"}))


def test_funk22_ten_real_cells_are_equal_to_stored_crops(tmp_path, shared):
    """Check values, order of channels and labels of ten real crops."""
    kept = np.load(shared / "cells" / "funk_crops.npz")
    named = zip(*(kept[name].tolist() for name in ("gene", "sgRNA", "plate", "well", "tile", "row")), strict=True)
    keys = [";".join(map(str, parts)) for parts in named]
    path = write_lmdb(tmp_path / "ops", {k: v.tobytes() for k, v in zip(keys, kept["images"], strict=True)})
    adata = funk22(path, guides=True)
    rows = adata.obs_names.astype(int)
    np.testing.assert_array_equal(adata.obsm["single_cell_images"], kept["images"][rows])
    assert adata.obsm["single_cell_images"].min() >= 0 and adata.obsm["single_cell_images"].max() <= 1
    assert adata.obs["sgRNA"].str.fullmatch("[ACGT]{20}").all()
    assert adata.obs["plate"].str.fullmatch(r"202002\d\d_6W-LaC02[45][A-F]").all()
    same = {"dna_damage": "DNA damage", "actin": "F-actin", "dna": "DNA", "tubulin": "microtubule"}
    assert [same[name] for name in adata.var_names] == kept["channels"].tolist()
    # a nucleus lies in the middle of its crop, and the DNA in the nucleus
    images = adata.obsm["single_cell_images"]
    middle = images[:, :, 32:64, 32:64].mean((2, 3)) / images.mean((2, 3))
    assert np.median(middle[:, adata.var_names.get_loc("dna")]) > np.median(middle[:, adata.var_names.get_loc("actin")])


def test_funk22_pickled_value_raises(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"harm": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="is no crop"):
        funk22(write_lmdb(tmp_path / "pickled", {"1_P_A1_7_AAAS_3": buffer.getvalue()}))


def test_relationship_average_precision_published_profiles_is_published(shared):
    """The expected value is the published one, see the provenance of the data."""
    table = pd.read_parquet(shared / "funk22" / "df_standardized_mitosis.parquet")[[str(i) for i in range(64)]]
    profiles = AnnData(table.to_numpy(np.float32), obs=pd.DataFrame(index=table.index.astype(str)))
    values = profiles.X - profiles["nontargeting"].X
    profiles.X = (values - values.mean(0)) / values.std(0, ddof=1)
    net = corum(shared / "corum" / "CORUM_clusters.tsv")
    assert net.equals(gene_sets(shared / "corum" / "CORUM_clusters.tsv"))
    assert relationship_average_precision(Relations(profiles, net)) == pytest.approx(0.19726, abs=2e-4)


def wells(**columns) -> pd.DataFrame:
    """Return a table of four wells in the official layout."""
    table = {
        "Metadata_Plate": ["BR1", "BR1", "BR2", "BR2"],
        "Metadata_Well": ["A01", "A02", "A01", "A02"],
        "Metadata_broad_sample": ["BRD-1", "DMSO"] * 2,
        "Metadata_pert_iname": ["one", "DMSO"] * 2,
        "Metadata_control_type": [None, "negcon"] * 2,
        "Metadata_gene": ["G1", None] * 2,
        "Metadata_smiles": ["C", "CS(=O)C"] * 2,
        "Metadata_moa": ["inhibitor", "control vehicle"] * 2,
        "Metadata_hours": [24, 24, 48, 48],
        "Cells_AreaShape_Area": np.arange(4, dtype=np.float64),
        "Nuclei_Texture": np.ones(4),
    }
    return pd.DataFrame(table | columns)


def test_cpjump1_table_keeps_columns_and_feature_names(tmp_path):
    wells().to_parquet(tmp_path / "wells.parquet")
    found = cpjump1(tmp_path / "wells.parquet")
    assert found.obs_names.tolist() == ["BR1_A01", "BR1_A02", "BR2_A01", "BR2_A02"]
    assert found.var_names.tolist() == ["Cells_AreaShape_Area", "Nuclei_Texture"]
    assert found.X.dtype == np.float32 and found.X[:, 0].tolist() == [0, 1, 2, 3]
    assert found.obs["Metadata_control_type"].isna().tolist() == [True, False] * 2
    assert found.obs["Metadata_broad_sample"].dtype == "category"


def test_cpjump1_invalid_table_raises(tmp_path):
    path = tmp_path / "wells.parquet"
    with pytest.raises(FileNotFoundError, match="There is no file"):
        cpjump1(path)
    wells().drop(columns="Metadata_Well").to_parquet(path)
    with pytest.raises(ValueError, match="lacks the columns Metadata_Well"):
        cpjump1(path)
    wells(Cells_Note=["round"] * 4).to_parquet(path)
    with pytest.raises(ValueError, match=r"has columns that are no features: \['Cells_Note'\]"):
        cpjump1(path)
    wells()[[column for column in wells() if column.startswith("Metadata")]].to_parquet(path)
    with pytest.raises(ValueError, match="has no feature"):
        cpjump1(path)


def test_cpjump1_real_table_returns_documented_counts(shared):
    """The expected counts are those in the documentation of the data."""
    found = cpjump1(shared / "profiles" / "cpjump1_cellprofiler_wells.parquet")
    assert found.shape == (1920, 904) and found.obs["Metadata_Plate"].nunique() == 5
    assert (found.obs["Metadata_broad_sample"] == "DMSO").sum() == 320
    assert found.obs["Metadata_broad_sample"].nunique() == 307 and np.isfinite(found.X).all()
