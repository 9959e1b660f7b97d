"""Read an embedding and a label off a table, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._labels import as_columns, label_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData


def embedding_and_labels(
    adata: AnnData, embedding_key: str, label_key: str | Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Embedding ``(N, D)`` and one label a cell, the cross of several columns.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a cell has no label.
    """
    columns = as_columns(label_key)
    check_keys(adata, [embedding_key], columns)
    labels = label_values(adata.obs, columns)
    names = labels.cat.categories.astype(str).to_numpy()
    return np.asarray(adata.obsm[embedding_key]), names[labels.cat.codes]


def check_keys(adata: AnnData, obsm: Iterable[str], obs: Iterable[str] = ()) -> None:
    """Raise a KeyError that names the keys there are, if one is missing."""
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot):
                msg = f"{slot} has no {key!r} (its keys: {', '.join(getattr(adata, slot).keys()) or 'none'})."
                raise KeyError(msg)
