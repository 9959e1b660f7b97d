"""The ``setup_anndata`` method of all models, and the access to inputs and labels of the attached cells."""

from __future__ import annotations

import inspect
import logging
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.data._constants import (
    _ADATA_MINIFY_TYPE_UNS_KEY,
    _FIELD_REGISTRIES_KEY,
    _SETUP_ARGS_KEY,
    _STATE_REGISTRY_KEY,
)
from scvi.data.fields import StringUnsField
from scvi.model.base import BaseMinifiedModeModelClass

from scbd._shared.keys import (
    COVARIATE_REGISTRY,
    E_REGISTRY,
    FEATURE_REGISTRY,
    IMAGE_REGISTRY,
    POSITION_REGISTRY,
    Y_REGISTRY,
)
from scbd._shared.labels import (
    as_columns,
    check_anndata,
    check_control_labels,
    control_label_texts,
    find_likely_controls,
    label_text,
)
from scbd.data._channels import check_channel_names, check_images_match_registered
from scbd.data._fields import FeatureField, ImageField, LabelField, NumberField, match_features
from scbd.data._input_location import InputLocation
from scbd.model._arguments import (
    REPLACEMENTS,
    UnavailableAttribute,
    check_argument_names,
    explain_arguments,
    keyword_names,
)
from scbd.model._design import (
    ExperimentalDesign,
    add_inferred_environments,
    check_covariate_keys,
    check_design,
    check_e_columns,
    check_inferred_column,
    control_mask,
    match_control_labels,
)
from scbd.model._minified import (
    StoredEmbeddings,
    digest_of_inputs,
    is_minified,
    missing_inputs_message,
    stored_embeddings,
)
from scbd.model._training_cells import TRAIN_SIZE, cell_digests
from scbd.nn._encoders import IdentityLinear
from scbd.nn._feature_scaling import FeatureScaling
from scbd.nn._image_preprocessing import Preprocess
from scbd.nn._input_transform import InputTransform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from anndata import AnnData
    from torch import nn

    from scbd.data._sources import ImageSource
    from scbd.model._design import EColumns
    from scbd.model._interfaces import EmbeddingModule, ModelTraits
    from scbd.nn._input_transform import Whitening

    WhiteningChoice = Whitening | Literal["auto"] | None

logger = logging.getLogger(__name__)

# minimum number of rows per feature for which encoder="auto" is "mlp", which has hidden layers, and not "linear"
_MIN_ROWS_PER_FEATURE_FOR_MLP = 10
# default dimension of the embedding of a linear encoder; a large one costs little time
_MAX_LINEAR_LATENT = 300
# default whitening of the features before each encoder
_DEFAULT_WHITENING: dict[str | nn.Module, Whitening] = {"linear": "plda", "mlp": "within"}
# settings for images only, and settings for features only, with their defaults
_IMAGE_SETTINGS: dict[str, Any] = {"image_size": None, "intensity": "auto"}
_FEATURE_SETTINGS: dict[str, Any] = {"clip": 20.0}
# default arguments of train: for features with a linear encoder, which starts as the identity and needs few steps; for
# features with other encoders; for images with the encoder "small"
_LINEAR_TRAIN_DEFAULTS = {"max_steps": 50, "lr": 1e-4}
_MLP_TRAIN_DEFAULTS = {"max_steps": 200, "lr": 1e-3}
_SMALL_TRAIN_DEFAULTS = {"max_steps": 300, "lr": 1e-3, "batch_size": 512}


class ScreenManager(AnnDataManager):
    """Data manager of scvi-tools that returns labels as codes, as scvi-tools' own models do.

    The codes are computed whenever they are requested and are not stored in ``obs``. Codes therefore cannot become
    outdated when a user changes labels or reorders categories.
    """

    def get_from_registry(self, registry_key: str) -> Any:
        """Return the registered data of a field for the attached cells.

        Labels are returned as codes, int64 ``(N, 1)``; several columns are crossed to one label. Continuous covariates
        are returned as numbers, float64 ``(N, K)``. All other fields are returned as scvi-tools does.

        Raises
        ------
        ValueError
            If a cell has a label that was not registered, or a number is missing.
        """
        field = next(field for field in self.fields if field.registry_key == registry_key)
        if isinstance(field, NumberField):
            return field.get_field_data(self.adata)
        if not isinstance(field, LabelField):
            return super().get_from_registry(registry_key)
        codes, unknown = field.codes(self.adata, self.get_state_registry(registry_key)["categories"])
        if unknown:
            raise ValueError(field.unknown(unknown))
        column: np.ndarray = codes[:, None]
        return column


class SetupMixin(BaseMinifiedModeModelClass):
    """Mixin that adds :meth:`setup_anndata` and the attached cells, ``adata``, to a model."""

    module: EmbeddingModule = UnavailableAttribute(  # type: ignore[assignment]
        "set it in the constructor, to the EmbeddingModule to train: self.module = …"
    )
    traits: ModelTraits
    # whether the attached cells differ from the training cells, and the names of the cells when this was determined
    _has_other_cells = False
    _compared_names: pd.Index | None = None

    def __init__(self, adata: AnnData | None = None, registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        source = None if adata is None else self.adata_manager._source_registry
        if source is not None:  # the registry stays that of the first set-up, whichever cells are attached
            self.registry_ = source
            self.summary_stats = ScreenManager._get_summary_stats_from_registry(source)

    @classmethod
    @explain_arguments("source_registry", "extend_categories", "allow_missing_labels")
    def setup_anndata(
        cls,
        adata: AnnData,
        y_key: str | Sequence[str],
        e_key: str | Sequence[str] | None = None,
        image_key: str | None = None,
        *,
        infer_environments: int | None = None,
        channels: Sequence[str | int] | Mapping[str, str | int] | None = None,
        e_columns: EColumns | None = None,
        continuous_covariate_keys: str | Sequence[str] | None = None,
        layer: str | None = None,
        obsm_key: str | None = None,
        control: str | int | float | Sequence[str | int | float] | None = None,
        position_key: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Register the inputs, the perturbation label and the environment label of a table of cells.

        Inputs are either images or features, of cells or of wells. Give one of ``image_key``, ``layer`` and
        ``obsm_key``. If none is given, the images in ``obsm["single_cell_images"]`` are used, or ``X`` if there are no
        images. In ``adata``, only ``uns`` is changed, and ``obs`` if environments are inferred.

        Parameters
        ----------
        adata
            Annotated cells or wells.
        y_key
            Column of ``obs`` with the perturbation of each cell (gene, guide, compound, class). For a list of columns,
            each combination of their values is a perturbation.
        e_key
            Column of ``obs`` with the environment in which each cell was measured (well, plate, hospital), or a list of
            columns, see ``e_columns``. Optional if ``infer_environments`` is given.
        image_key
            Key of ``obsm`` with the images, ``(N, C, H, W)`` of uint8, uint16, float16 or float32, in memory or
            memory-mapped (:func:`scbd.data.open_screen`). Default: ``"single_cell_images"``. Names of channels are
            taken from ``var["channels"]`` or from ``var_names``.
        infer_environments
            Number of unrecorded environments to infer from all cells, see :func:`scbd.data.infer_environments`. They
            are written to ``obs["inferred_environment"]`` and used as environment, in addition to ``e_key`` if that is
            given.
        channels
            Names or numbers of the channels to use. By default all channels except masks (which scPortrait marks in
            ``var["channel_mapping"]``). A mapping from new names to channels renames them in the model.
        e_columns
            How several columns of ``e_key`` are combined. With ``"side_by_side"``, each column is a separate
            environment, and z_c is made invariant to each; only :class:`scbd.SCBDModel` supports this, as its default.
            With ``"crossed"``, each combination of values is one environment. Splits and batches always use the
            combinations.
        continuous_covariate_keys
            Column of ``obs``, or list of columns, with numbers to which z_c should be invariant (row, column, time,
            number of cells). Only their order matters, see :class:`scbd.nn.Numbers`. Supported by
            :class:`scbd.SCBDModel` with ``invariance="variance"``.
        layer, obsm_key
            Layer with the features (``"X"`` for ``X``), or key of ``obsm`` with the features. They are a dense array
            ``(N, F)`` of float16, float32 or float64, in memory, memory-mapped or in Zarr. Features are identified by
            ``var_names``, or by the columns of a :class:`pandas.DataFrame` in ``obsm``; their order may change.
        control
            Perturbation label of the controls, or a list of labels. Controls show the effect of an environment even if
            environments contain different perturbations, see ``standardize_by`` of the model. Features are scaled by
            the variation among controls, and embeddings of features are centred on the controls.
        position_key
            Column of ``obs`` with the position on the plate (the well), or a list of columns. With ``control`` and a
            ``whitening`` of the model, the variation of controls between positions is reduced in the features.
        **kwargs
            Used by scvi-tools when it sets up the data of a loaded model.

        Raises
        ------
        KeyError
            If a key or a channel is missing.
        TypeError, ValueError
            If

            - inputs cannot be read, or contain NaN or infinity (all inputs in memory are checked, and a sample of
              others);
            - names do not match the inputs;
            - a label is missing, or has the same value in all cells;
            - a column is given both as ``y_key`` and as ``e_key``;
            - no cell is a control;
            - a covariate is not a number;
            - the model supports one environment only;
            - neither ``e_key`` nor ``infer_environments`` is given.

        Warns
        -----
        UserWarning
            If

            - ``y`` is confounded with ``e`` or with a covariate;
            - the values of ``y`` or of an environment are a continuous quantity;
            - labels differ only in blanks or case, or a label is a word for a missing value, such as ``"nan"``;
            - a channel has a single value in all pixels of the cells checked;
            - features have a single value in all cells; these features are excluded.
        """
        check_anndata(adata)
        where = {"image_key": image_key, "channels": channels, "layer": layer, "obsm_key": obsm_key}
        e_key = add_inferred_environments(adata, y_key, e_key, infer_environments, where)
        infer_environments = None  # from here on, inferred environments are an ordinary column
        # keys are saved with the model, and therefore converted to text or lists of text
        y_key, e_key = _plain_key(y_key), _plain_key(e_key)
        several = {"takes_several": cls.traits.side_by_side}
        e_columns = check_e_columns(e_columns, e_key, cls.__name__, **several)
        continuous_covariate_keys = check_covariate_keys(continuous_covariate_keys, e_key, cls.__name__, **several)
        position_key = None if position_key is None else _plain_key(position_key)
        if not is_minified(adata):
            image_key, layer, obsm_key, channels = InputLocation.found(adata, image_key, layer, obsm_key, channels)
        elif kwargs.get("source_registry") is None:
            raise ValueError(missing_inputs_message("inputs"))
        given = {name: value for name, value in locals().items() if name not in ("__class__", "several", "where")}
        setup_method_args = cls._get_setup_method_args(**given)
        inputs = InputLocation(image_key, layer, obsm_key, channels)
        field = ImageField(IMAGE_REGISTRY, image_key, channels) if image_key else FeatureField(FEATURE_REGISTRY, inputs)
        if is_minified(adata):
            field = StringUnsField(REGISTRY_KEYS.MINIFY_TYPE_KEY, _ADATA_MINIFY_TYPE_UNS_KEY)
        labels: list[LabelField | NumberField] = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if position_key is not None:
            labels.append(LabelField(POSITION_REGISTRY, position_key))
        if continuous_covariate_keys is not None:
            labels.append(NumberField(COVARIATE_REGISTRY, continuous_covariate_keys))
        design = None
        if kwargs.get("source_registry") is None:
            both = [column for column in as_columns(y_key) if column in as_columns(e_key)]
            if both:
                msg = (
                    f"{both[0]!r} is named as y_key and as e_key, and z_c cannot carry what it is to be blind to: name "
                    "as e_key what cells were imaged in, such as the well or the plate."
                )
                raise ValueError(msg)
            design = ExperimentalDesign.of(adata.obs, y_key, e_key, e_columns, continuous_covariate_keys)
            if control is not None:
                y, *e = (list(map(label_text, of.cat.categories)) for of in (design.y, *design.environments.values()))
                check_control_labels(control, y, y_key, chain(*e))
        else:
            # new cells of a loaded model: register the labels that are present; missing labels are not required
            labels = [field for field in labels if all(column in adata.obs for column in field.columns)]
        manager = ScreenManager(fields=[field, *labels], setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if design is not None:
            check_design(design, () if control is None else control_label_texts(control))
            unnamed = find_likely_controls(design.y.cat.categories) if control is None else []
            if unnamed:
                message = "No controls were named, and %s looks like one: if so, set up with control=%r."
                logger.warning(message, ", ".join(unnamed), unnamed[0] if len(unnamed) == 1 else unnamed)

    @property
    def adata(self) -> Any:
        """Table of cells that is attached to the model.

        Another table can be attached if its inputs are of the kind that the model was set up with. The model keeps the
        registered labels and their codes. New cells can be embedded without labels. Training on new cells may add
        labels, except in models that have parameters for each label.
        """
        return self._adata

    @adata.setter
    def adata(self, adata: AnnData) -> None:
        if adata is None:
            msg = "adata=None: give cells to attach."
            raise ValueError(msg)
        self._module_and_source(adata)
        setup = self.registry_[_SETUP_ARGS_KEY]
        self.setup_anndata(adata, source_registry=self.registry_, **setup)
        self._adata = adata
        self._adata_manager = self._get_most_recent_anndata_manager(adata, required=True)
        self._register_manager_for_instance(self._adata_manager)
        self._compare_with_training_cells(adata)

    @explain_arguments()
    def view_anndata_setup(self, adata: AnnData | None = None, hide_state_registries: bool = False) -> None:
        """Print the set-up of the attached cells, or of ``adata``.

        Raises
        ------
        ValueError
            If no cells are attached and ``adata`` is not given.
        """
        super().view_anndata_setup(self._adata_or_attached(adata), hide_state_registries)

    @explain_arguments()
    def get_var_names(self, legacy_mudata_format: bool = False) -> np.ndarray:
        """Return the variable names of the table that the model was set up with."""
        return np.array(self._registered_inputs["var_names"], dtype=str)

    def _adata_or_attached(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        if adata is not None:
            check_anndata(adata)
        return self.adata if adata is None else adata

    def _compare_with_training_cells(self, adata: AnnData) -> None:
        """Record whether the inputs of the attached cells differ from the inputs that the model was trained on."""
        trained_on = getattr(self, "training_settings_", {}).get("images")
        if is_minified(adata):
            images = digest_of_inputs(adata)
        else:
            images = cell_digests(self._source(adata), adata.obs[[]])["images"]
        self._record_cells(adata, others=trained_on not in (None, images))

    def _record_cells(self, adata: AnnData, *, others: bool) -> None:
        """Record the names of the attached cells, and whether these cells differ from the training cells."""
        self._has_other_cells, self._compared_names = others, adata.obs_names

    def _has_other_cells_attached(self) -> bool:
        """Return whether the attached cells differ from the cells of the training table.

        The names of the cells are compared first, because rows can be removed or reordered in place.
        """
        before = self._compared_names
        if before is None or self.adata is None:
            return self._has_other_cells
        names = self.adata.obs_names
        if len(names) != len(before):
            return True
        if not (names.is_(before) or names.equals(before)):  # the cells were either reordered or only renamed
            self._compare_with_training_cells(self.adata)
        return self._has_other_cells

    def _source(self, adata: AnnData) -> ImageSource:
        """Return the source of a table's inputs, after checking their kind, but not their values, against the model."""
        inputs, registered = self._inputs, self._registered_inputs
        if is_minified(adata):
            raise ValueError(missing_inputs_message(inputs.where))
        inputs.check_present(adata)
        if inputs.image_key is None:
            return match_features(adata, inputs, registered)
        source, resize = inputs.source(adata), self.module.preprocess.image_size is not None
        check_images_match_registered(source, registered, inputs.image_key, resize=resize)
        check_channel_names(adata.var, inputs.stored(adata).shape[1], registered, inputs.image_key)
        return source

    def _module_and_source(self, adata: AnnData) -> tuple[EmbeddingModule | StoredEmbeddings, ImageSource]:
        """Return the module that embeds the cells of a table, and the source that the module reads.

        For a minified table, the source holds the stored embeddings, and the module returns them.
        """
        if is_minified(adata):
            return StoredEmbeddings(self.module), stored_embeddings(adata, self.module)
        return self.module, self._source(adata)

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})

    @property
    def _registered_inputs(self) -> dict[str, Any]:
        """Properties of the images, or of the features, that were registered at set-up."""
        return self._registered(IMAGE_REGISTRY) or self._registered(FEATURE_REGISTRY)

    @property
    def _inputs(self) -> InputLocation:
        """Location of the inputs in a table: the keys that were given at set-up."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        return InputLocation(*(setup.get(name) for name in InputLocation._fields))

    def _codes(self, adata: AnnData, key: str) -> np.ndarray:
        """Return the codes of a registered label, int64 ``(N,)``.

        New labels are registered, unless the network has parameters for each label.

        Raises
        ------
        KeyError
            If a column is missing.
        ValueError
            If a cell has no label, if all cells have the same label, or if a label is new and the network has
            parameters for each label.
        """
        registered = self._registered(key)
        check_inferred_column(adata.obs, registered["columns"])
        field = LabelField(key, registered["columns"])
        field.validate_field(adata)
        codes, unknown = field.codes(adata, registered["categories"])
        if unknown and key in self.traits.fixed_labels:
            raise ValueError(field.unknown(unknown))
        registered["categories"].extend(unknown)
        return codes

    def _position_codes(self, adata: AnnData) -> np.ndarray | None:
        """Return the codes of each cell's position on the plate, int64 ``(N,)``; `None` without ``position_key``."""
        return self._codes(adata, POSITION_REGISTRY) if self._registered(POSITION_REGISTRY) else None

    def _covariate_ranks(self, adata: AnnData) -> np.ndarray | None:
        """Return the rank of each cell in each continuous covariate, int64 ``(N, K)``; `None` without covariates.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a column is missing, does not hold numbers, lacks a number for a cell, or has one value in all cells.
        """
        columns = self._registered(COVARIATE_REGISTRY).get("columns")
        return None if columns is None else NumberField(COVARIATE_REGISTRY, columns).places(adata)

    def _control_mask(self, adata: AnnData) -> np.ndarray | None:
        """Return a mask of the controls, boolean ``(N,)``.

        Return `None` if no controls were named at set-up, or if ``obs`` lacks a column of ``y_key``.
        """
        setup = self.registry_[_SETUP_ARGS_KEY]
        return control_mask(adata.obs, as_columns(setup["y_key"]), setup.get("control"))

    @property
    def _control_codes(self) -> np.ndarray | None:
        """Codes of the registered perturbations that are controls, int64; `None` without ``control``."""
        control = self.registry_[_SETUP_ARGS_KEY].get("control")
        if control is None:
            return None
        categories = list(self._registered(Y_REGISTRY)["categories"])
        return np.array([categories.index(label) for label in match_control_labels(control, categories)])

    def _make_preprocess(self, **settings: Any) -> Preprocess | FeatureScaling:
        """Create the module that prepares the inputs.

        Parameters
        ----------
        **settings
            Arguments of :class:`scbd.nn.Preprocess` for images, or of :class:`scbd.nn.FeatureScaling` for features.

        Raises
        ------
        TypeError
            If a setting does not exist.
        ValueError
            If a setting is for the other kind of inputs and differs from its default.
        """
        registered, of_images = self._registered_inputs, self._inputs.image_key is not None
        ours, theirs = ("images", "features") if of_images else ("features", "images")
        foreign = _FEATURE_SETTINGS if of_images else _IMAGE_SETTINGS
        for name, default in foreign.items():
            if settings.get(name, default) != default:
                msg = f"{name}={settings[name]!r} is for {theirs}, and the model was set up with {ours}: leave it out."
                raise ValueError(msg)
        # features are not augmented, so that `augment` is ignored
        own = {
            name: value for name, value in settings.items() if name not in foreign and (of_images or name != "augment")
        }
        kind: type[Preprocess | FeatureScaling] = Preprocess if of_images else FeatureScaling
        optional = [one.name for one in inspect.signature(kind).parameters.values() if one.default is not one.empty]
        known = dict.fromkeys([*keyword_names(type(self).__init__), "standardize_by", *optional])
        check_argument_names(own, known, type(self).__name__, REPLACEMENTS["__init__"])
        if of_images:
            return Preprocess(tuple(registered["image_shape"]), registered["dtype"], **own)
        return FeatureScaling(len(registered["features"]), **own)

    def _encoder(self, encoder: str | nn.Module) -> str | nn.Module:
        """Return the encoder that ``"auto"`` stands for; any other encoder is returned unchanged.

        For images, the choice depends on whether the machine had an accelerator at set-up. For features, it depends on
        the number of rows per feature.
        """
        registered = self._registered_inputs
        if not isinstance(encoder, str) or encoder != "auto":
            return encoder
        if self._inputs.image_key is not None:
            return "resnet18" if registered["accelerated"] else "small"
        return (
            "mlp" if registered["n_rows"] >= _MIN_ROWS_PER_FEATURE_FOR_MLP * len(registered["features"]) else "linear"
        )

    def _make_transform(
        self,
        encoder: str | nn.Module,
        whitening: WhiteningChoice,
        n_latent: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> InputTransform | None:
        """Create the transform that is applied to features before an encoder; `None` without whitening.

        By default, the whitening is ``"plda"`` before the encoder ``"linear"`` and ``"within"`` before ``"mlp"``.

        Parameters
        ----------
        encoder
            Name of the encoder, or a module.
        whitening
            Kind of whitening, see :class:`scbd.nn.InputTransform`, ``"auto"`` or `None`.
        n_latent
            Dimension of the embedding. A linear encoder does not change the dimension, so that the transform sets it.
        settings
            Further arguments of :class:`scbd.nn.InputTransform`.

        Raises
        ------
        ValueError
            If a whitening is given for images.

        Warns
        -----
        UserWarning
            If positions were registered and the transform does not use them.
        """
        of_images = self._inputs.image_key is not None
        if of_images and whitening not in ("auto", None):
            msg = f"whitening={whitening!r} is for features, and the model was set up with images: leave it out."
            raise ValueError(msg)
        kind = _DEFAULT_WHITENING.get(encoder) if whitening == "auto" else whitening
        transform = None
        if kind is not None and not of_images:
            n_features, own = len(self._registered_inputs["features"]), dict(settings or {})
            if encoder == "linear":  # its output has as many dimensions as its input
                own = {"n_components": min(_MAX_LINEAR_LATENT, n_features)} | own
                own |= {} if n_latent is None else {"n_components": n_latent}
            transform = InputTransform(n_features, kind, **own)
        if self._registered(POSITION_REGISTRY) and (
            transform is None or transform.kind == "controls" or self.registry_[_SETUP_ARGS_KEY].get("control") is None
        ):
            msg = (
                "position_key is not used: effects of positions are removed only from features, with control=… and "
                "whitening='within', 'lda' or 'plda'."
            )
            warnings.warn(msg, UserWarning, stacklevel=5)
        return transform

    @property
    def _training_defaults(self) -> Mapping[str, Any]:
        """Default arguments of ``train`` for these inputs and this encoder."""
        if self._inputs.image_key is not None:
            asked = self.init_params_["non_kwargs"].get("encoder")
            return _SMALL_TRAIN_DEFAULTS if asked is not None and self._encoder(asked) == "small" else {}
        return _LINEAR_TRAIN_DEFAULTS if self._is_linear else _MLP_TRAIN_DEFAULTS

    @property
    def _train_size(self) -> float:
        """Default fraction of the cells that are training cells.

        A linear encoder is trained on all cells, since it starts close to its final state and has little to validate.
        Moreover, if each perturbation has only a few wells, a random tenth of the wells contains hardly any two wells
        of one perturbation, and the validation loss would be meaningless.
        """
        return 1.0 if self._is_linear else TRAIN_SIZE

    @property
    def _is_linear(self) -> bool:
        return any(isinstance(part, IdentityLinear) for part in self.module.modules())


def _plain_key(key: str | Sequence[str]) -> str | list[str]:
    columns = as_columns(key)
    return columns[0] if len(columns) == 1 else list(columns)
