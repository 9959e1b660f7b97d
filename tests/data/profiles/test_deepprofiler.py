from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scbd.data import read_profiles


def write_field(path: Path, n: int, seed: int = 0) -> np.ndarray:
    """As DeepProfiler does: metadata are a pickled dictionary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    locations = np.arange(2.0 * n).reshape(n, 2)
    np.savez_compressed(path, features=features, metadata=np.array({"Metadata_Plate": "P"}), locations=locations)
    return features


@pytest.mark.parametrize("name", ["{}/{}/{}.npz", "{}/{}_{}.npz"])
def test_fields_by_plate_well_and_site(tmp_path, name):
    fields = [("P1", "A01", "1"), ("P1", "A01", "2"), ("P2", "B02", "1")]
    written = [write_field(tmp_path / name.format(*field), 3, seed) for seed, field in enumerate(fields)]
    index = pd.DataFrame(fields, columns=["Metadata_Plate", "Metadata_Well", "Metadata_Site"])
    cells = read_profiles(tmp_path, table=index.assign(Treatment=["a", "a", "b"]))
    np.testing.assert_array_equal(cells.X, np.concatenate(written))
    assert cells.obs["Treatment"].tolist() == list("aaaaaabbb") and cells.obs["Metadata_Site"].tolist()[3] == "2"
    np.testing.assert_array_equal(cells.obs[["Location_Center_X", "Location_Center_Y"]].iloc[4], [2, 3])


def test_one_field_and_what_is_wrong(tmp_path):
    features = write_field(tmp_path / "a.npz", 4)
    cells = read_profiles(tmp_path / "a.npz")
    np.testing.assert_array_equal(cells.X, features)
    assert cells.obs["Metadata_File"].tolist() == ["a.npz"] * 4
    np.savez(tmp_path / "b.npz", features=features, locations=np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"b.npz has features \(4, 6\) and locations \(3, 2\): they must have a row"):
        read_profiles(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", features=np.array([None]), locations=np.zeros((1, 2)))
    with pytest.raises(ValueError, match="c.npz cannot be read as features of DeepProfiler"):
        read_profiles(tmp_path / "c.npz")
    write_field(tmp_path / "empty" / "d.npz", 0)
    with pytest.raises(ValueError, match="none of 1 files has a cell"):
        read_profiles(tmp_path / "empty")
