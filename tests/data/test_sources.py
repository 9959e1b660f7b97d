from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.storage import MemoryStore

from scbd.data import ArraySource, ZarrSource
from scbd.data import _sources as sources
from scbd.data import _zarr_source as zarr_source
from scbd.data._hdf5_source import HDF5Source, memory_map_dataset, open_h5
from scbd.data._prefetch import map_in_threads, prefetch
from scbd.data._sources import FEATURES, IMAGE_DTYPES, ColumnSource, digest_cells, find_non_finite_rows, select_columns

KEY = "obsm/single_cell_images"
SHAPE = (23, 2, 4, 4)
IMAGES = np.arange(np.prod(SHAPE), dtype="uint16").reshape(SHAPE)


def check_rows(source, images=IMAGES) -> None:
    assert source.shape == images.shape and source.dtype == images.dtype
    for rows in (np.array([22, 0, 7, 8, 9, 7, 7]), slice(3, 20), slice(None), np.array([], dtype=int), np.arange(23)):
        out = np.empty_like(images[rows])
        assert source.read(rows, out) is out
        for read in (out, source.read(rows)):
            assert type(read) is np.ndarray and read.dtype == images.dtype
            np.testing.assert_array_equal(read, images[rows])
    for row in (-1, 23):
        with pytest.raises(IndexError, match="there are 23"):
            source.read(np.array([0, row]))


@pytest.mark.parametrize("dtype", IMAGE_DTYPES)
def test_array_source_memory_and_memory_map_return_requested_rows(tmp_path, dtype):
    cells = make_cells(23, dtype=dtype)
    images = cells.obsm["single_cell_images"]
    cells.write_h5ad(tmp_path / "cells.h5ad")
    on_disk = memory_map_dataset(open_h5(tmp_path / "cells.h5ad")[KEY])
    assert on_disk is not None and isinstance(on_disk.base, np.memmap)
    for array in (images, on_disk):
        source = ArraySource(array)
        check_rows(source, images)
        assert source.in_memory == (array is images)
    ArraySource(images).read(slice(0, 2))[:] = 1  # `read` returns a copy
    np.testing.assert_array_equal(images, on_disk)


def test_memory_map_dataset_compressed_returns_none(tmp_path):
    make_cells(50).write_h5ad(tmp_path / "c.h5ad", compression="gzip")
    assert memory_map_dataset(open_h5(tmp_path / "c.h5ad")[KEY]) is None


def test_array_source_view_is_read_without_full_copy(monkeypatch):
    """For a view from channels last to channels first, numpy's take would copy the whole array."""
    images = np.moveaxis(np.arange(3 * 4 * 4 * 2, dtype="uint16").reshape(3, 4, 4, 2), -1, 1)
    monkeypatch.setattr(np, "take", None)
    np.testing.assert_array_equal(ArraySource(images).read(np.array([2, 0])), images[[2, 0]])


def test_select_columns_returns_selected_channels():
    check_rows(select_columns(ArraySource(IMAGES), [1]), IMAGES[:, [1]])
    check_rows(ColumnSource(ArraySource(IMAGES), [1, 0, 1]), IMAGES[:, [1, 0, 1]])
    source = ArraySource(IMAGES)
    assert select_columns(source, [0, 1]) is source


def test_find_non_finite_rows_any_block_returns_rows():
    images = np.zeros((10, 2, 3, 3), dtype="float32")
    images[2, 1, 0, 0], images[9, 0, 2, 2] = np.nan, -np.inf
    assert find_non_finite_rows(ArraySource(images), block=4).tolist() == [2, 9]
    assert find_non_finite_rows(ArraySource(np.full((3, 1, 2, 2), 255, dtype="uint8"))).size == 0


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (np.zeros((5, 16, 16), "uint8"), ValueError, r"\(5, 16, 16\), images must be 4-D"),
        (np.zeros((5, 0, 4, 4), "uint8"), ValueError, r"\(5, 0, 4, 4\)"),
        *((np.zeros((5, 1, 4, 4), dtype), TypeError, "cast it") for dtype in ("float64", "int16", ">u2", "bool")),
        (zarr.create_array(store={}, shape=(4, 1, 8, 8), dtype="uint8"), TypeError, "zarr"),
        (np.ma.masked_greater(np.zeros((5, 1, 4, 4), "uint8"), 30), TypeError, "masked"),
    ],
)
def test_array_source_invalid_images_raises(images, error, message):
    with pytest.raises(error, match=message):
        ArraySource(images)


@pytest.mark.parametrize(
    "shape", [(16, 16, 2), (64, 64, 12), (64, 48, 3), (64, 64, 4), (8, 8, 1), (16, 100, 5)], ids=str
)
def test_array_source_channels_last_raises(shape):
    with pytest.raises(ValueError, match=r"np.moveaxis\(images, -1, 1\)"):
        ArraySource(np.zeros((5, *shape), dtype="uint8"))
    turned = np.moveaxis(np.zeros((5, *shape), dtype="uint8"), -1, 1)
    assert ArraySource(turned).shape == (5, shape[2], shape[0], shape[1])


@pytest.mark.parametrize(
    "shape",
    [(2, 16, 16), (1, 1, 1), (4, 3, 3), (3, 3, 3), (40, 5, 5), (40, 40, 40), (2, 16, 24), (4, 32, 160), (5, 100, 1)]
    + [(40, 12, 9), (2048, 1, 1), (3, 3, 2), (1, 64, 64), (16, 16, 24), (160, 32, 32)],
    ids=str,
)
def test_array_source_channels_first_of_any_size_is_accepted(shape):
    assert ArraySource(np.zeros((5, *shape), dtype="uint8")).shape == (5, *shape)


@pytest.mark.parametrize("chunks", [None, (4, 1, 2, 4), (23, 2, 1, 1)])
def test_hdf5_source_any_chunks_returns_requested_rows(tmp_path, chunks):
    with h5py.File(tmp_path / "c.h5", "w") as file:
        how = {} if chunks is None else {"chunks": chunks, "compression": "gzip"}
        source = HDF5Source(file.create_dataset("images", data=IMAGES, **how))
        check_rows(source)

        @given(st.lists(st.integers(0, 22), max_size=40))
        def check(rows):
            np.testing.assert_array_equal(source.read(np.array(rows, dtype=int)), IMAGES[rows])

        check()


def test_hdf5_source_damaged_file_raises_with_rows(tmp_path):
    with h5py.File(tmp_path / "c.h5", "w") as file:
        images = file.create_dataset("images", data=IMAGES, chunks=(4, 2, 4, 4), compression="gzip")
        at = images.id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "c.h5").read_bytes())
    data[at : at + 8] = b"damaged!"
    (tmp_path / "c.h5").write_bytes(bytes(data))
    with h5py.File(tmp_path / "c.h5") as file:
        source = HDF5Source(file["images"], "obsm['x']")
        source.read(np.array([0, 3]))
        with pytest.raises(ValueError, match=r"obsm.'x'. is damaged .* rows 4 to 5"):
            source.read(np.array([4, 5]))


CODECS = {
    "raw": None,
    "checked": [Crc32cCodec()],
    "lz4": [BloscCodec(cname="lz4")],
    "zstd, checked": [ZstdCodec(), Crc32cCodec()],
    "gzip": [GzipCodec()],
}


def write_zarr_array(store, *, chunks=1, shards=None, images=IMAGES, **kwargs):
    shards = None if shards is None else (shards, *images.shape[1:])
    chunks = (chunks, *images.shape[1:]) if isinstance(chunks, int) else chunks
    kwargs = {"compressors": None, "chunks": chunks, "shards": shards} | kwargs
    array = zarr.create_array(store, shape=images.shape, dtype=images.dtype, **kwargs)
    array[:] = images
    return array


@pytest.mark.parametrize("compressors", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize(("chunks", "shards"), [(1, None), (3, None), (1, 8), (4, 8), (23, None), (1, 64)])
def test_zarr_source_any_layout_returns_requested_rows(tmp_path, chunks, shards, compressors):
    source = ZarrSource(write_zarr_array(tmp_path / "a.zarr", chunks=chunks, shards=shards, compressors=compressors))
    assert source._decoders is not None
    check_rows(source)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shards": 8},
        {"filters": [TransposeCodec(order=(0, 2, 3, 1))]},
        {"serializer": BytesCodec(endian="big")},
        {"chunks": (5, 1, 3, 4)},
        {"zarr_format": 2},
    ],
    ids=str,
)
def test_zarr_source_unsupported_layouts_are_read_by_zarr(how):
    source = ZarrSource(write_zarr_array(MemoryStore(), **how))
    assert source._decoders is None
    check_rows(source)


@given(rows=st.lists(st.integers(0, 22), max_size=40), layout=st.sampled_from([(1, 8), (4, 8), (1, None)]))
def test_zarr_source_rows_in_any_order_are_returned(tmp_path_factory, rows, layout):
    store = tmp_path_factory.mktemp("store") / "a.zarr"
    source = ZarrSource(write_zarr_array(store, chunks=layout[0], shards=layout[1], compressors=[ZstdCodec()]))
    np.testing.assert_array_equal(source.read(np.array(rows, dtype=int)), IMAGES[rows])


@pytest.mark.parametrize("compressors", [None, [Crc32cCodec()], [ZstdCodec()]], ids=["raw", "checked", "zstd"])
def test_zarr_source_shard_with_reordered_chunks_returns_rows(tmp_path, compressors):
    """Some writers append chunks to a shard in the order in which they are finished."""
    array = write_zarr_array(tmp_path / "a.zarr", shards=8, compressors=compressors)
    path = tmp_path / "a.zarr" / "c" / "0" / "0" / "0" / "0"
    data = path.read_bytes()
    entries = np.frombuffer(data[-8 * 16 - 4 : -4], "<u8").reshape(8, 2).astype(int)
    turned, index = b"", np.zeros((8, 2), dtype="<u8")
    for chunk in (5, 0, 7, 2, 1, 6, 4, 3):
        offset, length = entries[chunk]
        index[chunk] = len(turned), length
        turned += data[offset : offset + length]
    path.write_bytes(turned + with_checksum(index.tobytes()))
    for rows in (slice(None), np.array([6, 2, 3]), np.array([7, 0])):
        np.testing.assert_array_equal(ZarrSource(array).read(rows), IMAGES[rows])


def with_checksum(data: bytes) -> bytes:
    """Append the CRC32C checksum."""
    from numcodecs.checksum32 import CRC32C

    return bytes(CRC32C(location="end").encode(data))


def test_zarr_source_more_files_than_kept_open_returns_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_source._ByteRangeReader, "_MOST", 2)
    source = ZarrSource(write_zarr_array(tmp_path / "a.zarr", shards=2))
    for _ in range(2):
        np.testing.assert_array_equal(source.read(np.arange(23)[::-1]), IMAGES[::-1])


@pytest.mark.parametrize("shards", [8, None])
def test_zarr_source_missing_chunks_return_fill_value(tmp_path, shards):
    """Zarr writes no chunk that is all fill value, and no shard without chunks."""
    images = IMAGES.copy()
    images[3:9] = 7
    images[16:] = 7
    source = ZarrSource(write_zarr_array(tmp_path / "a.zarr", shards=shards, images=images, fill_value=7))
    assert not (tmp_path / "a.zarr" / "c" / "22").exists()
    np.testing.assert_array_equal(source.read(slice(None)), images)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_zarr_source_empty_file_raises(tmp_path, chunks, compressors):
    """A file without bytes is truncated, in contrast to a missing file, whose values all equal the fill value."""
    array = write_zarr_array(tmp_path / "a.zarr", chunks=chunks, compressors=compressors)
    (tmp_path / "a.zarr" / "c" / "2" / "0" / "0" / "0").write_bytes(b"")
    source = ZarrSource(array)
    assert source.read(np.array([0])).any()
    with pytest.raises(ValueError, match="c/2/0/0/0 is damaged or truncated"):
        source.read(np.array([0, 2 * chunks]))


def test_zarr_source_index_at_start_without_checksum_returns_rows(tmp_path):
    codec = ShardingCodec(
        chunk_shape=(1, *SHAPE[1:]), codecs=[BytesCodec()], index_codecs=[BytesCodec()], index_location="start"
    )
    array = zarr.create(
        store=tmp_path / "a.zarr", shape=SHAPE, dtype="uint16", chunks=(8, *SHAPE[1:]), codecs=[codec], zarr_format=3
    )
    array[:] = IMAGES
    check_rows(ZarrSource(array))


def test_zarr_source_invalid_shape_or_dtype_raises(tmp_path):
    with pytest.raises(ValueError, match=r"images has shape .23, 32."):
        ZarrSource(zarr.create_array(MemoryStore(), shape=(23, 32), dtype="uint16"))
    with pytest.raises(TypeError, match="int64"):
        ZarrSource(write_zarr_array(MemoryStore(), images=IMAGES.astype("int64")))
    features = np.random.default_rng(0).random((23, 5), dtype="float32")
    check_rows(ZarrSource(write_zarr_array(tmp_path / "f.zarr", images=features, chunks=4), "X", FEATURES), features)


def test_zarr_source_damaged_index_raises(tmp_path):
    array = write_zarr_array(tmp_path / "a.zarr", shards=8)
    path = tmp_path / "a.zarr" / "c" / "1" / "0" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    for damaged in (bytes(data), b""):
        path.write_bytes(damaged)
        source = ZarrSource(array)
        source.read(np.array([3]))
        with pytest.raises(ValueError, match="c/1/0/0/0 is damaged or truncated, with rows 8 to 15 of images"):
            source.read(np.array([8]))


@given(st.integers(0, 20), st.integers(1, 200), st.integers(1, 50))
def test_byte_range_reader_short_reads_return_all_bytes(start, length, most):
    """A system call may read fewer bytes than requested."""
    data, preadv = bytes(range(256)), os.preadv
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "file").write_bytes(data)
        patch.setattr(os, "preadv", lambda file, targets, offset: preadv(file, [targets[0][:most]], offset))
        found = zarr_source._ByteRangeReader(Path(folder)).read("file", start, length)
        assert found.tobytes() == data[start : start + length]


def test_byte_range_reader_missing_bytes_raises(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    files = zarr_source._ByteRangeReader(tmp_path)
    assert files.read("file", -6, 6).tolist() == list(range(250, 256))
    for start, length in ((250, 10), (256, 1), (-300, 300)):
        with pytest.raises(EOFError):
            files.read("file", start, length)
    with pytest.raises(FileNotFoundError):
        files.read("none", 0, 1)


def digest(cells, columns=("gene", "well")):
    return digest_cells(ArraySource(cells.obsm["single_cell_images"]), cells.obs[list(columns)])


def corrected(cells):
    """Change rows after the 64th: the digest includes rows drawn from all."""
    cells.obsm["single_cell_images"][70:] += 1


def relabelled(cells):
    cells.obs["gene"] = np.where(np.arange(cells.n_obs) == 7, "gene_1", cells.obs["gene"].astype(str))


def wider(cells):
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"].astype("uint16")


def reshaped(cells):
    """Keep the same bytes in another shape."""
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"].reshape(-1, 1, 32, 16)


def renamed(cells):
    cells.obs = cells.obs.rename(columns={"gene": "well", "well": "gene"})


def turned(cells):
    cells.obs = cells.obs.iloc[::-1]


@pytest.mark.parametrize("change", [corrected, relabelled, reshaped, wider, renamed, turned])
def test_digest_cells_changed_cells_differ(cells, monkeypatch, change):
    monkeypatch.setattr(sources, "_HASH_BLOCK_ROWS", 10)
    before, again = digest(cells), cells.copy()
    again.obs["gene"] = again.obs["gene"].cat.reorder_categories(again.obs["gene"].cat.categories[::-1])
    assert digest(again) == before
    change(cells)
    assert digest(cells) != before


def test_digest_cells_many_categories_hashes_only_those_of_a_block(cells, monkeypatch):
    """Regression: all categories, here the names of all cells, were hashed again with every block of rows."""
    hashed = []
    original = pd.Categorical._hash_pandas_object

    def count_categories(values, **how):
        hashed.append(len(values.categories))
        return original(values, **how)

    monkeypatch.setattr(pd.Categorical, "_hash_pandas_object", count_categories)
    monkeypatch.setattr(sources, "_HASH_BLOCK_ROWS", 10)
    cells.obs["name"] = pd.Categorical(cells.obs_names)
    digest_cells(None, cells.obs[["name"]])
    assert max(hashed) == 10


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_prefetch_returns_items_in_order_from_a_thread(ahead):
    def item(number):
        return number, threading.current_thread().name.split("_")[0]

    assert list(prefetch(map(item, range(20)), ahead)) == [(number, "scbd-prefetch") for number in range(20)]
    assert list(prefetch([])) == [] and not threads_of("scbd-prefetch")


def test_prefetch_ahead_limits_items_in_advance():
    made = []
    third = threading.Event()

    def items():
        for item in range(10):
            made.append(item)
            if item == 3:
                third.set()
            yield item

    iterator = prefetch(items(), ahead=2)
    assert next(iterator) == 0
    assert third.wait(10)  # two items wait, and the thread holds a third one
    assert made == [0, 1, 2, 3]
    iterator.close()
    assert not threads_of("scbd-prefetch")


def test_prefetch_error_is_raised_in_place_of_its_item():
    def items():
        yield 1
        raise OSError("the disk is gone")

    iterator = prefetch(items())
    assert next(iterator) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not threads_of("scbd-prefetch")


def test_map_in_threads_returns_results_in_order():
    def slow_at_first(item):
        time.sleep(0.02 / (1 + item))
        return item, threading.current_thread().name.split("_")[0], torch.get_num_threads()

    threads = torch.get_num_threads()
    assert list(map_in_threads(slow_at_first, range(9))) == [(item, "scbd-worker", 1) for item in range(9)]
    assert torch.get_num_threads() == threads
    met = threading.Barrier(2, timeout=10)  # two threads work at the same time
    assert sorted(map_in_threads(lambda _: met.wait(), range(2))) == [0, 1]


@pytest.mark.parametrize("how", ["error", "leaving early"])
def test_map_in_threads_ending_early_starts_no_more_items(how):
    begun = []

    def work(item):
        begun.append(item)
        if item == 1 and how == "error":
            raise OSError("the disk is full")
        time.sleep(0.01)

    results = map_in_threads(work, range(1000))
    if how == "error":
        with pytest.raises(OSError, match="the disk is full"):
            list(results)
    else:
        next(results)
        results.close()
    assert len(begun) < 1000 and not threads_of("scbd-worker")
