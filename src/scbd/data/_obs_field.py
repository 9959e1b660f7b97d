"""What `setup_anndata` registers of columns of obs, whatever they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scvi.data.fields import BaseAnnDataField

from scbd._labels import as_columns

if TYPE_CHECKING:
    from collections.abc import Sequence


class ObsField(BaseAnnDataField):
    """One or several columns of ``obs``.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    joined_by
        What scvi-tools shows between their names. Of several there is no column, and no one may stand for them.
    """

    registry_key: str = ""
    attr_name = "obs"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, columns: str | Sequence[str], joined_by: str) -> None:
        self.registry_key = registry_key
        self.columns = as_columns(columns)
        self.attr_key = joined_by.join(self.columns)
