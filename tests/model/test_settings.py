"""One object for how a model is trained: from the arguments of a call to what a run reads."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from small_models import make_model

from scbd import SCBDModel
from scbd.model import TrainSettings


def test_help_shows_what_train_takes():
    shown = inspect.signature(SCBDModel.train).parameters
    options = {option.name: option.default for option in dataclasses.fields(TrainSettings)}
    del options["trainer_kwargs"]
    assert {name: parameter.default for name, parameter in list(shown.items())[1:-1]} == options
    assert list(shown)[0] == "self" and list(shown)[-1] == "trainer_kwargs"
    described = inspect.cleandoc(SCBDModel.train.__doc__ or "")
    parameters = described.split("Parameters\n----------\n")[1].split("\n\nRaises")[0].splitlines()
    headings = [name for line in parameters if not line.startswith(" ") for name in line.split(", ")]
    assert headings == [*options, "**trainer_kwargs"]


def test_settings_are_frozen_and_checked_again_when_they_are_changed():
    settings = TrainSettings.of({"max_steps": 3, "gradient_clip_val": 1.0, "plan_kwargs": {"lr": 0.5}})
    assert settings.trainer_kwargs == {"gradient_clip_val": 1.0}
    assert settings.plan == {"lr": 0.5, "weight_decay": 0.01}
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.lr = 1.0  # type: ignore[misc]
    changed = dataclasses.replace(settings, lr=2.0)
    assert changed.plan["lr"] == 0.5 and changed.trainer_kwargs == {"gradient_clip_val": 1.0}
    with pytest.raises(ValueError, match="batch_size=1: give a whole number, 2 or larger"):
        dataclasses.replace(settings, batch_size=1)
    with pytest.raises(TypeError, match="did you mean 'max_steps'"):
        TrainSettings.of({"max_step": 3})


def test_what_is_left_open_may_be_said_to_be():
    for option in dataclasses.fields(TrainSettings):
        if option.default is None:
            TrainSettings.of({option.name: None} if option.name != "trainer_kwargs" else {})
    assert TrainSettings(perturbations_per_batch=None).perturbations_per_batch is None
    with pytest.raises(ValueError, match="early_stopping_patience=None: give"):
        TrainSettings(early_stopping_patience=None)  # type: ignore[arg-type]


def test_a_decoder_has_defaults_of_its_own(monkeypatch):
    model = make_model()
    seen: list[TrainSettings] = []

    def noted(objective, settings, *, contrastive):
        seen.append(settings)
        raise ZeroDivisionError

    monkeypatch.setattr(model, "_train", noted)
    model.is_trained_ = True
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, (1e-3, 48, None)),  # of 96 cells two batches
        ({"batch_size": None, "perturbations_per_batch": 4, "lr": 0.1}, (0.1, 48, 4)),
        ({"joint": True}, (1e-3, None, "auto")),
    ]
    for given, expected in cases:
        with pytest.raises(ZeroDivisionError):
            model.train_decoder(width=4, **given)
        assert (seen[-1].lr, seen[-1].batch_size, seen[-1].perturbations_per_batch) == expected


@pytest.mark.parametrize(
    ("given", "meant"), [(None, "32-true"), (32, "32-true"), ("bf16", "bf16-mixed"), (16, "16-mixed")]
)
def test_a_precision_may_be_named_as_lightning_does_for_short(given, meant):
    assert TrainSettings(precision=given).precision == meant
