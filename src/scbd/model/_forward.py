"""Images to embeddings, one part of the rows after the other."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from scbd.data import prefetch, read_tensor
from scbd.model._memory import freed_memory_kept

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    import numpy as np

    from scbd.data import ImageSource


def embedded(
    module: Any, source: ImageSource, parts: Iterable[slice | np.ndarray], blocks: Sequence[str], representation: str
) -> Generator[dict[str, np.ndarray]]:
    """Blocks of one part of the rows after the other, float32; each image is read once."""
    module.eval()
    memory = freed_memory_kept() if module.device.type == "cpu" else nullcontext()
    reading = (read_tensor(source, part) for part in parts)
    with memory, closing(prefetch(reading)) as batches:
        for images in batches:
            images = images.to(module.device, non_blocking=True)
            # left before the caller goes on, who may be interrupted and train
            with torch.inference_mode():
                values = {name: module.embed(images, name, representation).float().cpu().numpy() for name in blocks}
            yield values
