"""What `setup_anndata` registers of images, features, labels and numbers, having looked at them once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.pretty  # scvi-tools shows registries with it, and does not import it
import rich.table
import torch
from scvi.data.fields import BaseAnnDataField

from scbd._anndata import CROSS, Y_REGISTRY, as_columns, label_codes, label_values, number_values
from scbd._checks import counted, head, inflect
from scbd.data._inputs import Inputs, channel_names, check_like_registered, say_masks
from scbd.data._sources import ColumnSource, non_finite_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from anndata import AnnData

    from scbd.data._inputs import Channels
    from scbd.data._sources import ImageSource

# cells that are looked at of images and of features that are not in memory: a few of any store are read in no time
_IMAGES, _ROWS = 64, 4_096


def _shown(name: str, **columns: str) -> rich.table.Table:
    """What scvi-tools prints of a registry: a row under names of columns."""
    table = rich.table.Table(*(column.replace("_", " ") for column in columns), title=f"{name} State Registry")
    table.add_row(*columns.values())
    return table


class ImageField(BaseAnnDataField):
    """Images in ``obsm``: registers shape, dtype and channel names, and holds new cells to them.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    attr_key
        Key in ``obsm``.
    channels
        Those that are taken; by default all but masks.
    """

    registry_key: str = ""
    attr_name = "obsm"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, attr_key: str, channels: Channels | None = None) -> None:
        self.registry_key = registry_key
        self.attr_key = attr_key
        self.inputs = Inputs(image_key=attr_key, channels=channels)

    def validate_field(self, adata: AnnData) -> None:
        """Check that the images can be read: presence, type, shape, dtype, names. Reads no pixel."""
        self.inputs.source(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record what the images are, having looked at their pixels once."""
        source, n_stored = self.inputs.source(adata), self.inputs.stored(adata).shape[1]
        names = self.inputs.taken(adata, n_stored)[1]
        say_masks(adata.var, n_stored, self.attr_key, self.inputs.channels)
        _check_pixels(source, names, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": names,
            "stored": channel_names(adata.var, n_stored, self.attr_key),
            "asked": self.inputs.channels,
            "var_names": adata.var_names.astype(str).tolist(),
            # what a network has to make do with, see the model's default; it goes where the model goes
            "accelerated": torch.accelerator.is_available(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new images are of the kind that was registered, which stays what the model takes."""
        source = self.inputs.source(adata_target)
        check_like_registered(source, state_registry, self.attr_key)
        _check_pixels(source, state_registry["channels"], self.attr_key)
        return dict(state_registry)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of channels, height and width."""
        return dict(zip(("n_channels", "height", "width"), state_registry["image_shape"], strict=True))

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show what the images are."""
        shape, channels = " × ".join(map(str, state_registry["image_shape"])), ", ".join(state_registry["channels"])
        return _shown(self.registry_key, image_shape=shape, dtype=state_registry["dtype"], channels=channels)


def _check_pixels(source: ImageSource, channels: list[str], image_key: str) -> None:
    """Look at all images in memory, elsewhere at 64 cells that are always the same for so many.

    What the sample does not meet is met later: statistics of the channels, every training step and every embedding
    look at the pixels that they read.

    Raises
    ------
    ValueError
        If an image holds a NaN or an infinity, naming the rows.

    Warns
    -----
    UserWarning
        If a channel has the same value in all pixels of the sample.
    """
    n = source.shape[0]
    rows = np.sort(np.random.default_rng(n).choice(n, min(n, _IMAGES), replace=False))
    sample = source.read(rows)
    if source.in_memory:
        bad, among = non_finite_rows(source), f"{n} cells"
    else:
        bad, among = rows[~np.isfinite(sample).all(axis=(1, 2, 3))], f"{len(rows)} cells that were looked at"
    if bad.size:
        msg = (
            f"obsm[{image_key!r}] has NaN or infinite pixels in {bad.size} of {among} (rows {head(bad)}): drop these "
            "cells or repair their images."
        )
        raise ValueError(msg)
    low, high = sample.min(axis=(0, 2, 3)), sample.max(axis=(0, 2, 3))
    if len(rows) > 1 and (low == high).any():
        values = ", ".join(f"{channels[i]} ({low[i]:g})" for i in np.flatnonzero(low == high))
        msg = (
            f"obsm[{image_key!r}] has one value in every pixel of {values}, in {len(rows)} cells looked at: an empty "
            "channel, or the transparency of a picture, says nothing about cells. Leave it out with channels=…."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


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
        """Record which features vary, having looked at their values once."""
        source = self.inputs.source(adata)
        names = _names(adata, self.inputs, source.shape[1])
        low, high = _range(source, names, self.inputs.where)
        constant = np.flatnonzero(low == high)
        if len(constant) == len(names):
            msg = f"Every feature of {self.inputs.where} has one value in all cells: there is nothing to learn from."
            raise ValueError(msg)
        if constant.size:
            msg = (
                f"{constant.size} of {len(names)} features of {self.inputs.where} "
                f"{inflect(constant.size, 'has', 'have')} one value in all cells inspected, and "
                f"{inflect(constant.size, 'is', 'are')} excluded: {head(names[place] for place in constant)}."
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
        names = state_registry["features"]
        return _shown(self.registry_key, features=f"{len(names)}: {head(names)}", dtype=state_registry["dtype"])


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
        return [str(place) for place in range(n)]
    if len(set(names)) < n:
        seen: set[str] = set()
        twice = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        msg = (
            f"{len(twice)} {inflect(len(twice), 'name of a feature is', 'names of features are')} there twice "
            f"({head(twice)}), and features are found by name: rename "
            "or drop them (adata.var_names_make_unique() numbers them)."
        )
        raise ValueError(msg)
    return names


def _range(source: ImageSource, names: list[str], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each feature: of all rows in memory, elsewhere of 4,096 that are always the same.

    Raises
    ------
    ValueError
        If a value is missing or infinite, naming features and rows.
    """
    n = source.shape[0]
    if source.in_memory:
        parts = [np.arange(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS)]
    else:
        parts = [np.sort(np.random.default_rng(n).choice(n, min(n, _ROWS), replace=False))]
    low, high = np.full(source.shape[1], np.inf), np.full(source.shape[1], -np.inf)
    bad_rows: list[int] = []
    bad = np.zeros(source.shape[1], dtype=bool)
    for rows in parts:
        values = source.read(rows)
        low, high = np.fmin(low, values.min(0)), np.fmax(high, values.max(0))
        if not np.isfinite(values.sum(dtype=np.float64)):
            broken = ~np.isfinite(values)
            bad |= broken.any(0)
            bad_rows += rows[broken.any(1)].tolist()
    if bad_rows:
        msg = (
            f"{where} has missing or infinite values in {counted(bad.sum(), 'feature')} "
            f"({head(names[place] for place in np.flatnonzero(bad))}), and in {len(bad_rows):,} of "
            f"{sum(map(len, parts)):,} cells looked at (rows {head(bad_rows)}): drop these features or cells, or fill "
            "the values in."
        )
        raise ValueError(msg)
    return low, high


class _ObsField(BaseAnnDataField):
    """One or several columns of ``obs``."""

    registry_key: str = ""
    attr_name = "obs"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, columns: str | Sequence[str]) -> None:
        self.registry_key = registry_key
        self.columns = as_columns(columns)
        # of several there is no column, and no one may stand for them
        self.attr_key = CROSS.join(self.columns)


class LabelField(_ObsField):
    """A categorical label in ``obs``; several columns become one label, their cross.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    """

    def validate_field(self, adata: AnnData) -> None:
        """Check that every cell has a label, and that there are at least two different ones."""
        self._labels(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record the categories."""
        labels = self._labels(adata)
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
        return (
            f"{self._where} holds {counted(len(labels), 'label')} that the model was not set up with "
            f"({head(map(repr, labels))}), used as {self.registry_key}: exclude these cells, or set up and train a new "
            "model."
        )

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of categories."""
        return {f"n_{self.registry_key}": len(state_registry["categories"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show the categories."""
        columns, categories = (", ".join(map(str, state_registry[name])) for name in ("columns", "categories"))
        return _shown(self.registry_key, columns=columns, categories=categories)

    @property
    def _where(self) -> str:
        return " and ".join(f"obs[{column!r}]" for column in self.columns)

    def _labels(self, adata: AnnData) -> pd.Series:
        labels = label_values(adata.obs, self.columns)
        if labels.cat.categories.size < 2:
            msg = (
                f"Every cell has the same {self._where} ({labels.cat.categories[0]!r}), used as {self.registry_key}: "
                f"there is nothing to contrast. Give {self.registry_key}_key a column with at least two values."
            )
            raise ValueError(msg)
        if self.registry_key == Y_REGISTRY and labels.cat.categories.size == len(labels):
            msg = (
                f"Every cell has a {self._where} of its own, used as {self.registry_key}: no two cells are replicates. "
                f"Give {self.registry_key}_key a column with labels that several cells share."
            )
            raise ValueError(msg)
        return labels


class NumberField(_ObsField):
    """Columns of numbers in ``obs``, such as the time, whose order counts.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    """

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
        return _shown(self.registry_key, columns=", ".join(state_registry["columns"]))
