"""mcVAE: what perturbed cells have over controls, and what all cells have (Wang et al., 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd._keys import Y_REGISTRY
from scbd._messages import head
from scbd.baselines._latent import LatentModel, LatentModule
from scbd.baselines._vae_networks import Gaussian, LearnedPrior

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor

# of the controls' salient posterior
_BACKGROUND_WEIGHT = 8.0


class MCVAEModule(LatentModule):
    r"""A salient block z_c, which controls do not have, and a background block z_s, which all cells share.

    The salient code of controls is zero before decoding, and their salient posterior is drawn to zero,

    .. math:: 8\, \big( \lVert \mu \rVert^2 + \textstyle\sum \sigma^2 \big),

    as a mean over all cells. Priors are normal distributions of variance 1 around a mean learned for each perturbation.

    Parameters
    ----------
    control
        Code of the label of controls.
    **kwargs
        See :class:`scbd.baselines._latent.LatentModule`.
    """

    def __init__(self, *args: Any, control: int, **kwargs: Any) -> None:
        super().__init__(*args, n_blocks=2, **kwargs)
        self.control = control
        self.salient_prior, self.background_prior = (
            LearnedPrior(self.n_labels, self.n_latent, learn_variance=False) for _ in range(2)
        )

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of both blocks by the perturbation."""
        return self.salient_prior(y), self.background_prior(y)

    def code(self, z: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Both blocks, the salient one of controls zero."""
        salient, background = z
        return super().code((salient * (y != self.control)[:, None], background), y)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Size of the controls' salient posterior."""
        salient = posteriors[0]
        size = (salient.mean.square() + salient.log_variance.exp()).sum(1)
        return {"background": _BACKGROUND_WEIGHT * (size * (y == self.control)).mean()}


class MCVAEModel(LatentModel):
    """A variational autoencoder that contrasts perturbed cells with controls.

    Block ``"c"`` is the salient one, what a perturbation changes; block ``"s"`` is the background.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    control
        Perturbation of the controls.
    n_latent
        Dimension of both embeddings.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, ``"gaussian"``, with one learned scale, for any; by default the
        first where images are scaled to that range (``intensity="scale"``).
    kl_warmup_steps
        Steps over which the divergences get their full weight.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size``, ``intensity``, ``standardize``, ``augment``, see :class:`scbd.nn.Preprocess`; of
        features ``standardize`` and ``clip``, see :class:`scbd.nn.FeatureScaling`.

    Raises
    ------
    ValueError
        If no cell is a control.

    References
    ----------
    Wang et al. (2023), Multi-ContrastiveVAE disentangles perturbation effects in single-cell images from optical pooled
    screens. Networks as in Makino et al. (2025), appendix; without a batch embedding or a penalty between blocks.

    Examples
    --------
    >>> scbd.baselines.MCVAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.MCVAEModel(adata, n_latent=32, control="nontargeting")
    >>> model.train(max_steps=2000)
    >>> model.get_latent_representation(block="c").shape
    (240, 32)
    """

    _fixed_labels = (Y_REGISTRY,)

    def __init__(
        self,
        adata: AnnData | None = None,
        control: str | int | float = "nontargeting",
        n_latent: int = 32,
        likelihood: str = "gaussian",
        kl_warmup_steps: int = 1000,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        perturbations = self._registered(Y_REGISTRY)["categories"]
        if control not in perturbations:
            msg = (
                f"mcVAE contrasts with controls, and no cell is {control!r}: name their perturbation with control=…, "
                f"one of {head(map(repr, perturbations))}."
            )
            raise ValueError(msg)
        settings = {"control": perturbations.index(control), "n_latent": n_latent, "likelihood": likelihood}
        self._set_up(MCVAEModule, kl_warmup_steps, preprocess, **settings)
