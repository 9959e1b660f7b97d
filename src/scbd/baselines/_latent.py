"""Latent-variable models of the paper's appendix: VAE, iVAE and mcVAE.

All share a base module with one or two posteriors, their priors and a decoder.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_choice, check_count, format_count, inflect, join_first
from scbd._shared.keys import E_REGISTRY, Y_REGISTRY
from scbd._shared.labels import CROSS_SEPARATOR
from scbd.baselines._batches import ControlPairedBatches, ShuffledBatches
from scbd.model._base import ImageModel
from scbd.model._decoding import PictureMixin
from scbd.model._embed import row_numbers
from scbd.model._interfaces import EmbeddingModule, Losses, PreparedInputs
from scbd.model._plan import TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch.utils.hooks import RemovableHandle

    from scbd.data._loading import ImageDataModule
    from scbd.nn._encoders import Representation
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess

# gradient norm above which a step is skipped, and norm to which longer gradients are clipped (Child, 2021)
_SKIP_GRADIENT_NORM, _CLIP_GRADIENT_NORM = 1e12, 1e6
# variance of a component's posterior mean over cells, above which the component is active (Burda et al., 2016)
_MIN_ACTIVE_VARIANCE = 0.01


class LatentModule(EmbeddingModule):
    """Base of variational models with one block (z_c) or two (z_c and z_s), trained on a variational bound.

    A subclass defines the priors. It may also change the posteriors, the code that is decoded, and add penalties.

    Parameters
    ----------
    preprocess
        Module that prepares the stored inputs.
    n_labels, n_environments
        Numbers of different perturbations and environments.
    n_latent
        Dimension of each block.
    n_blocks
        Number of blocks, 1 or 2.
    likelihood
        ``"bernoulli"``, ``"gaussian"`` with one learned scale, or ``"auto"``: Bernoulli if intensities are scaled to
        between 0 and 1 (``intensity="scale"``), otherwise Gaussian.
    n_experts
        Number of heads of the posterior of z_s.
    n_beside
        Number of decoder inputs in addition to the blocks.
    """

    def __init__(
        self,
        preprocess: Preprocess | FeatureScaling,
        *,
        n_labels: int,
        n_environments: int,
        n_latent: int,
        n_blocks: int,
        likelihood: str,
        n_experts: int = 1,
        n_beside: int = 0,
    ) -> None:
        check_count("n_latent", n_latent)
        super().__init__(preprocess)
        shape = preprocess.output_shape
        if likelihood == "auto":
            likelihood = "bernoulli" if self.preprocess.intensity == "scale" else "gaussian"
        self.n_labels, self.n_environments, self.n_latent = n_labels, n_environments, n_latent
        self.asks: tuple[str, ...] = ()  # labels that decoding depends on, besides the image
        self.content = Posterior(shape, n_latent)
        if n_blocks == 2:
            self.style = Posterior(shape, n_latent, n_experts)
        self.decoder = LatentDecoder((*[n_latent] * (n_blocks - 1), n_latent + n_beside), shape, likelihood)

    def posteriors(self, images: PreparedInputs, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the posterior of z_c and, if there are two blocks, of z_s."""
        of_c = self.content(images.within)
        return (of_c,) if self.style is None else (of_c, self.style(images.whole))

    @abstractmethod
    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the prior of each block, given the labels of the cells."""

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """Return the decoder's input for samples of the blocks: the part of z_c, followed by the part of z_s."""
        return torch.cat(z, dim=1)

    def held(self, block: str, y: Tensor) -> Tensor:
        """Return a mask ``(B,)`` of the cells whose divergence from a block's prior counts in the loss."""
        return torch.ones_like(y, dtype=torch.bool)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Return further loss terms by name, one value per cell ``(B,)``; they warm up with the divergences."""
        return {}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Average a loss term of each cell ``(B,)`` over the batch."""
        return nats.mean()

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Compute the negative variational bound, in nats per cell.

        Samples are drawn from the posteriors with ``generator``. Without a generator, posterior means are used instead.
        """
        images = self.prepare(inputs, e, generator)
        # with z_s, the target includes differences between environments, which z_s should explain
        target = images.within if self.style is None else images.whole
        if self.decoder.likelihood == "bernoulli":
            target = self.preprocess.intensities(images.whole)
        posteriors = self.posteriors(images, e)
        z = tuple(posterior.sample(generator) for posterior in posteriors)
        terms = {"reconstruction": self.decoder.negative_log_likelihood(target, self.code(z, y, e))}
        for name, posterior, prior in zip("cs", posteriors, self.priors(y, e), strict=False):
            terms[f"divergence_{name}"] = posterior.divergence(prior).sum(1).masked_fill(~self.held(name, y), 0)
        terms |= self.penalties(posteriors, y)
        parts = {name: self.average(nats, y) for name, nats in terms.items()}
        reconstruction, *pulls = parts.values()
        return Losses(reconstruction + ramp * torch.stack(pulls).sum(), parts)


class LatentPlan(TrainingPlan):
    """Training plan that clips long gradients, and skips steps with extremely long ones (Child, 2021)."""

    skipped: Tensor
    # steps with a non-finite loss are skipped, so that only a run of such losses indicates divergence
    tolerated_losses = 10

    def __init__(self, module: Any, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.register_buffer("skipped", torch.zeros(()))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, or discard it if its norm is above the limit or not finite."""
        length = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP_GRADIENT_NORM)
        if not bool(length <= _SKIP_GRADIENT_NORM):  # the negation is also true of NaN
            self.skipped += 1
            optimizer.zero_grad(set_to_none=True)
        self.log("skipped_gradients", self.skipped.clone(), on_step=True, on_epoch=False)


class LatentModel(PictureMixin, ImageModel):
    """Base class of the latent-variable models. A subclass makes its module."""

    module: LatentModule
    traits = replace(
        ImageModel.traits,
        batches=ShuffledBatches,
        plan=LatentPlan,
        derived_attributes={**ImageModel.traits.derived_attributes, "latent_health_": pd.DataFrame},
    )

    def _set_up(
        self, module: type[LatentModule], kl_warmup_steps: int, preprocess: dict[str, Any], **settings: Any
    ) -> None:
        """Make the module from its settings and those of the preprocessing."""
        check_count("kl_warmup_steps", kl_warmup_steps, 0)
        inputs: dict[str, Any] = {"standardize_by": "auto", "augment": True} | preprocess
        self.module = module(
            self._make_preprocess(**inputs),
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **settings,
        )
        self.traits = replace(self.traits, plan_kwargs={"n_steps_alpha_warmup": kl_warmup_steps})
        self.latent_health_ = pd.DataFrame()
        self.drawn_environments_ = np.empty(0, dtype=np.int64)

    @property
    def latent_health(self) -> pd.DataFrame:
        """Statistics of the latent components at the end of training; empty before.

        There is one row per component, with these columns:

        - ``block`` and ``component``: the block, ``"c"`` or ``"s"``, and the number of the component.
        - ``divergence``: divergence of the posterior from the prior, in nats, averaged over cells.
        - ``variance``: variance of the posterior mean over cells.
        - ``active``: whether this variance is above 0.01.
        - ``prior_variance``: variance of the prior's mean over cells.

        Divergence and variance are both near 0 for a component whose posterior has collapsed to the prior. The prior
        variance is near 0 if the priors of all labels have collapsed to one.
        """
        return self.latent_health_

    def _embedded(self, block: str, adata: AnnData | None, rows: Any, batch_size: int) -> np.ndarray:
        """Return the decoder's input of a block for these rows, computed from the posteriors' means."""
        adata, module = self._adata_or_attached(adata), self.module
        source = self._source(adata)
        rows = np.arange(source.shape[0]) if rows is None else row_numbers(rows, source.shape[0])
        labels = self._label_codes(adata)[rows], self._environment_codes(adata)[0][rows, 0]
        self._check_labels(*labels, rows)
        y, e = (torch.from_numpy(codes).to(self.device) for codes in labels)
        environments = self._environment_corrections(adata, leftover=False)
        codes, within = (None, None) if environments is None else (e, environments.inputs)
        number = "cs".index(block)
        z = np.empty((len(rows), module.decoder.n_latents[number]), dtype=np.float32)
        with torch.inference_mode():
            for part, stored in self._read(source, rows, batch_size):
                known = None if codes is None else codes[part]
                images = module.prepare(stored, known, environments=within)
                means = tuple(posterior.mean for posterior in module.posteriors(images, e[part]))
                code = module.code(means, y[part], e[part])
                z[part] = code.split(module.decoder.n_latents, dim=1)[number].cpu().numpy()
        return z

    def _check_labels(self, y: np.ndarray, e: np.ndarray, rows: np.ndarray) -> None:
        """Raise a ``ValueError`` that names the rows without a label that the decoder needs."""
        asks = self.module.asks
        lacking = (Y_REGISTRY in asks) & (y < 0) | (E_REGISTRY in asks) & ~np.isin(e, self.drawn_environments_)
        if lacking.any():
            columns = " and ".join(repr(CROSS_SEPARATOR.join(self._registered(name)["columns"])) for name in asks)
            have = inflect(lacking.sum(), "has", "have")
            msg = (
                f"{type(self).__name__} draws a cell by its {columns}, and {format_count(lacking.sum(), 'cell')} (rows "
                f"{join_first(rows[lacking])}) {have} none, or an environment that was not trained on: leave them out."
            )
            raise ValueError(msg)

    def _require_decoder(self) -> Any:
        if not self.is_trained_:
            msg = "The decoder is not trained: it learns with the encoders, in train()."
            raise ValueError(msg)
        return super()._require_decoder()

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """Record the environments that the network is trained on."""
        self.drawn_environments_ = np.unique(e)

    def _after_training(self, data: ImageDataModule) -> None:
        """Compute ``latent_health`` on the example batch: of validation cells, or else of training cells."""
        batch = {name: part.to(self.device) for name, part in data.example_batch().items()}
        y, e = batch["y"], batch["e"]
        with torch.inference_mode():
            posteriors = self.module.posteriors(self.module.prepare(batch["inputs"], e), e)
            rows = [
                _component_statistics(name, posterior, prior, self.module.held(name, y))
                for name, posterior, prior in zip("cs", posteriors, self.module.priors(y, e), strict=False)
            ]
        self.latent_health_ = pd.concat(rows, ignore_index=True)

    def _result_lines(self) -> list[tuple[str, str]]:
        """Return the line of ``print(model)`` that counts active components, if the model is trained."""
        if self.latent_health.empty:
            return []
        blocks = self.latent_health.groupby("block")["active"]
        used = [f"{active.sum()} of {len(active)} in z_{block}" for block, active in blocks]
        return [("", f"components in use: {', '.join(used)}")]


def _component_statistics(block: str, posterior: Gaussian, prior: Gaussian, held: Tensor) -> pd.DataFrame:
    """Return statistics of the components of a block, over the cells whose divergence is in the loss."""
    prior = Gaussian(*(part.expand_as(posterior.mean)[held] for part in prior))
    posterior = Gaussian(*(part[held] for part in posterior))
    variance = posterior.mean.var(0, correction=0).cpu().numpy()
    return pd.DataFrame(
        {
            "block": block,
            "component": np.arange(len(variance)),
            "divergence": posterior.divergence(prior).mean(0).cpu().numpy(),
            "variance": variance,
            "active": variance > _MIN_ACTIVE_VARIANCE,
            "prior_variance": prior.mean.var(0, correction=0).cpu().numpy(),
        }
    )


class VAEModule(LatentModule):
    """A single block, whose prior is the standard normal distribution."""

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the standard normal distribution."""
        zero = self.decoder.log_scale.new_zeros((1, self.n_latent))
        return (Gaussian(zero, zero),)


class VAEModel(LatentModel):
    """A variational autoencoder that uses neither perturbation nor environment.

    The decoder is trained jointly with the encoder, so that :meth:`reconstruct` draws cells. With a Gaussian
    likelihood, the drawn cells are standardised per environment.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    n_latent
        Dimension of the embedding.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, or ``"gaussian"`` with one learned scale for any values. By default
        (``"auto"``) Bernoulli for images scaled to between 0 and 1 (``intensity="scale"``), otherwise Gaussian.
    kl_warmup_steps
        Number of steps over which the weight of the divergences rises from 0 to 1.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Settings of the preprocessing.

        For images: ``image_size`` (pixels per side), ``intensity`` (transform of pixel values), ``standardize`` (scale
        channels to mean 0 and variance 1) and ``augment`` (random flips and rotations by right angles), as in
        :class:`scbd.nn.Preprocess`.

        For features: ``standardize`` and ``clip`` (number of standard deviations at which scaled features are cut off),
        as in :class:`scbd.nn.FeatureScaling`.

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


class IVAEModule(LatentModule):
    r"""Two blocks, :math:`p(x | z_c, z_s)\, p(z_c | y)\, p(z_s | e)`, with learned priors.

    Parameters
    ----------
    style_posterior
        ``"xe"``: :math:`q(z_s | x, e)`, with a separate head (expert) for each environment. ``"x"``:
        :math:`q(z_s | x)`.
    **kwargs
        See :class:`scbd.baselines._latent.LatentModule`.
    """

    def __init__(self, *args: Any, style_posterior: str, n_environments: int, **kwargs: Any) -> None:
        check_choice("style_posterior", style_posterior, {"xe": "image and environment", "x": "image"})
        n_experts = n_environments if style_posterior == "xe" else 1
        super().__init__(*args, n_environments=n_environments, n_blocks=2, n_experts=n_experts, **kwargs)
        self.asks = (E_REGISTRY,) if style_posterior == "xe" else ()
        self.content_prior = LearnedPrior(self.n_labels, self.n_latent)
        self.style_prior = LearnedPrior(n_environments, self.n_latent)

    def posteriors(self, images: PreparedInputs, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the posteriors of z_c and z_s.

        If there are experts, the posterior of z_s is given by the expert of each cell's environment.
        """
        assert self.style is not None
        return self.content(images.within), self.style(images.whole, e if self.asks else None)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the prior of z_c given the perturbation, and of z_s given the environment."""
        return self.content_prior(y), self.style_prior(e)


class IVAEModel(LatentModel):
    """A variational autoencoder with one block for the perturbation and one for the environment (iVAE).

    With ``style_posterior="xe"``, each environment has its own expert for z_s. There are two ways to use the experts:

    - ``get_latent_representation(block="s")`` uses no labels and returns the mean over all experts.
    - :meth:`reconstruct` and :meth:`swap_blocks` use the expert of each cell's environment, which must have been in
      training.

    The decoder is trained jointly with the encoders.

    Parameters
    ----------
    adata, likelihood, kl_warmup_steps, registry, **preprocess
        See :class:`VAEModel`.
    n_latent
        Dimension of each of the two embeddings.
    style_posterior
        ``"xe"``: the posterior of z_s depends on image and environment, with an expert for each environment. ``"x"``:
        it depends on the image alone.
    kl_warmup_steps
        Number of steps over which the weight of the divergences rises from 0 to 1.

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

    traits = replace(LatentModel.traits, fixed_labels=(Y_REGISTRY, E_REGISTRY))

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


# weight of the penalty on the size of the controls' salient posterior
_BACKGROUND_WEIGHT = 8.0
# lower limit of log-variances, because the penalty drives variances towards 0
_MIN_LOG_VARIANCE = -20.0


class MCVAEModule(LatentModule):
    r"""Two blocks: a salient z_c, which is 0 for controls, and a background z_s, which all cells have.

    Before decoding, the salient code of controls is set to 0. Their salient posterior has no divergence term. Instead,
    a penalty draws it towards 0, and warms up with the divergences:

    .. math:: 8\, \bigl( \lVert \mu \rVert^2 + \textstyle\sum \sigma^2 \bigr).

    Priors are normal distributions of variance 1, with a mean learned for each perturbation. The loss is that of a pair
    of a control and a perturbed cell: the mean over controls plus the mean over perturbed cells.

    Parameters
    ----------
    control
        Code of the perturbation that marks the controls.
    n_environments
        Number of different environments.
    n_environment_latent
        Dimension of an embedding of the environment that is given to the decoder; 0 for no such embedding.
    **kwargs
        See :class:`scbd.baselines._latent.LatentModule`.
    """

    def __init__(
        self, *args: Any, control: int, n_environments: int, n_environment_latent: int = 0, **kwargs: Any
    ) -> None:
        check_count("n_environment_latent", n_environment_latent, 0)
        super().__init__(*args, n_blocks=2, n_environments=n_environments, n_beside=n_environment_latent, **kwargs)
        self.control = control
        self.asks = (Y_REGISTRY, E_REGISTRY) if n_environment_latent else (Y_REGISTRY,)
        self.salient_prior, self.background_prior = (
            LearnedPrior(self.n_labels, self.n_latent, learn_variance=False) for _ in range(2)
        )
        self.environment = nn.Embedding(n_environments, n_environment_latent) if n_environment_latent else None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the objective, which a resumed run must share."""
        return {"contrasted_label": self.control}

    def posteriors(self, images: PreparedInputs, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the posteriors of both blocks given the image."""
        found = super().posteriors(images, e)
        return tuple(Gaussian(q.mean, q.log_variance.clamp(min=_MIN_LOG_VARIANCE)) for q in found)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the priors of both blocks given the perturbation."""
        return self.salient_prior(y), self.background_prior(y)

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """Return both blocks, with z_c of controls set to 0, and the embedding of the environment if there is one."""
        salient, background = z
        beside = () if self.environment is None else (self.environment(e),)
        return super().code((salient * (y != self.control)[:, None], background, *beside), y, e)

    def held(self, block: str, y: Tensor) -> Tensor:
        """Return a mask ``(B,)`` of the cells with a divergence term: all, except controls in the salient block."""
        return y != self.control if block == "c" else super().held(block, y)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Return the penalty on the size of the controls' salient posterior, 0 for perturbed cells."""
        salient = posteriors[0]
        size = (salient.mean.square() + salient.log_variance.exp()).sum(1)
        return {"background": _BACKGROUND_WEIGHT * size.masked_fill(self.held("c", y), 0)}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Return the mean over controls plus the mean over perturbed cells; only one if the other group is empty."""
        controls = y == self.control
        means = [nats[group].mean() for group in (controls, ~controls) if group.any()]
        return torch.stack(means).sum()


class MCVAEModel(LatentModel):
    """A variational autoencoder that contrasts perturbed cells with controls (mcVAE).

    Block ``"c"`` is the salient block, for changes due to the perturbation. Block ``"s"`` is the background. The
    original method embeds a cell as the concatenation of both blocks, which has twice ``n_latent`` dimensions.

    One half of each batch are controls, and the other half perturbed cells. Both groups are shuffled. Each cell of the
    smaller group is used more often. The loss is that of a pair, the sum of the nats of two cells.

    The decoder is trained jointly with the encoders, for :meth:`reconstruct` and :meth:`swap_blocks`. In these methods,
    z_c of a control is 0, and z_s includes the embedding of the cell's environment, if there is one.

    Parameters
    ----------
    adata, likelihood, kl_warmup_steps, registry, **preprocess
        See :class:`VAEModel`.
    control
        Perturbation that marks the controls. By default the one given to :meth:`setup_anndata`, or else
        ``"nontargeting"``.
    n_latent
        Dimension of each block.
    kl_warmup_steps
        Number of steps over which the weights of the divergences and of the penalty on controls rise from 0 to their
        final value.
    n_environment_latent
        Dimension of an embedding of the environment that the decoder receives in addition to both blocks, so that the
        blocks need not encode the environment. 0 for no such embedding. The original method uses 32 (for the batch).
        With such an embedding, the model cannot continue training with cells of other environments, but it can embed
        them.

    Raises
    ------
    ValueError
        If no cell is a control.

    References
    ----------
    Wang et al. (2023), Multi-ContrastiveVAE disentangles perturbation effects in single-cell images from optical pooled
    screens. The loss is that of Wang et al., without the optional penalty between blocks. Networks as in Makino et al.
    (2025), appendix.

    Examples
    --------
    >>> scbd.baselines.MCVAEModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.MCVAEModel(adata, n_latent=32, control="nontargeting", n_environment_latent=32)
    >>> model.train(max_steps=2000)
    >>> z = np.hstack([model.get_latent_representation(block=block) for block in "cs"])
    >>> z.shape
    (240, 64)
    """

    traits = replace(LatentModel.traits, batches=ControlPairedBatches, fixed_labels=(Y_REGISTRY,))

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
                f"one of {join_first(map(repr, perturbations))}."
            )
            raise ValueError(msg)
        code = perturbations.index(control)
        fixed = (Y_REGISTRY, E_REGISTRY) if n_environment_latent else (Y_REGISTRY,)
        self.traits = replace(self.traits, batch_kwargs={"control": code}, fixed_labels=fixed)
        settings = {"control": code, "n_latent": n_latent, "likelihood": likelihood}
        settings["n_environment_latent"] = n_environment_latent
        self._set_up(MCVAEModule, kl_warmup_steps, preprocess, **settings)


# approximate side, in pixels, and channels of the encoder's last feature map
_FEATURE_MAP_SIDE = 8
_FEATURE_MAP_CHANNELS = 64
# width of the two hidden layers in networks for features
_HIDDEN_WIDTH = 256


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    log_variance: Tensor

    def sample(self, generator: torch.Generator | None) -> Tensor:
        """Draw one differentiable sample; return the means if there is no generator."""
        if generator is None:
            return self.mean
        noise = torch.randn(self.mean.shape, generator=generator).to(self.mean)
        return self.mean + noise * (0.5 * self.log_variance).exp()

    def divergence(self, prior: Gaussian) -> Tensor:
        """Compute the Kullback-Leibler divergence from the prior, in nats per component."""
        error = (self.mean - prior.mean).square() + self.log_variance.exp()
        return 0.5 * (prior.log_variance - self.log_variance + error * (-prior.log_variance).exp() - 1)


def _halvings(image_size: tuple[int, int]) -> int:
    """Return how often the encoder halves an image's sides: 3 times for 64 pixels, twice for 32."""
    return int(min(3, max(0, math.log2(min(image_size) / _FEATURE_MAP_SIDE))))


def _build_encoder(input_shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """Return a network from inputs to a vector, and the length of this vector."""
    if len(input_shape) == 1:
        hidden = [
            nn.Linear(input_shape[0], _HIDDEN_WIDTH),
            nn.GELU(),
            nn.Linear(_HIDDEN_WIDTH, _HIDDEN_WIDTH),
            nn.GELU(),
        ]
        return nn.Sequential(*hidden), _HIDDEN_WIDTH
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    # if there are fewer than three halvings, the last layers do them
    strides = [2 if i >= 3 - halvings else 1 for i in range(3)]
    plan = [(channels, 32, strides[0]), (32, 32, 1), (32, 64, strides[1]), (64, 64, 1), (64, 64, strides[2])]
    layers: list[nn.Module] = []
    for n_in, n_out, stride in plan:
        layers += [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.GELU()]
    n_features = _FEATURE_MAP_CHANNELS * math.prod(math.ceil(side / 2**halvings) for side in (height, width))
    return nn.Sequential(*layers, nn.Flatten()), n_features


class Posterior(nn.Module):
    """Network from inputs to a normal distribution of the embedding, with one or several heads (experts).

    Parameters
    ----------
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    n_latent
        Dimension of the embedding.
    n_experts
        Number of heads on the shared network, for example one per environment.
    """

    def __init__(self, input_shape: tuple[int, ...], n_latent: int, n_experts: int = 1) -> None:
        super().__init__()
        self.maps, n_features = _build_encoder(input_shape)
        self.heads = nn.Linear(n_features, n_experts * 2 * n_latent)
        self.n_latent, self.n_experts = n_latent, n_experts

    def forward(self, images: Tensor, experts: Tensor | None = None) -> Gaussian:
        """Compute mean and log-variance, ``(B, D)`` each.

        ``experts`` ``(B,)`` is the number of the head to use for each cell. By default, the average of all heads is
        used.
        """
        heads = self.heads(self.maps(images)).float().unflatten(1, (self.n_experts, 2, self.n_latent))
        chosen = heads.mean(1) if experts is None else heads[torch.arange(len(heads), device=heads.device), experts]
        return Gaussian(chosen[:, 0], chosen[:, 1])

    def width(self, representation: Representation) -> int:
        """Return the dimension of the output of :meth:`represent`."""
        return self.n_latent

    def represent(self, images: Tensor, representation: Representation) -> Tensor:
        """Return the posterior mean ``(B, D)``, which is also the intermediate representation here."""
        return self(images).mean

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``look`` with the posterior mean in every forward pass, until the returned handle is removed."""
        return self.register_forward_hook(lambda _module, _inputs, posterior: look(posterior.mean))


class LearnedPrior(nn.Module):
    """A separate normal distribution for each label, with learned parameters.

    Parameters
    ----------
    n_labels
        Number of labels.
    n_latent
        Dimension of the embedding.
    learn_variance
        Learn variances as well; `False` fixes them to 1.
    """

    def __init__(self, n_labels: int, n_latent: int, *, learn_variance: bool = True) -> None:
        super().__init__()
        self.mean = nn.Embedding(n_labels, n_latent)
        self.log_variance = nn.Embedding(n_labels, n_latent)
        nn.init.zeros_(self.log_variance.weight)
        self.log_variance.weight.requires_grad_(learn_variance)

    def forward(self, labels: Tensor) -> Gaussian:
        """Return the distributions of labels ``(B,)``."""
        return Gaussian(self.mean(labels), self.log_variance(labels))


def _build_decoder(n_latent: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    """Return a network from embeddings to inputs; images come out with sides rounded up, to be cropped afterwards."""
    if len(input_shape) == 1:
        hidden = [nn.Linear(n_latent, _HIDDEN_WIDTH), nn.GELU(), nn.Linear(_HIDDEN_WIDTH, _HIDDEN_WIDTH), nn.GELU()]
        return nn.Sequential(*hidden, nn.Linear(_HIDDEN_WIDTH, input_shape[0]))
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    first = tuple(math.ceil(side / 2**halvings) for side in (height, width))
    doubled = [i < halvings for i in range(3)]
    return nn.Sequential(
        nn.Linear(n_latent, _FEATURE_MAP_CHANNELS * math.prod(first)),
        nn.Unflatten(1, (_FEATURE_MAP_CHANNELS, *first)),
        nn.GELU(),
        _upsampling_layer(64, 64, doubled[0]),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        _upsampling_layer(64, 32, doubled[1]),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GELU(),
        _upsampling_layer(32, channels, doubled[2]),
    )


class LatentDecoder(nn.Module):
    """Network from an embedding to the logits or means of inputs, with their likelihood.

    Parameters
    ----------
    n_latents
        Dimension of the decoder's input from each block.
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, or ``"gaussian"`` with one learned scale for any values.
    """

    def __init__(self, n_latents: tuple[int, ...], input_shape: tuple[int, ...], likelihood: str) -> None:
        super().__init__()
        check_choice("likelihood", likelihood, ("bernoulli", "gaussian"))
        self.n_latents = n_latents
        self.network = _build_decoder(sum(n_latents), input_shape)
        self.cut = (..., *(slice(side) for side in input_shape[1:]))
        self.likelihood = likelihood
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=likelihood == "gaussian")

    def forward(self, z: Tensor) -> Tensor:
        """Return logits or means, ``(B, C, H, W)`` or ``(B, F)``, given embeddings ``(B, D)``."""
        return self.network(z)[self.cut].float()

    def mean(self, *embeddings: Tensor) -> Tensor:
        """Return expected inputs, ``(B, C, H, W)`` or ``(B, F)``, given the embeddings ``(B, D)`` of each block."""
        predicted = self(torch.cat(embeddings, dim=1))
        return predicted.sigmoid() if self.likelihood == "bernoulli" else predicted

    def negative_log_likelihood(self, inputs: Tensor, z: Tensor) -> Tensor:
        """Compute the negative log-likelihood of inputs, in nats per cell ``(B,)``, summed over their values."""
        predicted = self(z)
        if self.likelihood == "bernoulli":
            nats = F.binary_cross_entropy_with_logits(predicted, inputs, reduction="none")
        else:
            error = (inputs - predicted) * (-self.log_scale).exp()
            nats = 0.5 * error.square() + self.log_scale + 0.5 * math.log(2 * math.pi)
        return nats.flatten(1).sum(1)


def _upsampling_layer(n_in: int, n_out: int, doubled: bool) -> nn.Module:
    if doubled:
        return nn.ConvTranspose2d(n_in, n_out, 3, stride=2, padding=1, output_padding=1)
    return nn.Conv2d(n_in, n_out, 3, padding=1)
