from __future__ import annotations

import shutil
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from conftest import contents, make_plates

from scbd.data import Crops, SlicedSource, write_screen
from scbd.data._inputs import image_source
from scbd.data.sources import _sliced as sliced
from scbd.data.stores import _block_file as block_file
from scbd.data.stores import _plan as plan
from scbd.data.stores import _staging as staging

IMAGES = "single_cell_images"
CHUNKS = (6, 1, 4, 8)


class Counted:
    """Images in chunks that say how often each was read."""

    dtype = np.dtype("uint16")
    chunks = CHUNKS

    def __init__(self, images: np.ndarray) -> None:
        self.shape, self._images = images.shape, images
        self.reads = np.zeros([-(-size // part) for size, part in zip(images.shape, CHUNKS, strict=True)], int)

    def __getitem__(self, where):
        where = where if isinstance(where, tuple) else (where,)
        where = [slice(one, one + 1) if isinstance(one, int) else one for one in where]
        touched = (slice(w.start // c, -(-w.stop // c)) for w, c in zip(where, CHUNKS, strict=False))
        self.reads[tuple(touched)] += 1
        return self._images[tuple(where)]


def counted(plates):
    """The same plates, and what counts."""
    sources = [Counted(plate.obsm[IMAGES]) for plate in plates]
    crops = [
        Crops(SlicedSource(source), plate.obs, list(plate.var_names), f"plate {number}")
        for number, (source, plate) in enumerate(zip(sources, plates, strict=True))
    ]
    return crops, sources


def images_of(screen):
    return image_source(screen, IMAGES).read(slice(None))


@pytest.fixture
def gzipped(tmp_path):
    paths = []
    for number, plate in enumerate(make_plates()):
        paths.append(tmp_path / "plates" / f"{number}.h5ad")
        paths[-1].parent.mkdir(exist_ok=True)
        plate.write_h5ad(paths[-1])
        with h5py.File(paths[-1], "r+") as file:
            del file["obsm"][IMAGES]
            stored = file["obsm"].create_dataset(IMAGES, data=plate.obsm[IMAGES], chunks=CHUNKS, compression="gzip")
            stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return paths


def test_every_chunk_is_read_once_beside_the_sample(tmp_path):
    """Once for every block in which it has a row, it would be up to thirty times."""
    plates, sources = counted(make_plates())
    adata = write_screen(tmp_path / "s.zarr", plates, y_key="gene", block_size=4)
    # a row of the sample that the digest takes is one chunk
    assert sum(int(source.reads.sum()) for source in sources) == sum(source.reads.size + 40 for source in sources)
    assert adata.n_obs == 120 and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
@pytest.mark.parametrize("how", [{}, {"image_size": 8, "dtype": "uint8", "intensity_range": (0, 200)}])
def test_compressed_plates_become_the_same_screen(tmp_path, gzipped, monkeypatch, name, how):
    """Also where a row of chunks is too large for memory."""
    monkeypatch.setattr(staging, "_STRETCH_BYTES", 12 * 2 * 16 * 16 * 2)
    wanted = write_screen(tmp_path / f"plain_{name}", make_plates(), y_key="gene", block_size=7, **how)
    for folder, limit in (("roomy", 2**26), ("narrow", 0)):
        monkeypatch.setattr(staging, "_IN_MEMORY", limit)
        monkeypatch.setattr(sliced, "_AT_ONCE", limit)
        found = write_screen(tmp_path / folder / name, gzipped, y_key="gene", block_size=7, **how)
        # which have no names of files
        assert found.obs.drop(columns="source").equals(wanted.obs.drop(columns="source"))
        assert np.array_equal(images_of(found), images_of(wanted))


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_killed_while_plates_are_read_it_goes_on_with_what_is_there(tmp_path, monkeypatch, name):
    monkeypatch.setattr(staging, "_STRETCH_BYTES", 1)  # seven stretches a plate

    def write(folder, plates):
        return write_screen(tmp_path / folder / name, plates, y_key="gene", block_size=30, n_workers=1)

    write("whole", counted(make_plates())[0])
    before = block_file.BlockFile.write
    for killed_at in (0, 1, 9, 20):
        written: list[int] = []

        def write_or_die(self, block, values, written=written, killed_at=killed_at):
            if len(written) == killed_at:
                raise KeyboardInterrupt
            written.append(block)
            before(self, block, values)

        with monkeypatch.context() as patch:
            patch.setattr(block_file.BlockFile, "write", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                write(f"killed {killed_at}", counted(make_plates())[0])
        plates, sources = counted(make_plates())
        write(f"killed {killed_at}", plates)
        stretches = sum(int(source.reads.sum()) - 40 for source in sources) / (2 * 4 * 2)
        assert stretches == 21 - killed_at  # what was there is not read again
        assert contents(tmp_path / f"killed {killed_at}") == contents(tmp_path / "whole")


def test_processes_begin_with_different_shares_and_find_what_others_have_done(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_STRETCH_BYTES", 1)
    write_screen(tmp_path / "whole.zarr", counted(make_plates())[0], y_key="gene", block_size=10)
    order = []
    write = staging.StagedPlate.write

    def noted(plate, stretch):
        order.append((plate._number, stretch))
        return write(plate, stretch)

    monkeypatch.setattr(staging.StagedPlate, "write", noted)
    for share in (2, 1, 3):
        plates, sources = counted(make_plates())
        write_screen(tmp_path / "s.zarr", plates, y_key="gene", block_size=10, shard=(share, 3), n_workers=1)
        read = sum(int(source.reads.sum()) - 40 for source in sources)
        assert read == (21 * 16 if share == 2 else 0)  # the first one alone did all of it
        assert order[0] == (share - 1, 0)
        order.clear()
    assert contents(tmp_path / "s.zarr") == contents(tmp_path / "whole.zarr")
    assert not list(tmp_path.glob(".*"))


def test_what_is_left_of_other_cells_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_STRETCH_BYTES", 1)

    def interrupt(*args):
        raise KeyboardInterrupt

    for finished in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(
                plan.ScreenPlan if finished else staging.StagedPlate, "images" if finished else "write", interrupt
            )
            with pytest.raises(KeyboardInterrupt):
                write_screen(tmp_path / "s.h5ad", counted(make_plates())[0], y_key="gene")
        (tmp_path / ".s.h5ad.partial").unlink()
        corrected = make_plates()
        for plate in corrected:
            plate.obsm[IMAGES] = plate.obsm[IMAGES] + np.uint16(1)
        with pytest.raises(ValueError, match="staged.* is the beginning of something else"):
            write_screen(tmp_path / "s.h5ad", counted(corrected)[0], y_key="gene")
        shutil.rmtree(tmp_path / ".s.h5ad.staged")
        (tmp_path / ".s.h5ad.partial").unlink()


@pytest.mark.parametrize(("compression", "copies"), [(None, 2), ("lz4", 1)])
def test_the_disk_must_have_room_for_both(tmp_path, monkeypatch, compression, copies):
    size = 120 * 2 * 16 * 16 * 2

    def write(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        plates = counted(make_plates())[0]
        write_screen(tmp_path / "s.zarr", plates, y_key="gene", compression=compression)

    with pytest.raises(OSError, match="make room first"):
        write(copies * size - 1)
    assert not list(tmp_path.glob("*"))
    write(copies * size)
