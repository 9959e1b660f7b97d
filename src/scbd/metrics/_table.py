"""What scores are of: embeddings by name, label columns, controls, and which rows were trained on; each checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._anndata import (
    CONTENT_KEY,
    FOLD_KEY,
    LEFT_OUT,
    SPLIT_KEY,
    as_columns,
    check_anndata,
    dense,
    label_text,
    label_values,
)
from scbd._checks import check_unmasked, head, missing_key

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

# a key of obsm, a layer or X, an array, or the path of a file that embed_to wrote
Source = str | Path | np.ndarray
# keys of obsm; or names of representations with where they are, or with several, such as those of training seeds
Embeddings = Sequence[str] | Mapping[str, Source | Sequence[Source]]

# what a column says of rows that were not learned from
_NOT_TRAINED = ("False", "validation", "test", LEFT_OUT)


class Embedding(NamedTuple):
    """One of several that are compared."""

    representation: str
    """What it is called; those of several training seeds have one name."""
    key: str
    """Which of them it is."""
    values: Any
    """``(N, D)``, an array or a memory-map."""


def named_embeddings(adata: AnnData, embeddings: Embeddings) -> list[Embedding]:
    """All embeddings that were asked for, in order.

    Raises
    ------
    TypeError
        If a column of a DataFrame holds no numbers.
    ValueError
        If there is none, one is sparse, an array is of another shape or not finite, or a file is of other cells.
    KeyError
        If ``obsm`` does not have one.
    FileNotFoundError
        If there is no such file.
    """
    if isinstance(embeddings, str):
        embeddings = [embeddings]
    if not isinstance(embeddings, Mapping):
        embeddings = {key: key for key in embeddings}
    several = {name: [given] if isinstance(given, Source) else list(given) for name, given in embeddings.items()}
    if not any(several.values()):
        msg = "No embedding was asked for: name keys of obsm."
        raise ValueError(msg)
    check_keys(adata, [key for sources in several.values() for key in sources if isinstance(key, str)])
    return [
        _found(adata, name, place, source) for name, sources in several.items() for place, source in enumerate(sources)
    ]


def _found(adata: AnnData, name: str, i: int, source: Source) -> Embedding:
    if isinstance(source, str):
        return Embedding(name, source, stored_embedding(adata, source))
    if isinstance(source, Path):
        return Embedding(name, str(source), _of_file(adata, source))
    return Embedding(name, f"{name}[{i}]", representation(adata, source))


def _of_file(adata: AnnData, path: Path) -> Any:
    """z_c of a file, or its only embedding, in the order of the table's cells; memory-mapped where that is its own."""
    from scbd.data._screens import open_embedding

    stored = open_embedding(path)
    keys = list(stored.obsm)
    key = CONTENT_KEY if CONTENT_KEY in keys else keys[0] if len(keys) == 1 else None
    if key is None:
        msg = f"{path} holds {', '.join(keys) or 'no embedding'}: open it with scbd.data.open_embedding, and give one."
        raise ValueError(msg)
    values = dense(stored.obsm[key], f"obsm[{key!r}]")
    if stored.obs_names.equals(adata.obs_names):
        return values
    if not (stored.obs_names.is_unique and adata.obs_names.is_unique):
        msg = f"{path} has other cells than the table, or in another order, and obs_names repeat: give an array."
        raise ValueError(msg)
    rows = stored.obs_names.get_indexer(adata.obs_names)
    if (rows < 0).any():
        msg = f"{path} lacks {(rows < 0).sum():,} of the {adata.n_obs:,} cells of the table, by their obs_names."
        raise ValueError(msg)
    return np.asarray(values)[rows]


def stored_embedding(adata: AnnData, key: str) -> Any:
    """A key of ``obsm``, else a layer, or ``"X"``; as an array or a memory-map ``(N, D)``.

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
    if key in adata.obsm:
        return dense(adata.obsm[key], f"obsm[{key!r}]")
    return dense(*((adata.layers[key], f"layers[{key!r}]") if key in adata.layers else (adata.X, "X")))


def representation(adata: AnnData, rep: str | ArrayLike) -> np.ndarray:
    """A key of ``obsm``, a layer, ``"X"``, or an array with a row for each of the table's; finite ``(N, D)``.

    Raises
    ------
    KeyError, TypeError
        See :func:`stored_embedding`.
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


def label_names(adata: AnnData, label_key: str | Sequence[str]) -> np.ndarray:
    """One label a row as text ``(N,)``, the cross of several columns.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a row has no label.
    """
    names, codes = coded_labels(adata, label_key)
    return names[codes]


def coded_labels(adata: AnnData, label_key: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Labels as text, each once, ``(L,)``, and the place of each row's ``(N,)``; see :func:`label_names`."""
    columns = as_columns(label_key)
    check_keys(adata, [], columns)
    labels = label_values(adata.obs, columns)
    texts = np.array([label_text(label) for label in labels.cat.categories], dtype=object)
    places, names = pd.factorize(texts)
    return names, places.astype(np.int32)[labels.cat.codes]  # four bytes a cell, of which there may be millions


def chosen_rows(name: str, rows: ArrayLike | None, n: int) -> np.ndarray:
    """A mask ``(N,)`` of rows that were given as a mask or by number; all of them where none were given.

    Raises
    ------
    ValueError
        If a mask is of another length, a number is no row, or a row is named twice.
    """
    if rows is None:
        return np.ones(n, dtype=bool)
    check_unmasked(name, rows)
    given = np.asarray(rows)
    if given.dtype == bool and given.shape == (n,):
        return given
    if given.ndim != 1 or given.dtype.kind not in "iu":
        msg = f"{name} is {given.dtype.name} of shape {given.shape}: give a mask of the {n} rows, or row numbers."
        raise ValueError(msg)
    if given.size and not 0 <= given.min() <= given.max() < n:
        msg = f"{name} has the row numbers {given.min()} to {given.max()}: there are {n} rows, counted from 0."
        raise ValueError(msg)
    mask = np.zeros(n, dtype=bool)
    mask[given] = True
    if mask.sum() < len(given):
        msg = f"{name} names a row twice: give each row number once, or a mask of type bool."
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


def learned_rows(adata: AnnData, trained_on: str | ArrayLike | None) -> np.ndarray | None:
    """A mask ``(N,)`` of rows that an embedding learned from, by default as ``scbd run`` wrote; `None` if nobody said.

    Raises
    ------
    KeyError, ValueError
        See :func:`trained_rows`.
    """
    if trained_on is not None:
        return trained_rows(adata, trained_on)
    return adata.obs[SPLIT_KEY].astype(str).to_numpy() == "train" if SPLIT_KEY in adata.obs else None


def warn_of_learned(labels: np.ndarray, learned: np.ndarray | None, scored: ArrayLike, *, stacklevel: int = 3) -> None:
    """Warn if perturbations that are scored, once or more often, are among the labels ``(N,)`` of rows learned from.

    Training pulls rows of a perturbation together, whether or not it does anything.
    """
    if learned is None:
        return
    asked = pd.unique(np.asarray(scored))
    known = np.intersect1d(asked, pd.unique(labels[learned]))
    if len(known):
        msg = (
            f"A model was trained on {len(known):,} of {len(asked):,} perturbations that are scored ({head(known)}): "
            "of its embedding, neither scores nor q values say that they have an effect. Embed each by a model that "
            "has not seen it (scbd.cross_fit)."
        )
        warnings.warn(msg, UserWarning, stacklevel=stacklevel)


def warn_of_folds(adata: AnnData, *keys: str | Sequence[str] | None) -> None:
    """Warn if rows are compared that several models of :func:`scbd.cross_fit` embedded, and no key keeps them apart."""
    apart = bool(keys) and all(key is not None and FOLD_KEY in as_columns(key) for key in keys)
    n_models = 1 if apart or FOLD_KEY not in adata.obs else adata.obs[FOLD_KEY].nunique()
    if n_models > 1:
        msg = (
            f"obs[{FOLD_KEY!r}] names {n_models} models, whose embeddings have nothing in common, and their rows are "
            f"compared: name {FOLD_KEY!r} beside environment and position (e_key=, position_key=), or give the rows of "
            "one fold at a time."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def check_keys(adata: AnnData, obsm: Iterable[str], obs: Iterable[str] = ()) -> None:
    """Raise a KeyError that names the keys there are, if one is missing; layers and X may stand for those of obsm."""
    check_anndata(adata)
    others = {"obsm": [*adata.layers, *(["X"] if adata.X is not None else [])], "obs": []}
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot) and key not in others[slot]:
                raise KeyError(missing_key(slot, key, getattr(adata, slot).keys()))
