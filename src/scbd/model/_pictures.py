"""What each block holds, shown as pictures: cells decoded from their own embeddings, and from those of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._checks import count_or, head
from scbd.data._loading import read_tensor
from scbd.model._arguments import explain_arguments
from scbd.model._embed import EmbedMixin, check_finite_inputs, row_numbers
from scbd.model._minified import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from torch import Tensor

    from scbd.data._sources import ImageSource

# cells in a forward pass; that are read at once
CELLS, READ = 256, 512


class PictureMixin(EmbedMixin):
    """Gives an image model whose module has a ``decoder`` pictures: :meth:`reconstruct`, :meth:`swap_blocks`.

    The decoder says what it takes of each block, ``n_latents``, its ``likelihood``, and has a ``mean`` of codes
    ``(B, D)``, one for each block: intensities (Bernoulli), or prepared inputs (Gaussian).
    """

    # its decoder is None as long as there is none
    module: Any

    @explain_arguments()
    def get_intensities(
        self, adata: AnnData | None = None, indices: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Cells as they are, in the units of :meth:`reconstruct`, to compare with.

        Parameters
        ----------
        adata, indices
            As for :meth:`reconstruct`.

        Returns
        -------
        float32 ``(len(indices), C, H, W)`` of images, ``(len(indices), F)`` of features.
        """
        source, preprocess = self._source(self._require(adata)), self.module.preprocess
        rows = row_numbers(indices, source.shape[0])
        rows = np.arange(source.shape[0]) if rows is None else rows
        images = np.empty((len(rows), *preprocess.output_shape), dtype=np.float32)
        with torch.inference_mode():
            for part, stored in self._read(source, rows, READ):
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
        """Decode cells from their own two embeddings.

        Parameters
        ----------
        adata
            Cells to reconstruct; the training data by default.
        indices
            Rows, in this order; all by default.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(len(indices), C, H, W)``: expected intensities, as they are before standardisation (between 0 and 1
        for images of uint8; arcsinh of the counts for uint16), at the size the encoders see. Of features
        ``(len(indices), F)``, in their own units.

        Raises
        ------
        KeyError, ValueError
            If there is no decoder yet; and see :meth:`get_latent_representation`.
        """
        self._require_decoder()
        batch_size = count_or("batch_size", batch_size, CELLS)
        embeddings = [self._embedded(block, adata, indices, batch_size) for block in blocks_of(self.module)]
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
        """Decode the content of some cells with the style of others: the perturbation of one in the well of the other.

        Parameters
        ----------
        content, style
            Rows whose z_c and whose z_s to take, equally many.
        adata, batch_size
            As for :meth:`reconstruct`.

        Returns
        -------
        float32 ``(len(content), C, H, W)``, see :meth:`reconstruct`.

        Raises
        ------
        ValueError
            If there is no decoder yet, the model has a single block, or the rows differ in number or are out of range.
        """
        self._require_decoder()
        if self.module.style is None:
            msg = f"This {type(self).__name__} has a single block: there is nothing to swap."
            raise ValueError(msg)
        batch_size = count_or("batch_size", batch_size, CELLS)
        n = self._require(adata).n_obs
        rows = [row_numbers(indices, n) for indices in (content, style)]
        if rows[0] is None or rows[1] is None or len(rows[0]) != len(rows[1]):
            msg = "Give equally many rows for content and for style: each pair makes one image."
            raise ValueError(msg)
        z_c, z_s = (self._embedded(b, adata, r, batch_size) for b, r in zip("cs", rows, strict=True))
        return self.decode(z_c, z_s, batch_size=batch_size)

    @explain_arguments()
    def decode(self, *embeddings: np.ndarray, batch_size: int | None = None) -> np.ndarray:
        """Decode embeddings, for example points between two cells (of SCBD, brought back to unit length).

        Parameters
        ----------
        *embeddings
            z_c and z_s ``(N, D)`` as the losses see them (``get_latent_representation(center=None)``), of length 1
            where these are on the unit sphere; for a model of a single block z_c alone.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(N, C, H, W)``, see :meth:`reconstruct`.

        Raises
        ------
        ValueError
            If there is no decoder yet, or the embeddings are not those of its blocks, not finite, or of SCBD and of
            lengths that are off 1 by more than a hundredth.
        """
        decoder = self._require_decoder()
        batch_size = count_or("batch_size", batch_size, CELLS)
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
        """What the decoder takes of a block, float32 ``(len(rows), D)``."""
        return self.get_latent_representation(adata, rows, block=block, center=None, batch_size=batch_size)

    def _read(self, source: ImageSource, rows: np.ndarray, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Inputs of rows as stored, some at once, with their places among the rows."""
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            stored = read_tensor(source, rows[part]).to(self.module.device)
            check_finite_inputs(stored, rows[part])
            yield part, stored

    def _check_embeddings(self, embeddings: Sequence[Tensor]) -> None:
        """Raise a ``ValueError`` if there are none like these, ``(N, D)`` each, in rows that it names."""
        broken = ~torch.stack([z.isfinite().all(1) for z in embeddings]).all(0)
        if broken.any():
            rows = np.flatnonzero(broken.numpy())
            msg = f"The embeddings to decode have NaN or infinite values in {len(rows)} rows ({head(rows)})."
            raise ValueError(msg)

    def _require_decoder(self) -> Any:
        if self.module.decoder is None:
            msg = "There is no decoder: call train_decoder() first (and again after train(), which moves the blocks)."
            raise ValueError(msg)
        return self.module.decoder
