"""Read an embedding and a label off a table, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
    columns = [label_key] if isinstance(label_key, str) else list(label_key)
    check_keys(adata, [embedding_key], columns)
    missing = adata.obs[columns].isna().any(axis=1)
    if missing.any():
        msg = f"obs[{columns}] has no value for {missing.sum()} of {adata.n_obs} cells: drop these cells."
        raise ValueError(msg)
    labels = adata.obs[columns[0]].astype(str)
    for column in columns[1:]:
        labels = labels + " × " + adata.obs[column].astype(str)
    return np.asarray(adata.obsm[embedding_key]), labels.to_numpy()


def check_keys(adata: AnnData, obsm: Iterable[str], obs: Iterable[str] = ()) -> None:
    """Raise a KeyError that names the keys there are, if one is missing."""
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot):
                msg = f"{slot} has no {key!r} (its keys: {', '.join(getattr(adata, slot).keys()) or 'none'})."
                raise KeyError(msg)
