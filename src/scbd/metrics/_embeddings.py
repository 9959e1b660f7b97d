"""Which embeddings a table of scores is about: one way to name them, for all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scbd.metrics._table import check_keys

if TYPE_CHECKING:
    from anndata import AnnData

# keys of obsm; or names of representations with their key, or with several, such as those of training seeds
Embeddings = Sequence[str] | Mapping[str, str | Sequence[str]]


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
    ValueError
        If there is none.
    KeyError
        If ``obsm`` does not have one.
    """
    if isinstance(embeddings, str):
        embeddings = [embeddings]
    if not isinstance(embeddings, Mapping):
        embeddings = {key: key for key in embeddings}
    keys = {name: [key] if isinstance(key, str) else list(key) for name, key in embeddings.items()}
    named = [(name, key) for name, several in keys.items() for key in several]
    if not named:
        msg = "No embedding was asked for: name keys of obsm."
        raise ValueError(msg)
    check_keys(adata, [key for _, key in named])
    return [Embedding(name, key, adata.obsm[key]) for name, key in named]
