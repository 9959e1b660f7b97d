"""Training as scvi-tools users know it: split, batches, run, history."""

from __future__ import annotations

import logging
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args

from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.data import ImageDataModule, Split, split_by_column, stratified_split
from scbd.model._fit import fit
from scbd.model._plan import TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scbd.data import ImageSource
    from scbd.model._callbacks import History

logger = logging.getLogger(__name__)

# enough cells for the statistics of channels to three digits
_STATISTICS_CELLS = 4096


class TrainingRun(NamedTuple):
    """What a run leaves."""

    history: History
    data: ImageDataModule
    settings: dict[str, Any]


class TrainMixin:
    """Gives an image model :meth:`train`."""

    # which cells meet in a batch, what a step is, and what that takes
    _batches: ClassVar[type[ImageDataModule]] = ImageDataModule
    _plan: ClassVar[type[TrainingPlan]] = TrainingPlan
    _data_settings: Mapping[str, Any] = MappingProxyType({})
    _plan_settings: Mapping[str, Any] = MappingProxyType({})
    # whether trained results were compared over seeds
    _unharmed_by_bfloat16 = False

    if TYPE_CHECKING:  # what the model brings
        module: Any
        adata: Any
        history_: dict[str, pd.DataFrame] | None
        registry_: dict[str, Any]
        _require: Any
        _registered: Any
        _source: Any
        _codes: Any
        to_device: Any

    def train(
        self,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        batch_size: int | None = None,
        perturbations_per_batch: int | str | None = "auto",
        neighbours: bool | Literal["auto"] = "auto",
        split: str | Split | None = None,
        train_size: float = 0.9,
        validation_size: float | None = None,
        validate_every: int | None = None,
        load_best: bool = False,
        early_stopping: bool = False,
        early_stopping_patience: int = 10,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        accelerator: str = "auto",
        devices: int | list[int] | str = "auto",
        precision: str = "auto",
        preload: Literal["device"] | None = None,
        compile: bool = False,
        seed: int = 0,
        enable_progress_bar: bool = True,
        plan_kwargs: dict[str, Any] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        """Train the model; again, to go on with a fresh optimiser.

        Parameters
        ----------
        max_steps, max_epochs
            Length of the run, in updates or in passes over the training cells (not both). By default scvi-tools'
            heuristic: 400 epochs up to 20,000 cells, fewer beyond.
        lr, weight_decay
            Of AdamW.
        batch_size
            Cells a batch; larger batches hold more pairs and are better, up to memory. By default 2,048, or all
            training cells if they are fewer.
        perturbations_per_batch
            Draw P perturbations with equally many cells each; `None` shuffles plainly. By default plain shuffling
            where it gives a cell about eight partners of its perturbation, P × 8 otherwise.
        neighbours
            Of P perturbations draw cells in stretches that follow each other in the table, which a disk reads at once.
            By default for images that are not in memory, where rows are sorted by perturbation and shuffled inside, as
            :func:`scbd.data.write_screen` writes them.
        split
            A :class:`~scbd.data.Split`, or a column of ``obs`` that holds ``train``, ``validation`` and ``test``.
            By default a random split, stratified by y and e.
        train_size, validation_size
            Fractions of the random split; what they leave is the test part.
        validate_every
            Steps between validations and checkpoints. By default a twentieth of the run, or more where validation
            would take more than about a tenth of the time.
        load_best
            End with the weights of the lowest validation loss rather than the last. A contrastive loss counts
            overconfidence: on a screen it was seen to rise while complexes were found better and wells worse. With
            ``alpha="auto"``, each validation weighs invariance by the alpha of its time.
        early_stopping, early_stopping_patience
            Stop after so many validations without improvement of the validation loss; with ``load_best``, at its best.
        checkpoint_dir
            Where to keep ``last.ckpt``, ``history.csv`` and, with ``load_best``, ``best.ckpt``. Without it, an
            interrupted run cannot be resumed.
        ckpt_path
            Resume, optimiser included: ``"last"`` for the last state in ``checkpoint_dir``, or a checkpoint.
        accelerator, devices
            See :class:`lightning.pytorch.Trainer`.
        precision
            ``"32-true"``, or ``"bf16-mixed"``, which computes the encoders in bfloat16 and the losses in float32. By
            default bfloat16 where it was seen to do no harm and to be faster: for the encoders ``"small"`` and
            ``"resnet18"`` on processors with instructions for it. Embeddings are float32 either way.
        preload
            ``"device"`` puts all images on the device before training. By default they are read batch by batch, in
            the background.
        compile
            Run both blocks through :func:`torch.compile`. It takes a C++ compiler and a minute.
        seed
            Seed of the split, the batches and the augmentation. Weights are drawn when the model is made: seed those
            with ``scvi.settings.seed``.
        enable_progress_bar
            Show steps, rate, time left and losses.
        plan_kwargs
            Further arguments of the training plan: ``n_steps_alpha_warmup``, over which alpha rises from 0.
        **trainer_kwargs
            Further arguments of :class:`lightning.pytorch.Trainer`.

        Raises
        ------
        ValueError
            If the settings do not fit together or the data; before any work is done.
        FileExistsError
            If ``checkpoint_dir`` holds an earlier run that is not resumed.
        KeyboardInterrupt
            If interrupted: after the step at hand is finished and its state written.

        Warns
        -----
        UserWarning
            If z_c has collapsed to a point, or tells no more than one.
        """
        settings = {name: value for name, value in locals().items() if name not in ("self", "trainer_kwargs")}
        self._finish(self._train(self.module, **settings, **trainer_kwargs), continues=ckpt_path is None)

    def _train(
        self,
        objective: Any,
        *,
        max_steps: int | None,
        max_epochs: int | None,
        lr: float,
        weight_decay: float,
        batch_size: int | None,
        perturbations_per_batch: int | str | None,
        neighbours: bool | Literal["auto"],
        split: str | Split | None,
        train_size: float,
        validation_size: float | None,
        validate_every: int | None,
        accelerator: str,
        devices: int | list[int] | str,
        precision: str,
        preload: Literal["device"] | None,
        compile: bool,
        seed: int,
        ckpt_path: str | os.PathLike[str] | None,
        plan_kwargs: dict[str, Any] | None,
        contrastive: bool = True,
        **fit_kwargs: Any,
    ) -> TrainingRun:
        """Train an objective: our module, or one around it; see :meth:`train`. All checks come first.

        Parameters
        ----------
        objective
            What the plan calls with each batch. Its ``settings``, if any, must not change when a run is resumed.
        contrastive
            Whether cells need partners.
        """
        if max_steps is not None and max_epochs is not None:
            msg = "Give max_steps or max_epochs, not both."
            raise ValueError(msg)
        if (max_steps, max_epochs) != (None, None) and max(max_steps or 0, max_epochs or 0) < 1:
            msg = f"max_steps={max_steps}, max_epochs={max_epochs}: train for at least one step."
            raise ValueError(msg)
        source, y, e = self._training_inputs()
        parts = self._split(split, y, e, train_size, validation_size, seed)
        data = self._batches(
            source,
            y,
            e,
            parts,
            batch_size=batch_size,
            perturbations_per_batch=perturbations_per_batch,
            neighbours=neighbours,
            seed=seed,
            preload=preload,
            **self._data_settings,
        )
        if max_steps is None:
            epochs = get_max_epochs_heuristic(len(parts.train)) if max_epochs is None else max_epochs
            max_steps = epochs * data.steps_per_epoch
        data.max_steps = max_steps
        # what a resumed run must share with the one it goes on with
        settings = {
            "class": type(self).__name__,
            "n_train": len(parts.train),
            "batch_size": data.batch_size,
            "perturbations_per_batch": data.perturbations_per_batch,
            "neighbours": data.neighbours,
            "seed": seed,
            "lr": lr,
            "weight_decay": weight_decay,
        }
        plan_settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "seed": seed, "settings": settings}
        for part in (self.module, objective):
            settings |= getattr(part, "settings", {})
        settings |= self._plan_settings
        plan = self._plan(objective, **plan_settings | dict(self._plan_settings) | (plan_kwargs or {}))
        accelerator, lightning_devices, device = parse_device_args(accelerator, devices, return_device="torch")
        precision = self._precision(precision, device)
        if compile:
            self.module.compile_blocks()
        if contrastive:
            self._warn_of_singletons(y[parts.train])
        self._fit_statistics(source, parts.train, seed)
        self._forget_decoder()
        try:
            self.trainer, history = fit(
                plan,
                data,
                max_steps=max_steps,
                validate_every=min(validate_every or _validate_every(data, max_steps), max_steps),
                accelerator=accelerator,
                devices=lightning_devices,
                ckpt_path=ckpt_path,
                precision=precision,
                **fit_kwargs,
            )
        finally:
            self.module.eval()
        self.to_device(device)
        settings |= {"steps": self.trainer.global_step, "precision": precision}
        return TrainingRun(history, data, settings)

    def _finish(self, run: TrainingRun, *, continues: bool) -> None:
        """Keep what a run of the encoders leaves, behind what earlier runs left if it continues those."""
        # a resumed run brings its history along, and counts its steps from its own start
        earlier = self.history_ or {} if continues else {}
        offset = max((int(frame.index[-1]) for frame in earlier.values() if len(frame)), default=0)
        new = run.history.frames(offset)
        self.history_ = {name: pd.concat([f[name] for f in (earlier, new) if name in f]) for name in earlier | new}
        parts = run.data.split
        self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
        self.training_settings_ = run.settings | {"steps": offset + run.settings["steps"]}
        self.is_trained_ = True
        self._after_training(run.data)

    def _training_inputs(self) -> tuple[ImageSource, np.ndarray, np.ndarray]:
        """Images and codes of the cells attached; labels are looked up again, since obs may have changed."""
        adata = self._require(None)
        return self._source(adata), self._codes(adata, Y_REGISTRY), self._codes(adata, E_REGISTRY)

    def _precision(self, precision: str, device: torch.device) -> str:
        """What ``"auto"`` stands for."""
        if precision != "auto":
            return precision
        instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        fast = device.type == "cpu" and instructions()
        return "bf16-mixed" if fast and self._unharmed_by_bfloat16 else "32-true"

    def _split(
        self,
        split: str | Split | None,
        y: np.ndarray,
        e: np.ndarray,
        train_size: float,
        validation_size: float | None,
        seed: int,
    ) -> Split:
        if split is None:
            return stratified_split([y, e], train_size=train_size, validation_size=validation_size, seed=seed)
        if isinstance(split, str):
            return split_by_column(self.adata.obs, split)
        if not isinstance(split, Split):
            msg = f"split must be a scbd.data.Split or a column of obs, got {type(split).__name__}."
            raise TypeError(msg)
        last = max(rows.max(initial=-1) for rows in (split.train, split.validation, split.test))
        if last >= len(y):
            msg = f"The split names row {last}, there are {len(y)} cells."
            raise ValueError(msg)
        return split

    def _warn_of_singletons(self, y: np.ndarray) -> None:
        codes, counts = np.unique(y, return_counts=True)
        names = [str(self._registered(Y_REGISTRY)["categories"][code]) for code in codes[counts == 1]]
        if names:
            logger.warning(
                "%d of %d perturbations have a single training cell (%s): it has no partner and teaches z_c nothing.",
                len(names),
                len(codes),
                ", ".join(names[:5]) + (", …" if len(names) > 5 else ""),
            )

    def _fit_statistics(self, source: ImageSource, rows: np.ndarray, seed: int) -> None:
        """Learn the channels' statistics once, from training cells alone."""
        if self.module.preprocess.fitted:
            return
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.choice(rows, min(len(rows), _STATISTICS_CELLS), replace=False))
        blocks = np.array_split(rows, -(-len(rows) // 512))
        self.module.preprocess.fit(torch.from_numpy(source.read(block)) for block in blocks)

    def _forget_decoder(self) -> None:
        """For a model with a decoder, which is that of the embeddings as they were."""

    def _after_training(self, data: ImageDataModule) -> None:
        """For a model to look at what was learned."""


def _validate_every(data: ImageDataModule, max_steps: int) -> int:
    """Twenty validations a run, fewer where they would take more than a tenth of it."""
    # a cell that is not learned from costs about a third
    affordable = 0.1 * 3 * max_steps * data.batch_size / max(1, len(data.split.validation))
    return max_steps // int(np.clip(affordable, 1, min(20, max_steps)))
