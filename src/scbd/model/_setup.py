"""The ``setup_anndata`` method of all models, which registers the inputs and labels of a table of cells.

The file also holds the methods with which a model reads the inputs and labels of the table attached to it.
"""

from __future__ import annotations

import inspect
import logging
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

from scbd._shared.checks import check_choice
from scbd._shared.keys import (
    E_REGISTRY,
    FEATURE_REGISTRY,
    IMAGE_REGISTRY,
    POSITION_REGISTRY,
    Y_REGISTRY,
)
from scbd._shared.labels import (
    CROSS_SEPARATOR,
    as_columns,
    check_anndata,
    encode_labels,
    label_values,
    split_crossed_label,
)
from scbd._shared.messages import warn_user
from scbd.data._channels import check_channel_names, check_images_match_registered
from scbd.data._fields import FeatureField, ImageField, LabelField, match_features
from scbd.data._input_location import InputLocation
from scbd.data._sources import digest_inputs
from scbd.model._arguments import (
    UnavailableAttribute,
    check_constructor_arguments,
    explain_arguments,
    keyword_names,
)
from scbd.model._design import (
    ExperimentalDesign,
    add_inferred_environments,
    check_design,
    check_e_columns,
    check_inferred_column,
    control_mask,
    has_separate_environments,
    match_control_labels,
)
from scbd.model._environment_alignment import EnvironmentAlignment, LabelCodes
from scbd.model._interfaces import TrainingResults
from scbd.model._minified import (
    digest_of_original_inputs,
    is_minified,
    missing_inputs_message,
    stored_embeddings,
)
from scbd.model._training_cells import TRAIN_SIZE
from scbd.nn._encoders import IdentityLinear
from scbd.nn._environment_scaling import EnvironmentScaling
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
    from scbd.model._reference_cells import StandardizeBy
    from scbd.nn._input_transform import Whitening

    WhiteningChoice = Whitening | Literal["auto"] | None

logger = logging.getLogger(__name__)

# minimum number of rows (cells or wells) per feature at which encoder="auto" stands for "mlp", which has hidden layers,
# instead of "linear"
_MIN_ROWS_PER_FEATURE_FOR_MLP = 10
# Maximum default dimension of the embedding of a linear encoder after whitening. The default is the number of features,
# up to this maximum. A large dimension costs little time.
_MAX_LINEAR_LATENT = 300
# default whitening (linear transform of the features before the encoder), by the name of the encoder
_DEFAULT_WHITENING: dict[str | nn.Module, Whitening] = {"linear": "plda", "mlp": "within"}
# arguments of a model's constructor that are valid only for images, with their defaults
_IMAGE_SETTINGS: dict[str, Any] = {"image_size": None, "intensity": "auto"}
# arguments of a model's constructor that are valid only for features, with their defaults
_FEATURE_SETTINGS: dict[str, Any] = {"clip": 20.0}
# Default arguments of train for features with a linear encoder, which starts as the identity and needs few steps. All
# cells are training cells, because validation would show little: the encoder starts close to its final state. Moreover,
# features often describe wells. If each perturbation has only a few wells, a random tenth of the wells contains hardly
# any two wells of one perturbation, and the validation loss would be meaningless.
_LINEAR_TRAIN_DEFAULTS = {"max_steps": 50, "lr": 1e-4, "train_size": 1.0}
# default arguments of train for features with an encoder that is not linear
_MLP_TRAIN_DEFAULTS = {"max_steps": 200, "lr": 1e-3}
# default arguments of train for images with the encoder "small"
_SMALL_TRAIN_DEFAULTS = {"max_steps": 300, "lr": 1e-3, "batch_size": 512}


class ScreenManager(AnnDataManager):
    """Subclass of the data manager of scvi-tools that converts labels to integer codes when they are requested.

    scvi-tools itself writes the codes of labels to ``obs`` at set-up. Here, codes are not stored, so that they cannot
    become outdated when a user changes labels or reorders categories.
    """

    def get_from_registry(self, registry_key: str) -> Any:
        """Return the data that :meth:`SetupMixin.setup_anndata` registered under a key, for the table of the manager.

        Labels are returned as integer codes, int64 ``(N, 1)``. If a label consists of several columns, each combination
        of their values has a code. All other data are returned as in scvi-tools.

        Raises
        ------
        ValueError
            If a cell has a label that was not registered.
        """
        field = next(field for field in self.fields if field.registry_key == registry_key)
        if not isinstance(field, LabelField):
            return super().get_from_registry(registry_key)
        codes, unknown = field.codes(self.adata, self.get_state_registry(registry_key)["categories"])
        if unknown:
            raise ValueError(field.unknown(unknown))
        column: np.ndarray = codes[:, None]
        return column


class SetupMixin(BaseMinifiedModeModelClass):
    """Mixin that adds to a model the method :meth:`setup_anndata`, and the attribute ``adata``, a table of cells."""

    module: EmbeddingModule = UnavailableAttribute(  # type: ignore[assignment]
        "set it in the constructor, to the EmbeddingModule to train: self.module = …"
    )
    traits: ModelTraits
    alignment_: EnvironmentAlignment
    # name of the encoder of a model of this package; a user-defined model may pass it as its argument `encoder` instead
    _encoder_name: str | None = None
    # whether the cells attached to the model differ from the cells that it was trained on
    _has_other_cells = False
    # names of the attached cells at the time when they were last compared with the training cells
    _compared_names: pd.Index | None = None

    def __init__(self, adata: AnnData | None = None, registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        self.results_ = TrainingResults()
        self.training_settings_: dict[str, Any] = {}
        source = None if adata is None else self.adata_manager._source_registry
        # The model keeps the registered labels and settings of the table that it was first set up with, even if another
        # table is attached.
        if source is not None:
            self.registry_ = source
            self.summary_stats = ScreenManager._get_summary_stats_from_registry(source)
        setup, columns = self.registry_[_SETUP_ARGS_KEY], self._registered(E_REGISTRY)["columns"]
        # location of the images or features in a table: the keys that were given to setup_anndata
        self._inputs = InputLocation(*(setup.get(name) for name in InputLocation._fields))
        # properties of the registered images or features, such as shape, type and names
        self._registered_inputs = self._registered(IMAGE_REGISTRY) or self._registered(FEATURE_REGISTRY)
        # Names of the environment columns of obs. Environments that are treated separately have a tuple with one name
        # each. If environments are combinations of several columns, these columns form a single tuple.
        separate = has_separate_environments(self.registry_)
        self._environment_columns = [(column,) for column in columns] if separate else [tuple(columns)]

    @classmethod
    @explain_arguments(
        "source_registry", "extend_categories", "allow_missing_labels", unset=("continuous_covariate_keys",)
    )
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
            Table of cells or wells, with the labels in ``obs``.
        y_key
            Column of ``obs`` with the perturbation of each cell (gene, guide, compound, class). For a list of columns,
            each combination of their values is a perturbation.
        e_key
            Column of ``obs`` with the environment in which each cell was measured (well, plate, hospital), or a list of
            columns, see ``e_columns``. Optional if ``infer_environments`` is given.
        image_key
            Key of ``obsm`` with the images, an array ``(N, C, H, W)`` of uint8, uint16, float16 or float32, in memory
            or memory-mapped (:func:`scbd.data.open_screen`). Default: ``"single_cell_images"``. Names of channels are
            taken from ``var["channels"]`` or from ``var_names``.
        infer_environments
            Number of unrecorded environments to infer from all cells, see :func:`scbd.data.infer_environments`. The
            inferred environment of each cell is written to ``obs["inferred_environment"]`` and used as environment, in
            addition to ``e_key`` if that is given.
        channels
            Names or numbers of the channels to use. By default all channels except masks (which scPortrait marks in
            ``var["channel_mapping"]``). With a mapping from new names to channels, the model uses the new names.
        e_columns
            Treatment of several columns of ``e_key``. With ``"side_by_side"``, each column is a separate environment,
            and z_c is made invariant to each of them. This is the default of :class:`scbd.SCBDModel`, and other models
            do not support it. With ``"crossed"``, each combination of values is one environment. Splits and batches
            always use the combinations.
        layer, obsm_key
            Layer with the features (``"X"`` for ``X``), or key of ``obsm`` with the features. Features are a dense
            array ``(N, F)`` of float16, float32 or float64, in memory, memory-mapped or in Zarr. They are identified by
            ``var_names``, or by the columns of a :class:`pandas.DataFrame` in ``obsm``; their order may change.
        control
            Perturbation label of the controls, or a list of labels. Controls show the effect of an environment even if
            environments contain different perturbations, see ``standardize_by`` of the model. Features are scaled by
            the variation among controls, and embeddings of features are centred on the controls.
        position_key
            Column of ``obs`` with the position on the plate (the well), or a list of columns. With ``control`` and a
            ``whitening`` of the model, the variation of controls between positions is reduced in the features.
        **kwargs
            Arguments that scvi-tools gives when it sets up the data of a loaded model. Users do not need them.

        Raises
        ------
        KeyError
            If a key or a channel is missing from the table.
        TypeError, ValueError
            If

            - inputs cannot be read, or contain NaN or infinity (all inputs in memory are checked, and a sample of
              memory-mapped inputs);
            - the number of names of channels or features differs from the number of channels or features;
            - the perturbation or environment of a cell is missing, or is the same in all cells;
            - a column is given both as ``y_key`` and as ``e_key``;
            - ``control`` is given, but no cell is a control;
            - several environment columns are to be treated separately, and the model supports only one environment;
            - neither ``e_key`` nor ``infer_environments`` is given.

        Warns
        -----
        UserWarning
            If

            - ``y`` is confounded with ``e``;
            - the values of ``y`` or of an environment are a continuous quantity;
            - labels differ only in blanks or case, or from a control only in punctuation;
            - a label is a word for a missing value, such as ``"nan"``;
            - a channel has a single value in all pixels of the cells checked;
            - features have a single value in all cells; these features are excluded.
        """
        check_anndata(adata)
        where = {"image_key": image_key, "channels": channels, "layer": layer, "obsm_key": obsm_key}
        e_key = add_inferred_environments(adata, y_key, e_key, infer_environments, where)
        # The inferred environments have been written to a column of obs, which is now part of e_key. They must not be
        # inferred again when other cells are attached.
        infer_environments = None

        # Keys are saved with the model, and are therefore converted to plain text or lists of text.
        y_key, e_key = _plain_key(y_key), _plain_key(e_key)
        e_columns = check_e_columns(e_columns, e_key, cls.__name__, takes_several=cls.traits.side_by_side)
        position_key = None if position_key is None else _plain_key(position_key)
        if not is_minified(adata):
            image_key, layer, obsm_key, channels = InputLocation.found(adata, image_key, layer, obsm_key, channels)
        elif kwargs.get("source_registry") is None:
            raise ValueError(missing_inputs_message("inputs"))
        given = {name: value for name, value in locals().items() if name not in ("__class__", "where")}
        setup_method_args = cls._get_setup_method_args(**given)
        inputs = InputLocation(image_key, layer, obsm_key, channels)
        field = ImageField(IMAGE_REGISTRY, image_key, channels) if image_key else FeatureField(FEATURE_REGISTRY, inputs)
        if is_minified(adata):
            field = StringUnsField(REGISTRY_KEYS.MINIFY_TYPE_KEY, _ADATA_MINIFY_TYPE_UNS_KEY)
        labels = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if position_key is not None:
            labels.append(LabelField(POSITION_REGISTRY, position_key))
        design = None
        if kwargs.get("source_registry") is None:
            design = ExperimentalDesign.of(adata.obs, y_key, e_key, e_columns, control)
        else:
            # If the model exists already and new cells are attached to it, the new cells need no labels. Only the
            # labels present in their table are registered.
            labels = [field for field in labels if all(column in adata.obs for column in field.columns)]
        manager = ScreenManager(fields=[field, *labels], setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if design is not None:
            check_design(design)

    @property
    def adata(self) -> Any:
        """Table of cells that the model trains on and embeds by default.

        Another table can be attached by assignment, ``model.adata = …``, if its inputs are of the kind that the model
        was set up with. The model keeps the registered labels and their integer codes. New cells can be embedded
        without labels. Training on new cells may add labels, except in models that have parameters for each label.
        """
        return self._adata

    @adata.setter
    def adata(self, adata: AnnData) -> None:
        if adata is None:
            msg = "adata=None: give cells to attach."
            raise ValueError(msg)
        if is_minified(adata):
            stored_embeddings(adata, self.module)  # raises an error if they were computed with other weights
        else:
            self._source(adata)  # raises an error if the inputs do not match the model
        self.setup_anndata(adata, source_registry=self.registry_, **self.registry_[_SETUP_ARGS_KEY])
        self._adata = adata
        self._adata_manager = self._get_most_recent_anndata_manager(adata, required=True)
        self._register_manager_for_instance(self._adata_manager)
        self._compare_with_training_cells(adata)

    @explain_arguments()
    def view_anndata_setup(self, adata: AnnData | None = None, hide_state_registries: bool = False) -> None:
        """Print the arguments of :meth:`setup_anndata`, and a summary of the inputs and labels that it registered.

        Parameters
        ----------
        adata
            Table of cells; by default the table attached to the model.
        hide_state_registries
            Whether to omit the details of each registered field.

        Raises
        ------
        ValueError
            If no table is attached to the model and ``adata`` is not given.
        """
        super().view_anndata_setup(self._adata_or_attached(adata), hide_state_registries)

    @explain_arguments()
    def get_var_names(self, legacy_mudata_format: bool = False) -> np.ndarray:
        """Return the names of the variables, ``var_names``, of the table that the model was set up with."""
        return np.array(self._registered_inputs["var_names"], dtype=str)

    def _adata_or_attached(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        if adata is not None:
            check_anndata(adata)
        return self.adata if adata is None else adata

    def _compare_with_training_cells(self, adata: AnnData) -> None:
        """Compare the inputs of a newly attached table with those that the model was trained on, and record the result.

        Parameters
        ----------
        adata
            Table that is attached to the model.
        """
        trained_on = self.training_settings_.get("images")
        inputs = digest_of_original_inputs(adata) if is_minified(adata) else digest_inputs(self._source(adata))
        self._has_other_cells, self._compared_names = trained_on not in (None, inputs), adata.obs_names

    def _has_other_cells_attached(self) -> bool:
        """Return whether the table attached to the model differs from the table that the model was trained on.

        A user may have removed, reordered or renamed rows of the attached table since the last comparison. The names of
        the cells are therefore checked first, and the inputs are compared again if the names have changed.
        """
        before = self._compared_names
        if before is None or self.adata is None:
            return self._has_other_cells
        names = self.adata.obs_names
        if len(names) != len(before):
            return True
        # If the names of the attached cells have changed, the cells were either reordered or only renamed. A comparison
        # of the inputs with those of the training cells decides between the two.
        if not names.equals(before):
            self._compare_with_training_cells(self.adata)
        return self._has_other_cells

    def _source(self, adata: AnnData) -> ImageSource:
        """Return the object from which the images or features of a table are read.

        The kind of the inputs (such as shape, type and names of channels or features) must match the model. The values
        of the inputs are not checked.
        """
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

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})

    def _codes(self, adata: AnnData, key: str) -> np.ndarray:
        """Return the integer codes of the cells' labels of one kind (perturbation, environment), int64 ``(N,)``.

        Labels that were not registered in :meth:`setup_anndata` are registered now, with new codes.

        Parameters
        ----------
        adata
            Table of the cells.
        key
            Registry key of the kind of label, such as ``Y_REGISTRY`` for the perturbation.

        Raises
        ------
        KeyError
            If the table lacks a column of the label.
        ValueError
            If a cell has no label, if all cells have the same label, or if a label is new although the network has
            parameters for each registered label.
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

    def _control_mask(self, adata: AnnData) -> np.ndarray | None:
        """Return a mask of the controls among the cells of a table, boolean ``(N,)``.

        The result is `None` if no controls were named in :meth:`setup_anndata`, or if ``obs`` of the table lacks a
        column of ``y_key``.
        """
        setup = self.registry_[_SETUP_ARGS_KEY]
        return control_mask(adata.obs, as_columns(setup["y_key"]), setup.get("control"))

    @property
    def _control_codes(self) -> np.ndarray | None:
        """Integer codes of the perturbation labels that are controls; `None` if no controls were named at set-up."""
        control = self.registry_[_SETUP_ARGS_KEY].get("control")
        if control is None:
            return None
        categories = list(self._registered(Y_REGISTRY)["categories"])
        return np.array([categories.index(label) for label in match_control_labels(control, categories)])

    def _label_codes(self, adata: AnnData) -> LabelCodes:
        """Return the integer codes of the labels of the cells of a table, which may lack labels or have new ones."""
        of_y, known_e = self._registered(Y_REGISTRY), self._registered(E_REGISTRY)["categories"]
        known_by_column: list[list[Any]] = [known_e]
        if has_separate_environments(self.registry_):
            values = zip(*map(split_crossed_label, known_e), strict=True)
            known_by_column = [list(dict.fromkeys(column)) for column in values]
        y, _ = _encode_if_present(adata.obs, of_y["columns"], of_y["categories"])
        codes, names = [], []
        for columns, known in zip(self._environment_columns, known_by_column, strict=True):
            e, new = _encode_if_present(adata.obs, columns, known)
            codes.append(e)
            names.append([*known, *new])
        return LabelCodes(y, np.stack(codes, 1), names, self._control_mask(adata))

    def _make_preprocess(self, *, standardize_by: StandardizeBy = None, **settings: Any) -> Preprocess | FeatureScaling:
        """Create the module that scales the images or features before the encoders.

        Parameters
        ----------
        standardize_by
            Kind of reference cells, see :class:`scbd.SCBDModel`; `None` for no standardisation per environment.
        **settings
            Arguments of :class:`scbd.nn.Preprocess` for images, or of :class:`scbd.nn.FeatureScaling` for features.

        Raises
        ------
        TypeError
            If an argument does not exist.
        ValueError
            If an argument for features is given for images, or the reverse, and differs from its default. Also if
            ``standardize_by`` is not a valid choice, or is ``"controls"`` although no controls were named in
            :meth:`setup_anndata`.
        """
        registered, of_images = self._registered_inputs, self._inputs.image_key is not None
        ours, theirs = ("images", "features") if of_images else ("features", "images")
        foreign = _FEATURE_SETTINGS if of_images else _IMAGE_SETTINGS
        for name, default in foreign.items():
            if settings.get(name, default) != default:
                msg = f"{name}={settings[name]!r} is for {theirs}, and the model was set up with {ours}: leave it out."
                raise ValueError(msg)
        # Features are not augmented. The argument `augment` is therefore ignored for features.
        own = {
            name: value for name, value in settings.items() if name not in foreign and (of_images or name != "augment")
        }
        kind: type[Preprocess | FeatureScaling] = Preprocess if of_images else FeatureScaling
        optional = [one.name for one in inspect.signature(kind).parameters.values() if one.default is not one.empty]
        known = dict.fromkeys([*keyword_names(type(self).__init__), "standardize_by", *optional])
        check_constructor_arguments(type(self), own, known)
        by = {"auto": "by what fits", "controls": "by these", "cells": "by all of them", None: "not at all"}
        check_choice("standardize_by", standardize_by, by)
        if standardize_by == "controls" and self._control_codes is None:
            msg = "standardize_by='controls': name controls with control=… in setup_anndata."
            raise ValueError(msg)
        names = [CROSS_SEPARATOR.join(map(str, columns)) for columns in self._environment_columns]
        self.alignment_ = EnvironmentAlignment(standardize_by, names)
        preprocess: Preprocess | FeatureScaling
        if of_images:
            preprocess = Preprocess(tuple(registered["image_shape"]), registered["dtype"], **own)
        else:
            preprocess = FeatureScaling(len(registered["features"]), **own)
        if standardize_by is not None and preprocess.standardize:
            preprocess.environments = EnvironmentScaling(preprocess.output_shape[0], len(names))
        return preprocess

    def _encoder(self, encoder: str | nn.Module) -> str | nn.Module:
        """Return the name of the encoder that ``encoder="auto"`` stands for. Any other encoder is returned unchanged.

        For images, the name depends on whether the machine had an accelerator (such as a GPU) when
        :meth:`setup_anndata` was called. For features, it depends on the number of rows per feature.
        """
        registered = self._registered_inputs
        if not isinstance(encoder, str) or encoder != "auto":
            return encoder
        if self._inputs.image_key is not None:
            return "resnet18" if registered["accelerated"] else "small"
        rows_per_feature = registered["n_rows"] / len(registered["features"])
        return "mlp" if rows_per_feature >= _MIN_ROWS_PER_FEATURE_FOR_MLP else "linear"

    def _make_transform(
        self,
        encoder: str | nn.Module,
        whitening: WhiteningChoice,
        n_latent: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> InputTransform | None:
        """Create the linear transform (whitening) that is applied to features before an encoder.

        Parameters
        ----------
        encoder
            Name of the encoder, or a torch module.
        whitening
            Kind of whitening, see :class:`scbd.nn.InputTransform`. `None` means no whitening. ``"auto"`` stands for
            ``"plda"`` before the encoder ``"linear"``, for ``"within"`` before ``"mlp"``, and for no whitening before
            other encoders and images.
        n_latent
            Dimension of the embedding; `None` for the default. A linear encoder does not change the dimension of its
            inputs, so that the transform before it reduces the features to this dimension.
        settings
            Further arguments of :class:`scbd.nn.InputTransform`.

        Returns
        -------
        The transform; `None` without whitening.

        Raises
        ------
        ValueError
            If a whitening is given for images.

        Warns
        -----
        UserWarning
            If ``position_key`` was given to :meth:`setup_anndata` but the transform does not use positions.
        """
        of_images = self._inputs.image_key is not None
        if of_images and whitening not in ("auto", None):
            msg = f"whitening={whitening!r} is for features, and the model was set up with images: leave it out."
            raise ValueError(msg)
        kind = _DEFAULT_WHITENING.get(encoder) if whitening == "auto" else whitening
        transform = None
        if kind is not None and not of_images:
            n_features, own = len(self._registered_inputs["features"]), dict(settings or {})
            # The embedding of the linear encoder has the dimension of its input, which is the output of the whitening
            # transform. The whitening therefore sets the dimension of the embedding.
            if encoder == "linear":
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
            warn_user(msg)
        return transform

    @property
    def _train_size(self) -> float:
        """Default fraction of the cells that are used for training in a random split."""
        fraction: float = self._training_defaults.get("train_size", TRAIN_SIZE)
        return fraction

    @property
    def _training_defaults(self) -> Mapping[str, Any]:
        """Default arguments of :meth:`train` that depend on the kind of inputs (images or features) and the encoder."""
        if self._inputs.image_key is not None:
            encoder = self._encoder_name or self.init_params_["non_kwargs"].get("encoder")
            return _SMALL_TRAIN_DEFAULTS if encoder is not None and self._encoder(encoder) == "small" else {}
        is_linear = any(isinstance(part, IdentityLinear) for part in self.module.modules())
        return _LINEAR_TRAIN_DEFAULTS if is_linear else _MLP_TRAIN_DEFAULTS


def _encode_if_present(obs: pd.DataFrame, columns: Sequence[str], known: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Encode the labels in columns of ``obs`` as integers, -1 if a label is missing or ``obs`` lacks a column.

    Returns
    -------
    The codes, int64 ``(N,)``, and the labels that are not among the ``known`` ones, whose codes follow those of the
    known labels.
    """
    if not all(column in obs for column in columns):
        return np.full(len(obs), -1), []
    return encode_labels(label_values(obs, columns, allow_missing=True), known)


def _plain_key(key: str | Sequence[str]) -> str | list[str]:
    columns = as_columns(key)
    return columns[0] if len(columns) == 1 else list(columns)
