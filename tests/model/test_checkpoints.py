"""States to resume from: whole at every moment, on every file system, and only of the same run."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, assert_same, make_model, weights

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

    class Worsen(Callback):
        def on_train_batch_start(self, trainer, plan, *args):
            if trainer.global_step > 1:
                plan.module.content.projection[-1].weight.data.zero_()

    class PressCtrlC(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == best - 1:
                os.kill(os.getpid(), signal.SIGINT)

    how: dict[str, Any] = QUICK | {"max_steps": 4, "lr": 1e-2, "validate_every": 1, "load_best": True}
    resumed, whole = make_model(), make_model()
    whole.train(**how, callbacks=Worsen())
    best = whole.history["validation_loss"]["validation_loss"].idxmin()
    assert best < 3
    with pytest.raises(KeyboardInterrupt):
        make_model().train(**how, checkpoint_dir=tmp_path, callbacks=[Worsen(), PressCtrlC()])
    resumed.train(**how, checkpoint_dir=tmp_path, ckpt_path="last", callbacks=Worsen())
    assert_same(weights(resumed), weights(whole))


def brighter(cells):
    cells.obsm["single_cell_images"] += 1
    return cells


def relabelled(cells):
    cells.obs["gene"] = cells.obs["gene"].to_numpy()[::-1]
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
        (make_cells(), other, "other split"),
    ):
        model = make_model(cells)
        before = weights(model)
        with pytest.raises(ValueError, match=rf"on other cells \({said}\): go on with the cells, the labels and the"):
            model.train(**how)
        assert_same(weights(model), before)
    make_model(make_cells()).train(**again)


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
