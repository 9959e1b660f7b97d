"""What all classifiers share: an encoder, a linear head, and the contract of image models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._checks import check_weight
from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.model import EmbeddingModule, ImageModel, Losses
from scbd.nn import Features, gather

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scbd.nn import FeatureScaling, InputTransform, Norm, Preprocess


class Outputs(NamedTuple):
    """What an objective is made of."""

    features: Tensor
    """What the encoder gives to the head, float32 ``(B, R)``."""
    logits: Tensor
    """Float32 ``(B, n_labels)``."""
    y: Tensor
    """Codes of the label, ``(B,)``."""
    e: Tensor
    """Codes of the environment, ``(B,)``."""

    def by_environment(self) -> Iterator[Outputs]:
        """The cells of each environment that is in the batch."""
        for environment in self.e.unique():
            rows = self.e == environment
            yield Outputs(*(part[rows] for part in self))


class ClassifierModule(EmbeddingModule):
    """An encoder and a linear head, trained by cross-entropy and, in subclasses, a penalty.

    Parameters
    ----------
    preprocess
        What prepares the inputs.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`.
    n_labels, n_environments
        Number of different y and e.
    transform
        What features pass before the encoder.
    norm
        Of an encoder by name, see :func:`scbd.nn.build_encoder`.
    """

    def __init__(
        self,
        preprocess: Preprocess | FeatureScaling,
        *,
        encoder: str | nn.Module,
        n_labels: int,
        n_environments: int,
        transform: InputTransform | None = None,
        norm: Norm = "batch",
    ) -> None:
        super().__init__(preprocess)
        self.content = Features(encoder, preprocess.output_shape, transform, norm=norm)
        self.head = nn.Linear(self.content.n_features, n_labels)
        self.n_environments = n_environments

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Losses of a batch, see :class:`scbd.model.EmbeddingModule`.

        Validation looks at cross-entropy alone: a setting is chosen by how well it predicts.
        """
        features = self.content(self.preprocess(inputs, generator))
        logits = self.head(features).float()
        if not self.training:
            return Losses(F.cross_entropy(logits, y))
        with torch.autocast(features.device.type, enabled=False):
            return self.objective(Outputs(*map(gather, (features.float(), logits, y, e))), ramp)

    def objective(self, batch: Outputs, ramp: float) -> Losses:
        """Of a training batch; here cross-entropy.

        Parameters
        ----------
        batch
            What the network made of it.
        ramp
            Factor of a penalty, below 1 while it warms up.
        """
        return Losses(F.cross_entropy(batch.logits, batch.y))


class PenaltyModule(ClassifierModule):
    """Cross-entropy and a weighted penalty on what differs between environments.

    Parameters
    ----------
    penalty
        Weight.
    **kwargs
        See :class:`ClassifierModule`.

    Raises
    ------
    ValueError
        If the weight is negative, infinite or not a number.
    """

    def __init__(self, *args: Any, penalty: float, **kwargs: Any) -> None:
        check_weight("penalty", penalty, "weighs what is added to cross-entropy")
        super().__init__(*args, **kwargs)
        self.penalty = penalty

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return {"penalty": self.penalty}

    def objective(self, batch: Outputs, ramp: float) -> Losses:
        """Cross-entropy and the penalty."""
        error, penalty = F.cross_entropy(batch.logits, batch.y), self.penalise(batch)
        return Losses(error + ramp * self.penalty * penalty, {"cross_entropy": error, "penalty": penalty})

    def penalise(self, batch: Outputs) -> Tensor:
        """The penalty, a scalar."""
        raise NotImplementedError


class ClassifierModel(ImageModel):
    """Base of the classifiers; a subclass names its module, and what more it takes."""

    module: ClassifierModule
    _module: ClassVar[type[ClassifierModule]] = ClassifierModule
    _fixed_labels: tuple[str, ...] = (Y_REGISTRY,)  # the head's
    _next = "predict(), or get_latent_representation()"

    def _set_up(self, encoder: str | nn.Module, preprocess: dict[str, Any], **objective: Any) -> None:
        """Make the module."""
        encoder = self._encoder(encoder)
        settings = {"whitening": "auto", "whitening_kwargs": None, "norm": "batch"} | preprocess
        whitening, how, norm = (settings.pop(name) for name in ("whitening", "whitening_kwargs", "norm"))
        self.module = self._module(
            self._preprocess(**settings),
            encoder=encoder,
            transform=self._transform(encoder, whitening, settings=how),
            norm=norm,
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **objective,
        )

    @property
    def _own_head(self) -> nn.Linear:  # type: ignore[override]
        return self.module.head
