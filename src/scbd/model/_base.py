"""What every image model shares of the scvi-tools contract: set-up, train, embed, save and load."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from scvi.data import AnnDataManager
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _MODEL_NAME_KEY, _STATE_REGISTRY_KEY
from scvi.model._utils import get_max_epochs_heuristic, parse_device_args
from scvi.model.base import BaseModelClass

from scbd._keys import E_REGISTRY, IMAGE_KEY, IMAGE_REGISTRY, Y_REGISTRY
from scbd.data import ImageDataModule, ImageField, LabelField, Split, split_by_column, stratified_split
from scbd.data.fields import as_columns, check_like_registered, image_source
from scbd.model._confounding import warn_if_confounded
from scbd.model._embedding import embed
from scbd.model._training import TrainingPlan, fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data import ImageSource

logger = logging.getLogger(__name__)

_STATISTICS_CELLS = 4096


class ImageModel(BaseModelClass):
    """Base of all models that learn from an image, a perturbation ``y`` and an environment ``e``.

    A subclass sets ``self.module`` and ``self.init_params_`` in its constructor; its module has the interface of
    :class:`~scbd.model._module.SCBDModule`.
    """

    # raised when a saved model could not be read by an older scbd
    _FORMAT: ClassVar[int] = 1
    module: Any
    init_params_: dict[str, Any]

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        y_key: str,
        e_key: str | Sequence[str],
        image_key: str = IMAGE_KEY,
        **kwargs: Any,
    ) -> None:
        """Tell the model where images, perturbation and environment are. Nothing in ``adata`` is changed but ``uns``.

        Parameters
        ----------
        adata
            Annotated cells. ``X`` is not used and may be absent.
        y_key
            Column of ``obs`` with what was done to each cell (perturbation, gene, guide, class).
        e_key
            Column of ``obs`` with where each cell was measured (well, plate, hospital); a list of columns stands for
            their cross.
        image_key
            Key of ``obsm`` with the images, ``(N, C, H, W)`` of uint8, uint16, float16 or float32, in memory or
            memory-mapped (:func:`scbd.data.open_screen`). Channel names are read from ``var["channels"]``, or from
            ``var_names``.
        **kwargs
            Used by scvi-tools when it sets up the data of a loaded model.

        Raises
        ------
        KeyError
            If a key is missing.
        TypeError, ValueError
            If the images cannot be read, hold NaN or infinity, or a label is missing or has one value only.

        Warns
        -----
        UserWarning
            If ``y`` and ``e`` are confounded, with the table.
        """
        setup_method_args = cls._get_setup_method_args(**{k: v for k, v in locals().items() if k != "__class__"})
        source_registry = kwargs.get("source_registry")
        fields: list[Any] = [ImageField(IMAGE_REGISTRY, image_key)]
        labels = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if source_registry is None:
            fields += labels
        else:
            # new cells of a loaded model: labels that are there are kept, labels that are not are not needed
            fields += [f for f in labels if all(column in adata.obs for column in f.columns)]
        manager = AnnDataManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if source_registry is None:
            warn_if_confounded(adata.obs, as_columns(y_key), as_columns(e_key))

    def train(
        self,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        batch_size: int | None = None,
        perturbations_per_batch: int | str | None = "auto",
        split: str | Split | None = None,
        train_size: float = 0.9,
        validation_size: float | None = None,
        validate_every: int | None = None,
        load_best: bool = True,
        early_stopping: bool = False,
        early_stopping_patience: int = 10,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        accelerator: str = "auto",
        devices: int | list[int] | str = "auto",
        precision: str = "32-true",
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
        split
            A :class:`~scbd.data.Split`, or a column of ``obs`` that holds ``train``, ``validation`` and ``test``.
            By default a random split, stratified by y and e.
        train_size, validation_size
            Fractions of the random split; what they leave is the test part.
        validate_every
            Steps between validations and checkpoints. By default a twentieth of the run.
        load_best
            End with the weights of the lowest validation loss rather than the last.
        early_stopping, early_stopping_patience
            Stop after so many validations without improvement.
        checkpoint_dir
            Where to keep ``last.ckpt``, ``best.ckpt`` and ``history.csv``. Without it, an interrupted run cannot be
            resumed.
        ckpt_path
            Resume, optimiser included: ``"last"`` for the last state in ``checkpoint_dir``, or a checkpoint.
        accelerator, devices, precision
            See :class:`lightning.pytorch.Trainer`; for example ``precision="bf16-mixed"``.
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
        KeyboardInterrupt
            If interrupted: after the step at hand is finished and its state written.

        Warns
        -----
        UserWarning
            If z_c has collapsed to a point.
        """
        if max_steps is not None and max_epochs is not None:
            msg = "Give max_steps or max_epochs, not both."
            raise ValueError(msg)
        if max(max_steps or 0, max_epochs or 0) < 1 and (max_steps, max_epochs) != (None, None):
            msg = f"max_steps={max_steps}, max_epochs={max_epochs}: train for at least one step."
            raise ValueError(msg)
        source, y, e = self._training_inputs()
        parts = self._split(split, y, e, train_size, validation_size, seed)
        data = ImageDataModule(
            source, y, e, parts, batch_size=batch_size, perturbations_per_batch=perturbations_per_batch, seed=seed
        )
        if max_steps is None:
            epochs = get_max_epochs_heuristic(len(parts.train)) if max_epochs is None else max_epochs
            max_steps = epochs * data.steps_per_epoch
        data.max_steps = max_steps
        self._warn_of_singletons(y[parts.train])
        self._fit_statistics(source, parts.train, seed)
        settings = {
            "class": type(self).__name__,
            "n_train": len(parts.train),
            "batch_size": data.batch_size,
            "perturbations_per_batch": data.perturbations_per_batch,
            "seed": seed,
            "alpha": getattr(self.module, "alpha", None),
            "lr": lr,
            "weight_decay": weight_decay,
        }
        plan = TrainingPlan(
            self.module,
            **{"lr": lr, "weight_decay": weight_decay, "seed": seed, "settings": settings} | (plan_kwargs or {}),
        )
        accelerator, lightning_devices, device = parse_device_args(accelerator, devices, return_device="torch")
        trainer_kwargs["precision"] = precision
        offset = len(self._history_steps())
        try:
            self.trainer, history = fit(
                plan,
                data,
                max_steps=max_steps,
                validate_every=min(validate_every or max(1, max_steps // 20), max_steps),
                accelerator=accelerator,
                devices=lightning_devices,
                checkpoint_dir=checkpoint_dir,
                ckpt_path=ckpt_path,
                early_stopping=early_stopping,
                early_stopping_patience=early_stopping_patience,
                enable_progress_bar=enable_progress_bar,
                load_best=load_best,
                **trainer_kwargs,
            )
        finally:
            self.module.eval()
        self._extend_history(history.frames(offset))
        self.train_indices, self.validation_indices, self.test_indices = parts.train, parts.validation, parts.test
        self.training_settings_ = settings | {"steps": offset + self.trainer.global_step, "precision": precision}
        self.is_trained_ = True
        self.to_device(device)
        self._after_training(data)

    def get_latent_representation(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        block: str = "c",
        representation: str = "embedding",
        batch_size: int = 512,
        out: np.ndarray | str | os.PathLike[str] | None = None,
        enable_progress_bar: bool | None = None,
    ) -> np.ndarray:
        """Embed cells, with or without labels, from known or unseen environments.

        Parameters
        ----------
        adata
            Cells with images under the key, and of the kind, the model was set up with; the training data by default.
            It need not be set up, and no label is read.
        indices
            Rows to embed, in this order; all by default. A boolean mask is one of them.
        block
            ``"c"``: the perturbation, blind to the environment; ``"s"``: the environment.
        representation
            ``"embedding"``: z, on the unit sphere; ``"intermediate"``: r, before the projection, which the paper uses
            for domain generalisation.
        batch_size
            Cells in a forward pass.
        out
            Where to write: an array of the right shape, or the path of an ``.npy`` file (memory-mapped, for what does
            not fit in memory; it appears under its name when complete).
        enable_progress_bar
            By default for more than 20,000 cells.

        Returns
        -------
        float32 ``(len(indices), D)``: ``out``, or a new array.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the images are missing or not of the kind the model was trained on, or an index is out of range.
        """
        self._check_if_trained(warn=True)
        _one_of("block", block, {"c": "perturbation", "s": "environment"})
        _one_of("representation", representation, {"embedding": "z", "intermediate": "r"})
        source = self._source(self._require(adata))
        return embed(
            self.module,
            source,
            _rows(indices, source.shape[0]),
            block=block,
            representation=representation,
            batch_size=batch_size,
            out=out,
            enable_progress_bar=enable_progress_bar,
        )

    def save(self, dir_path: str, prefix: str | None = None, overwrite: bool = False, **kwargs: Any) -> None:
        """Save the model; what was there stays until all of the new is written.

        Parameters
        ----------
        dir_path
            Directory to make, or with ``overwrite=True`` to replace files in.
        prefix
            Put before the names of the files.
        overwrite
            Whether the directory may exist.
        **kwargs
            See :meth:`scvi.model.base.BaseModelClass.save`, for example ``save_anndata=True``.

        Raises
        ------
        FileExistsError
            If the directory exists and ``overwrite`` is false.
        """
        target = Path(dir_path)
        if target.exists() and not overwrite:
            msg = f"{target} already exists: choose another directory, or pass overwrite=True."
            raise FileExistsError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.format_ = self._FORMAT
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            super().save(str(partial), prefix=prefix, overwrite=True, **kwargs)
            target.mkdir(exist_ok=True)
            for path in partial.iterdir():
                os.replace(path, target / path.name)
        finally:
            shutil.rmtree(partial)

    @classmethod
    def load(cls, dir_path: str, adata: AnnData | bool | None = None, *args: Any, **kwargs: Any) -> ImageModel:
        """Load a saved model.

        Parameters
        ----------
        dir_path
            Directory that :meth:`save` wrote.
        adata
            Cells to attach, which need images but no labels; `None` takes those saved with the model, if any;
            ``False`` attaches none.
        *args, **kwargs
            See :meth:`scvi.model.base.BaseModelClass.load`.

        Raises
        ------
        FileNotFoundError
            If nothing is saved there.
        ValueError
            If the file is truncated or foreign, of another class, or written by a newer scbd.
        """
        cls._check_saved(Path(dir_path) / f"{kwargs.get('prefix') or ''}model.pt")
        if adata is None and not (Path(dir_path) / f"{kwargs.get('prefix') or ''}adata.h5ad").exists():
            adata = False
        return super().load(dir_path, adata, *args, **kwargs)

    def get_var_names(self, legacy_mudata_format: bool = False) -> np.ndarray:
        """Variable names of the data the model was set up with."""
        return np.array(self._registered(IMAGE_REGISTRY)["var_names"], dtype=str)

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})

    @property
    def _setup(self) -> dict[str, Any]:
        return self.registry_["setup_args"]

    def _require(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        return self.adata if adata is None else adata

    def _source(self, adata: AnnData) -> ImageSource:
        """Images of a table, checked against what the model takes. Reads no pixel."""
        key = self._setup["image_key"]
        source = image_source(adata, key)
        resize = self.module.preprocess.image_size is not None
        check_like_registered(source, self._registered(IMAGE_REGISTRY), key, resize=resize)
        return source

    def _training_inputs(self) -> tuple[ImageSource, np.ndarray, np.ndarray]:
        adata = self._require(None)
        # checked again: obs may have changed since it was set up
        labels = [LabelField(Y_REGISTRY, self._setup["y_key"]), LabelField(E_REGISTRY, self._setup["e_key"])]
        for label in labels:
            label.validate_field(adata)
        y, e = (label.get_field_data(adata) for label in labels)
        return self._source(adata), y, e

    def _split(
        self, split: str | Split | None, y: np.ndarray, e: np.ndarray, train_size: float, validation_size: float | None, seed: int
    ) -> Split:
        if isinstance(split, Split):
            return split
        if isinstance(split, str):
            return split_by_column(self.adata.obs, split)
        if split is not None:
            msg = f"split must be a scbd.data.Split or a column of obs, got {type(split).__name__}."
            raise TypeError(msg)
        return stratified_split([y, e], train_size=train_size, validation_size=validation_size, seed=seed)

    def _warn_of_singletons(self, y: np.ndarray) -> None:
        codes, counts = np.unique(y, return_counts=True)
        single = codes[counts == 1]
        if single.size:
            names = [str(self._registered(Y_REGISTRY)["categories"][code]) for code in single[:5]]
            logger.warning(
                "%d perturbations have a single training cell (%s%s): such a cell has no partner and teaches z_c nothing.",
                single.size,
                ", ".join(names),
                ", …" if single.size > 5 else "",
            )

    def _fit_statistics(self, source: ImageSource, rows: np.ndarray, seed: int) -> None:
        """Learn the channels' statistics once, from training cells alone."""
        if self.module.preprocess.fitted:
            return
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.choice(rows, min(len(rows), _STATISTICS_CELLS), replace=False))
        blocks = np.array_split(rows, -(-len(rows) // 512))
        self.module.preprocess.fit(torch.from_numpy(source.read(block)) for block in blocks)

    def _history_steps(self) -> range:
        last = max((int(frame.index[-1]) for frame in (self.history_ or {}).values() if len(frame)), default=0)
        return range(last)

    def _extend_history(self, new: dict[str, Any]) -> None:
        import pandas as pd

        old = self.history_ or {}
        self.history_ = {
            name: pd.concat([old[name], new[name]]) if name in old and name in new else new.get(name, old.get(name))
            for name in old | new
        }

    def _after_training(self, data: ImageDataModule) -> None:
        """For a subclass to look at what was learned."""

    @classmethod
    def _check_saved(cls, path: Path) -> None:
        if not path.is_file():
            msg = f"There is no saved model at {path}."
            raise FileNotFoundError(msg)
        try:
            saved = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            attributes = saved["attr_dict"]
            name = attributes["registry_"][_MODEL_NAME_KEY]
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
            msg = f"{path} is no saved scbd model, or is truncated ({type(error).__name__}): save the model again."
            raise ValueError(msg) from error
        if name != cls.__name__:
            msg = f"{path} holds a {name}, not a {cls.__name__}: load it with {name}.load."
            raise ValueError(msg)
        if attributes.get("format_", 0) > cls._FORMAT:
            msg = f"{path} was saved by a newer scbd (format {attributes['format_']}, this one reads {cls._FORMAT}): upgrade scbd."
            raise ValueError(msg)


def _rows(indices: Any, n: int) -> np.ndarray | None:
    if indices is None:
        return None
    rows = np.asarray(indices)
    if rows.dtype == bool:
        if len(rows) != n:
            msg = f"The boolean indices have length {len(rows)}, there are {n} cells."
            raise ValueError(msg)
        return np.flatnonzero(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" and rows.size:
        msg = f"indices must be a list of row numbers or a boolean mask, got dtype {rows.dtype} of shape {rows.shape}."
        raise ValueError(msg)
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < -n or rows.max() >= n):
        msg = f"indices reach from {rows.min()} to {rows.max()}, there are {n} cells."
        raise ValueError(msg)
    return rows % n


def _one_of(name: str, value: str, choices: dict[str, str]) -> None:
    if value not in choices:
        known = " or ".join(f"{choice!r} ({meaning})" for choice, meaning in choices.items())
        msg = f"{name}={value!r} is not known: use {known}."
        raise ValueError(msg)
