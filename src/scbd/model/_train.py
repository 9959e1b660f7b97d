"""Training as scvi-tools users know it, over Lightning's own callbacks."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import signal
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lightning.pytorch as L
import numpy as np
import pandas as pd
import scvi
import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args

from scbd._anndata import E_REGISTRY, NUMBER_REGISTRY, Y_REGISTRY, as_columns, label_text
from scbd._checks import check_choice, check_count, counted
from scbd._files import local_path, remove_partials, written_whole
from scbd.data._splits import Split
from scbd.model._arguments import INSTEAD, check_names, constructor_names, explain_arguments, keyword_names
from scbd.model._cells import (
    cell_digests,
    choose_split,
    codes_of_few,
    draw_sample,
    read_header,
    split_digest,
    warn_of_singletons,
)
from scbd.model._design import is_side_by_side
from scbd.model._embed import freed_memory_kept
from scbd.model._plan import OnlineHead
from scbd.model._predict import PredictMixin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from scbd.data._loading import ImageDataModule
    from scbd.data._sources import ImageSource
    from scbd.model._contract import Objective
    from scbd.model._plan import TrainingPlan

logger = logging.getLogger(__name__)

# of networks of images
_LR = 1e-4
# those that leave the weights in float32
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
# settings that can be compared with those of another run
_PLAIN = (str, int, float, tuple, type(None))
# validations without improvement after which early stopping stops by default
_PATIENCE = 10
# remedy where there is nothing to validate on
_NO_VALIDATION = "keep validation cells (train_size=0.9, or split), and leave limit_val_batches=0 out"
# arguments of Lightning's trainer that train passes on
TRAINER_ARGUMENTS = tuple(name for name in keyword_names(L.Trainer.__init__) if name not in INSTEAD["train"])
# arguments of the plan and of the data module that the model gives them itself
_OF_PLAN = ("module", "seed", "first_step", "settings", "head")
_OF_BATCHES = ("source", "y", "e", "split", "numbers", "mixed_by", "max_steps", "first_step")
# numbers that validation logs; all others come with training steps
_OF_VALIDATION = ("validation_", "z_c_")


class TrainingDiverged(RuntimeError):
    """The loss became NaN or infinite.

    The model has the weights of the last validation whose loss was a number (or those from before the run, if there was
    none); ``model.history`` has the losses.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small")
    >>> try:
    ...     model.train(max_steps=2000, lr=0.01)
    ... except scbd.model.TrainingDiverged:  # from the weights that were good
    ...     model.train(max_steps=2000, lr=0.001)
    """


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Arguments of :meth:`TrainMixin.train`, which has their defaults and says what they mean."""

    max_steps: int | None
    max_epochs: int | None
    lr: float | None
    weight_decay: float
    batch_size: int | None
    perturbations_per_batch: int | str | None
    split: str | Split | None
    train_size: float | None
    validation_size: float | None
    validate_every: int | None
    load_best: bool
    early_stopping: bool
    early_stopping_patience: int | None
    online_head: bool
    checkpoint_dir: str | os.PathLike[str] | None
    resume: bool
    accelerator: str
    devices: int | list[int] | str
    precision: Precision
    seed: int | None
    batch_kwargs: Mapping[str, Any] | None
    plan_kwargs: Mapping[str, Any] | None
    trainer_kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
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
        check_choice("precision", self.precision, Precision)
        if self.resume and not self.checkpoint_dir:
            msg = "resume=True needs the checkpoint_dir of the run to resume."
            raise ValueError(msg)

    @property
    def folder(self) -> Path | None:
        """Where states are kept."""
        return local_path(self.checkpoint_dir) if self.checkpoint_dir else None

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments of the training plan."""
        rates = {"lr": _LR if self.lr is None else self.lr, "weight_decay": self.weight_decay}
        return rates | dict(self.plan_kwargs or {})

    @property
    def accumulated(self) -> int:
        """Number of batches per step."""
        return self.trainer_kwargs.get("accumulate_grad_batches") or 1

    def validates(self, data: ImageDataModule) -> bool:
        """Return whether the run validates: there are validation cells, and no argument turns validation off."""
        return data.validates and self.trainer_kwargs.get("limit_val_batches") != 0

    def with_validation_in_steps(self, data: ImageDataModule) -> TrainSettings:
        """Return settings whose ``validate_every`` stands for the arguments of Lightning that time validations.

        Lightning counts epochs, and takes a whole run for one, while its users mean passes over the training cells.

        Raises
        ------
        ValueError
            If several arguments time validations, one has no meaning, or the run does not validate.
        """
        further = dict(self.trainer_kwargs)
        epochs, interval = (further.pop(name, None) for name in ("check_val_every_n_epoch", "val_check_interval"))
        timed = {
            "validate_every": self.validate_every,
            "check_val_every_n_epoch": epochs,
            "val_check_interval": interval,
        }
        given = [f"{name}={value!r}" for name, value in timed.items() if value is not None]
        if len(given) > 1:
            msg = f"{' and '.join(given)} both time validations: give one of them."
            raise ValueError(msg)
        if epochs is not None:
            check_count("check_val_every_n_epoch", epochs)
            n_batches = epochs * data.steps_per_epoch
        elif isinstance(interval, float) and 0 < interval <= 1:
            n_batches = max(1, int(interval * data.steps_per_epoch))
        elif isinstance(interval, int) and interval > 0:
            n_batches = interval
        elif interval is not None:
            msg = (
                f"{given[0]}: give a number of batches, or a fraction of a pass over the training cells above 0.0 and "
                "up to 1.0; or use validate_every, a number of steps."
            )
            raise ValueError(msg)
        else:
            return replace(self, trainer_kwargs=further)
        if not self.validates(data):
            msg = f"{given[0]} needs validation, and there is none: {_NO_VALIDATION}."
            raise ValueError(msg)
        return replace(self, trainer_kwargs=further, validate_every=-(-n_batches // self.accumulated))


class TrainMixin(PredictMixin):
    """Gives an image model :meth:`train`."""

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
        weight_decay: float = 0.01,
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
        """Train the model; again, to go on with a fresh optimiser, and with batches that were not seen yet.

        Parameters
        ----------
        max_steps, max_epochs
            Length of the run, in updates or in passes over the training cells (not both). By default scvi-tools'
            heuristic: 400 epochs up to 20,000 cells, fewer beyond. With the encoder ``"small"`` 300 steps; of features
            50 steps with ``"linear"``, 200 with others.
        lr, weight_decay
            Learning rate and weight decay of AdamW. The rate is 0.0001 by default, 0.001 with ``"small"``, and for
            features 0.001 with others than ``"linear"``; it falls to 0 along half a cosine.
        batch_size
            Cells a batch; larger batches hold more pairs. By default 2,048, with ``"small"`` 512; or all training cells
            if they are fewer.
        perturbations_per_batch
            Draw P perturbations with equally many cells each; `None` shuffles plainly. By default plain shuffling
            where it gives a cell about eight partners of its perturbation, P × 8 otherwise; classifiers and
            latent-variable models shuffle, or draw environments or pairs.
        split
            A :class:`~scbd.data.Split`, or a column of ``obs`` that holds ``train``, ``validation`` and ``test``.
            By default a random split, stratified by y and e; or that of the model's earlier run on the same cells.
        train_size, validation_size
            Fractions of a random split, 0.9 and the rest by default, and all of features with ``"linear"``; what they
            leave is the test part.
        validate_every
            Steps between validations and checkpoints. By default a twentieth of the run, or more where validation
            would take more than about a tenth of the time. A validation is of whole batches of ``batch_size``, or of
            one of all validation cells if they are fewer, the same each time. Lightning's ``check_val_every_n_epoch``
            and ``val_check_interval`` may be given in its place, in passes over the training cells and in batches.
        load_best
            End with the weights of the lowest validation loss rather than the last, if the run is interrupted, too. A
            contrastive loss counts overconfidence: it may rise while perturbations are found better.
        early_stopping
            Stop when the validation loss has not improved for some validations.
        early_stopping_patience
            Number of these validations, 10 by default.
        online_head
            Train a linear head of the perturbation on r_c beside the encoder, as the paper's authors do, for
            :meth:`predict`; it changes nothing of the training. Classifiers have a head already, and get no other.
        checkpoint_dir
            Where to keep ``last.ckpt``, written with each validation, and with ``load_best`` ``best.ckpt``. A run that
            is killed loses the steps since then.
        resume
            Go on from the ``last.ckpt`` in ``checkpoint_dir``, if there is one, optimiser included: to the weights of a
            run that was never interrupted. Cells, labels and settings must be those of the run.
        accelerator, devices
            See :class:`lightning.pytorch.Trainer`.
        precision
            ``"32-true"``, or ``"bf16-mixed"``, which computes the encoders in bfloat16 and the losses in float32
            (``"16-mixed"``: in float16); weights and embeddings are float32.
        seed
            Seed of the split, the batches and the augmentation; by default ``scvi.settings.seed``, from which the
            weights are drawn when the model is made, or 0.
        batch_kwargs
            Further arguments of :class:`scbd.data.ImageDataModule`: ``preload="device"`` puts all images on the device
            before training; ``neighbours`` says whether rows are drawn in stretches.
        plan_kwargs
            Further arguments of :class:`scbd.model.TrainingPlan`: ``encoder_lr``, ``lr_decay``,
            ``n_steps_alpha_warmup``.
        **trainer_kwargs
            Further arguments of :class:`lightning.pytorch.Trainer`, such as ``enable_progress_bar``,
            ``gradient_clip_val``, ``callbacks`` (beside our own) or ``logger``.

        Raises
        ------
        TypeError
            If there is no such argument.
        ValueError
            If the settings do not fit together or the data; before any work is done.
        FileExistsError
            If ``checkpoint_dir`` holds an earlier run that is not resumed.
        scbd.model.TrainingDiverged
            If the loss became NaN or infinite. The model keeps the last weights that were good.
        KeyboardInterrupt
            If interrupted. Weights and history are kept; ``last.ckpt`` is that of the last validation.
        SystemExit
            With code 143, if the process receives SIGTERM while it trains. The same is kept.

        Warns
        -----
        UserWarning
            If z_c has collapsed, or has learned no more than it would then, and does not tell means of perturbations
            apart either; if it has learned training cells by heart; if cells are validated on that an earlier run was
            trained on.
        """
        given = dict(locals())
        del given["self"]
        settings, defaults = TrainSettings(**given), dict(self._training_defaults)
        leave = {"batch_size"} if max_epochs is None else {"batch_size", "max_steps"}  # of the first, see _data
        unset = {n: value for n, value in defaults.items() if n not in leave and getattr(settings, n) is None}
        self._finish(self._fit(self.module, replace(settings, **unset)))

    def _train_settings(self, **given: Any) -> TrainSettings:
        """Arguments of :meth:`train`, with its defaults."""
        bound = inspect.signature(self.train).bind(**given)
        bound.apply_defaults()
        return TrainSettings(**bound.arguments)

    def _fit(self, objective: Objective, settings: TrainSettings, *, contrastive: bool = True) -> TrainingRun:
        """Train an objective: our module, or one around it. All checks come first.

        Parameters
        ----------
        objective
            What the plan calls with each batch.
        settings
            How.
        contrastive
            Whether the encoders are trained: then cells need partners, and the run goes on from those before.
        """
        self._check_further_arguments(settings)
        adata = self._require(None)
        state = find_state(settings.folder, resume=settings.resume)
        # a run that is resumed goes on from where it was begun
        first_step = state.settings["first_step"] if state else self._steps() if contrastive else 0
        source, y, e = self._source(adata), self._codes(adata, Y_REGISTRY), self._codes(adata, E_REGISTRY)
        cells = cell_digests(source, self._labels())
        data = self._data(source, y, e, settings, first_step, cells["images"])
        settings = settings.with_validation_in_steps(data)
        train = data.split.train
        shared = cells | {"split": split_digest(data.split, len(y))}
        shared |= self._shared_settings(objective, data, settings)
        if state:
            check_resumable(state, shared, data.max_steps)
        head = self._new_head(settings, data.seed) if contrastive and settings.online_head else None
        how = {**self.traits.plan_kwargs, **settings.plan}
        plan = self.traits.plan(objective, seed=data.seed, first_step=first_step, settings=shared, head=head, **how)
        with _quiet_lightning(), _folder(settings) as folder:
            run = TrainingRun(plan, data, settings, folder)
            self.trainer = run.trainer
            run.trainer._model = self  # type: ignore[attr-defined]  # where callbacks of scvi-tools look for it
            if contrastive:
                warn_of_singletons(y[train], self._registered(Y_REGISTRY)["categories"])
                self._before_training(y[train], e[train])
            known = self.module.preprocess.environments is not None
            reference = self._reference(adata, source, train) if known else None
            if not self.module.is_fitted:
                controls, positions = self._controls(adata), self._positions(adata)
                sample = draw_sample(source, train, y, e, controls, positions, seed=data.seed)
                self.module.fit(sample._replace(reference=reference))
            elif reference is not None:
                self.module.learn_environments(reference)
            if contrastive:
                self._tell(data, plan)
            with self._apart(), self._forgotten() if contrastive else nullcontext():
                run.start(state)
        self.module.eval()
        self.to_device(run.device)
        return run

    def _check_further_arguments(self, settings: TrainSettings) -> None:
        """Raise ``TypeError`` for names in ``plan_kwargs`` and ``batch_kwargs`` that their classes do not take."""
        traits, of_train = self.traits, keyword_names(type(self).train)
        for name, cls, own in (
            ("plan_kwargs", traits.plan, _OF_PLAN),
            ("batch_kwargs", traits.batches, (*_OF_BATCHES, *of_train, *traits.batch_kwargs)),
        ):
            known = [one for one in constructor_names(cls) if one not in own]
            instead = {one: f"give it to train itself, train({one}=…)." for one in of_train} | INSTEAD[name]
            check_names(getattr(settings, name) or (), known, name, instead)

    def _data(
        self, source: ImageSource, y: np.ndarray, e: np.ndarray, settings: TrainSettings, first_step: int, images: str
    ) -> ImageDataModule:
        """Batches of the cells that are trained on, as many as the run is long; ``images`` is their digest."""
        seed = (scvi.settings.seed or 0) if settings.seed is None else settings.seed
        split = choose_split(
            self.adata.obs,
            [y, e],
            split=settings.split,
            train_size=settings.train_size,
            validation_size=settings.validation_size,
            default=self._train_size,
            seed=seed,
            earlier=self._earlier_split(images, given=settings.split is not None),
        )
        batch_size, suits = settings.batch_size, self._training_defaults.get("batch_size")
        if batch_size is None and suits is not None:
            batch_size = min(suits, len(split.train))
        data = self.traits.batches(
            source,
            y,
            e,
            split,
            numbers=self._numbers(self.adata),
            batch_size=batch_size,
            perturbations_per_batch=settings.perturbations_per_batch,
            mixed_by=codes_of_few(self.adata.obs),
            first_step=first_step,
            seed=seed,
            **self.traits.batch_kwargs,
            **(settings.batch_kwargs or {}),
        )
        if settings.max_steps is None:
            epochs = settings.max_epochs or get_max_epochs_heuristic(len(split.train))
            data.max_steps = -(-epochs * data.steps_per_epoch // settings.accumulated)
        else:
            data.max_steps = settings.max_steps
        return data

    @rank_zero_only
    def _tell(self, data: ImageDataModule, plan: TrainingPlan) -> None:
        """Log, in one table, what was asked for and what was decided."""
        split = data.split
        parts = {"to train on": split.train, "for validation": split.validation, "held out": split.test}
        lines = [
            ("training", f"{counted(data.max_steps, 'step')} of {counted(data.batch_size, 'cell')}, lr {plan.lr:g}"),
            ("split", ", ".join(f"{counted(len(rows), 'cell')} {what}" for what, rows in parts.items())),
        ]
        logger.info("%s", self._described(lines))

    def _new_head(self, settings: TrainSettings, seed: int) -> OnlineHead | None:
        """What learns beside the encoder, where no head is part of the objective: it goes on from where it is."""
        if self._own_head is not None:
            return None
        return OnlineHead(
            self.module.network("c"),
            len(self._registered(Y_REGISTRY)["categories"]),
            lr=settings.plan["lr"],
            weight_decay=settings.plan["weight_decay"],
            seed=seed,
            weights=getattr(self, "online_head_", {}),
        )

    def _shared_settings(self, objective: Objective, data: ImageDataModule, settings: TrainSettings) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on with, and what the model remembers of it."""
        given = {**self.init_params_["non_kwargs"], **self.init_params_["kwargs"]}
        for name in [name for name, value in given.items() if isinstance(value, dict)]:
            given |= given.pop(name)
        numbered = [list(map(label_text, self._registered(key)["categories"])) for key in (Y_REGISTRY, E_REGISTRY)]
        shared = given | {
            "class": type(self).__name__,
            "control": self.registry_["setup_args"].get("control"),
            "e_columns": "side_by_side" if is_side_by_side(self.registry_) else None,
            "continuous_covariate_keys": ", ".join(self._registered(NUMBER_REGISTRY).get("columns", [])),
            # what a network has learned of each label lies under its number
            "order of labels": hashlib.sha256(repr(numbered).encode()).hexdigest(),
            **{name: getattr(data, name) for name in ("batch_size", "perturbations_per_batch", "neighbours", "seed")},
            "first_step": data.first_step,
            # rates fall towards the end
            "length": data.max_steps if {**self.traits.plan_kwargs, **settings.plan}.get("lr_decay", True) else None,
            "validate_every": settings.validate_every,
            "precision": settings.precision,
            "online_head": settings.online_head,
            "accumulate_grad_batches": settings.accumulated,
            **{name: settings.trainer_kwargs.get(name) for name in ("gradient_clip_val", "gradient_clip_algorithm")},
            **objective.settings,
            **self.traits.plan_kwargs,
            **settings.plan,
        }
        return {name: value for name, value in shared.items() if isinstance(value, _PLAIN)}

    def _finish(self, run: TrainingRun) -> None:
        """Keep what a run of the encoders leaves, behind what it went on from."""
        new, first = run.history.frames(run.plan.first_step), run.plan.first_step
        earlier = {n: f[f.index <= first] if n in new else f for n, f in (self.history_ or {}).items()}
        both = {name: [f[name] for f in (earlier, new) if name in f and len(f[name])] for name in earlier | new}
        self.history_ = {name: pd.concat(frames) for name, frames in both.items() if frames}
        if run.moved:
            parts = run.data.split
            self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
            self._know_cells(self.adata, others=False)
            self.training_settings_ = run.settings
            self.is_trained_ = True
            self._forget()
            head = {} if run.plan.head is None else run.plan.head.state_dict()
            self.online_head_ = {name: values.cpu().numpy().copy() for name, values in head.items()}
        try:
            if run.moved:
                self._learn_leftover()
                self._find_centers()
            if run.error is None or isinstance(run.error, TrainingDiverged) and self._steps():
                self._after_training(run.data)
        finally:  # whatever else goes wrong with cells that a run failed at
            if run.error is not None:
                raise run.error

    def _steps(self) -> int:
        """Steps of all runs so far."""
        return getattr(self, "training_settings_", {}).get("steps", 0) if self.is_trained_ else 0

    def _labels(self) -> pd.DataFrame:
        """Columns of the perturbation, of environments, and of the position."""
        setup = self.registry_["setup_args"]
        names = ("y_key", "e_key", "position_key", "continuous_covariate_keys")
        keys = [setup[name] for name in names if setup.get(name) is not None]
        return self.adata.obs[list(dict.fromkeys(column for key in keys for column in as_columns(key)))]

    def _earlier_split(self, images: str, *, given: bool) -> Split | None:
        """The split of the last run, if that was on these images."""
        trained_on = getattr(self, "training_settings_", {}).get("images")
        if trained_on == images:
            return Split(self.train_indices, self.validation_indices, self.test_indices)
        if trained_on is not None and not given:
            logger.warning(
                "The cells are others than those of the last run, or in another order: the split is a new one, and "
                "cells that were trained on may be validated on. Give split= to keep some out for good."
            )
        return None

    def _forget(self) -> None:
        """Nothing was found of these weights yet."""
        for name, kind in self.traits.findings.items():
            setattr(self, name, kind())

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        """While weights change, callbacks save a model of which nothing was found; then it is remembered again."""
        kept = {name: getattr(self, name) for name in self.traits.findings if hasattr(self, name)}
        for name in kept:
            setattr(self, name, self.traits.findings[name]())
        try:
            yield
        finally:
            for name, found in kept.items():
                setattr(self, name, found)

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """For a model to look at codes of training cells."""

    def _apart(self) -> AbstractContextManager[None]:
        """For a model with parts that are not trained: they are no part of it while a run lasts."""
        return nullcontext()

    def _after_training(self, data: ImageDataModule) -> None:
        """For a model to look at what was learned."""


class TrainingRun:
    """A run of a plan over Lightning's trainer, with our callbacks beside those of the user.

    Parameters
    ----------
    plan
        What a step is.
    data
        Batches, of which ``max_steps`` are trained on.
    settings
        How the run goes.
    folder
        Where states and best weights are kept.

    Raises
    ------
    ValueError
        If a setting does not fit; before anything is written.
    """

    def __init__(self, plan: TrainingPlan, data: ImageDataModule, settings: TrainSettings, folder: Path | None) -> None:
        validates = settings.validates(data)
        if (settings.early_stopping or settings.load_best) and not validates:
            msg = f"early_stopping and load_best need validation, and there is none: {_NO_VALIDATION}."
            raise ValueError(msg)
        accelerator, devices, self.device = parse_device_args(
            settings.accelerator, settings.devices, return_device="torch"
        )
        self.plan, self.data, self.settings = plan, data, plan.settings
        self.error: BaseException | None = None
        every = min(settings.validate_every or steps_between_validations(data), data.max_steps)
        self.history, self._divergence = History(), Divergence(every)
        self._best = BestWeights(folder) if settings.load_best and folder else None
        given = dict(settings.trainer_kwargs)
        plugins = _several(given.pop("plugins", None))
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(WholeFiles())
        theirs = _several(given.pop("callbacks", None))
        shown = given.get("enable_progress_bar", True) and not any(isinstance(c, callbacks.ProgressBar) for c in theirs)
        ours = [
            callbacks.TQDMProgressBar() if shown else None,  # the default names epochs, of which there is one
            EarlyStopping(settings.early_stopping_patience or _PATIENCE) if settings.early_stopping else None,
            self.history,
            self._divergence,
            self._best,
            LastState(folder, every, validates=validates) if settings.folder else None,
        ]
        defaults = {
            "max_epochs": -1,
            "val_check_interval": every * settings.accumulated,  # counted in batches
            "num_sanity_val_steps": 0,
            "log_every_n_steps": max(1, min(10, every)),
            "enable_model_summary": False,
            "logger": False,
            "default_root_dir": settings.folder,
        }
        self.trainer = L.Trainer(
            **defaults | given,
            max_steps=data.max_steps,
            accelerator=accelerator,
            devices=devices,
            precision=settings.precision,
            callbacks=[*theirs, *filter(None, ours)],
            plugins=plugins,
            use_distributed_sampler=False,  # ours know their rank
        )
        if isinstance(self.trainer.strategy.launcher, _MultiProcessingLauncher):
            msg = (
                f"strategy={given.get('strategy', 'auto')!r} trains in processes that nothing comes back from: use "
                "devices=1 in a notebook, or strategy='ddp' in a script."
            )
            raise ValueError(msg)

    @property
    def moved(self) -> bool:
        """Whether it came to a step: or the weights are those from before."""
        return self.settings["steps"] > self.plan.first_step or self.error is None

    def start(self, state: State | None) -> None:
        """Train, and keep an exception in ``error`` rather than raise it.

        The plan ends with the last weights; with the best, if it keeps them; or after a divergence with the last good
        ones.
        """
        # a model that was embedded from, or loaded, is in evaluation mode, and Lightning keeps the mode it finds
        self.plan.train()
        try:
            with freed_memory_kept(self.trainer.strategy.root_device):
                self.trainer.fit(self.plan, self.data, ckpt_path=state.path if state else None, weights_only=True)
        except SystemExit as error:  # Lightning's answer to Ctrl-C; a notebook must survive it
            interrupted = isinstance(error.__context__, KeyboardInterrupt)
            self.error = KeyboardInterrupt() if interrupted else error
        except BaseException as error:  # noqa: BLE001 - raised again, once what was learned is kept
            self.error = error
        # Lightning raises an exception with exit status 0, and after the last step none
        if isinstance(self.error, SIGTERMException) or (self.error is None and self.trainer.received_sigterm):
            logger.warning("Training was terminated by SIGTERM after %d steps.", self.trainer.global_step)
            self.error = SystemExit(128 + signal.SIGTERM)
        steps = self.trainer.global_step
        if isinstance(self.error, TrainingDiverged):
            self.plan.load_state_dict(self._divergence.weights)
            steps = self._divergence.step
        elif self._best is not None:
            self._best.restore(self.plan)
            if self.error is None:  # all processes have read them
                self.trainer.strategy.barrier()
        self.settings["steps"] = self.plan.first_step + steps


class History(Checkpoint):
    """Every logged number by step. It is part of each checkpoint, whose step it therefore ends at.

    A checkpoint to Lightning, so that it comes behind all callbacks that log.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep what a step logged, every so many steps."""
        step_ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step_ends and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._keep(trainer, validation=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what validation logged."""
        self._keep(trainer, validation=True)

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._rows = state_dict["rows"]

    def frames(self, offset: int = 0, prefix: str = "") -> dict[str, pd.DataFrame]:
        """The shape of ``history_`` in scvi-tools: one frame a metric, indexed by step."""
        rows, frames = sorted(self._rows.items()), {}
        for name in dict.fromkeys(name for _, row in rows for name in row):
            values = {step + offset: row[name] for step, row in rows if name in row}
            frames[prefix + name] = pd.DataFrame({prefix + name: values}).rename_axis("step")
        return frames

    def _keep(self, trainer: L.Trainer, *, validation: bool) -> None:
        row = self._rows.setdefault(trainer.global_step, {})
        for name, value in trainer.callback_metrics.items():
            if name.startswith(_OF_VALIDATION) == validation:
                row[name] = float(value)


class Divergence(Checkpoint):
    """Keep the last weights that were good, and stop at a loss that is no number.

    Good are weights whose validation loss was finite; where nothing is validated, weights whose training loss was.
    Those just before a loss that is none are not trusted.

    Parameters
    ----------
    every
        Steps between weights that are kept where nothing is validated.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._bad = torch.zeros((), dtype=torch.int64)  # losses in a row; where they are, since to ask waits for them
        self.weights: dict[str, Tensor] = {}
        self.step = 0
        """Of these weights."""

    def on_train_start(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Keep the weights that a run starts from."""
        self._bad = self._bad.to(plan.device)
        self._keep(trainer, plan)

    def on_before_backward(self, trainer: L.Trainer, plan: TrainingPlan, loss: Tensor) -> None:  # type: ignore[override]
        """Count, and keep weights that this loss shows to be good."""
        self._bad = torch.where(loss.isfinite(), torch.zeros_like(self._bad), self._bad + 1)
        if trainer.global_step % self._every == 0 and not any(trainer.num_val_batches) and not int(self._bad):
            self._keep(trainer, plan)

    def on_train_batch_end(self, trainer: L.Trainer, plan: TrainingPlan, *args: Any) -> None:  # type: ignore[override]
        """Stop if more losses than the plan tolerates are none; all processes do, if one has to."""
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            bad = int(trainer.strategy.reduce(self._bad, reduce_op="max"))
            self._check(bad <= plan.tolerated_losses, "training loss", trainer)

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Keep the weights, if they were found good."""
        loss = trainer.callback_metrics.get("validation_loss", torch.zeros(()))
        self._check(bool(loss.isfinite()), "validation loss", trainer)
        self._keep(trainer, plan)

    def on_train_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Look at what the last step made of the weights, which no loss has shown."""
        finite = [value.isfinite().all() for value in plan.state_dict().values()]
        self._check(bool(torch.stack(finite).all()), "weights", trainer)

    def _keep(self, trainer: L.Trainer, plan: TrainingPlan) -> None:
        self.weights = {name: value.detach().clone() for name, value in plan.state_dict().items()}
        self.step = trainer.global_step

    def _check(self, good: bool, what: str, trainer: L.Trainer) -> None:
        if not good:
            group = trainer.optimizers[0].param_groups[0]
            lr = group.get("initial_lr", group["lr"])  # what was asked for, however far it has fallen
            msg = (
                f"NaN or infinity in the {what} by step {trainer.global_step:,} (lr {lr:g}, precision "
                f"{trainer.precision}): lower lr, set gradient_clip_val=1.0, or look for extreme values of the inputs. "
                f"The model has the weights of step {self.step:,}."
            )
            raise TrainingDiverged(msg)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's early stopping; a run that had stopped does not go on when it is resumed."""

    def __init__(self, patience: int) -> None:
        super().__init__("validation_loss", patience=patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop at once, if it is over."""
        trainer.should_stop = self.wait_count >= self.patience


class BestWeights(ModelCheckpoint):
    """``best.ckpt``: the weights of the lowest validation loss, from where the plan's own objective has begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            "best",
            monitor="validation_loss",
            save_weights_only=True,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Not before: a penalty that sets in late raises the loss, and the weights kept would be without it."""
        if plan.first_step + trainer.global_step > plan.preliminary_steps:
            super().on_validation_end(trainer, plan)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, wherever the folder lies now."""
        path, score = os.path.join(str(self.dirpath), "best.ckpt"), state_dict["best_model_score"]
        if score is not None and os.path.isfile(path):
            self.best_model_path = self.kth_best_model_path = path
            self.best_model_score = self.kth_value = score
            self.best_k_models = {path: score}

    def restore(self, plan: L.LightningModule) -> None:
        """Give the plan the best weights, if there was a validation."""
        if self.best_model_path:
            saved = torch.load(self.best_model_path, map_location=plan.device, weights_only=True)
            plan.load_state_dict(saved["state_dict"])


class LastState(ModelCheckpoint):
    """``last.ckpt``: the state a run can be resumed from, with each validation, or else every so many steps.

    Not ``save_on_exception``, which would put the middle of a step, or weights that diverged, in its place.
    """

    def __init__(self, folder: Path | None, every: int, *, validates: bool) -> None:
        super().__init__(
            folder,
            "last",
            every_n_train_steps=None if validates else every,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Not within a step, whose gradients are in no state."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, plan, outputs, batch, batch_idx)


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


class State(NamedTuple):
    """Where a run goes on from."""

    path: Path
    step: int
    """Updates made, since the run began."""
    settings: dict[str, Any]
    """What the run that goes on must share."""


def find_state(folder: Path | None, *, resume: bool) -> State | None:
    """The state to resume from, read through; `None` for a run that begins.

    Raises
    ------
    FileExistsError
        If a run is to begin where the state of another is.
    ValueError
        If it cannot be read.
    """
    path = folder / "last.ckpt" if folder else None
    if path is None or not path.is_file():
        return None
    if not resume:
        msg = f"{folder} holds the state of an earlier run: go on with it (resume=True), or choose another."
        raise FileExistsError(msg)
    return State(path, *read_header(path, lambda saved: (saved["global_step"], saved["scbd_settings"]), "checkpoint"))


def check_resumable(state: State, settings: dict[str, Any], max_steps: int) -> None:
    """Raise ``ValueError`` if a state is of other cells or settings, or further than the run should end."""
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


def steps_between_validations(data: ImageDataModule) -> int:
    """Twenty validations a run, fewer where they would take more than a tenth of it."""
    # a cell that is not learned from costs about a third
    affordable = 0.1 * 3 * data.max_steps * data.batch_size / max(1, len(data.split.validation))
    return data.max_steps // int(np.clip(affordable, 1, min(20, data.max_steps)))


def _several(given: Any) -> list[Any]:
    """One, several or none, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


@contextmanager
def _folder(settings: TrainSettings) -> Iterator[Path | None]:
    """Where checkpoints are written, without what killed processes left; for best weights alone, a temporary one."""
    if settings.folder:
        for name in ("last.ckpt", "best.ckpt"):
            remove_partials(settings.folder / name)
        yield settings.folder
    elif settings.load_best:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield None


# what Lightning says of choices that are deliberate here
_EXPECTED = (
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The dirpath has changed.*",
    ".*available but not used.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Total length of `.*` across ranks is zero.*",
    ".*treespec, LeafSpec.*",
    ".*in eval mode at the start of training.*",  # blocks that a decoder is trained on
)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Neither Lightning's notes on the hardware and on other products, nor its warnings of what is deliberate."""
    notes = logging.getLogger("lightning.pytorch")
    level = notes.level
    with warnings.catch_warnings():
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message=message)
        notes.setLevel(logging.WARNING)
        try:
            yield
        finally:
            notes.setLevel(level)
