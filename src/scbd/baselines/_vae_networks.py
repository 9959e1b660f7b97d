"""Networks of the latent-variable models (paper, appendix: tables of the VAE's encoder and decoder)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from scbd.nn import Representation

# of the last map, a side of which is about this
_SIDE = 8
_WIDTH = 64
# of both hidden layers of features
_HIDDEN = 256


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    log_variance: Tensor

    def sample(self, generator: torch.Generator | None) -> Tensor:
        """One draw, through which gradients flow; the means without a generator."""
        if generator is None:
            return self.mean
        noise = torch.randn(self.mean.shape, generator=generator).to(self.mean)
        return self.mean + noise * (0.5 * self.log_variance).exp()

    def divergence(self, prior: Gaussian) -> Tensor:
        """Kullback-Leibler divergence from the prior, in nats, one a component."""
        error = (self.mean - prior.mean).square() + self.log_variance.exp()
        return 0.5 * (prior.log_variance - self.log_variance + error * (-prior.log_variance).exp() - 1)


def _halvings(image_size: tuple[int, int]) -> int:
    """Three for 64 pixels, two for 32."""
    return int(min(3, max(0, math.log2(min(image_size) / _SIDE))))


def _encoder(input_shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """From inputs to a vector, and how long that is."""
    if len(input_shape) == 1:
        hidden = [nn.Linear(input_shape[0], _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU()]
        return nn.Sequential(*hidden), _HIDDEN
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    # maps are halved last first
    strides = [2 if i >= 3 - halvings else 1 for i in range(3)]
    plan = [(channels, 32, strides[0]), (32, 32, 1), (32, 64, strides[1]), (64, 64, 1), (64, 64, strides[2])]
    layers: list[nn.Module] = []
    for n_in, n_out, stride in plan:
        layers += [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1), nn.GELU()]
    n_features = _WIDTH * math.prod(math.ceil(side / 2**halvings) for side in (height, width))
    return nn.Sequential(*layers, nn.Flatten()), n_features


class Posterior(nn.Module):
    """From inputs to a normal distribution of the embedding, by several experts.

    Parameters
    ----------
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    n_latent
        Dimension of the embedding.
    n_experts
        Heads over one network; each cell is asked of one of them.
    """

    def __init__(self, input_shape: tuple[int, ...], n_latent: int, n_experts: int = 1) -> None:
        super().__init__()
        self.maps, n_features = _encoder(input_shape)
        self.heads = nn.Linear(n_features, n_experts * 2 * n_latent)
        self.n_latent, self.n_experts = n_latent, n_experts

    def forward(self, images: Tensor, experts: Tensor | None = None) -> Gaussian:
        """Mean and log-variance ``(B, D)``, of the experts asked ``(B,)``, or the experts' average."""
        heads = self.heads(self.maps(images)).float().unflatten(1, (self.n_experts, 2, self.n_latent))
        chosen = heads.mean(1) if experts is None else heads[torch.arange(len(heads), device=heads.device), experts]
        return Gaussian(chosen[:, 0], chosen[:, 1])

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_latent

    def represent(self, images: Tensor, representation: Representation) -> Tensor:
        """Mean of the posterior ``(B, D)``: embedding and intermediate representation are one here."""
        return self(images).mean

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Have the mean of every forward pass looked at, until the handle is removed."""
        return self.register_forward_hook(lambda _module, _inputs, posterior: look(posterior.mean))


class LearnedPrior(nn.Module):
    """A normal distribution of its own for every label.

    Parameters
    ----------
    n_labels
        How many.
    n_latent
        Dimension of the embedding.
    learn_variance
        Otherwise it is 1.
    """

    def __init__(self, n_labels: int, n_latent: int, *, learn_variance: bool = True) -> None:
        super().__init__()
        self.mean = nn.Embedding(n_labels, n_latent)
        self.log_variance = nn.Embedding(n_labels, n_latent)
        nn.init.zeros_(self.log_variance.weight)
        self.log_variance.weight.requires_grad_(learn_variance)

    def forward(self, labels: Tensor) -> Gaussian:
        """Of these labels ``(B,)``."""
        return Gaussian(self.mean(labels), self.log_variance(labels))


def _decoder(n_latent: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    """From an embedding to inputs; of images, rounded up to what can be doubled."""
    if len(input_shape) == 1:
        hidden = [nn.Linear(n_latent, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU()]
        return nn.Sequential(*hidden, nn.Linear(_HIDDEN, input_shape[0]))
    channels, height, width = input_shape
    halvings = _halvings((height, width))
    first = tuple(math.ceil(side / 2**halvings) for side in (height, width))
    doubled = [i < halvings for i in range(3)]
    return nn.Sequential(
        nn.Linear(n_latent, _WIDTH * math.prod(first)),
        nn.Unflatten(1, (_WIDTH, *first)),
        nn.GELU(),
        _up(64, 64, doubled[0]),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        _up(64, 32, doubled[1]),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GELU(),
        _up(32, channels, doubled[2]),
    )


class Decoder(nn.Module):
    """From an embedding to the logits or means of inputs, with the likelihood of them.

    Parameters
    ----------
    n_latent
        Dimension of the embedding.
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, ``"gaussian"``, with one learned scale, for any.
    """

    def __init__(self, n_latent: int, input_shape: tuple[int, ...], likelihood: str) -> None:
        super().__init__()
        if likelihood not in ("bernoulli", "gaussian"):
            msg = f"likelihood={likelihood!r} is not known: use 'auto', 'bernoulli' or 'gaussian'."
            raise ValueError(msg)
        self.network = _decoder(n_latent, input_shape)
        self.cut = (..., *(slice(side) for side in input_shape[1:]))
        self.likelihood = likelihood
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=likelihood == "gaussian")

    def forward(self, z: Tensor) -> Tensor:
        """Logits or means ``(B, C, H, W)`` or ``(B, F)`` of embeddings ``(B, D)``."""
        return self.network(z)[self.cut].float()

    def negative_log_likelihood(self, inputs: Tensor, z: Tensor) -> Tensor:
        """Of inputs: nats of each cell ``(B,)``, summed over its values."""
        predicted = self(z)
        if self.likelihood == "bernoulli":
            nats = F.binary_cross_entropy_with_logits(predicted, inputs, reduction="none")
        else:
            error = (inputs - predicted) * (-self.log_scale).exp()
            nats = 0.5 * error.square() + self.log_scale + 0.5 * math.log(2 * math.pi)
        return nats.flatten(1).sum(1)


def _up(n_in: int, n_out: int, doubled: bool) -> nn.Module:
    if doubled:
        return nn.ConvTranspose2d(n_in, n_out, 3, stride=2, padding=1, output_padding=1)
    return nn.Conv2d(n_in, n_out, 3, padding=1)
