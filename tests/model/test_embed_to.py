from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from conftest import contents, make_cells

from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.data import open_embedding, verify_screen, write_screen
from scbd.data.stores._block_file import BlockFile
from scbd.metrics import aggregate, batch_probe


@pytest.fixture(scope="module")
def trained():
    cells = make_cells(200)
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder="small", n_latent=6)
    model.train(max_steps=30, batch_size=48, lr=1e-3, accelerator="cpu", perturbations_per_batch=None)
    return model


def test_the_file_holds_what_the_array_would(trained, tmp_path):
    embedded = trained.embed_to(tmp_path / "z.h5ad", batch_size=16, block_size=60)
    assert list(embedded.obsm) == ["X_scbd_c", "X_scbd_s"] and embedded.obs.equals(trained.adata.obs)
    for block in "cs":
        on_disk = embedded.obsm[f"X_scbd_{block}"]
        assert isinstance(on_disk.base, np.memmap) and on_disk.dtype == np.float32
        np.testing.assert_array_equal(on_disk, trained.get_latent_representation(block=block, batch_size=16))
    half = trained.embed_to(tmp_path / "half.h5ad", dtype="float16", blocks=["c"], batch_size=16)
    assert list(half.obsm) == ["X_scbd_c"]
    np.testing.assert_allclose(half.obsm["X_scbd_c"], embedded.obsm["X_scbd_c"], atol=5e-4)
    wide = trained.embed_to(tmp_path / "r.h5ad", representation="intermediate", blocks=["s"])
    assert wide.obsm["X_scbd_s"].shape == (200, trained.module.style.n_features)


def test_metrics_read_it_as_it_is(trained, tmp_path):
    embedded = trained.embed_to(tmp_path / "z.h5ad", dtype="float16")
    assert aggregate(embedded, "X_scbd_c", gene_key="gene", control="gene_0").n_obs == 3
    in_memory = AnnData(obs=embedded.obs, obsm={"X_scbd_c": np.array(embedded.obsm["X_scbd_c"])})
    assert batch_probe(embedded, "X_scbd_c", "well") == batch_probe(in_memory, "X_scbd_c", "well")


def test_other_cells_from_a_store(trained, tmp_path):
    screen = write_screen(tmp_path / "s.zarr", make_cells(50, seed=3), y_key="gene", compression="lz4")
    embedded = trained.embed_to(tmp_path / "z.h5ad", screen[:, :])
    np.testing.assert_array_equal(embedded.obsm["X_scbd_c"], trained.get_latent_representation(screen))
    assert list(embedded.obs_names) == list(screen.obs_names)


def test_killed_after_any_block_it_goes_on_to_the_same_bytes(trained, tmp_path, monkeypatch):
    arguments = {"batch_size": 16, "block_size": 48}
    trained.embed_to(tmp_path / "whole.h5ad", **arguments)
    original = BlockFile.write
    for killed_at in range(5):
        path = tmp_path / f"{killed_at}.h5ad"
        written: list[int] = []
        again: list[int] = []

        def write_or_die(self, block, values, written=written, killed_at=killed_at):
            if len(written) == killed_at:
                raise KeyboardInterrupt
            original(self, block, values)
            written.append(block)

        with monkeypatch.context() as patch:
            patch.setattr(BlockFile, "write", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                trained.embed_to(path, **arguments)
        assert not path.exists() and not torch.is_inference_mode_enabled()
        with monkeypatch.context() as patch:
            patch.setattr(BlockFile, "write", lambda self, b, v, again=again: (again.append(b), original(self, b, v)))
            trained.embed_to(path, **arguments)
        assert again == list(range(killed_at, 5))
        assert contents(path) == contents(tmp_path / "whole.h5ad")


def test_the_beginning_of_another_embedding_is_not_gone_on_with(trained, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained.embed_to(tmp_path / "z.h5ad")
    bias = trained.module.content.projection[-1].bias
    weights = bias.data.clone()
    bias.data += 1
    try:
        with pytest.raises(ValueError, match="is the beginning of something else"):
            trained.embed_to(tmp_path / "z.h5ad")
    finally:
        bias.data = weights  # to the bit: rounding would make other weights of them, and refuse whatever follows
    corrected, relabelled = trained.adata.copy(), trained.adata.copy()
    corrected.obsm["single_cell_images"] = corrected.obsm["single_cell_images"] // 2  # the same table
    relabelled.obs["well"] = relabelled.obs["well"].to_numpy()[::-1]  # of the same length
    settings: list[dict[str, Any]] = [{"dtype": "float16"}, {"blocks": ["c"]}, {"batch_size": 7}]
    for changed in [*settings, *({"adata": other} for other in (make_cells(50), corrected, relabelled))]:
        with pytest.raises(ValueError, match="is the beginning of something else"):
            trained.embed_to(tmp_path / "z.h5ad", **changed)
    assert len(trained.embed_to(tmp_path / "z.h5ad")) == 200  # nothing was changed after all


def test_a_flipped_byte_is_found(trained, tmp_path):
    path = tmp_path / "z.h5ad"
    at = trained.embed_to(path, batch_size=16, block_size=48).obsm["X_scbd_s"].base.offset + 50 * 6 * 4
    verify_screen(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="1 of 5 blocks are damaged: .*z.h5ad is damaged, with rows 48 to 95"):
        verify_screen(path)
    path.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(ValueError, match="truncated or of another kind"):
        open_embedding(path)


def test_what_is_wrong_is_said_before_any_work(trained, tmp_path, monkeypatch):
    (tmp_path / "there.h5ad").write_text("kept")
    cases: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (FileExistsError, "there.h5ad exists: it is kept", "there.h5ad", {}),
        (ValueError, "give a path that ends in .h5ad", "z.npy", {}),
        (ValueError, "dtype='float64' is not known: use float32 or float16", "z.h5ad", {"dtype": "float64"}),
        (ValueError, "block='x' is not known", "z.h5ad", {"blocks": ["c", "x"]}),
        (ValueError, "blocks names no embedding to write: give 'c', 's' or both", "z.h5ad", {"blocks": []}),
        (ValueError, "representation='q' is not known", "z.h5ad", {"representation": "q"}),
        (ValueError, "block_size=0: give a whole number, 1 or larger", "z.h5ad", {"block_size": 0}),
        (ValueError, "batch_size=-1: give a whole number, 1 or larger", "z.h5ad", {"batch_size": -1}),
    ]
    for error, message, path, changed in cases:
        with pytest.raises(error, match=message):
            trained.embed_to(tmp_path / path, **changed)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="make room first"):
        trained.embed_to(tmp_path / "z.h5ad")
    assert [path.name for path in tmp_path.iterdir()] == ["there.h5ad"]


def test_models_with_one_block_write_that(tmp_path):
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(max_steps=2, batch_size=24, accelerator="cpu")
    assert list(model.embed_to(tmp_path / "z.h5ad").obsm) == ["X_erm_c"]
    with pytest.raises(ValueError, match="has a single block"):
        model.embed_to(tmp_path / "y.h5ad", blocks=["s"])


def test_shares_of_several_devices(trained, tmp_path):
    arguments = {"batch_size": 16, "block_size": 48}
    trained.embed_to(tmp_path / "whole.h5ad", **arguments)
    assert not trained.embed_to(tmp_path / "z.h5ad", shard=(2, 2), **arguments).obsm
    assert len(trained.embed_to(tmp_path / "z.h5ad", shard=(1, 2), **arguments).obsm) == 2
    with pytest.raises(ValueError, match="shard=0/2: give a first number from 1 to the second"):
        trained.embed_to(tmp_path / "other.h5ad", shard=(0, 2))
    assert not list(tmp_path.glob("*other*"))
    assert contents(tmp_path / "z.h5ad") == contents(tmp_path / "whole.h5ad")


def test_a_share_of_which_others_have_left_nothing_ends_well(trained, tmp_path):
    path = tmp_path / "z.h5ad"
    assert len(trained.embed_to(path, shard=(1, 2)).obsm) == 2  # one block is all there is
    before = path.read_bytes()
    late = trained.embed_to(path, shard=(2, 2))
    np.testing.assert_array_equal(late.obsm["X_scbd_c"], trained.get_latent_representation())
    make_cells().write_h5ad(tmp_path / "foreign.h5ad")
    (tmp_path / "text.h5ad").write_text("kept")
    for name, changed in (("z.h5ad", {"dtype": "float16"}), ("foreign.h5ad", {}), ("text.h5ad", {})):
        with pytest.raises(FileExistsError, match=f"{name} exists: it is kept"):
            trained.embed_to(tmp_path / name, shard=(2, 2), **changed)
    assert path.read_bytes() == before and (tmp_path / "text.h5ad").read_text() == "kept"
    assert sorted(left.name for left in tmp_path.iterdir()) == ["foreign.h5ad", "text.h5ad", "z.h5ad"]


def test_columns_that_no_file_has_become_text(trained, tmp_path):
    cells = trained.adata.copy()
    cells.obs["date"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(np.arange(200) % 3, "D")
    cells.obs["note"] = [None, *(f"note {row}" for row in range(199))]
    given = cells.obs.copy()
    embedded = trained.embed_to(tmp_path / "z.h5ad", cells)
    assert list(embedded.obs["date"]) == list(map(str, given["date"]))
    assert pd.isna(embedded.obs["note"].iloc[0]) and list(embedded.obs["note"])[1:] == list(given["note"])[1:]
    pd.testing.assert_frame_equal(cells.obs, given)
    cells.obs["array"] = [np.zeros(2)] * 200
    with pytest.raises(ValueError, match=r"obs\['array'\] holds values of the type ndarray"):
        trained.embed_to(tmp_path / "new" / "y.h5ad", cells)
    assert [path.name for path in tmp_path.iterdir()] == ["z.h5ad"]


def test_processes_that_know_of_each_other_wait_before_the_work_and_after_it(trained, tmp_path, monkeypatch):
    """One without a block would else look for its share when the others have given the file its name, and be refused.

    And none may open the file before the last has written it.
    """
    path, arguments = tmp_path / "z.h5ad", {"batch_size": 16, "block_size": 48}
    events: list[str] = []

    def record(name: str) -> None:
        call = getattr(BlockFile, name)

        def recorded(*given: Any) -> Any:
            events.append(name)
            return call(*given)

        monkeypatch.setattr(BlockFile, name, recorded)

    record("begin")
    record("write")

    def wait() -> None:
        events.append("wait")
        if events.count("wait") == 2:  # until the other one is done
            trained.embed_to(path, shard=(2, 2), **arguments)

    for name, answer in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "barrier", wait)
    assert len(trained.embed_to(path, **arguments).obsm) == 2
    assert events == ["begin", "wait", *["write"] * 3, "wait", "begin", *["write"] * 2]
