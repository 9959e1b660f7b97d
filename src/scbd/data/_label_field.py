"""What `setup_anndata` registers of labels: one label that may span several obs columns, and its categories."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import rich.pretty  # scvi-tools shows registries with it, and does not import it
import rich.table

from scbd._labels import CROSS, label_codes, label_values
from scbd.data._obs_field import ObsField

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import pandas as pd
    from anndata import AnnData

# what missing values become when a table is turned into text
_TEXTS_OF_MISSING = {"", "nan", "None", "<NA>", "NaT"}


class LabelField(ObsField):
    """A categorical label in ``obs``; several columns become one label, their cross.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    """

    def __init__(self, registry_key: str, columns: str | Sequence[str]) -> None:
        super().__init__(registry_key, columns, CROSS)

    def validate_field(self, adata: AnnData) -> None:
        """Check that every cell has a label, and that there are at least two different ones."""
        self._labels(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record the categories."""
        labels = self._labels(adata)
        suspicious = [name for name in labels.cat.categories if name in _TEXTS_OF_MISSING]
        if suspicious:
            n = int(labels.isin(suspicious).sum())
            msg = (
                f"{n} of {adata.n_obs} cells have the {self.registry_key} {suspicious[0]!r} ({_named(self.columns)}), "
                "which counts as a label like any other. Text of that kind is what obs.astype(str) makes of missing "
                "values: if these are missing, drop the cells."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        return {"columns": list(self.columns), "categories": labels.cat.categories.tolist()}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Keep the registered categories and add new ones behind them: an unseen well is no error.

        Cells without a label are none either: to be embedded they need none.
        """
        known = state_registry["categories"]
        _, unknown = label_codes(label_values(adata_target.obs, self.columns, allow_missing=True), known)
        return {"columns": list(self.columns), "categories": known + unknown}

    def get_field_data(self, adata: AnnData) -> pd.Series:
        """Label of each cell, a categorical of length N; what its codes stand for is this table's own affair."""
        return label_values(adata.obs, self.columns)

    def codes(self, adata: AnnData, categories: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
        """Places of the labels among the registered categories, int64 ``(N,)``, and the labels that are not there.

        The order of the table's own categories means nothing, so that these may change between set-up and training.
        """
        return label_codes(self.get_field_data(adata), categories)

    def unknown(self, labels: Sequence[Any]) -> str:
        """That labels are not among those that were registered."""
        some = ", ".join(map(repr, labels[:5])) + (", …" if len(labels) > 5 else "")
        return (
            f"{_named(self.columns)} holds {len(labels)} label{'s' * (len(labels) > 1)} that the model was not set up "
            f"with ({some}), used as {self.registry_key}: leave these cells out, or set up and train a new model."
        )

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of categories."""
        return {f"n_{self.registry_key}": len(state_registry["categories"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show the categories."""
        table = rich.table.Table("columns", "categories", title=f"{self.registry_key} State Registry")
        table.add_row(", ".join(state_registry["columns"]), ", ".join(map(str, state_registry["categories"])))
        return table

    def _labels(self, adata: AnnData) -> pd.Series:
        labels = label_values(adata.obs, self.columns)
        if labels.cat.categories.size < 2:
            msg = (
                f"Every cell has the same {_named(self.columns)} ({labels.cat.categories[0]!r}), used as "
                f"{self.registry_key}: there is nothing to contrast. Give {self.registry_key}_key a column with at "
                "least two values; to go on training a model, attach old and new cells together."
            )
            raise ValueError(msg)
        return labels


def _named(columns: Sequence[str]) -> str:
    return " and ".join(f"obs[{column!r}]" for column in columns)
