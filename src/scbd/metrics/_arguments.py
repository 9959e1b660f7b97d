"""Checked inputs of the scores: embeddings by name, label columns, and masks of rows that were used in training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.checks import check_unmasked, join_first, missing_key_message
from scbd._shared.keys import CONTENT_KEY, FOLD_KEY, NOT_IN_SPLIT, SPLIT_KEY
from scbd._shared.labels import as_columns, check_anndata, label_text, label_values
from scbd._shared.numeric_tables import check_dense

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

# place of an embedding: a key of obsm, a layer, "X", an array, or the path of a file that embed_to wrote
EmbeddingSource = str | Path | np.ndarray
# keys of obsm; or a mapping from the name of a representation to its source, or to several (one per training seed)
Embeddings = Sequence[str] | Mapping[str, EmbeddingSource | Sequence[EmbeddingSource]]

# values of a column that mark rows which were not used in training
_NOT_TRAINED = ("False", "validation", "test", NOT_IN_SPLIT)


class Embedding(NamedTuple):
    """Embedding to be scored, with its names."""

    representation: str
    """Name of the representation; embeddings of several training seeds share this name."""
    key: str
    """Name of this embedding within the representation: its key, its path, or ``name[i]`` for an array."""
    values: Any
    """Values ``(N, D)``, an array or a memory-map."""


def get_named_embeddings(adata: AnnData, embeddings: Embeddings) -> list[Embedding]:
    """Return all requested embeddings, in the given order.

    Raises
    ------
    TypeError
        If an embedding is a DataFrame with a column that is not numeric.
    ValueError
        If no embedding is requested, an embedding is sparse, an array has another number of rows or is not finite, or a
        file holds other cells than the table.
    KeyError
        If ``obsm`` lacks a key, and no layer has this name.
    FileNotFoundError
        If a file does not exist.
    """
    if isinstance(embeddings, str):
        embeddings = [embeddings]
    if not isinstance(embeddings, Mapping):
        embeddings = {key: key for key in embeddings}
    several = {
        name: [given] if isinstance(given, EmbeddingSource) else list(given) for name, given in embeddings.items()
    }
    if not any(several.values()):
        msg = "No embedding was asked for: name keys of obsm."
        raise ValueError(msg)
    check_keys(adata, [key for sources in several.values() for key in sources if isinstance(key, str)])
    return [
        _read_embedding(adata, name, place, source)
        for name, sources in several.items()
        for place, source in enumerate(sources)
    ]


def _read_embedding(adata: AnnData, name: str, i: int, source: EmbeddingSource) -> Embedding:
    if isinstance(source, str):
        return Embedding(name, source, get_embedding(adata, source))
    if isinstance(source, Path):
        return Embedding(name, str(source), _read_embedding_file(adata, source))
    return Embedding(name, f"{name}[{i}]", get_finite_embedding(adata, source))


def _read_embedding_file(adata: AnnData, path: Path) -> Any:
    """Return z_c of a file, or its only embedding, in the order of the table's cells.

    The embedding stays memory-mapped if the file has the same order of cells.
    """
    from scbd.data._screens import open_embedding

    stored = open_embedding(path)
    keys = list(stored.obsm)
    key = CONTENT_KEY if CONTENT_KEY in keys else keys[0] if len(keys) == 1 else None
    if key is None:
        msg = f"{path} holds {', '.join(keys) or 'no embedding'}: open it with scbd.data.open_embedding, and give one."
        raise ValueError(msg)
    values = check_dense(stored.obsm[key], f"obsm[{key!r}]")
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


def get_embedding(adata: AnnData, key: str) -> Any:
    """Return the embedding under a key of ``obsm``, a layer, or ``"X"``, as an array or a memory-map ``(N, D)``.

    If both ``obsm`` and ``layers`` have the key, ``obsm`` is used.

    Raises
    ------
    KeyError
        If there is no such key.
    TypeError
        If the embedding is a DataFrame with a column that is not numeric.
    ValueError
        If the embedding is sparse.
    """
    check_keys(adata, [key])
    if key in adata.obsm:
        return check_dense(adata.obsm[key], f"obsm[{key!r}]")
    return check_dense(*((adata.layers[key], f"layers[{key!r}]") if key in adata.layers else (adata.X, "X")))


def get_finite_embedding(adata: AnnData, rep: str | ArrayLike) -> np.ndarray:
    """Return an embedding as an array of finite values, ``(N, D)``.

    ``rep`` is a key of ``obsm``, a layer, ``"X"``, or an array with one row per row of the table.

    Raises
    ------
    KeyError, TypeError
        See :func:`get_embedding`.
    ValueError
        If the embedding is sparse, has another number of rows, or is not finite.
    """
    x = np.asarray(get_embedding(adata, rep) if isinstance(rep, str) else check_dense(rep, "rep"))
    if x.ndim != 2 or len(x) != adata.n_obs:
        msg = f"rep has the shape {x.shape}: give one row for each of the {adata.n_obs} rows of the table."
        raise ValueError(msg)
    n_bad = int((~np.isfinite(x).all(axis=1)).sum())
    if n_bad:
        msg = f"rep has NaN or infinite values in {n_bad} of {len(x)} rows: drop them."
        raise ValueError(msg)
    return x


def get_label_texts(adata: AnnData, label_key: str | Sequence[str]) -> np.ndarray:
    """Return one label per row as text, ``(N,)``; the labels of several columns are crossed.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a row has no label.
    """
    names, codes = encode_label_column(adata, label_key)
    return names[codes]


def encode_label_column(adata: AnnData, label_key: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct labels as text, ``(L,)``, and the index of each row's label among them, ``(N,)``.

    Labels are read as in :func:`get_label_texts`.
    """
    columns = as_columns(label_key)
    check_keys(adata, [], columns)
    labels = label_values(adata.obs, columns)
    texts = np.array([label_text(label) for label in labels.cat.categories], dtype=object)
    places, names = pd.factorize(texts)
    return names, places.astype(np.int32)[labels.cat.codes]  # int32 saves memory, as there may be millions of cells


def row_mask(name: str, rows: ArrayLike | None, n: int) -> np.ndarray:
    """Return a mask ``(N,)`` of rows that are given as a mask or as row numbers.

    The mask is true for all rows if ``rows`` is `None`. ``name`` is the name of the argument in error messages.

    Raises
    ------
    ValueError
        If a mask has another length, a row number is out of range, or a row number is repeated.
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


def training_mask(adata: AnnData, trained_on: str | ArrayLike, name: str = "trained_on") -> np.ndarray:
    """Return a mask ``(N,)`` of the rows that were used in training.

    ``trained_on`` is a mask, row numbers, or the name of a column of ``obs``. In a column, the values ``True`` and
    ``"train"`` mark the rows that were used in training.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If no value of the column is one of ``True``, ``False``, ``"train"``, ``"validation"``, ``"test"`` and ``"left
        out"``, or see :func:`row_mask`.
    """
    if not isinstance(trained_on, str):
        return row_mask(name, trained_on, adata.n_obs)
    said = get_label_texts(adata, trained_on)
    trained = np.isin(said, ["True", "train"])
    if not (trained.any() or np.isin(said, _NOT_TRAINED).any()):
        msg = f"No row of obs[{trained_on!r}] says True or 'train': mark the rows that the embedding was trained on."
        raise ValueError(msg)
    return trained


def training_mask_or_none(adata: AnnData, trained_on: str | ArrayLike | None) -> np.ndarray | None:
    """Return a mask ``(N,)`` of the rows that an embedding was trained on, or `None` if they are not known.

    By default, they are read from ``obs["scbd_split"]``, where ``scbd run`` wrote the part of the split of each cell.

    Raises
    ------
    KeyError, ValueError
        See :func:`training_mask`.
    """
    if trained_on is not None:
        return training_mask(adata, trained_on)
    return adata.obs[SPLIT_KEY].astype(str).to_numpy() == "train" if SPLIT_KEY in adata.obs else None


def warn_if_seen_in_training(
    labels: np.ndarray, learned: np.ndarray | None, scored: ArrayLike, *, stacklevel: int = 3
) -> None:
    """Warn if perturbations that are scored were seen in training.

    Training pulls the embeddings of a perturbation's rows together, whether or not the perturbation has an effect.

    Parameters
    ----------
    labels
        Perturbation of each row, ``(N,)``.
    learned
        Mask ``(N,)`` of the rows that were used in training; `None` if they are not known, which gives no warning.
    scored
        Perturbations that are scored, which may be repeated.
    stacklevel
        See :func:`warnings.warn`.
    """
    if learned is None:
        return
    asked = pd.unique(np.asarray(scored))
    known = np.intersect1d(asked, pd.unique(labels[learned]))
    if len(known):
        msg = (
            f"A model was trained on {len(known):,} of {len(asked):,} perturbations that are scored "
            f"({join_first(known)}): "
            "of its embedding, neither scores nor q values say that they have an effect. Embed each by a model that "
            "has not seen it (scbd.cross_fit)."
        )
        warnings.warn(msg, UserWarning, stacklevel=stacklevel)


def warn_if_models_are_mixed(adata: AnnData, *keys: str | Sequence[str] | None) -> None:
    """Warn if embeddings of different models of :func:`scbd.cross_fit` are compared with each other.

    ``keys`` are the environment and position columns of a score; each is one column or several crossed columns. There
    is no warning if each of them includes the column of folds, because only rows of the same model are then compared.
    """
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
    """Raise a ``KeyError`` that lists the available keys, if a key is missing.

    A key of ``obsm`` may also be a layer or ``"X"``.
    """
    check_anndata(adata)
    others = {"obsm": [*adata.layers, *(["X"] if adata.X is not None else [])], "obs": []}
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot) and key not in others[slot]:
                raise KeyError(missing_key_message(slot, key, getattr(adata, slot).keys()))
