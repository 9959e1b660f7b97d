"""VAE: one embedding of everything (Kingma and Welling, 2014)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd.baselines._latent import LatentModel, LatentModule
from scbd.baselines._vae_networks import Gaussian

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor


class VAEModule(LatentModule):
    """One block, whose prior is the standard normal distribution."""

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Mean 0, variance 1."""
        zero = self.decoder.log_scale.new_zeros((1, self.n_latent))
        return (Gaussian(zero, zero),)


class VAEModel(LatentModel):
    """A variational autoencoder that knows neither perturbation nor environment.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    n_latent
        Dimension of the embedding.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, ``"gaussian"``, with one learned scale, for any; by default the
        first where images are scaled to that range (``intensity="scale"``).
    kl_warmup_steps
        Steps over which the divergences get their full weight.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`; of features ``standardize`` and ``clip`` (scaled values are cut off there), as in
        :class:`scbd.nn.FeatureScaling`.

    References
    ----------
    Kingma and Welling (2014), Auto-encoding variational Bayes. Networks as in Makino et al. (2025), appendix.

    Examples
    --------
    >>> scbd.baselines.VAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.VAEModel(adata, n_latent=32)
    >>> model.train(max_steps=2000)
    >>> model.get_latent_representation(block="c").shape
    (240, 32)
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        n_latent: int = 64,
        likelihood: str = "auto",
        kl_warmup_steps: int = 0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        settings = {"n_latent": n_latent, "n_blocks": 1, "likelihood": likelihood}
        self._set_up(VAEModule, kl_warmup_steps, preprocess, **settings)
