"""States to resume from: whole at every moment, on every file system, and only of the same run."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, PressCtrlC, Worsen, assert_same, make_model, weights

from scbd.data import Split
from scbd.model._checkpoints import State, find_state

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def found(ckpt_path, directory=None) -> State:
    state = find_state(ckpt_path, directory)
    assert state is not None
    return state


def test_checkpoints_do_not_pass_through_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """Where that is on another file system, a checkpoint would be copied over the one before."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setattr(tempfile, "mkstemp", None)
    make_model().train(**QUICK, validate_every=2, load_best=True, checkpoint_dir=tmp_path / "run")
    assert not os.listdir(elsewhere)
    assert sorted(os.listdir(tmp_path / "run")) == ["best.ckpt", "history.csv", "last.ckpt", "previous.ckpt"]
    steps = [found(tmp_path / "run" / name).step for name in ("previous.ckpt", "last.ckpt")]
    assert steps == [4, 6]


def test_a_save_that_is_cut_off_leaves_the_state_before(tmp_path, monkeypatch):
    def breaks_off(checkpoint, file):
        if checkpoint["global_step"] == 4:
            file.write(b"half")
            os._exit(9)  # as SIGKILL would
        save(checkpoint, file)

    save = torch.save
    monkeypatch.setattr(torch, "save", breaks_off)
    how: dict[str, Any] = QUICK | {"validate_every": 2, "checkpoint_dir": tmp_path}
    worker = os.fork()
    if not worker:
        try:
            make_model().train(**how)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 9
    assert len(list(tmp_path.glob(".last.ckpt.*.partial"))) == 1
    assert found("last", tmp_path).step == 2
    monkeypatch.undo()
    resumed, whole = make_model(), make_model()
    resumed.train(**how, ckpt_path="last")
    whole.train(**how | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    assert sorted(os.listdir(tmp_path)) == ["history.csv", "last.ckpt", "previous.ckpt"]


def test_a_damaged_state_gives_way_to_the_one_before(tmp_path, caplog):
    how: dict[str, Any] = QUICK | {"validate_every": 4, "checkpoint_dir": tmp_path}
    make_model().train(**how)
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    flipped = bytearray(last.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for harm in (flipped, flipped[:5000], None):
        last.unlink() if harm is None else last.write_bytes(harm)
        with caplog.at_level(logging.WARNING, logger="scbd"):
            assert found("last", tmp_path).path == previous
        assert "Going on from the state before it, previous.ckpt of step 4" in caplog.text
        caplog.clear()
    resumed, whole = make_model(), make_model()
    resumed.train(**how | {"max_steps": 8}, ckpt_path="last")
    whole.train(**how | {"max_steps": 8, "checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    previous.unlink()
    last.write_bytes(flipped[:5000])
    with pytest.raises(ValueError, match="is no checkpoint, or is truncated"):
        find_state("last", tmp_path)


def test_the_best_weights_are_those_of_the_validation_at_which_a_run_was_interrupted(tmp_path):
    """The state of a step was written before the best weights found at that step: neither knew of the other."""

    how: dict[str, Any] = QUICK | {"max_steps": 4, "lr": 1e-2, "validate_every": 1, "load_best": True}
    resumed, whole = make_model(), make_model()
    whole.train(**how, callbacks=Worsen())
    best = whole.history["validation_loss"]["validation_loss"].idxmin()
    assert best < 3
    with pytest.raises(KeyboardInterrupt):
        make_model().train(**how, checkpoint_dir=tmp_path, callbacks=[Worsen(), PressCtrlC(best)])
    resumed.train(**how, checkpoint_dir=tmp_path, ckpt_path="last", callbacks=Worsen())
    assert_same(weights(resumed), weights(whole))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_best_weights_and_history_are_found_beside_the_state(tmp_path, elsewhere, caplog):
    how: dict[str, Any] = QUICK | {"lr": 1e-2, "validate_every": 1, "load_best": True, "log_every_n_steps": 1}
    first, second = tmp_path / "first", tmp_path / "second"
    whole = make_model()
    whole.train(**how | {"max_steps": 5}, callbacks=Worsen())
    assert whole.history["validation_loss"]["validation_loss"].idxmin() < 3
    make_model().train(**how | {"max_steps": 3}, checkpoint_dir=first, callbacks=Worsen())
    states = [first / "last.ckpt", *([second / "last.ckpt"] if elsewhere else [])]
    for i, state in enumerate(states):
        resumed = make_model()
        folder = second if elsewhere and i == 0 else None
        steps = 5 - (folder is not None)
        resumed.train(**how | {"max_steps": steps}, checkpoint_dir=folder, ckpt_path=state, callbacks=Worsen())
    assert_same(weights(resumed), weights(whole))
    for name in ("train_loss", "validation_loss"):
        pd.testing.assert_frame_equal(resumed.history[name], whole.history[name])
    # a state by itself does not tell what they were
    (first / "best.ckpt").unlink()
    make_model().train(**how | {"max_steps": 5}, ckpt_path=first / "last.ckpt", callbacks=Worsen())
    assert "left no weights of its lowest validation loss" in caplog.text


def brighter(cells):
    cells.obsm["single_cell_images"] += 1
    return cells


def relabelled(cells):
    cells.obs["gene"] = cells.obs["gene"].to_numpy()[::-1]
    return cells


def reordered(cells):
    """Labels as they were, each under another number."""
    cells.obs["gene"] = (
        cells.obs["gene"].astype("category").cat.reorder_categories(sorted(set(cells.obs["gene"]))[::-1])
    )
    return cells


def test_a_run_goes_on_with_the_cells_it_was_begun_with(tmp_path):
    settings: dict[str, Any] = QUICK | {"max_steps": 2, "checkpoint_dir": tmp_path}
    settings["split"] = Split(np.arange(80), np.arange(80, 96))
    make_model().train(**settings)
    again: dict[str, Any] = settings | {"max_steps": 4, "ckpt_path": "last"}
    other: dict[str, Any] = again | {"split": Split(np.arange(80), np.arange(80, 95))}
    for cells, how, said in (
        (brighter(make_cells()), again, "other images"),
        (relabelled(make_cells()), again, "other labels"),
        (reordered(make_cells()), again, "other order of labels"),
        (make_cells(), other, "other split"),
    ):
        model = make_model(cells)
        before = weights(model)
        with pytest.raises(ValueError, match=rf"on other cells \({said}\): go on with the cells, the labels, in"):
            model.train(**how)
        assert_same(weights(model), before)
    make_model(make_cells()).train(**again)


def test_a_run_does_not_go_back(tmp_path):
    """It handed out the weights of the longer run, under the number of steps of the shorter one."""
    make_model().train(**QUICK | {"max_steps": 4, "checkpoint_dir": tmp_path})
    for steps in (4, 5):
        make_model().train(**QUICK | {"max_steps": steps, "checkpoint_dir": tmp_path, "ckpt_path": "last"})
    with pytest.raises(ValueError, match=r"last.ckpt is already at step 5, beyond max_steps=4: ask for as many steps"):
        make_model().train(**QUICK | {"max_steps": 4, "checkpoint_dir": tmp_path, "ckpt_path": "last"})


def test_a_folder_is_made_only_for_a_run_that_starts(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for bad in ({"precision": "foo"}, {"accelerator": "foo"}, {"strategy": "foo"}, {"lr": -1}):
        with pytest.raises(Exception, match=r"foo|lr=-1"):
            make_model().train(**QUICK | bad, checkpoint_dir=folder)
        assert not folder.parent.exists()

    class Breaks(Callback):
        def on_train_start(self, *args):
            raise RuntimeError("out of memory")

    model = make_model()
    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(**QUICK, checkpoint_dir=folder, callbacks=Breaks())
    assert not folder.exists() and not model.is_trained
    model.train(**QUICK, checkpoint_dir=folder)


def test_a_folder_that_cannot_be_made_is_said_before_training(tmp_path):
    Path(tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_model().train(**QUICK, checkpoint_dir=tmp_path / "file" / "run")


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
    before = signal.getsignal(signal.SIGINT)
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        model.train(
            **QUICK | {"max_steps": 9},
            checkpoint_dir=tmp_path,
            validate_every=9,
            callbacks=PressCtrlC(4),
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


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gradient_clip_val": 0.01}, "gradient_clip_val: None → 0.01"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm: None → 'value'"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: 1 → 2"),
        ({"precision": "bf16-mixed"}, "precision: '32-true' → 'bf16-mixed'"),
        ({"validate_every": 3}, "validate_every: None → 3"),
    ],
)
def test_a_run_goes_on_with_the_steps_it_was_begun_with(tmp_path, other, said):
    make_model().train(**QUICK, checkpoint_dir=tmp_path)
    how: dict[str, Any] = QUICK | {"max_steps": 8, "checkpoint_dir": tmp_path, "ckpt_path": "last"}
    with pytest.raises(ValueError, match=f"other settings .*{said}"):
        make_model().train(**how | other)
    # a state of before there was a look at this
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for name in other:
        del state["scbd_settings"][name]
    torch.save(state, tmp_path / "last.ckpt")
    model = make_model()
    model.train(**how | other)
    assert model.training_settings_["steps"] == 8


def test_a_run_goes_on_in_its_precision_on_other_processors(tmp_path, monkeypatch):
    instructions = [True]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions[0], raising=False)
    how: dict[str, Any] = QUICK | {"precision": "auto", "checkpoint_dir": tmp_path}
    make_model().train(**how | {"max_steps": 3})
    instructions[0] = False
    model = make_model()
    model.train(**how, ckpt_path="last")
    assert model.training_settings_["precision"] == "bf16-mixed" == model.trainer.precision


def test_resuming_with_other_settings_is_refused(tmp_path):
    make_model().train(**QUICK, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(batch_size: 24 → 12; .*alpha: 'auto' → 2"):
        make_model(alpha=2).train(**QUICK | {"batch_size": 12}, checkpoint_dir=tmp_path, ckpt_path="last")
    for settings in ({"temperature": 0.5}, {"intensity": "none"}, {"augment": True}, {"include_self": False}):
        said = f"other settings .{next(iter(settings))}: "
        with pytest.raises(ValueError, match=said):
            make_model(**settings).train(**QUICK, checkpoint_dir=tmp_path, ckpt_path="last")
    with pytest.raises(ValueError, match="other settings .n_steps_alpha_warmup: None → 3"):
        how = {"checkpoint_dir": tmp_path, "ckpt_path": "last", "plan_kwargs": {"n_steps_alpha_warmup": 3}}
        make_model().train(**QUICK, **how)
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
