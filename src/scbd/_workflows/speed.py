"""Measure how fast this machine reads the user's cells, trains a model on them and embeds them."""

from __future__ import annotations

import math
import time
import warnings
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from scbd._workflows.training_runs import seed_everything
from scbd.model._embed import BATCH_SIZE
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import lightning.pytorch as L
    from anndata import AnnData

# _MEASURED_SECONDS: time in seconds for which the speed of reading is measured, and then the speed of training. The
# speed of embedding is measured for a quarter of this time. _N_WARM_UP_STEPS: number of first training steps (warm-up)
# that are excluded from the measurement of training.
_MEASURED_SECONDS, _N_WARM_UP_STEPS = 10.0, 2


class _SpeedCallback(Callback):
    """Lightning callback that measures the speed of reading and of training, and stops training after ten seconds."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the speed of reading: read batches as training does for up to ten seconds, and discard them.

        Reading is measured before training, because the operating system does not have the cells in its cache yet.
        """
        start, n_cells = time.perf_counter(), 0
        with closing(iter(trainer.datamodule.train_dataloader())) as batches:  # type: ignore[attr-defined]
            for batch in batches:
                n_cells, seconds = n_cells + len(batch["y"]), time.perf_counter() - start
                if seconds > _MEASURED_SECONDS:
                    break
        self.cells_read_per_second = n_cells / seconds
        self._ends = [time.perf_counter()]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        """Record the time at which a training step has ended, and stop training after ten seconds."""
        # The call of item() reads the value of the loss, and thereby waits until a GPU has finished the training step.
        outputs["loss"].item()
        self._ends.append(time.perf_counter())
        trainer.should_stop = self._ends[-1] - self._ends[0] > _MEASURED_SECONDS

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of a training step in seconds; the first two steps (warm-up) are excluded if there are more."""
        ends = self._ends[min(_N_WARM_UP_STEPS, len(self._ends) - 2) :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def measure_speed(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    setup_kwargs: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
    train_kwargs: Mapping[str, Any],
) -> str:
    """Measure for some seconds each how fast cells are read, trained on and embedded; return the results as a text.

    A model is set up and trained as by :func:`scbd.run`, but only for about ten seconds. The model is not kept.

    Parameters
    ----------
    adata, y_key, e_key, setup_kwargs, model_kwargs, train_kwargs
        See :func:`scbd.run`.

    Returns
    -------
    Text of four lines. The first line contains the device, and on a CPU the number of threads. The other lines contain
    the speeds of reading, training and embedding in cells per second, and the expected times for all training steps
    and for one embedding of all cells.

    Raises
    ------
    KeyError, TypeError, ValueError
        See :func:`scbd.run`.
    """
    seed_everything(0)
    SCBDModel.setup_anndata(adata, y_key=y_key, e_key=e_key, **setup_kwargs)
    model, clock = SCBDModel(adata, **model_kwargs), _SpeedCallback()
    # Warnings about the quality of the model are not shown, because the model is trained for a few seconds only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.train(**train_kwargs, callbacks=[clock], limit_val_batches=0, enable_progress_bar=False)
    n, seconds = 0, 0.0
    while seconds < _MEASURED_SECONDS / 4 and n < adata.n_obs:
        n, start = min(max(BATCH_SIZE, 4 * n), adata.n_obs), time.perf_counter()
        model.get_latent_representation(indices=np.arange(n), enable_progress_bar=False)
        seconds = time.perf_counter() - start
    data, step = model.trainer.datamodule, clock.seconds_per_step  # type: ignore[attr-defined]
    whole = [timedelta(seconds=math.ceil(each)) for each in (data.max_steps * step, adata.n_obs / n * seconds)]
    threads = f", {torch.get_num_threads()} threads" * (model.device.type == "cpu")
    return (
        f"On {model.device}{threads}:\n"
        f"  reading   {clock.cells_read_per_second:,.0f} cells/s\n"
        f"  training  {data.batch_size / step:,.0f} cells/s: {data.max_steps:,} steps in about {whole[0]}\n"
        f"  embedding {n / seconds:,.0f} cells/s: {adata.n_obs:,} cells in about {whole[1]} for one embedding"
    )
