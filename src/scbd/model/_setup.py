"""Where a table has inputs and labels: set up once, found again in every table that comes after, and prepared."""

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

from scbd._anndata import (
    E_REGISTRY,
    FEATURE_REGISTRY,
    IMAGE_REGISTRY,
    NUMBER_REGISTRY,
    POSITION_REGISTRY,
    Y_REGISTRY,
    as_columns,
    check_anndata,
    control_names,
    control_texts,
    label_text,
    likely_controls,
)
from scbd.data._fields import FeatureField, ImageField, LabelField, NumberField, known_features
from scbd.data._inputs import Inputs, check_channel_names, check_like_registered
from scbd.model._arguments import INSTEAD, Absent, check_names, explain_arguments, keyword_names
from scbd.model._cells import TRAIN_SIZE, cell_digests
from scbd.model._design import (
    Design,
    check_design,
    check_inferred_there,
    control_labels,
    controls_of,
    known_e_columns,
    known_number_keys,
    with_inferred,
)
from scbd.model._minified import StoredBlocks, digest_of_inputs, is_minified, stored_blocks, without
from scbd.nn._encoders import IdentityLinear
from scbd.nn._inputs import FeatureScaling, InputTransform, Preprocess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from anndata import AnnData
    from torch import nn

    from scbd.data._sources import ImageSource
    from scbd.model._contract import EmbeddingModule, Traits
    from scbd.model._design import EColumns
    from scbd.nn._inputs import Whitening

    WhiteningChoice = Whitening | Literal["auto"] | None

logger = logging.getLogger(__name__)

# rows for each feature from which a network with hidden layers has enough to learn from
_ROWS_A_FEATURE = 10
# dimensions of a linear embedding, which costs nothing
_LINEAR_LATENT = 300
# what features pass before an encoder by default
_BEFORE: dict[str | nn.Module, Whitening] = {"linear": "plda", "mlp": "within"}
# settings that have no meaning for features, and for images, with the values that ask for nothing
_OF_IMAGES: dict[str, Any] = {"image_size": None, "intensity": "auto"}
_OF_FEATURES: dict[str, Any] = {"clip": 20.0}
# runs of features: a linear map that begins well, and networks that begin anywhere; of images: the small encoder
_FEW_STEPS = {"max_steps": 50, "lr": 1e-4}
_MORE_STEPS = {"max_steps": 200, "lr": 1e-3}
_SOME_STEPS = {"max_steps": 300, "lr": 1e-3, "batch_size": 512}


class ScreenManager(AnnDataManager):
    """scvi-tools' manager; of a label the registry returns codes, as it does for the labels of scvi-tools' own models.

    Nothing is written to ``obs``: codes are looked up when they are asked for, so that labels which are changed, or
    categories which are put in another order, never meet codes that were made before.
    """

    def get_from_registry(self, registry_key: str) -> Any:
        """What is registered: for labels codes, int64 ``(N, 1)``, of a cross for several columns; for numbers these.

        Raises
        ------
        ValueError
            If a label is not one that was registered, or a number is missing.
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
    """Gives a model :meth:`setup_anndata`, the cells that are attached to it, and what they were set up with."""

    module: EmbeddingModule = Absent(  # type: ignore[assignment]
        "set it in the constructor, to the EmbeddingModule to train: self.module = …"
    )
    traits: Traits
    # whether others are attached than those it was trained on, and what they were called when that was found out
    _has_other_cells = False
    _compared: pd.Index | None = None

    def __init__(self, adata: AnnData | None = None, registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        source = None if adata is None else self.adata_manager._source_registry
        if source is not None:  # the model of the cells it was first set up with, whatever is attached
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
        """Tell the model where inputs, perturbation and environment are.

        Nothing in ``adata`` is changed but ``uns``, and ``obs`` where environments are inferred. Inputs are images, or
        features of cells or wells: give one of ``image_key``, ``layer`` and ``obsm_key``, or none for images where
        ``obsm`` has them, else for ``X``.

        Parameters
        ----------
        adata
            Annotated cells, or wells.
        y_key
            Column of ``obs`` with what was done to each cell (perturbation, gene, guide, class); a list of columns
            stands for their cross.
        e_key
            Column of ``obs`` with where each cell was measured (well, plate, hospital), or a list, see ``e_columns``.
            May be left out with ``infer_environments``.
        image_key
            Key of ``obsm`` with the images, ``(N, C, H, W)`` of uint8, uint16, float16 or float32, in memory or
            memory-mapped (:func:`scbd.data.open_screen`); ``"single_cell_images"`` by default. Channels are named by
            ``var["channels"]``, or by ``var_names``.
        infer_environments
            So many environments that were not recorded are looked for in all cells, see
            :func:`scbd.data.infer_environments`, and written to ``obs["inferred_environment"]``. They are the
            environment, or stand beside that of ``e_key``.
        channels
            Those that are learned from, by name or number; by default all but masks
            (``var["channel_mapping"]`` of scPortrait). A mapping gives them names of the model's own.
        e_columns
            What several columns of ``e_key`` are. ``"side_by_side"``: each is an environment of its own, and z_c is to
            know none of them; the default of :class:`scbd.SCBDModel`, which alone has it. ``"crossed"``: each
            combination of their values is an environment, as splits and batches always have it.
        continuous_covariate_keys
            Column of ``obs`` with numbers that z_c is to know nothing of (row, column, time, number of cells), or a
            list, whatever their scale, see :class:`scbd.nn.Numbers`. For :class:`scbd.SCBDModel` with
            ``invariance="variance"``.
        layer, obsm_key
            Layer with features, ``"X"`` for ``X``; or key of ``obsm`` with them. Dense ``(N, F)`` of float16, float32
            or float64, in memory, memory-mapped or in Zarr. Features are known by ``var_names``, or by the columns of a
            :class:`pandas.DataFrame` in ``obsm``, in any order.
        control
            The perturbation of the controls, or several. They tell what an environment does by itself, where
            environments hold different perturbations: see ``standardize_by`` of the model. Features are scaled to what
            controls vary by, and their embeddings centred on them.
        position_key
            Column of ``obs`` with the position on the plate (the well), or a list. With ``control`` and a ``whitening``
            of the model, what controls differ by from position to position is taken out of features.
        **kwargs
            Used by scvi-tools when it sets up the data of a loaded model.

        Raises
        ------
        KeyError
            If a key or channel is missing.
        TypeError, ValueError
            If inputs cannot be read or hold NaN or infinity (all are looked at in memory, some elsewhere), names do not
            fit them, a label is missing or has one value only, a column is named as ``y_key`` and as ``e_key``, no cell
            is a control, a covariate is no number, the system takes one environment only, or there is neither ``e_key``
            nor ``infer_environments``.

        Warns
        -----
        UserWarning
            If ``y`` and ``e``, or a covariate, are confounded; if ``y`` or an environment is a quantity; if labels
            differ only in blanks or case, or one is called like a missing value; if a channel shows nothing; or if
            features have one value in all cells, which are left out.
        """
        check_anndata(adata)
        where = {"image_key": image_key, "channels": channels, "layer": layer, "obsm_key": obsm_key}
        e_key = with_inferred(adata, y_key, e_key, infer_environments, where)
        infer_environments = None  # from here on they are a column like any other
        # plain text, whatever they came as: they are saved with the model
        y_key, e_key = _plain_key(y_key), _plain_key(e_key)
        several = {"takes_several": cls.traits.side_by_side}
        e_columns = known_e_columns(e_columns, e_key, cls.__name__, **several)
        continuous_covariate_keys = known_number_keys(continuous_covariate_keys, e_key, cls.__name__, **several)
        position_key = None if position_key is None else _plain_key(position_key)
        if not is_minified(adata):
            image_key, layer, obsm_key, channels = Inputs.found(adata, image_key, layer, obsm_key, channels)
        elif kwargs.get("source_registry") is None:
            raise ValueError(without("inputs"))
        given = {name: value for name, value in locals().items() if name not in ("__class__", "several", "where")}
        setup_method_args = cls._get_setup_method_args(**given)
        inputs = Inputs(image_key, layer, obsm_key, channels)
        field = ImageField(IMAGE_REGISTRY, image_key, channels) if image_key else FeatureField(FEATURE_REGISTRY, inputs)
        if is_minified(adata):
            field = StringUnsField(REGISTRY_KEYS.MINIFY_TYPE_KEY, _ADATA_MINIFY_TYPE_UNS_KEY)
        labels: list[LabelField | NumberField] = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if position_key is not None:
            labels.append(LabelField(POSITION_REGISTRY, position_key))
        if continuous_covariate_keys is not None:
            labels.append(NumberField(NUMBER_REGISTRY, continuous_covariate_keys))
        design = None
        if kwargs.get("source_registry") is None:
            both = [column for column in as_columns(y_key) if column in as_columns(e_key)]
            if both:
                msg = (
                    f"{both[0]!r} is named as y_key and as e_key, and z_c cannot carry what it is to be blind to: name "
                    "as e_key what cells were imaged in, such as the well or the plate."
                )
                raise ValueError(msg)
            design = Design.of(adata.obs, y_key, e_key, e_columns, continuous_covariate_keys)
            if control is not None:
                y, *e = (list(map(label_text, of.cat.categories)) for of in (design.y, *design.environments.values()))
                control_names(control, y, y_key, chain(*e))
        else:
            # new cells of a loaded model: labels that are there are kept, labels that are not are not needed
            labels = [field for field in labels if all(column in adata.obs for column in field.columns)]
        manager = ScreenManager(fields=[field, *labels], setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if design is not None:
            check_design(design, () if control is None else control_texts(control))
            unnamed = likely_controls(design.y.cat.categories) if control is None else []
            if unnamed:
                message = "No controls were named, and %s looks like one: if so, set up with control=%r."
                logger.warning(message, ", ".join(unnamed), unnamed[0] if len(unnamed) == 1 else unnamed)

    @property
    def adata(self) -> Any:
        """Cells that are attached; others may be, if their inputs are of the kind the model was trained on.

        The model keeps the labels, and the codes of labels, that it was set up with: to embed new cells they need no
        label, and to train on them a network with parameters for each label must know theirs.
        """
        return self._adata

    @adata.setter
    def adata(self, adata: AnnData) -> None:
        if adata is None:
            msg = "adata=None: give cells to attach."
            raise ValueError(msg)
        self._read_from(adata)
        setup = self.registry_[_SETUP_ARGS_KEY]
        self.setup_anndata(adata, source_registry=self.registry_, **setup)
        self._adata = adata
        self._adata_manager = self._get_most_recent_anndata_manager(adata, required=True)
        self._register_manager_for_instance(self._adata_manager)
        self._compare_cells(adata)

    @explain_arguments()
    def view_anndata_setup(self, adata: AnnData | None = None, hide_state_registries: bool = False) -> None:
        """Print what the model, or ``adata``, was set up with.

        Raises
        ------
        ValueError
            If there is no data to show the set-up of.
        """
        super().view_anndata_setup(self._require(adata), hide_state_registries)

    @explain_arguments()
    def get_var_names(self, legacy_mudata_format: bool = False) -> np.ndarray:
        """Variable names of the data the model was set up with."""
        return np.array(self._registered_inputs["var_names"], dtype=str)

    def _require(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        if adata is not None:
            check_anndata(adata)
        return self.adata if adata is None else adata

    def _compare_cells(self, adata: AnnData) -> None:
        """Note whether the cells that are attached are those the model was trained on."""
        trained_on = getattr(self, "training_settings_", {}).get("images")
        if is_minified(adata):
            images = digest_of_inputs(adata)
        else:
            images = cell_digests(self._source(adata), adata.obs[[]])["images"]
        self._know_cells(adata, others=trained_on not in (None, images))

    def _know_cells(self, adata: AnnData, *, others: bool) -> None:
        """Note whether these cells are others than those the model was trained on, and what they are called now."""
        self._has_other_cells, self._compared = others, adata.obs_names

    def _has_others(self) -> bool:
        """Whether cells are attached that the model was not trained on: rows may have been taken out in place."""
        before = self._compared
        if before is None or self.adata is None:
            return self._has_other_cells
        names = self.adata.obs_names
        if len(names) != len(before):
            return True
        if not (names.is_(before) or names.equals(before)):  # in another order, or only called otherwise
            self._compare_cells(self.adata)
        return self._has_other_cells

    def _source(self, adata: AnnData) -> ImageSource:
        """Inputs of a table, checked against what the model takes. Reads none of them."""
        inputs, registered = self._inputs, self._registered_inputs
        if is_minified(adata):
            raise ValueError(without(inputs.where))
        inputs.check_there(adata)
        if inputs.image_key is None:
            return known_features(adata, inputs, registered)
        source, resize = inputs.source(adata), self.module.preprocess.image_size is not None
        check_like_registered(source, registered, inputs.image_key, resize=resize)
        check_channel_names(adata.var, inputs.stored(adata).shape[1], registered, inputs.image_key)
        return source

    def _read_from(self, adata: AnnData) -> tuple[EmbeddingModule | StoredBlocks, ImageSource]:
        """What embeds the cells of a table, and what it reads; of a minified table, what stands in place of both."""
        if is_minified(adata):
            return StoredBlocks(self.module), stored_blocks(adata, self.module)
        return self.module, self._source(adata)

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})

    @property
    def _registered_inputs(self) -> dict[str, Any]:
        """What was recorded of images, or of features."""
        return self._registered(IMAGE_REGISTRY) or self._registered(FEATURE_REGISTRY)

    @property
    def _inputs(self) -> Inputs:
        """Where they are."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        return Inputs(*(setup.get(name) for name in Inputs._fields))

    def _codes(self, adata: AnnData, key: str) -> np.ndarray:
        """Codes of a label as it was registered; new ones are registered where the network has no parameters for them.

        Raises
        ------
        KeyError
            If a column is missing.
        ValueError
            If a cell has no label, all have the same, or one has a label the network does not know.
        """
        registered = self._registered(key)
        check_inferred_there(adata.obs, registered["columns"])
        field = LabelField(key, registered["columns"])
        field.validate_field(adata)
        codes, unknown = field.codes(adata, registered["categories"])
        if unknown and key in self.traits.fixed_labels:
            raise ValueError(field.unknown(unknown))
        registered["categories"].extend(unknown)
        return codes

    def _positions(self, adata: AnnData) -> np.ndarray | None:
        """Codes of the position of each cell, int64 ``(N,)``; `None` where there is none."""
        return self._codes(adata, POSITION_REGISTRY) if self._registered(POSITION_REGISTRY) else None

    def _numbers(self, adata: AnnData) -> np.ndarray | None:
        """Places of each cell in the order of its numbers, int64 ``(N, K)``; `None` where there are none.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a column is missing, holds no numbers, or not one for each cell; or if all are the same.
        """
        columns = self._registered(NUMBER_REGISTRY).get("columns")
        return None if columns is None else NumberField(NUMBER_REGISTRY, columns).places(adata)

    def _controls(self, adata: AnnData) -> np.ndarray | None:
        """Which cells are controls, boolean ``(N,)``; `None` where that was not said, or no column says it."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        return controls_of(adata.obs, as_columns(setup["y_key"]), setup.get("control"))

    @property
    def _control_codes(self) -> np.ndarray | None:
        """Codes of the registered perturbations that are controls, int64; `None` where that was not said."""
        control = self.registry_[_SETUP_ARGS_KEY].get("control")
        if control is None:
            return None
        categories = list(self._registered(Y_REGISTRY)["categories"])
        return np.array([categories.index(label) for label in control_labels(control, categories)])

    def _preprocess(self, **settings: Any) -> Preprocess | FeatureScaling:
        """What prepares the inputs, by arguments of :class:`scbd.nn.Preprocess` or :class:`scbd.nn.FeatureScaling`.

        Raises
        ------
        TypeError
            If a setting is not known.
        ValueError
            If a setting is for inputs of the other kind, and not at its default.
        """
        registered, of_images = self._registered_inputs, self._inputs.image_key is not None
        ours, theirs = ("images", "features") if of_images else ("features", "images")
        foreign = _OF_FEATURES if of_images else _OF_IMAGES
        for name, default in foreign.items():
            if settings.get(name, default) != default:
                msg = f"{name}={settings[name]!r} is for {theirs}, and the model was set up with {ours}: leave it out."
                raise ValueError(msg)
        # features are not turned, whether or not that is said
        own = {
            name: value for name, value in settings.items() if name not in foreign and (of_images or name != "augment")
        }
        kind: type[Preprocess | FeatureScaling] = Preprocess if of_images else FeatureScaling
        optional = [one.name for one in inspect.signature(kind).parameters.values() if one.default is not one.empty]
        known = dict.fromkeys([*keyword_names(type(self).__init__), "standardize_by", *optional])
        check_names(own, known, type(self).__name__, INSTEAD["__init__"])
        if of_images:
            return Preprocess(tuple(registered["image_shape"]), registered["dtype"], **own)
        return FeatureScaling(len(registered["features"]), **own)

    def _encoder(self, encoder: str | nn.Module) -> str | nn.Module:
        """What ``"auto"`` stands for: for images by the machine, for features by the number of rows for each."""
        registered = self._registered_inputs
        if not isinstance(encoder, str) or encoder != "auto":
            return encoder
        if self._inputs.image_key is not None:
            return "resnet18" if registered["accelerated"] else "small"
        return "mlp" if registered["n_rows"] >= _ROWS_A_FEATURE * len(registered["features"]) else "linear"

    def _transform(
        self,
        encoder: str | nn.Module,
        whitening: WhiteningChoice,
        n_latent: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> InputTransform | None:
        """What features pass before an encoder; by default ``"plda"`` if it is ``"linear"``, ``"within"`` if ``"mlp"``.

        Raises
        ------
        ValueError
            If a whitening is asked for of images.
        """
        of_images = self._inputs.image_key is not None
        if of_images and whitening not in ("auto", None):
            msg = f"whitening={whitening!r} is for features, and the model was set up with images: leave it out."
            raise ValueError(msg)
        kind = _BEFORE.get(encoder) if whitening == "auto" else whitening
        transform = None
        if kind is not None and not of_images:
            n_features, own = len(self._registered_inputs["features"]), dict(settings or {})
            if encoder == "linear":  # which embeds in the dimensions that come in
                own = {"n_components": min(_LINEAR_LATENT, n_features)} | own
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
        """Arguments of ``train`` that suit the inputs and the encoder."""
        if self._inputs.image_key is not None:
            asked = self.init_params_["non_kwargs"].get("encoder")
            return _SOME_STEPS if asked is not None and self._encoder(asked) == "small" else {}
        return _FEW_STEPS if self._is_linear else _MORE_STEPS

    @property
    def _train_size(self) -> float:
        """Share of the cells to train on, by default: a map that begins well has next to nothing to be validated for.

        A tenth of some wells a perturbation, drawn at random, are strangers to each other, whose loss says nothing.
        """
        return 1.0 if self._is_linear else TRAIN_SIZE

    @property
    def _is_linear(self) -> bool:
        return any(isinstance(part, IdentityLinear) for part in self.module.modules())


def _plain_key(key: str | Sequence[str]) -> str | list[str]:
    columns = as_columns(key)
    return columns[0] if len(columns) == 1 else list(columns)
