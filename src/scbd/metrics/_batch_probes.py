"""How much of the environment an embedding tells: linear classifiers, what is not linear, and neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd.metrics._probes import label_probe
from scbd.metrics._readers import Kind
from scbd.metrics._table import check_keys, embedding_and_labels, label_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def batch_probe(
    adata: AnnData,
    embedding_key: str,
    e_key: str | Sequence[str],
    *,
    kind: Kind = "linear",
    group_key: str | None = None,
    train_fraction: float = 0.6,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """How well an embedding in ``obsm`` predicts the environment: low is good for z_c.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key in ``obsm``.
    e_key
        Column of ``obs``, or several for their cross.
    group_key
        Column of ``obs`` whose groups are not split, for example the guide: see ``groups`` of :func:`label_probe`.
    kind, train_fraction, max_cells, seed
        See :func:`label_probe`.

    Returns
    -------
    See :func:`label_probe`.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        See :func:`label_probe`.

    Examples
    --------
    >>> scores = scbd.metrics.batch_probe(adata, "X_scbd_c", "well")
    >>> sorted(scores)
    ['accuracy', 'auroc', 'chance_f1', 'f1']
    """
    embedding, labels = embedding_and_labels(adata, embedding_key, e_key)
    return label_probe(
        embedding,
        labels,
        kind=kind,
        groups=None if group_key is None else label_names(adata, group_key),
        train_fraction=train_fraction,
        max_cells=max_cells,
        seed=seed,
    )


def batch_probe_table(
    adata: AnnData,
    embeddings: Sequence[str] | Mapping[str, str],
    e_key: str | Sequence[str],
    *,
    kinds: Sequence[Kind] = ("linear", "quadratic", "neighbours"),
    group_key: str | None = None,
    train_fraction: float = 0.6,
    max_cells: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Read the environment from several embeddings by several probes, all on the same split.

    An embedding from which a linear probe predicts nothing may still hold the environment: environments that differ
    only in their variance have the same means, and no plane separates them.

    Parameters
    ----------
    adata
        Embedded cells.
    embeddings
        Keys of ``obsm``, or names of representations with their key.
    e_key
        Column of ``obs``, or several for their cross.
    kinds
        Probes, of those of :func:`label_probe`.
    group_key
        See :func:`batch_probe`.
    train_fraction, max_cells, seed
        See :func:`label_probe`.

    Returns
    -------
    Frame with a row a representation and probe: ``representation, kind, f1, auroc, accuracy, chance_f1``.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        See :func:`label_probe`.

    Examples
    --------
    >>> table = scbd.metrics.batch_probe_table(adata, ["X_scbd_c", "X_scbd_s"], "well")
    >>> table.pivot(index="representation", columns="kind", values="f1").shape
    (2, 3)
    """
    names = embeddings if isinstance(embeddings, Mapping) else {key: key for key in embeddings}
    check_keys(adata, names.values())
    how: dict[str, Any] = {"group_key": group_key, "train_fraction": train_fraction, "max_cells": max_cells}
    rows = [
        {"representation": name, "kind": kind, **batch_probe(adata, key, e_key, kind=kind, seed=seed, **how)}
        for name, key in names.items()
        for kind in kinds
    ]
    return pd.DataFrame(rows)
