"""Sweeps over settings on a user's own cells: checked before anything is trained, kept, gone on with."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd._labels import as_columns
from scbd._outputs import check_directory, write_table
from scbd.data import split_by_column
from scbd.workflows._datasets import Dataset
from scbd.workflows._provenance import digest_of
from scbd.workflows._runner import run_trial
from scbd.workflows._trials import Results, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)


class UserCells:
    """Cells at hand as a data set for trials.

    Parameters
    ----------
    adata
        The cells.
    y_key, e_key
        Columns of perturbation and environment.
    setup
        Further arguments of ``setup_anndata``.
    """

    def __init__(
        self, adata: AnnData, y_key: str | Sequence[str], e_key: str | Sequence[str], setup: Mapping[str, Any]
    ) -> None:
        self.adata = adata
        self.dataset = Dataset(lambda **_: adata, y_key, as_columns(e_key), setup=setup)
        self._inputs = self.dataset.inputs(adata)
        self._digests: dict[str | None, str] = {}

    def trial(
        self,
        system: str,
        seed: int,
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        *,
        held_out: Sequence[str] = (),
    ) -> Trial:
        """Train a system, and score it on validation cells or on environments that are held out.

        A trial names its cells by a digest: it answers for those, whatever ran in the same directory before.
        """
        dataset, digest = self.dataset, self._digest(training.get("split"))
        where = {name: key for name, key in self._inputs._asdict().items() if key is not None}
        about = dataset.columns | where | {"n_cells": self.adata.n_obs, "digest": digest, "held_out": list(held_out)}
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
        taken |= {"split"} if held_out and training.get("split") is not None else set()
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
            As in :func:`scbd.workflows.run_trials`, and ``runs.csv``; `None` keeps nothing.

        Returns
        -------
        The rows of these trials, in their order.

        Raises
        ------
        FileExistsError
            If ``out`` is a file.

        Warns
        -----
        UserWarning
            If runs in ``out`` are of other cells, and so are not used.
        """
        with ExitStack() as stack:
            directory = check_directory(out) if out else Path(stack.enter_context(tempfile.TemporaryDirectory()))
            results = Results(directory)
            _say_what_is_not_used(results, trials)
            for number, trial in enumerate(trials, start=1):
                logger.info("Run %d of %d: %s", number, len(trials), trial.key)
                if trial not in results:
                    state, digest = directory / "runs" / trial.key, trial.data["digest"]
                    run_trial(trial, self.adata, self.dataset, results, state, digest)
            frame = results.frame().set_index("key", drop=False)
            frame = frame.loc[[trial.key for trial in trials]].reset_index(drop=True)
            if out:
                results.fold()
                write_table(frame, directory / "runs.csv")
        return frame

    def _digest(self, split: str | None) -> str:
        """Of the inputs and of all labels that a run looks at."""
        if split not in self._digests:
            self._digests[split] = digest_of(self.adata, self.dataset.label_columns, self._inputs, split)
        return self._digests[split]

    def _validates(self, split: str | None, training: Mapping[str, Any]) -> bool:
        """Whether the training settings leave validation cells."""
        if split is not None:
            return len(split_by_column(self.adata.obs, split).validation) > 0
        size = training.get("validation_size")
        return (1 - training.get("train_size", 0.9) if size is None else size) > 0


def _say_what_is_not_used(results: Results, trials: Sequence[Trial]) -> None:
    """Of runs that are there and answer for other cells, or for a system as it was."""
    there, ours = results.frame(), {trial.data["digest"] for trial in trials}
    # rows of an older scbd do not say of which cells they are
    digests = there["digest"] if "digest" in there else pd.Series(index=there.index, dtype=object)
    n_others = int((~digests.isin(ours)).sum()) + len(results.left_out())
    if n_others:
        msg = (
            f"Of the runs in {results.directory}, {n_others:,} belong to other cells than these, or to another scbd: "
            "they are kept, and not used."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
