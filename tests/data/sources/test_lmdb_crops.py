from __future__ import annotations

import tracemalloc

import lmdb
import numpy as np
import pandas as pd
import pytest

from scbd.data.sources._lmdb_crops import LMDBSource, lmdb_keys, parsed_keys


def key_of(number: int) -> bytes:
    return f"{number:08d}_2020_A_B{number % 384}_{number % 100}_GENE{number % 50}_{number}".encode()


@pytest.fixture
def database(tmp_path):
    def write(n, values=None):
        with lmdb.open(str(tmp_path), map_size=2**27) as file, file.begin(write=True) as transaction:
            for number in range(n):
                transaction.put(key_of(number), b"" if values is None else values[number].tobytes())
        return tmp_path

    return write


def test_keys_and_table_take_no_more_than_they_hold(database):
    """Of 26 million cells each hundred bytes are 2.6 GB."""
    n = 20_000
    path = database(n)
    parsed_keys([key_of(0)])
    tracemalloc.start()
    keys = lmdb_keys(path)
    obs = parsed_keys(keys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(keys) == len(obs) == n
    assert peak < 170 * n  # with the strings themselves, which pandas 3 packs at the end


def test_labels_are_sorted_and_belong_to_their_keys():
    obs = parsed_keys([b"u1_P_2_B1_7_ZW10_0", b"u2_P_1_A1_7_AURKB_1", b"u3_P_2_B1_8_AURKB_2", b"u4_P_2_B1_9_KIF11_3"])
    assert list(obs.index) == ["u1", "u2", "u3", "u4"]
    wanted = {
        "plate": ["P_2", "P_1", "P_2", "P_2"],
        "well": ["P_2_B1", "P_1_A1", "P_2_B1", "P_2_B1"],
        "tile": ["7", "7", "8", "9"],
        "gene": ["ZW10", "AURKB", "AURKB", "KIF11"],  # three, which come in an order that is not turned by turning
    }
    pd.testing.assert_frame_equal(obs, pd.DataFrame(wanted, index=obs.index).astype("category"))
    with pytest.raises(ValueError, match="b'u1_P_7' is not of the form"):
        parsed_keys([b"u1_P_7"])


def test_rows_as_asked(database):
    images = np.arange(5 * 2 * 3 * 3, dtype="uint16").reshape(5, 2, 3, 3)
    path = database(5, images)
    keys = lmdb_keys(path)
    source = LMDBSource(path, [*keys, b"other"], shape=(2, 3, 3))
    np.testing.assert_array_equal(source.read(np.array([4, 0, 4])), images[[4, 0, 4]])
    np.testing.assert_array_equal(source.read(slice(1, 3)), images[1:3])
    with pytest.raises(KeyError, match="has no key b'other'"):
        source.read(np.array([5]))
    del source  # a database is open once
    with pytest.raises(ValueError, match=r"is no crop of 4 × 3 × 3 uint16 \(36 bytes\)"):
        LMDBSource(path, keys, shape=(4, 3, 3)).read(np.array([0]))
