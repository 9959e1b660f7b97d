"""Trials that start from given weights: a trial names them by their digest, and no path."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scbd.nn import build_encoder

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.workflows._datasets import Dataset
    from scbd.workflows._trials import Trial

# those that torchvision has, too
_ENCODERS = ("resnet18", "resnet50", "densenet121")


def with_weights(trials: Sequence[Trial], path: str | os.PathLike[str]) -> list[Trial]:
    """These trials, begun at weights in a file, wherever an encoder of a known name is trained.

    An encoder that is never trained stays at random weights, as it is called.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If no trial has such an encoder, or the weights are those of another.
    """
    digest = _digest(path)
    taken = [trial.model.get("encoder") in _ENCODERS and trial.training.get("lr") != 0 for trial in trials]
    if not any(taken):
        msg = f"No trial takes weights: they are for the encoders {', '.join(_ENCODERS)}. Leave them out."
        raise ValueError(msg)
    for name in {str(trial.model["encoder"]) for trial, takes in zip(trials, taken, strict=True) if takes}:
        build_encoder(name, 3, weights=path)
    return [
        replace(trial, model={**trial.model, "weights": digest}) if takes else trial
        for trial, takes in zip(trials, taken, strict=True)
    ]


def check_weights(trials: Sequence[Trial], path: str | os.PathLike[str] | None) -> None:
    """Raise ``ValueError`` unless the file is the one that these trials name, if any."""
    named = {str(trial.model["weights"]) for trial in trials if "weights" in trial.model}
    if named - ({_digest(path)} if path is not None else set()):
        msg = f"Trials start from weights with the digest {min(named)}: give their file with weights=…"
        raise ValueError(msg)


def begun(trial: Trial, adata: AnnData, dataset: Dataset, path: str | os.PathLike[str] | None) -> Trial:
    """The trial with its encoder made, where it names weights."""
    model = dict(trial.model)
    if path is None or model.pop("weights", None) is None:
        return trial
    channels = dataset.inputs(adata).source(adata).shape[1]
    return replace(trial, model=model | {"encoder": build_encoder(model["encoder"], channels, weights=path)})


def _digest(path: str | os.PathLike[str]) -> str:
    if not Path(path).is_file():
        msg = f"There is no file {path} of weights."
        raise FileNotFoundError(msg)
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
