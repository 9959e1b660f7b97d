"""Inputs to embeddings, one part of the rows after the other."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from scbd._messages import head
from scbd.data import prefetch, read_tensor
from scbd.model._memory import freed_memory_kept

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from scbd.data import ImageSource
    from scbd.model._adapted import AdaptedCells
    from scbd.model._contract import BlockName, EmbeddingModule
    from scbd.nn import Representation


def embedded(
    module: EmbeddingModule,
    source: ImageSource,
    parts: Sequence[slice | np.ndarray],
    blocks: Sequence[BlockName],
    representation: Representation,
    centers: Mapping[BlockName, np.ndarray],
    adapted: AdaptedCells | None = None,
) -> Generator[dict[BlockName, np.ndarray]]:
    """Blocks of one part of the rows after the other, less their centres, float32; each input is read once.

    Cells that are ``adapted`` go by the adaptation to their environment.

    Raises
    ------
    ValueError
        If inputs are not finite, or the model makes NaN of those that are, naming the rows.
    """
    module.eval()
    memory = freed_memory_kept() if module.device.type == "cpu" else nullcontext()
    reading = (read_tensor(source, part) for part in parts)
    with memory, closing(prefetch(reading)) as batches:
        for part, inputs in zip(parts, batches, strict=True):
            inputs = inputs.to(module.device, non_blocking=True)
            # left before the caller goes on, who may be interrupted and train
            with torch.inference_mode():
                check_finite_inputs(inputs, part)
                if adapted is not None:
                    values = adapted.embed(module, inputs, part, blocks, representation)
                else:
                    values = {name: module.embed(inputs, name, representation).float().cpu().numpy() for name in blocks}
            for embedding in values.values():
                _check_finite_embedding(module, embedding, part)
            for name, center in centers.items():
                if name in values:
                    values[name] -= center
            yield values


def check_finite_inputs(inputs: torch.Tensor, part: slice | np.ndarray) -> None:
    """Raise if inputs that were read, of these rows of a table, hold a NaN or an infinity."""
    if not inputs.is_floating_point() or bool(inputs.isfinite().all()):
        return
    rows = _rows(part, ~inputs.isfinite().flatten(1).all(1).cpu().numpy())
    whole = "images" if inputs.ndim == 4 else "features"
    axes = "(1, 2, 3)" if inputs.ndim == 4 else "1"
    msg = (
        f"{whole.capitalize()} of {len(rows)} of {len(inputs)} cells that were read together have NaN or infinite "
        f"{'pixels' if inputs.ndim == 4 else 'values'} (rows {head(rows)}): drop these cells or repair their {whole}. "
        f"np.isfinite({whole}).all(axis={axes}) tells which others are fine."
    )
    raise ValueError(msg)


def _check_finite_embedding(module: EmbeddingModule, embedding: np.ndarray, part: slice | np.ndarray) -> None:
    """Raise if the model makes NaN of finite inputs: then it is to blame, or the inputs are beyond all measure."""
    finite = np.isfinite(embedding).all(axis=1)
    if finite.all():
        return
    broken = [
        name
        for name, values in module.state_dict().items()
        if values.is_floating_point() and not values.isfinite().all()
    ]
    why = (
        f"its weights are not finite ({head(broken)}), as after a training that diverged: train anew, with a lower lr"
        if broken
        else "they are far outside of those it was trained on"
    )
    msg = (
        f"The model returns NaN for {(~finite).sum()} of {len(finite)} cells (rows {head(_rows(part, ~finite))}) whose "
        f"inputs are finite: {why}."
    )
    raise ValueError(msg)


def _rows(part: slice | np.ndarray, chosen: np.ndarray) -> list[int]:
    """Rows of the table, of those that were read."""
    rows = np.arange(part.start, part.stop) if isinstance(part, slice) else part
    return rows[chosen].tolist()
