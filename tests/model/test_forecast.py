from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_cells
from small_models import QUICK

from scbd import SCBDModel
from scbd.model._forecast import Forecast, cheaper_than, duration


def said(seconds_a_step: float, max_steps: int, *, rank: int = 0, first: int = 0, batches: int = 1) -> list[str]:
    """What is said in a run whose first step takes a minute, and each step so many batches."""
    found: list[str] = []
    now = [0.0]
    forecast = Forecast(found.append, ["fewer max_steps"], clock=lambda: now[0])
    for step in range(first + 1, min(first + 60, max_steps) + 1):
        for batch in range(1, batches + 1):
            now[0] += (60.0 if step == first + 1 else seconds_a_step) / batches
            done = step if batch == batches else step - 1
            trainer: Any = SimpleNamespace(global_step=done, max_steps=max_steps, is_global_zero=not rank)
            forecast.on_train_batch_end(trainer)
    return found


def test_it_is_said_once_and_the_first_step_does_not_count():
    assert said(1.0, 1000) == ["About 17 min to go, 994 steps of 1 s. Cheaper: fewer max_steps."]


def test_gradients_of_many_seconds_may_be_accumulated():
    assert said(24.0, 1000, batches=4) == ["About 12.5 h to go, 999 steps of 45 s. Cheaper: fewer max_steps."]


def test_of_a_resumed_run_it_is_the_rest():
    assert said(1.0, 1000, first=700) == ["About 5 min to go, 294 steps of 1 s. Cheaper: fewer max_steps."]


@pytest.mark.parametrize(("seconds", "steps", "rank"), [(0.1, 1000, 0), (10.0, 4, 0), (1.0, 1000, 1)])
def test_nothing_is_said_of_a_short_run_or_by_a_helper(seconds, steps, rank):
    assert not said(seconds, steps, rank=rank)


@pytest.mark.parametrize(
    ("seconds", "words"), [(100, "2 min"), (3420, "57 min"), (16_920, "4.7 h"), (200_000, "2.3 days")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_what_is_cheaper_depends_on_what_is_asked_for():
    asked = {"encoder": "auto", "style_target": "e", "image_size": None}
    large = cheaper_than(asked, lambda name: "resnet18", images=True)
    small = cheaper_than(asked | {"style_target": None}, lambda name: "small", images=True)
    assert [part.split(" (")[0] for part in large] == [
        *("encoder='small'", "style_target=None", "a smaller image_size", "fewer max_steps")
    ]
    assert small == ["a smaller image_size", "fewer max_steps"]
    assert cheaper_than({"n_latent": 8}, str, images=True) == ["fewer max_steps"]


@pytest.mark.parametrize("images", [True, False])
def test_only_images_have_a_size(images, monkeypatch):
    named: list[str] = []

    def prepare(*args: Any) -> Any:
        named.extend(args[-1])
        raise InterruptedError

    monkeypatch.setattr("scbd.model._train.prepare", prepare)
    cells = make_cells(48)
    inputs: dict[str, Any] = {}
    if not images:
        cells.obsm["X"] = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
        inputs = {"obsm_key": "X"}
    SCBDModel.setup_anndata(cells, "gene", "well", **inputs)
    with pytest.raises(InterruptedError):
        SCBDModel(cells, encoder="small" if images else "mlp", style_target=None).train(**QUICK)
    assert named == ["a smaller image_size"] * images + ["fewer max_steps"]
