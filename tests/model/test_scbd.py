from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, assert_same, make_model, weights
from torch import nn

import scbd
from scbd import SCBDModel
from scbd.data import ArraySource, ImageDataModule, Split, open_screen, write_screen
from scbd.model._fit import _steps_between_validations
from scbd.nn._log_sums import log_sums

# a few steps leave BatchNorm's statistics unsettled and z_c squeezed; the tests of the warning ask for it themselves
pytestmark = [pytest.mark.filterwarnings(f"ignore:z_c has {what}") for what in ("collapsed", "learned nothing")]


@pytest.fixture(scope="module")
def trained() -> SCBDModel:
    model = make_model()
    model.train(**QUICK | {"max_steps": 12})
    return model


def test_the_five_lines(trained):
    z_c, z_s = trained.get_latent_representation(), trained.get_latent_representation(block="s")
    assert z_c.shape == z_s.shape == (96, 6)
    assert z_c.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(z_c, axis=1), 1, rtol=1e-5)
    assert not np.allclose(z_c, z_s)
    assert trained.get_latent_representation(representation="intermediate").shape == (96, 256)


def test_training_learns_both_blocks():
    cells = make_cells(200)
    model = make_model(cells, alpha=0.0)
    model.train(**QUICK | {"max_steps": 60, "lr": 2e-3, "batch_size": 100})
    truth = {"c": cells.obs["gene"], "s": cells.obs["well"]}
    for block, label in truth.items():
        predicted = scbd.metrics.predict_labels(
            model.get_latent_representation(block=block),
            label,
            model.get_latent_representation(block=block),
            classifier="nearest_mean",
        )
        assert (predicted == label).mean() > 0.9


def test_history_has_one_frame_a_metric(trained):
    names = {"loss", "supervised_c", "learned_c", "supervised_s", "invariance_c"}
    expected = {f"{part}_{name}" for part in ("train", "validation") for name in names}
    assert set(trained.history) == expected | {"alpha", "z_c_spread", "z_c_effective_rank"}
    for name, frame in trained.history.items():
        assert list(frame.columns) == [name]
        assert frame.index.name == "step"
        assert frame.index.is_monotonic_increasing
        assert frame.index[-1] == 12
        assert np.isfinite(frame.to_numpy(dtype=float)).all()


def test_split_indices_are_disjoint_and_stratified(trained):
    train, validation, test = trained.train_indices, trained.validation_indices, trained.test_indices
    assert sorted(np.concatenate([train, validation, test])) == list(range(96))
    assert 80 <= len(train) <= 92
    assert len(test) == 0


def test_setup_changes_nothing_but_uns(cells):
    obs, obsm = cells.obs.copy(), list(cells.obsm)
    make_model(cells)
    pd.testing.assert_frame_equal(cells.obs, obs)
    assert list(cells.obsm) == obsm


def test_e_key_may_be_a_list(cells):
    SCBDModel.setup_anndata(cells, "gene", ["plate", "well"])
    model = SCBDModel(cells, encoder="small", n_latent=4)
    assert model.summary_stats["n_e"] == 3
    model.train(**QUICK)
    assert "plate × well" in repr(model)


def test_validation_rows_move_nothing(cells):
    """Statistics and weights come from training cells alone."""
    split = Split(train=np.arange(60), validation=np.arange(60, 96))
    one = make_model(cells)
    one.train(**QUICK, split=split, load_best=False)
    other = make_cells()
    other.obsm["single_cell_images"][60:] = 255 - other.obsm["single_cell_images"][60:]
    two = make_model(other)
    two.train(**QUICK, split=split, load_best=False)
    assert_same(weights(one), weights(two))


def test_training_twice_is_the_same(cells):
    runs = []
    for _ in range(2):
        model = make_model(make_cells(), augment=True)
        model.train(**QUICK)
        runs.append(weights(model))
    assert_same(*runs)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = make_model(augment=True)
    whole.train(**QUICK | {"max_steps": 12}, validate_every=4, load_best=False, checkpoint_dir=tmp_path / "whole")
    part = make_model(augment=True)
    part.train(**QUICK | {"max_steps": 7}, validate_every=4, load_best=False, checkpoint_dir=tmp_path / "part")
    again = make_model(augment=True)
    again.module.content.projection[0].weight.data.zero_()  # whatever it holds, the checkpoint replaces
    again.train(
        **QUICK | {"max_steps": 12},
        validate_every=4,
        load_best=False,
        checkpoint_dir=tmp_path / "part",
        ckpt_path="last",
    )
    assert_same(weights(whole), weights(again))
    frames = [pd.read_csv(tmp_path / run / "history.csv", index_col="step") for run in ("whole", "part")]
    losses = [frame["validation_loss"].dropna() for frame in frames]
    assert list(losses[0].index) == [4, 8, 12]
    np.testing.assert_allclose(losses[0].loc[losses[1].index], losses[1], rtol=1e-6)
    assert losses[1].index[-1] == 12


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_an_interrupt_leaves_a_state_that_can_be_resumed(tmp_path):
    class PressCtrlC(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        model.train(
            **QUICK | {"max_steps": 9},
            checkpoint_dir=tmp_path,
            validate_every=9,
            callbacks=[PressCtrlC()],
            load_best=False,
        )
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 4
    resumed, whole = make_model(), make_model()
    resumed.train(
        **QUICK | {"max_steps": 9}, checkpoint_dir=tmp_path, validate_every=9, ckpt_path="last", load_best=False
    )
    whole.train(**QUICK | {"max_steps": 9}, validate_every=9, load_best=False)
    assert_same(weights(resumed), weights(whole))


def test_a_run_made_longer_by_the_model_that_made_it_counts_its_steps_once(tmp_path):
    model = make_model()
    for steps, ckpt_path in ((4, None), (8, "last")):
        model.train(**QUICK | {"max_steps": steps}, validate_every=4, checkpoint_dir=tmp_path, ckpt_path=ckpt_path)
    assert model.training_settings_["steps"] == 8
    assert model.history["validation_loss"].index.tolist() == [4, 8]


def test_resuming_with_other_settings_is_refused(tmp_path):
    make_model().train(**QUICK, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(batch_size: 24 → 12; .*alpha: 'auto' → 2"):
        make_model(alpha=2).train(**QUICK | {"batch_size": 12}, checkpoint_dir=tmp_path, ckpt_path="last")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        make_model().train(**QUICK, checkpoint_dir=tmp_path / "other", ckpt_path="last")
    with pytest.raises(ValueError, match="ckpt_path='last' needs the checkpoint_dir"):
        make_model().train(**QUICK, ckpt_path="last")
    with pytest.raises(FileExistsError, match="holds the state of an earlier run: go on with it"):
        make_model().train(**QUICK, checkpoint_dir=tmp_path)
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:5000])
    (tmp_path / "previous.ckpt").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="is no checkpoint, or is truncated"):
        make_model().train(**QUICK, checkpoint_dir=tmp_path, ckpt_path="last")


def test_the_best_weights_are_kept(tmp_path):
    """A learning rate that ruins the model after the first validation: the first weights must come back."""
    model = make_model()
    model.train(**QUICK | {"max_steps": 12, "lr": 3.0}, validate_every=1, load_best=True, checkpoint_dir=tmp_path)
    losses = model.history["validation_loss"].iloc[:, 0].astype(float)
    best = torch.load(tmp_path / "best.ckpt", weights_only=False)
    assert best["global_step"] == losses.idxmin()
    assert losses.min() < losses.iloc[-1]
    kept = {name.removeprefix("module."): value for name, value in best["state_dict"].items()}
    assert_same(weights(model), kept)


def test_early_stopping_stops():
    model = make_model()
    model.train(
        **QUICK | {"max_steps": 50, "lr": 3.0}, validate_every=1, early_stopping=True, early_stopping_patience=2
    )
    assert model.trainer.global_step < 10


def test_a_second_training_goes_on_in_training_mode(trained):
    model = make_model()
    model.train(**QUICK)
    tracked = int(model.module.content.encoder[1].num_batches_tracked)
    model.train(**QUICK, load_best=False)
    assert int(model.module.content.encoder[1].num_batches_tracked) == tracked + 6
    assert not model.module.training
    assert model.history["train_loss"].index[-1] == 12
    assert model.training_settings_["steps"] == 12


def test_epochs_and_default_length():
    model = make_model(make_cells(60))
    model.train(max_epochs=3, batch_size=20, enable_progress_bar=False, accelerator="cpu")
    assert model.trainer.global_step == 3 * 2


def test_alpha_warms_up():
    model = make_model(alpha=100.0, smoothing=0)
    model.train(**QUICK | {"max_steps": 4}, validate_every=1, plan_kwargs={"n_steps_alpha_warmup": 2}, load_best=False)
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    weight = (h["train_loss"] - h["train_supervised_c"] - h["train_supervised_s"]) / h["train_invariance_c"]
    np.testing.assert_allclose(weight, [0, 50, 100, 100], atol=1e-2)


def test_alpha_follows_what_is_learned(tmp_path):
    model = make_model(alpha="auto", style_target=None, smoothing=0)
    assert "alpha auto" in repr(model)
    model.train(**QUICK | {"max_steps": 80, "lr": 3e-3, "batch_size": 48}, validate_every=1)
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    learned, alpha = h["train_learned_c"].to_numpy(), h["alpha"].to_numpy()
    assert alpha[0] == 0 and len(alpha) == 80
    new_cells = h["validation_learned_c"].to_numpy()
    expected, mean, kept = [], 0.0, 1.0
    for share, share_of_new in zip(learned, new_cells, strict=True):
        expected.append(0.05 * mean * kept)
        mean += (max(share, 0) - mean) / 50
        if mean > 0.02:
            kept = min(max(share_of_new / mean, 0), 1)
    np.testing.assert_allclose(alpha, expected, atol=1e-6)
    assert alpha.max() > 0.005
    mean *= kept
    # that is what the statistic is weighed by
    np.testing.assert_allclose(h["train_loss"], h["train_supervised_c"] + alpha * h["train_invariance_c"], atol=1e-4)
    assert model.health["final_alpha"] == pytest.approx(0.05 * mean, rel=1e-3)
    assert f"alpha auto, {0.05 * mean:.2g} in the end" in repr(model)
    # it is saved with the weights, and what goes on with those goes on with it
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), adata=model.adata)
    assert float(loaded.module.current_alpha) == pytest.approx(0.05 * mean, rel=1e-3)
    loaded.train(**QUICK | {"max_steps": 1}, validate_every=1)
    assert loaded.history["alpha"].iloc[-1, 0] == pytest.approx(0.05 * mean, rel=1e-3)


def test_what_was_learned_by_heart_bears_no_invariance():
    """Labels that images do not show: training cells are told apart all the same, new ones are not."""
    noise = make_cells(160)
    noise.obs["gene"] = np.random.default_rng(0).permutation(noise.obs["gene"])
    model = make_model(noise, alpha="auto", smoothing=0, style_target=None)
    # half of them: what a handful of validation cells says differs between processors
    training = QUICK | {"max_steps": 300, "lr": 3e-3, "batch_size": 48, "train_size": 0.5, "validation_size": 0.5}
    model.train(**training, validate_every=100)
    assert float(model.module.auto_alpha.learned) > 0.1
    assert float(model.module.current_alpha) < 0.2 * 0.05 * float(model.module.auto_alpha.learned)


@pytest.mark.parametrize(
    "told", [[], [0.0, 0.0]], ids=["no validation batches", "validation batches whose labels say nothing"]
)
def test_alpha_is_not_weighed_by_validation_cells_that_say_nothing(told):
    alpha = scbd.model.AutoAlpha()
    for _ in range(50):
        alpha.observe(torch.tensor(0.5))
    before = float(alpha.alpha)
    alpha.validate(torch.tensor(told))
    assert float(alpha.alpha) == before > 0.01
    alpha.validate(torch.tensor([0.1, 0.0, 0.1]))
    assert float(alpha.alpha) == pytest.approx(0.005)


def test_validation_has_no_say_before_anything_was_learned():
    """A ratio of two numbers that are nearly zero says nothing."""
    alpha = scbd.model.AutoAlpha()
    alpha.observe(torch.tensor(0.5))
    assert float(alpha.learned) == pytest.approx(0.01)
    alpha.validate(torch.tensor([0.001]))
    assert float(alpha.alpha) == pytest.approx(0.05 * 0.01)
    alpha.observe(torch.tensor(0.9))
    alpha.validate(torch.tensor([0.001]))
    assert float(alpha.alpha) == pytest.approx(0.05 * 0.001)


@pytest.mark.parametrize("interrupted", [4, 5, 6])
def test_a_resumed_run_goes_on_with_the_alpha_it_found(tmp_path, interrupted):
    """Wherever it was interrupted: at a step with a validation, or between."""
    settings: dict[str, Any] = QUICK | {"lr": 1e-2, "checkpoint_dir": tmp_path, "validate_every": 2, "max_steps": 9}

    class PressCtrlC(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == interrupted - 1:
                os.kill(os.getpid(), signal.SIGINT)

    def make():
        model = make_model(alpha="auto")
        model.module.auto_alpha.learned.fill_(0.9)  # more than new cells bear out
        return model

    half = make()
    with pytest.raises(KeyboardInterrupt):
        half.train(**settings, callbacks=[PressCtrlC()])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == interrupted
    resumed, whole = make(), make()
    resumed.train(**settings, ckpt_path="last")
    whole.train(**settings | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    assert weights(whole)["auto_alpha.kept"] < 1
    assert resumed.history["validation_loss"].index.tolist() == [2, 4, 6, 8]
    with pytest.raises(ValueError, match="alpha: 'auto' → 0.01"):
        make_model(alpha=0.01).train(**settings | {"ckpt_path": "last"})


def test_alpha_follows_what_is_learned_beside_a_decoder():
    model = make_model(alpha="auto")
    model.train(**QUICK | {"lr": 3e-3, "max_steps": 30})
    auto = model.module.auto_alpha
    before = float(auto.learned), float(auto.kept)
    model.train_decoder(**QUICK | {"max_steps": 2}, width=8)
    assert (float(auto.learned), float(auto.kept)) == before
    model.train_decoder(**QUICK | {"max_steps": 2}, joint=True, width=8)
    assert float(auto.learned) > before[0] > 0


def test_the_pair_as_style_target(cells):
    model = make_model(cells, style_target="ye", n_latent=8)
    images, y, e = (torch.randint(0, 255, (12, 2, 16, 16)).byte(), torch.arange(12) % 4, torch.arange(12) % 3)
    losses = model.module(images, y, e)
    z_s = model.module.style(model.module.preprocess(images))
    expected = scbd.nn.supervised_contrastive_loss(z_s, 3 * y + e)
    assert len((3 * y + e).unique()) == 12
    torch.testing.assert_close(losses.parts["supervised_s"], expected)


def test_labels_of_the_content_are_smoothed(cells):
    model = make_model(cells, alpha=0, smoothing=0.5)
    images, y, e = (torch.randint(0, 255, (12, 2, 16, 16)).byte(), torch.arange(12) % 4, torch.arange(12) % 3)
    losses = model.module(images, y, e)
    z_c, z_s = (block(model.module.preprocess(images)) for block in (model.module.content, model.module.style))
    style, smoothed = (
        scbd.nn.supervised_contrastive_loss(z_s, e),
        scbd.nn.supervised_contrastive_loss(z_c, y, smoothing=0.5),
    )
    torch.testing.assert_close(losses.loss, smoothed + style)
    # what is logged can be read beside the ceiling
    torch.testing.assert_close(losses.parts["supervised_c"], scbd.nn.supervised_contrastive_loss(z_c, y))
    torch.testing.assert_close(losses.parts["supervised_s"], style)


def test_invariance_as_variance_looks_at_every_stage(cells):
    model = make_model(cells, alpha=0.5, smoothing=0)
    images, y, e = (torch.randint(0, 255, (40, 2, 16, 16)).byte(), torch.arange(40) % 4, torch.arange(40) % 3)
    losses = model.module(images, y, e)
    z_c, passed = model.module.content.watched(model.module.preprocess(images))
    assert [p.shape[1] for p in passed] == [32, 64, 128, 256]
    expected = scbd.nn.invariance_statistic([*passed, z_c], e, y)
    torch.testing.assert_close(losses.parts["invariance_c"], expected)
    supervised = losses.parts["supervised_c"] + losses.parts["supervised_s"]
    torch.testing.assert_close(losses.loss, supervised + 0.5 * expected)
    model.train(**QUICK)
    assert np.isfinite(model.history["train_invariance_c"].to_numpy(dtype=float)).all()


def test_new_cells_need_no_labels(trained):
    new = make_cells(10, seed=5)
    expected = trained.get_latent_representation(new)
    new.obs = new.obs.drop(columns=["gene", "well"])
    np.testing.assert_array_equal(trained.get_latent_representation(new), expected)
    new.obs["well"] = "never seen"
    np.testing.assert_array_equal(trained.get_latent_representation(new), expected)
    assert not new.uns  # not even set up


def test_indices_are_embedded_in_the_order_asked_for(trained):
    whole = trained.get_latent_representation(batch_size=7)
    rows = [5, 90, 5, 0, -1]
    np.testing.assert_allclose(trained.get_latent_representation(indices=rows), whole[rows], rtol=1e-5, atol=1e-6)
    mask = np.arange(96) % 3 == 0
    np.testing.assert_allclose(trained.get_latent_representation(indices=mask), whole[mask], rtol=1e-5, atol=1e-6)
    assert trained.get_latent_representation(indices=[]).shape == (0, 6)
    view = trained.adata[10:20]
    np.testing.assert_allclose(trained.get_latent_representation(view), whole[10:20], rtol=1e-5, atol=1e-6)
    for bad, said in (([0, 96], "reach from 0 to 96, there are 96"), (mask[:5], "length 5"), ([0.5], "row numbers")):
        with pytest.raises(ValueError, match=said):
            trained.get_latent_representation(indices=bad)


def test_out(trained, tmp_path):
    whole = trained.get_latent_representation()
    mine = np.zeros((96, 6), dtype=np.float32)
    assert trained.get_latent_representation(out=mine) is mine
    np.testing.assert_array_equal(mine, whole)
    mapped = trained.get_latent_representation(out=tmp_path / "new" / "z.npy", enable_progress_bar=True)
    np.testing.assert_array_equal(mapped, whole)
    np.testing.assert_array_equal(np.load(tmp_path / "new" / "z.npy"), whole)
    assert os.listdir(tmp_path / "new") == ["z.npy"]
    with pytest.raises(ValueError, match=r"out has shape \(3, 6\), the embedding has shape \(96, 6\)"):
        trained.get_latent_representation(out=mine[:3])
    with pytest.raises(ValueError, match=r"the path of an \.npy file"):
        trained.get_latent_representation(out=tmp_path / "z.csv")


def test_a_broken_embedding_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    def breaks(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trained.module, "embed", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        trained.get_latent_representation(out=tmp_path / "z.npy")
    assert os.listdir(tmp_path) == []


def test_cells_on_disk_train_like_those_in_memory(tmp_path):
    on_disk = write_screen(tmp_path / "cells.h5ad", make_cells(), y_key="gene")
    in_memory = on_disk.copy()
    sharded = write_screen(tmp_path / "cells.zarr", make_cells(), y_key="gene", compression="lz4", block_size=20)
    trained = []
    for table in (in_memory, on_disk, sharded):
        model = make_model(table)
        model.train(**QUICK, neighbours=False)  # else those of a disk are drawn in stretches
        trained.append(weights(model) | {"z": torch.from_numpy(model.get_latent_representation(indices=[5, 90, 5]))})
    assert_same(*trained[:2])
    assert_same(*trained[1:])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_all_image_types_train(dtype):
    model = make_model(make_cells(dtype=dtype), image_size=12)
    model.train(**QUICK | {"max_steps": 2})
    assert np.isfinite(model.get_latent_representation()).all()


def test_mixed_precision_trains_with_losses_in_float32():
    model = make_model()
    model.train(**QUICK | {"precision": "bf16-mixed"})
    assert model.training_settings_["precision"] == "bf16-mixed"
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    assert np.isfinite(model.history["train_loss"].to_numpy(dtype=float)).all()


@pytest.mark.parametrize(
    ("n_validation", "batch_size", "max_steps", "every"),
    [
        (8, 24, 400, 20),  # twenty times
        (40, 24, 10, 10),  # a tenth of the time allows for one and a half
        (20, 24, 10, 3),
        (8, 24, 5, 1),
        (0, 24, 400, 20),
    ],
)
def test_validation_takes_a_tenth_of_the_time_at_most(cells, n_validation, batch_size, max_steps, every):
    split = Split(train=np.arange(48), validation=np.arange(48, 48 + n_validation))
    labels = np.zeros(96, dtype=int)
    source = ArraySource(cells.obsm["single_cell_images"])
    data = ImageDataModule(source, labels, labels, split, batch_size=batch_size, max_steps=max_steps)
    assert _steps_between_validations(data) == every


def test_fused_optimiser_gives_way_to_clipped_gradients():
    """Lightning refuses to clip the gradients of a fused optimiser under mixed precision."""
    model = make_model()
    mixed = QUICK | {"precision": "bf16-mixed"}
    model.train(**mixed)
    assert model.trainer.optimizers[0].defaults["fused"]
    model.train(**mixed, gradient_clip_val=1.0)
    assert not model.trainer.optimizers[0].defaults["fused"]


def test_images_on_the_device_change_nothing_but_where_they_are(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    trained = []
    for preload in (None, "device"):
        model = make_model(open_screen(tmp_path / "cells.h5ad"))
        model.train(**QUICK, preload=preload)
        trained.append(weights(model))
        trainer: Any = model.trainer
        assert isinstance(trainer.datamodule.train_dataloader()._source, ArraySource)  # given back
    assert_same(*trained)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the way to its compiler
def test_compiling_keeps_names_and_numbers(tmp_path):
    trained = []
    # what compiled code computes is torch's affair, and a compiler not always there
    with torch.compiler.set_stance("force_eager"):
        for compile in (False, True):
            model = make_model()
            model.train(**QUICK, compile=compile)
            trained.append(weights(model))
            assert (model.module.content._compiled_call_impl is not None) == compile
        assert_same(*trained)
        model.save(str(tmp_path / "model"))
        loaded = SCBDModel.load(str(tmp_path / "model"), adata=make_cells())
        np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())


def test_the_two_losses_on_z_c_share_one_pass(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return log_sums(*args)

    monkeypatch.setattr("scbd.nn.losses.log_sums", counted)
    make_model().train(**QUICK | {"max_steps": 1}, train_size=1.0)
    # z_c, z_s, and z_c once more for its health after training
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("encoder", "instructions", "asked", "used"),
    [
        ("small", True, "auto", "bf16-mixed"),
        ("small", False, "auto", "32-true"),
        ("small", True, "32-true", "32-true"),
        ("densenet121", True, "auto", "32-true"),  # nobody has looked
        (nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten()), True, "auto", "32-true"),
    ],
)
def test_bfloat16_is_the_default_where_it_is_known_to_do_no_harm(monkeypatch, encoder, instructions, asked, used):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions, raising=False)
    model = make_model(make_cells(shape=(2, 32, 32)), encoder=encoder)
    assert "precision auto" in repr(model)
    model.train(**QUICK | {"precision": asked, "max_steps": 1})
    assert model.training_settings_["precision"] == used
    assert f"precision {used}" in repr(model)
    assert model.get_latent_representation().dtype == np.float32
    assert model._precision("auto", torch.device("cuda")) == "32-true"


def test_any_module_is_an_encoder(tmp_path):
    mine = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32, 10))
    model = make_model(encoder=mine)
    model.train(**QUICK)
    assert model.get_latent_representation(representation="intermediate").shape == (96, 10)
    assert "Sequential" in repr(model)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds Python objects \(.*making them could run any code"):
        SCBDModel.load(tmp_path / "model", model.adata)
    loaded = SCBDModel.load(tmp_path / "model", model.adata, allow_pickle=True)
    np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())


def test_save_and_load(trained, tmp_path):
    expected = trained.get_latent_representation()
    trained.save(tmp_path / "model", save_anndata=True)
    assert sorted(os.listdir(tmp_path / "model")) == ["adata.h5ad", "model.pt"]
    assert os.listdir(tmp_path) == ["model"]
    for adata in (None, make_cells()):
        loaded = SCBDModel.load(tmp_path / "model", adata)
        np.testing.assert_array_equal(loaded.get_latent_representation(), expected)
    assert loaded.is_trained
    assert loaded.history["train_loss"].equals(trained.history["train_loss"])
    assert loaded.health == trained.health
    assert repr(loaded) == repr(trained)
    loaded.train(**QUICK)  # a loaded model trains on, in training mode
    assert not np.array_equal(loaded.get_latent_representation(), expected)


def test_load_without_data(trained, tmp_path):
    trained.save(tmp_path / "model")
    model = SCBDModel.load(tmp_path / "model", adata=False)
    new = make_cells(7, seed=3)
    np.testing.assert_array_equal(model.get_latent_representation(new), trained.get_latent_representation(new))
    assert "no data attached" in repr(model)
    with pytest.raises(ValueError, match="loaded without data: pass adata"):
        model.get_latent_representation()
    model.save(tmp_path / "again")
    again = SCBDModel.load(tmp_path / "again")
    np.testing.assert_array_equal(again.get_latent_representation(new), model.get_latent_representation(new))


def test_load_with_cells_that_have_no_labels_or_new_ones(trained, tmp_path):
    trained.save(tmp_path / "model")
    new = make_cells(7, seed=3)
    expected = trained.get_latent_representation(new)
    bare = new.copy()
    bare.obs = bare.obs[[]]
    np.testing.assert_array_equal(SCBDModel.load(tmp_path / "model", bare).get_latent_representation(), expected)
    new.obs["well"] = ["well_8", "well_9", *["well_0"] * 5]
    loaded = SCBDModel.load(tmp_path / "model", new)
    np.testing.assert_array_equal(loaded.get_latent_representation(), expected)
    assert loaded.summary_stats["n_e"] == 3  # those that it learned from


def test_saving_over_a_model(trained, tmp_path):
    trained.save(tmp_path / "model")
    with pytest.raises(FileExistsError, match="already exists: choose another directory, or pass overwrite=True"):
        trained.save(tmp_path / "model")
    trained.save(tmp_path / "model", overwrite=True)
    assert os.listdir(tmp_path) == ["model"]


def test_files_that_are_no_saved_model(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no saved model at"):
        SCBDModel.load(tmp_path / "nothing")
    path = tmp_path / "model" / "model.pt"
    trained.save(tmp_path / "model")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is no saved scbd model, or is truncated"):
        SCBDModel.load(tmp_path / "model")
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="is no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    path.write_bytes(whole)
    saved = torch.load(path, weights_only=False)
    saved["attr_dict"]["format_"] = 99
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"saved by a newer scbd \(format 99, this one reads 1\): upgrade"):
        SCBDModel.load(tmp_path / "model")
    saved["attr_dict"]["registry_"]["model_name"] = "IVAEModel"
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"holds a IVAEModel, not a SCBDModel: load it with IVAEModel\.load"):
        SCBDModel.load(tmp_path / "model")


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_model_runs_no_code(trained, tmp_path):
    trained.save(tmp_path / "model")
    path, harm = tmp_path / "model" / "model.pt", tmp_path / "harm"
    for place in ("attr_dict", "model_state_dict"):
        saved = torch.load(path, weights_only=False)
        saved[place]["extra_"] = Harm(harm)
        torch.save(saved, path)
        with pytest.raises(ValueError, match=r"model.pt holds Python objects \(posix.mkdir\).*allow_pickle=True"):
            SCBDModel.load(tmp_path / "model")
        trained.save(tmp_path / "model", overwrite=True)
    torch.save({"attr_dict": Harm(harm)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="is no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    assert not harm.exists()


def test_a_hostile_checkpoint_runs_no_code(tmp_path):
    model, harm = make_model(), tmp_path / "harm"
    model.train(**QUICK, checkpoint_dir=tmp_path / "run")
    path = tmp_path / "run" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    torch.save(state | {"extra": Harm(harm)}, path)
    with pytest.raises(ValueError, match=r"last.ckpt holds Python objects \(posix.mkdir\)"):
        make_model().train(**QUICK | {"max_steps": 9}, checkpoint_dir=tmp_path / "run", ckpt_path="last")
    assert not harm.exists()


def test_summary_tells_the_next_step(trained):
    said = repr(trained)
    for part in (
        "96 cells",
        "4 perturbations (gene)",
        "3 environments (well)",
        "2 × 16 × 16 uint8",
        "alpha auto, 0 in the end (variance)",
        "12 steps",
    ):
        assert part in said
    assert "not trained\n  next      train()" in repr(make_model())


def test_a_collapsed_embedding_warns_and_names_the_remedy():
    model = make_model(alpha=1e4, invariance="listing", smoothing=0)
    remedy = "try invariance='variance' with alpha='auto', or about 1000; or train for longer"
    with pytest.warns(UserWarning, match=f"z_c has collapsed .* alpha 10000 is too high for batches of 48: {remedy}"):
        model.train(**QUICK | {"max_steps": 60, "lr": 3e-3, "batch_size": 48}, load_best=False)
    assert model.health["collapsed"] == 1
    assert model.health["spread"] < 0.05
    assert "COLLAPSED" in repr(model)


def test_an_embedding_that_tells_nothing_warns_without_being_a_point(monkeypatch):
    model = make_model(alpha=0)
    rng = np.random.default_rng(0)
    noise = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(48, 6))), dim=1).numpy()
    monkeypatch.setattr(model, "_embed_batch", lambda images: noise[: len(images)])
    with pytest.warns(UserWarning, match=r"z_c has learned nothing \(spread 0\.9"):
        model.train(**QUICK)
    assert model.health["collapsed"] == 0 and model.health["learned_c"] <= 0


@pytest.mark.parametrize(
    ("alpha", "remedy"),
    [(0, r"no invariance to blame \(alpha 0\): raise lr, or train"), (0.5, r"try 'auto', or about 0.01; or train")],
)
def test_the_remedy_depends_on_what_is_to_blame(cells, alpha, remedy):
    model = make_model(cells, alpha=alpha)
    torch.nn.init.zeros_(model.module.content.projection[-1].weight)
    with pytest.warns(UserWarning, match=f"z_c has collapsed .*{remedy}"):
        model.train(**QUICK | {"lr": 0.0})


def test_cells_known_by_heart_are_told_from_an_embedding_that_learned_nothing():
    """Labels that images do not show are told of training cells all the same."""
    noise = make_cells()
    noise.obs["gene"] = np.random.default_rng(0).permutation(noise.obs["gene"])
    model = make_model(noise, alpha=0, smoothing=0, style_target=None)
    said = r"learned nothing that holds for validation cells .* Of training cells it tells \d+% .* augment=True"
    with pytest.warns(UserWarning, match=said):
        model.train(**QUICK | {"max_steps": 300, "lr": 3e-3, "batch_size": 48}, validate_every=300)


def test_a_living_embedding_does_not_warn():
    model = make_model(alpha=0, smoothing=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(**QUICK | {"max_steps": 40, "lr": 1e-3})
    assert model.health["collapsed"] == 0
    assert 0.5 < model.health["spread"] <= 1
    assert 1.5 <= model.health["effective_rank"] <= 6
    assert model.health["supervised_c"] < model.health["ceiling"]
    assert "alive" in repr(model)


def test_confounded_labels_warn_with_the_table(cells):
    cells.obs["site"] = np.where(cells.obs["gene"] == "gene_0", "alone", "together")
    with pytest.warns(UserWarning, match="confounded") as caught:
        SCBDModel.setup_anndata(cells, "gene", "site")
    said = str(caught[0].message)
    assert "1 of 2 environments were seen with one perturbation only" in said
    assert "4 of 4 perturbations were seen in one environment only" in said
    assert "alone" in said and "gene_0" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCBDModel.setup_anndata(make_cells(), "gene", "well")


def test_single_cells_of_a_perturbation_are_named(caplog):
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.add_categories("lonely")
    cells.obs.loc["cell_7", "gene"] = "lonely"
    with pytest.warns(UserWarning, match="1 of 5 perturbations were seen in one environment only"):
        model = make_model(cells)
    with caplog.at_level(logging.WARNING, logger="scbd"):
        model.train(**QUICK | {"max_steps": 2}, train_size=1.0)
    assert "1 of 5 perturbations have a single training cell (lonely)" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"batch_size": 200}, "batch_size=200 is larger than the 85 cells"),
        ({"max_epochs": 2}, "max_steps or max_epochs, not both"),
        ({"max_steps": 0}, "max_steps=0 cannot be: give a whole number from 1 on"),
        ({"split": "fold"}, "no column 'fold' to split by"),
        ({"train_size": 1.0, "early_stopping": True}, "there are no validation cells"),
        ({"split": 0.9}, "split must be a scbd.data.Split or a column of obs, got float"),
        ({"split": Split(train=np.arange(90, 120))}, "The split names row 119, there are 96 cells"),
    ],
)
def test_bad_training_settings_are_said_before_any_work(kwargs, said):
    model = make_model()
    before = weights(model)
    with pytest.raises((ValueError, KeyError, TypeError), match=said):
        model.train(**QUICK | kwargs)
    after = weights(model)
    assert_same({k: before[k] for k in before if "weight" in k}, {k: after[k] for k in after if "weight" in k})
    assert not model.is_trained


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"alpha": -1}, "alpha weighs the invariance loss: give a number that is 0 or larger, got -1"),
        ({"alpha": float("nan")}, "alpha weighs the invariance loss: give a number that is 0 or larger, got nan"),
        ({"n_latent": 0}, "n_latent=0 cannot be: give a whole number from 1 on"),
        ({"n_latent": "64"}, "n_latent='64' cannot be: give a whole number from 1 on"),
        ({"temperature": 0}, "temperature must be a number above 0.0029"),
        ({"temperature": float("inf")}, "temperature must be a number above .* got inf"),
        ({"alpha": "much"}, "alpha='much' is not known: give a number, or 'auto'"),
        ({"alpha": "auto", "invariance": "listing"}, "alpha='auto' knows the scale of invariance='variance'"),
        ({"smoothing": 1}, "smoothing is a probability below 1, at which labels say nothing; got 1"),
        ({"style_target": "y"}, "style_target='y' is not known"),
        ({"invariance": "share"}, "invariance='share' is not known: use one of variance, listing"),
        ({"encoder": "vgg"}, "There is no encoder 'vgg'"),
    ],
)
def test_bad_model_settings(kwargs, said):
    with pytest.raises(ValueError, match=said):
        make_model(**kwargs)


def test_bad_requests_of_an_embedding(trained):
    with pytest.raises(ValueError, match="block='z' is not known: use 'c' .perturbation. or 's'"):
        trained.get_latent_representation(block="z")
    with pytest.raises(ValueError, match="representation='r' is not known"):
        trained.get_latent_representation(representation="r")
    with pytest.raises(ValueError, match="holds 3 channels of uint8, the model was set up with 2"):
        trained.get_latent_representation(make_cells(4, shape=(3, 16, 16)))
    with pytest.raises(ValueError, match="holds images of 20 × 20 pixels, the model was trained on 16 × 16"):
        trained.get_latent_representation(make_cells(4, shape=(2, 20, 20)))


def test_a_model_that_resizes_takes_other_sizes():
    model = make_model(image_size=12)
    model.train(**QUICK | {"max_steps": 2})
    assert model.get_latent_representation(make_cells(4, shape=(2, 20, 20))).shape == (4, 6)


def test_an_untrained_model_warns():
    with pytest.warns(UserWarning, match="untrained"):
        make_model().get_latent_representation()
