"""What all latent-variable models share: the bound, its gradients kept in check, and its diagnostics."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from scbd._checks import check_count
from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.baselines._vae_networks import Decoder, Gaussian, Posterior
from scbd.model import EmbeddingModule, ImageModel, Losses, TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scbd.data import ImageDataModule
    from scbd.nn import FeatureScaling, Preprocess

# steps with a longer gradient are left out; what is longer than the second is shortened to it (Child, 2021)
_SKIPPED_ABOVE, _CLIPPED_ABOVE = 1e12, 1e6
# variance over cells of a posterior mean, above which a component is in use (Burda et al., 2016)
_ACTIVE_ABOVE = 0.01


class LatentModule(EmbeddingModule):
    """A variational bound with one or two blocks; a subclass says what posteriors, priors and codes are.

    Parameters
    ----------
    preprocess
        What prepares the inputs.
    n_labels, n_environments
        Number of different y and e.
    n_latent
        Dimension of each block.
    n_blocks
        One or two.
    likelihood
        ``"auto"``: Bernoulli for intensities between 0 and 1, else Gaussian with one learned scale.
    n_experts
        Heads of the posterior of z_s.
    n_beside
        Further dimensions of what is decoded.
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
        self.content = Posterior(shape, n_latent)
        if n_blocks == 2:
            self.style = Posterior(shape, n_latent, n_experts)
        self.decoder = Decoder(n_latent * n_blocks + n_beside, shape, likelihood)

    def posteriors(self, images: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of z_c and, if there is one, z_s, of preprocessed images."""
        return (self.content(images),) if self.style is None else (self.content(images), self.style(images))

    def priors(self, y: Tensor, e: Tensor) -> tuple[Gaussian, ...]:
        """Of the same."""
        raise NotImplementedError

    def code(self, z: tuple[Tensor, ...], y: Tensor, e: Tensor) -> Tensor:
        """What is decoded, of samples of the blocks."""
        return torch.cat(z, dim=1)

    def held(self, block: str, y: Tensor) -> Tensor:
        """Cells whose posterior of a block is held to its prior, boolean ``(B,)``."""
        return torch.ones_like(y, dtype=torch.bool)

    def penalties(self, posteriors: tuple[Gaussian, ...], y: Tensor) -> dict[str, Tensor]:
        """Further terms that warm up with the divergences, of each cell ``(B,)``, by name."""
        return {}

    def average(self, nats: Tensor, y: Tensor) -> Tensor:
        """Of a term of each cell ``(B,)``."""
        return nats.mean()

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """The bound, in nats, at samples of the posteriors; without a generator at their means."""
        images = self.preprocess(inputs, generator)
        target = self.preprocess.intensities(images) if self.decoder.likelihood == "bernoulli" else images
        posteriors = self.posteriors(images, e)
        z = tuple(posterior.sample(generator) for posterior in posteriors)
        terms = {"reconstruction": self.decoder.negative_log_likelihood(target, self.code(z, y, e))}
        for name, posterior, prior in zip("cs", posteriors, self.priors(y, e), strict=False):
            terms[f"divergence_{name}"] = posterior.divergence(prior).sum(1).masked_fill(~self.held(name, y), 0)
        terms |= self.penalties(posteriors, y)
        parts = {name: self.average(nats, y) for name, nats in terms.items()}
        reconstruction, *pulls = parts.values()
        return Losses(reconstruction + ramp * torch.stack(pulls).sum(), parts)

    def networks(self) -> Iterable[nn.Module]:
        """Encoders and decoder."""
        return [*super().networks(), self.decoder]


class LatentPlan(TrainingPlan):
    """The plan of all image models, with wild gradients left out, or shortened (Child, 2021)."""

    skipped: Tensor
    # a loss that is none has a gradient that is left out: only a run that finds no other has diverged
    tolerated_losses = 10

    def __init__(self, module: Any, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.register_buffer("skipped", torch.zeros(()))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the length of the gradient."""
        length = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIPPED_ABOVE)
        if not bool(length <= _SKIPPED_ABOVE):  # NaN is not
            self.skipped += 1
            optimizer.zero_grad(set_to_none=True)
        self.log("skipped_gradients", self.skipped.clone(), on_step=True, on_epoch=False)


class LatentModel(ImageModel):
    """Base of the latent-variable models; a subclass makes its module."""

    module: LatentModule
    _plan = LatentPlan
    _of_weights = MappingProxyType({**ImageModel._of_weights, "latent_health_": pd.DataFrame})

    def _set_up(
        self, module: type[LatentModule], kl_warmup_steps: int, preprocess: dict[str, Any], **settings: Any
    ) -> None:
        """Make the module."""
        check_count("kl_warmup_steps", kl_warmup_steps, 0)
        self.module = module(
            self._preprocess(**preprocess),
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **settings,
        )
        self._plan_settings = {"n_steps_alpha_warmup": kl_warmup_steps}
        self.latent_health_ = pd.DataFrame()

    @property
    def latent_health(self) -> pd.DataFrame:
        """Which components were in use at the end of training; empty before.

        One row a component: ``block``; ``component``; ``divergence`` of the posterior from the prior in nats, and
        ``variance`` of its mean over cells, both near 0 where the posterior has collapsed to the prior; ``active``,
        whether that variance is above 0.01; ``prior_variance``, that of their priors' means, near 0 where the priors
        of all labels have collapsed to one.
        """
        return self.latent_health_

    def _after_training(self, data: ImageDataModule) -> None:
        """Look at the components on a batch."""
        batch = {name: part.to(self.device) for name, part in data.example_batch().items()}
        y, e = batch["y"], batch["e"]
        with torch.inference_mode():
            posteriors = self.module.posteriors(self.module.preprocess(batch["inputs"]), e)
            rows = [
                _components(name, posterior, prior, self.module.held(name, y))
                for name, posterior, prior in zip("cs", posteriors, self.module.priors(y, e), strict=False)
            ]
        self.latent_health_ = pd.concat(rows, ignore_index=True)

    def _outcome(self) -> list[tuple[str, str]]:
        """Components in use, where a run came to its end."""
        if self.latent_health.empty:
            return []
        blocks = self.latent_health.groupby("block")["active"]
        used = [f"{active.sum()} of {len(active)} in z_{block}" for block, active in blocks]
        return [("", f"components in use: {', '.join(used)}")]


def _components(block: str, posterior: Gaussian, prior: Gaussian, held: Tensor) -> pd.DataFrame:
    """Of the cells that are held to the prior."""
    prior = Gaussian(*(part.expand_as(posterior.mean)[held] for part in prior))
    posterior = Gaussian(*(part[held] for part in posterior))
    variance = posterior.mean.var(0, correction=0).cpu().numpy()
    return pd.DataFrame(
        {
            "block": block,
            "component": np.arange(len(variance)),
            "divergence": posterior.divergence(prior).mean(0).cpu().numpy(),
            "variance": variance,
            "active": variance > _ACTIVE_ABOVE,
            "prior_variance": prior.mean.var(0, correction=0).cpu().numpy(),
        }
    )
