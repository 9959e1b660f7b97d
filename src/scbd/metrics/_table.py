"""Read an embedding and a label off a table, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import LEFT_OUT
from scbd._labels import as_columns, label_text, label_values
from scbd._labels import control_names as control_names  # for the metrics, beside labels
from scbd._matrices import dense
from scbd._seen import seen_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike


# what a column says of rows that were not learned from
_NOT_TRAINED = ("False", "validation", "test", LEFT_OUT)


def embedding_and_labels(
    adata: AnnData, embedding_key: str, label_key: str | Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Embedding ``(N, D)`` and one label a cell, the cross of several columns.

    Raises
    ------
    KeyError, TypeError, ValueError
        See :func:`stored_embedding`; or if the column is missing, or a cell has no label.
    """
    return np.asarray(stored_embedding(adata, embedding_key)), label_names(adata, label_key)


def stored_embedding(adata: AnnData, key: str) -> Any:
    """A key of ``obsm``, as an array or a memory-map ``(N, D)``.

    Raises
    ------
    KeyError
        If there is no such key.
    TypeError
        If it is a DataFrame, and a column holds no numbers.
    ValueError
        If it is sparse.
    """
    check_keys(adata, [key])
    return dense(adata.obsm[key], f"obsm[{key!r}]")


def label_names(adata: AnnData, label_key: str | Sequence[str]) -> np.ndarray:
    """One label a row as text ``(N,)``, the cross of several columns; see :func:`embedding_and_labels`."""
    names, codes = coded_labels(adata, label_key)
    return names[codes]


def coded_labels(adata: AnnData, label_key: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Labels as text, each once, ``(L,)``, and the place of each row's ``(N,)``; see :func:`embedding_and_labels`."""
    columns = as_columns(label_key)
    check_keys(adata, [], columns)
    labels = label_values(adata.obs, columns)
    texts = np.array([label_text(label) for label in labels.cat.categories], dtype=object)
    places, names = pd.factorize(texts)
    return names, places.astype(np.int32)[labels.cat.codes]  # four bytes a cell, of which there may be millions


def representation(adata: AnnData, rep: str | ArrayLike) -> np.ndarray:
    """A key of ``obsm``, or an array with a row for each of the table's; finite ``(N, D)``.

    Raises
    ------
    KeyError
        If there is no such key.
    TypeError
        If it is a DataFrame, and a column holds no numbers.
    ValueError
        If it is sparse, of another shape, or not finite.
    """
    x = np.asarray(stored_embedding(adata, rep) if isinstance(rep, str) else dense(rep, "rep"))
    if x.ndim != 2 or len(x) != adata.n_obs:
        msg = f"rep has the shape {x.shape}: give one row for each of the {adata.n_obs} rows of the table."
        raise ValueError(msg)
    n_bad = int((~np.isfinite(x).all(axis=1)).sum())
    if n_bad:
        msg = f"rep has NaN or infinite values in {n_bad} of {len(x)} rows: drop them."
        raise ValueError(msg)
    return x


def chosen_rows(name: str, rows: ArrayLike | None, n: int) -> np.ndarray:
    """A mask ``(N,)`` of rows that were given as a mask or by number; all of them where none were given.

    Raises
    ------
    ValueError
        If a mask is of another length, a number is no row, or a row is named twice.
    """
    if rows is None:
        return np.ones(n, dtype=bool)
    given = np.asarray(rows)
    if given.dtype == bool and given.shape == (n,):
        return given
    if given.ndim != 1 or given.dtype.kind not in "iu" or (given.size and not 0 <= given.min() <= given.max() < n):
        msg = (
            f"{name} is {given.dtype.name} of shape {given.shape}: give a mask of the {n} rows, or row numbers from 0 "
            f"to {n - 1}."
        )
        raise ValueError(msg)
    mask = np.zeros(n, dtype=bool)
    mask[given] = True
    if mask.sum() < len(given):
        msg = f"{name} names a row twice: each row number once."
        if len(given) == n and set(np.unique(given)) <= {0, 1}:
            msg = f"{name} is a mask of numbers, which would be taken for rows 0 and 1: give {name}.astype(bool)."
        raise ValueError(msg)
    return mask


def trained_rows(adata: AnnData, trained_on: str | ArrayLike, name: str = "trained_on") -> np.ndarray:
    """A mask ``(N,)`` of rows that were learned from: given so, by number, or as a column that says it.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a column says of no row whether it was, or see :func:`chosen_rows`.
    """
    if not isinstance(trained_on, str):
        return chosen_rows(name, trained_on, adata.n_obs)
    said = label_names(adata, trained_on)
    trained = np.isin(said, ["True", "train"])
    if not (trained.any() or np.isin(said, _NOT_TRAINED).any()):
        msg = f"No row of obs[{trained_on!r}] says True or 'train': mark the rows that the embedding was trained on."
        raise ValueError(msg)
    return trained


def learned_rows(adata: AnnData, x: np.ndarray, trained_on: str | ArrayLike | None) -> np.ndarray | None:
    """A mask ``(N,)`` of rows that an embedding learned from, or of their perturbations; `None` where nobody said.

    Raises
    ------
    KeyError, ValueError
        See :func:`trained_rows`.
    """
    if trained_on is not None:
        return trained_rows(adata, trained_on)
    return seen_rows(adata.obs, x)


def check_keys(adata: AnnData, obsm: Iterable[str], obs: Iterable[str] = ()) -> None:
    """Raise a KeyError that names the keys there are, if one is missing."""
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot):
                msg = f"{slot} has no {key!r} (its keys: {', '.join(getattr(adata, slot).keys()) or 'none'})."
                raise KeyError(msg)
