from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import contents, make_cells
from killing import kill_until
from zarr.storage import MemoryStore

from scbd.data import add_to_screen, open_embedding, open_screen, verify_screen, write_screen
from scbd.data.stores import _adding as adding
from scbd.data.stores._block_file import BlockFile

IMAGES = "single_cell_images"


def results_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.results")


@pytest.fixture(params=["s.h5ad", "s.zarr", "plain.h5ad"])
def path(request, tmp_path):
    path = tmp_path / request.param
    if path.stem == "plain":
        make_cells(40).write_h5ad(path)
    else:
        write_screen(path, make_cells(40), y_key="gene", block_size=16)
    gc.collect()
    return path


def with_results(screen: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    screen.obsm["X_scbd_c"] = rng.random((screen.n_obs, 3), dtype=np.float32)
    screen.obs["leiden"] = pd.Categorical(rng.choice(["0", "1"], screen.n_obs))
    screen.obs["score"] = np.where(rng.random(screen.n_obs) < 0.1, np.nan, rng.random(screen.n_obs))
    return screen


def test_results_are_there_when_the_screen_is_opened(path):
    before = contents(path)
    screen = with_results(open_screen(path))
    added = add_to_screen(path, screen)
    assert contents(path) == before
    for found in (added, open_screen(path)):
        assert found.obs.equals(screen.obs)
        np.testing.assert_array_equal(found.obsm["X_scbd_c"], screen.obsm["X_scbd_c"])
        assert isinstance(found.obsm["X_scbd_c"].base, np.memmap)
    # as a table of its own, for whoever has no scbd
    (file,) = results_folder(path).iterdir()
    assert list(anndata.read_h5ad(file).obs) == ["leiden", "score"]


def test_rows_are_told_by_their_names(path):
    screen = with_results(open_screen(path))
    order = np.random.default_rng(1).permutation(40)
    shuffled = AnnData(obs=screen.obs.iloc[order], obsm={"X_scbd_c": screen.obsm["X_scbd_c"][order]})
    added = add_to_screen(path, shuffled, obs=["leiden"])
    np.testing.assert_array_equal(added.obsm["X_scbd_c"], screen.obsm["X_scbd_c"])
    assert added.obs["leiden"].equals(screen.obs["leiden"]) and "score" not in added.obs
    with pytest.raises(ValueError, match="lacks 1 of the 40 cells of .*, and has 0 others"):
        add_to_screen(path, shuffled[:39].copy())
    shuffled.obs_names = [f"{name}x" for name in shuffled.obs_names]
    with pytest.raises(ValueError, match="lacks 40 of the 40 cells of .*, and has 40 others"):
        add_to_screen(path, shuffled)


def test_what_is_there_is_replaced_only_when_asked(path):
    screen = add_to_screen(path, with_results(open_screen(path)))
    with pytest.warns(UserWarning, match="Nothing in obs or obsm differs"):
        add_to_screen(path, screen)
    changed = with_results(open_screen(path), seed=1)
    changed.obs["gene"] = "none"
    with pytest.raises(FileExistsError, match=r"has obs\['gene'\], .*, obsm\['X_scbd_c'\] with other"):
        add_to_screen(path, changed)
    replaced = add_to_screen(path, changed, obs=["leiden"], obsm=[], overwrite=True)
    assert list(replaced.obs["leiden"]) == list(changed.obs["leiden"])
    np.testing.assert_array_equal(replaced.obsm["X_scbd_c"], screen.obsm["X_scbd_c"])
    assert len(list(results_folder(path).iterdir())) == 2
    again = add_to_screen(path, changed, overwrite=True)
    assert set(again.obs["gene"]) == {"none"} and list(again.obs["score"].isna()) == list(changed.obs["score"].isna())
    np.testing.assert_array_equal(again.obsm["X_scbd_c"], changed.obsm["X_scbd_c"])
    if path.stem == "s":
        verify_screen(path)


def test_files_that_are_replaced_as_a_whole_are_removed(path):
    for seed in range(3):
        add_to_screen(path, with_results(open_screen(path), seed), overwrite=True)
        assert len(list(results_folder(path).iterdir())) == 1


def test_what_is_wrong_is_said_before_anything_is_written(path):
    screen = with_results(open_screen(path))
    screen.obsm["frame"] = pd.DataFrame({"a": np.zeros(40)}, index=screen.obs_names)
    screen.obs["a/b"] = 1
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (KeyError, "adata.obs has no 'lieden' .it has: gene, well", {"obs": ["lieden"]}),
        (KeyError, "adata.obsm has no 'X_umap'", {"obs": [], "obsm": ["X_umap"]}),
        (ValueError, "are the images of .*, which are not replaced", {"obs": [], "obsm": [IMAGES]}),
        (TypeError, r"obsm\['frame'\] is no array of numbers but DataFrame", {"obs": [], "obsm": ["frame"]}),
        (ValueError, "obs has a column 'a/b'", {"obs": ["a/b"], "obsm": []}),
        (KeyError, "no images at obsm", {"image_key": "x"}),
    ]
    for error, message, changed in cases:
        with pytest.raises(error, match=message):
            add_to_screen(path, screen, **changed)
    assert not results_folder(path).exists() or not list(results_folder(path).iterdir())
    store: Any = MemoryStore()
    write_screen(store, make_cells(8), y_key="gene")
    with pytest.raises(ValueError, match="is not on a disk of this machine"):
        add_to_screen(store, screen)


def test_columns_that_no_store_has_are_added_as_text(path):
    screen = open_screen(path)
    screen.obs["date"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(np.arange(40) % 3, "D")
    screen.obs["row"] = pd.Series([1 if row % 2 else "A" for row in range(40)], dtype=object).to_numpy()
    given = screen.obs.copy()
    again = add_to_screen(path, screen)
    assert list(again.obs["date"]) == list(map(str, given["date"]))
    assert list(again.obs["row"]) == list(map(str, given["row"]))
    pd.testing.assert_frame_equal(screen.obs, given)
    with pytest.warns(UserWarning, match="Nothing in obs or obsm differs"):
        add_to_screen(path, screen)  # the same dates
    if path.stem == "s":
        verify_screen(path)
    # one that is not asked for is not looked at
    screen.obs["array"] = [np.zeros(row) for row in range(40)]
    screen.obs["new"] = 1
    assert "new" in add_to_screen(path, screen, obs=["new"]).obs
    with pytest.raises(ValueError, match=r"obs\['array'\] holds values of the type ndarray, which cannot be stored"):
        add_to_screen(path, screen)


def test_results_of_other_cells_are_left_out(path, tmp_path):
    add_to_screen(path, with_results(open_screen(path)))
    folder = results_folder(path)
    other = make_cells(40)
    other.obsm[IMAGES] = 255 - other.obsm[IMAGES]  # the same table, other pixels
    other_path = tmp_path / f"other{path.suffix}"
    write_screen(other_path, other, y_key="gene")
    folder.rename(results_folder(other_path))
    with pytest.warns(UserWarning, match="holds results of other cells"):
        assert "leiden" not in open_screen(other_path).obs
    with pytest.raises(ValueError, match="holds results of other cells"):
        verify_screen(other_path)


def test_a_flipped_bit_of_results_is_found(tmp_path):
    path = tmp_path / "s.zarr"
    add_to_screen(path, with_results(write_screen(path, make_cells(40), y_key="gene")))
    verify_screen(path)
    (file,) = results_folder(path).iterdir()
    at = open_embedding(file).obsm["X_scbd_c"].base.offset
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="blocks are damaged: .*h5ad is damaged, with rows 0 to 39"):
        verify_screen(path)


def test_a_stopped_call_has_added_nothing_and_goes_on(path, monkeypatch):
    monkeypatch.setattr(adding, "_ROWS", 16)
    screen = with_results(open_screen(path))
    write = BlockFile.write
    written: list[int] = []

    def write_once(self, block, values):
        if written:
            raise KeyboardInterrupt
        written.append(block)
        write(self, block, values)

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, "write", write_once)
        with pytest.raises(KeyboardInterrupt):
            add_to_screen(path, screen)
    assert "leiden" not in open_screen(path).obs
    add_to_screen(path, screen, obs=["score"], obsm=[])  # what was begun is gone: it was another call's
    written.clear()
    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, "write", write_once)
        with pytest.raises(KeyboardInterrupt):
            add_to_screen(path, screen)

    def write_and_note(self, block, values):
        written.append(block)
        write(self, block, values)

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, "write", write_and_note)
        added = add_to_screen(path, screen)
    assert written == [0, 1, 2]
    np.testing.assert_array_equal(added.obsm["X_scbd_c"], screen.obsm["X_scbd_c"])
    assert not [name for name in os.listdir(results_folder(path)) if name.startswith(".")]


def test_killed_at_random_moments_it_is_there_or_not(tmp_path):
    path = tmp_path / "s.zarr"
    write_screen(path, make_cells(40), y_key="gene")
    code = f"""
import time
from test_adding import with_results
from scbd.data import add_to_screen, open_screen
from scbd.data.stores import _adding as adding
from scbd.data.stores._block_file import BlockFile
from pathlib import Path

adding._ROWS = 2
write = BlockFile.write
# twenty blocks take longer than two processes may live: two are killed for certain
BlockFile.write = lambda *given: (time.sleep(0.05), write(*given))

def job():
    screen = open_screen({str(path)!r})
    if "leiden" not in screen.obs:  # the last one may have been killed when all was there
        add_to_screen({str(path)!r}, with_results(screen))
    Path({str(tmp_path / "done")!r}).touch()
"""
    code = f"import sys; sys.path.insert(0, {str(os.path.dirname(__file__))!r})\n{code}"
    assert kill_until(tmp_path / "done", code, longest=0.4) >= 2
    verify_screen(path)
    screen = open_screen(path)
    right = with_results(open_screen(path))
    assert screen.obs.equals(right.obs)
    np.testing.assert_array_equal(screen.obsm["X_scbd_c"], right.obsm["X_scbd_c"])


def test_several_add_at_once(path):
    screen = open_screen(path)

    def add(number):
        more = AnnData(
            obs=screen.obs[[]].assign(**{f"c{number}": number}), obsm={f"X_{number}": np.full((40, 2), number)}
        )
        return add_to_screen(path, more)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(6)))
    found = open_screen(path)
    assert {f"c{i}" for i in range(6)} <= set(found.obs)
    assert all((found.obsm[f"X_{i}"] == i).all() for i in range(6))
