"""Base class of all models, which saves, loads and prints a model as in scvi-tools.

The other methods of models, such as training and embedding, are inherited from mixin classes in other files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import uuid4

from anndata import AnnData
from scvi.model.base._constants import SAVE_KEYS

from scbd._shared.checks import format_count
from scbd._shared.files import check_outside_stores, explained_write, local_path
from scbd._shared.keys import E_REGISTRY, Y_REGISTRY
from scbd._shared.messages import warn_user, without_messages
from scbd.data._loading import ImageDataModule
from scbd.model._arguments import UnavailableAttribute, explain_arguments, keyword_names
from scbd.model._design import environment_column_codes
from scbd.model._interfaces import ModelTraits
from scbd.model._plan import TrainingPlan
from scbd.model._saved_models import check_saved_model, restore_attributes, to_plain_values
from scbd.model._train import TrainMixin, resolve_devices

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


def _row_number_property(name: str, what: str) -> Any:
    """Return a property of a model that holds the training, validation or test cells as row numbers of a table.

    The row numbers refer to the table that the model was trained on. Reading the property warns if a different table is
    attached to the model now, because the row numbers do not apply to the attached table.

    Parameters
    ----------
    name
        Name of the property. The row numbers are stored under the same name with a trailing underscore.
    what
        Clause for the documentation of the property that states which cells the property holds, for example
        ``"that were trained on"``.
    """

    def get(model: ImageModel) -> np.ndarray:
        if model._has_other_cells_attached():
            msg = (
                f"{name} are rows of the table that the model was trained on, and the cells attached now are others, "
                "or in another order: look the cells up by their names in that table."
            )
            warn_user(msg)
        rows: np.ndarray = getattr(model, f"{name}_")
        return rows

    def put(model: ImageModel, rows: np.ndarray) -> None:
        setattr(model, f"{name}_", rows)

    return property(get, put, doc=f"Cells {what}, as row numbers of the table that was trained on, int64 ``(N,)``.")


class ImageModel(TrainMixin):
    """Base class of all models, which learn embeddings of cells from images or features of the cells.

    For training, each cell has a perturbation ``y`` and an environment ``e``.

    The constructor of a subclass sets ``self.module``, an :class:`EmbeddingModule` (the network with its objective),
    and ``self.init_params_``, the arguments of the constructor. The docstring at the top of
    ``scbd/model/_interfaces.py`` lists further attributes and methods that a subclass may define.

    Examples
    --------
    >>> class BlindModule(scbd.model.EmbeddingModule):  # its loss is always 0, so that the encoder learns nothing
    ...     def __init__(self, preprocess, encoder):
    ...         super().__init__(preprocess)
    ...         self.content = scbd.nn.Encoder(encoder, self.preprocess.output_shape)
    ...
    ...     def forward(self, inputs, y, e, *, ramp=1.0, generator=None):
    ...         return scbd.model.Losses(0 * self.content(self.prepare(inputs, e).within).sum())
    >>> class BlindModel(scbd.model.ImageModel):
    ...     def __init__(self, adata=None, encoder="small", registry=None):
    ...         super().__init__(adata, registry)
    ...         self.init_params_ = self._get_init_params(locals())
    ...         self.module = BlindModule(self._make_preprocess(), encoder)
    >>> BlindModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> blind = BlindModel(adata)
    >>> blind.train(max_steps=2)
    >>> blind.get_latent_representation().shape
    (240, 256)
    """

    # version number of the file format of saved models; it is increased whenever an older version of scbd could not
    # read a new file
    _FORMAT: ClassVar[int] = 2
    init_params_: dict[str, Any] = UnavailableAttribute(  # type: ignore[assignment]
        "set it in the constructor, after super().__init__(adata, registry): self.init_params_ = "
        "self._get_init_params(locals())"
    )
    traits: ModelTraits = ModelTraits(ImageDataModule, TrainingPlan)
    train_indices = _row_number_property("train_indices", "that were trained on")
    validation_indices = _row_number_property("validation_indices", "that were validated on")
    test_indices = _row_number_property("test_indices", "that were neither trained nor validated on")

    # attributes and methods of scvi-tools' models that our models lack, each with advice on what to use in its place
    load_query_data = UnavailableAttribute(
        "get_latent_representation(new) embeds new cells, standardised as in training, and no weight changes. To learn "
        "from new cells, train on them and the old ones together."
    )
    prepare_query_anndata = UnavailableAttribute(
        "new cells need no preparation. get_latent_representation(new) checks their channels or features."
    )
    convert_legacy_save = UnavailableAttribute("load reads every folder that save has written.")
    setup_mudata = UnavailableAttribute("set up one modality, setup_anndata(mdata['…'], …).")
    get_normalized_expression = UnavailableAttribute(
        "there is no model of counts. Models with a decoder (SCBDModel after train_decoder, scbd.baselines.VAEModel) "
        "have reconstruct, and swap_blocks for another environment."
    )
    differential_expression = UnavailableAttribute(
        "scbd.metrics.perturbation_effects tests which perturbations move cells away from the controls."
    )
    get_elbo = UnavailableAttribute("model.history has the losses, by step.")
    view_registry = UnavailableAttribute("use view_anndata_setup, or model.registry.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of the model that are copied or pickled: all except the trainer of the last run.

        The trainer is Lightning's object for a training run. :meth:`save` does not save it either.
        """
        return {name: value for name, value in vars(self).items() if name != "trainer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled model as an independent model with a new id.

        In each process, scvi-tools registers the data manager of a model, which describes the model's table, under the
        id of the model. The data manager is therefore registered again, under the new id.
        """
        self.__dict__.update(state)
        self.id = str(uuid4())
        if self.adata_manager is not None:
            self._register_manager_for_instance(self.adata_manager)

    @explain_arguments(*keyword_names(TrainMixin.save), *keyword_names(AnnData.write_h5ad))
    def save(self, dir_path: str, prefix: str | None = None, overwrite: bool = False, **kwargs: Any) -> None:
        """Save the model to a directory.

        Existing files in the directory are replaced only after all new files have been written.

        Parameters
        ----------
        dir_path
            Directory to create. With ``overwrite=True``, it may exist, and its files are replaced.
        prefix
            Text put before the names of the files.
        overwrite
            Whether ``dir_path`` may be an existing directory.
        **kwargs
            Further arguments of :meth:`scvi.model.base.BaseModelClass.save`, for example ``save_anndata=True``.

        Raises
        ------
        FileExistsError
            If the directory exists and ``overwrite`` is false, or if it is a Zarr store.
        OSError
            If the files cannot be written, for example because the disk is full. Existing files are kept.
        """
        # reading init_params_ raises an error if a subclass has not set it: a model that is saved without the arguments
        # of its constructor could not be loaded
        _ = self.init_params_
        target = local_path(dir_path)
        if target.exists() and not (overwrite and target.is_dir()):
            what = "already exists: choose another directory, or pass overwrite=True."
            msg = f"{target} {what if target.is_dir() else 'is a file: give the path of a directory to make.'}"
            raise FileExistsError(msg)
        check_outside_stores(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.format_ = self._FORMAT
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            with explained_write(target):
                super().save(str(partial), prefix=prefix, overwrite=True, **kwargs)
            target.mkdir(exist_ok=True)
            for path in partial.iterdir():
                os.replace(path, target / path.name)
            # a file of cells that an earlier model saved in this directory does not belong to the new model
            if not kwargs.get("save_anndata"):
                (target / f"{prefix or ''}{SAVE_KEYS.ADATA_FNAME}").unlink(missing_ok=True)
        finally:
            shutil.rmtree(partial)

    def _get_user_attributes(self) -> list[tuple[str, Any]]:
        """Return the attributes of the model to save, as pairs of name and value; scvi-tools calls this method.

        Values are converted so that they can be saved without pickling, see :func:`to_plain_values`.
        """
        # reading train_indices warns if the attached table is not the training table; its value is saved nevertheless
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attributes = super()._get_user_attributes()
        return [(key, to_plain_values(value) if key.endswith("_") else value) for key, value in attributes]

    @classmethod
    @explain_arguments(*keyword_names(TrainMixin.load.__func__))
    def load(
        cls,
        dir_path: str,
        adata: AnnData | bool | None = None,
        accelerator: str = "auto",
        device: int | str = "auto",
        prefix: str | None = None,
        *,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load a saved model from its directory.

        Parameters
        ----------
        dir_path
            Directory written by :meth:`save`.
        adata
            Table of cells to attach to the model. The cells need images (or features) but no labels. `None` attaches
            the cells saved with the model, if there are any; ``False`` attaches no cells. Each label keeps the integer
            code that it had in the table that the model was set up with.
        accelerator, device, prefix
            See :meth:`scvi.model.base.BaseModelClass.load`.
        allow_pickle
            Whether to load a file that holds Python objects, for example an encoder that you wrote. Such a file can run
            any code when it is loaded, so use ``allow_pickle=True`` only for a file whose origin you trust.
        **kwargs
            Further arguments of :meth:`scvi.model.base.BaseModelClass.load`.

        Returns
        -------
        The model.

        Raises
        ------
        FileNotFoundError
            If the directory holds no saved model.
        ValueError
            If the file of the model is truncated, is not a saved scbd model, holds a model of another class, was
            written by a newer version of scbd, or holds Python objects without ``allow_pickle=True``. The error is also
            raised if the images of ``adata`` differ from the training images in data type, number of channels, or size
            (aspect ratio if the model resizes images).
        """
        saved = {
            name: local_path(dir_path) / f"{prefix or ''}{name}"
            for name in (SAVE_KEYS.MODEL_FNAME, SAVE_KEYS.ADATA_FNAME)
        }
        check_saved_model(saved[SAVE_KEYS.MODEL_FNAME], cls.__name__, cls._FORMAT, allow_pickle=allow_pickle)
        if adata is None and not saved[SAVE_KEYS.ADATA_FNAME].exists():
            adata = False
        # scvi-tools would log that the local file of the model has already been downloaded. Its warning about var_names
        # is not needed, because the check of the inputs compares the names of channels.
        resolve_devices(accelerator, device, "device")
        with without_messages("scvi.data._download", ["`var_names` for the loaded `model` does not match"]):
            model: Self = super().load(dir_path, adata, accelerator, device, prefix, **kwargs)
        if model.adata is not None:
            model._compare_with_training_cells(model.adata)
        restore_attributes(model)
        return model

    def __repr__(self) -> str:
        """Return a text of several lines on the data, the network, the training and the call to make next."""
        if not self.is_trained_:
            return self._description([("state", "not trained"), ("next", "train()")])
        lines, state = [], "trained"
        # a model that a callback of scvi-tools has marked as trained during a run has no training settings yet
        if settings := self.training_settings_:
            lines.append(("precision", settings["precision"]))
            n_steps, n_cells = format_count(settings["steps"], "step"), format_count(settings["batch_size"], "cell")
            state = f"trained for {n_steps} of {n_cells}"
        lines += [("state", state), *self._result_lines(), ("next", self.traits.next_step)]
        return self._description(lines)

    def _description(self, more: list[tuple[str, str]]) -> str:
        """Return the text of ``print(model)``: lines on the data and the network, and the lines given as ``more``."""
        cells = "no data attached" if self.adata is None else format_count(self.adata.n_obs, "cell")
        cells += " (minified)" * (self.minified_data_type is not None)
        for name, key in (("perturbations", Y_REGISTRY), ("environments", E_REGISTRY)):
            label = self._registered(key)
            apart = environment_column_codes(self.registry_) if key == E_REGISTRY else None
            if apart is not None:
                sizes = zip(label["columns"], apart.max(0) + 1, strict=True)
                cells += f", {name} side by side: " + ", ".join(f"{n:,} of {column}" for column, n in sizes)
            elif label:
                cells += f", {len(label['categories']):,} {name} ({' × '.join(label['columns'])})"
        lines = [*self._describe_inputs(), *self._summary_lines(), *more]
        return "\n".join([f"{type(self).__name__}: {cells}", *(f"  {name:<9} {text}" for name, text in lines)])

    def _describe_inputs(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` on the inputs and their preparation, as pairs of name and text."""
        preprocess, known = self.module.preprocess, self._registered_inputs
        # cells from which mean and deviation of an environment are estimated, if inputs are standardised with them
        alignment, within = self.alignment_, ""
        if preprocess.environments is not None and alignment.kinds:
            by = " and ".join(f"{name} by its {kind}" for name, kind in alignment.kinds.items())
            within = f", standardised within each {by}"
        elif preprocess.environments is not None and len(alignment.label_frequencies):
            within = f", not standardised within each {' or '.join(alignment.columns)}"
        if "features" in known:
            n, transform = len(known["features"]), getattr(self.module.content, "transform", None)
            features = f"{n:,} of {self._inputs.where}, {known['dtype']}"
            if n_dropped := len(known["columns"]) - n:
                features += f", {n_dropped:,} constant ones dropped"
            how = "" if transform is None else f", {transform.kind} → {transform.output_shape[0]}"
            return [("features", features), ("", f"→ scaled{how}{within}")]
        augmented = ", flipped and turned at random in training" * bool(preprocess.augment)
        shapes = [" × ".join(map(str, shape)) for shape in (known["image_shape"], preprocess.output_shape)]
        return [
            ("images", f"{shapes[0]} {known['dtype']} ({', '.join(known['channels'])})"),
            ("", f"→ {shapes[1]}, intensity {preprocess.intensity}{augmented}{within}"),
        ]

    def _summary_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` on the network and the settings, as pairs of name and text."""
        settings = dict(self.init_params_["non_kwargs"])
        network = encoder_name(self._encoder(settings.pop("encoder", self._encoder_name or "convolutions")))
        lines = [("network", f"{network}, {describe_n_parameters(self.module)}")]
        if settings:
            lines.append(("settings", ", ".join(f"{name}={value!r}" for name, value in settings.items())))
        return lines

    def _result_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` on the result of training, as pairs of name and text.

        A subclass overrides this method; by default, there are no such lines.
        """
        return []


def describe_n_parameters(module: nn.Module) -> str:
    """Return a text with the number of parameters of a network, for example ``"1,234 parameters"``."""
    return f"{sum(p.numel() for p in module.parameters()):,} parameters"


def encoder_name(encoder: str | nn.Module) -> str:
    """Return the name of an encoder: the given name, or the name of the class if the encoder is a torch module."""
    return encoder if isinstance(encoder, str) else type(encoder).__name__
