"""Checkpoints that an interrupted training continues from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scbd.model._saved_models import read_part_of_saved_file

if TYPE_CHECKING:
    pass


class ResumableCheckpoint(NamedTuple):
    """Checkpoint from which a run is resumed."""

    path: Path
    step: int
    """Number of steps from the beginning of the run to the checkpoint."""
    settings: dict[str, Any]
    """Settings that the resumed run must share with the interrupted run."""


def find_checkpoint(folder: Path | None, *, resume: bool) -> ResumableCheckpoint | None:
    """Find and verify the checkpoint to resume from; return `None` if the folder holds none.

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
    """Raise ``ValueError`` if a checkpoint has other cells or settings than the run, or is beyond its last step."""
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
