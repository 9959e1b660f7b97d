"""Sweeps over settings on a user's own cells: checked before anything is trained, kept, gone on with."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scbd._labels import as_columns
from scbd.data import split_by_column
from scbd.experiments._datasets import Dataset
from scbd.experiments._files import write_table
from scbd.experiments._grid import run_trial
from scbd.experiments._trials import Results, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from anndata import AnnData

logger = logging.getLogger(__name__)


class UserCells:
    """Cells at hand as a data set for trials.

    Parameters
    ----------
    adata
        The cells.
    y_key, e_key, image_key
        Where perturbation, environment and images are.
    """

    def __init__(self, adata: AnnData, y_key: str, e_key: str | Sequence[str], image_key: str) -> None:
        self.adata = adata
        self.dataset = Dataset(lambda **_: adata, y_key, as_columns(e_key), image_key=image_key)

    def trial(
        self,
        system: str,
        seed: int,
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        *,
        held_out: Sequence[str] = (),
    ) -> Trial:
        """Train a system, and score it on validation cells or on environments that are held out."""
        dataset = self.dataset
        about = {"y_key": dataset.y_key, "e_key": dataset.e_key, "image_key": dataset.image_key}
        about |= {"n_cells": self.adata.n_obs, "held_out": list(held_out)}
        return Trial("selection", "cells", system, seed, about, model, training)

    def check(
        self,
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        n_seeds: int,
        *,
        varied: Sequence[str] = (),
        held_out: bool = False,
    ) -> None:
        """Say what cannot be the same in all runs of a sweep, or leaves nothing to score.

        Parameters
        ----------
        model, training
            Arguments of the model and of its ``train``, the same in all runs.
        n_seeds
            Number of seeds.
        varied
            Arguments of the model that the sweep sets.
        held_out
            Whether the sweep holds environments out, and with that sets the split.

        Raises
        ------
        KeyError
            If a column is not there.
        ValueError
            If a setting cannot be used.
        """
        if n_seeds < 1:
            msg = f"n_seeds={n_seeds}: run at least one seed."
            raise ValueError(msg)
        taken = {"registry", *varied} & set(model) | {"seed", "checkpoint_dir", "ckpt_path"} & set(training)
        taken |= {"split"} & set(training) if held_out else set()
        if taken:
            msg = f"{min(taken)} is set by the sweep itself: leave it out."
            raise ValueError(msg)
        if not isinstance(model.get("encoder", ""), str):
            msg = "Every run makes a new model: give encoder by name, a module would be trained on and on."
            raise ValueError(msg)
        split = training.get("split")
        if not isinstance(split, (str, type(None))):
            msg = "Settings are kept with their results: give split as a column of obs."
            raise ValueError(msg)
        if not held_out and not self._validates(split, training):
            msg = "There are no validation cells to choose by: lower train_size, or mark some in the split column."
            raise ValueError(msg)

    def run(self, trials: Sequence[Trial], out: str | os.PathLike[str] | None) -> pd.DataFrame:
        """Run what has no row yet.

        Parameters
        ----------
        trials
            From :meth:`trial`.
        out
            As in :func:`scbd.experiments.run_trials`, and ``runs.csv``; `None` keeps nothing.

        Returns
        -------
        The rows of these trials, in their order.
        """
        with ExitStack() as stack:
            directory = Path(out) if out else Path(stack.enter_context(tempfile.TemporaryDirectory()))
            results = Results(directory / "rows")
            for number, trial in enumerate(trials, start=1):
                logger.info("Run %d of %d: %s", number, len(trials), trial.key)
                if trial not in results:
                    run_trial(trial, self.adata, self.dataset, results, directory / "runs" / trial.key)
            frame = results.frame().set_index("key", drop=False)
            frame = frame.loc[[trial.key for trial in trials]].reset_index(drop=True)
            if out:
                write_table(frame, directory / "runs.csv")
        return frame

    def _validates(self, split: str | None, training: Mapping[str, Any]) -> bool:
        """Whether the training settings leave validation cells."""
        if split is not None:
            return len(split_by_column(self.adata.obs, split).validation) > 0
        size = training.get("validation_size")
        return (1 - training.get("train_size", 0.9) if size is None else size) > 0
