"""What a model was set up with, read back: labels by their codes, inputs, and the settings that suit them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY
from scvi.model.base import BaseModelClass

from scbd._keys import FEATURE_REGISTRY, IMAGE_REGISTRY, NUMBER_REGISTRY, POSITION_REGISTRY, Y_REGISTRY
from scbd._labels import as_columns
from scbd.data import Inputs, LabelField, NumberField
from scbd.model._controls import called_otherwise, control_labels, controls_of
from scbd.model._environments import check_inferred_there
from scbd.model._parts import TRAIN_SIZE
from scbd.model._preparation import encoder_for, preparation, transform_for
from scbd.nn import IdentityLinear

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from anndata import AnnData
    from torch import nn

    from scbd.model._contract import EmbeddingModule
    from scbd.model._preparation import WhiteningChoice
    from scbd.nn import FeatureScaling, InputTransform, Preprocess


# of features: a linear map that begins well, and networks that begin anywhere; of images: the small encoder
_FEW_STEPS = {"max_steps": 50, "lr": 1e-4}
_MORE_STEPS = {"max_steps": 400, "lr": 1e-3}
_SOME_STEPS = {"max_steps": 300, "lr": 1e-3}


class RegistryMixin(BaseModelClass):
    """Gives a model what it was set up with."""

    # labels that the network has parameters for, one set a category: training cannot meet new ones
    _fixed_labels: tuple[str, ...] = ()

    if TYPE_CHECKING:  # what the model brings
        module: EmbeddingModule

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
        if unknown and key in self._fixed_labels:
            raise ValueError(field.unknown(unknown))
        registered["categories"].extend(unknown)
        return codes

    def _preprocess(self, **settings: Any) -> Preprocess | FeatureScaling:
        """What prepares the inputs that were registered, see :func:`preparation`."""
        return preparation(self._registered_inputs, settings)

    def _encoder(self, encoder: str | nn.Module) -> str | nn.Module:
        """What ``"auto"`` stands for."""
        return encoder_for(self._registered_inputs, encoder)

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

    def _transform(
        self,
        encoder: str | nn.Module,
        whitening: WhiteningChoice,
        n_latent: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> InputTransform | None:
        """What features pass before an encoder, see :func:`transform_for`."""
        asked = dict(settings or {})
        if encoder == "linear" and n_latent is not None:
            asked["n_components"] = n_latent
        transform = transform_for(self._registered_inputs, encoder, whitening, asked)
        if self._registered(POSITION_REGISTRY) and (
            transform is None or transform.kind == "controls" or self.registry_[_SETUP_ARGS_KEY].get("control") is None
        ):
            msg = (
                "position_key is not used: effects of positions are removed only from features, with control=… and "
                "whitening='within', 'lda' or 'plda'. encoder='linear', the default below 10,000 rows, has a whitening."
            )
            warnings.warn(msg, UserWarning, stacklevel=5)
        return transform

    @property
    def _registered_inputs(self) -> dict[str, Any]:
        """What was recorded of images, or of features."""
        return self._registered(IMAGE_REGISTRY) or self._registered(FEATURE_REGISTRY)

    @property
    def _inputs(self) -> Inputs:
        """Where they are."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        return Inputs(*(setup.get(name) for name in Inputs._fields))

    def _controls(self, adata: AnnData) -> np.ndarray | None:
        """Which cells are controls, boolean ``(N,)``; `None` where that was not said."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        return controls_of(adata.obs, as_columns(setup["y_key"]), setup.get("control"))

    def _lacks_for_controls(self, adata: AnnData) -> list[str]:
        """Columns that are not there, by which controls that were named would be told."""
        setup = self.registry_[_SETUP_ARGS_KEY]
        named = setup.get("control") is not None
        return [column for column in as_columns(setup["y_key"]) if named and column not in adata.obs]

    def _other_controls(self, obs: pd.DataFrame) -> str:
        """What is said where these rows hold too few controls, see :func:`called_otherwise`."""
        setup, known = self.registry_[_SETUP_ARGS_KEY], self._registered(Y_REGISTRY)["categories"]
        return called_otherwise(obs, setup["y_key"], setup["control"], known)

    @property
    def _control_codes(self) -> np.ndarray | None:
        """Codes of the registered perturbations that are controls, int64; `None` where that was not said."""
        control = self.registry_[_SETUP_ARGS_KEY].get("control")
        if control is None:
            return None
        categories = list(self._registered(Y_REGISTRY)["categories"])
        return np.array([categories.index(label) for label in control_labels(control, categories)])

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

    def _registered(self, key: str) -> dict[str, Any]:
        return self.registry_[_FIELD_REGISTRIES_KEY].get(key, {}).get(_STATE_REGISTRY_KEY, {})
