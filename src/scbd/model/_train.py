"""The ``train`` method of all models, its settings, and the training run with Lightning's trainer."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as L
import numpy as np
import pandas as pd
import scvi
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args

from scbd._shared.checks import check_choice, check_count, format_count
from scbd._shared.files import check_outside_stores, hold_directory, local_path, remove_partials
from scbd._shared.keys import E_REGISTRY, POSITION_REGISTRY, Y_REGISTRY
from scbd._shared.labels import as_columns, as_list, label_text
from scbd._shared.memory import keep_freed_memory
from scbd._shared.messages import without_messages
from scbd.data._sources import digest_inputs, digest_labels
from scbd.data._splits import Split
from scbd.model._arguments import (
    REPLACEMENTS,
    check_argument_names,
    constructor_names,
    explain_arguments,
    keyword_names,
)
from scbd.model._callbacks import (
    AtomicCheckpointIO,
    BestWeights,
    Divergence,
    EarlyStopping,
    History,
    LastState,
    ProgressBar,
    ResumableCheckpoint,
    TrainingDiverged,
    check_checkpoint_matches,
    find_checkpoint,
)
from scbd.model._design import environment_column_codes, has_separate_environments
from scbd.model._embed import EmbedMixin
from scbd.model._interfaces import TrainingResults
from scbd.model._plan import OnlineHead
from scbd.model._training_cells import (
    choose_split,
    draw_training_sample,
    label_column_codes,
    warn_if_single_cell_perturbations,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from lightning.pytorch.callbacks import Callback

    from scbd.data._loading import ImageDataModule
    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import Objective
    from scbd.model._plan import TrainingPlan

logger = logging.getLogger(__name__)

# default learning rate for images with an encoder other than "small"; the defaults for the encoder "small" and for
# features are in _setup.py
_DEFAULT_LR = 1e-4
# default weight decay of AdamW
_DEFAULT_WEIGHT_DECAY = 0.01
# values of Lightning's argument precision with which the weights are kept in float32
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
# Types of the settings that are saved in a checkpoint, and compared with the new settings when a run is resumed.
# Settings of other types, such as torch modules, are not compared.
_COMPARABLE_TYPES = (str, int, float, tuple, type(None))
# default number of consecutive validations without improvement after which early stopping ends the run
_DEFAULT_PATIENCE = 10
# advice in the error message if an argument of train needs validation but the run has no validation
_VALIDATION_REMEDY = "keep validation cells (train_size=0.9, or split), and leave limit_val_batches=0 out"
# names of the arguments of Lightning's Trainer that `train` accepts as trainer_kwargs and gives to the Trainer
TRAINER_ARGUMENTS = tuple(name for name in keyword_names(L.Trainer.__init__) if name not in REPLACEMENTS["train"])
# arguments of the training plan that the model sets, so that users cannot give them in plan_kwargs
_RESERVED_PLAN_ARGUMENTS = ("module", "seed", "first_step", "settings", "head")
# arguments of the data module that the model sets, so that users cannot give them in batch_kwargs
_RESERVED_BATCH_ARGUMENTS = ("source", "y", "e", "split", "mixed_by", "max_steps", "first_step")
# regular expressions of warnings that Lightning raises about deliberate choices of this package, and that are silenced
_SILENCED_WARNINGS = (
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The dirpath has changed.*",
    ".*available but not used.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Total length of `.*` across ranks is zero.*",
    ".*treespec, LeafSpec.*",
    # While a decoder is trained, the encoders are frozen and in evaluation mode.
    ".*in eval mode at the start of training.*",
)


class TrainSettings(SimpleNamespace):
    """Arguments of one call of :meth:`TrainMixin.train`, as attributes, checked for contradictions.

    The signature and the docstring of :meth:`TrainMixin.train` define the arguments, their types and their defaults.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for name in ("max_steps", "max_epochs", "batch_size", "validate_every", "early_stopping_patience", "seed"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), {"batch_size": 2, "seed": 0}.get(name, 1))
        if self.early_stopping_patience is not None and not self.early_stopping:
            msg = f"early_stopping_patience={self.early_stopping_patience} needs early_stopping=True."
            raise ValueError(msg)
        if isinstance(self.perturbations_per_batch, int):
            check_count("perturbations_per_batch", self.perturbations_per_batch)
        if self.max_steps is not None and self.max_epochs is not None:
            msg = "Give max_steps or max_epochs, not both."
            raise ValueError(msg)
        for name in ("log_every_n_steps", "accumulate_grad_batches"):
            if self.trainer_kwargs.get(name) is not None:
                check_count(name, self.trainer_kwargs[name])
        for name in ("plan_kwargs", "batch_kwargs"):
            if not isinstance(getattr(self, name) or {}, Mapping):
                msg = f"{name}={getattr(self, name)!r}: give a dictionary of arguments."
                raise TypeError(msg)
        for name, default in (("lr", None), ("weight_decay", _DEFAULT_WEIGHT_DECAY)):
            if name in (self.plan_kwargs or {}) and getattr(self, name) != default:
                msg = f"{name} is an argument of train and in plan_kwargs: give one of them."
                raise ValueError(msg)
        check_choice("precision", self.precision, Precision)
        if self.resume and not self.checkpoint_dir:
            msg = "resume=True needs the checkpoint_dir of the run to resume."
            raise ValueError(msg)

    def replace(self, **changes: Any) -> TrainSettings:
        """Return equal settings, except for the given changes."""
        return TrainSettings(**vars(self) | changes)

    def with_defaults(self, lr: float | None, max_steps: int | None) -> TrainSettings:
        """Return equal settings, with the given learning rate and number of steps if the user has given none."""
        has_lr = self.lr is not None or "lr" in (self.plan_kwargs or {})
        has_length = self.max_steps is not None or self.max_epochs is not None
        return self.replace(lr=self.lr if has_lr else lr, max_steps=self.max_steps if has_length else max_steps)

    @property
    def folder(self) -> Path | None:
        """Folder for the checkpoints of the run; `None` if the run writes no checkpoints."""
        return local_path(self.checkpoint_dir) if self.checkpoint_dir else None

    @property
    def plan(self) -> dict[str, Any]:
        """Keyword arguments for the training plan: learning rate, weight decay, and the user's ``plan_kwargs``."""
        rates = {"lr": _DEFAULT_LR if self.lr is None else self.lr, "weight_decay": self.weight_decay}
        return rates | dict(self.plan_kwargs or {})

    @property
    def n_accumulated_batches(self) -> int:
        """Number of batches whose gradients are accumulated for one optimiser step (``accumulate_grad_batches``)."""
        return self.trainer_kwargs.get("accumulate_grad_batches") or 1

    def validates(self, data: ImageDataModule) -> bool:
        """Return whether a run with these settings computes the validation loss.

        This requires validation cells. The loss is not computed if a user gives ``limit_val_batches=0``.

        Parameters
        ----------
        data
            Data module of the run.
        """
        return data.validates and self.trainer_kwargs.get("limit_val_batches") != 0

    def with_validation_in_steps(self, data: ImageDataModule) -> TrainSettings:
        """Return equal settings in which the interval between validations is a number of steps, ``validate_every``.

        Users may also set this interval with the arguments ``check_val_every_n_epoch`` and ``val_check_interval`` of
        Lightning, which refer to epochs. A user means passes over the training cells, but a whole run is a single epoch
        for Lightning. The two arguments are therefore removed, and their values are converted to a number of steps.

        Parameters
        ----------
        data
            Data module of the run, which determines the number of batches in one pass over the training cells.

        Raises
        ------
        ValueError
            If more than one of the three arguments is given, if a value is not valid, or if the run has no validation.
        """
        further = dict(self.trainer_kwargs)
        epochs, interval = (further.pop(name, None) for name in ("check_val_every_n_epoch", "val_check_interval"))
        timed = {"validate_every": self.validate_every}
        timed |= {"check_val_every_n_epoch": epochs, "val_check_interval": interval}
        given = [f"{name}={value!r}" for name, value in timed.items() if value is not None]
        if len(given) > 1:
            msg = f"{' and '.join(given)} both time validations: give one of them."
            raise ValueError(msg)
        if epochs is None and interval is None:
            return self.replace(trainer_kwargs=further)
        if epochs is not None:
            check_count("check_val_every_n_epoch", epochs)
            n_batches = epochs * data.steps_per_epoch
        elif isinstance(interval, float) and 0 < interval <= 1:
            n_batches = max(1, int(interval * data.steps_per_epoch))
        elif isinstance(interval, int) and interval > 0:
            n_batches = interval
        else:
            msg = (
                f"{given[0]}: give a number of batches, or a fraction of a pass over the training cells above 0.0 and "
                "up to 1.0; or use validate_every, a number of steps."
            )
            raise ValueError(msg)
        if not self.validates(data):
            msg = f"{given[0]} needs validation cells, and there are too few: {_VALIDATION_REMEDY}."
            raise ValueError(msg)
        return self.replace(trainer_kwargs=further, validate_every=-(-n_batches // self.n_accumulated_batches))


class TrainMixin(EmbedMixin):
    """Mixin that adds to a model the method :meth:`train`, and the storage of the history and results of its runs."""

    history_: dict[str, pd.DataFrame] | None
    train_indices: np.ndarray
    validation_indices: np.ndarray
    test_indices: np.ndarray
    training_settings_: dict[str, Any]

    @explain_arguments(*TRAINER_ARGUMENTS)
    def train(
        self,
        *,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        lr: float | None = None,
        weight_decay: float = _DEFAULT_WEIGHT_DECAY,
        batch_size: int | None = None,
        perturbations_per_batch: int | str | None = "auto",
        split: str | Split | None = None,
        train_size: float | None = None,
        validation_size: float | None = None,
        validate_every: int | None = None,
        load_best: bool = False,
        early_stopping: bool = False,
        early_stopping_patience: int | None = None,
        online_head: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        accelerator: str = "auto",
        devices: int | list[int] | str = "auto",
        precision: Precision = "32-true",
        seed: int | None = None,
        batch_kwargs: Mapping[str, Any] | None = None,
        plan_kwargs: Mapping[str, Any] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        """Train the model on the table attached to it.

        A second call continues from the current weights, with a new optimiser, and draws other batches than the earlier
        calls.

        Parameters
        ----------
        max_steps, max_epochs
            Length of the run, either in optimiser steps or in passes over the training cells. Give at most one of them.
            The default depends on the inputs and the encoder:

            - images, encoder ``"small"``: 300 steps;
            - images, any other encoder: the heuristic of scvi-tools, which is 400 epochs for up to 20,000 training
              cells and fewer epochs for more cells;
            - features, encoder ``"linear"``: 50 steps;
            - features, any other encoder: 200 steps.
        lr, weight_decay
            Learning rate and weight decay of AdamW. The default learning rate is 0.001 for the encoder ``"small"`` and
            for features with an encoder other than ``"linear"``; otherwise it is 0.0001. The learning rate decays to 0
            along half a cosine.
        batch_size
            Number of cells per batch. Larger batches contain more pairs of cells to contrast. By default 512 for the
            encoder ``"small"`` and 2,048 otherwise, but at most the number of training cells.
        perturbations_per_batch
            Number of perturbations P per batch, with an equal number of cells each. With `None`, each batch is a random
            sample of the cells. By default, batches are random samples if each cell then has about eight partners of
            its perturbation in a batch; otherwise P is chosen such that each perturbation has about eight cells. Models
            that are classifiers or latent-variable models draw random samples, or draw environments or pairs of cells.
        split
            Split into training, validation and test cells: a :class:`~scbd.data.Split`, or the name of a column of
            ``obs`` with the values ``"train"``, ``"validation"`` and ``"test"``. By default, the split of the model's
            last run, if that run used the same cells and no sizes are given; otherwise a random split that is
            stratified by perturbation and environment.
        train_size, validation_size
            Fractions of the cells that are training cells and validation cells in a random split. By default,
            ``train_size`` is 0.9 (1.0 for features with the encoder ``"linear"``) and all remaining cells are
            validation cells. Cells that are neither training nor validation cells are test cells.
        validate_every
            Number of steps between validations, and between checkpoints. The default is a twentieth of the run, or
            more steps if validation would otherwise take more than about a tenth of the time. Each validation uses the
            same full batches of ``batch_size`` cells, or a single batch if there are fewer validation cells. The
            interval can also be given by Lightning's arguments ``check_val_every_n_epoch`` (in passes over the training
            cells) or ``val_check_interval`` (in batches).
        load_best
            Whether the model has the weights with the lowest validation loss at the end of the run, instead of the last
            weights. This also applies to an interrupted run. A contrastive loss penalises overconfidence. The
            validation loss may therefore rise while the model still gets better at distinguishing perturbations.
        early_stopping
            Whether to stop after ``early_stopping_patience`` validations without an improvement of the validation loss.
        early_stopping_patience
            Number of consecutive validations without improvement before the run stops. Default: 10.
        online_head
            Whether to train a linear classifier of the perturbation on r_c (the output of the encoder of z_c before the
            projection) alongside the encoder, as the paper's authors do. :meth:`predict` uses this classifier. It does
            not affect the training of the encoder. Models that are classifiers themselves do not get a second one.
        checkpoint_dir
            Folder for checkpoints. ``last.ckpt`` is written at each validation, or every ``validate_every`` steps if
            the run does not validate. With ``load_best``, ``best.ckpt`` is written as well. A run that is killed loses
            the steps since its last checkpoint.
        resume
            Whether to continue an interrupted run from ``last.ckpt`` in ``checkpoint_dir``, if this file exists. The
            state of the optimiser is restored, too, so that the resumed run ends with the same weights as a run without
            interruption. Cells, labels and settings must be equal to those of the interrupted run.
        accelerator, devices
            See :class:`lightning.pytorch.Trainer`.
        precision
            ``"32-true"`` computes in float32. ``"bf16-mixed"`` and ``"16-mixed"`` compute the encoders in bfloat16 or
            float16, and the losses in float32. Weights and embeddings are always float32.
        seed
            Seed of the random split, the batches and the augmentation. By default ``scvi.settings.seed``, or 0 if that
            is not set. The initial weights of the encoders do not depend on this argument. They are drawn when the
            model is created, and are reproducible with ``scvi.settings.seed``.
        batch_kwargs
            Further arguments of :class:`scbd.data.ImageDataModule`, which draws the batches. For example,
            ``preload="device"`` copies all images to the device before training, and ``neighbours`` sets whether cells
            are drawn in contiguous stretches of rows.
        plan_kwargs
            Further arguments of :class:`scbd.model.TrainingPlan`, which defines a training step: ``encoder_lr``,
            ``lr_decay``, ``n_steps_alpha_warmup``.
        **trainer_kwargs
            Further arguments of :class:`lightning.pytorch.Trainer`, such as ``enable_progress_bar``,
            ``gradient_clip_val``, ``callbacks`` (added to the model's own callbacks) or ``logger``.

        Raises
        ------
        TypeError
            If an argument does not exist.
        ValueError
            If settings contradict each other or do not fit the data. Settings are checked before training starts.
        FileExistsError
            If ``checkpoint_dir`` holds the checkpoint of an earlier run and ``resume`` is false.
        BlockingIOError
            If another process is training with the same ``checkpoint_dir``.
        scbd.model.TrainingDiverged
            If the loss or a weight becomes NaN or infinite. The model then has the last weights with a finite loss.
        KeyboardInterrupt
            If the user interrupts the run. The model keeps the weights and the history that it has at this point.
            ``last.ckpt`` holds the state of the last validation.
        SystemExit
            With code 143, if the process receives the signal SIGTERM during training. Weights, history and
            ``last.ckpt`` are kept as with an interruption by the user.

        Warns
        -----
        UserWarning
            - If z_c is nearly a single point or carries no information about the perturbations, and the means of
              perturbations in z_c do not differ more than means after permuting the labels.
            - If z_c has overfitted the training cells.
            - If the validation cells include cells that an earlier run of the model was trained on.
        """
        given = dict(locals())
        del given["self"]
        # The method _make_data sets the defaults of the batch size and the split, which depend on the cells.
        settings, defaults = TrainSettings(**given), self._training_defaults
        settings = settings.with_defaults(defaults.get("lr"), defaults.get("max_steps"))
        self._store_run(self._fit(self.module, settings))

    def _fit(self, objective: Objective, settings: TrainSettings, *, contrastive: bool = True) -> TrainingRun:
        """Check the settings of a training run, prepare its data and module, and train.

        Parameters
        ----------
        objective
            Torch module that computes the loss of each batch: the module of the model, or a wrapper around it.
        settings
            Arguments of :meth:`train`.
        contrastive
            Whether the run trains the encoders. Such a run continues the step count of earlier runs, and warns if
            perturbations have only one training cell, since the contrastive loss needs pairs of cells.

        Returns
        -------
        The finished run. If an exception was raised during training, it is stored in the attribute ``error``.
        """
        self._check_further_arguments(settings)
        adata = self._adata_or_attached(None)
        state = find_checkpoint(settings.folder, resume=settings.resume)
        source, y, e = self._source(adata), self._codes(adata, Y_REGISTRY), self._codes(adata, E_REGISTRY)
        # The first step of a run is the number of training steps of all earlier runs. A resumed run is part of the
        # interrupted run, and has the first step of the interrupted run.
        first_step = self.training_settings_.get("steps", 0) if contrastive else 0
        first_step = state.settings["first_step"] if state else first_step
        inputs = digest_inputs(source)
        data = self._make_data(source, y, e, settings, first_step, inputs)
        settings = settings.with_validation_in_steps(data)
        shared = self._settings_to_match_on_resume(objective, data, settings, inputs)
        if state:
            check_checkpoint_matches(state, shared, data.max_steps)
        head = self._make_online_head(settings, data.seed) if contrastive and settings.online_head else None
        how = {**self.traits.plan_kwargs, **settings.plan}
        plan = self.traits.plan(objective, seed=data.seed, first_step=first_step, settings=shared, head=head, **how)
        with without_messages("lightning.pytorch", _SILENCED_WARNINGS), _checkpoint_folder(settings) as folder:
            run = TrainingRun(plan, data, settings, folder)
            self.trainer = run.trainer
            run.trainer._model = self  # type: ignore[attr-defined]  # scvi-tools' callbacks read the model from here
            train = data.split.train
            if contrastive:
                self._check_trainable(e[train])
                warn_if_single_cell_perturbations(y[train], self._registered(Y_REGISTRY)["categories"])
                self._before_training(y[train], e[train])
            self._fit_preprocessing(source, y, e, train, data.seed)
            # A callback may save the model during the run. Quantities that were computed from earlier weights do not
            # belong to the new weights, and are therefore removed for the time of the run.
            kept = self.results_
            if contrastive:
                self._log_training_summary(data, plan)
                self.results_ = TrainingResults()
            try:
                with self._without_untrained_parts():
                    run.start(state)
            finally:
                self.results_ = kept
        self.module.eval()
        self.to_device(run.device)
        return run

    def _check_trainable(self, e: np.ndarray) -> None:
        """Check that environments repeat, and that the network of images has weights in float32.

        Parameters
        ----------
        e
            Codes of the environments of the training cells, ``(N,)``.

        Raises
        ------
        ValueError
            If each training cell is an environment of its own, in each column of environments; or if the model was
            created while torch's default dtype was float64.
        """
        columns = environment_column_codes(self.registry_)
        codes = e[:, None] if columns is None else columns[e]
        if len(e) > 1 and all(len(np.unique(column)) == len(e) for column in codes.T):
            names = as_columns(self.registry_["setup_args"]["e_key"])
            msg = (
                f"Each of the {len(e)} training cells is an environment of its own (e_key={names}): what "
                "the environment changes cannot be learned from single cells. Give a column whose values several cells "
                "share, such as the plate."
            )
            raise ValueError(msg)
        if self._inputs.image_key is not None and any(w.dtype == torch.float64 for w in self.module.parameters()):
            msg = (
                "The model has weights in float64, and images are given to it in float32: call "
                "torch.set_default_dtype(torch.float32) before the model is made."
            )
            raise ValueError(msg)

    def _check_further_arguments(self, settings: TrainSettings) -> None:
        """Raise ``TypeError`` if ``plan_kwargs`` or ``batch_kwargs`` hold an argument that does not exist.

        The arguments must exist in the constructor of the model's training plan or data module, respectively.
        """
        traits, of_train = self.traits, keyword_names(type(self).train)
        instead = {name: f"give it to train itself, train({name}=…)." for name in (*TRAINER_ARGUMENTS, *of_train)}
        known = [name for name in constructor_names(traits.plan) if name not in _RESERVED_PLAN_ARGUMENTS]
        check_argument_names(settings.plan_kwargs or (), known, "plan_kwargs", instead | REPLACEMENTS["plan_kwargs"])
        own = (*_RESERVED_BATCH_ARGUMENTS, *of_train, *traits.batch_kwargs)
        known = [name for name in constructor_names(traits.batches) if name not in own]
        check_argument_names(settings.batch_kwargs or (), known, "batch_kwargs", instead | REPLACEMENTS["batch_kwargs"])

    def _make_data(
        self, source: ImageSource, y: np.ndarray, e: np.ndarray, settings: TrainSettings, first_step: int, inputs: str
    ) -> ImageDataModule:
        """Create the data module of a run, which draws its batches, and set the split, batch size and number of steps.

        Parameters
        ----------
        source
            Inputs of all cells.
        y, e
            Codes of perturbation and environment of all cells, ``(N,)``.
        settings
            Arguments of :meth:`train`.
        first_step
            Number of training steps that the model has made in earlier runs.
        inputs
            Digest of the inputs. If the inputs of the last run had the same digest, its split is used again.
        """
        obs, defaults, earlier = self.adata.obs, self._training_defaults, None
        trained_on = self.training_settings_.get("images")
        if trained_on == inputs:
            earlier = Split(self.train_indices, self.validation_indices, self.test_indices)
        elif trained_on is not None and settings.split is None:
            logger.warning(
                "The cells are others than those of the last run, or in another order: the split is a new one, and "
                "cells that were trained on may be validated on. Give split= to keep some out for good."
            )
        seed = (scvi.settings.seed or 0) if settings.seed is None else settings.seed
        split = choose_split(
            obs,
            [y, e],
            split=settings.split,
            train_size=settings.train_size,
            validation_size=settings.validation_size,
            default=self._train_size,
            seed=seed,
            earlier=earlier,
        )
        batch_size = settings.batch_size
        if batch_size is None and "batch_size" in defaults:
            batch_size = min(defaults["batch_size"], len(split.train))
        data = self.traits.batches(
            source,
            y,
            e,
            split,
            batch_size=batch_size,
            perturbations_per_batch=settings.perturbations_per_batch,
            mixed_by=label_column_codes(obs),
            first_step=first_step,
            seed=seed,
            **self.traits.batch_kwargs,
            **(settings.batch_kwargs or {}),
        )
        if settings.max_steps is None:
            epochs = settings.max_epochs or get_max_epochs_heuristic(len(split.train))
            data.max_steps = -(-epochs * data.steps_per_epoch // settings.n_accumulated_batches)
        else:
            data.max_steps = settings.max_steps
        return data

    def _fit_preprocessing(
        self, source: ImageSource, y: np.ndarray, e: np.ndarray, rows: np.ndarray, seed: int
    ) -> None:
        """Fit the scaling and the linear transforms of inputs to the training cells of the first run.

        Later runs only estimate the mean and the standard deviation of environments that earlier runs had no cells of.

        Parameters
        ----------
        source
            Inputs of all cells.
        y, e
            Codes of perturbation and environment of all cells, ``(N,)``.
        rows
            Row numbers of the training cells.
        seed
            Seed of the random sample of training cells.
        """
        adata, reference = self.adata, None
        if self.module.preprocess.environments is not None:
            labels = self._label_codes(adata)
            self.alignment_.fit(labels, rows, has_images=self._inputs.image_key is not None)
            reference = self.alignment_.draw_reference(labels, source, rows)
        if not self.module.is_fitted:
            positions = self._codes(adata, POSITION_REGISTRY) if self._registered(POSITION_REGISTRY) else None
            sample = draw_training_sample(source, rows, y, e, self._control_mask(adata), positions, seed=seed)
            self.module.fit(sample._replace(reference=reference))
        elif reference is not None:
            self.module.estimate_environment_statistics(reference)

    @rank_zero_only
    def _log_training_summary(self, data: ImageDataModule, plan: TrainingPlan) -> None:
        """Log a summary of the run: data, model, number of steps, and number of training, validation and test cells."""
        n_steps, n_cells = format_count(data.max_steps, "step"), format_count(data.batch_size, "cell")
        parts = {"to train on": data.split.train, "for validation": data.split.validation, "held out": data.split.test}
        split = ", ".join(f"{format_count(len(rows), 'cell')} {what}" for what, rows in parts.items())
        training = f"{n_steps} of {n_cells}, lr {plan.lr:g}"
        logger.info("%s", self._description([("training", training), ("split", split)]))

    def _make_online_head(self, settings: TrainSettings, seed: int) -> OnlineHead | None:
        """Create the linear classifier of perturbations that is trained alongside the encoder (``online_head=True``).

        If an earlier run has trained such a classifier, the new one starts from its weights. The result is `None` for
        models that are classifiers themselves.
        """
        if self._objective_head is not None:
            return None
        return OnlineHead(
            self.module.network("c"),
            len(self._registered(Y_REGISTRY)["categories"]),
            lr=settings.plan["lr"],
            weight_decay=settings.plan["weight_decay"],
            seed=seed,
            weights=getattr(self, "online_head_", {}),
        )

    def _settings_to_match_on_resume(
        self, objective: Objective, data: ImageDataModule, settings: TrainSettings, inputs: str
    ) -> dict[str, Any]:
        """Collect the settings of a run that must be equal when the run is resumed after an interruption.

        They include digests (hashes) of the inputs, the labels and the split. The settings are saved in checkpoints.
        After the run, they are stored in the model as well.
        """
        obs, setup = self.adata.obs, self.registry_["setup_args"]
        keys = [setup[name] for name in ("y_key", "e_key", "position_key") if setup.get(name) is not None]
        labels = obs[list(dict.fromkeys(column for key in keys for column in as_columns(key)))]
        part = np.zeros(len(obs), dtype=np.int8)
        part[data.split.train], part[data.split.validation] = 1, 2
        digests = {
            "images": inputs,
            "labels": digest_labels(labels),
            "split": digest_labels(pd.DataFrame({"part": part})),
        }
        given = {**self.init_params_["non_kwargs"], **self.init_params_["kwargs"]}
        for name in [name for name, value in given.items() if isinstance(value, dict)]:
            given |= given.pop(name)
        numbered = [list(map(label_text, self._registered(key)["categories"])) for key in (Y_REGISTRY, E_REGISTRY)]
        how = {**self.traits.plan_kwargs, **settings.plan}
        shared = (
            digests
            | given
            | {
                "class": type(self).__name__,
                "control": setup.get("control"),
                "e_columns": "side_by_side" if has_separate_environments(self.registry_) else None,
                # The order of the labels determines their integer codes, which index the parameters that some models
                # have for each label.
                "order of labels": hashlib.sha256(repr(numbered).encode()).hexdigest(),
                **{
                    name: getattr(data, name)
                    for name in ("batch_size", "perturbations_per_batch", "neighbours", "seed")
                },
                "first_step": data.first_step,
                # A resumed run must have the number of steps of the interrupted run only if the learning rate decays,
                # because the decay depends on the number of steps.
                "length": data.max_steps if how.get("lr_decay", True) else None,
                "validate_every": settings.validate_every,
                "precision": settings.precision,
                "online_head": settings.online_head,
                "accumulate_grad_batches": settings.n_accumulated_batches,
                **{
                    name: settings.trainer_kwargs.get(name) for name in ("gradient_clip_val", "gradient_clip_algorithm")
                },
                **objective.settings,
                **how,
            }
        )
        return {name: value for name, value in shared.items() if isinstance(value, _COMPARABLE_TYPES)}

    def _store_run(self, run: TrainingRun) -> None:
        """Store the history and the results of a run that has trained the encoders.

        The new history is appended to the history of earlier runs. If the run has updated the weights of the model, the
        split, the settings and the weights of the online classifier are stored, too. The residual environment offsets
        and the mean embedding of the controls are then estimated from the new embeddings. At the end, an exception that
        had ended the run is raised.
        """
        first, history = run.plan.first_step, dict(self.history_ or {})
        for name, frame in run.history.frames(first).items():
            # Earlier values after the first step of this run are dropped: a resumed run has recorded them again, and a
            # run that diverged has lost the weights of these steps.
            earlier = history[name][history[name].index <= first] if name in history else ()
            history[name] = pd.concat([earlier, frame]) if len(earlier) else frame
        self.history_ = history
        if run.moved:
            parts = run.data.split
            self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
            self._has_other_cells, self._compared_names = False, self.adata.obs_names
            self.training_settings_ = run.settings
            self.is_trained_ = True
            self.results_ = TrainingResults()
            self._remove_decoder()
            head = {} if run.plan.head is None else run.plan.head.state_dict()
            self.online_head_ = {name: values.cpu().numpy().copy() for name, values in head.items()}
        try:
            if run.moved:
                self._estimate_residual_offsets()
                self._estimate_centers()
            if run.error is None or (isinstance(run.error, TrainingDiverged) and self.training_settings_):
                self._after_training(run.data)
        finally:
            # The exception that ended the training run is raised even if the evaluation after the run raises another
            # exception.
            if run.error is not None:
                raise run.error

    def _remove_decoder(self) -> None:
        """Remove a decoder that was trained on embeddings of earlier weights. The base class has no such decoder."""

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """Check the labels of the training cells before a run. The base class checks nothing; subclasses override it.

        Parameters
        ----------
        y, e
            Codes of perturbation and environment of the training cells, ``(N,)``.
        """

    def _without_untrained_parts(self) -> AbstractContextManager[None]:
        """Return a context manager that removes parts of the model, such as a decoder, which a run does not train.

        The parts are restored at the end. The base class removes no parts; subclasses override this method.
        """
        return nullcontext()

    def _after_training(self, data: ImageDataModule) -> None:
        """Evaluate the model after a run. The base class does no evaluation; subclasses override this method.

        Parameters
        ----------
        data
            Data module of the run.
        """


class TrainingRun:
    """One training run: Lightning's trainer with the callbacks of this package and those of the user.

    Parameters
    ----------
    plan
        Training plan, which defines the training step, the optimiser and the logging.
    data
        Data module, which draws the batches. The run has ``data.max_steps`` steps.
    settings
        Arguments of :meth:`TrainMixin.train`.
    folder
        Folder for checkpoints and for the weights with the lowest validation loss; `None` if the run saves neither.

    Raises
    ------
    ValueError
        If early stopping or ``load_best`` is requested without validation, or if Lightning's strategy trains in
        processes that do not return the weights. Both are checked before files are written.
    """

    def __init__(self, plan: TrainingPlan, data: ImageDataModule, settings: TrainSettings, folder: Path | None) -> None:
        validates = settings.validates(data)
        if (settings.early_stopping or settings.load_best) and not validates:
            msg = f"early_stopping and load_best need validation, and there is none: {_VALIDATION_REMEDY}."
            raise ValueError(msg)
        self.plan, self.data, self.settings = plan, data, plan.settings
        self.error: BaseException | None = None
        every = min(settings.validate_every or default_validation_interval(data), data.max_steps)
        self.history, self._divergence = History(), Divergence(every)
        self._best = BestWeights(folder) if settings.load_best and folder else None
        ours: list[Callback] = [self.history, self._divergence]
        if settings.early_stopping:
            ours.insert(0, EarlyStopping(settings.early_stopping_patience or _DEFAULT_PATIENCE))
        if self._best is not None:
            ours.append(self._best)
        if settings.folder:
            ours.append(LastState(folder, every, validates=validates))
        self.trainer, self.device = make_trainer(settings, ours, data.max_steps, every)

    @property
    def moved(self) -> bool:
        """Return whether the results of the run are stored in the model.

        This is the case if the run ended without an exception, or if its weights have had at least one training step.
        """
        return self.settings["steps"] > self.plan.first_step or self.error is None

    def start(self, state: ResumableCheckpoint | None) -> None:
        """Train to the end of the run, or until an exception, which is stored in the attribute ``error``.

        Afterwards, the training plan and its module have one of these weights:

        - after a divergence, the last weights with a finite loss;
        - with ``load_best``, the weights with the lowest validation loss;
        - otherwise, the weights after the last step.

        Parameters
        ----------
        state
            Checkpoint from which an interrupted run is resumed; `None` for a new run.
        """
        # A module is in evaluation mode if the model has been loaded or has embedded cells. It must be set to training
        # mode, because Lightning does not change the mode.
        self.plan.train()
        try:
            with keep_freed_memory(self.trainer.strategy.root_device):
                self.trainer.fit(self.plan, self.data, ckpt_path=state.path if state else None, weights_only=True)
        # On Ctrl-C, Lightning raises SystemExit, which would end the kernel of a notebook. SystemExit is therefore
        # replaced by KeyboardInterrupt.
        except SystemExit as error:
            interrupted = isinstance(error.__context__, KeyboardInterrupt)
            self.error = KeyboardInterrupt() if interrupted else error
        except BaseException as error:  # noqa: BLE001 - raised again after weights and history are stored
            self.error = error
        # If the process receives the signal SIGTERM, Lightning raises an exception with exit status 0, or no exception
        # after the last step. The exception is replaced by one with the exit status of a terminated process.
        if isinstance(self.error, SIGTERMException) or (self.error is None and self.trainer.received_sigterm):
            logger.warning("Training was terminated by SIGTERM after %d steps.", self.trainer.global_step)
            self.error = SystemExit(128 + signal.SIGTERM)
        steps = self.trainer.global_step
        if isinstance(self.error, TrainingDiverged):
            self.plan.load_state_dict(self._divergence.weights)
            steps = self._divergence.step
        elif self._best is not None:
            self._best.restore(self.plan)
            # All processes wait until each has read the best weights, because a temporary folder with the weights is
            # removed afterwards.
            if self.error is None:
                self.trainer.strategy.barrier()
        self.settings["steps"] = self.plan.first_step + steps


def make_trainer(
    settings: TrainSettings, ours: list[Callback], max_steps: int, every: int
) -> tuple[L.Trainer, torch.device]:
    """Create Lightning's trainer of a run, and return it with the device on which it trains.

    Parameters
    ----------
    settings
        Arguments of :meth:`TrainMixin.train`.
    ours
        Callbacks of this package, which are run after those of the user.
    max_steps
        Number of steps of the run.
    every
        Number of steps between two validations.
    """
    accelerator, devices, device = resolve_devices(settings.accelerator, settings.devices)
    given = dict(settings.trainer_kwargs)
    plugins, theirs = (as_list(given.pop(name, None) or ()) for name in ("plugins", "callbacks"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    # Lightning's default progress bar counts epochs. It is replaced, because a training run is a single epoch.
    if given.get("enable_progress_bar", True) and not any(isinstance(c, callbacks.ProgressBar) for c in theirs):
        theirs.append(ProgressBar())
    defaults: dict[str, Any] = {
        "max_epochs": -1,
        # Lightning counts this interval in batches, whereas `every` is a number of optimiser steps.
        "val_check_interval": every * settings.n_accumulated_batches,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": max(1, min(10, every)),
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": settings.folder,
    }
    try:
        trainer = L.Trainer(
            **defaults | given,
            max_steps=max_steps,
            accelerator=accelerator,
            devices=devices,
            precision=settings.precision,
            callbacks=[*theirs, *ours],
            plugins=plugins,
            # The samplers of this package already divide each batch among the distributed processes.
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        msg = (
            f"strategy={given.get('strategy', 'auto')!r} trains in processes that nothing comes back from: use "
            "devices=1 in a notebook, or strategy='ddp' in a script."
        )
        raise ValueError(msg)
    return trainer, device


def resolve_devices(accelerator: str, devices: Any, name: str = "devices") -> tuple[str, Any, torch.device]:
    """Return the accelerator and the devices that Lightning uses for the given arguments, and the first device.

    Parameters
    ----------
    accelerator, devices
        Arguments of the user, see :class:`lightning.pytorch.Trainer`.
    name
        Name of the argument ``devices``, for the error message.

    Raises
    ------
    ValueError
        If this machine lacks the accelerator or a device, or if there is no such accelerator.
    """
    try:
        found: tuple[str, Any, torch.device] = parse_device_args(accelerator, devices, return_device="torch")
    except (MisconfigurationException, ImportError, TypeError, ValueError) as error:
        names = ["cpu", *(kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available())]
        why = str(error).partition(". ")[0].rstrip(".!")
        msg = (
            f"accelerator={accelerator!r}, {name}={devices!r} cannot be used: {why}. This machine has: "
            f"{', '.join(names)}; accelerator='auto' chooses the fastest."
        )
        raise ValueError(msg) from error
    return found


def default_validation_interval(data: ImageDataModule) -> int:
    """Return the default number of training steps between two validations.

    This is a twentieth of the steps of the run, or more, so that all validations together take no more than about a
    tenth of the time of training.

    Parameters
    ----------
    data
        Data module of the run, with its number of steps, batch size and validation cells.
    """
    # Number of validations that take a tenth of the time of training. A validation cell takes about a third of the time
    # of a training cell.
    affordable = 0.1 * 3 * data.max_steps * data.batch_size / max(1, len(data.split.validation))
    return data.max_steps // int(np.clip(affordable, 1, min(20, data.max_steps)))


@contextmanager
def _checkpoint_folder(settings: TrainSettings) -> Iterator[Path | None]:
    """Yield the folder in which a run saves checkpoints and the best weights; `None` if the run saves neither.

    This is the ``checkpoint_dir`` of the user, from which partially written files of killed processes are removed.
    Without ``checkpoint_dir``, the best weights (``load_best``) are saved in a temporary folder.
    """
    if settings.folder:
        check_outside_stores(settings.folder)
        with hold_directory(settings.folder):
            for name in ("last.ckpt", "best.ckpt"):
                remove_partials(settings.folder / name)
            yield settings.folder
    elif settings.load_best:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield None
