"""What `setup_anndata` registers: the image tensor, and one label that may span several obs columns."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rich.table
import zarr
from scvi.data.fields import BaseAnnDataField

from scbd.data.channels import channel_names, warn_of_channels
from scbd.data.pixels import check_pixels
from scbd.data.sources import ArraySource, ImageSource, ZarrSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

CROSS = " × "  # joins the values of several columns into one label


class ImageField(BaseAnnDataField):
    """Images in ``obsm``: registers shape, dtype and channel names, and holds new cells to them.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    attr_key
        Key in ``obsm``.
    """

    registry_key: str = ""
    attr_name = "obsm"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, attr_key: str) -> None:
        self.registry_key = registry_key
        self.attr_key = attr_key

    def validate_field(self, adata: AnnData) -> None:
        """Check that the images can be read: presence, type, shape, dtype, names. Reads no pixel."""
        source = image_source(adata, self.attr_key)
        channel_names(adata.var, source.shape[1], self.attr_key)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record what the images are, having looked at their pixels once."""
        source = image_source(adata, self.attr_key)
        names = channel_names(adata.var, source.shape[1], self.attr_key)
        warn_of_channels(adata.var, source.shape[1], self.attr_key)
        check_pixels(source, names, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": names,
            "var_names": adata.var_names.astype(str).tolist(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new images are of the kind that was registered, which stays what the model takes."""
        source = image_source(adata_target, self.attr_key)
        check_like_registered(source, state_registry, self.attr_key)
        check_pixels(source, state_registry["channels"], self.attr_key)
        return dict(state_registry)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of channels, height and width."""
        return dict(zip(("n_channels", "height", "width"), state_registry["image_shape"], strict=True))

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show what the images are."""
        table = rich.table.Table("image shape", "dtype", "channels", title=f"{self.registry_key} State Registry")
        shape = " × ".join(map(str, state_registry["image_shape"]))
        table.add_row(shape, state_registry["dtype"], ", ".join(state_registry["channels"]))
        return table


class LabelField(BaseAnnDataField):
    """A categorical label in ``obs``; several columns become one label, their cross.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    columns
        One column, or several.
    """

    registry_key: str = ""
    attr_name = "obs"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, columns: str | Sequence[str]) -> None:
        self.registry_key = registry_key
        self.columns = as_columns(columns)
        self.attr_key = self.columns[0]

    def validate_field(self, adata: AnnData) -> None:
        """Check that every cell has a label, and that there are at least two different ones."""
        labels = label_values(adata.obs, self.columns)
        if labels.cat.categories.size < 2:
            msg = (
                f"Every cell has the same {_named(self.columns)} ({labels.cat.categories[0]!r}), used as "
                f"{self.registry_key}: there is nothing to contrast. Give {self.registry_key}_key a column with at "
                "least two values."
            )
            raise ValueError(msg)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record the categories."""
        self.validate_field(adata)
        categories = label_values(adata.obs, self.columns).cat.categories.tolist()
        return {"columns": list(self.columns), "categories": categories}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Keep the registered categories and add new ones behind them: an unseen well is no error."""
        known = state_registry["categories"]
        found = label_values(adata_target.obs, self.columns).cat.categories
        return {"columns": list(self.columns), "categories": known + [c for c in found if c not in set(known)]}

    def get_field_data(self, adata: AnnData) -> np.ndarray:
        """Codes of the labels, int64 ``(N,)``."""
        return label_values(adata.obs, self.columns).cat.codes.to_numpy(np.int64)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of categories."""
        return {f"n_{self.registry_key}": len(state_registry["categories"])}

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show the categories."""
        table = rich.table.Table("columns", "categories", title=f"{self.registry_key} State Registry")
        table.add_row(", ".join(state_registry["columns"]), ", ".join(map(str, state_registry["categories"])))
        return table


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Images of a table, ready to be read by row.

    Raises
    ------
    KeyError
        If ``obsm`` has no such key.
    TypeError, ValueError
        If what lies there is no image tensor, see :class:`~scbd.data.ArraySource`.
    """
    if image_key not in adata.obsm:
        msg = _missing("obsm", image_key, adata.obsm.keys(), "image_key")
        raise KeyError(msg)
    images, where = adata.obsm[image_key], f"obsm[{image_key!r}]"
    return ZarrSource(images, where) if isinstance(images, zarr.Array) else ArraySource(images, where)


def check_like_registered(
    source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool | None = None
) -> None:
    """Raise if images differ in kind from the registered ones.

    Parameters
    ----------
    source
        The images.
    registered
        What :class:`ImageField` recorded.
    image_key
        Where they are.
    resize
        Whether the model resizes, and takes other sizes of the same proportions; `None` where that is not known yet,
        and size is not looked at.

    Raises
    ------
    ValueError
        If dtype, number of channels, size or proportions differ.
    """
    c, *size = registered["image_shape"]
    if source.shape[1] != c or source.dtype.name != registered["dtype"]:
        msg = (
            f"obsm[{image_key!r}] holds {source.shape[1]} channels of {source.dtype.name}, the model was set up with "
            f"{c} of {registered['dtype']} ({', '.join(registered['channels'])}): convert the images to match."
        )
        raise ValueError(msg)
    height, width = source.shape[2:]
    said = (
        f"obsm[{image_key!r}] holds images of {height} × {width} pixels, the model was trained on {size[0]} × {size[1]}"
    )
    if resize is False and [height, width] != size:
        msg = f"{said}: resize them, or train a model with image_size=… that resizes by itself."
        raise ValueError(msg)
    if resize and height * size[1] != width * size[0]:
        msg = f"{said}, and resizing would stretch them: crop or pad them to the proportions of those."
        raise ValueError(msg)


def as_columns(columns: str | Sequence[str]) -> tuple[str, ...]:
    """One column name, or several, as a tuple."""
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    if not columns:
        msg = "An empty list of obs columns was given: name at least one."
        raise ValueError(msg)
    return columns


def label_values(obs: pd.DataFrame, columns: str | Sequence[str]) -> pd.Series:
    """One categorical label a cell from one or several obs columns; unused categories are dropped.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a cell has no value (which rows).
    """
    columns = as_columns(columns)
    for column in columns:
        if column not in obs:
            msg = _missing("obs", column, obs.columns, "y_key or e_key")
            raise KeyError(msg)
        missing = np.flatnonzero(obs[column].isna())
        if missing.size:
            msg = (
                f"obs[{column!r}] has no value for {missing.size} of {len(obs)} cells (rows {_head(missing)}): drop "
                f"these cells with adata[adata.obs[{column!r}].notna()].copy(), or give them a value."
            )
            raise ValueError(msg)
    if len(columns) == 1:
        return obs[columns[0]].astype("category").cat.remove_unused_categories()
    parts = [obs[column].astype(str) for column in columns]
    return parts[0].str.cat(parts[1:], sep=CROSS).astype("category")


def _named(columns: Sequence[str]) -> str:
    return " and ".join(f"obs[{column!r}]" for column in columns)


def _head(rows: np.ndarray, n: int = 5) -> str:
    return ", ".join(map(str, rows[:n])) + (", …" if rows.size > n else "")


def _missing(slot: str, key: str, keys: Iterable[str], argument: str) -> str:
    keys = [str(k) for k in keys]
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{slot} has no {key!r} (its keys: {', '.join(keys) or 'none'}).{hint} Name it with {argument}."
