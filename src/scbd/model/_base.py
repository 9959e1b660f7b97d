"""What every image model shares of the scvi-tools contract: set-up, save and load; training and embedding come in."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY
from scvi.model.base import BaseModelClass
from scvi.model.base._constants import SAVE_KEYS

from scbd._keys import E_REGISTRY, IMAGE_KEY, IMAGE_REGISTRY, Y_REGISTRY
from scbd._labels import as_columns
from scbd.data import ImageField, LabelField, check_channel_names, check_like_registered, image_source
from scbd.model._confounding import warn_if_confounded
from scbd.model._embed import EmbedMixin
from scbd.model._files import check_saved_model, plain, restored
from scbd.model._manager import ScreenManager
from scbd.model._summary import encoder_name, parameters, summary
from scbd.model._train import TrainMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data import ImageSource


class ImageModel(TrainMixin, EmbedMixin, BaseModelClass):
    """Base of all models that learn from an image, a perturbation ``y`` and an environment ``e``.

    A subclass sets ``self.module``, an :class:`EmbeddingModule`, and ``self.init_params_`` in its constructor. See
    ``scbd/model/_contract.py`` for what it may say beside.

    Examples
    --------
    >>> class BlindModule(scbd.model.EmbeddingModule):  # learns nothing, and embeds by untrained weights
    ...     def __init__(self, image_shape, dtype, encoder):
    ...         super().__init__(scbd.nn.Preprocess(image_shape, dtype))
    ...         self.content = scbd.nn.Features(encoder, self.preprocess.output_shape)
    ...
    ...     def forward(self, inputs, y, e, *, ramp=1.0, generator=None):
    ...         return scbd.model.Losses(0 * self.content(self.preprocess(inputs, generator)).sum())
    >>> class BlindModel(scbd.model.ImageModel):
    ...     def __init__(self, adata=None, encoder="small", registry=None):
    ...         super().__init__(adata, registry)
    ...         self.init_params_ = self._get_init_params(locals())
    ...         self.module = BlindModule(*self._input_kind, encoder)
    >>> BlindModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> blind = BlindModel(adata)
    >>> blind.train(max_steps=2)
    >>> blind.get_latent_representation().shape
    (240, 256)
    """

    # raised when what is saved could not be read by an older scbd
    _FORMAT: ClassVar[int] = 1
    init_params_: dict[str, Any]
    _next: ClassVar[str] = "get_latent_representation(block='c')"
    # labels that the network has parameters for, one set a category: training cannot meet new ones
    _fixed_labels: ClassVar[tuple[str, ...]] = ()

    def __init__(self, adata: AnnData | None = None, registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        source = None if adata is None else self.adata_manager._source_registry
        if source is not None:
            self._keep_registry(source)

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        y_key: str | Sequence[str],
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
            Column of ``obs`` with what was done to each cell (perturbation, gene, guide, class); a list of columns
            stands for their cross.
        e_key
            Column of ``obs`` with where each cell was measured (well, plate, hospital), or a list of columns. Labels
            are text, numbers or truth values; others, such as dates, are known by their text.
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
            If the images cannot be read, hold NaN or infinity (all are looked at in memory, 64 cells elsewhere), or do
            not have the channels that ``var["channels"]`` names; or if a label is missing or has one value only.

        Warns
        -----
        UserWarning
            If ``y`` and ``e`` are confounded, with the table; if a channel shows nothing, or is a mask.
        """
        # plain text, whatever they came as: they are saved with the model
        y_key, e_key = _plain_key(y_key), _plain_key(e_key)
        setup_method_args = cls._get_setup_method_args(**{k: v for k, v in locals().items() if k != "__class__"})
        source_registry = kwargs.get("source_registry")
        fields: list[Any] = [ImageField(IMAGE_REGISTRY, image_key)]
        labels = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if source_registry is None:
            fields += labels
        else:
            # new cells of a loaded model: labels that are there are kept, labels that are not are not needed
            fields += [f for f in labels if all(column in adata.obs for column in f.columns)]
        manager = ScreenManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if source_registry is None:
            warn_if_confounded(adata.obs, as_columns(y_key), as_columns(e_key))

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
        if target.exists() and not (overwrite and target.is_dir()):
            what = "already exists: choose another directory, or pass overwrite=True."
            msg = f"{target} {what if target.is_dir() else 'is a file: give the path of a directory to make.'}"
            raise FileExistsError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.format_ = self._FORMAT
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            super().save(str(partial), prefix=prefix, overwrite=True, **kwargs)
            target.mkdir(exist_ok=True)
            for path in partial.iterdir():
                os.replace(path, target / path.name)
            if not kwargs.get("save_anndata"):  # cells of a model that was here before are not those of this one
                (target / f"{prefix or ''}{SAVE_KEYS.ADATA_FNAME}").unlink(missing_ok=True)
        finally:
            shutil.rmtree(partial)

    def _get_user_attributes(self) -> list[tuple[str, Any]]:
        """What is saved (part of scvi-tools' contract), without what would be pickled."""
        attributes = super()._get_user_attributes()
        return [(key, plain(value) if key.endswith("_") else value) for key, value in attributes]

    @classmethod
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
    ) -> ImageModel:
        """Load a saved model.

        Parameters
        ----------
        dir_path
            Directory that :meth:`save` wrote.
        adata
            Cells to attach, which need images but no labels; `None` takes those saved with the model, if any;
            ``False`` attaches none. Codes of labels stay those of the cells that the model was set up with.
        accelerator, device, prefix
            See :meth:`scvi.model.base.BaseModelClass.load`.
        allow_pickle
            Also load a file that holds Python objects, such as an encoder of your own. Such a file can run any code
            when it is loaded: do so only if you know where it comes from.
        **kwargs
            See :meth:`scvi.model.base.BaseModelClass.load`.

        Raises
        ------
        FileNotFoundError
            If nothing is saved there.
        ValueError
            If the file is truncated or foreign, of another class, written by a newer scbd, or holds Python objects; or
            if the images of ``adata`` are not of the kind the model was trained on.
        """
        saved = {
            name: Path(dir_path) / f"{prefix or ''}{name}" for name in (SAVE_KEYS.MODEL_FNAME, SAVE_KEYS.ADATA_FNAME)
        }
        check_saved_model(saved[SAVE_KEYS.MODEL_FNAME], cls.__name__, cls._FORMAT, allow_pickle=allow_pickle)
        if adata is None and not saved[SAVE_KEYS.ADATA_FNAME].exists():
            adata = False
        # scvi-tools would say of a local file that it was already downloaded
        note = logging.getLogger("scvi.data._download")
        level = note.level
        note.setLevel(logging.WARNING)
        try:
            with warnings.catch_warnings():  # of names of channels, which are looked at below
                warnings.filterwarnings("ignore", "`var_names` for the loaded `model` does not match", UserWarning)
                model = super().load(dir_path, adata, accelerator, device, prefix, **kwargs)
        finally:
            note.setLevel(level)
        if model.adata is not None:
            model._source(model.adata)
        for name, value in list(vars(model).items()):
            if name.endswith("_") and isinstance(value, dict):
                setattr(model, name, restored(value))
        return model

    @property
    def adata(self) -> Any:
        """Cells that are attached; others may be, if their images are of the kind the model was trained on.

        The model keeps the labels, and the codes of labels, that it was set up with: to embed new cells they need no
        label, and to train on them a classifier or another network with parameters for each label must know theirs.
        """
        return self._adata

    @adata.setter
    def adata(self, adata: AnnData) -> None:
        if adata is None:
            msg = "adata=None: give cells to attach."
            raise ValueError(msg)
        self._source(adata)
        setup = self.registry_[_SETUP_ARGS_KEY]
        self.setup_anndata(adata, source_registry=self.registry_, **setup)
        self._adata = adata
        self._adata_manager = self._get_most_recent_anndata_manager(adata, required=True)
        self._register_manager_for_instance(self._adata_manager)

    def view_anndata_setup(self, adata: AnnData | None = None, hide_state_registries: bool = False) -> None:
        """Print what the model, or ``adata``, was set up with.

        Raises
        ------
        ValueError
            If there is no data to show the set-up of.
        """
        super().view_anndata_setup(self._require(adata), hide_state_registries)

    def get_var_names(self, legacy_mudata_format: bool = False) -> np.ndarray:
        """Variable names of the data the model was set up with."""
        return np.array(self._registered(IMAGE_REGISTRY)["var_names"], dtype=str)

    def __repr__(self) -> str:
        """Data, what it is made of, state and the next step, for a person."""
        return summary(self)

    def _parts(self) -> list[tuple[str, str]]:
        """What the model is made of: names and values for :func:`summary`."""
        settings = dict(self.init_params_["non_kwargs"])
        network = encoder_name(settings.pop("encoder", "convolutions"))
        lines = [("network", f"{network}, {parameters(self.module)}")]
        if settings:
            lines.append(("settings", ", ".join(f"{name}={value!r}" for name, value in settings.items())))
        return lines

    def _outcome(self) -> list[tuple[str, str]]:
        """What came of training, likewise."""
        return []

    def _keep_registry(self, registry: dict[str, Any]) -> None:
        """Be the model of the cells it was first set up with, whatever is attached."""
        self.registry_ = registry
        self.summary_stats = ScreenManager._get_summary_stats_from_registry(registry)

    def _codes(self, adata: AnnData, key: str) -> np.ndarray:
        """Codes of a label as it was registered; new ones are registered where the network has no parameters for them.

        Raises
        ------
        ValueError
            If a cell has no label, all have the same, or one has a label the network does not know.
        """
        registered = self._registered(key)
        field = LabelField(key, registered["columns"])
        field.validate_field(adata)
        codes, unknown = field.codes(adata, registered["categories"])
        if unknown and key in self._fixed_labels:
            raise ValueError(field.unknown(unknown))
        registered["categories"].extend(unknown)
        return codes

    @property
    def _input_kind(self) -> tuple[tuple[int, int, int], str]:
        """Shape and dtype of what is stored of a cell: the first two arguments of every module."""
        images = self._registered(IMAGE_REGISTRY)
        return tuple(images["image_shape"]), images["dtype"]

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})

    def _require(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        return self.adata if adata is None else adata

    def _source(self, adata: AnnData) -> ImageSource:
        """Images of a table, checked against what the model takes. Reads no pixel."""
        key = self.registry_["setup_args"]["image_key"]
        source = image_source(adata, key)
        registered, resize = self._registered(IMAGE_REGISTRY), self.module.preprocess.image_size is not None
        check_like_registered(source, registered, key, resize=resize)
        check_channel_names(adata.var, registered, key)
        return source


def _plain_key(key: str | Sequence[str]) -> str | list[str]:
    columns = as_columns(key)
    return columns[0] if len(columns) == 1 else list(columns)
