from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd.datasets import breinig2015, cpjump1


def wells(**columns) -> pd.DataFrame:
    """Four wells in the official layout."""
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


def cells() -> pd.DataFrame:
    about = {"cell_code": ["a", "b"], "cell_id": [1, 1], "plate": ["P1", "P1"], "replicate": [1, 2]}
    about |= {"well": ["M14", "M14"], "field": [3, 4], "target": ["CDK", "EGFR"], "split": ["train", "test"]}
    return pd.DataFrame(about | {"DNA.s.area": [0.5, 1.5]})


def test_wells_keep_their_columns_and_features_their_names(tmp_path):
    wells().to_parquet(tmp_path / "wells.parquet")
    found = cpjump1(tmp_path / "wells.parquet")
    assert found.obs_names.tolist() == ["BR1_A01", "BR1_A02", "BR2_A01", "BR2_A02"]
    assert found.var_names.tolist() == ["Cells_AreaShape_Area", "Nuclei_Texture"]
    assert found.X.dtype == np.float32 and found.X[:, 0].tolist() == [0, 1, 2, 3]
    assert found.obs["Metadata_control_type"].isna().tolist() == [True, False] * 2
    assert found.obs["Metadata_broad_sample"].dtype == "category"


def test_cells_know_their_replicate_as_a_label(tmp_path):
    cells().to_csv(tmp_path / "cells.csv", index=False)
    found = breinig2015(tmp_path / "cells.csv")
    assert found.obs_names.tolist() == ["a", "b"] and found.obs["replicate"].tolist() == ["1", "2"]
    assert found.var_names.tolist() == ["DNA.s.area"] and found.X[:, 0].tolist() == [0.5, 1.5]


def test_what_is_not_a_table_of_features_is_named(tmp_path):
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


def test_the_real_tables(shared):
    """Numbers of the data's own page."""
    found = cpjump1(shared / "profiles" / "cpjump1_cellprofiler_wells.parquet")
    assert found.shape == (1920, 904) and found.obs["Metadata_Plate"].nunique() == 5
    assert (found.obs["Metadata_broad_sample"] == "DMSO").sum() == 320
    assert found.obs["Metadata_broad_sample"].nunique() == 307 and np.isfinite(found.X).all()
    found = breinig2015(shared / "profiles" / "breinig2015_single_cells.parquet")
    assert found.shape == (51_267, 26) and found.obs["target"].nunique() == 17
    assert found.obs["replicate"].cat.categories.tolist() == ["1", "2"]
