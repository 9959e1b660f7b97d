"""States that a run can be resumed from: written whole or not at all, and found again."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from scbd._files import named_when_whole, remove_partials, written_whole
from scbd.model._files import DamagedFile, check_whole, read_header

logger = logging.getLogger(__name__)

LAST, PREVIOUS, BEST, HISTORY = "last.ckpt", "previous.ckpt", "best.ckpt", "history.csv"
# of the settings of a run, those that are arguments of the model and of the plan
_PARTS = ("model", "plan")
# what runs of before said nothing of
_LATER = (
    "precision",
    "validate_every",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "order of labels",
)


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it.

    Lightning's own way goes through the folder for temporary files. Where that is on another file system, the last
    step is a copy over the only good checkpoint, and a process that is killed meanwhile leaves half of one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write to a local path; whatever else Lightning takes is left to it."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with written_whole(Path(path)) as file:
            torch.save(checkpoint, file)


def keep_previous(last: Path) -> None:
    """Let the state that is there be found under another name; there is one under its own at every moment."""
    with suppress(OSError):  # some file systems know no second names: then there is the last state alone
        with named_when_whole(last.with_name(PREVIOUS)) as link:
            os.link(last, link)


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that were killed left half written."""
    for name in (LAST, PREVIOUS, BEST, HISTORY):
        remove_partials(directory / name)


class State(NamedTuple):
    """Where to go on from."""

    path: Path
    step: int
    """Updates made, since the run began."""
    settings: dict[str, Any]
    """What the run that goes on must share."""


def find_state(ckpt_path: str | os.PathLike[str] | None, directory: Path | None) -> State | None:
    """The state to resume from, read through; `None` for a run that begins.

    Raises
    ------
    FileExistsError
        If a run is to begin where the state of another is.
    FileNotFoundError
        If there is no such checkpoint.
    ValueError
        If it cannot be read, and neither can the one before.
    """
    last = directory / LAST if directory else None
    if ckpt_path is None:
        if last and (last.exists() or last.with_name(PREVIOUS).exists()):
            msg = f"{directory} holds the state of an earlier run: go on with it (ckpt_path='last'), or choose another."
            raise FileExistsError(msg)
        return None
    if ckpt_path != "last":
        return _state(Path(ckpt_path))
    if last is None:
        msg = "ckpt_path='last' needs the checkpoint_dir of the run to resume."
        raise ValueError(msg)
    try:
        return _state(last)
    except (FileNotFoundError, DamagedFile) as error:
        if not last.with_name(PREVIOUS).is_file():
            raise
        state = _state(last.with_name(PREVIOUS))
        logger.warning("%s Going on from the state before it, %s of step %d.", error, state.path.name, state.step)
        return state


def kept_by_run(state: State | None, directory: Path | None, name: str) -> Path | None:
    """A file that the run to resume kept beside the state, or else where this one keeps its own; `None` if none is."""
    if state is None:
        return None
    folders = [state.path.parent, *([directory] if directory else [])]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def check_same_run(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise if a run is to go on from a state of one with other cells, or other settings."""
    optional = (*_PARTS, *_LATER)
    settings = {name: value for name, value in settings.items() if name not in optional or name in saved}
    before, now = (_flat(each) for each in (saved, settings))
    names = now | {name: None for part in _PARTS for name in saved.get(part, {})}
    changed = {k: f"{k}: {before.get(k)!r} → {now.get(k)!r}" for k in names if before.get(k) != now.get(k)}
    cells = [name for name in ("images", "labels", "order of labels", "split") if name in changed]
    for name in cells:
        changed[name] = f"other {name}"
    if cells:
        msg = (
            f"The checkpoint belongs to a run on other cells ({'; '.join(changed.values())}): go on with the cells, "
            "the labels, in the order of their categories, and the split it was begun with, or begin another run."
        )
        raise ValueError(msg)
    if changed:
        msg = f"The checkpoint belongs to a run with other settings ({'; '.join(changed.values())}): repeat that run's."
        raise ValueError(msg)


def check_not_beyond(state: State, max_steps: int) -> None:
    """Raise ``ValueError`` if a run is to go on from a state that is further than where it should end."""
    if state.step > max_steps:
        msg = (
            f"{state.path} is already at step {state.step}, beyond max_steps={max_steps}: ask for as many steps or "
            "more, or begin another run."
        )
        raise ValueError(msg)


def _state(path: Path) -> State:
    if not path.is_file():
        msg = f"There is no checkpoint {path} to resume from: train with checkpoint_dir=… first, or drop ckpt_path."
        raise FileNotFoundError(msg)
    check_whole(path, "checkpoint")
    step, settings = read_header(
        path, lambda saved: (saved["global_step"], dict(saved.get("scbd_settings", {}))), "checkpoint"
    )
    return State(path, step, settings)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the run, and beside them those of model and plan."""
    inner = {name: value for part in _PARTS for name, value in settings.get(part, {}).items()}
    return {name: value for name, value in settings.items() if name not in _PARTS} | inner
