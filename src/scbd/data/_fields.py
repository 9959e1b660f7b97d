"""Fields of an AnnData (as defined by scvi-tools) that ``setup_anndata`` registers and checks.

There are fields of images, features and categorical labels. A model compares the fields of new cells with the
registered ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rich.pretty  # scvi-tools uses rich.pretty to print registries, but does not import it
import rich.table
import torch
from scvi.data.fields import BaseAnnDataField

from scbd._shared.checks import format_count, inflect, join_first
from scbd._shared.keys import Y_REGISTRY
from scbd._shared.labels import CROSS_SEPARATOR, as_columns, encode_labels, label_values
from scbd._shared.messages import warn_user
from scbd.data._channels import channel_names, check_images_match_registered, log_excluded_masks
from scbd.data._input_location import InputLocation
from scbd.data._sources import ColumnSource, draw_rows, find_non_finite_rows, iterate_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data._channels import Channels
    from scbd.data._sources import ImageSource

# _N_CHECKED_IMAGES: number of random cells whose pixels are checked when a model is set up with images on disk.
# _ROWS_PER_BLOCK: number of cells whose features are read and checked at a time. Of features on disk, only one such
# block of random cells is checked.
_N_CHECKED_IMAGES, _ROWS_PER_BLOCK = 64, 4_096


def _registry_table(name: str, **columns: str) -> rich.table.Table:
    """Return the table that scvi-tools prints for one input of a model: one row of values, with named columns."""
    table = rich.table.Table(*(column.replace("_", " ") for column in columns), title=f"{name} State Registry")
    table.add_row(*columns.values())
    return table


class _Field(BaseAnnDataField):
    """Base class of the fields, which sets attributes in place of the abstract properties of scvi-tools."""

    registry_key: str = ""
    attr_name: str = ""
    attr_key: str | None = ""
    is_empty = False


class ImageField(_Field):
    """AnnData field of the images in ``obsm``.

    At set-up, the field registers shape, dtype and channel names of the images. The images of new cells are checked
    against these.

    Parameters
    ----------
    registry_key
        Name of the input in the scvi-tools registry of the model.
    attr_key
        Key of the images in ``obsm``.
    channels
        Channels to use, by name or number. Default: all channels that are not segmentation masks.
    """

    attr_name = "obsm"
    attr_key: str

    def __init__(self, registry_key: str, attr_key: str, channels: Channels | None = None) -> None:
        self.registry_key = registry_key
        self.attr_key = attr_key
        self.inputs = InputLocation(image_key=attr_key, channels=channels)

    def validate_field(self, adata: AnnData) -> None:
        """Check presence, type, shape, dtype and channel names of the images in an AnnData, without reading pixels."""
        self.inputs.source(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Check the pixels of the images, and return the entries to register, such as shape and channel names."""
        source, n_stored = self.inputs.source(adata), self.inputs.stored(adata).shape[1]
        names = self.inputs.taken(adata, n_stored)[1]
        log_excluded_masks(adata.var, n_stored, self.attr_key, self.inputs.channels)
        _check_pixels(source, names, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": names,
            "stored": channel_names(adata.var, n_stored, self.attr_key),
            "asked": self.inputs.channels,
            "var_names": adata.var_names.astype(str).tolist(),
            # whether this machine has an accelerator: this determines the default encoder, which a model keeps on other
            # machines
            "accelerated": torch.accelerator.is_available(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check the images of new cells against the registered entries, and return these entries unchanged.

        Dtype and number of channels must be the registered ones, and pixels must be finite. The size is not checked
        here.
        """
        source = self.inputs.source(adata_target)
        check_images_match_registered(source, state_registry, self.attr_key)
        _check_pixels(source, state_registry["channels"], self.attr_key)
        return dict(state_registry)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Return number of channels, height and width of the registered images."""
        return dict(zip(("n_channels", "height", "width"), state_registry["image_shape"], strict=True))

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Return a table with shape, dtype and channel names of the registered images, which scvi-tools prints."""
        shape, channels = " × ".join(map(str, state_registry["image_shape"])), ", ".join(state_registry["channels"])
        return _registry_table(self.registry_key, image_shape=shape, dtype=state_registry["dtype"], channels=channels)


def _check_pixels(source: ImageSource, channels: list[str], image_key: str) -> None:
    """Check that the pixels of images are finite and that no channel is constant.

    If the images are in memory, the pixels of all cells are checked for NaN and infinities. Otherwise, only those of 64
    random cells are checked here. The pixels of other cells are checked when they are read: for the statistics of the
    channels, in training steps and for embeddings. The search for constant channels always uses up to 64 random cells.
    The choice of random cells is the same for equal numbers of cells.

    Raises
    ------
    ValueError
        If an image holds a NaN or an infinity. The message names the rows of such images.

    Warns
    -----
    UserWarning
        If a channel has the same value in all pixels of the random cells.
    """
    n = source.shape[0]
    rows = draw_rows(n, _N_CHECKED_IMAGES)
    sample = source.read(rows)
    if source.in_memory:
        bad, among = find_non_finite_rows(source), f"{n} cells"
    else:
        bad, among = rows[~np.isfinite(sample).all(axis=(1, 2, 3))], f"{len(rows)} cells that were checked"
    if bad.size:
        msg = (
            f"obsm[{image_key!r}] has NaN or infinite pixels in {bad.size} of {among} (rows {join_first(bad)}): drop "
            "these cells or repair their images."
        )
        raise ValueError(msg)
    low, high = sample.min(axis=(0, 2, 3)), sample.max(axis=(0, 2, 3))
    if len(rows) > 1 and (low == high).any():
        values = ", ".join(f"{channels[i]} ({low[i]:g})" for i in np.flatnonzero(low == high))
        msg = (
            f"obsm[{image_key!r}] has one value in every pixel of {values}, in {len(rows)} cells that were checked: an "
            "empty channel, or the transparency of an image, carries no information. Exclude it with channels=…."
        )
        warn_user(msg)


class FeatureField(_Field):
    """AnnData field of the features in ``X``, in a layer or in ``obsm``.

    At set-up, the field registers names and dtype of the features. In new cells, features are found by name.

    Parameters
    ----------
    registry_key
        Name of the input in the scvi-tools registry of the model.
    inputs
        Location of the features in the AnnData.
    """

    def __init__(self, registry_key: str, inputs: InputLocation) -> None:
        self.registry_key = registry_key
        self.inputs = inputs
        self.attr_name = "obsm" if inputs.layer is None else "X" if inputs.where == "X" else "layers"
        self.attr_key = inputs.obsm_key if inputs.layer is None else None if inputs.where == "X" else inputs.layer

    def validate_field(self, adata: AnnData) -> None:
        """Check that the features can be read from an AnnData, and that no two features have the same name."""
        _feature_names(adata, self.inputs, self.inputs.source(adata).shape[1])

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Check the values of the features, and return the entries to register, such as the names of varying features.

        Raises
        ------
        ValueError
            If a value is missing or infinite, or if all features are constant.

        Warns
        -----
        UserWarning
            If features are excluded because they have the same value in all inspected cells.
        """
        source = self.inputs.source(adata)
        names = _feature_names(adata, self.inputs, source.shape[1])
        low, high = _value_ranges(source, names, self.inputs.where)
        constant = np.flatnonzero(low == high)
        if len(constant) == len(names):
            msg = f"Every feature of {self.inputs.where} has one value in all cells: there is nothing to learn from."
            raise ValueError(msg)
        if constant.size:
            msg = (
                f"{constant.size} of {len(names)} features of {self.inputs.where} "
                f"{inflect(constant.size, 'has', 'have')} one value in all cells inspected, and "
                f"{inflect(constant.size, 'is', 'are')} excluded: {join_first(names[place] for place in constant)}."
            )
            warn_user(msg)
        return {
            "features": [name for name, same in zip(names, low == high, strict=True) if not same],
            "dtype": source.dtype.name,
            "columns": names,
            "n_rows": adata.n_obs,
            "var_names": adata.var_names.astype(str).tolist(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new cells have finite values of all registered features, and return the unchanged entries."""
        source = match_features(adata_target, self.inputs, state_registry)
        _value_ranges(source, state_registry["features"], self.inputs.where)
        return dict(state_registry)

    def get_field_data(self, adata: AnnData) -> Any:
        """Return the features of the cells, as the AnnData stores them (an array or a data frame)."""
        return self.inputs.array(adata)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Return the number of registered features."""
        return {"n_features": len(state_registry["features"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Return a table with number, names and dtype of the registered features, which scvi-tools prints."""
        names = state_registry["features"]
        return _registry_table(
            self.registry_key, features=f"{len(names)}: {join_first(names)}", dtype=state_registry["dtype"]
        )


def match_features(adata: AnnData, inputs: InputLocation, registered: dict[str, Any]) -> ImageSource:
    """Return the features of new cells that a model uses, in the order of the model.

    Features are matched by name. New cells may have further features, in any order. Arrays in ``obsm`` have no feature
    names: their columns are matched by position, with a warning if the model was set up with feature names.

    Parameters
    ----------
    adata
        New cells.
    inputs
        Location of the features in the AnnData.
    registered
        Entries of the model's registry that :class:`FeatureField` recorded.

    Raises
    ------
    KeyError, TypeError
        If the AnnData has no table of features at this location, see :meth:`InputLocation.source`.
    ValueError
        If a feature of the model is missing, if two features have the same name, or if features without names differ in
        number from those with which the model was set up.

    Warns
    -----
    UserWarning
        If the features of the new cells have no names, whereas those of the model have names.
    """
    source = inputs.source(adata)
    names, wanted = _feature_names(adata, inputs, source.shape[1]), registered["features"]
    columns = registered["columns"]
    if inputs.names(adata) is None:
        if len(names) != len(columns):
            msg = (
                f"{inputs.where} has {len(names)} features, the model was set up with {len(columns)}. "
                "Features without names are matched by their position: give all of them, in the same order."
            )
            raise ValueError(msg)
        if columns != names:
            msg = (
                f"{inputs.where} has no names of features, and those of the model have ({join_first(columns)}): "
                "they are taken to be in that order. Give a pandas.DataFrame with these columns to be sure."
            )
            warn_user(msg)
        names = columns
    if names == wanted:
        return source
    places = {name: place for place, name in enumerate(names)}
    missing = [name for name in wanted if name not in places]
    if missing:
        msg = (
            f"{inputs.where} lacks {len(missing)} of the {len(wanted)} features that the model was set up with "
            f"({join_first(missing)}): compute them as for those cells, or train a model without them."
        )
        raise ValueError(msg)
    return ColumnSource(source, np.array([places[name] for name in wanted]))


def _feature_names(adata: AnnData, inputs: InputLocation, n: int) -> list[str]:
    """Return the names of the ``n`` features, or their positions as text if they have no names.

    Raises
    ------
    ValueError
        If two features have the same name.
    """
    names = inputs.names(adata)
    if names is None:
        return [str(place) for place in range(n)]
    twice = pd.Index(names)[pd.Index(names).duplicated()]
    if len(twice):
        msg = (
            f"{len(twice)} {inflect(len(twice), 'name of a feature is', 'names of features are')} there twice "
            f"({join_first(twice)}), and features are found by name: rename "
            "or drop them (adata.var_names_make_unique() numbers them)."
        )
        raise ValueError(msg)
    return names


def _value_ranges(source: ImageSource, names: list[str], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each feature over the cells, each ``(F,)``.

    If the features are in memory, all cells are read. Otherwise, 4,096 random cells are read. Their choice is the same
    for equal numbers of cells.

    Raises
    ------
    ValueError
        If a value is missing or infinite. The message names the features and the rows of the cells.
    """
    n = source.shape[0]
    rows = np.arange(n) if source.in_memory else draw_rows(n, _ROWS_PER_BLOCK)
    low, high = np.full(source.shape[1], np.inf), np.full(source.shape[1], -np.inf)
    bad_rows: list[int] = []
    bad = np.zeros(source.shape[1], dtype=bool)
    for block in iterate_blocks(len(rows), _ROWS_PER_BLOCK):
        values = source.read(rows[block])
        low, high = np.fmin(low, values.min(0)), np.fmax(high, values.max(0))
        broken = ~np.isfinite(values)
        bad |= broken.any(0)
        bad_rows += rows[block][broken.any(1)].tolist()
    if bad_rows:
        msg = (
            f"{where} has missing or infinite values in {format_count(bad.sum(), 'feature')} "
            f"({join_first(names[place] for place in np.flatnonzero(bad))}), and in {len(bad_rows):,} of "
            f"{len(rows):,} cells that were checked (rows {join_first(bad_rows)}): drop these features or "
            "cells, or fill the values in."
        )
        raise ValueError(msg)
    return low, high


class LabelField(_Field):
    """AnnData field of a categorical label in ``obs``, such as the perturbation or the environment of each cell.

    Several columns are combined into one label.

    Parameters
    ----------
    registry_key
        Name of the label in the scvi-tools registry of the model.
    columns
        Name of one column, or names of several. Each combination of their values that occurs in a cell becomes one
        category of the label.
    """

    attr_name = "obs"
    attr_key: str

    def __init__(self, registry_key: str, columns: str | Sequence[str]) -> None:
        self.registry_key = registry_key
        self.columns = as_columns(columns)
        # name of the field in scvi-tools. Names of several columns are joined to a name that is not a column of obs, so
        # that no single column is mistaken for the combined label.
        self.attr_key = CROSS_SEPARATOR.join(self.columns)

    def validate_field(self, adata: AnnData) -> None:
        """Check that every cell has a label, and that the cells have at least two different labels.

        If the label is the perturbation, also check that at least two cells have the same label.
        """
        self._labels(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Return the entries to register: the names of the columns, and the categories of the label."""
        labels = self._labels(adata)
        return {"columns": list(self.columns), "categories": labels.cat.categories.tolist()}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Return the registered entries, with new labels of new cells appended to the registered categories.

        New labels (for example, a new well) and missing labels are allowed, because cells can be embedded without
        labels.
        """
        known = state_registry["categories"]
        _, unknown = encode_labels(label_values(adata_target.obs, self.columns, allow_missing=True), known)
        return {"columns": list(self.columns), "categories": known + unknown}

    def get_field_data(self, adata: AnnData) -> pd.Series:
        """Return the label of each cell, a categorical of length N.

        Its categories are those that occur in this AnnData, and may differ from the registered ones. :meth:`codes`
        returns integer codes that refer to the registered categories.
        """
        return label_values(adata.obs, self.columns)

    def codes(self, adata: AnnData, categories: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
        """Return the label of each cell as an integer code, int64 ``(N,)``, and a list of the unregistered labels.

        The code of a label is its position in ``categories``, the registered categories. Unregistered labels get the
        numbers that follow. Codes do not depend on the order of the categories in the AnnData, which may change between
        set-up and training.
        """
        return encode_labels(self.get_field_data(adata), categories)

    def unknown(self, labels: Sequence[Any]) -> str:
        """Return the error message for labels of new cells with which the model was not set up."""
        return (
            f"{self._where} holds {format_count(len(labels), 'label')} that the model was not set up with "
            f"({join_first(map(repr, labels))}), used as {self.registry_key}: exclude these cells, or set up and train "
            "a new model."
        )

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Return the number of registered categories of the label."""
        return {f"n_{self.registry_key}": len(state_registry["categories"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Return a table with the columns and the registered categories of the label, which scvi-tools prints."""
        columns, categories = (", ".join(map(str, state_registry[name])) for name in ("columns", "categories"))
        return _registry_table(self.registry_key, columns=columns, categories=categories)

    @property
    def _where(self) -> str:
        """Columns of the label as Python code for messages, such as ``obs['gene']``."""
        return " and ".join(f"obs[{column!r}]" for column in self.columns)

    def _labels(self, adata: AnnData) -> pd.Series:
        """Return the label of each cell, after a check of the labels.

        Raises
        ------
        KeyError
            If a column is missing.
        ValueError
            If a cell has no label, if all cells have the same label, or if the label is the perturbation and no two
            cells have the same one.
        """
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
