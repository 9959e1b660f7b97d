"""Deep CORAL: the same mean and covariance of features in all environments (Sun and Saenko, 2016)."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from scbd.baselines._batches import EnvironmentBatches
from scbd.baselines._classifier import ClassifierModel, PenaltyModule

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor, nn

    from scbd.baselines._classifier import Outputs


class CORALModule(PenaltyModule):
    r"""Cross-entropy, and the mean over pairs of environments of

    .. math:: \frac{1}{R} \lVert \mu_e - \mu_{e'} \rVert^2 + \frac{1}{R^2} \lVert C_e - C_{e'} \rVert_F^2

    with mean and covariance of the ``R`` features. Environments with a single cell in the batch are left out.
    """  # noqa: D400

    def penalise(self, batch: Outputs) -> Tensor:
        """Distance of means and covariances; 0 in a batch of one environment."""
        moments = [(f.mean(0), f.T.cov()) for f, *_ in batch.by_environment() if len(f) > 1]
        apart = [
            sum(((a - b).square().mean() for a, b in zip(one, other, strict=True)), batch.features.new_zeros(()))
            for one, other in combinations(moments, 2)
        ]
        return torch.stack(apart).mean() if apart else batch.features.new_zeros(())


class CORALModel(ClassifierModel):
    """A classifier whose features have the same first two moments in all environments.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    penalty
        Weight of the distance of moments; the paper searches 0.1, 1 and 10.
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
    Sun and Saenko (2016), Deep CORAL. Means are compared besides covariances, as DomainBed and WILDS do.

    Examples
    --------
    >>> scbd.baselines.CORALModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.CORALModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = CORALModule
    _batches = EnvironmentBatches

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
