"""DANN: features that a discriminator cannot tell the environment from (Ganin et al., 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.baselines._batches import EnvironmentBatches
from scbd.baselines._classifier import ClassifierModel, PenaltyModule
from scbd.model import Losses

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.baselines._classifier import Outputs

_WIDTH = 1024


class ReversedGradient(torch.autograd.Function):
    """The identity, with its gradient times minus the weight: what is above descends, what is below ascends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Pass on."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Turn round."""
        return -ctx.weight * gradients[0], None


class DANNModule(PenaltyModule):
    """Cross-entropy of y, and that of a discriminator of e, whose gradient is reversed before the features.

    The discriminator itself always learns at full strength; ``penalty`` is how strongly the encoder works against it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.content.n_features
        self.discriminator = nn.Sequential(
            nn.Linear(width, _WIDTH),
            nn.BatchNorm1d(_WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.BatchNorm1d(_WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, self.n_environments),
        )

    def objective(self, batch: Outputs, ramp: float) -> Losses:
        """Both cross-entropies."""
        error = F.cross_entropy(batch.logits, batch.y)
        seen = ReversedGradient.apply(batch.features, ramp * self.penalty)
        told = F.cross_entropy(self.discriminator(seen), batch.e)
        return Losses(error + told, {"cross_entropy": error, "discriminator": told})


class DANNModel(ClassifierModel):
    """A classifier whose features a discriminator cannot tell the environment from.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    penalty
        How strongly the encoder works against the discriminator; the paper searches 0.1, 1 and 10.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`, and ``norm`` (kind of normalisation layers); of features
        ``standardize``, ``clip`` (scaled values are cut off there), ``whitening`` and ``whitening_kwargs``, as in
        :class:`scbd.SCBDModel`.

    References
    ----------
    Ganin et al. (2016), Domain-adversarial training of neural networks. One optimiser and one learning rate for
    encoder, head and discriminator; the penalty is the same from the first step, where Ganin et al. let it rise from 0.
    WILDS weighs the discriminator's own gradient by the penalty as well, a factor that
    AdamW takes out again; DomainBed trains it in turns with the encoder.

    Examples
    --------
    >>> scbd.baselines.DANNModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.DANNModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = DANNModule
    _batches = EnvironmentBatches
    _fixed_labels = (Y_REGISTRY, E_REGISTRY)

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        penalty: float = 1.0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess, penalty=penalty)
