"""Naming the perturbation of cells, by the linear head that was trained with the encoder or beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from scbd._keys import Y_REGISTRY
from scbd.model._online_head import OnlineHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.model._contract import EmbeddingModule
    from scbd.model._settings import TrainSettings


class PredictMixin:
    """Gives an image model :meth:`predict`."""

    # a classifier's, which is part of its objective
    _own_head: nn.Linear | None = None

    if TYPE_CHECKING:  # what the model brings
        module: EmbeddingModule
        online_head_: dict[str, np.ndarray]
        _registered: Any
        get_latent_representation: Any

    @property
    def can_predict(self) -> bool:
        """Whether there is a head, of a classifier or trained by ``train(online_head=True)``."""
        return self._own_head is not None or bool(getattr(self, "online_head_", {}))

    def predict(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        return_proba: bool = False,
        adapt_key: str | Sequence[str] | None = None,
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
        adapt_key
            As for :meth:`get_latent_representation`.
        batch_size
            Cells in a forward pass; 512 by default.

        Returns
        -------
        Labels, ``(len(indices),)``.

        Raises
        ------
        ValueError
            If there is no head.
        """
        head = self._head()
        r = torch.from_numpy(
            self.get_latent_representation(
                adata,
                indices,
                representation="intermediate",
                center=None,
                adapt_key=adapt_key,
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

    def _head_beside(self, settings: TrainSettings, seed: int) -> OnlineHead | None:
        """What learns beside the encoder, if that was asked for: it goes on from where it is."""
        if not settings.online_head or self._own_head is not None:
            return None
        n_labels, rates = len(self._registered(Y_REGISTRY)["categories"]), settings.plan
        return OnlineHead(
            self.module.network("c"),
            n_labels,
            lr=rates["lr"],
            weight_decay=rates["weight_decay"],
            seed=seed,
            weights=getattr(self, "online_head_", {}),
        )

    def _keep_head(self, head: OnlineHead | None) -> None:
        """That of the weights as they are now; of others none is left."""
        linear = {} if head is None else head.linear.state_dict()
        self.online_head_ = {name: values.cpu().numpy().copy() for name, values in linear.items()}
