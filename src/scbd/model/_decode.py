"""Pictures decoded from embeddings: from z_c and z_s of a cell, or from z_c of one cell and z_s of another.

The pictures show which information z_c and z_s contain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._shared.checks import count_or_default, join_first
from scbd.data._loading import read_tensor
from scbd.model._arguments import explain_arguments
from scbd.model._embed import EmbedMixin, check_finite_inputs, row_numbers
from scbd.model._minified import block_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from torch import Tensor

    from scbd.data._sources import ImageSource

# DECODE_BATCH_SIZE is the default number of cells per forward pass of the decoder; CELLS_READ_PER_BLOCK is the number
# of cells whose inputs are read into memory at once
DECODE_BATCH_SIZE, CELLS_READ_PER_BLOCK = 256, 512


class DecodeMixin(EmbedMixin):
    """Mixin with methods that decode embeddings to pictures: :meth:`reconstruct`, :meth:`swap_blocks`, :meth:`decode`.

    The methods use the attribute ``decoder`` of the model's module. A decoder has

    - ``n_latents``, the dimensions of the embeddings that it takes: of z_c and, if the model has it, z_s;
    - ``likelihood``, ``"bernoulli"`` or ``"gaussian"``;
    - a method ``mean`` that takes these embeddings, ``(B, D)`` each. It returns intensities (Bernoulli likelihood), or
      values on the scale of the encoders' inputs (Gaussian likelihood).
    """

    # network of the model; the decoder of the network is None until a decoder has been trained
    module: Any

    @explain_arguments()
    def get_intensities(
        self, adata: AnnData | None = None, indices: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Return the images or features of cells in the units of :meth:`reconstruct`, to compare with reconstructions.

        Parameters
        ----------
        adata, indices
            See :meth:`reconstruct`.

        Returns
        -------
        Array, float32 ``(len(indices), C, H, W)`` of images, or ``(len(indices), F)`` of features.
        """
        source, preprocess = self._source(self._adata_or_attached(adata)), self.module.preprocess
        rows = row_numbers(indices, source.shape[0])
        images = np.empty((len(rows), *preprocess.output_shape), dtype=np.float32)
        with torch.inference_mode():
            for part, stored in self._read(source, rows, CELLS_READ_PER_BLOCK):
                images[part] = preprocess.measured(stored).cpu().numpy()
        return images

    @explain_arguments()
    def reconstruct(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Reconstruct the images or features of cells: embed the cells, and decode their embeddings.

        Parameters
        ----------
        adata
            Cells to reconstruct. Default: the training data.
        indices
            Row numbers in the order of the output, or a boolean mask. Default: all cells.
        batch_size
            Number of cells per forward pass. Default: 256.

        Returns
        -------
        Array, float32. For images ``(len(indices), C, H, W)``: expected intensities, on the scale before
        standardisation, at the image size that the encoders take. With the default ``intensity`` of the model,
        intensities are between 0 and 1 for uint8 images, and arcsinh of the counts for uint16 images. For features
        ``(len(indices), F)``: expected values in the units of the features.

        Raises
        ------
        KeyError, ValueError
            If no decoder has been trained (``ValueError``); see also :meth:`get_latent_representation`.
        """
        self._require_decoder()
        batch_size = count_or_default("batch_size", batch_size, DECODE_BATCH_SIZE)
        embeddings = [self._embedded(block, adata, indices, batch_size) for block in block_names(self.module)]
        return self.decode(*embeddings, batch_size=batch_size)

    @explain_arguments()
    def swap_blocks(
        self,
        content: Sequence[int] | np.ndarray,
        style: Sequence[int] | np.ndarray,
        adata: AnnData | None = None,
        *,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Decode pictures from z_c of some cells and z_s of other cells.

        Each picture shows the perturbation of one cell in the environment of another cell.

        Parameters
        ----------
        content
            Row numbers of the cells whose z_c is used.
        style
            Row numbers of the cells whose z_s is used, the same number as in ``content``.
        adata, batch_size
            See :meth:`reconstruct`.

        Returns
        -------
        Array, float32 ``(len(content), C, H, W)`` of images, or ``(len(content), F)`` of features, in the units of
        :meth:`reconstruct`.

        Raises
        ------
        ValueError
            If no decoder has been trained, the model has no z_s, ``content`` and ``style`` differ in length, or a row
            number is out of range.
        """
        self._require_decoder()
        if self.module.style is None:
            msg = f"This {type(self).__name__} has a single block: there is nothing to swap."
            raise ValueError(msg)
        batch_size = count_or_default("batch_size", batch_size, DECODE_BATCH_SIZE)
        n = self._adata_or_attached(adata).n_obs
        of_content, of_style = row_numbers(content, n), row_numbers(style, n)
        if content is None or style is None or len(of_content) != len(of_style):
            msg = "Give equally many rows for content and for style: each pair makes one image."
            raise ValueError(msg)
        z_c = self._embedded("c", adata, of_content, batch_size)
        z_s = self._embedded("s", adata, of_style, batch_size)
        return self.decode(z_c, z_s, batch_size=batch_size)

    @explain_arguments()
    def decode(self, *embeddings: np.ndarray, batch_size: int | None = None) -> np.ndarray:
        """Decode pictures from embeddings, for example from interpolations between the embeddings of two cells.

        The embeddings of :class:`scbd.SCBDModel` have unit length, so scale interpolations to length 1 before decoding.

        Parameters
        ----------
        *embeddings
            z_c and z_s, ``(N, D)`` each, without centring (``get_latent_representation(center=None)``). For a model
            without z_s, z_c only.
        batch_size
            Number of cells per forward pass. Default: 256.

        Returns
        -------
        Array, float32 ``(N, C, H, W)`` of images, or ``(N, F)`` of features, in the units of :meth:`reconstruct`.

        Raises
        ------
        ValueError
            If no decoder has been trained, the embeddings do not have the dimensions of the model's embeddings or are
            not finite, or an embedding of an :class:`scbd.SCBDModel` has a length that differs from 1 by more than
            0.01.
        """
        decoder = self._require_decoder()
        batch_size = count_or_default("batch_size", batch_size, DECODE_BATCH_SIZE)
        tensors = [torch.as_tensor(np.asarray(z), dtype=torch.float32) for z in embeddings]
        wanted = decoder.n_latents
        if [t.shape[1] if t.ndim == 2 else None for t in tensors] != [*wanted] or len({len(t) for t in tensors}) != 1:
            shapes = " and ".join(str(tuple(t.shape)) for t in tensors) or "none"
            msg = f"The decoder takes {' and '.join(f'(N, {n})' for n in wanted)}, the embeddings are {shapes}."
            raise ValueError(msg)
        self._check_embeddings(tensors)
        images = np.empty((len(tensors[0]), *self.module.preprocess.output_shape), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(images), batch_size):
                part = slice(start, start + batch_size)
                decoded = decoder.mean(*(t[part].to(self.module.device) for t in tensors))
                if decoder.likelihood == "gaussian":
                    decoded = self.module.preprocess.intensities(decoded)
                images[part] = decoded.cpu().numpy()
        return images

    def _embedded(self, block: str, adata: AnnData | None, rows: Any, batch_size: int) -> np.ndarray:
        """Return z_c (``block="c"``) or z_s (``"s"``) of cells as the decoder takes it, without centring.

        The result is float32 ``(len(rows), D)``.
        """
        return self.get_latent_representation(adata, rows, block=block, center=None, batch_size=batch_size)

    def _read(self, source: ImageSource, rows: np.ndarray, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the images or features of cells, as stored, in portions of up to ``size`` cells.

        Each portion is a pair: the slice of ``rows``, the row numbers of all cells, that the portion holds; and the
        inputs of these cells, a tensor on the device.
        """
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            stored = read_tensor(source, rows[part]).to(self.module.device)
            check_finite_inputs(stored, rows[part])
            yield part, stored

    def _check_embeddings(self, embeddings: Sequence[Tensor]) -> None:
        """Raise a ``ValueError`` if embeddings to decode, ``(N, D)`` each, hold NaN or infinity in some rows."""
        broken = ~torch.stack([z.isfinite().all(1) for z in embeddings]).all(0)
        if broken.any():
            rows = np.flatnonzero(broken.numpy())
            msg = f"The embeddings to decode have NaN or infinite values in {len(rows)} rows ({join_first(rows)})."
            raise ValueError(msg)

    def _require_decoder(self) -> Any:
        if self.module.decoder is None:
            msg = "There is no decoder: call train_decoder() first (and again after train(), which moves the blocks)."
            raise ValueError(msg)
        return self.module.decoder
