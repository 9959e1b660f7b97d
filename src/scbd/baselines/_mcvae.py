"""mcVAE: what perturbed cells have over controls, and what all cells have (Wang et al., 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scbd._checks import check_count
from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd._messages import head
from scbd.baselines._batches import PairedBatches
from scbd.baselines._latent import LatentModel, LatentModule
from scbd.baselines._vae_networks import Gaussian, LearnedPrior

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor

# of the controls' salient posterior
_BACKGROUND_WEIGHT = 8.0
# the penalty draws variances to 0, and their logarithms to nowhere
_LEAST_LOG_VARIANCE = -20.0


class MCVAEModule(LatentModule):
    r"""A salient block z_c, which controls do not have, and a background block z_s, which all cells share.

    The salient code of controls is zero before decoding. Their salient posterior is not held to its prior, but drawn to
    zero, by a penalty that warms up with the divergences:

    .. math:: 8\, \big( \lVert \mu \rVert^2 + \textstyle\sum \sigma^2 \big).

    Priors are normal distributions of variance 1 around a mean learned for each perturbation. The loss is that of a
    pair of a control and a perturbed cell: the mean over controls plus the mean over the others.

    Parameters
    ----------
    control
        Code of the label of controls.
    n_environments
        Number of different e.
    n_environment_latent
        Dimension of what the decoder is given of the environment; 0 for nothing.
    **kwargs
        See :class:`scbd.baselines._latent.LatentModule`.
    """

    def __init__(
        self, *args: Any, control: int, n_environments: int, n_environment_latent: int = 0, **kwargs: Any
    ) -> None:
        check_count("n_environment_latent", n_environment_latent, 0)
        super().__init__(*args, n_blocks=2, n_environments=n_environments, n_beside=n_environment_latent, **kwargs)
        self.control = control
        self.salient_prior, self.background_prior = (
            LearnedPrior(self.n_labels, self.n_latent, learn_variance=False) for _ in range(2)
        )
        self.environment = nn.Embedding(n_environments, n_environment_latent) if n_environment_latent else None

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return {"contrasted_label": self.control}

    def posteriors(self, images: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of both blocks, from the image."""
        found = super().posteriors(images, e)
        return tuple(Gaussian(q.mean, q.log_variance.clamp(min=_LEAST_LOG_VARIANCE)) for q in found)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of both blocks by the perturbation."""
        return self.salient_prior(y), self.background_prior(y)

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """Both blocks, the salient one of controls zero; and the environment, if the decoder is given it."""
        salient, background = z
        beside = () if self.environment is None else (self.environment(e),)
        return super().code((salient * (y != self.control)[:, None], background, *beside), y, e)

    def held(self, block: str, y: Tensor) -> Tensor:
        """All but the salient block of controls."""
        return y != self.control if block == "c" else super().held(block, y)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Size of the controls' salient posterior."""
        salient = posteriors[0]
        size = (salient.mean.square() + salient.log_variance.exp()).sum(1)
        return {"background": _BACKGROUND_WEIGHT * size.masked_fill(self.held("c", y), 0)}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Over all pairs of a control and a perturbed cell; of one kind alone, if there is no other."""
        controls = y == self.control
        means = [nats[group].mean() for group in (controls, ~controls) if group.any()]
        return torch.stack(means).sum()


class MCVAEModel(LatentModel):
    """A variational autoencoder that contrasts perturbed cells with controls.

    Block ``"c"`` is the salient one, what a perturbation changes; block ``"s"`` is the background. The original embeds
    cells as both side by side: twice ``n_latent`` dimensions.

    Half of each batch are controls, half are perturbed cells, both shuffled; the smaller group is seen more often. The
    loss is that of a pair: the nats of two cells.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    control
        Perturbation of the controls; by default the one that :meth:`setup_anndata` was told of, or
        ``"nontargeting"``.
    n_latent
        Dimension of either block.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, ``"gaussian"``, with one learned scale, for any; by default the
        first where images are scaled to that range (``intensity="scale"``).
    kl_warmup_steps
        Steps over which divergences, and the penalty on controls, get their full weight.
    n_environment_latent
        Dimension of an embedding of the environment that the decoder is given beside both blocks, which then need not
        tell it; the original has 32 (of the batch). 0 for none. With it, the model cannot go on training with cells of
        other environments; it embeds them all the same.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`; of features ``standardize`` and ``clip`` (scaled values are cut off there), as in
        :class:`scbd.nn.FeatureScaling`.

    Raises
    ------
    ValueError
        If no cell is a control.

    References
    ----------
    Wang et al. (2023), Multi-ContrastiveVAE disentangles perturbation effects in single-cell images from optical pooled
    screens. The loss is theirs, without the optional penalty between blocks; networks as in Makino et al. (2025),
    appendix.

    Examples
    --------
    >>> scbd.baselines.MCVAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.MCVAEModel(adata, n_latent=32, control="nontargeting", n_environment_latent=32)
    >>> model.train(max_steps=2000)
    >>> z = np.hstack([model.get_latent_representation(block=block) for block in "cs"])
    >>> z.shape
    (240, 64)
    """

    _fixed_labels: tuple[str, ...] = (Y_REGISTRY,)
    _batches = PairedBatches

    def __init__(
        self,
        adata: AnnData | None = None,
        control: str | int | float | None = None,
        n_latent: int = 32,
        likelihood: str = "gaussian",
        kl_warmup_steps: int = 1000,
        n_environment_latent: int = 0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        perturbations = list(self._registered(Y_REGISTRY)["categories"])
        told = self._control_codes
        if control is None and told is not None:
            if len(told) > 1:
                msg = f"mcVAE contrasts with one control, and setup_anndata was told of {len(told)}: give control=…."
                raise ValueError(msg)
            control = perturbations[int(told[0])]
        control = "nontargeting" if control is None else control
        if control not in perturbations:
            msg = (
                f"mcVAE contrasts with controls, and no cell is {control!r}: name their perturbation with control=…, "
                f"one of {head(map(repr, perturbations))}."
            )
            raise ValueError(msg)
        code = perturbations.index(control)
        self._data_settings = {"control": code}
        if n_environment_latent:
            self._fixed_labels = (Y_REGISTRY, E_REGISTRY)
        settings = {"control": code, "n_latent": n_latent, "likelihood": likelihood}
        settings["n_environment_latent"] = n_environment_latent
        self._set_up(MCVAEModule, kl_warmup_steps, preprocess, **settings)
