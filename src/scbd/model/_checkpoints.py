"""Functions that find the checkpoint of an interrupted training run and check that a new run may continue from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from scbd.model._saved_models import read_part_of_saved_file


class ResumableCheckpoint(NamedTuple):
    """Checkpoint file from which an interrupted training run is resumed."""

    path: Path
    step: int
    """Number of training steps that the interrupted run had made when the checkpoint was written."""
    settings: dict[str, Any]
    """Settings of the interrupted run that must be equal in the resumed run, by name."""


def find_checkpoint(folder: Path | None, *, resume: bool) -> ResumableCheckpoint | None:
    """Find the checkpoint ``last.ckpt`` in a folder, and read its step and settings.

    Returns
    -------
    The checkpoint to resume from; `None` if there is no folder, or no checkpoint in the folder.

    Raises
    ------
    FileExistsError
        If the folder holds a checkpoint and ``resume`` is false.
    ValueError
        If the checkpoint cannot be read.
    """
    path = folder / "last.ckpt" if folder else None
    if path is None or not path.is_file():
        return None
    if not resume:
        msg = f"{folder} holds the state of an earlier run: go on with it (resume=True), or choose another."
        raise FileExistsError(msg)
    return ResumableCheckpoint(
        path, *read_part_of_saved_file(path, lambda saved: (saved["global_step"], saved["scbd_settings"]), "checkpoint")
    )


def check_checkpoint_matches(state: ResumableCheckpoint, settings: dict[str, Any], max_steps: int) -> None:
    """Raise ``ValueError`` if a run cannot be resumed from a checkpoint.

    This is the case if the interrupted run had other cells, labels or settings than the new run, or if the step of the
    checkpoint is beyond the last step of the new run.

    Parameters
    ----------
    state
        Checkpoint of the interrupted run.
    settings
        Settings of the new run.
    max_steps
        Number of steps of the new run.
    """
    changed = [
        f"other {name}" if name in ("images", "labels", "split", "order of labels") else f"{name}: {before!r} → {now!r}"
        for name in settings | state.settings
        if (before := state.settings.get(name)) != (now := settings.get(name))
    ]
    if changed:
        msg = f"{state.path} is of a run with other settings ({'; '.join(changed)}): repeat them, or begin another."
        raise ValueError(msg)
    if state.step > max_steps:
        msg = f"{state.path} is at step {state.step}, beyond max_steps={max_steps}: ask for more, or begin another run."
        raise ValueError(msg)
