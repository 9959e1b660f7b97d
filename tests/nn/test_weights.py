from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from scbd.nn import build_encoder


def as_torchvision(name: str, path: Path, *, old: bool = False) -> Path:
    """An encoder of random weights as torchvision would keep it, classifier included."""
    state = build_encoder(name, 3).state_dict()
    if name == "densenet121":
        state = {re.sub(r"^0\.", "features.", key).replace(".layers.", "."): value for key, value in state.items()}
    if old:  # as in the files that torchvision has on its server
        state = {re.sub(r"(norm|conv)([12])\.", r"\1.\2.", key): value for key, value in state.items()}
        state = {key: value for key, value in state.items() if "num_batches" not in key}
    linear = {f"{'classifier' if name == 'densenet121' else 'fc'}.weight": torch.zeros(1000, 8)}
    torch.save(state | linear, path)
    return path


@pytest.mark.parametrize(("name", "old"), [("resnet18", False), ("densenet121", False), ("densenet121", True)])
def test_an_encoder_has_the_weights_of_the_file(name, old, tmp_path):
    torch.manual_seed(1)
    path = as_torchvision(name, tmp_path / "weights.pth", old=old)
    torch.manual_seed(1)
    wanted = build_encoder(name, 3).eval()
    found = build_encoder(name, 3, weights=path).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(images), wanted(images), rtol=0, atol=0)
        assert not torch.equal(build_encoder(name, 3).eval()(images), wanted(images))


def test_what_does_not_fit_is_refused(tmp_path):
    path = as_torchvision("resnet18", tmp_path / "weights.pth")
    for name, channels, message in [
        ("resnet50", 3, "no weights of torchvision's resnet50: it lacks layer"),
        ("resnet18", 4, r"conv1.weight has the shape \(64, 3, 7, 7\), here it is \(64, 4, 7, 7\)"),
        ("small", 3, "weights are for the encoders resnet18, resnet50, densenet121, not for 'small'"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_encoder(name, channels, weights=path)
    with pytest.raises(ValueError, match="weights are for the encoders"):
        build_encoder(nn.Flatten(), 3, weights=path)
    torch.save(build_encoder("resnet50", 3).state_dict(), path)
    with pytest.raises(ValueError, match="which resnet18 has not|does not fit"):
        build_encoder("resnet18", 3, weights=path)


def test_what_is_no_state_dict_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        build_encoder("resnet18", 3, weights=tmp_path / "none.pth")
    for number, content in enumerate((torch.zeros(3), {"conv1.weight": 1})):
        torch.save(content, tmp_path / f"{number}.pth")
        with pytest.raises(ValueError, match="holds no state dict: write"):
            build_encoder("resnet18", 3, weights=tmp_path / f"{number}.pth")
    (tmp_path / "text.pth").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no state dict, or is truncated"):
        build_encoder("resnet18", 3, weights=tmp_path / "text.pth")
