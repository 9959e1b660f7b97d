"""What `setup_anndata` registers of features: their names, those that say nothing left out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.table
from scvi.data.fields import BaseAnnDataField

from scbd._messages import head
from scbd.data.sources import ColumnSource

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.data._inputs import Inputs
    from scbd.data.sources import ImageSource

# rows that are looked at of a table that is not in memory
_SAMPLED = 4_096


class FeatureField(BaseAnnDataField):
    """Features in ``X``, a layer or ``obsm``: registers their names and dtype, and finds them again in new tables.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    inputs
        Where they are.
    """

    registry_key: str = ""
    attr_name: str = ""
    attr_key: str | None = None
    is_empty = False

    def __init__(self, registry_key: str, inputs: Inputs) -> None:
        self.registry_key = registry_key
        self.inputs = inputs
        self.attr_name = "obsm" if inputs.layer is None else "X" if inputs.where == "X" else "layers"
        self.attr_key = inputs.obsm_key if inputs.layer is None else None if inputs.where == "X" else inputs.layer

    def validate_field(self, adata: AnnData) -> None:
        """Check that there are features that can be read, each under a name of its own."""
        _names(adata, self.inputs, self.inputs.source(adata).shape[1])

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record which features there are, having looked at their values once."""
        source = self.inputs.source(adata)
        names = _names(adata, self.inputs, source.shape[1])
        low, high = _range(source, names, self.inputs.where)
        constant = np.flatnonzero(low == high)
        if len(constant) == len(names):
            msg = f"Every feature of {self.inputs.where} has one value in all cells: there is nothing to learn from."
            raise ValueError(msg)
        if constant.size:
            msg = (
                f"{constant.size} of {len(names)} features of {self.inputs.where} have one value in all cells looked "
                f"at, and are left out: {head(names[place] for place in constant)}."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        return {
            "features": [name for name, same in zip(names, low == high, strict=True) if not same],
            "dtype": source.dtype.name,
            "columns": names,
            "n_rows": adata.n_obs,
            "var_names": adata.var_names.astype(str).tolist(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that the features of the model are there, which stay what it takes, and look at their values once."""
        source = known_features(adata_target, self.inputs, state_registry)
        _range(source, state_registry["features"], self.inputs.where)
        return dict(state_registry)

    def get_field_data(self, adata: AnnData) -> Any:
        """The table."""
        return self.inputs.array(adata)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of features."""
        return {"n_features": len(state_registry["features"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show the features."""
        table = rich.table.Table("features", "dtype", title=f"{self.registry_key} State Registry")
        names = state_registry["features"]
        table.add_row(f"{len(names)}: {head(names)}", state_registry["dtype"])
        return table


def known_features(adata: AnnData, inputs: Inputs, registered: dict[str, Any]) -> ImageSource:
    """The features that a model was set up with, found by name in a table that may have others and another order.

    Arrays in ``obsm`` have no names, and are read by place; a warning says so if those of the model have names.

    Raises
    ------
    KeyError, TypeError
        If there is no table of features, see :meth:`Inputs.source`.
    ValueError
        If a feature is missing, or a name there twice; of features without names, if there are more or fewer.
    """
    source = inputs.source(adata)
    names, wanted = _names(adata, inputs, source.shape[1]), registered["features"]
    columns = registered["columns"]
    if inputs.names(adata) is None:
        if len(names) != len(columns):
            msg = (
                f"{inputs.where} has {len(names)} features, the model was set up with {len(columns)}. "
                "Features without names are known by their position: give all of them, in that order."
            )
            raise ValueError(msg)
        if columns != names:
            msg = (
                f"{inputs.where} has no names of features, and those of the model have ({head(columns)}): "
                "they are taken to be in that order. Give a pandas.DataFrame with these columns to be sure."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        names = columns
    if names == wanted:
        return source
    places = {name: place for place, name in enumerate(names)}
    missing = [name for name in wanted if name not in places]
    if missing:
        msg = (
            f"{inputs.where} lacks {len(missing)} of the {len(wanted)} features that the model was set up with "
            f"({head(missing)}): compute them as for those cells, or train a model without them."
        )
        raise ValueError(msg)
    return ColumnSource(source, np.array([places[name] for name in wanted]))


def _names(adata: AnnData, inputs: Inputs, n: int) -> list[str]:
    """One a feature; numbers where they have none.

    Raises
    ------
    ValueError
        If two have the same.
    """
    names = inputs.names(adata)
    if names is None:
        return _numbered(n)
    if len(set(names)) < n:
        seen: set[str] = set()
        twice = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        msg = (
            f"{len(twice)} names of features are there twice ({head(twice)}), and features are found by name: rename "
            "or drop them (adata.var_names_make_unique() numbers them)."
        )
        raise ValueError(msg)
    return names


def _numbered(n: int) -> list[str]:
    return [str(place) for place in range(n)]


def _range(source: ImageSource, names: list[str], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each feature: of all rows in memory, elsewhere of 4,096 that are always the same.

    Raises
    ------
    ValueError
        If a value is missing or infinite, naming features and rows.
    """
    n, block = source.shape[0], _SAMPLED
    if source.in_memory:
        parts = [np.arange(start, min(start + block, n)) for start in range(0, n, block)]
    else:
        parts = [np.sort(np.random.default_rng(n).choice(n, min(n, block), replace=False))]
    low, high = np.full(source.shape[1], np.inf), np.full(source.shape[1], -np.inf)
    bad_rows: list[int] = []
    bad = np.zeros(source.shape[1], dtype=np.int64)
    for rows in parts:
        values = source.read(rows)
        low, high = np.fmin(low, values.min(0)), np.fmax(high, values.max(0))
        if not np.isfinite(values.sum(dtype=np.float64)):
            broken = ~np.isfinite(values)
            bad += broken.sum(0)
            bad_rows += rows[broken.any(1)].tolist()
    if bad_rows:
        features = np.flatnonzero(bad)
        empty = np.flatnonzero(bad == sum(map(len, parts)))
        whole = f" ({empty.size} of them in every row: {head(names[place] for place in empty)})" if empty.size else ""
        msg = (
            f"{where} has missing or infinite values in {features.size} features{whole}, first of all "
            f"{head(names[place] for place in features)}, and in {len(bad_rows):,} of {sum(map(len, parts)):,} cells "
            f"looked at (rows {head(bad_rows)}): drop these features or cells, or fill the values in."
        )
        raise ValueError(msg)
    return low, high
