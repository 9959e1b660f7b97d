"""Embeddings of any number of cells, written block by block."""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from anndata import AnnData

from scbd._jobs import check_shard, check_space, share_of
from scbd._progress import progress_bar
from scbd.data import digest_cells, open_embedding
from scbd.data.stores import BlockFile, exists, storable
from scbd.model._forward import embedded
from scbd.nn import wait_for_all, world

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from scbd.data import ImageSource
    from scbd.model._adapted import AdaptedCells
    from scbd.model._contract import BlockName, EmbeddingModule
    from scbd.nn import Representation

DTYPES = ("float32", "float16")


def embed_to(
    module: EmbeddingModule,
    source: ImageSource,
    obs: pd.DataFrame,
    path: Path,
    blocks: Mapping[BlockName, str],
    *,
    representation: Representation,
    centers: Mapping[BlockName, np.ndarray],
    adapted: AdaptedCells | None,
    dtype: str,
    batch_size: int,
    block_size: int,
    shard: tuple[int, int] | None,
    enable_progress_bar: bool | None,
) -> AnnData:
    """Write blocks under their names, or go on with that; see ``EmbedMixin.embed_to``."""
    rank, n_processes = world()
    share = (rank + 1, n_processes) if shard is None else shard
    check_shard(share)
    _check(path, blocks, dtype, shard is not None)
    obs = storable(obs)
    n, rows = len(obs), -(-block_size // batch_size) * batch_size  # whole batches, the same after a kill
    arrays = {key: ((n, module.width(block, representation)), np.dtype(dtype)) for block, key in blocks.items()}
    told = [*_told(centers), *([] if adapted is None else [adapted.digest()])]
    settings = {"digest": _digest(module, source, obs, [representation, dtype, batch_size, rows, *arrays, *told])}
    file = BlockFile(path, AnnData(obs=obs), arrays, rows, settings)
    if file.is_there():  # other jobs have left nothing for this one
        return open_embedding(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space(path, sum(shape[0] * shape[1] * kind.itemsize for shape, kind in arrays.values()))
    todo = share_of(file.begin(), share)
    if shard is None:  # a process without blocks must not begin when others have given the file its name
        wait_for_all()
    stops = np.minimum((todo + 1) * rows, n)
    bar = progress_bar(f"Embedding to {path.name}", int((stops - todo * rows).sum()), shown=enable_progress_bar)
    parts = [
        slice(start, min(start + batch_size, stop))
        for block, stop in zip(todo, stops, strict=True)
        for start in range(block * rows, stop, batch_size)
    ]
    with bar, closing(embedded(module, source, parts, list(blocks), representation, centers, adapted)) as batches:
        for block, stop in zip(todo, stops, strict=True):
            values = {key: np.empty((stop - block * rows, *shape[1:]), kind) for key, (shape, kind) in arrays.items()}
            for start in range(0, stop - block * rows, batch_size):
                for name, batch in next(batches).items():
                    values[blocks[name]][start : start + batch_size] = batch
                bar.update(len(batch))
            file.write(int(block), values)
    whole = file.finish()
    if shard is None:
        wait_for_all()
    return open_embedding(path) if whole or shard is None else AnnData(obs=obs)


def _check(path: Path, blocks: Mapping[BlockName, str], dtype: str, shared: bool) -> None:
    if not blocks:
        msg = "blocks names no embedding to write: give 'c', 's' or both."
        raise ValueError(msg)
    if path.suffix != ".h5ad":
        msg = f"{path}: give a path that ends in .h5ad."
        raise ValueError(msg)
    if path.exists() and not shared:
        raise FileExistsError(exists(path))
    if dtype not in DTYPES:
        msg = f"dtype={dtype!r} is not known: use {' or '.join(DTYPES)}."
        raise ValueError(msg)


def _told(centers: Mapping[BlockName, np.ndarray]) -> list[str]:
    return [f"{block}: {hashlib.sha256(center.tobytes()).hexdigest()}" for block, center in centers.items()]


def _digest(module: EmbeddingModule, source: ImageSource, obs: pd.DataFrame, settings: list[Any]) -> str:
    """Of the weights, the cells and the settings."""
    digest = hashlib.sha256(repr([*settings, digest_cells(source, obs)]).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).tobytes())
    return digest.hexdigest()
