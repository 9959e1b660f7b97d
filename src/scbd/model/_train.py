"""Training as scvi-tools users know it: split, batches, run, history."""

from __future__ import annotations

import hashlib
import logging
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import scvi
import torch
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args

from scbd._keys import E_REGISTRY, NUMBER_REGISTRY, Y_REGISTRY
from scbd._labels import as_columns, label_text
from scbd.data import ImageDataModule, Split
from scbd.model._checkpoints import check_not_beyond, check_same_run, find_state
from scbd.model._divergence import TrainingDiverged
from scbd.model._environments import is_side_by_side
from scbd.model._fit import Hardware, prepare
from scbd.model._forecast import cheaper_than
from scbd.model._of_weights import OfWeightsMixin
from scbd.model._parts import cell_digests, choose_split, codes_of_few, split_digest, warn_of_singletons
from scbd.model._plan import TrainingPlan
from scbd.model._sample import draw_sample
from scbd.model._settings import TrainSettings, takes_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from scbd.data import ImageSource
    from scbd.model._callbacks import History
    from scbd.model._contract import EmbeddingModule, Objective
    from scbd.model._online_head import OnlineHead

logger = logging.getLogger(__name__)

# settings that can be compared with those of another run
_PLAIN = (str, int, float, tuple, type(None))


class TrainingRun(NamedTuple):
    """What a run leaves, however it ended."""

    history: History
    data: ImageDataModule
    settings: dict[str, Any]
    head: OnlineHead | None
    first_step: int
    """Steps of the runs before, which it goes on from."""
    error: BaseException | None
    """What it ended with, if not with its last step."""

    @property
    def moved(self) -> bool:
        """Whether it came to a step: or the weights are those from before."""
        return self.settings["steps"] > self.first_step or self.error is None


class TrainMixin(OfWeightsMixin):
    """Gives an image model :meth:`train`."""

    # which cells meet in a batch, what a step is, and what that takes
    _batches: ClassVar[type[ImageDataModule]] = ImageDataModule
    _plan: ClassVar[type[TrainingPlan]] = TrainingPlan
    _data_settings: Mapping[str, Any] = MappingProxyType({})
    _plan_settings: Mapping[str, Any] = MappingProxyType({})
    # whether trained results were compared over seeds
    _unharmed_by_bfloat16 = False

    if TYPE_CHECKING:  # what the model brings
        module: EmbeddingModule
        _training_defaults: Mapping[str, Any]
        _train_size: float
        adata: Any
        history_: dict[str, pd.DataFrame] | None
        is_trained_: bool
        train_indices: np.ndarray
        validation_indices: np.ndarray
        test_indices: np.ndarray
        training_settings_: dict[str, Any]
        registry_: dict[str, Any]
        init_params_: dict[str, Any]
        _require: Any
        _know_cells: Any
        _encoder: Any
        _inputs: Any
        _registered: Any
        _source: Any
        _codes: Any
        _controls: Any
        _positions: Any
        _numbers: Any
        _find_centers: Any
        _remember: Any
        _head_beside: Any
        _keep_head: Any
        to_device: Any

    @takes_settings
    def train(self, **given: Any) -> None:
        """Train the model; again, to go on with a fresh optimiser, and with batches that were not seen yet.

        Parameters
        ----------
        {arguments}

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
            If interrupted: after the step at hand is finished and its state written. Weights and history are kept.

        Warns
        -----
        UserWarning
            If z_c has collapsed, or tells no more than it would then; if cells are validated on that an earlier run
            was trained on.
        """
        self._finish(self._train(self.module, TrainSettings.of(given, self._training_defaults)))

    def _train(self, objective: Objective, settings: TrainSettings, *, contrastive: bool = True) -> TrainingRun:
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
        state = find_state(settings.ckpt_path, settings.directory)
        # a run that is resumed goes on from where it was begun
        first_step = state.settings.get("first_step", 0) if state else self._steps() if contrastive else 0
        source, y, e = self._training_inputs()
        numbers = self._numbers(self.adata)
        cells = cell_digests(source, self._labels())
        data = self._data(
            source,
            y,
            e,
            numbers,
            settings,
            self._earlier_split(cells["images"], told=settings.split is not None),
            first_step,
        )
        accelerator, devices, device = parse_device_args(settings.accelerator, settings.devices, return_device="torch")
        # by default that of the run that is resumed, wherever it goes on
        begun_with = state.settings.get("precision") if state and settings.precision == "auto" else None
        precision = begun_with or self._precision(settings.precision, device)
        shared = self._shared_settings(objective, data, settings, cells | split_digest(data.split, len(y)))
        shared["precision"] = precision
        if state:
            check_same_run(state.settings, shared)
            check_not_beyond(state, data.max_steps)
        how = {**self._plan_settings, **settings.plan}
        head = self._head_beside(settings, data.seed) if contrastive else None
        plan = self._plan(objective, seed=data.seed, first_step=first_step, settings=shared, head=head, **how)
        asked, images = self.init_params_["non_kwargs"], self._inputs.image_key is not None
        cheaper = cheaper_than(asked, self._encoder, images=images) if contrastive else []
        run = prepare(plan, data, settings, state, Hardware(accelerator, devices, precision), cheaper)
        self.trainer = run.trainer
        run.trainer._model = self  # type: ignore[attr-defined]  # where callbacks of scvi-tools look for it
        if settings.compile:
            self.module.compile_blocks()
        if contrastive:
            train = data.split.train
            warn_of_singletons(y[train], self._registered(Y_REGISTRY)["categories"])
            self._before_training(y[train], e[train])
        self._fit_statistics(source, data.split.train, y, e, data.seed)
        error = None
        try:
            with self._apart(), self._forgotten() if contrastive else nullcontext():
                run.start()
        except BaseException as raised:  # noqa: BLE001 - raised again, once what was learned is kept
            error = raised
        self.module.eval()
        self.to_device(device)
        shared["steps"] = first_step + run.steps
        return TrainingRun(run.history, data, shared, head, first_step, error)

    def _data(
        self,
        source: ImageSource,
        y: np.ndarray,
        e: np.ndarray,
        numbers: np.ndarray | None,
        settings: TrainSettings,
        earlier: Split | None,
        first_step: int,
    ) -> ImageDataModule:
        """Batches of the cells that are trained on, as many as the run is long."""
        seed = (scvi.settings.seed or 0) if settings.seed is None else settings.seed
        data = self._batches(
            source,
            y,
            e,
            choose_split(self.adata.obs, [y, e], settings, seed, earlier, self._train_size),
            numbers=numbers,
            batch_size=settings.batch_size,
            perturbations_per_batch=settings.perturbations_per_batch,
            neighbours=settings.neighbours,
            preload=settings.preload,
            mixed_by=codes_of_few(self.adata.obs),
            first_step=first_step,
            seed=seed,
            **self._data_settings,
        )
        if settings.max_steps is None:
            epochs = settings.max_epochs or get_max_epochs_heuristic(len(data.split.train))
            # of several batches each, where gradients are accumulated
            of_step = (settings.trainer_kwargs or {}).get("accumulate_grad_batches") or 1
            data.max_steps = -(-epochs * data.steps_per_epoch // of_step)
        else:
            data.max_steps = settings.max_steps
        return data

    def _shared_settings(
        self, objective: Objective, data: ImageDataModule, settings: TrainSettings, cells: dict[str, str]
    ) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on with."""
        given = settings.trainer_kwargs or {}
        return {
            "class": type(self).__name__,
            **cells,
            "order of labels": self._order_of_labels(),
            "n_train": len(data.split.train),
            "batch_size": data.batch_size,
            "perturbations_per_batch": data.perturbations_per_batch,
            "neighbours": data.neighbours,
            "seed": data.seed,
            "first_step": data.first_step,
            **objective.settings,
            **self._plan_settings,
            **{name: settings.plan[name] for name in ("lr", "weight_decay", "encoder_lr") if name in settings.plan},
            "validate_every": settings.validate_every,  # as it was given: the default is that of the run's length
            "accumulate_grad_batches": given.get("accumulate_grad_batches", 1),
            **{name: given.get(name) for name in ("gradient_clip_val", "gradient_clip_algorithm")},
            "online_head": settings.online_head or None,  # runs of before there was one say nothing
            "plan": dict(settings.plan_kwargs or {}),
            "model": self._model_settings,
        }

    def _order_of_labels(self) -> str:
        """Digest of the labels as they are numbered: what a network has learned of each lies under its number."""
        numbered = [list(map(label_text, self._registered(key)["categories"])) for key in (Y_REGISTRY, E_REGISTRY)]
        return hashlib.sha256(repr(numbered).encode()).hexdigest()

    @property
    def _model_settings(self) -> dict[str, Any]:
        """Arguments of the model that are plain values, and what set-up says of control and environments."""
        given = {**self.init_params_["non_kwargs"], **self.init_params_["kwargs"]}
        given |= {"control": self.registry_["setup_args"].get("control")}
        if is_side_by_side(self.registry_):  # what there was before there was a choice goes without saying
            given |= {"e_columns": "side_by_side"}
        if numbers := self._registered(NUMBER_REGISTRY):
            given |= {"continuous_covariate_keys": ", ".join(numbers["columns"])}
        for name in [name for name, value in given.items() if isinstance(value, dict)]:
            given |= given.pop(name)
        return {name: value for name, value in given.items() if isinstance(value, _PLAIN)}

    def _finish(self, run: TrainingRun) -> None:
        """Keep what a run of the encoders leaves, behind what it went on from."""
        new = run.history.frames(run.first_step)
        earlier = {n: f[f.index <= run.first_step] if n in new else f for n, f in (self.history_ or {}).items()}
        both = {name: [f[name] for f in (earlier, new) if name in f and len(f[name])] for name in earlier | new}
        self.history_ = {name: pd.concat(frames) for name, frames in both.items() if frames}
        if run.moved:
            parts = run.data.split
            self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
            self._know_cells(self.adata, others=False)
            self.training_settings_ = run.settings
            self.is_trained_ = True
            self._forget()
            self._keep_head(run.head)
        try:
            if run.moved:
                self._find_centers()
                self._remember()
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

    def _earlier_split(self, images: str, *, told: bool) -> Split | None:
        """The split of the last run, if that was on these images."""
        trained_on = getattr(self, "training_settings_", {}).get("images")
        if trained_on != images:
            if trained_on is not None and not told:
                logger.warning(
                    "The cells are others than those of the last run, or in another order: the split is a new one, and "
                    "cells that were trained on may be validated on. Give split= to keep some out for good."
                )
            return None
        return Split(self.train_indices, self.validation_indices, self.test_indices)

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

    def _fit_statistics(self, source: ImageSource, rows: np.ndarray, y: np.ndarray, e: np.ndarray, seed: int) -> None:
        """Learn once, from training cells alone, what needs no gradient."""
        if self.module.is_fitted:
            return
        controls, positions = self._controls(self.adata), self._positions(self.adata)
        self.module.fit(draw_sample(source, rows, y, e, controls, positions, seed=seed))

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """For a model to look at codes of training cells."""

    def _apart(self) -> AbstractContextManager[None]:
        """For a model with parts that are not trained: they are no part of it while a run lasts."""
        return nullcontext()

    def _after_training(self, data: ImageDataModule) -> None:
        """For a model to look at what was learned."""
