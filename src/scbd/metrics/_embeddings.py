"""Which embeddings a table of scores is about: one way to name them, for all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scbd._keys import CONTENT_KEY
from scbd._matrices import dense
from scbd.metrics._table import check_keys, representation, stored_embedding

if TYPE_CHECKING:
    from anndata import AnnData

# a key of obsm, an array, or the path of a file that embed_to wrote
Source = str | Path | np.ndarray
# keys of obsm; or names of representations with where they are, or with several, such as those of training seeds
Embeddings = Sequence[str] | Mapping[str, Source | Sequence[Source]]


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
        If there is none, one is sparse, an array is of another shape or not finite, or a file is of other
        cells, or of such as their names do not tell.
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
    from scbd.data import open_embedding

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
        msg = (
            f"Cells of {path} and of the table are others or in another order, and obs_names repeat: give the cells in "
            "the order of the file, or an array in place of it, with a row for each cell."
        )
        raise ValueError(msg)
    rows = stored.obs_names.get_indexer(adata.obs_names)
    if (rows < 0).any():
        msg = (
            f"{path} lacks {(rows < 0).sum():,} of the {adata.n_obs:,} cells of the table, by their names in obs_names."
        )
        raise ValueError(msg)
    return np.asarray(values)[rows]
