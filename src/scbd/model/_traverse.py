"""Pictures of cells on the way from one perturbation to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._checks import check_count, count_or
from scbd._labels import as_columns, label_text, label_values
from scbd._messages import head
from scbd.model._decode import _CELLS, DecodeMixin
from scbd.model._embed import row_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# of a perturbation, for the mean of its embeddings
_OF_A_MEAN = 1000


class TraverseMixin(DecodeMixin):
    """Gives an image model :meth:`traverse`."""

    def traverse(
        self,
        indices: Sequence[int] | np.ndarray,
        to: str | float,
        adata: AnnData | None = None,
        *,
        n_steps: int = 5,
        adapt_key: str | Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> np.ndarray:
        r"""Decode cells on their way to another perturbation: what it would do to a cell, in the cell's own well.

        At step :math:`t` from 0 to 1, z_c is :math:`z_c + t\,(\mu_{to} - \mu_{own})` brought back to unit length, with
        the mean z_c of the cells of a perturbation (of 1,000 of them, where there are more, always the same random
        ones); z_s stays. What a cell has of its own stays with it.

        Parameters
        ----------
        indices
            Rows of the cells that set out, controls for example.
        to
            Their perturbation in the end, a label of ``y_key``.
        adata
            Cells with their perturbations, which the means are taken of, too; the training data by default.
        n_steps
            Pictures of a cell, the first as it is (its reconstruction), the last with all of the perturbation.
        adapt_key
            As for :meth:`get_latent_representation`: cells are embedded by what :meth:`adapt` learned of their own
            environments.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(len(indices), n_steps, C, H, W)``, or ``(len(indices), n_steps, F)`` of features, in the units of
        :meth:`reconstruct`.

        Raises
        ------
        KeyError
            If no cell has the perturbation, ``adata`` no column of it, or the model was not adapted to any value of
            ``adapt_key``.
        ValueError
            If there is no decoder yet, an index is out of range, or ``n_steps`` is less than 2.

        See Also
        --------
        scbd.pl.traverse : Draws them.
        """
        self._require_decoder()
        check_count("n_steps", n_steps, least=2)
        batch_size = count_or("batch_size", batch_size, _CELLS)
        adata = self._require(adata)
        y_key = self.registry_["setup_args"]["y_key"]
        found = label_values(adata.obs, as_columns(y_key)).cat
        labels, wanted = found.rename_categories(label_text).astype(str).to_numpy(), label_text(to)
        if wanted not in labels:
            msg = f"to={to!r}: no cell has this perturbation. Those of {y_key!r} are {head(np.unique(labels))}."
            raise KeyError(msg)
        rows = row_numbers(indices, adata.n_obs)
        rows = np.arange(adata.n_obs) if rows is None else rows
        blocks = {block: self._embedded(block, adata, rows, adapt_key, batch_size) for block in self._blocks()}
        names, places = np.unique([wanted, *labels[rows]], return_inverse=True)
        means = np.stack([self._mean_content(adata, labels == name, adapt_key, batch_size) for name in names])
        step = means[places[0]] - means[places[1:]]
        path = blocks["c"][:, None] + np.linspace(0, 1, n_steps, dtype=np.float32)[:, None] * step[:, None]
        path /= np.linalg.norm(path, axis=-1, keepdims=True)
        others = [np.repeat(z, n_steps, axis=0) for block, z in blocks.items() if block != "c"]
        images = self.decode(path.reshape(-1, path.shape[-1]), *others, batch_size=batch_size)
        return images.reshape(len(rows), n_steps, *images.shape[1:])

    def _mean_content(self, adata: AnnData, of_label: np.ndarray, adapt_key: Any, batch_size: int) -> np.ndarray:
        """Mean z_c of cells, ``(D,)``; of many, of a random choice that is always the same."""
        rows = np.random.default_rng(0).permutation(np.flatnonzero(of_label))[:_OF_A_MEAN]
        return self._embedded("c", adata, np.sort(rows), adapt_key, batch_size).mean(0)
