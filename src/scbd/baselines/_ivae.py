"""iVAE: two blocks with priors that know perturbation and environment (Khemakhem et al., 2020; paper, section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.baselines._latent import LatentModel, LatentModule
from scbd.baselines._vae_networks import Gaussian, LearnedPrior

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor


class IVAEModule(LatentModule):
    r"""Two blocks, :math:`p(x | z_c, z_s)\, p(z_c | y)\, p(z_s | e)`, with learned priors.

    Parameters
    ----------
    style_posterior
        ``"xe"``: :math:`q(z_s | x, e)`, an expert for every environment; ``"x"``: :math:`q(z_s | x)`.
    **kwargs
        See :class:`scbd.baselines._latent.LatentModule`.
    """

    def __init__(self, *args: Any, style_posterior: str, n_environments: int, **kwargs: Any) -> None:
        if style_posterior not in ("xe", "x"):
            msg = f"style_posterior={style_posterior!r} is not known: use 'xe' (image and environment) or 'x' (image)."
            raise ValueError(msg)
        n_experts = n_environments if style_posterior == "xe" else 1
        super().__init__(*args, n_environments=n_environments, n_blocks=2, n_experts=n_experts, **kwargs)
        self.asks_environment = style_posterior == "xe"
        self.content_prior = LearnedPrior(self.n_labels, self.n_latent)
        self.style_prior = LearnedPrior(n_environments, self.n_latent)

    def posteriors(self, images: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of z_c from the image, of z_s from the image and its environment's expert."""
        assert self.style is not None
        return self.content(images), self.style(images, e if self.asks_environment else None)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of z_c by the perturbation, of z_s by the environment."""
        return self.content_prior(y), self.style_prior(e)


class IVAEModel(LatentModel):
    """A variational autoencoder with a block for the perturbation and one for the environment.

    ``get_latent_representation(block="s")`` reads no label: with an expert for every environment, it is the mean of
    what all of them say.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    n_latent
        Dimension of both embeddings.
    style_posterior
        ``"xe"``: the posterior of z_s sees image and environment, with an expert for every environment; ``"x"``: the
        image alone.
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
    Khemakhem et al. (2020), Variational autoencoders and nonlinear ICA. Makino et al. (2025), section 3 and appendix.

    Examples
    --------
    >>> scbd.baselines.IVAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.IVAEModel(adata, n_latent=32, style_posterior="x")
    >>> model.train(max_steps=2000)
    >>> model.get_latent_representation(block="c").shape
    (240, 32)
    """

    _fixed_labels = (Y_REGISTRY, E_REGISTRY)

    def __init__(
        self,
        adata: AnnData | None = None,
        n_latent: int = 64,
        style_posterior: str = "xe",
        likelihood: str = "auto",
        kl_warmup_steps: int = 0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        settings = {"n_latent": n_latent, "style_posterior": style_posterior, "likelihood": likelihood}
        self._set_up(IVAEModule, kl_warmup_steps, preprocess, **settings)
