from __future__ import annotations

from typing import Any

import pytest
import torch
from official import write_domains

from scbd.datasets import PACS_DOMAINS
from scbd.datasets._domains import PACS_CLASSES
from scbd.nn import build_encoder
from scbd.paper import reproduce
from scbd.workflows import UNTRAINED, Trial, run_trials, with_weights

MODEL: dict[str, Any] = {"encoder": "resnet18", "standardize": False}
STEPS: dict[str, Any] = {"max_steps": 2, "lr": 1e-9, "batch_size": 16, "split": "split"}


def erm(model: dict[str, Any], training: dict[str, Any]) -> Trial:
    return Trial("domain generalization", "pacs", "ERM", 0, {"test_environment": "photo"}, model, training)


@pytest.fixture
def weights(tmp_path):
    """All of the first layer 7, which no random weight is."""
    state = build_encoder("resnet18", 3).state_dict()
    state["conv1.weight"].fill_(7)
    torch.save(state, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_a_trial_starts_from_weights_and_names_them(weights, tmp_path, monkeypatch):
    started = []
    train = type(build_encoder("resnet18", 3)).forward

    def seen(self, images):
        started.append(float(self.conv1.weight.detach().min()))
        return train(self, images)

    monkeypatch.setattr(type(build_encoder("resnet18", 3)), "forward", seen)
    path = write_domains(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES, n=5)
    plain = erm(MODEL, STEPS)
    (trial,) = with_weights([plain], weights)
    assert trial.key != plain.key and str(weights) not in str(trial)
    frame = run_trials([trial], tmp_path / "out", path=path, weights=weights)
    assert frame["weights"].tolist() == [trial.model["weights"]] and frame["encoder"].tolist() == ["resnet18"]
    assert min(started) == pytest.approx(7, abs=1e-3)
    with pytest.raises(ValueError, match=f"start from weights with the digest {trial.model['weights']}: give"):
        run_trials([trial], tmp_path / "out", path=path)


def test_what_is_not_trained_and_what_is_small_has_none(weights):
    control, small, named = erm(MODEL, STEPS | UNTRAINED), erm({"encoder": "small"}, STEPS), erm(MODEL, STEPS)
    found = with_weights([control, small, named], weights)
    assert found[:2] == [control, small] and "weights" in found[2].model
    with pytest.raises(ValueError, match="No trial takes weights: they are for the encoders resnet18"):
        reproduce("pacs", budget="small", path="nowhere", weights=weights)
    with pytest.raises(ValueError, match="no weights of torchvision's resnet50"):
        reproduce("pacs", budget="paper", path="nowhere", weights=weights)
    with pytest.raises(FileNotFoundError, match="There is no file .*none.pth of weights"):
        with_weights([named], weights.with_name("none.pth"))
