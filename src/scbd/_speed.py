"""How fast this machine reads, trains on and embeds the cells at hand."""

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

from scbd._run import seed_everything
from scbd.model._embed import BATCH_SIZE
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import lightning.pytorch as L
    from anndata import AnnData

# seconds that each of the three is measured for; steps that only warm up
_LONG_ENOUGH, _WARM_UP = 10.0, 2


class _Clock(Callback):
    """Times reading and training steps, and ends training when they were long enough."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read batches as training does, and do nothing with them: now, before the system has them in its cache."""
        start, n_cells = time.perf_counter(), 0
        with closing(iter(trainer.datamodule.train_dataloader())) as batches:  # type: ignore[attr-defined]
            for batch in batches:
                n_cells, seconds = n_cells + len(batch["y"]), time.perf_counter() - start
                if seconds > _LONG_ENOUGH:
                    break
        self.read_in_a_second = n_cells / seconds
        self._ends = [time.perf_counter()]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        """Note the time; a device is waited for."""
        outputs["loss"].item()
        self._ends.append(time.perf_counter())
        trainer.should_stop = self._ends[-1] - self._ends[0] > _LONG_ENOUGH

    @property
    def seconds_of_a_step(self) -> float:
        """Without the first, where there are more."""
        ends = self._ends[min(_WARM_UP, len(self._ends) - 2) :]
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
    """Read, train and embed for some seconds each as :func:`scbd.run` would, and say how fast; nothing is kept.

    Parameters
    ----------
    adata, y_key, e_key, setup_kwargs, model_kwargs, train_kwargs
        As for :func:`scbd.run`.

    Raises
    ------
    KeyError, TypeError, ValueError
        As :func:`scbd.run`.
    """
    seed_everything(0)
    SCBDModel.setup_anndata(adata, y_key=y_key, e_key=e_key, **setup_kwargs)
    model, clock = SCBDModel(adata, **model_kwargs), _Clock()
    with warnings.catch_warnings():  # of what a few steps have learned
        warnings.simplefilter("ignore", UserWarning)
        model.train(**train_kwargs, callbacks=[clock], limit_val_batches=0, enable_progress_bar=False)
    n, seconds = 0, 0.0
    while seconds < _LONG_ENOUGH / 4 and n < adata.n_obs:
        n, start = min(max(BATCH_SIZE, 4 * n), adata.n_obs), time.perf_counter()
        model.get_latent_representation(indices=np.arange(n), enable_progress_bar=False)
        seconds = time.perf_counter() - start
    data, step = model.trainer.datamodule, clock.seconds_of_a_step  # type: ignore[attr-defined]
    whole = [timedelta(seconds=math.ceil(each)) for each in (data.max_steps * step, adata.n_obs / n * seconds)]
    threads = f", {torch.get_num_threads()} threads" * (model.device.type == "cpu")
    return (
        f"On {model.device}{threads}:\n"
        f"  reading   {clock.read_in_a_second:,.0f} cells/s\n"
        f"  training  {data.batch_size / step:,.0f} cells/s: {data.max_steps:,} steps in about {whole[0]}\n"
        f"  embedding {n / seconds:,.0f} cells/s: {adata.n_obs:,} cells in about {whole[1]} for one embedding"
    )
