"""Variational autoencoders from the appendix of Makino et al. (2025): VAE, iVAE and mcVAE.

A model has one block of latent components, z_c, or two blocks, z_c and z_s. Each block has an encoder, which gives its
posterior distribution, and a prior distribution. A decoder maps the blocks to images or features.
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
from scbd.model._decode import DecodeMixin
from scbd.model._embed import row_numbers
from scbd.model._interfaces import EmbeddingModule, Losses, PreparedInputs
from scbd.model._plan import TrainingPlan, skip_step_if

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch.utils.hooks import RemovableHandle

    from scbd.data._loading import ImageDataModule
    from scbd.nn._encoders import Representation
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess

# _SKIP_GRADIENT_NORM: norm of the gradient above which a training step is skipped. _CLIP_GRADIENT_NORM: norm to which
# longer gradients are clipped in all other steps (as in Child, 2021).
_SKIP_GRADIENT_NORM, _CLIP_GRADIENT_NORM = 1e12, 1e6
# Variance of the posterior mean over cells above which a latent component counts as active (Burda et al., 2016).
_MIN_ACTIVE_VARIANCE = 0.01


class LatentModule(EmbeddingModule):
    """Base class of variational autoencoders with one block of latent components (z_c) or two blocks (z_c and z_s).

    The network is trained by maximising a variational bound of the likelihood. A subclass defines the prior of each
    block. It may also change the posteriors and the input of the decoder, and add penalties to the loss.

    Parameters
    ----------
    preprocess
        Module that prepares stored images or features for the encoders.
    n_labels, n_environments
        Number of different perturbations, and number of different environments.
    n_latent
        Number of latent components of each block.
    n_blocks
        Number of blocks: 1 (z_c) or 2 (z_c and z_s).
    likelihood
        Distribution of images or features given the latent components: ``"bernoulli"``, ``"gaussian"`` with one learned
        scale, or ``"auto"``: Bernoulli if intensities are scaled to between 0 and 1 (``intensity="scale"``), otherwise
        Gaussian.
    n_experts
        Number of output heads (experts) of the encoder of z_s, for example one per environment.
    n_beside
        Number of inputs of the decoder in addition to the blocks, for example the dimension of an embedding of the
        environment.
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
        # Registry keys of the labels that are needed to decode a cell in addition to its image. These can be the
        # perturbation and the environment.
        self.asks: tuple[str, ...] = ()
        self.content = Posterior(shape, n_latent)
        if n_blocks == 2:
            self.style = Posterior(shape, n_latent, n_experts)
        self.decoder = LatentDecoder((*[n_latent] * (n_blocks - 1), n_latent + n_beside), shape, likelihood)

    def posteriors(self, images: PreparedInputs, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the posterior distribution of z_c and, if there are two blocks, of z_s for each cell."""
        of_c = self.content(images.within)
        return (of_c,) if self.style is None else (of_c, self.style(images.whole))

    @abstractmethod
    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the prior distributions of the blocks for each cell, given its perturbation and environment."""

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """Return the input of the decoder, given one sample of each block: here z_c followed by z_s."""
        return torch.cat(z, dim=1)

    def held(self, block: str, y: Tensor) -> Tensor:
        """Return a mask ``(B,)`` of the cells that contribute to the divergence term of a block in the loss.

        The divergence is that of a cell's posterior from its prior. In this base class, all cells contribute.
        """
        return torch.ones_like(y, dtype=torch.bool)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Return additional terms of the loss by name, each with one value per cell ``(B,)``.

        The weight of these terms warms up together with that of the divergences. This base class has no additional
        terms.
        """
        return {}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Average the values ``(B,)`` of a loss term, one value per cell, over the batch."""
        return nats.mean()

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Compute the loss of a batch, which is the negative variational bound in nats per cell, and its terms.

        Latent components are drawn from their posteriors with ``generator``. Without a generator, the posterior means
        are used instead.
        """
        images = self.prepare(inputs, e, generator)
        # A model with z_s reconstructs inputs that are standardised over all cells. Such inputs still contain the
        # differences between environments, which z_s should explain.
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
    """Training plan that clips long gradients, and skips training steps with extremely long gradients (Child, 2021)."""

    skipped: Tensor
    # Number of consecutive training steps that may have a non-finite loss. Each of these steps is skipped. Only a
    # longer series of non-finite losses indicates that the training diverges.
    tolerated_losses = 10

    def __init__(self, module: Any, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.register_buffer("skipped", torch.zeros(()))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient of a training step, or skip the step if the norm of the gradient is extremely large or NaN.

        With precision ``"16-mixed"`` on a GPU, only steps whose gradient contains NaN or infinity are skipped.
        """
        length = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP_GRADIENT_NORM)
        # The condition is the negation of ``<=`` instead of ``>``, so that it is also true for a norm of NaN.
        is_extreme = (length <= _SKIP_GRADIENT_NORM).logical_not()
        if optimizer.defaults["fused"]:
            skip_step_if(is_extreme, optimizer)
        elif is_extreme:
            optimizer.zero_grad(set_to_none=True)
        self.skipped += is_extreme
        if self.is_logged_step:
            self.log("skipped_gradients", self.skipped.clone(), on_step=True, on_epoch=False)


class LatentModel(DecodeMixin, ImageModel):
    """Base class of the variational autoencoders VAE, iVAE and mcVAE. Subclasses specify their network."""

    module: LatentModule
    traits = replace(ImageModel.traits, batches=ShuffledBatches, plan=LatentPlan)

    def _set_up(
        self, module: type[LatentModule], kl_warmup_steps: int, preprocess: dict[str, Any], **settings: Any
    ) -> None:
        """Make the network of class ``module`` from its own settings and those of the preprocessing."""
        check_count("kl_warmup_steps", kl_warmup_steps, 0)
        inputs: dict[str, Any] = {"standardize_by": "auto", "augment": True} | preprocess
        self.module = module(
            self._make_preprocess(**inputs),
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **settings,
        )
        self.traits = replace(self.traits, plan_kwargs={"n_steps_alpha_warmup": kl_warmup_steps})
        self.drawn_environments_ = np.empty(0, dtype=np.int64)

    @property
    def latent_health(self) -> pd.DataFrame:
        """Table of statistics of the latent components at the end of training; empty before training.

        There is one row per component, with these columns:

        - ``block`` and ``component``: the block (``"c"`` for z_c or ``"s"`` for z_s), and the number of the component
          in this block.
        - ``divergence``: Kullback-Leibler divergence of the posterior from the prior, in nats, averaged over cells.
        - ``variance``: variance of the posterior mean over cells.
        - ``active``: whether ``variance`` is above 0.01.
        - ``prior_variance``: variance of the prior's mean over cells.

        ``divergence`` and ``variance`` are both near 0 for a component whose posterior has collapsed to the prior.
        ``prior_variance`` is near 0 if the priors of all labels have collapsed to the same distribution.
        """
        found: pd.DataFrame | None = self.results_.diagnostics
        return pd.DataFrame() if found is None else found

    def _embedded(self, block: str, adata: AnnData | None, rows: Any, batch_size: int) -> np.ndarray:
        """Compute the decoder's input from one block, z_c or z_s, from posterior means of the cells in ``rows``."""
        adata, module = self._adata_or_attached(adata), self.module
        source = self._source(adata)
        rows = np.arange(source.shape[0]) if rows is None else row_numbers(rows, source.shape[0])
        labels = self._label_codes(adata)
        of_rows = labels.y[rows], labels.e[rows, 0]
        self._check_labels(*of_rows, rows)
        y, e = (torch.from_numpy(codes).to(self.device) for codes in of_rows)
        environments = self._environment_corrections(adata, module, source, with_offsets=False)
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
        """Raise a ``ValueError`` that names the cells that lack a perturbation or environment needed for decoding.

        An environment that was not in training counts as missing.
        """
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
        """Store the codes of the environments of the training cells."""
        self.drawn_environments_ = np.unique(e)

    def _after_training(self, data: ImageDataModule) -> None:
        """Compute ``latent_health`` from a batch of validation cells; without such cells, from training cells."""
        batch = {name: part.to(self.device) for name, part in data.example_batch().items()}
        y, e = batch["y"], batch["e"]
        with torch.inference_mode():
            posteriors = self.module.posteriors(self.module.prepare(batch["inputs"], e), e)
            rows = [
                _component_statistics(name, posterior, prior, self.module.held(name, y))
                for name, posterior, prior in zip("cs", posteriors, self.module.priors(y, e), strict=False)
            ]
        self.results_.diagnostics = pd.concat(rows, ignore_index=True)

    def _result_lines(self) -> list[tuple[str, str]]:
        """Return the line of ``print(model)`` with the number of active latent components; no line before training."""
        if self.latent_health.empty:
            return []
        blocks = self.latent_health.groupby("block")["active"]
        used = [f"{active.sum()} of {len(active)} in z_{block}" for block, active in blocks]
        return [("", f"components in use: {', '.join(used)}")]


def _component_statistics(block: str, posterior: Gaussian, prior: Gaussian, held: Tensor) -> pd.DataFrame:
    """Return a table of statistics with one row per component of a block, see :attr:`LatentModel.latent_health`.

    The statistics are over the cells in the mask ``held``, which contribute to the block's divergence term in the loss.
    """
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
    """Network of the VAE: a single block of latent components, whose prior is the standard normal distribution."""

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the standard normal distribution, which is the prior of every cell."""
        zero = self.decoder.log_scale.new_zeros((1, self.n_latent))
        return (Gaussian(zero, zero),)


class VAEModel(LatentModel):
    """Variational autoencoder that uses neither perturbations nor environments.

    The decoder is trained jointly with the encoder, so that :meth:`reconstruct` works without further training. With a
    Gaussian likelihood, reconstructed inputs are standardised per environment.

    Parameters
    ----------
    adata
        AnnData of the cells, on which :meth:`setup_anndata` was called.
    n_latent
        Number of latent components, which is the dimension of the embedding.
    likelihood
        Distribution of pixels or features given the latent components: ``"bernoulli"`` for values between 0 and 1, or
        ``"gaussian"`` with one learned scale for any values. By default (``"auto"``) Bernoulli for images scaled to
        between 0 and 1 (``intensity="scale"``), otherwise Gaussian.
    kl_warmup_steps
        Number of first training steps, over which the weight of the Kullback-Leibler divergences rises from 0 to 1.
    registry
        Labels and settings of a saved model, which :meth:`load` uses to make the model without data. Not given
        otherwise.
    **preprocess
        Settings of the preprocessing.

        For images: ``image_size`` (pixels per side), ``intensity`` (transform of pixel values), ``standardize`` (scale
        channels to mean 0 and variance 1) and ``augment`` (random flips and rotations by right angles), as in
        :class:`scbd.nn.Preprocess`.

        For features: ``standardize`` (scale features to mean 0 and variance 1) and ``clip`` (number of standard
        deviations at which scaled features are cut off), as in :class:`scbd.nn.FeatureScaling`.

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
        self._set_up(VAEModule, kl_warmup_steps, preprocess, n_latent=n_latent, n_blocks=1, likelihood=likelihood)


class IVAEModule(LatentModule):
    r"""Network of the iVAE: :math:`p(x | z_c, z_s)\, p(z_c | y)\, p(z_s | e)`, with learned priors.

    The block :math:`z_c` has one prior per perturbation :math:`y`, the block :math:`z_s` has one per environment
    :math:`e`.

    Parameters
    ----------
    style_posterior
        Inputs of the posterior of :math:`z_s`. ``"xe"``: image and environment, :math:`q(z_s | x, e)`, with a separate
        output head (expert) for each environment. ``"x"``: the image alone, :math:`q(z_s | x)`.
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
        """Return the posterior distributions of z_c and z_s for each cell.

        If each environment has its own output head (expert), the posterior of z_s comes from the expert of the cell's
        environment.
        """
        assert self.style is not None
        return self.content(images.within), self.style(images.whole, e if self.asks else None)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the prior of z_c given each cell's perturbation, and of z_s given each cell's environment."""
        return self.content_prior(y), self.style_prior(e)


class IVAEModel(LatentModel):
    """Variational autoencoder with one block for the perturbation (z_c) and one for the environment (z_s): iVAE.

    With ``style_posterior="xe"``, the encoder of z_s has a separate output head (expert) for each environment. There
    are two ways to use the experts:

    - ``get_latent_representation(block="s")`` uses no environment labels and returns the mean over all experts.
    - :meth:`reconstruct` and :meth:`swap_blocks` use the expert of each cell's environment. This environment must have
      been in training.

    The decoder is trained jointly with the encoders.

    Parameters
    ----------
    adata, likelihood, registry, **preprocess
        See :class:`VAEModel`.
    n_latent
        Number of latent components of each block, which is the dimension of each of the two embeddings.
    style_posterior
        Inputs of the posterior of z_s. ``"xe"``: image and environment, with an expert for each environment. ``"x"``:
        the image alone.
    kl_warmup_steps
        Number of first training steps, over which the weight of the Kullback-Leibler divergences rises from 0 to 1.

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


# Weight of a penalty in the loss of mcVAE. For controls, the penalty draws the posterior of the salient block z_c
# towards 0.
_BACKGROUND_WEIGHT = 8.0
# Lower limit of the log-variances of posteriors in mcVAE. Without a limit, the penalty on controls would drive
# variances towards 0.
_MIN_LOG_VARIANCE = -20.0


class MCVAEModule(LatentModule):
    r"""Network of the mcVAE: a salient block z_c, which is 0 for controls, and a background block z_s of all cells.

    Before decoding, z_c of controls is set to 0. The posterior of z_c, with mean :math:`\mu` and variances
    :math:`\sigma^2`, has no divergence term in the loss for controls. Instead, the loss has a penalty that draws this
    posterior towards 0 and warms up together with the divergences:

    .. math:: 8\, \bigl( \lVert \mu \rVert^2 + \textstyle\sum \sigma^2 \bigr).

    The priors of both blocks are normal distributions with variance 1 and a mean learned for each perturbation. The
    loss is that of a pair of one control and one perturbed cell: the mean over controls plus the mean over perturbed
    cells.

    Parameters
    ----------
    control
        Code of the perturbation label of the controls.
    n_environments
        Number of different environments.
    n_environment_latent
        Dimension of a learned embedding of the environment, which the decoder receives in addition to both blocks; 0
        for no such embedding.
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
        """Settings of the loss, here the code of the controls. A resumed training run must have the same settings."""
        return {"contrasted_label": self.control}

    def posteriors(self, images: PreparedInputs, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the posterior distributions of z_c and z_s for each cell, given its image."""
        found = super().posteriors(images, e)
        return tuple(Gaussian(q.mean, q.log_variance.clamp(min=_MIN_LOG_VARIANCE)) for q in found)

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Return the prior distributions of z_c and z_s for each cell, given its perturbation."""
        return self.salient_prior(y), self.background_prior(y)

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """Return the input of the decoder: z_c (0 for controls), z_s and, if used, the embedding of the environment."""
        salient, background = z
        beside = () if self.environment is None else (self.environment(e),)
        return super().code((salient * (y != self.control)[:, None], background, *beside), y, e)

    def held(self, block: str, y: Tensor) -> Tensor:
        """Return a mask ``(B,)`` of the cells that contribute to the divergence term of a block in the loss.

        All cells contribute to the term of z_s, but only perturbed cells contribute to the term of z_c.
        """
        return y != self.control if block == "c" else super().held(block, y)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Return the penalty that draws z_c of controls towards 0, per cell ``(B,)``. It is 0 for perturbed cells."""
        salient = posteriors[0]
        size = (salient.mean.square() + salient.log_variance.exp()).sum(1)
        return {"background": _BACKGROUND_WEIGHT * size.masked_fill(self.held("c", y), 0)}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Return the mean of a loss term over controls plus its mean over perturbed cells.

        If the batch contains no control or no perturbed cell, the corresponding mean is omitted.
        """
        controls = y == self.control
        # Values are set to 0 instead of being selected: to select them on a GPU, the CPU would have to wait for it.
        means = [nats.masked_fill(~group, 0).sum() / group.sum().clamp(min=1) for group in (controls, ~controls)]
        return torch.stack(means).sum()


class MCVAEModel(LatentModel):
    """Variational autoencoder that contrasts perturbed cells with controls (mcVAE).

    Block ``"c"`` (z_c) is the salient block, for changes due to the perturbation. Block ``"s"`` (z_s) is the background
    block, for properties that perturbed cells and controls have in common. The original method embeds a cell as the
    concatenation of both blocks, which has twice ``n_latent`` dimensions.

    One half of each batch are controls, and the other half are perturbed cells. Controls and perturbed cells are
    shuffled separately, and the cells of the smaller group are used more often. The loss is that of a pair of one
    control and one perturbed cell: the sum of the losses of both cells, in nats.

    The decoder is trained jointly with the encoders, for :meth:`reconstruct` and :meth:`swap_blocks`. In both methods,
    z_c of a control is 0, and z_s includes the embedding of the cell's environment, if such an embedding is used.

    Parameters
    ----------
    adata, likelihood, registry, **preprocess
        See :class:`VAEModel`.
    control
        Perturbation label of the controls. By default the label given to :meth:`setup_anndata`, or ``"nontargeting"``
        if no label was given.
    n_latent
        Number of latent components of each block.
    kl_warmup_steps
        Number of first training steps, over which the weights of the Kullback-Leibler divergences and of the penalty on
        controls rise from 0 to their final values.
    n_environment_latent
        Dimension of a learned embedding of the environment, which the decoder receives in addition to both blocks, so
        that the blocks need not encode the environment. 0 for no such embedding. The original method uses 32
        dimensions, to embed the experimental batch. With such an embedding, the model cannot continue training with
        cells of new environments, but it can embed these cells.

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
                msg = (
                    f"mcVAE contrasts with one control, and setup_anndata received {len(told)}: choose one with "
                    "control=…."
                )
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
        settings = {"n_latent": n_latent, "likelihood": likelihood, "n_environment_latent": n_environment_latent}
        self._set_up(MCVAEModule, kl_warmup_steps, preprocess, control=code, **settings)


# approximate side, in pixels, of the last feature map of the image encoder
_FEATURE_MAP_SIDE = 8
# number of channels of the last feature map of the image encoder
_FEATURE_MAP_CHANNELS = 64
# number of units in each of the two hidden layers of encoders and decoders for features (inputs that are not images)
_HIDDEN_WIDTH = 256


class Gaussian(NamedTuple):
    """Independent normal distributions of latent components, given by their means and log-variances."""

    mean: Tensor
    log_variance: Tensor

    def sample(self, generator: torch.Generator | None) -> Tensor:
        """Draw one sample, differentiable in mean and log-variance; without a generator, return the means instead."""
        if generator is None:
            return self.mean
        noise = torch.randn(self.mean.shape, generator=generator).to(self.mean)
        return self.mean + noise * (0.5 * self.log_variance).exp()

    def divergence(self, prior: Gaussian) -> Tensor:
        """Compute the Kullback-Leibler divergence of these distributions from the prior, in nats per component."""
        error = (self.mean - prior.mean).square() + self.log_variance.exp()
        return 0.5 * (prior.log_variance - self.log_variance + error * (-prior.log_variance).exp() - 1)


def _halvings(image_size: tuple[int, int]) -> int:
    """Return how many times the encoder halves the side of an image: 3 times for 64 pixels, twice for 32 pixels."""
    return int(min(3, max(0, math.log2(min(image_size) / _FEATURE_MAP_SIDE))))


def _hidden_layers(n_inputs: int) -> list[nn.Module]:
    """Make the two hidden layers of an encoder or decoder of features."""
    return [nn.Linear(n_inputs, _HIDDEN_WIDTH), nn.GELU(), nn.Linear(_HIDDEN_WIDTH, _HIDDEN_WIDTH), nn.GELU()]


def _build_encoder(input_shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """Build the network that maps images or features to one vector per cell; also return the length of this vector."""
    if len(input_shape) == 1:
        return nn.Sequential(*_hidden_layers(input_shape[0])), _HIDDEN_WIDTH
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    # Strides of the three layers that can halve the sides of an image. If an image is halved fewer than three times,
    # the last of these layers halve it.
    strides = [2 if i >= 3 - halvings else 1 for i in range(3)]
    plan = [(channels, 32, strides[0]), (32, 32, 1), (32, 64, strides[1]), (64, 64, 1), (64, 64, strides[2])]
    layers: list[nn.Module] = []
    for n_in, n_out, stride in plan:
        layers += [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.GELU()]
    n_features = _FEATURE_MAP_CHANNELS * math.prod(math.ceil(side / 2**halvings) for side in (height, width))
    return nn.Sequential(*layers, nn.Flatten()), n_features


class Posterior(nn.Module):
    """Encoder of one block: maps inputs to normal posterior distributions of the block's latent components.

    The encoder can have several output heads (experts), which share all layers below the heads.

    Parameters
    ----------
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    n_latent
        Number of latent components of the block.
    n_experts
        Number of output heads, for example one per environment.
    """

    def __init__(self, input_shape: tuple[int, ...], n_latent: int, n_experts: int = 1) -> None:
        super().__init__()
        self.maps, n_features = _build_encoder(input_shape)
        self.heads = nn.Linear(n_features, n_experts * 2 * n_latent)
        self.n_latent, self.n_experts = n_latent, n_experts

    def forward(self, images: Tensor, experts: Tensor | None = None) -> Gaussian:
        """Compute the means and log-variances ``(B, D)`` of the posteriors of B cells.

        ``experts`` ``(B,)`` is the number of the output head to use for each cell. By default, the outputs of all heads
        are averaged.
        """
        heads = self.heads(self.maps(images)).float().unflatten(1, (self.n_experts, 2, self.n_latent))
        chosen = heads.mean(1) if experts is None else heads[torch.arange(len(heads), device=heads.device), experts]
        return Gaussian(chosen[:, 0], chosen[:, 1])

    def width(self, representation: Representation) -> int:
        """Return the number of latent components, which is the dimension of the output of :meth:`represent`."""
        return self.n_latent

    def represent(self, images: Tensor, representation: Representation) -> Tensor:
        """Return the posterior means ``(B, D)``, which serve both as embeddings and as intermediate representations."""
        return self(images).mean

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``look`` with the posterior means of every forward pass, until the returned handle is removed."""
        return self.register_forward_hook(lambda _module, _inputs, posterior: look(posterior.mean))


class LearnedPrior(nn.Module):
    """Learned prior of one block: a separate normal distribution of the latent components for each label.

    Parameters
    ----------
    n_labels
        Number of different labels, which are perturbations or environments.
    n_latent
        Number of latent components of the block.
    learn_variance
        Whether to learn the variances in addition to the means; `False` fixes all variances to 1.
    """

    def __init__(self, n_labels: int, n_latent: int, *, learn_variance: bool = True) -> None:
        super().__init__()
        self.mean = nn.Embedding(n_labels, n_latent)
        self.log_variance = nn.Embedding(n_labels, n_latent)
        nn.init.zeros_(self.log_variance.weight)
        self.log_variance.weight.requires_grad_(learn_variance)

    def forward(self, labels: Tensor) -> Gaussian:
        """Return the prior distribution of each cell, given the codes of the cells' labels ``(B,)``."""
        return Gaussian(self.mean(labels), self.log_variance(labels))


def _build_decoder(n_latent: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    """Build the network that maps latent components to images or features.

    The sides of decoded images are rounded up to a multiple of the encoder's total stride; the caller crops the images.
    """
    if len(input_shape) == 1:
        return nn.Sequential(*_hidden_layers(n_latent), nn.Linear(_HIDDEN_WIDTH, input_shape[0]))
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    first = tuple(math.ceil(side / 2**halvings) for side in (height, width))
    doubled = [i < halvings for i in range(3)]
    plan = [(64, 64, doubled[0]), (64, 64, False), (64, 32, doubled[1]), (32, 32, False), (32, channels, doubled[2])]
    layers: list[nn.Module] = [
        nn.Linear(n_latent, _FEATURE_MAP_CHANNELS * math.prod(first)),
        nn.Unflatten(1, (_FEATURE_MAP_CHANNELS, *first)),
    ]
    for n_in, n_out, is_doubled in plan:
        layers.append(nn.GELU())
        if is_doubled:
            layers.append(nn.ConvTranspose2d(n_in, n_out, 3, stride=2, padding=1, output_padding=1))
        else:
            layers.append(nn.Conv2d(n_in, n_out, 3, padding=1))
    return nn.Sequential(*layers)


class LatentDecoder(nn.Module):
    """Decoder that maps latent components to images or features, and computes their likelihood.

    The outputs of the network are logits for a Bernoulli likelihood, and means for a Gaussian likelihood.

    Parameters
    ----------
    n_latents
        Number of inputs of the decoder from each block.
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    likelihood
        Distribution of pixels or features given the latent components: ``"bernoulli"`` for values between 0 and 1, or
        ``"gaussian"`` with one learned scale for any values.
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
        """Return logits or means of images ``(B, C, H, W)`` or features ``(B, F)``, given ``z`` ``(B, D)``."""
        return self.network(z)[self.cut].float()

    def mean(self, *embeddings: Tensor) -> Tensor:
        """Return expected images ``(B, C, H, W)`` or features ``(B, F)``, given each block's embeddings ``(B, D)``."""
        predicted = self(torch.cat(embeddings, dim=1))
        return predicted.sigmoid() if self.likelihood == "bernoulli" else predicted

    def negative_log_likelihood(self, inputs: Tensor, z: Tensor) -> Tensor:
        """Compute the negative log-likelihood ``(B,)`` of each cell, in nats, summed over pixels or features."""
        predicted = self(z)
        if self.likelihood == "bernoulli":
            nats = F.binary_cross_entropy_with_logits(predicted, inputs, reduction="none")
        else:
            error = (inputs - predicted) * (-self.log_scale).exp()
            nats = 0.5 * error.square() + self.log_scale + 0.5 * math.log(2 * math.pi)
        return nats.flatten(1).sum(1)
