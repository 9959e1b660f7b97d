"""Cells as they are, in the units in which they are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from scbd.data import read_tensor
from scbd.model._embed import row_numbers
from scbd.model._forward import check_finite_inputs
from scbd.model._train import TrainMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.model._module import SCBDModule

_BLOCK = 512


class IntensitiesMixin(TrainMixin):
    """Gives an image model :meth:`get_intensities`."""

    if TYPE_CHECKING:  # what the model brings
        module: SCBDModule

    def get_intensities(
        self, adata: AnnData | None = None, indices: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Cells as they are, in the units of :meth:`reconstruct`, to compare with.

        Parameters
        ----------
        adata
            Cells; the training data by default.
        indices
            Rows, in this order; all by default.

        Returns
        -------
        float32 ``(len(indices), C, H, W)`` of images, ``(len(indices), F)`` of features.

        Raises
        ------
        ValueError
            If an index is out of range, or pixels are not finite.
        """
        source, preprocess = self._source(self._require(adata)), self.module.preprocess
        rows = row_numbers(indices, source.shape[0])
        rows = np.arange(source.shape[0]) if rows is None else rows
        images = np.empty((len(rows), *preprocess.output_shape), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(rows), _BLOCK):
                part = slice(start, start + _BLOCK)
                stored = read_tensor(source, rows[part]).to(self.module.device)
                check_finite_inputs(stored, rows[part])
                images[part] = preprocess.measured(stored).cpu().numpy()
        return images

    def _beyond_unit_interval(self) -> str:
        """How far intensities of some cells, drawn from all, leave the unit interval; nothing if they do not."""
        n = self._source(self._require(None)).shape[0]
        values = self.get_intensities(indices=np.sort(np.random.default_rng(0).permutation(n)[:_BLOCK]))
        low, high = float(values.min()), float(values.max())
        return f"these reach from {low:.3g} to {high:.3g}" if low < -1e-4 or high > 1 + 1e-4 else ""
