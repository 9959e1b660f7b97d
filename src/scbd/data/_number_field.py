"""What `setup_anndata` registers of numbers, such as the time: which columns of obs they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import rich.table

from scbd._numbers import number_values
from scbd.data._obs_field import ObsField

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


class NumberField(ObsField):
    """Columns of numbers in ``obs``, whose order counts.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    """

    def __init__(self, registry_key: str, columns: str | Sequence[str]) -> None:
        super().__init__(registry_key, columns, ", ")

    def validate_field(self, adata: AnnData) -> None:
        """Check that every cell has a number, and that they differ."""
        self.places(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record the columns."""
        self.validate_field(adata)
        return {"columns": list(self.columns)}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Keep the columns: to be embedded, cells need no numbers."""
        return dict(state_registry)

    def get_field_data(self, adata: AnnData) -> np.ndarray:
        """Numbers of each cell, float64 ``(N, K)``."""
        return np.stack([number_values(adata.obs, column) for column in self.columns], axis=1)

    def places(self, adata: AnnData) -> np.ndarray:
        """Place of each number in the order of those of its column, int64 ``(N, K)``: equal ones share one.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a column is missing, holds no numbers, or not one for each cell; or if all are the same.
        """
        numbers = self.get_field_data(adata)
        for column, values in zip(self.columns, numbers.T, strict=True):
            if (values == values[0]).all():
                msg = f"Every cell has the same obs[{column!r}] ({values[0]:g}): there is nothing to forget of it."
                raise ValueError(msg)
        return np.stack([np.unique(values, return_inverse=True)[1] for values in numbers.T], axis=1)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of columns."""
        return {f"n_{self.registry_key}": len(state_registry["columns"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show the columns."""
        table = rich.table.Table("columns", title=f"{self.registry_key} State Registry")
        table.add_row(", ".join(state_registry["columns"]))
        return table
