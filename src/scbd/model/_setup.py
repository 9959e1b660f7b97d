"""Where a table has inputs and labels: set up once, and found again in every table that comes after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scvi.data._constants import _SETUP_ARGS_KEY

from scbd._keys import E_REGISTRY, FEATURE_REGISTRY, IMAGE_REGISTRY, NUMBER_REGISTRY, POSITION_REGISTRY, Y_REGISTRY
from scbd._labels import as_columns
from scbd.data import (
    FeatureField,
    ImageField,
    Inputs,
    LabelField,
    NumberField,
    check_channel_names,
    check_like_registered,
    known_features,
)
from scbd.model._confounding import warn_if_confounded, warn_if_ordered_alike
from scbd.model._controls import check_control
from scbd.model._environments import known_covariate_keys, known_e_columns, warn_of_quantities, with_inferred
from scbd.model._manager import ScreenManager
from scbd.model._parts import cell_digests
from scbd.model._registry import RegistryMixin
from scbd.model._shifts import warn_if_shifted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from anndata import AnnData

    from scbd.data import ImageSource
    from scbd.model._environments import EColumns


class SetupMixin(RegistryMixin):
    """Gives a model :meth:`setup_anndata`, and the cells that are attached to it."""

    # whether its objective takes several environments of a cell side by side
    _side_by_side: ClassVar[bool] = False
    # whether others are attached than those it was trained on, and what they were called when that was found out
    _has_other_cells = False
    _compared: pd.Index | None = None

    def __init__(self, adata: AnnData | None = None, registry: dict[str, Any] | None = None) -> None:
        try:
            super().__init__(adata, registry)
        except ValueError as error:
            if "previously provided for setup" not in str(error):
                raise
            msg = (
                "These cells are a subset or a copy of a table that was set up: call "
                f"{type(self).__name__}.setup_anndata on them, too. Or embed them with a model of that table: give "
                "them to its get_latent_representation."
            )
            raise ValueError(msg) from error
        source = None if adata is None else self.adata_manager._source_registry
        if source is not None:
            self._keep_registry(source)

    @classmethod
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

        Nothing in ``adata`` is changed but ``uns``, and ``obs`` where environments are inferred.

        Inputs are images, or features of cells or wells: give one of ``image_key``, ``layer`` and ``obsm_key``, or none
        of them for images where ``obsm`` has them, else for the features of ``X``.

        Parameters
        ----------
        adata
            Annotated cells, or wells.
        y_key
            Column of ``obs`` with what was done to each cell (perturbation, gene, guide, class); a list of columns
            stands for their cross.
        e_key
            Column of ``obs`` with where each cell was measured (well, plate, hospital), or a list of columns, see
            ``e_columns``. Labels are text, numbers or truth values; others, such as dates, are known by their text. May
            be left out with ``infer_environments``.
        image_key
            Key of ``obsm`` with the images, ``(N, C, H, W)`` of uint8, uint16, float16 or float32, in memory or
            memory-mapped (:func:`scbd.data.open_screen`); ``"single_cell_images"`` by default. Channel names are read
            from ``var["channels"]``, or from ``var_names``.
        infer_environments
            So many environments that nobody wrote down are looked for in all cells, see
            :func:`scbd.data.infer_environments`, and written to ``obs["inferred_environment"]``. They are the
            environment, or stand beside that of ``e_key``. To leave out cells that the model is tested on, infer them
            with ``fit=…`` first, and give the column as ``e_key``. Names are of this table alone: where old and new
            cells are trained on, infer once, on both together.
        channels
            Those that are learned from, by name or number; by default all but masks, which scPortrait's files tell in
            ``var["channel_mapping"]``. A mapping gives them names of the model's own.
        e_columns
            What several columns of ``e_key`` are. ``"side_by_side"``: each is an environment of its own, and z_c is to
            know none of them, as with plate and position; the default of :class:`scbd.SCBDModel`, which alone has it.
            ``"crossed"``: each combination of their values is an environment; what all other systems take, and what
            splits and batches are made by.
        continuous_covariate_keys
            Column of ``obs`` with numbers of where or when a cell was measured, or a list of columns: row, column,
            time, how many cells there were. z_c is to know nothing of what changes slowly with each, whatever the
            scale, see :class:`scbd.nn.Numbers`. They come beside ``e_key``, which alone splits are made by, and z_s is
            clustered by. For :class:`scbd.SCBDModel`, with its default form of ``invariance``.
        layer, obsm_key
            Layer with features, ``"X"`` for ``X``; or key of ``obsm`` with them. Dense ``(N, F)`` of float16, float32
            or float64, in memory, memory-mapped or in Zarr. Features go by ``var_names``, or by the columns of a
            :class:`pandas.DataFrame` in ``obsm``: new tables may have others beside, and another order.
        control
            The perturbation of the controls, or several. Features are scaled to what controls vary by, and embeddings
            of features are centred on them. What was learned is asked of the other cells.
        position_key
            Column of ``obs`` with the position on the plate (the well), or a list of columns. With ``control``, and a
            linear map before the encoder (``whitening`` of the model; by default below 10,000 rows), what controls
            differ by from position to position is taken out of features.
        **kwargs
            Used by scvi-tools when it sets up the data of a loaded model.

        Raises
        ------
        KeyError
            If a key or channel is missing.
        TypeError, ValueError
            If the inputs cannot be read, hold NaN or infinity (all are looked at in memory, 64 images or 4,096 rows of
            features elsewhere), images do not have the channels that ``var["channels"]`` names, or two features have
            one name; or if a label is missing or has one value only, no cell is a control, a covariate is no number,
            the system takes one environment only, or there is neither ``e_key`` nor ``infer_environments``.

        Warns
        -----
        UserWarning
            If ``y`` and ``e`` are confounded, with the table, or ``y`` and a covariate; if an environment is a number
            that hardly two cells share; if a channel shows nothing; if features have one value in all
            cells, which are left out.
        """
        where = {"image_key": image_key, "channels": channels, "layer": layer, "obsm_key": obsm_key}
        e_key = with_inferred(adata, y_key, e_key, infer_environments, where)
        infer_environments = None  # from here on they are a column like any other
        # plain text, whatever they came as: they are saved with the model
        y_key, e_key = _plain_key(y_key), _plain_key(e_key)
        e_columns = known_e_columns(e_columns, e_key, cls.__name__, takes_several=cls._side_by_side)
        continuous_covariate_keys = known_covariate_keys(
            continuous_covariate_keys, e_key, cls.__name__, takes_several=cls._side_by_side
        )
        position_key = None if position_key is None else _plain_key(position_key)
        image_key, layer, obsm_key, channels = Inputs.found(adata, image_key, layer, obsm_key, channels)
        setup_method_args = cls._get_setup_method_args(**{k: v for k, v in locals().items() if k != "__class__"})
        source_registry, inputs = kwargs.get("source_registry"), Inputs(image_key, layer, obsm_key, channels)
        fields: list[Any] = [
            ImageField(IMAGE_REGISTRY, image_key, channels) if image_key else FeatureField(FEATURE_REGISTRY, inputs)
        ]
        labels: list[LabelField | NumberField] = [LabelField(Y_REGISTRY, y_key), LabelField(E_REGISTRY, e_key)]
        if position_key is not None:
            labels.append(LabelField(POSITION_REGISTRY, position_key))
        if continuous_covariate_keys is not None:
            labels.append(NumberField(NUMBER_REGISTRY, continuous_covariate_keys))
        if source_registry is None:
            check_control(adata.obs, y_key, control)
            fields += labels
        else:
            # new cells of a loaded model: labels that are there are kept, labels that are not are not needed
            fields += [f for f in labels if all(column in adata.obs for column in f.columns)]
        manager = ScreenManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)
        if source_registry is None:
            apart = [(column,) for column in as_columns(e_key)]
            warn_of_quantities(adata.obs, as_columns(e_key))
            environments = apart if e_columns == "side_by_side" else [as_columns(e_key)]
            for columns in environments:
                warn_if_confounded(adata.obs, as_columns(y_key), columns)
            if not image_key:
                warn_if_shifted(adata, inputs, as_columns(y_key), environments)
            for column in continuous_covariate_keys or ():
                warn_if_ordered_alike(adata.obs, as_columns(y_key), column)

    @property
    def adata(self) -> Any:
        """Cells that are attached; others may be, if their inputs are of the kind the model was trained on.

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
        self._compare_cells(adata)

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
        return np.array(self._registered_inputs["var_names"], dtype=str)

    def _keep_registry(self, registry: dict[str, Any]) -> None:
        """Be the model of the cells it was first set up with, whatever is attached."""
        self.registry_ = registry
        self.summary_stats = ScreenManager._get_summary_stats_from_registry(registry)

    def _require(self, adata: AnnData | None) -> AnnData:
        if adata is None and self.adata is None:
            msg = "The model was loaded without data: pass adata."
            raise ValueError(msg)
        return self.adata if adata is None else adata

    def _compare_cells(self, adata: AnnData) -> None:
        """Note whether the cells that are attached are those the model was trained on."""
        trained_on = getattr(self, "training_settings_", {}).get("images")
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
        inputs.check_there(adata)
        if inputs.image_key is None:
            return known_features(adata, inputs, registered)
        source, resize = inputs.source(adata), self.module.preprocess.image_size is not None
        check_like_registered(source, registered, inputs.image_key, resize=resize)
        check_channel_names(adata.var, inputs.stored(adata).shape[1], registered, inputs.image_key)
        return source


def _plain_key(key: str | Sequence[str]) -> str | list[str]:
    columns = as_columns(key)
    return columns[0] if len(columns) == 1 else list(columns)
