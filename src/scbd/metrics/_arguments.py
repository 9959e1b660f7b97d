"""Functions that read and check the arguments which several scores have in common.

These arguments are embeddings (from an AnnData, an array or a file), columns of ``obs`` with labels such as
perturbation and environment, and masks of the rows that an embedding was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.checks import check_finite_rows, check_unmasked, join_first, missing_key_message
from scbd._shared.keys import CONTENT_KEY, FOLD_KEY, NOT_IN_SPLIT, SPLIT_KEY
from scbd._shared.labels import (
    as_columns,
    check_anndata,
    check_control_labels,
    label_text,
    label_values,
    warn_if_labels_are_similar,
)
from scbd._shared.messages import warn_user
from scbd._shared.numeric_tables import check_dense

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

# Source from which one embedding is read. It is a key of obsm, the name of a layer, "X", an array, or the path of a
# file that the method embed_to of a trained model wrote.
EmbeddingSource = str | Path | np.ndarray
# Embeddings to be scored. They are given as keys of obsm, or as a mapping from the name of a representation, for
# example "SCBD", to the source of its embedding. Several sources are allowed, for example one per training seed.
Embeddings = Sequence[str] | Mapping[str, EmbeddingSource | Sequence[EmbeddingSource]]

# Texts that mark a cell as not used in training. They occur in a column of obs that holds the part of the data split,
# such as "train" or "test", of each cell.
_NOT_TRAINED = ("False", "validation", "test", NOT_IN_SPLIT)


class Embedding(NamedTuple):
    """Values of one embedding to be scored, with the names under which its scores are listed."""

    representation: str
    """Name of the representation, for example ``"SCBD"``; embeddings of several training seeds share this name."""
    key: str
    """Name that distinguishes the embeddings of one representation.

    An embedding in ``obsm`` is named by its key, and an embedding in a file by the path of the file. An array is named
    ``name[i]``, where ``name`` is the representation and ``i`` is the number of the array among the sources of this
    representation.
    """
    values: Any
    """Values of the embedding, one row per cell, ``(N, D)``, as an array or a memory-map."""


def get_named_embeddings(adata: AnnData, embeddings: Embeddings) -> list[Embedding]:
    """Return the embeddings that are to be scored, with their names, in the given order.

    ``embeddings`` holds keys of ``obsm``, or maps the name of a representation to one or several sources of embeddings.

    Raises
    ------
    TypeError
        If an embedding is a DataFrame with a column that is not numeric.
    ValueError
        If no embedding is requested, an embedding is sparse, an array is not finite or has another number of rows than
        ``adata``, or a file does not hold the cells of ``adata``.
    KeyError
        If a key is neither in ``obsm`` nor the name of a layer.
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
        msg = "No embedding is given: name keys of obsm."
        raise ValueError(msg)
    check_keys(adata, [key for sources in several.values() for key in sources if isinstance(key, str)])
    found = []
    for name, sources in several.items():
        for i, source in enumerate(sources):
            if isinstance(source, str):
                found.append(Embedding(name, source, get_embedding(adata, source)))
            elif isinstance(source, Path):
                found.append(Embedding(name, str(source), _read_embedding_file(adata, source)))
            else:
                found.append(Embedding(name, f"{name}[{i}]", get_finite_embedding(adata, source)))
    return found


def _read_embedding_file(adata: AnnData, path: Path) -> Any:
    """Read an embedding from a file, and return its rows in the order of the cells of ``adata``.

    If the file holds z_c (the representation that should be invariant to the environment), z_c is read, otherwise the
    only embedding in the file. The embedding stays memory-mapped if the cells of the file are in the same order as the
    cells of ``adata``.
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
    """Return the embedding that is stored in ``adata`` under a key, as an array or a memory-map ``(N, D)``.

    The key is a key of ``obsm``, the name of a layer, or ``"X"``. If both ``obsm`` and ``layers`` have the key, the
    embedding in ``obsm`` is returned.

    Raises
    ------
    KeyError
        If ``adata`` has no embedding under this key.
    TypeError
        If the embedding is a DataFrame with a column that is not numeric.
    ValueError
        If the embedding is sparse.
    """
    check_keys(adata, [key])
    for slot in ("obsm", "layers"):
        if key in getattr(adata, slot):
            return check_dense(getattr(adata, slot)[key], f"{slot}[{key!r}]")
    return check_dense(adata.X, "X")


def get_finite_embedding(adata: AnnData, rep: str | ArrayLike) -> np.ndarray:
    """Return an embedding as an array ``(N, D)``, after checking that all its values are finite.

    ``rep`` is a key of ``obsm``, the name of a layer, ``"X"``, or an array with one row per row of ``adata``.

    Raises
    ------
    KeyError, TypeError
        See :func:`get_embedding`.
    ValueError
        If the embedding is sparse, has another number of rows than ``adata``, or is not finite.
    """
    x = np.asarray(get_embedding(adata, rep) if isinstance(rep, str) else check_dense(rep, "rep"))
    if x.ndim != 2 or len(x) != adata.n_obs:
        msg = f"rep has the shape {x.shape}: give one row for each of the {adata.n_obs} rows of the table."
        raise ValueError(msg)
    check_finite_rows(x, "rep")
    return x


def get_label_texts(adata: AnnData, label_key: str | Sequence[str]) -> np.ndarray:
    """Return the label of each row of ``adata`` as text, ``(N,)``, from one or several columns of ``obs``.

    Several columns are crossed: a label is then the combination of a row's values in all columns.

    Raises
    ------
    KeyError
        If ``obs`` lacks a column.
    ValueError
        If a row has no label.
    """
    names, codes = encode_label_column(adata, label_key)
    return names[codes]


def encode_label_column(adata: AnnData, label_key: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct labels in one or several columns of ``obs``, and the code of each row's label.

    The distinct labels are texts ``(L,)``. The code of a row is the index of the row's label among the distinct labels,
    int32 ``(N,)``. Several columns are crossed as in :func:`get_label_texts`.
    """
    check_anndata(adata)
    labels = label_values(adata.obs, label_key)
    places, names = pd.factorize(np.array(list(map(label_text, labels.cat.categories)), dtype=object))
    # the codes are int32 instead of int64 to save memory, because there may be millions of cells
    return names, places.astype(np.int32)[labels.cat.codes]


def control_rows(labels: np.ndarray, control: Any, y_key: str | Sequence[str]) -> np.ndarray:
    """Return a mask of the controls among the perturbation labels ``(N,)``, and warn of labels similar to controls."""
    controls = check_control_labels(control, labels, y_key)
    if controls:
        warn_if_labels_are_similar(pd.unique(labels), y_key, "perturbations", controls)
    return np.isin(labels, controls)


def row_mask(name: str, rows: ArrayLike | None, n: int) -> np.ndarray:
    """Convert selected rows, given as a mask or as row numbers, to a boolean mask ``(n,)``.

    If ``rows`` is `None`, all rows are selected. ``n`` is the number of rows of the table, and ``name`` is the name of
    the checked argument in error messages.

    Raises
    ------
    ValueError
        If a mask does not have the length ``n``, a row number is out of range, or a row number is repeated.
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


def random_rows(n: int, most: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return the numbers of at most ``most`` random rows of a table of ``n`` rows, in ascending order.

    If ``most`` is `None` or at least ``n``, all row numbers are returned.
    """
    return np.arange(n) if most is None or n <= most else np.sort(rng.choice(n, most, replace=False))


def training_mask(adata: AnnData, trained_on: str | ArrayLike, name: str = "trained_on") -> np.ndarray:
    """Return a mask ``(N,)`` of the rows of ``adata`` that an embedding was trained on.

    ``trained_on`` is a mask, row numbers, or the name of a column of ``obs``. In a column, the values ``True`` and
    ``"train"`` mark the rows that were used in training. ``name`` is the name of the argument in error messages.

    Raises
    ------
    KeyError
        If ``obs`` has no column of this name.
    ValueError
        If the column holds none of the values ``True``, ``False``, ``"train"``, ``"validation"``, ``"test"`` and
        ``"left out"``, or if :func:`row_mask` rejects the mask or row numbers.
    """
    if not isinstance(trained_on, str):
        return row_mask(name, trained_on, adata.n_obs)
    said = get_label_texts(adata, trained_on)
    trained = np.isin(said, ["True", "train"])
    if not (trained.any() or np.isin(said, _NOT_TRAINED).any()):
        msg = f"No row of obs[{trained_on!r}] is True or 'train': mark the rows that the embedding was trained on."
        raise ValueError(msg)
    return trained


def training_mask_or_none(adata: AnnData, trained_on: str | ArrayLike | None) -> np.ndarray | None:
    """Return a mask ``(N,)`` of the rows that an embedding was trained on, or `None` if these rows are not known.

    If ``trained_on`` is `None`, the rows are read from the column ``obs["scbd_split"]``, in which ``scbd run`` stores
    whether each cell was used for training, validation or testing. Without this column, the rows are not known.

    Raises
    ------
    KeyError, ValueError
        See :func:`training_mask`.
    """
    if trained_on is not None:
        return training_mask(adata, trained_on)
    return adata.obs[SPLIT_KEY].astype(str).to_numpy() == "train" if SPLIT_KEY in adata.obs else None


def warn_if_seen_in_training(labels: np.ndarray, learned: np.ndarray | None, scored: ArrayLike) -> None:
    """Warn if an embedding was trained on some of the perturbations for which it is scored.

    Training pulls the embeddings of a perturbation's rows together, whether or not the perturbation has an effect. A
    high score of such a perturbation is therefore no evidence of an effect.

    Parameters
    ----------
    labels
        Perturbation of each row, ``(N,)``.
    learned
        Mask ``(N,)`` of the rows that were used in training; `None` if these rows are not known, in which case there is
        no warning.
    scored
        Names of the perturbations that are scored; a name may occur several times.
    """
    if learned is None:
        return
    asked = pd.unique(np.asarray(scored))
    known = np.intersect1d(asked, pd.unique(labels[learned]))
    if len(known):
        msg = (
            f"A model was trained on {len(known):,} of {len(asked):,} perturbations that are scored "
            f"({join_first(known)}): of its embedding, neither scores nor q values say that they have an effect. Embed "
            "each by a model that has not seen it (scbd.cross_fit)."
        )
        warn_user(msg)


def warn_if_models_are_mixed(adata: AnnData, *keys: str | Sequence[str] | None) -> None:
    """Warn if a score compares embeddings of different models of :func:`scbd.cross_fit`.

    :func:`scbd.cross_fit` trains one model per fold of the data, and embeddings of different models cannot be compared.
    ``keys`` are the columns of environment and position that the score uses. Each key is one column, or several columns
    that are crossed. There is no warning if each key includes the column of folds, because the score then compares only
    rows of the same model.
    """
    apart = bool(keys) and all(key is not None and FOLD_KEY in as_columns(key) for key in keys)
    n_models = 1 if apart or FOLD_KEY not in adata.obs else adata.obs[FOLD_KEY].nunique()
    if n_models > 1:
        msg = (
            f"obs[{FOLD_KEY!r}] names {n_models} models, whose embeddings are unrelated, but whose rows are compared: "
            f"name {FOLD_KEY!r} in addition to environment and position (e_key=, position_key=), or give the rows of "
            "one fold at a time."
        )
        warn_user(msg)


def check_keys(adata: AnnData, obsm: Iterable[str], obs: Iterable[str] = ()) -> None:
    """Raise a ``KeyError`` that lists the available keys, if ``obsm`` or ``obs`` of ``adata`` lacks a required key.

    In place of a key of ``obsm``, the name of a layer or ``"X"`` is accepted.
    """
    check_anndata(adata)
    others = {"obsm": [*adata.layers, *(["X"] if adata.X is not None else [])], "obs": []}
    for slot, keys in (("obsm", obsm), ("obs", obs)):
        for key in keys:
            if key not in getattr(adata, slot) and key not in others[slot]:
                raise KeyError(missing_key_message(slot, key, getattr(adata, slot).keys()))
