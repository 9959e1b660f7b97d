from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import QUICK, assert_same, make_model, weights

from scbd.model._callbacks import History

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def make_history(path, **how) -> Any:
    history: Any = History(path, **how)
    history.trainer = SimpleNamespace(global_step=0)
    return history


def test_a_number_that_is_none_is_kept(tmp_path):
    """It is where a run went wrong; a field that is empty was not logged."""
    path = tmp_path / "history.csv"
    history = make_history(path)
    for step, metrics in {1: {"a": 0.1, "b": 2.0}, 2: {"a": np.nan}, 3: {"a": np.inf, "epoch": 0}}.items():
        history.trainer.global_step = step
        history.log_metrics(metrics)
    history.write()
    again = make_history(path, earlier=path, resume_step=3)
    for kept in (history, again):
        frames = kept.frames()
        assert list(frames) == ["a", "b"]
        assert frames["a"].index.tolist() == [1, 2, 3] and frames["b"].index.tolist() == [1]
        np.testing.assert_array_equal(frames["a"]["a"], [0.1, np.nan, np.inf])
        assert frames["a"].index.name == "step"
    assert make_history(path, earlier=path, resume_step=1).frames()["a"].index.tolist() == [1]
    shifted = again.frames(offset=10, prefix="decoder_")
    assert shifted["decoder_b"].index.tolist() == [11]
    # and others can read it
    assert pd.read_csv(path, index_col="step")["b"].isna().tolist() == [False, True, True]


def test_nothing_is_written_where_nothing_was_logged(tmp_path):
    history = make_history(tmp_path / "history.csv")
    history.write()
    assert not list(tmp_path.iterdir())


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
