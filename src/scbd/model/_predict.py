"""Naming the perturbation of cells, by the linear head that was trained with the encoder or beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from scbd._anndata import Y_REGISTRY
from scbd.model._arguments import explain_arguments
from scbd.model._embed import EmbedMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


class PredictMixin(EmbedMixin):
    """Gives an image model :meth:`predict`."""

    online_head_: dict[str, np.ndarray]

    @property
    def can_predict(self) -> bool:
        """Whether there is a head, of a classifier or trained by ``train(online_head=True)``."""
        return self._own_head is not None or bool(getattr(self, "online_head_", {}))

    @explain_arguments()
    def predict(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        return_proba: bool = False,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Predict the perturbation of cells by the linear head that learned with the encoder.

        That of a classifier is part of its objective. Other models have one if they were trained with
        ``online_head=True``: the head that the paper's authors report.

        Parameters
        ----------
        adata
            Cells with inputs; the training data by default.
        indices
            Rows, in this order; all by default.
        return_proba
            Return probabilities, ``(len(indices), n_labels)``, in the order of the registered categories.
        batch_size
            Cells in a forward pass; 512 by default.

        Returns
        -------
        Labels, ``(len(indices),)``.

        Raises
        ------
        ValueError
            If there is no head; and see :meth:`get_latent_representation`.
        """
        head = self._head()
        r = torch.from_numpy(
            self.get_latent_representation(
                adata,
                indices,
                representation="intermediate",
                center=None,
                batch_size=batch_size,
            )
        )
        with torch.inference_mode():
            logits = head(r.to(head.weight.device)).cpu()
        if return_proba:
            return logits.softmax(1).numpy()
        categories = self._registered(Y_REGISTRY)["categories"]
        # numbers and text in one array of numpy's would all become text
        alike = len({type(category) for category in categories}) == 1
        return np.array(categories, dtype=None if alike else object)[logits.argmax(1).numpy()]

    @property
    def _own_head(self) -> nn.Linear | None:
        """A classifier's, which is part of its objective."""
        return None

    def _head(self) -> nn.Linear:
        if self._own_head is not None:
            return self._own_head
        if not self.can_predict:
            msg = (
                f"This {type(self).__name__} has no head to predict with: train it with train(online_head=True), or "
                "take a classifier of scbd.baselines."
            )
            raise ValueError(msg)
        weights = {name: torch.from_numpy(values) for name, values in self.online_head_.items()}
        n_labels, n_features = weights["weight"].shape
        head = nn.Linear(n_features, n_labels)
        head.load_state_dict(weights)
        return head
