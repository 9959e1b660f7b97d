"""Embeddings of any cells, in memory and in files."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import pytest
import torch
from anndata import AnnData
from conftest import IMAGE_KEY, contents, make_cells, make_wells
from helpers.small_models import QUICK, PressCtrlC, make_model
from torch import nn

from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.data import write_screen
from scbd.data._block_store import BlockStore
from scbd.metrics import aggregate, batch_probe
from scbd.model import _embed

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
BLOCKS: dict[str, Any] = {"batch_size": 16, "block_size": 48}  # five of 200 cells


def make_trained(cells: AnnData, kind: Any = SCBDModel, **kwargs: Any) -> Any:
    kind.setup_anndata(cells, y_key="gene", e_key="well")
    model = kind(cells, encoder="small", **kwargs)
    model.train(**QUICK, perturbations_per_batch=None)
    return model


def of_network(network: nn.Module, cells: AnnData) -> SCBDModel:
    """An encoder of one's own, as it is."""
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder=network, n_latent=6)
    model.is_trained_ = True
    return model


def named(cells: AnnData) -> AnnData:
    cells.var_names = ["DNA", "actin"]
    return cells


@pytest.fixture(scope="module")
def of_floats() -> SCBDModel:
    return make_trained(named(make_cells(dtype="float32")), n_latent=6)


@pytest.fixture(scope="module")
def classifier() -> ERMModel:
    return make_trained(make_cells(dtype="float32"), ERMModel)


@pytest.fixture(scope="module")
def of_many() -> SCBDModel:
    return make_trained(make_cells(200), n_latent=6)


def test_embed_any_batch_size_gives_equal_embeddings(of_floats):
    z = of_floats.get_latent_representation()
    for batch_size in (1, np.int64(7), 10**6):
        np.testing.assert_allclose(of_floats.get_latent_representation(batch_size=batch_size), z, atol=1e-6)


def test_embed_module_in_training_mode_gives_equal_embeddings():
    """With the statistics of a batch, a cell's embedding would depend on the cells beside it."""
    model = of_network(nn.Sequential(nn.Flatten(), nn.Linear(512, 8), nn.BatchNorm1d(8)), make_cells())
    z = model.get_latent_representation()
    model.module.train()
    np.testing.assert_allclose(model.get_latent_representation(batch_size=5), z, atol=1e-6)


def test_embed_new_cells_without_labels_succeeds(trained):
    new = make_cells(10, seed=5)
    expected = trained.get_latent_representation(new)
    del new.obs["gene"]
    np.testing.assert_array_equal(trained.get_latent_representation(new), expected)
    del new.obs["well"]
    nowhere = trained.get_latent_representation(new)
    with torch.inference_mode():
        z = trained.module.content(trained.module.preprocess(torch.from_numpy(new.obsm[IMAGE_KEY])))
    np.testing.assert_allclose(nowhere, z.numpy(), atol=1e-6)
    assert np.abs(expected - nowhere).max() > 1e-3  # wells that are known are standardised
    new.obs["well"] = [f"never seen, {i}" for i in range(10)]  # a cell says nothing of its well
    np.testing.assert_array_equal(trained.get_latent_representation(new), nowhere)
    assert not new.uns  # not even set up


def test_embed_indices_keeps_their_order(trained):
    whole = trained.get_latent_representation(batch_size=7)
    mask = np.arange(96) % 3 == 0
    for indices, rows in (([5, 90, 5, 0, -1], [5, 90, 5, 0, 95]), (mask, np.flatnonzero(mask))):
        found = trained.get_latent_representation(indices=indices)
        np.testing.assert_allclose(found, whole[rows], rtol=1e-5, atol=1e-6)
    assert trained.get_latent_representation(indices=[]).shape == (0, 6)
    view = trained.adata[10:20]
    np.testing.assert_allclose(trained.get_latent_representation(view), whole[10:20], rtol=1e-5, atol=1e-6)
    for bad, named_ in (([0, 96], "from 0 to 96"), (mask[:5], "length 5"), ([0.5], "row numbers")):
        with pytest.raises(ValueError, match=named_):
            trained.get_latent_representation(indices=bad)


def test_embed_out_writes_array_or_file(trained, tmp_path, monkeypatch):
    whole = trained.get_latent_representation()
    mine = np.zeros((96, 6), dtype=np.float32)
    assert trained.get_latent_representation(out=mine) is mine
    np.testing.assert_array_equal(mine, whole)
    mapped = trained.get_latent_representation(out=tmp_path / "new" / "z.npy", enable_progress_bar=True)
    np.testing.assert_array_equal(mapped, whole)
    assert os.listdir(tmp_path / "new") == ["z.npy"]
    for out, named_ in ((mine[:3], r"\(3, 6\)"), (mine.astype(int), "int64"), (tmp_path / "z.csv", r"\.npy")):
        with pytest.raises(ValueError, match=named_):
            trained.get_latent_representation(out=out)
    monkeypatch.setattr(trained.module, "embed", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained.get_latent_representation(out=tmp_path / "z.npy")
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    ("settings", "named_"),
    [
        ({"block": "z"}, "block='z'"),
        ({"representation": "r"}, "representation='r'"),
        ({"center": "mean"}, "center='mean'"),
        ({"center": "controls"}, "center='controls'"),
        ({"adata": make_cells(4, shape=(3, 16, 16))}, "3 channels"),
        ({"adata": make_cells(4, shape=(2, 20, 20))}, "20 × 20"),
        *(({"batch_size": size}, f"batch_size={size!r}") for size in (-1, 0, 2.5, "8")),
    ],
)
def test_embed_invalid_arguments_raise(trained, settings, named_):
    with pytest.raises(ValueError, match=named_):
        trained.get_latent_representation(**settings)


def test_embed_cells_without_inputs_raises_with_location(trained):
    with pytest.raises(KeyError, match="single_cell_images"):
        trained.get_latent_representation(AnnData(obs=trained.adata.obs))


def test_embed_resizing_model_accepts_other_sizes_of_equal_proportions():
    model = make_model(image_size=8)
    model.is_trained_ = True
    assert len(model.get_latent_representation(make_cells(8, shape=(2, 20, 20)))) == 8
    with pytest.raises(ValueError, match="stretch"):
        model.get_latent_representation(make_cells(8, shape=(2, 20, 16)))


def test_embed_untrained_model_warns():
    with pytest.warns(UserWarning, match="untrained"):
        make_model().get_latent_representation()


def test_embed_other_channel_order_raises_and_other_names_warn(of_floats, tmp_path):
    turned = named(make_cells(20, dtype="float32"))[:, ["actin", "DNA"]].copy()
    with pytest.raises(ValueError, match="actin, DNA"):
        of_floats.get_latent_representation(turned)
    renamed = make_cells(20, dtype="float32")
    renamed.var_names = ["Hoechst", "phalloidin"]
    with pytest.warns(UserWarning, match="Hoechst, phalloidin"):
        of_floats.get_latent_representation(renamed)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embed_non_finite_pixels_raises_with_rows(of_floats, classifier, tmp_path, value):
    cells = named(make_cells(60, dtype="float32"))
    cells.obsm[IMAGE_KEY][[21, 40], 1, 3, 3] = value
    for call in (
        lambda: of_floats.get_latent_representation(cells),
        lambda: of_floats.get_latent_representation(cells, indices=[3, 40, 21]),
        lambda: of_floats.get_latent_representation(cells, out=tmp_path / "z.npy"),
        lambda: of_floats.embed_to(tmp_path / "z.zarr", cells),
    ):
        with pytest.raises(ValueError, match=r"rows (21, 40|40, 21)"):
            call()
    assert not (tmp_path / "z.zarr").exists() and not (tmp_path / "z.npy").exists()
    fine = np.isfinite(cells.obsm[IMAGE_KEY]).all(axis=(1, 2, 3))
    assert np.isfinite(of_floats.get_latent_representation(cells, indices=fine)).all()
    cells.obs["well"] = "new"  # which is known by all of its cells but these
    z = of_floats.get_latent_representation(cells, indices=fine)
    np.testing.assert_array_equal(z, of_floats.get_latent_representation(cells[fine].copy()))


@pytest.mark.parametrize("n_ahead", [1, 3, 99])
def test_embed_groups_started_ahead_give_same_embeddings_and_errors(of_floats, tmp_path, monkeypatch, n_ahead):
    cells = named(make_cells(60, dtype="float32"))
    expected = of_floats.get_latent_representation(cells, batch_size=8)
    monkeypatch.setattr(_embed, "_n_groups_ahead", lambda device: n_ahead)  # as on a GPU
    np.testing.assert_array_equal(of_floats.get_latent_representation(cells, batch_size=8), expected)
    on_disk = of_floats.embed_to(tmp_path / "z.zarr", cells, batch_size=8)
    np.testing.assert_array_equal(np.asarray(on_disk.obsm["X_scbd_c"]), expected)
    cells.obsm[IMAGE_KEY][[21, 40], 1, 3, 3] = np.nan
    with pytest.raises(ValueError, match="rows 21"):
        of_floats.get_latent_representation(cells, batch_size=8)


def test_embed_non_finite_output_raises_with_cause():
    model, cells = of_network(nn.Sequential(nn.Flatten(), nn.Linear(512, 8)), make_cells(dtype="float32")), make_cells()
    weight = model.module.content.encoder[1].weight
    weight.data.fill_(1e10)
    cells = make_cells(60, dtype="float32")
    cells.obsm[IMAGE_KEY][7] = 1e30
    with pytest.raises(ValueError, match="rows 7"):
        model.get_latent_representation(cells)
    weight.data[2] = torch.nan
    with pytest.raises(ValueError, match="content.encoder"):
        model.get_latent_representation()


def wells_of(**settings: Any) -> SCBDModel:
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", control="DMSO")
    model = SCBDModel(wells, **settings)
    model.train(**QUICK, train_size=1.0)
    return model


def centred(model: SCBDModel) -> np.ndarray:
    """Within plates by what is left of them, and then on controls."""
    z, controls = model.get_latent_representation(center=None), (model.adata.obs["compound"] == "DMSO").to_numpy()
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    assert model.results_.offsets is not None
    z = z - model.results_.offsets.state["shift"][model.adata.obs["plate"].cat.codes]
    return z - z[controls].mean(0)


def test_embed_features_are_centred_on_controls(tmp_path):
    model = wells_of()
    first = model.results_.centers["c"]
    np.testing.assert_allclose(model.get_latent_representation(), centred(model), atol=1e-5)
    on_disk = model.embed_to(tmp_path / "z.zarr")
    for block in "cs":
        z = model.get_latent_representation(block=block)
        np.testing.assert_allclose(on_disk.obsm[f"X_scbd_{block}"], z, atol=1e-6)
    # of a run that is interrupted, that of its weights
    with pytest.raises(KeyboardInterrupt):
        model.train(**QUICK | {"max_steps": 8, "lr": 1e-2, "train_size": 1.0}, callbacks=PressCtrlC(5))
    np.testing.assert_allclose(model.get_latent_representation(), centred(model), atol=1e-5)
    assert not np.allclose(model.results_.centers["c"], first, atol=1e-3)
    model.adata.obs["split"] = np.where(model.adata.obs["compound"] == "DMSO", "test", "train")
    with pytest.warns(UserWarning, match="No training cell is a control"):
        model.train(**QUICK, split="split")
    assert model.results_.centers == {}


def test_embed_to_stores_equal_embeddings(of_many, tmp_path):
    model = of_many
    embedded = model.embed_to(tmp_path / "z.zarr", **BLOCKS)
    assert list(embedded.obsm) == ["X_scbd_c", "X_scbd_s"] and embedded.obs.equals(model.adata.obs)
    for block in "cs":
        on_disk = embedded.obsm[f"X_scbd_{block}"]
        assert on_disk.dtype == np.float32
        np.testing.assert_array_equal(on_disk, model.get_latent_representation(block=block, batch_size=16))
    half = model.embed_to(tmp_path / "half.zarr", dtype="float16", blocks=["c"], batch_size=16)
    assert list(half.obsm) == ["X_scbd_c"]
    np.testing.assert_allclose(half.obsm["X_scbd_c"], embedded.obsm["X_scbd_c"], atol=5e-4)
    wide = model.embed_to(tmp_path / "r.zarr", representation="intermediate", blocks=["s"])
    assert wide.obsm["X_scbd_s"].shape == (200, model.module.style.n_features)
    # metrics read it as it is
    assert aggregate(half, "X_scbd_c", gene_key="gene", control="gene_0").n_obs == 3
    in_memory = AnnData(obs=half.obs, obsm={"X_scbd_c": np.array(half.obsm["X_scbd_c"])})
    assert batch_probe(half, "X_scbd_c", "well") == batch_probe(in_memory, "X_scbd_c", "well")


def test_embed_to_cells_of_open_screen_gives_equal_embeddings(of_many, tmp_path):
    screen = write_screen(tmp_path / "s.zarr", make_cells(50, seed=3), y_key="gene", compression="lz4")
    embedded = of_many.embed_to(tmp_path / "z.zarr", screen[:, :])
    np.testing.assert_array_equal(embedded.obsm["X_scbd_c"], of_many.get_latent_representation(screen))
    assert list(embedded.obs_names) == list(screen.obs_names)


def test_embed_to_killed_after_any_block_continues_to_equal_bytes(of_many, tmp_path, monkeypatch):
    of_many.embed_to(tmp_path / "whole.zarr", **BLOCKS)
    original = BlockStore.write
    for killed_at in range(5):
        path = tmp_path / f"{killed_at}.zarr"
        written: list[int] = []
        again: list[int] = []

        def write_or_die(self, block, values, written=written, killed_at=killed_at):
            if len(written) == killed_at:
                raise KeyboardInterrupt
            original(self, block, values)
            written.append(block)

        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, "write", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                of_many.embed_to(path, **BLOCKS)
        assert not path.exists() and not torch.is_inference_mode_enabled()
        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, "write", lambda self, b, v, again=again: (again.append(b), original(self, b, v)))
            of_many.embed_to(path, **BLOCKS)
        assert again == list(range(killed_at, 5))
        assert contents(path) == contents(tmp_path / "whole.zarr")


def test_embed_to_unfinished_store_of_other_weights_raises(of_many, tmp_path, monkeypatch):
    model = of_many

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.embed_to(tmp_path / "z.zarr")
    bias = model.module.content.projection[-1].bias
    weights = bias.data.clone()
    bias.data += 1
    try:
        with pytest.raises(ValueError, match="z.zarr"):
            model.embed_to(tmp_path / "z.zarr")
    finally:
        bias.data = weights  # to the bit: rounding would make other weights of them, and refuse whatever follows
    corrected, relabelled = model.adata.copy(), model.adata.copy()
    corrected.obsm["single_cell_images"] = corrected.obsm["single_cell_images"] // 2  # the same table
    relabelled.obs["well"] = relabelled.obs["well"].to_numpy()[::-1]  # of the same length
    settings: list[dict[str, Any]] = [{"dtype": "float16"}, {"blocks": ["c"]}, {"batch_size": 7}]
    for changed in [*settings, *({"adata": other} for other in (make_cells(50), corrected, relabelled))]:
        with pytest.raises(ValueError, match="z.zarr"):
            model.embed_to(tmp_path / "z.zarr", **changed)
    assert len(model.embed_to(tmp_path / "z.zarr")) == 200  # nothing was changed after all


def test_embed_to_invalid_arguments_raise_before_embedding(of_many, tmp_path):
    (tmp_path / "there.zarr").write_text("kept")
    cases: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (FileExistsError, "there.zarr", "there.zarr", {}),
        (ValueError, "z.npy", "z.npy", {}),
        *(
            (ValueError, f"{name}={value!r}" if named_ is None else named_, "z.zarr", {name: value})
            for name, value, named_ in (
                ("dtype", "float64", None),
                ("blocks", ["c", "x"], "block='x'"),
                ("blocks", [], "blocks"),
                ("representation", "q", None),
                ("block_size", 0, None),
                ("batch_size", -1, None),
                ("shard", (0, 2), "shard"),
            )
        ),
    ]
    for error, message, path, changed in cases:
        with pytest.raises(error, match=message):
            of_many.embed_to(tmp_path / path, **changed)
    assert [path.name for path in tmp_path.iterdir()] == ["there.zarr"]


def test_embed_to_model_without_z_s_writes_z_c(classifier, tmp_path):
    assert list(classifier.embed_to(tmp_path / "z.zarr").obsm) == ["X_erm_c"]
    with pytest.raises(ValueError, match="single block"):
        classifier.embed_to(tmp_path / "y.zarr", blocks=["s"])


def test_embed_to_shards_complete_one_store(of_many, tmp_path):
    of_many.embed_to(tmp_path / "whole.zarr", **BLOCKS)
    path = tmp_path / "z.zarr"
    assert not of_many.embed_to(path, shard=(2, 2), **BLOCKS).obsm
    assert len(of_many.embed_to(path, shard=(1, 2), **BLOCKS).obsm) == 2
    assert contents(path) == contents(tmp_path / "whole.zarr")
    late = of_many.embed_to(path, shard=(2, 2), **BLOCKS)  # others have left nothing
    np.testing.assert_array_equal(late.obsm["X_scbd_c"], of_many.get_latent_representation(batch_size=16))
    before = contents(path)
    (tmp_path / "text.zarr").write_text("kept")
    for name in ("z.zarr", "text.zarr"):
        with pytest.raises(FileExistsError, match=name):
            of_many.embed_to(tmp_path / name, dtype="float16", shard=(2, 2))
    assert contents(path) == before and (tmp_path / "text.zarr").read_text() == "kept"


def test_embed_to_distributed_processes_wait_before_and_after(of_many, tmp_path, monkeypatch):
    """One without a block would else look for its share when the others have given the file its name, and be refused.

    And none may open the file before the last has written it.
    """
    path = tmp_path / "z.zarr"
    events: list[str] = []

    def record(name: str) -> None:
        call = getattr(BlockStore, name)

        def recorded(*given: Any) -> Any:
            events.append(name)
            return call(*given)

        monkeypatch.setattr(BlockStore, name, recorded)

    record("begin")
    record("write")

    def wait() -> None:
        events.append("wait")
        if events.count("wait") == 2:  # until the other one is done
            of_many.embed_to(path, shard=(2, 2), **BLOCKS)

    for name, answer in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "barrier", wait)
    assert len(of_many.embed_to(path, **BLOCKS).obsm) == 2
    assert events == ["begin", "wait", *["write"] * 3, "wait", "begin", *["write"] * 2]


@pytest.mark.parametrize("changed", [lambda x: 500 + 100 * x, lambda x: 100 * x, lambda x: x / 200, lambda x: x + 1e4])
@pytest.mark.parametrize("images", [False, True])
def test_embed_inputs_in_other_units_warns(changed, images):
    """A model of scaled features, or of pixels, and cells that are not so; what stays in its units is quiet."""
    cells = make_cells(dtype="float32") if images else make_wells()
    keys = ("gene", "well") if images else ("compound", "plate")
    SCBDModel.setup_anndata(cells, *keys)
    model = SCBDModel(cells, encoder="small" if images else "auto")
    model.train(**QUICK, train_size=1.0)
    others = cells.copy()
    model.get_latent_representation(others)
    if images:
        others.obsm[IMAGE_KEY] = changed(others.obsm[IMAGE_KEY]).astype(np.float32)
    else:
        others.X = changed(others.X).astype(np.float32)
    with pytest.warns(UserWarning, match="other units"):
        model.get_latent_representation(others)
    others.obs = others.obs.iloc[:, :0]  # of no known environment
    with pytest.warns(UserWarning, match="other units"):
        model.get_latent_representation(others)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be asked")
def test_keep_freed_memory_is_used_in_training_and_embedding(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")]:
        monkeypatch.delenv(name)
    kept = False
    of_training: set[bool] = set()
    of_embedding: set[bool] = set()

    class Allocator:
        def mallopt(self, option: int, value: int) -> int:
            nonlocal kept
            kept = kept or (option == -4 and value == 0)
            return 1

        def malloc_trim(self, pad: int) -> int:
            nonlocal kept
            kept = False
            return 1

    class Watched(nn.Sequential):
        def forward(self, images):
            (of_training if torch.is_grad_enabled() else of_embedding).add(kept)
            return super().forward(images)

    monkeypatch.setattr("ctypes.CDLL", lambda name: Allocator())
    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder=Watched(nn.Flatten(), nn.Linear(2 * 16 * 16, 4)), n_latent=6)
    of_training.clear()  # an encoder of one's own is tried out
    model.train(**QUICK, perturbations_per_batch=None)
    of_embedding.clear()
    model.get_latent_representation()
    assert of_training == of_embedding == {True} and not kept
