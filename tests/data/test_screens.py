from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from anndata import AnnData
from conftest import make_cells, make_plates, make_wells
from helpers.crash_injection import WRITING, kill_until
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from torch.nn import functional as F

from scbd.data import (
    ArraySource,
    Crops,
    _readers,
    open_embedding,
    open_screen,
    resize_images,
    verify_screen,
    write_screen,
)
from scbd.data import _screens as screens
from scbd.data._block_store import BlockStore
from scbd.data._input_location import image_source
from scbd.data._intensity_range import estimate_intensity_range, percentiles_from_counts
from scbd.data._storable import as_storable
from scbd.metrics import aggregate

IMAGES = "single_cell_images"
COMPRESSIONS = [None, "lz4", "zstd"]


def images_of(adata: AnnData) -> np.ndarray:
    return image_source(adata, IMAGES).read(slice(None))


def are_equal(one: AnnData, other: AnnData) -> bool:
    return one.obs.equals(other.obs) and np.array_equal(images_of(one), images_of(other))


def crops_of(images: np.ndarray, name: str = "plate", **columns: Any) -> Crops:
    obs = pd.DataFrame({"gene": "x"} | columns, index=[f"c{row}" for row in range(len(images))])
    return Crops(ArraySource(images), obs, [f"channel_{c}" for c in range(images.shape[1])], name)


@pytest.fixture
def small_blocks(monkeypatch):
    """Set the size of blocks to 25 rows of the plates."""
    monkeypatch.setattr(screens, "_BLOCK_BYTES", 25 * 2 * 16 * 16 * 2)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_write_screen_plates_are_sorted_by_label_and_shuffled_within(tmp_path, small_blocks, compression):
    given = make_plates()
    adata = write_screen(tmp_path / "s.zarr", given, y_key="gene", compression=compression)
    assert adata.n_obs == 120 and list(adata.var["channels"]) == ["channel_0", "channel_1"]
    assert adata.obs["gene"].astype(str).is_monotonic_increasing
    for _, rows in adata.obs.groupby("gene", observed=True):
        assert not rows["plate"].astype(str).is_monotonic_increasing and not rows.index.is_monotonic_increasing
    images = images_of(adata)
    for name, image in zip(adata.obs_names, images, strict=True):
        number, row = image[0, 0, :2]
        assert name == f"cell_{row}-{number}" and adata.obs.loc[name, "plate"] == f"plate_{number}"
        np.testing.assert_array_equal(image, given[number].obsm[IMAGES][row])
    # zarr reads the same images
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "s.zarr", path=f"obsm/{IMAGES}", mode="r")[:], images)
    assert not list(tmp_path.glob(".*"))
    verify_screen(tmp_path / "s.zarr")


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("killed_at", range(5))
def test_write_screen_killed_after_any_block_resumes(tmp_path, monkeypatch, small_blocks, killed_at):
    whole = write_screen(tmp_path / "whole.zarr", make_plates(), y_key="gene")
    original = BlockStore.write
    written: list[int] = []

    def write_or_die(self, block, values):
        if len(written) >= killed_at:
            raise KeyboardInterrupt
        written.append(block)
        original(self, block, values)

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "write", write_or_die)
        with pytest.raises(KeyboardInterrupt):
            write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene")
    assert not (tmp_path / "s.zarr").exists()
    for half in tmp_path.glob(".*/store/obsm/*/c/4/0/0/0"):  # a block without a marker may be written in part
        half.write_bytes(half.read_bytes()[:100])
        (tmp_path / ".s.zarr.partial" / "done" / "4").unlink()
        written.remove(4)
    again: list[int] = []

    def record_and_call(self, block, values):
        again.append(block)
        original(self, block, values)

    monkeypatch.setattr(BlockStore, "write", record_and_call)
    assert are_equal(write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene"), whole)
    assert sorted([*again, *written]) == list(range(5))  # no block is written twice


def test_write_screen_killed_at_random_moments_resumes(tmp_path):
    path = tmp_path / "s.zarr"
    whole = write_screen(tmp_path / "whole.zarr", make_plates(3, 100), y_key="gene")
    assert kill_until(path, WRITING.format(path=str(path), compression="lz4"), longest=0.5) >= 2
    verify_screen(path)
    assert are_equal(open_screen(path), whole)


@pytest.mark.parametrize(
    "changed",
    [{"plates": make_plates(2)}, {"y_key": "well"}, {"image_size": 8}, {"seed": 1}, {"compression": "lz4"}]
    + [{"plates": "corrected"}, {"dtype": "uint8", "intensity_range": (0, 301)}],
    ids=str,
)
def test_write_screen_partial_store_of_other_arguments_raises(tmp_path, monkeypatch, changed):
    arguments: dict[str, Any] = {"plates": make_plates(), "y_key": "gene"}
    if "dtype" in changed:
        arguments |= {"dtype": "uint8", "intensity_range": (0, 300)}
    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_screen(tmp_path / "s.zarr", **arguments)
    if changed == {"plates": "corrected"}:  # equal table, other pixels
        changed = {"plates": make_plates()}
        changed["plates"][1].obsm[IMAGES] += np.uint16(1)
    with pytest.raises(ValueError, match=r"s.zarr.partial is the beginning of something else"):
        write_screen(tmp_path / "s.zarr", **(arguments | changed))
    assert write_screen(tmp_path / "s.zarr", **arguments).n_obs == 120
    with pytest.raises(FileExistsError, match=r"s.zarr"):
        write_screen(tmp_path / "s.zarr", **arguments)


def test_write_screen_remains_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".s.zarr.partial" / "done").mkdir(parents=True)
    (tmp_path / ".s.zarr.partial.0123" / "store").mkdir(parents=True)
    assert write_screen(tmp_path / "s.zarr", make_cells(8), y_key="gene").n_obs == 8
    assert not list(tmp_path.glob(".*"))


class SingleThreadImages:
    """Images that may only be read by one thread at a time."""

    in_memory = False

    def __init__(self, images: np.ndarray) -> None:
        self.shape, self.dtype, self._images = images.shape, images.dtype, images
        self._reading = threading.Lock()

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        assert self._reading.acquire(blocking=False)
        time.sleep(0.001)
        found = self._images[rows]
        self._reading.release()
        return found


def test_write_screen_shared_source_is_read_by_one_thread_at_a_time(tmp_path, small_blocks):
    plate = make_plates(1)[0]
    source: Any = SingleThreadImages(plate.obsm[IMAGES])
    halves = [Crops(source, plate.obs, ["a", "b"], name) for name in ("one", "the same again")]
    assert write_screen(tmp_path / "s.zarr", halves, y_key="gene").n_obs == 80


def test_write_screen_chunked_plates_are_read_once(tmp_path, monkeypatch, small_blocks):
    for number, plate in enumerate(make_plates()):
        plate.write_h5ad(tmp_path / f"{number}.h5ad", compression="gzip" if number else None)
    reads: list[Any] = []
    original = screens.read_crops

    def count_reads(path, **how):
        crops: Any = original(path, **how)
        if getattr(crops.images, "chunk_rows", 1) > 1:
            read = crops.images.read

            def record_and_call(rows, out=None):
                reads.append(rows)
                return read(rows, out)

            crops.images.read = record_and_call
        return crops

    monkeypatch.setattr(screens, "read_crops", count_reads)
    files = [tmp_path / f"{number}.h5ad" for number in range(3)]
    adata = write_screen(tmp_path / "s.zarr", files, y_key="gene", dtype="uint8", intensity_range=(0, 255))
    assert all(isinstance(rows, slice) for rows in reads)
    assert len({(rows.start, rows.stop) for rows in reads}) * 2 == len(reads)  # each slice once per plate
    given = np.concatenate([plate.obsm[IMAGES] for plate in make_plates()]).clip(0, 255).astype("uint8")
    assert sorted(map(bytes, images_of(adata))) == sorted(map(bytes, given))
    assert set(adata.obs["source"]) == {"0", "1", "2"} and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_write_screen_non_finite_pixels_raises(tmp_path, dtype):
    plate = make_cells(12, dtype="float32")
    plate.obsm[IMAGES][[3, 7], 0, 0, 0] = 70_000 if dtype == "float16" else np.nan
    how: dict[str, Any] = {"intensity_range": (0, 255)} if dtype == "uint8" else {}
    with pytest.raises(ValueError, match=r"plate 0 .* as float(16|32): row . \(cell_.\)"):
        write_screen(tmp_path / "s.zarr", plate, y_key="gene", dtype=dtype, **how)
    assert not (tmp_path / "s.zarr").exists()


def test_write_screen_screen_and_new_plate_returns_cells_of_both(tmp_path):
    write_screen(tmp_path / "s.zarr", make_plates(2), y_key="gene")
    both = write_screen(tmp_path / "both.zarr", [tmp_path / "s.zarr", make_plates(3)[2]], y_key="gene")
    assert sorted(map(bytes, images_of(both))) == sorted(bytes(i) for p in make_plates(3) for i in p.obsm[IMAGES])
    pairs = both.obs[["source", "plate"]].drop_duplicates().sort_values("plate").to_numpy().tolist()
    assert pairs == [["plate 0", "plate_0"], ["plate 1", "plate_1"], ["plate 1 2", "plate_2"]]


def test_write_screen_image_size_and_dtype_convert_pixels(tmp_path):
    given = make_plates(1)[0]
    given.obsm[IMAGES] = given.obsm[IMAGES] * np.uint16(100)
    how: dict[str, Any] = {"image_size": 8, "dtype": "uint8", "intensity_range": (0, 25_500)}
    adata = write_screen(tmp_path / "s.zarr", given, y_key="gene", **how)
    images = images_of(adata)
    assert images.shape == (40, 2, 8, 8) and images.dtype == np.uint8
    rows = torch.from_numpy(given.obsm[IMAGES][given.obs_names.get_indexer(adata.obs_names)]).float()
    resized = F.interpolate(rows, (8, 8), mode="bilinear", antialias=True).numpy()
    np.testing.assert_allclose(images, (resized / 100).clip(0, 255), atol=0.51)
    np.testing.assert_array_equal(adata.uns["scbd_store"]["intensity_range"], [[0, 25_500]] * 2)
    found = write_screen(tmp_path / "auto.zarr", given, y_key="gene", dtype="uint8")
    low, high = found.uns["scbd_store"]["intensity_range"].T
    exact = np.percentile(np.moveaxis(given.obsm[IMAGES], 1, 0).reshape(2, -1), [0.1, 99.9], axis=1)
    np.testing.assert_allclose([low, high], exact, rtol=1e-6)
    assert images_of(found).max() == 255 and images_of(found).min() == 0
    assert images_of(write_screen(tmp_path / "f.zarr", given, y_key="gene", dtype="float32")).dtype == np.float32
    assert images_of(write_screen(tmp_path / "h.zarr", make_cells(9), y_key="gene", dtype="float16")).dtype == "float16"


def test_write_screen_non_square_crops_to_square_size_raises(tmp_path):
    square, wide = make_cells(20), make_cells(20, shape=(2, 8, 40))
    with pytest.raises(ValueError, match="plate 1: image_size=8"):
        write_screen(tmp_path / "s.zarr", [square, wide], y_key="gene", image_size=8)
    assert not list(tmp_path.iterdir())
    screen = write_screen(tmp_path / "s.zarr", [square, wide], y_key="gene", image_size=(8, 12))
    assert screen.obsm[IMAGES].shape == (40, 2, 8, 12)
    kept = write_screen(tmp_path / "kept.zarr", wide, y_key="gene", image_size=(4, 20))
    np.testing.assert_array_equal(images_of(kept), resize_images(wide[kept.obs_names].obsm[IMAGES], (4, 20)))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_verify_screen_damaged_or_missing_block_raises(tmp_path, small_blocks, compression):
    path = tmp_path / "s.zarr"
    write_screen(path, make_plates(), y_key="gene", compression=compression)
    verify_screen(path)
    block = path / "obsm" / IMAGES / "c" / "1" / "0" / "0" / "0"
    flip(block, 2000)
    with pytest.raises(ValueError, match="damaged in 1 place:.*c/1/0/0/0 is damaged, with rows 25 to 49"):
        verify_screen(path)
    if compression is not None:  # reading raises, too
        with pytest.raises(ValueError, match="c/1/0/0/0 is damaged or truncated, with rows 25 to 49"):
            images_of(open_screen(path))
    os.truncate(block, 3000)
    with pytest.raises(ValueError, match="c/1/0/0/0 is damaged, with rows 25 to 49"):
        verify_screen(path)
    with pytest.raises(ValueError, match="c/1/0/0/0 is damaged or truncated, with rows 25 to 49"):
        image_source(open_screen(path), IMAGES).read(np.array([45]))
    block.unlink()
    with pytest.raises(ValueError, match="c/1/0/0/0 is missing, with rows 25 to 49"):
        verify_screen(path)
    with pytest.raises(FileNotFoundError, match="c/1/0/0/0 is missing, with rows 25 to 49"):
        image_source(open_screen(path), IMAGES).read(np.array([3, 45]))
    # rows of intact blocks can still be read
    assert len(image_source(open_screen(path), IMAGES).read(np.array([3, 65]))) == 2


def test_write_screen_empty_images_are_stored(tmp_path, monkeypatch):
    """By default, Zarr does not write empty chunks, which then look like lost ones."""
    monkeypatch.setattr(screens, "_BLOCK_BYTES", 4 * 32)
    images = np.zeros((12, 2, 4, 4), "uint8")
    images[6:] = 255
    write_screen(tmp_path / "s.zarr", crops_of(images), y_key="gene")
    verify_screen(tmp_path / "s.zarr")
    assert images_of(open_screen(tmp_path / "s.zarr")).sum() == images.sum(dtype=int)


def make_labelled_cells() -> AnnData:
    found = make_cells(30)
    found.obs["day"] = np.arange(30)
    found.obs["seen"] = np.arange(30) % 3 == 0
    found.obs["count"] = pd.array([None, *range(29)], dtype="Int64")
    return found


def write_embedding(path: Path, n: int = 30) -> np.ndarray:
    values = np.random.default_rng(0).random((n, 2), dtype=np.float32)
    store = BlockStore(path, {"obs": make_cells(n).obs}, {"X": ((n, 2), np.dtype("f4"))}, 8, "x")
    assert not store.begin().any()
    for block in range(4):
        assert not store.finish()
        store.write(block, {"X": values[store.rows(block)]})
    assert store.finish()
    return values


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["s.zarr", "z.zarr"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_screen_random_damage_raises(tmp_path, monkeypatch, name, damage):
    """Damage that `verify_screen` does not find leaves the values that are read unchanged."""
    monkeypatch.setattr(screens, "_BLOCK_BYTES", 16 * 2 * 16 * 16)
    whole, copy = tmp_path / "whole" / name, tmp_path / name
    whole.parent.mkdir()
    if name == "s.zarr":
        write_screen(whole, make_labelled_cells(), y_key="gene", compression="zstd")
    else:
        write_embedding(whole)
    verify_screen(whole)

    def read(path: Path) -> str:
        adata = open_embedding(path) if name == "z.zarr" else open_screen(path)
        values = adata.obsm["X"] if name == "z.zarr" else images_of(adata)
        tables = [f"{frame.dtypes.to_dict()} {frame.reset_index().to_csv()}" for frame in (adata.obs, adata.var)]
        return repr([*tables, values.tobytes()])

    right, rng, found = read(whole), np.random.default_rng(0), 0
    files = sorted(file for file in whole.rglob("*") if file.is_file())
    shutil.copytree(whole, copy)
    for _ in range(25):
        file = copy / files[rng.integers(len(files))].relative_to(whole)
        sound = file.read_bytes()
        data = bytearray(sound)
        if damage == "flip":
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        file.write_bytes(data[: rng.integers(len(data))] if damage == "cut" else data)
        if damage == "remove":
            file.unlink()
        try:
            verify_screen(copy)
            assert read(copy) == right
        except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
            found += 1
        file.write_bytes(sound)
    assert found > 15


def test_verify_screen_foreign_file_raises(tmp_path):
    make_cells(10).write_h5ad(tmp_path / "foreign.h5ad")
    with pytest.raises(ValueError, match="foreign.h5ad has no checksums"):
        verify_screen(tmp_path / "foreign.h5ad")
    with pytest.raises(FileNotFoundError, match=r"none.zarr"):
        verify_screen(tmp_path / "none.zarr")


def test_open_embedding_returns_written_values_or_raises(tmp_path):
    values = write_embedding(tmp_path / "z.zarr")
    verify_screen(tmp_path / "z.zarr")
    found = open_embedding(tmp_path / "z.zarr")
    np.testing.assert_array_equal(found.obsm["X"], values)
    assert type(found.obsm["X"]) is np.ndarray and found.obs.equals(make_cells(30).obs)
    flip(tmp_path / "z.zarr" / "obsm" / "X" / "c" / "2" / "0", 3)
    with pytest.raises(ValueError, match="c/2/0 is damaged or truncated, with rows 16 to 23"):
        open_embedding(tmp_path / "z.zarr")
    with pytest.raises(FileNotFoundError, match=r"none.zarr"):
        open_embedding(tmp_path / "none.zarr")


def test_block_store_several_writers_share_blocks(tmp_path):

    def make_store(digest: str = "x") -> BlockStore:
        return BlockStore(tmp_path / "z.zarr", {"obs": make_cells(30).obs}, {"X": ((30, 2), np.dtype("f4"))}, 8, digest)

    stores = [make_store(), make_store()]
    for store in stores:
        store.begin()
    for block in range(4):
        stores[block % 2].write(block, {"X": np.full((min(8, 30 - 8 * block), 2), block, "f4")})
    assert stores[1].begin().all()
    assert stores[0].finish() and stores[1].finish()
    assert make_store().begin().all()  # a late process finds all blocks written
    np.testing.assert_array_equal(open_embedding(tmp_path / "z.zarr").obsm["X"][:, 0], np.arange(30) // 8)
    with pytest.raises(FileExistsError, match=r"z.zarr"):
        make_store("another").begin()


@pytest.mark.parametrize(("number", "is_expected"), [(errno.ENOTEMPTY, True), (errno.EACCES, False)])
def test_block_store_rename_fails_only_expected_errors_are_ignored(tmp_path, monkeypatch, number, is_expected):
    """Another process may begin the same store at the same time; all other errors are raised."""
    store = BlockStore(tmp_path / "z.zarr", {"obs": make_cells(30).obs}, {"X": ((30, 2), np.dtype("f4"))}, 8, "x")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if is_expected:
            rename(source, target)  # by the other process
        raise OSError(number, "renaming failed")

    monkeypatch.setattr(os, "rename", fail)
    if is_expected:
        assert not store.begin().any()
    else:
        with pytest.raises(PermissionError, match="renaming failed"):
            store.begin()
        assert not list(tmp_path.iterdir())


def test_write_screen_invalid_input_raises_before_writing(tmp_path, monkeypatch):
    ours, other = make_plates(), make_plates(1)[0]
    other.var_names = ["dna", "actin"]
    small = make_cells(8, shape=(2, 8, 8), dtype="uint16")
    unnamed = make_plates(1)[0]
    unnamed.obs.loc["cell_3", "gene"] = np.nan
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "ends in .zarr", {"path": tmp_path / "s.h5ad"}),
        (ValueError, "compression='gzip'", {"compression": "gzip"}),
        (ValueError, "no plate", {"plates": []}),
        (ValueError, "none.h5ad is given twice", {"plates": [tmp_path / "none.h5ad", str(tmp_path / "none.h5ad")]}),
        (ValueError, "plate 0 .AnnData. and plate 1 .AnnData. are one", {"plates": [ours[0], ours[0]]}),
        (KeyError, "plate 0: obs has no 'perturbation'", {"y_key": "perturbation"}),
        (ValueError, "plate 1: obs.'gene'.", {"plates": [ours[0], unnamed]}),
        (ValueError, "plate 1 has channels dna, actin .uint16., plate 0 has", {"plates": [ours[0], other]}),
        (ValueError, "plate 1 has 8 × 8 pixels, plate 0 16 × 16: give image_size", {"plates": [ours[0], small]}),
        (ValueError, "image_size", {"image_size": 0}),
        (TypeError, "dtype='int64'", {"dtype": "int64"}),
        (ValueError, "dtype='float16'", {"dtype": "float16"}),
        (ValueError, "Intensities do not change from uint16 to uint16", {"intensity_range": (0, 1)}),
        (ValueError, "intensity_range", {"dtype": "uint8", "intensity_range": (1, 0)}),
        (FileNotFoundError, "none.h5ad", {"plates": tmp_path / "none.h5ad"}),
    ]
    for error, message, changed in cases:
        with pytest.raises(error, match=message):
            write_screen(**({"path": tmp_path / "s.zarr", "plates": ours, "y_key": "gene"} | changed))
    size = 120 * 2 * 16 * 16 * 2
    for free in (size - 1, size):
        assert not list(tmp_path.glob("*"))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if free < size:
            with pytest.raises(OSError, match="s.zarr takes .* the disk has"):
                write_screen(tmp_path / "s.zarr", ours, y_key="gene")
    assert write_screen(tmp_path / "s.zarr", ours, y_key="gene").n_obs == 120


def test_write_screen_duplicate_cell_names_become_unique(tmp_path):
    one, two = make_plates(2, cells=4)
    one.obs_names = ["x", "x", "x-1", "y"]
    two.obs_names = ["x", "z", "z", "w"]
    two.obs["batch"] = "late"
    crops = [Crops(ArraySource(each.obsm[IMAGES]), each.obs, ["a", "b"]) for each in (one, two)]
    alone = write_screen(tmp_path / "one.zarr", crops[0], y_key="gene").obs
    assert alone.index.is_unique and {"x", "x-1", "y"} < set(alone.index) and list(alone) == list(one.obs)
    both = write_screen(tmp_path / "both.zarr", crops, y_key="gene").obs
    assert both.index.is_unique and {"x-0", "x-1", "y-0", "w-1"} < set(both.index)
    assert both["batch"].isna().sum() == 4 and set(both["source"]) == {"cells 0", "cells 1"}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/p1.h5sc", "x/p2.h5sc"], ["p1", "p2"]),
        (["x/p1/cells.csv", "x/p2/cells.csv"], ["p1/cells.csv", "p2/cells.csv"]),
        (["plate.1", "plate.2"], ["plate.1", "plate.2"]),
        (["cells.csv", "a/cells.csv"], ["cells.csv", "a/cells.csv"]),
    ],
)
def test_write_screen_source_is_shortest_unique_path(tmp_path, paths, names):
    plates = [crops_of(np.full((3, 1, 4, 4), n, "uint8"), path) for n, path in enumerate(paths)]
    screen = write_screen(tmp_path / "s.zarr", plates, y_key="gene")
    assert [names[image[0, 0, 0]] for image in images_of(screen)] == screen.obs["source"].tolist()


def test_write_screen_file_names_not_utf8_are_stored_as_text(tmp_path):
    paths = [os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/p\xe91.npz", b"/p\xe92.npz")]
    for path in paths:
        try:
            with open(path, "wb") as file:
                np.savez(file, images=make_cells(12).obsm["single_cell_images"], gene=list("ab" * 6))
        except OSError:
            pytest.skip("this file system accepts only UTF-8")
    screen = write_screen(tmp_path / "s.zarr", paths, y_key="gene")
    assert sorted(screen.obs["source"].unique()) == [r"p\xe91", r"p\xe92"]


def test_write_screen_existing_source_column_is_kept(tmp_path):
    plates = [crops_of(np.zeros((3, 1, 4, 4), "uint8"), source=f"vendor {n}") for n in range(2)]
    assert set(write_screen(tmp_path / "s.zarr", plates, y_key="gene").obs["source"]) == {"vendor 0", "vendor 1"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pixels": [np.zeros(3)] * 8}, r"obs\['pixels'\] .* ndarray"),
        ({"what": [object()] * 8}, r"obs\['what'\] .* object"),
        ({"what": [["a"]] * 7 + [{}]}, r"obs\['what'\] .* dict"),
    ],
)
def test_write_screen_unsupported_values_raises(tmp_path, columns, message):
    cells = make_cells(8)
    cells.obs = cells.obs.assign(**columns)
    with pytest.raises(ValueError, match=message):
        write_screen(tmp_path / "s.zarr", cells, y_key="gene")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("y_key", ["gene/target", ["gene/target", "well"]])
def test_write_screen_invalid_column_names_are_replaced_and_logged(tmp_path, caplog, y_key):
    cells = make_cells(8)
    cells.obs = cells.obs.rename(columns={"gene": "gene/target"}).assign(
        **{"a/b": 1, "a_b": 2, "a_b_2": 3, "..": 4, ".": 5, "": 6, "_index": 7, "/": 8}
    )
    given = cells.obs.copy()
    with caplog.at_level(logging.INFO, logger="scbd"):
        screen = write_screen(tmp_path / "s.zarr", cells, y_key=y_key)
    others = {"a/b": "a_b_3", "..": "column..", ".": "column.", "": "column", "_index": "column_index", "/": "_"}
    others["gene/target"] = "gene_target"
    found = open_screen(tmp_path / "s.zarr").obs.loc[given.index]
    assert set(found) == {others.get(name, name) for name in given}
    for name in given:
        assert found[others.get(name, name)].tolist() == given[name].tolist()
    assert "'gene/target' as 'gene_target'" in caplog.text
    assert screen.obs["gene_target"].astype(str).is_monotonic_increasing
    pd.testing.assert_frame_equal(cells.obs, given)


def make_object_array(*values: Any) -> np.ndarray:
    """Return an object array with one element per value."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


DAYS = ["2024-05-02 00:00:00", None, "2024-05-01 00:00:00"]
# values given, and values read back; None is a missing value
NO_TYPES_OF_A_STORE: dict[str, tuple[Any, list[Any]]] = {
    "dates, missing": (pd.to_datetime(["2024-05-02", None, "2024-05-01"]), DAYS),
    "categories of dates": (pd.Categorical(pd.to_datetime(["2024-05-02", None, "2024-05-01"])), DAYS),
    "durations": (pd.to_timedelta([1, 0, 1], "D"), ["1 days 00:00:00", "0 days 00:00:00", "1 days 00:00:00"]),
    "intervals": (pd.cut([1, 5, 10], [0, 2, 10]), ["(0, 2]", "(2, 10]", "(2, 10]"]),
    "numbers and text": (make_object_array(1, "A", None), ["1", "A", None]),
    "one name twice": (make_object_array(1, "1", 1.0), ["1", "1", "1"]),
    "categories of numbers and text": (pd.Categorical([1, "1", "A"]), ["1", "1", "A"]),
    "paths": (make_object_array(Path("a/b"), Path("c"), None), ["a/b", "c", None]),
    "lists": (make_object_array([1, 2], [], ["a"]), ["[1, 2]", "[]", "[a]"]),
    "large numbers": (make_object_array(2**70, 1, 2), [str(2**70), "1", "2"]),
    "truth values, missing": (make_object_array(True, None, False), [True, None, False]),
    "numbers, missing": (make_object_array(1, None, 2), [1, None, 2]),
    "text, missing": (make_object_array("a", None, "c"), ["a", None, "c"]),
    "nothing": (make_object_array(None, None, None), [None, None, None]),
    "text of pandas": (pd.array(["a", None, "c"], dtype="string"), ["a", None, "c"]),
    "floats with a mask": (pd.array([0.5, None, 1], dtype="Float64"), [0.5, None, 1]),
    "sparse": (pd.arrays.SparseArray([0, 1, 0]), [0, 1, 0]),
}


@pytest.mark.parametrize("name", NO_TYPES_OF_A_STORE)
def test_write_screen_unsupported_column_types_become_text(tmp_path, name):
    values, expected = NO_TYPES_OF_A_STORE[name]
    cells = make_cells(3)
    cells.obs["column"] = values
    given = cells.obs.copy()
    screen = write_screen(tmp_path / "s.zarr", cells, y_key="gene")
    verify_screen(tmp_path / "s.zarr")
    found = screen.obs["column"].reindex(cells.obs_names)
    assert [None if pd.isna(value) else value for value in found] == expected
    pd.testing.assert_frame_equal(cells.obs, given)


def test_as_storable_tables_are_converted_or_unchanged():
    kept = make_labelled_cells().obs.assign(day=pd.Categorical(["b"] * 30), number=1j)
    kept["text"] = pd.Series("a", kept.index, dtype=object)
    assert as_storable(kept) is kept
    found = as_storable(pd.DataFrame({"dose": pd.cut([1, 30, 200], [0, 2, 10, 100, 1000])}))["dose"].cat
    assert found.ordered and list(found.categories) == ["(0, 2]", "(2, 10]", "(10, 100]", "(100, 1000]"]
    repeated = pd.DataFrame({"day": pd.to_datetime(["2024-05-02", "2024-05-01"])}, index=["a", "a"])
    assert list(as_storable(repeated)["day"]) == ["2024-05-02 00:00:00", "2024-05-01 00:00:00"]
    with pytest.raises(ValueError, match="var has several columns named 'day'"):
        as_storable(pd.DataFrame([[1, 2]], columns=["day", "day"], index=["a"]), "var")


def test_write_screen_mixed_column_types_become_text(tmp_path):
    """A column may hold numbers on one plate and text on another; so may the perturbations, which are sorted."""
    plates = [make_cells(12), make_cells(12, seed=1)]
    for plate, row in zip(plates, (1, "A"), strict=True):
        plate.obs["row"] = row
    plates[0].obs["guide"] = np.arange(12) % 3
    plates[1].obs["guide"] = [str(number % 3) for number in range(12)]
    screen = write_screen(tmp_path / "s.zarr", plates, y_key="guide")
    assert set(screen.obs["row"]) == {"1", "A"} and set(screen.obs["guide"]) == {"0", "1", "2"}
    assert screen.obs["guide"].astype(str).is_monotonic_increasing


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=300), min_size=1, max_size=1),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
)
def test_percentiles_from_counts_is_equal_to_numpy(numbers, percentiles):
    values = np.array([*numbers, numbers[0][::-1]], "uint8") // np.array([[1], [2]], "uint8")
    counts = np.stack([np.bincount(channel, minlength=256) for channel in values])
    expected = np.percentile(values, percentiles, axis=1)
    np.testing.assert_allclose(percentiles_from_counts(counts, percentiles), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_estimate_intensity_range_in_parts_is_equal_to_percentiles(monkeypatch, dtype):
    rng = np.random.default_rng(0)
    plates = [crops_of(rng.gamma(2, 20, (n, 3, 8, 9)).clip(0, 255).astype(dtype)) for n in (40, 7)]
    whole = np.concatenate([np.moveaxis(p.images.read(slice(None)), 1, 0).reshape(3, -1) for p in plates], axis=1)
    monkeypatch.setattr("scbd.data._intensity_range._PART_BYTES", 5 * 3 * 8 * 9)
    np.testing.assert_allclose(
        estimate_intensity_range(plates, 0), np.percentile(whole, [0.1, 99.9], axis=1).T, rtol=1e-6
    )


def test_estimate_intensity_range_large_floats_samples_pixels():
    images = np.random.default_rng(0).normal(size=(200, 2, 64, 64)).astype("float32")
    low, high = estimate_intensity_range([crops_of(images)], 0).T
    np.testing.assert_allclose([low, high], [[-3.09] * 2, [3.09] * 2], atol=0.1)  # of a normal distribution


def test_open_screen_maps_images_and_loads_the_rest(tmp_path):
    cells = make_cells(12)
    cells.obsm["X_pca"] = np.arange(24.0).reshape(12, 2)
    cells.uns["note"] = "kept"
    cells.write_h5ad(tmp_path / "mapped.h5ad")
    cells.write_h5ad(tmp_path / "loaded.h5ad", compression="gzip")
    for name in ("mapped", "loaded"):
        opened = open_screen(tmp_path / f"{name}.h5ad")
        images = opened.obsm[IMAGES]
        assert type(images) is np.ndarray and isinstance(images.base, np.memmap) == (name == "mapped")
        np.testing.assert_array_equal(images, cells.obsm[IMAGES])
        np.testing.assert_array_equal(opened.obsm["X_pca"], cells.obsm["X_pca"])
        assert opened.obs.equals(cells.obs) and opened.uns["note"] == "kept"
        assert list(opened.var_names) == list(cells.var_names)


def test_open_screen_zarr_store_stays_on_disk(tmp_path):
    written = write_screen(tmp_path / "c.zarr", make_cells(12), y_key="gene")
    for path in (tmp_path / "c.zarr", zarr.storage.LocalStore(tmp_path / "c.zarr"), f"file://{tmp_path / 'c.zarr'}"):
        opened = open_screen(path)
        assert isinstance(opened.obsm[IMAGES], zarr.Array) and are_equal(opened, written)
    assert opened[np.array([3, 5])].to_memory().n_obs == 2


def test_open_screen_invalid_file_raises(tmp_path):
    path = tmp_path / "cells.h5ad"
    with pytest.raises(FileNotFoundError, match=r"cells.h5ad"):
        open_screen(path)
    make_cells(50).write_h5ad(path)
    with pytest.raises(KeyError, match=r"obsm\['images'\]; its obsm keys are: single_cell_images.*image_key="):
        open_screen(path, image_key="images")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"not a table"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="truncated or of another kind"):
            open_screen(path)
    zarr.create_group(tmp_path / "old.zarr", zarr_format=2)  # filters of format 2 may run code when an array is read
    with pytest.raises(ValueError, match="no Zarr store of format 3.*zarr_write_format = 3"):
        open_screen(tmp_path / "old.zarr")


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
def test_open_screen_chunks_of_parts_of_images_warns(tmp_path):
    cells = make_cells(12)
    group = zarr.open_group(tmp_path / "c.zarr", mode="w")
    for name, table in {"obs": cells.obs, "var": cells.var, "obsm": {}}.items():
        anndata.io.write_elem(group, name, table)
    group.create_array(f"obsm/{IMAGES}", data=cells.obsm[IMAGES], chunks=(5, 1, 7, 16))
    with pytest.warns(UserWarning, match="hold parts of images.*write_screen"):
        opened = open_screen(tmp_path / "c.zarr")
    np.testing.assert_array_equal(images_of(opened), cells.obsm[IMAGES])
    assert write_screen(tmp_path / "d.zarr", tmp_path / "c.zarr", y_key="gene").n_obs == 12


@pytest.mark.filterwarnings("ignore:.*zarr v3", "ignore:Consolidated metadata")
@pytest.mark.parametrize("where", [{"layer": "X"}, {"layer": "scaled"}, {"obsm_key": "dino"}])
@pytest.mark.parametrize("how", ["mapped", "compressed", "zarr"])
def test_open_screen_features_are_opened_in_place(tmp_path, where, how):
    wells = make_wells()
    wells.layers["scaled"], wells.obsm["dino"] = 2 * wells.X, 3 * wells.X
    expected = wells.X * {"X": 1, "scaled": 2, "dino": 3}[next(iter(where.values()))]
    path = tmp_path / "wells"
    if how == "zarr":
        with anndata.settings.override(zarr_write_format=3):
            wells.write_zarr(path)
    else:
        wells.write_h5ad(path, compression="gzip" if how == "compressed" else None)
    opened = open_screen(path, **where)
    found: Any = opened.obsm["dino"] if "obsm_key" in where else opened.layers.get("scaled", opened.X)
    kind = {"mapped": np.memmap, "compressed": np.ndarray, "zarr": zarr.Array}[how]
    assert isinstance(found.base if how == "mapped" else found, kind)
    np.testing.assert_array_equal(found[:], expected)
    assert opened.obs.equals(wells.obs) and list(opened.var_names) == list(wells.var_names)
    # no other features are read
    assert (opened.X is None) == (where != {"layer": "X"})
    assert set(opened.layers) <= {"scaled", None}  # None is X, since anndata 0.13


def test_open_screen_sparse_or_missing_features_raises(tmp_path):
    wells = make_wells()
    wells.layers["sparse"] = sparse.csr_matrix(wells.X)
    wells.obsm["dino"] = pd.DataFrame(wells.X[:, :3], index=wells.obs_names, columns=list("abc"))
    wells.write_h5ad(tmp_path / "wells.h5ad")
    opened = open_screen(tmp_path / "wells.h5ad", obsm_key="dino")
    pd.testing.assert_frame_equal(opened.obsm["dino"], wells.obsm["dino"])
    with pytest.raises(ValueError, match=r"layers/sparse of .*csr_matrix.*dense"):
        open_screen(tmp_path / "wells.h5ad", layer="sparse")
    with pytest.raises(KeyError, match=r"no obsm/other \(its parts: X, layers/sparse, obsm/dino\)"):
        open_screen(tmp_path / "wells.h5ad", obsm_key="other")


def test_open_screen_mapped_file_cannot_be_overwritten(tmp_path):
    make_cells(12).write_h5ad(tmp_path / "c.h5ad")
    screen = open_screen(tmp_path / "c.h5ad")
    with pytest.raises(OSError, match="open"), h5py.File(tmp_path / "c.h5ad", "w"):
        pass
    assert images_of(screen).any()


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
def test_open_screen_large_features_stay_on_disk(tmp_path, monkeypatch):
    """Features of 26 million cells do not fit into memory; metrics read them in blocks."""
    cells = make_cells(60)
    features = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    write_screen(tmp_path / "s.zarr", cells, y_key="gene")
    group: Any = zarr.open_group(tmp_path / "s.zarr")
    order = open_screen(tmp_path / "s.zarr").obs_names.str.removeprefix("cell_").astype(int)
    anndata.io.write_elem(group["obsm"], "features", features[order])
    anndata.io.write_elem(group["obsm"], "few", features[order, :1])
    monkeypatch.setattr(_readers, "_MAX_LOADED_BYTES", 60 * 4)
    screen = open_screen(tmp_path / "s.zarr")
    assert isinstance(screen.obsm["features"], zarr.Array) and isinstance(screen.obsm["few"], np.ndarray)
    keys: Any = {"gene_key": "gene", "control": "gene_0"}
    on_disk, in_memory = aggregate(screen, "features", **keys), aggregate(screen.to_memory(), "features", **keys)
    np.testing.assert_allclose(on_disk.X, in_memory.X)


def test_write_screen_empty_plate_warns_and_writes_the_rest(tmp_path):
    cells = make_cells(12)
    with pytest.warns(UserWarning, match="1 of 2 plates has no cell .plate 1"):
        assert write_screen(tmp_path / "s.zarr", [cells, cells[:0].copy()], y_key="gene").n_obs == 12


@pytest.mark.parametrize("n", [1, 2])
def test_write_screen_index_named_like_a_column_keeps_both(tmp_path, n):
    plates = make_plates(n)
    for plate in plates:
        plate.obs.index.name = "gene"
    written = write_screen(tmp_path / "s.zarr", plates, y_key="gene")
    plain = write_screen(tmp_path / "plain.zarr", make_plates(n), y_key="gene")
    assert are_equal(written, plain) and list(written.obs_names) == list(plain.obs_names)


def test_write_screen_large_whole_numbers_that_one_plate_lacks_stay_different(tmp_path):
    plates = make_plates(2)
    plates[0].obs["barcode"] = 20231115000000001 + np.arange(plates[0].n_obs)
    screen = write_screen(tmp_path / "s.zarr", plates, y_key="gene")
    assert screen.obs["barcode"].nunique() == plates[0].n_obs and screen.obs["barcode"].isna().sum() == plates[1].n_obs
