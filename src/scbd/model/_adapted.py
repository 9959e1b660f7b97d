"""Cells of several environments in one batch, each embedded by what was learned of its own."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from scbd.model._adaptation import put_in
from scbd.nn import Block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from scbd._linear_maps import LinearMap
    from scbd.model._contract import BlockName, EmbeddingModule
    from scbd.nn import Representation


class Adaptation(NamedTuple):
    """To one environment."""

    buffers: Mapping[str, Tensor]
    """Statistics of normalisation by their names in the module."""
    maps: Mapping[BlockName, LinearMap]
    """What embeddings pass at the end, of blocks that have such a map."""

    def embed(
        self, module: EmbeddingModule, inputs: Tensor, blocks: Sequence[BlockName], kind: Representation
    ) -> dict[BlockName, np.ndarray]:
        """Embed inputs as stored, float32 ``(B, D)`` each."""
        with put_in(module, self.buffers):
            values = {block: module.embed(inputs, block, kind).float().cpu().numpy() for block in blocks}
        return self.mapped(module, values) if kind == "embedding" else values

    def mapped(self, module: EmbeddingModule, z: Mapping[BlockName, np.ndarray]) -> dict[BlockName, np.ndarray]:
        """Embeddings behind the maps of their blocks, back on the unit sphere where they lie on it."""
        behind = {block: self.maps[block](values) if block in self.maps else values for block, values in z.items()}
        for block in self.maps.keys() & behind.keys():
            if isinstance(module.network(block), Block):
                behind[block] = F.normalize(torch.from_numpy(behind[block]), dim=1).numpy()
        return behind


class AdaptedCells(NamedTuple):
    """Which cells of a table go by which adaptation."""

    codes: np.ndarray
    """Place of each cell's adaptation, int64 ``(N,)``; -1 for cells that are embedded without."""
    adaptations: Sequence[Adaptation]

    def embed(
        self,
        module: EmbeddingModule,
        inputs: Tensor,
        part: slice | np.ndarray,
        blocks: Sequence[BlockName],
        kind: Representation,
    ) -> dict[BlockName, np.ndarray]:
        """Embed the inputs of these rows of the table."""
        codes, none = self.codes[part], Adaptation({}, {})
        values = {block: np.empty((len(codes), module.width(block, kind)), dtype=np.float32) for block in blocks}
        for code in np.unique(codes):
            chosen = np.flatnonzero(codes == code)
            adaptation = none if code < 0 else self.adaptations[code]
            part_of = _rows(inputs, torch.from_numpy(chosen))
            for block, found in adaptation.embed(module, part_of, blocks, kind).items():
                values[block][chosen] = found
        return values

    def digest(self) -> str:
        """Of all that embeddings depend on."""
        digest = hashlib.sha256(self.codes.tobytes())
        for buffers, maps in self.adaptations:
            parts = {name: values.cpu().numpy() for name, values in buffers.items()}
            parts |= {f"{block}.{name}": part for block, m in maps.items() for name, part in m._asdict().items()}
            for name, part in sorted(parts.items()):
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def _rows(inputs: Tensor, rows: Tensor) -> Tensor:
    """Of 16-bit images by their bytes: not every torch that is supported selects rows of uint16."""
    if inputs.dtype == torch.uint16:
        return inputs.view(torch.int16)[rows].view(torch.uint16)
    return inputs[rows]
