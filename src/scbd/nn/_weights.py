"""Weights of torchvision's networks, for encoders of the same name."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

# of torchvision: the classifier behind the features
_CLASSIFIER = ("fc.", "classifier.")
# counters, which old files lack, and nothing depends on
_COUNTERS = ".num_batches_tracked"


def load_weights(encoder: nn.Module, name: str, path: str | os.PathLike[str]) -> None:
    """Give an encoder weights that are kept under torchvision's names.

    Parameters
    ----------
    encoder
        What :func:`build_encoder` made of the name.
    name
        ``"resnet18"``, ``"resnet50"`` or ``"densenet121"``.
    path
        File of a state dict, as :func:`torch.save` writes it; a classifier in it is left out.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds no state dict, or one that does not fit: another network, or another number of channels.
    """
    state = {_renamed(key, name): value for key, value in _read(Path(path)).items() if not key.startswith(_CLASSIFIER)}
    wanted = encoder.state_dict()
    missing = [key for key in wanted if key not in state and not key.endswith(_COUNTERS)]
    if missing or set(state) - set(wanted):
        what = f"lacks {missing[0]}" if missing else f"has {min(set(state) - set(wanted))}, which {name} has not"
        msg = f"{path} holds no weights of torchvision's {name}: it {what}. Give the file of that network."
        raise ValueError(msg)
    for key, value in state.items():
        if value.shape != wanted[key].shape:
            msg = (
                f"{path} does not fit {name}: {key} has the shape {tuple(value.shape)}, here it is "
                f"{tuple(wanted[key].shape)}. Weights of photographs are for three channels."
            )
            raise ValueError(msg)
    encoder.load_state_dict(wanted | state)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        msg = f"There is no file {path}."
        raise FileNotFoundError(msg)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        msg = f"{path} holds no state dict, or is truncated ({str(error).splitlines()[0]}): write it with torch.save."
        raise ValueError(msg) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        msg = f"{path} holds no state dict: write model.state_dict() with torch.save."
        raise ValueError(msg)
    return state


def _renamed(key: str, name: str) -> str:
    """Of a residual network, names are the same; of a DenseNet here are the features alone, with a level in between."""
    if not name.startswith("densenet"):
        return key
    key = re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", key)  # old files have a dot more
    return key.replace("features.", "0.", 1)
