from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data import ArraySource, Crops, write_screen
from scbd.data.stores import _intensities as intensities
from scbd.data.stores._intensities import percentiles_of, sampled_range


def crops(images: np.ndarray, name: str = "plate") -> Crops:
    obs = pd.DataFrame({"gene": "x"}, index=[f"c{row}" for row in range(len(images))])
    return Crops(ArraySource(images), obs, [f"channel_{c}" for c in range(images.shape[1])], name)


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=300), min_size=1, max_size=1),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
)
def test_percentiles_of_counts_are_those_of_the_numbers(numbers, percentiles):
    values = np.array([*numbers, numbers[0][::-1]], "uint8") // np.array([[1], [2]], "uint8")
    counts = np.stack([np.bincount(channel, minlength=256) for channel in values])
    expected = np.percentile(values, percentiles, axis=1)
    np.testing.assert_allclose(percentiles_of(counts, percentiles), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_read_in_parts_it_is_the_same_range(monkeypatch, dtype):
    rng = np.random.default_rng(0)
    plates = [crops(rng.gamma(2, 20, (n, 3, 8, 9)).clip(0, 255).astype(dtype)) for n in (40, 7)]
    whole = np.concatenate([np.moveaxis(p.images.read(slice(None)), 1, 0).reshape(3, -1) for p in plates], axis=1)
    expected = np.percentile(whole, [0.1, 99.9], axis=1).T
    monkeypatch.setattr(intensities, "_PART_BYTES", 5 * 3 * 8 * 9)
    monkeypatch.setattr(intensities, "_COUNTED", 150)
    np.testing.assert_allclose(sampled_range(plates, 0), expected, rtol=1e-6)


def test_large_floats_are_measured_by_some_of_their_pixels():
    images = np.random.default_rng(0).normal(size=(200, 2, 64, 64)).astype("float32")
    low, high = sampled_range([crops(images)], 0).T
    np.testing.assert_allclose(low, -3.09, atol=0.1)  # of the normal distribution
    np.testing.assert_allclose(high, 3.09, atol=0.1)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_the_sample_is_never_in_memory_at_once(monkeypatch, dtype):
    images = np.zeros((400, 2, 64, 64), dtype)
    monkeypatch.setattr(intensities, "_PART_BYTES", images.nbytes // 50)
    monkeypatch.setattr(intensities, "_COUNTED", 2**14)
    monkeypatch.setattr(intensities, "_PIXELS", 16)
    tracemalloc.start()
    sampled_range([crops(images)], 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < images.nbytes / 4 + 2 * 8 * 65_536 * 4


def test_chunks_are_read_once_where_a_part_holds_one(monkeypatch):
    plate = crops(np.zeros((100, 1, 4, 4), "uint8"))
    plate.images.chunk_rows = 10  # type: ignore[attr-defined]
    monkeypatch.setattr(intensities, "_PART_BYTES", 16 * 25)
    parts = list(intensities._parts(plate, np.arange(3, 97)))
    assert [(part[0], part[-1]) for part in parts] == [(3, 19), (20, 39), (40, 59), (60, 79), (80, 96)]
    monkeypatch.setattr(intensities, "_PART_BYTES", 16 * 4)
    parts = list(intensities._parts(plate, np.arange(3, 97)))
    assert np.concatenate(parts).tolist() == list(range(3, 97)) and max(map(len, parts)) == 4


def test_what_is_no_number_is_named_before_it_is_measured(tmp_path):
    images = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype("float32")
    images[[3, 7], 0, 1, 1] = np.nan
    with pytest.raises(ValueError, match=r"^plate has NaN or infinite pixels as float32: row 3 .c3., row 7 .c7.. Drop"):
        write_screen(tmp_path / "s.h5ad", crops(images), y_key="gene", dtype="uint8")
