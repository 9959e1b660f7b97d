from __future__ import annotations

import errno
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from anndata import AnnData
from conftest import contents, make_cells, make_plates
from PIL import Image
from torch.nn import functional as F
from zarr.storage import LocalStore, MemoryStore

from scbd.data import Crops, open_screen, verify_screen, write_screen
from scbd.data._inputs import image_source
from scbd.data.sources import ArraySource
from scbd.data.stores import _containers as containers

IMAGES = "single_cell_images"
KINDS = [("s.h5ad", None), ("s.zarr", None), ("s.zarr", "lz4"), ("s.zarr", "zstd")]


def images_of(adata: AnnData) -> np.ndarray:
    return image_source(adata, IMAGES).read(slice(None))


def by_name(adata: AnnData) -> dict[str, np.ndarray]:
    return dict(zip(adata.obs_names, images_of(adata), strict=True))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_a_screen_holds_every_cell_once_sorted_by_perturbation_and_shuffled_inside(tmp_path, name, compression):
    given = make_plates()
    adata = write_screen(tmp_path / name, given, y_key="gene", compression=compression, block_size=7)
    assert adata.n_obs == 120 and list(adata.var["channels"]) == ["channel_0", "channel_1"]
    genes = adata.obs["gene"].astype(str)
    assert genes.is_monotonic_increasing
    for _, rows in adata.obs.groupby("gene", observed=True):
        assert not rows["plate"].astype(str).is_monotonic_increasing and not rows.index.is_monotonic_increasing
    # every image with its row
    for name, image in by_name(adata).items():
        number, row = image[0, 0, :2]
        assert name == f"cell_{row}-{number}" and adata.obs.loc[name, "plate"] == f"plate_{number}"
        np.testing.assert_array_equal(image, given[number].obsm[IMAGES][row])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_killed_after_any_block_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, name, compression):
    def write(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        kwargs = {"y_key": "gene", "compression": compression, "block_size": 25, "n_workers": 1}
        return write_screen(tmp_path / folder / name, make_plates(), **kwargs)

    write("whole")
    kind = containers.HDF5Container if name.endswith("h5ad") else containers.ZarrContainer
    original = kind.write
    for killed_at in range(5):
        written: list[int] = []

        def write_or_die(self, block, images, written=written, killed_at=killed_at):
            if len(written) == killed_at:
                raise KeyboardInterrupt
            original(self, block, images)
            written.append(block)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "write", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                write(f"killed {killed_at}")
        assert not (tmp_path / f"killed {killed_at}" / name).exists()
        again: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(kind, "write", lambda self, b, i, again=again: (again.append(b), original(self, b, i)))
            write(f"killed {killed_at}")
        assert again == list(range(killed_at, 5))  # what was there is not written again
        assert contents(tmp_path / f"killed {killed_at}" / name) == contents(tmp_path / "whole" / name)


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_the_beginning_of_another_store_is_not_gone_on_with(tmp_path, monkeypatch, name):
    with monkeypatch.context() as patch:
        for kind in (containers.HDF5Container, containers.ZarrContainer):
            patch.setattr(kind, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_screen(tmp_path / name, make_plates(), y_key="gene")
    for changed in ({"plates": make_plates(2)}, {"y_key": "well"}, {"image_size": 8}, {"seed": 1}, {"block_size": 3}):
        with pytest.raises(
            ValueError,
            match="is the beginning of something else .*another version of scbd.*: move it away to begin again",
        ):
            write_screen(tmp_path / name, **({"plates": make_plates(), "y_key": "gene"} | changed))
    write_screen(tmp_path / name, make_plates(), y_key="gene")
    with pytest.raises(FileExistsError, match="exists: it is kept"):
        write_screen(tmp_path / name, make_plates(), y_key="gene")


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_images_that_were_corrected_are_not_mixed_with_those_before(tmp_path, monkeypatch, name):
    """The same table, other pixels: a job that was killed because something was wrong with them."""
    with monkeypatch.context() as patch:
        for kind in (containers.HDF5Container, containers.ZarrContainer):
            patch.setattr(kind, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_screen(tmp_path / name, make_plates(), y_key="gene", dtype="uint8", intensity_range=(0, 300))
    corrected = make_plates()
    corrected[1].obsm[IMAGES] = corrected[1].obsm[IMAGES] + np.uint16(1)
    for plates, intensities in ((corrected, (0, 300)), (make_plates(), (0, 301))):
        with pytest.raises(ValueError, match="is the beginning of something else"):
            write_screen(tmp_path / name, plates, y_key="gene", dtype="uint8", intensity_range=intensities)
    write_screen(tmp_path / name, make_plates(), y_key="gene", dtype="uint8", intensity_range=(0, 300))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, name, compression):
    how: dict[str, Any] = {"image_size": 8, "dtype": "uint8", "intensity_range": (0, 200), "block_size": 9}
    for n in (1, 2, 5):
        folder = tmp_path / str(n)
        write_screen(folder / name, make_plates(), y_key="gene", compression=compression, n_workers=n, **how)
        assert contents(folder) == contents(tmp_path / "1")


class Alone:
    """Images that may be read from one thread at a time only."""

    in_memory = False

    def __init__(self, images: np.ndarray) -> None:
        self.shape, self.dtype, self._images = images.shape, images.dtype, images
        self._reading = Lock()

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        assert self._reading.acquire(blocking=False)
        time.sleep(0.001)
        found = self._images[rows]
        self._reading.release()
        return found


def test_a_source_is_read_from_one_thread_at_a_time(tmp_path):
    plate = make_plates(1)[0]
    source: Any = Alone(plate.obsm[IMAGES])
    halves = [Crops(source, plate.obs, ["a", "b"], name) for name in ("one", "the same again")]
    assert write_screen(tmp_path / "s.zarr", halves, y_key="gene", block_size=2, n_workers=4).n_obs == 80


def test_pixels_that_are_no_numbers_are_not_written(tmp_path):
    """Nor rounded to any integer; what is written can be trusted to be finite."""
    plate = make_cells(12, dtype="float32")
    for dtype in ("float32", "float16", "uint8"):
        plate.obsm[IMAGES][[3, 7], 0, 0, 0] = np.nan
        how: dict[str, Any] = {"intensity_range": (0, 255)} if dtype == "uint8" else {}
        with pytest.raises(ValueError, match=r"plate 0 has NaN or infinite pixels as float32: row . \(cell_.\)"):
            write_screen(tmp_path / "s.zarr", plate, y_key="gene", dtype=dtype, **how)
        shutil.rmtree(tmp_path / ".s.zarr.partial")
        plate.obsm[IMAGES][[3, 7], 0, 0, 0] = 70_000
        if dtype == "float16":
            with pytest.raises(ValueError, match=r"plate 0 has NaN or infinite pixels as float16: row . \(cell_.\)"):
                write_screen(tmp_path / "s.zarr", plate, y_key="gene", dtype=dtype)
            shutil.rmtree(tmp_path / ".s.zarr.partial")
    assert np.isfinite(images_of(write_screen(tmp_path / "s.zarr", plate, y_key="gene"))).all()


def test_zarr_reads_what_we_write_and_we_read_what_zarr_writes(tmp_path):
    for compression in (None, "lz4", "zstd"):
        path = tmp_path / f"{compression}.zarr"
        adata = write_screen(path, make_plates(), y_key="gene", compression=compression, block_size=16)
        theirs = zarr.open_array(path, path=f"obsm/{IMAGES}", mode="r")
        np.testing.assert_array_equal(theirs[:], images_of(adata))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_a_disk_that_becomes_full_is_told_and_gone_on_with(tmp_path, monkeypatch, name, compression):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments: dict[str, Any] = {"y_key": "gene", "compression": compression, "block_size": 30}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(LocalStore, "set", full)
        with pytest.raises(OSError, match=f"No space left for .*{name}: make room, and call again"):
            write_screen(tmp_path / name, make_plates(), **arguments)
    assert write_screen(tmp_path / name, make_plates(), **arguments).n_obs == 120
    (tmp_path / "other").mkdir()
    # as HDF5 says it, of tables
    message = "Can't decrement id ref count (file write failed: errno = 28, error message = 'No space left on device')"
    with monkeypatch.context() as patch:
        patch.setattr("scbd.data.stores._block_file.tables_checksums", raising(RuntimeError(message)))
        patch.setattr("scbd.data.stores._containers.tables_checksums", raising(RuntimeError(message)))
        with pytest.raises(OSError, match=f"No space left for .*{name}"):
            write_screen(tmp_path / "other" / name, make_plates(), **arguments)
        patch.setattr("scbd.data.stores._block_file.tables_checksums", raising(RuntimeError("other")))
        patch.setattr("scbd.data.stores._containers.tables_checksums", raising(RuntimeError("other")))
        with pytest.raises(RuntimeError, match="other"):
            write_screen(tmp_path / "other" / name, make_plates(), **arguments)
    assert not list((tmp_path / "other").iterdir())


def raising(error: Exception) -> Any:
    def fails(*args: Any) -> None:
        raise error

    return fails


def test_all_files_of_a_share_that_cannot_be_read_are_told_at_once(tmp_path):
    for number in range(40):
        Image.fromarray(np.full((4, 4), number, "uint8")).save(tmp_path / f"{number}.png")
    table = pd.DataFrame({"path": [f"{number}.png" for number in range(40)], "gene": ["a", "b"] * 20})
    table.to_csv(tmp_path / "t.csv")
    for number in (11, 12, 33):  # what the digest looks at is read before
        (tmp_path / f"{number}.png").write_bytes(b"no image at all")
    with pytest.raises(ValueError, match="^3 images cannot be read: ") as caught:
        write_screen(tmp_path / "s.h5ad", tmp_path / "t.csv", y_key="gene", block_size=5)
    assert all(f"{number}.png is no TIFF or PNG" in str(caught.value) for number in (11, 12, 33))
    with pytest.raises(ValueError, match="cannot be read"):
        write_screen(tmp_path / "s.h5ad", tmp_path / "t.csv", y_key="gene", block_size=5)
    for number in (11, 12, 33):
        Image.fromarray(np.full((4, 4), number, "uint8")).save(tmp_path / f"{number}.png")
    screen = write_screen(tmp_path / "s.h5ad", tmp_path / "t.csv", y_key="gene", block_size=5)
    assert sorted(screen.obsm[IMAGES][:, 0, 0, 0]) == list(range(40))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_a_later_plate_is_added_by_writing_both(tmp_path, name, compression):
    first = write_screen(tmp_path / name, make_plates(2), y_key="gene", compression=compression)
    both = write_screen(tmp_path / f"both_{name}", [tmp_path / name, make_plates(3)[2]], y_key="gene")
    assert both.n_obs == first.n_obs + 40 and set(both.obs["plate"]) == {"plate_0", "plate_1", "plate_2"}
    assert sorted(map(bytes, images_of(both))) == sorted(bytes(i) for p in make_plates(3) for i in p.obsm[IMAGES])


def test_crops_are_made_smaller_on_the_way(tmp_path):
    given = make_plates(1)[0]
    given.obsm[IMAGES] = given.obsm[IMAGES] * np.uint16(100)
    adata = write_screen(
        tmp_path / "s.h5ad", given, y_key="gene", image_size=8, dtype="uint8", intensity_range=(0, 25_500)
    )
    images = images_of(adata)
    assert images.shape == (40, 2, 8, 8) and images.dtype == np.uint8
    rows = given.obs_names.get_indexer(adata.obs_names)
    resized = F.interpolate(
        torch.from_numpy(given.obsm[IMAGES][rows]).float(), (8, 8), mode="bilinear", antialias=True
    ).numpy()
    np.testing.assert_allclose(images, (resized / 100).clip(0, 255), atol=0.51)
    np.testing.assert_array_equal(adata.uns["scbd_store"]["intensity_range"], [[0, 25_500]] * 2)
    found = write_screen(tmp_path / "auto.zarr", given, y_key="gene", dtype="uint8")
    low, high = found.uns["scbd_store"]["intensity_range"].T
    exact = np.percentile(np.moveaxis(given.obsm[IMAGES], 1, 0).reshape(2, -1), [0.1, 99.9], axis=1)
    np.testing.assert_allclose([low, high], exact, rtol=1e-6)
    assert images_of(found).max() == 255 and images_of(found).min() == 0
    assert images_of(write_screen(tmp_path / "f.zarr", given, y_key="gene", dtype="float32")).dtype == np.float32


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_a_flipped_byte_is_found_and_named(tmp_path, name, compression):
    path = tmp_path / name
    write_screen(path, make_plates(), y_key="gene", compression=compression, block_size=30)
    verify_screen(path)
    if name.endswith("h5ad"):
        at = open_screen(path).obsm[IMAGES].base.offset + 40 * 2 * 16 * 16 * 2 + 5
        flip(path, at)
        with pytest.raises(ValueError, match="1 of 4 blocks are damaged: .*s.h5ad is damaged, with rows 30 to 59"):
            verify_screen(path)
        return
    shard = path / "obsm" / IMAGES / "c" / "1" / "0" / "0" / "0"
    flip(shard, 2000)
    wrong = "is damaged or truncated, with rows 30 to 59 of obsm.*checksum is wrong"
    with pytest.raises(ValueError, match=f"1 of 4 blocks are damaged: .*{wrong}"):
        verify_screen(path)
    if compression is not None:  # when read, too
        with pytest.raises(ValueError, match=f"c/1/0/0/0 {wrong}"):
            images_of(open_screen(path))
    os.truncate(shard, 3000)
    with pytest.raises(ValueError, match="c/1/0/0/0 is damaged or truncated, with rows 30 to 59"):
        image_source(open_screen(path), IMAGES).read(np.array([45]))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="c/1/0/0/0 is missing, with rows 30 to 59 of obsm"):
        image_source(open_screen(path), IMAGES).read(np.array([3, 45]))
    # what is whole is read all the same
    assert len(image_source(open_screen(path), IMAGES).read(np.array([3, 65]))) == 2


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_an_object_store(tmp_path):
    store = MemoryStore()
    adata = write_screen(store, make_plates(), y_key="gene", compression="lz4", block_size=16)
    local = write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene", compression="lz4", block_size=16)
    source = image_source(adata, IMAGES)
    rows = np.array([5, 100, 7, 7, 6, 31])
    np.testing.assert_array_equal(source.read(rows), image_source(local, IMAGES).read(rows))
    np.testing.assert_array_equal(images_of(adata), images_of(local))
    verify_screen(store)


def test_an_unfinished_store_is_not_opened_as_a_whole_one(monkeypatch):
    store = MemoryStore()
    with monkeypatch.context() as patch:
        patch.setattr(containers.ZarrContainer, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_screen(store, make_plates(), y_key="gene")
    with pytest.raises(ValueError, match="was not finished: call write_screen again"):
        open_screen(store)
    assert write_screen(store, make_plates(), y_key="gene").n_obs == 120


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, monkeypatch):
    ours = make_plates()
    other = make_plates(1)[0]
    other.var_names = ["dna", "actin"]
    small = make_cells(8, shape=(2, 8, 8), dtype="uint16")
    unnamed = make_plates(1)[0]
    unnamed.obs.loc["cell_3", "gene"] = np.nan
    cases = [
        (ValueError, "give a path that ends in .h5ad or .zarr", {"path": tmp_path / "s.h5"}),
        (ValueError, "is memory-mapped, and so is not compressed", {"compression": "lz4"}),
        (ValueError, "compression='gzip' is not known: use 'lz4', 'zstd' or None", {"compression": "gzip"}),
        (ValueError, "There is no plate to write", {"plates": []}),
        (ValueError, "none.h5ad is given twice", {"plates": [tmp_path / "none.h5ad", str(tmp_path / "none.h5ad")]}),
        (ValueError, "plate 0 .AnnData. and plate 1 .AnnData. are one", {"plates": [ours[0], ours[0]]}),
        (KeyError, "plate 0: obs has no 'perturbation'", {"y_key": "perturbation"}),
        (ValueError, "plate 1: obs.'gene'. has no value for 1 of 40 cells", {"plates": [ours[0], unnamed]}),
        (ValueError, "plate 1 has channels dna, actin .uint16., plate 0 has", {"plates": [ours[0], other]}),
        (ValueError, "plate 1 has 8 × 8 pixels, plate 0 16 × 16: give image_size", {"plates": [ours[0], small]}),
        (ValueError, "image_size must be a positive number", {"image_size": 0}),
        (ValueError, "block_size=0: write at least one row", {"block_size": 0}),
        (ValueError, "n_workers=0: at least one is needed", {"n_workers": 0}),
        (TypeError, "dtype='int64' is not one of images", {"dtype": "int64"}),
        (ValueError, "From uint16 to uint16 intensities stay", {"intensity_range": (0, 1)}),
        (ValueError, "intensity_range must be .low, high.", {"dtype": "uint8", "intensity_range": (1, 0)}),
        (FileNotFoundError, "There is nothing at", {"plates": tmp_path / "none.h5ad"}),
    ]
    for error, message, changed in cases:
        arguments = {"path": tmp_path / "s.h5ad", "plates": ours, "y_key": "gene"} | changed
        with pytest.raises(error, match=message):
            write_screen(**arguments)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="takes 120.0 KiB more, the disk has 0 bytes free: make room first"):
        write_screen(tmp_path / "s.h5ad", ours, y_key="gene")
    assert not list(tmp_path.glob("*"))


def test_a_disk_with_just_enough_room_will_do(tmp_path, monkeypatch):
    size = 120 * 2 * 16 * 16 * 2
    for free, room in ((size - 1, False), (size, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if room:
            write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene")
        else:
            with pytest.raises(OSError, match="make room first"):
                write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene")
            assert not list(tmp_path.glob("*"))


def test_a_full_disk_leaves_what_can_be_gone_on_with(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene")
    assert not (tmp_path / "s.h5ad").exists()
    write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene")
    verify_screen(tmp_path / "s.h5ad")


def test_one_plate_keeps_its_names_and_missing_columns_are_empty(tmp_path):
    assert set(write_screen(tmp_path / "s.h5ad", make_plates(1), y_key="gene").obs_names) == set(
        make_plates(1)[0].obs_names
    )
    first, second = make_plates(2)
    second.obs["batch"] = "late"
    adata = write_screen(tmp_path / "t.h5ad", [first, second], y_key="gene")
    assert adata.obs["batch"].isna().sum() == 40


def test_names_are_unique_whatever_repeats(tmp_path):
    one, two = make_plates(2, cells=4)
    one.obs_names = ["x", "x", "x-1", "y"]
    alone = write_screen(tmp_path / "one.h5ad", Crops(ArraySource(one.obsm[IMAGES]), one.obs, ["a", "b"]), y_key="gene")
    assert alone.obs_names.is_unique and {"x", "x-1", "y"} < set(alone.obs_names)
    two.obs_names = ["x", "z", "z", "w"]
    crops = [Crops(ArraySource(each.obsm[IMAGES]), each.obs, ["a", "b"]) for each in (one, two)]
    both = write_screen(tmp_path / "both.h5ad", crops, y_key="gene")
    assert both.obs_names.is_unique and {"x-0", "x-1", "y-0", "w-1"} < set(both.obs_names)


def test_another_process_that_was_faster_has_done_the_job(tmp_path, monkeypatch):
    """It has written the same, given it its name, and put the rest away, while we were at it."""
    block = containers.HDF5Container.write
    done: list[int] = []

    def overtaken(self, number, images):
        if not done:
            done.append(1)
            write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene", block_size=30)
            raise FileNotFoundError
        block(self, number, images)

    monkeypatch.setattr(containers.HDF5Container, "write", overtaken)
    adata = write_screen(tmp_path / "s.h5ad", make_plates(), y_key="gene", block_size=30)
    assert images_of(adata).shape == (120, 2, 16, 16)
    verify_screen(tmp_path / "s.h5ad")


def test_crops_say_what_does_not_fit():
    images = ArraySource(np.zeros((3, 2, 4, 4), "uint8"))
    with pytest.raises(ValueError, match="well A1: the table has 2 rows, there are 3 images"):
        Crops(images, pd.DataFrame(index=["a", "b"]), ["x", "y"], "well A1")
    with pytest.raises(ValueError, match="1 names for 2 channels .x."):
        Crops(images, pd.DataFrame(index=["a", "b", "c"]), ["x"])


def test_foreign_files_have_no_checksums(tmp_path):
    make_cells(10).write_h5ad(tmp_path / "foreign.h5ad")
    with pytest.raises(ValueError, match="was not written by scbd, and has no checksums"):
        verify_screen(tmp_path / "foreign.h5ad")


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_shares_are_written_in_any_order_by_any_number_of_processes(tmp_path, name, compression):
    arguments: dict[str, Any] = {"plates": make_plates(), "y_key": "gene", "compression": compression, "block_size": 13}
    write_screen(tmp_path / f"whole_{name}", **arguments)
    path = tmp_path / name
    for share in (3, 1, 3):
        part = write_screen(path, shard=(share, 3), **arguments)
        assert part.n_obs == 120 and not part.obsm and not path.exists()
    (tmp_path / f".{name}.partial.12345").write_text("left by a process that was killed")
    os.utime(tmp_path / f".{name}.partial.12345", (0, 0))
    assert IMAGES in write_screen(path, shard=(2, 3), **arguments).obsm
    assert contents(path) == contents(tmp_path / f"whole_{name}")
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match="shard=4/3: give a first number from 1 to the second"):
        write_screen(tmp_path / f"other_{name}", shard=(4, 3), **arguments)
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_a_share_of_which_others_have_left_nothing_ends_well(tmp_path, name, compression):
    arguments: dict[str, Any] = {"y_key": "gene", "compression": compression}
    write_screen(tmp_path / name, make_cells(20), shard=(1, 2), **arguments)  # one block is all there is
    before = contents(tmp_path / name)
    assert IMAGES in write_screen(tmp_path / name, make_cells(20), shard=(2, 2), **arguments).obsm
    with pytest.raises(FileExistsError, match=f"{name} exists: it is kept"):
        write_screen(tmp_path / name, make_cells(20, seed=1), shard=(2, 2), **arguments)
    assert contents(tmp_path / name) == before
    foreign = tmp_path / f"foreign{(tmp_path / name).suffix}"
    foreign.write_text("kept")
    with pytest.raises(FileExistsError, match=f"{foreign.name} exists: it is kept"):
        write_screen(foreign, make_cells(20), shard=(2, 2), **arguments)
    assert sorted(left.name for left in tmp_path.iterdir()) == sorted([name, foreign.name])


def test_a_block_that_a_kill_left_half_written_does_not_stay_in_the_store(tmp_path, monkeypatch):
    """Zarr writes a file beside the place of a block, and a kill without warning leaves it there."""
    original = containers.ZarrContainer.write

    def killed(self, block, images):
        original(self, block, images)
        shard = self._partial / self._key(block)
        shard.with_name(f"{shard.name}.0123.partial").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(containers.ZarrContainer, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene")
    assert len(list(tmp_path.rglob("*.0123.partial"))) == 1
    write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene")
    write_screen(tmp_path / "whole.zarr", make_plates(), y_key="gene")
    assert contents(tmp_path / "s.zarr") == contents(tmp_path / "whole.zarr")


def test_a_block_that_another_process_wrote_and_tidied_up_is_not_missed(tmp_path, monkeypatch):
    write_screen(tmp_path / "whole.zarr", make_plates(), y_key="gene")
    original = LocalStore.set

    async def late(self, key, value):
        await original(self, key, value)
        if "/c/" in key and IMAGES in key:
            raise FileNotFoundError(key)  # what this process had begun is gone

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "set", late)
        write_screen(tmp_path / "s.zarr", make_plates(), y_key="gene")
    assert contents(tmp_path / "s.zarr") == contents(tmp_path / "whole.zarr")


@pytest.mark.parametrize(("name", "compression"), KINDS[::2])
def test_processes_at_once(tmp_path, name, compression):
    """Both make the tables, one of which stays; both see the end, and one of them names it."""
    arguments: dict[str, Any] = {"plates": make_plates(), "y_key": "gene", "compression": compression, "block_size": 4}
    write_screen(tmp_path / f"whole_{name}", **arguments)
    with ThreadPoolExecutor(4) as pool:
        shares = [pool.submit(write_screen, tmp_path / name, shard=(i, 4), **arguments) for i in (1, 2, 3, 4)]
        opened = [share.result() for share in shares]
    assert any(IMAGES in part.obsm for part in opened)
    assert contents(tmp_path / name) == contents(tmp_path / f"whole_{name}")
