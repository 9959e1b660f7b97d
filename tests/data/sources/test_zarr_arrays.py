from __future__ import annotations

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec
from zarr.storage import MemoryStore

from scbd.data.sources import ZarrSource
from scbd.data.sources._zarr_codecs import checksum

SHAPE = (23, 2, 4, 4)
IMAGES = np.arange(np.prod(SHAPE), dtype="uint16").reshape(SHAPE)
CODECS = {
    "raw": None,
    "checked": [Crc32cCodec()],
    "lz4": [BloscCodec(cname="lz4")],
    "zstd, checked": [ZstdCodec(), Crc32cCodec()],
    "gzip": [GzipCodec()],
}


def stored(store, *, chunks=1, shards=None, images=IMAGES, **kwargs):
    shards = None if shards is None else (shards, *images.shape[1:])
    kwargs = {"compressors": None, "chunks": (chunks, *images.shape[1:]), "shards": shards} | kwargs
    array = zarr.create_array(store, shape=images.shape, dtype=images.dtype, **kwargs)
    array[:] = images
    return array


@pytest.mark.parametrize("compressors", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize(("chunks", "shards"), [(1, None), (3, None), (1, 8), (4, 8), (23, None), (1, 64)])
@pytest.mark.parametrize("where", ["disk", "object store"])
def test_rows_as_asked_from_any_layout(tmp_path, where, chunks, shards, compressors):
    store = tmp_path / "a.zarr" if where == "disk" else MemoryStore()
    array = stored(store, chunks=chunks, shards=shards, compressors=compressors)
    np.testing.assert_array_equal(ZarrSource(array, verify=True).read(slice(None)), IMAGES)
    source = ZarrSource(array)
    assert source.shape == SHAPE and source.dtype == np.uint16
    for rows in (np.array([22, 0, 7, 8, 9, 7, 7]), slice(3, 20), slice(None), np.array([], dtype=int), np.arange(23)):
        out = np.empty_like(IMAGES[rows])
        assert source.read(rows, out) is out
        np.testing.assert_array_equal(out, IMAGES[rows])
        np.testing.assert_array_equal(source.read(rows), IMAGES[rows])
    with pytest.raises(IndexError, match="Rows 0 to 23 were asked for, there are 23"):
        source.read(np.array([0, 23]))


@given(rows=st.lists(st.integers(0, 22), max_size=40), layout=st.sampled_from([(1, 8), (4, 8), (1, None)]))
def test_any_rows_in_any_order(rows, layout):
    source = ZarrSource(stored(MemoryStore(), chunks=layout[0], shards=layout[1], compressors=[ZstdCodec()]))
    np.testing.assert_array_equal(source.read(np.array(rows, dtype=int)), IMAGES[rows])


@pytest.mark.parametrize("compressors", [None, [ZstdCodec()]], ids=["raw", "zstd"])
def test_chunks_lie_in_a_shard_in_any_order(tmp_path, compressors):
    """As those of a writer that fills a shard as chunks become ready."""
    array = stored(tmp_path / "a.zarr", shards=8, compressors=compressors)
    path = tmp_path / "a.zarr" / "c" / "0" / "0" / "0" / "0"
    data = path.read_bytes()
    entries = np.frombuffer(data[-8 * 16 - 4 : -4], "<u8").reshape(8, 2).astype(int)
    turned, index = b"", np.zeros((8, 2), dtype="<u8")
    for chunk in (5, 0, 7, 2, 1, 6, 4, 3):
        offset, length = entries[chunk]
        index[chunk] = len(turned), length
        turned += data[offset : offset + length]
    path.write_bytes(turned + index.tobytes() + checksum(index.tobytes()).to_bytes(4, "little"))
    for rows in (slice(None), np.array([6, 2, 3]), np.array([7, 0])):
        np.testing.assert_array_equal(ZarrSource(array).read(rows), IMAGES[rows])


def test_far_more_files_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr("scbd.data.sources._byte_ranges._OPEN_FILES", 2)
    source = ZarrSource(stored(tmp_path / "a.zarr", shards=2))
    for _ in range(2):
        np.testing.assert_array_equal(source.read(np.arange(23)[::-1]), IMAGES[::-1])


def test_what_a_foreign_store_leaves_out_is_its_fill_value(tmp_path):
    """Zarr writes no chunk that is all fill value, and no shard without chunks."""
    images = IMAGES.copy()
    images[3:9] = 7
    images[16:] = 7
    source = ZarrSource(stored(tmp_path / "a.zarr", shards=8, images=images, fill_value=7))
    assert not (tmp_path / "a.zarr" / "c" / "2").exists()
    np.testing.assert_array_equal(source.read(slice(None)), images)
    source = ZarrSource(stored(tmp_path / "b.zarr", images=images, fill_value=7))
    np.testing.assert_array_equal(source.read(slice(None)), images)


def test_an_index_at_the_beginning_without_a_checksum(tmp_path):
    codec = ShardingCodec(
        chunk_shape=(1, *SHAPE[1:]), codecs=[BytesCodec()], index_codecs=[BytesCodec()], index_location="start"
    )
    array = zarr.create(
        store=tmp_path / "a.zarr", shape=SHAPE, dtype="uint16", chunks=(8, *SHAPE[1:]), codecs=[codec], zarr_format=3
    )
    array[:] = IMAGES
    np.testing.assert_array_equal(ZarrSource(array).read(slice(None)), IMAGES)


def test_what_is_not_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="images has shape .23, 32., images must be 4-D"):
        ZarrSource(zarr.create_array(MemoryStore(), shape=(23, 32), dtype="uint16"))
    with pytest.raises(TypeError, match="dtype int64: cast it"):
        ZarrSource(stored(MemoryStore(), images=IMAGES.astype("int64")))
    with pytest.raises(ValueError, match=r"crops is cut into chunks of \(23, 1, 4, 4\) .*write_screen"):
        ZarrSource(zarr.create_array(MemoryStore(), shape=SHAPE, dtype="uint16", chunks=(23, 1, 4, 4)), "crops")
    with pytest.raises(ValueError, match="is cut into chunks of .* .format 2."):
        ZarrSource(zarr.create_array(MemoryStore(), shape=SHAPE, dtype="uint16", chunks=(1, 2, 4, 4), zarr_format=2))
    big = stored(MemoryStore(), serializer=BytesCodec(endian="big"))
    with pytest.raises(ValueError, match="numbers that are big-endian, which is not read here: convert the store"):
        ZarrSource(big)
    from zarr.codecs import TransposeCodec

    turned = stored(MemoryStore(), filters=[TransposeCodec(order=(0, 2, 3, 1))])
    with pytest.raises(ValueError, match="is stored with TransposeCodec, which is not read here"):
        ZarrSource(turned)


def test_a_damaged_index_is_found(tmp_path):
    array = stored(tmp_path / "a.zarr", shards=8)
    path = tmp_path / "a.zarr" / "c" / "1" / "0" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))
    source = ZarrSource(array)
    source.read(np.array([3]))
    with pytest.raises(ValueError, match="c/1/0/0/0 is damaged or truncated, with rows 8 to 15 of images .a checksum"):
        source.read(np.array([8]))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="with rows 8 to 15"):
        source.read(np.array([8]))
