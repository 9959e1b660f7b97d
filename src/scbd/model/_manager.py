"""What scvi-tools keeps of a table that was set up, with labels as codes of the registered categories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scvi.data import AnnDataManager

from scbd.data import LabelField, NumberField

if TYPE_CHECKING:
    import numpy as np


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
