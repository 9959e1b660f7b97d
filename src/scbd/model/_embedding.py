"""From a source to an embedding: blocks of rows in order, one encoder, one array."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from scbd.data import ImageSource

_WORTH_A_BAR = 20_000


def embed(
    module: Any,
    source: ImageSource,
    rows: np.ndarray | None,
    *,
    block: str,
    representation: str,
    batch_size: int,
    out: np.ndarray | str | os.PathLike[str] | None,
    enable_progress_bar: bool | None,
) -> np.ndarray:
    """Embed rows of a source (all if `None`), in order; see ``get_latent_representation``."""
    n = source.shape[0] if rows is None else len(rows)
    net = module.content if block == "c" else module.style
    width = net.n_latent if representation == "embedding" else net.n_features
    target, partial = _target(out, (n, width))
    bar = tqdm(
        total=n,
        desc=f"Embedding z_{block}" if representation == "embedding" else f"Embedding r_{block}",
        unit="cell",
        disable=not (n > _WORTH_A_BAR if enable_progress_bar is None else enable_progress_bar),
    )
    module.eval()
    try:
        with bar, torch.inference_mode():
            for start in range(0, n, batch_size):
                stop = min(start + batch_size, n)
                images = source.read(slice(start, stop) if rows is None else rows[start:stop])
                tensor = torch.from_numpy(images).to(module.device)
                target[start:stop] = module.embed(tensor, block, representation).float().cpu().numpy()
                bar.update(stop - start)
    except BaseException:
        if partial is not None:
            partial.unlink()
        raise
    if partial is not None:
        target.flush()  # type: ignore[attr-defined]
        os.replace(partial, Path(out))  # type: ignore[arg-type]
    return target


def _target(out: Any, shape: tuple[int, int]) -> tuple[np.ndarray, Path | None]:
    """The array to fill, and the file it lies in until it is complete."""
    if out is None:
        return np.empty(shape, dtype=np.float32), None
    if isinstance(out, np.ndarray):
        if out.shape != shape:
            msg = f"out has shape {out.shape}, the embedding has shape {shape}."
            raise ValueError(msg)
        return out, None
    path = Path(out)
    if path.suffix != ".npy":
        msg = f"out={str(path)!r}: give the path of an .npy file, or an array."
        raise ValueError(msg)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    return np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape), partial
