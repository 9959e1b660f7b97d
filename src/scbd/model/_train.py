"""Training as scvi-tools users know it: split, batches, run, history."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
import scvi
import torch
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args

from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd._labels import as_columns
from scbd.data import ImageDataModule, Split
from scbd.model._arguments import checked_plan_kwargs, checked_trainer_kwargs
from scbd.model._checkpoints import check_same_run, find_state
from scbd.model._divergence import TrainingDiverged
from scbd.model._fit import prepare, steps_between_validations
from scbd.model._parts import cell_digests, choose_split, codes_of_few, split_digest, warn_of_singletons
from scbd.model._plan import TrainingPlan

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from scbd.data import ImageSource
    from scbd.model._callbacks import History

# enough cells for the statistics of channels to three digits
_STATISTICS_CELLS = 4096


class TrainingRun(NamedTuple):
    """What a run leaves, however it ended."""

    history: History
    data: ImageDataModule
    settings: dict[str, Any]
    first_step: int
    """Steps of the runs before, which it goes on from."""
    error: BaseException | None
    """What it ended with, if not with its last step."""


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
        is_trained_: bool
        train_indices: np.ndarray
        validation_indices: np.ndarray
        test_indices: np.ndarray
        training_settings_: dict[str, Any]
        registry_: dict[str, Any]
        _require: Any
        _registered: Any
        _source: Any
        _codes: Any
        to_device: Any

    def train(
        self,
        *,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        batch_size: int | None = None,
        perturbations_per_batch: int | str | None = "auto",
        neighbours: bool | Literal["auto"] = "auto",
        split: str | Split | None = None,
        train_size: float | None = None,
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
        seed: int | None = None,
        enable_progress_bar: bool = True,
        plan_kwargs: dict[str, Any] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        """Train the model; again, to go on with a fresh optimiser, and with batches that were not seen yet.

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
            By default a random split, stratified by y and e; or that of the model's earlier run on the same cells.
        train_size, validation_size
            Fractions of a random split, 0.9 and the rest by default; what they leave is the test part.
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
            Where to keep ``last.ckpt``, the state before it (``previous.ckpt``), ``history.csv`` and, with
            ``load_best``, ``best.ckpt``. Without it, an interrupted run cannot be resumed.
        ckpt_path
            Resume, optimiser included: ``"last"`` for the last state in ``checkpoint_dir`` (or the one before, if that
            cannot be read), or a checkpoint. Cells, labels and settings must be those of the run.
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
            Seed of the split, the batches and the augmentation; by default ``scvi.settings.seed``, from which the
            weights are drawn when the model is made, or 0.
        enable_progress_bar
            Show steps, rate, time left and losses.
        plan_kwargs
            Further arguments of the training plan: ``n_steps_alpha_warmup``, over which alpha rises from 0; ``lr`` and
            ``weight_decay`` may be given here, too.
        **trainer_kwargs
            Further arguments of :class:`lightning.pytorch.Trainer`. Callbacks and loggers come beside our own.

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
            If z_c has collapsed to a point, or tells no more than one; if cells are validated on that an earlier run
            was trained on.
        """
        settings = {name: value for name, value in locals().items() if name not in ("self", "trainer_kwargs")}
        self._finish(self._train(self.module, **settings, **trainer_kwargs))

    def _train(self, objective: Any, *, contrastive: bool = True, **given: Any) -> TrainingRun:
        """Train an objective: our module, or one around it; see :meth:`train`. All checks come first.

        Parameters
        ----------
        objective
            What the plan calls with each batch. Its ``settings``, if any, must not change when a run is resumed.
        contrastive
            Whether the encoders are trained: then cells need partners, and the run goes on from those before.
        **given
            All arguments of :meth:`train`.
        """
        trainer_kwargs = checked_trainer_kwargs(TrainMixin.train, given)
        plan_kwargs = checked_plan_kwargs(given["plan_kwargs"])
        rates = {name: plan_kwargs.pop(name, given[name]) for name in ("lr", "weight_decay")}
        seed = given["seed"]
        if seed is None:
            seed = scvi.settings.seed or 0
        directory = Path(given["checkpoint_dir"]) if given["checkpoint_dir"] else None
        state = find_state(given["ckpt_path"], directory)
        # a run that is resumed goes on from where it was begun
        first_step = self._steps() if contrastive else 0
        if state:
            first_step = state.settings.get("first_step", 0)
        source, y, e = self._training_inputs()
        cells = cell_digests(source, self._labels())
        sizes = {name: given[name] for name in ("train_size", "validation_size")}
        parts = self._split(given["split"], [y, e], **sizes, seed=seed, earlier=self._earlier_split(cells["images"]))
        data = self._batches(
            source,
            y,
            e,
            parts,
            **{name: given[name] for name in ("batch_size", "perturbations_per_batch", "neighbours", "preload")},
            mixed_by=codes_of_few(self.adata.obs),
            first_step=first_step,
            seed=seed,
            **self._data_settings,
        )
        max_steps = given["max_steps"]
        if max_steps is None:
            epochs = given["max_epochs"] or get_max_epochs_heuristic(len(parts.train))
            max_steps = epochs * data.steps_per_epoch
        data.max_steps = max_steps
        # what a resumed run must share with the one it goes on with
        settings = {
            "class": type(self).__name__,
            **cells,
            **split_digest(parts, len(y)),
            "n_train": len(parts.train),
            "batch_size": data.batch_size,
            "perturbations_per_batch": data.perturbations_per_batch,
            "neighbours": data.neighbours,
            "seed": seed,
            "first_step": first_step,
            **rates,
        }
        for part in (self.module, objective):
            settings |= getattr(part, "settings", {})
        settings |= self._plan_settings
        if state:
            check_same_run(state.settings, settings)
        plan_settings: dict[str, Any] = {**rates, "seed": seed, "first_step": first_step, "settings": settings}
        plan = self._plan(objective, **plan_settings | dict(self._plan_settings) | plan_kwargs)
        accelerator, devices, device = parse_device_args(given["accelerator"], given["devices"], return_device="torch")
        precision = self._precision(given["precision"], device)
        run = prepare(
            plan,
            data,
            max_steps=max_steps,
            validate_every=min(given["validate_every"] or steps_between_validations(data, max_steps), max_steps),
            accelerator=accelerator,
            devices=devices,
            precision=precision,
            directory=directory,
            state=state,
            **{name: given[name] for name in ("early_stopping", "early_stopping_patience", "enable_progress_bar")},
            load_best=given["load_best"],
            **trainer_kwargs,
        )
        self.trainer = run.trainer
        run.trainer._model = self  # type: ignore[attr-defined]  # where callbacks of scvi-tools look for it
        if given["compile"]:
            self.module.compile_blocks()
        if contrastive:
            warn_of_singletons(y[parts.train], self._registered(Y_REGISTRY)["categories"])
            self._before_training()
        self._forget_decoder()
        self._fit_statistics(source, parts.train, seed)
        error = None
        try:
            run.start()
        except BaseException as raised:  # noqa: BLE001 - raised again, once what was learned is kept
            error = raised
        self.module.eval()
        self.to_device(device)
        settings |= {"steps": first_step + run.steps, "precision": precision}
        return TrainingRun(run.history, data, settings, first_step, error)

    def _finish(self, run: TrainingRun) -> None:
        """Keep what a run of the encoders leaves, behind what it went on from."""
        earlier = {name: f[f.index <= run.first_step] for name, f in (self.history_ or {}).items()}
        new = run.history.frames(run.first_step)
        both = {name: [f[name] for f in (earlier, new) if name in f and len(f[name])] for name in earlier | new}
        self.history_ = {name: pd.concat(frames) for name, frames in both.items() if frames}
        if run.settings["steps"] > run.first_step or run.error is None:  # or the weights are those from before
            parts = run.data.split
            self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
            self.training_settings_ = run.settings
            self.is_trained_ = True
        if run.error is None or isinstance(run.error, TrainingDiverged) and self._steps():
            self._after_training(run.data)
        if run.error is not None:
            raise run.error

    def _steps(self) -> int:
        """Steps of all runs so far."""
        return getattr(self, "training_settings_", {}).get("steps", 0) if self.is_trained_ else 0

    def _labels(self) -> pd.DataFrame:
        """Columns of the perturbation and of the environment."""
        setup = self.registry_["setup_args"]
        columns = dict.fromkeys((*as_columns(setup["y_key"]), *as_columns(setup["e_key"])))
        return self.adata.obs[list(columns)]

    def _earlier_split(self, images: str) -> Split | None:
        """The split of the last run, if that was on these images."""
        if getattr(self, "training_settings_", {}).get("images") != images:
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

    def _split(self, split: str | Split | None, strata: list[np.ndarray], **how: Any) -> Split:
        return choose_split(split, self.adata.obs, strata, **how)

    def _fit_statistics(self, source: ImageSource, rows: np.ndarray, seed: int) -> None:
        """Learn the channels' statistics once, from training cells alone."""
        if self.module.preprocess.fitted:
            return
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.choice(rows, min(len(rows), _STATISTICS_CELLS), replace=False))
        blocks = np.array_split(rows, -(-len(rows) // 512))
        self.module.preprocess.fit(torch.from_numpy(source.read(block)) for block in blocks)

    def _before_training(self) -> None:
        """For a model to forget what it found of weights that are about to change."""

    def _forget_decoder(self) -> None:
        """For a model with a decoder, which is that of the embeddings as they were."""

    def _after_training(self, data: ImageDataModule) -> None:
        """For a model to look at what was learned."""
