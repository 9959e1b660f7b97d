"""Prediction of the perturbation of cells by a linear classifier that was trained together with the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from scbd._shared.keys import Y_REGISTRY
from scbd.model._arguments import explain_arguments
from scbd.model._embed import EmbedMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


class PredictMixin(EmbedMixin):
    """Mixin that adds :meth:`predict`, which predicts the perturbation of cells, to a model."""

    online_head_: dict[str, np.ndarray]

    @property
    def can_predict(self) -> bool:
        """True if the model has a linear classifier that predicts perturbations.

        The classifier is part of the model's objective, or was trained by ``train(online_head=True)``.
        """
        return self._objective_head is not None or bool(getattr(self, "online_head_", {}))

    @explain_arguments()
    def predict(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        return_proba: bool = False,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Predict the perturbation of cells with a linear classifier on the intermediate representation r_c.

        r_c is the output of the encoder of z_c before its projection. In a classifier model, the linear classifier is
        part of the objective. Other models have a linear classifier if they were trained with ``online_head=True``; the
        paper's authors report scores of such a classifier.

        Parameters
        ----------
        adata
            Table of cells with images or features. Default: the training data.
        indices
            Row numbers in the order of the output, or a boolean mask. Default: all cells.
        return_proba
            Whether to return probabilities in place of labels.
        batch_size
            Number of cells per forward pass. Default: 512.

        Returns
        -------
        Predicted labels, ``(len(indices),)``. With ``return_proba=True``, probabilities, float32
        ``(len(indices), n_labels)``, with the labels in the order of the registered categories.

        Raises
        ------
        ValueError
            If the model has no linear classifier; see also :meth:`get_latent_representation`.
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
        # labels that mix numbers and text form an array of objects, since numpy would otherwise convert numbers to text
        alike = len({type(category) for category in categories}) == 1
        return np.array(categories, dtype=None if alike else object)[logits.argmax(1).numpy()]

    @property
    def _objective_head(self) -> nn.Linear | None:
        """Linear classifier of perturbations in the model's objective; `None` if the objective has no classifier."""
        return None

    def _head(self) -> nn.Linear:
        if self._objective_head is not None:
            return self._objective_head
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
