"""What a system must bring to be trained, saved and embedded from like any other: read this to add one.

A system is two classes, or three. Its *module*, an :class:`EmbeddingModule`, is the network with its objective. Its
*model*, an :class:`ImageModel`, is what users see: it makes the module in its constructor, and brings arguments and
documentation. A system with steps of its own has a *plan* as well, a subclass of :class:`TrainingPlan` that the model
names. Their examples are among the shortest there can be.

All else (checks, splits, batches, resuming, embedding, saving) follows. What a model may say beside:

- ``_batches``, which cells meet in a batch, and ``_plan``, with ``_data_settings`` and ``_plan_settings`` for the
  arguments of these;
- ``_fixed_labels``, the labels that its network has parameters for;
- ``_side_by_side``, that it takes several environments of a cell apart, and numbers: its batches may have ``numbers``,
  integer ``(B, K)``, the places in the order of what ``continuous_covariate_keys`` name;
- ``_parts`` and ``_outcome``, for ``print(model)``; ``_before_training`` and ``_after_training``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scbd.nn import Features

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    from scbd.model._alpha import AutoAlpha
    from scbd.nn import FeatureScaling, InputTransform, Preprocess, Representation

BlockName = Literal["c", "s"]


class Losses(NamedTuple):
    """What an objective makes of a batch.

    Examples
    --------
    >>> error, penalty = torch.tensor(2.0), torch.tensor(0.5)
    >>> losses = scbd.model.Losses(error + penalty, {"penalty": penalty})  # logged as train_loss and train_penalty
    >>> losses.loss
    tensor(2.5000)
    """

    loss: Tensor
    """To descend, a scalar with gradient."""
    parts: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars to log beside it, by name; ``learned_c``, if there, is what ``alpha="auto"`` follows."""
    z_c: Tensor | None = None
    """Embeddings of the batch ``(B, D)`` without gradient, of objectives that can collapse: their health is logged."""


class Sample(NamedTuple):
    """Training cells from which is learned what needs no gradient: scales, and what stands before encoders.

    Examples
    --------
    >>> images = torch.from_numpy(adata.obsm["single_cell_images"])
    >>> y, e = (adata.obs[key].cat.codes.to_numpy() for key in ("gene", "well"))
    >>> preprocess = scbd.nn.Preprocess((4, 32, 32), "uint8")
    >>> preprocess.fit(scbd.model.Sample(lambda: [images], y, e).batches())
    """

    batches: Callable[[], Iterable[Tensor]]
    """Reads their inputs as stored, as often as it is called."""
    y: np.ndarray
    """Codes of the perturbation, ``(N,)``."""
    e: np.ndarray
    """Of the environment."""
    controls: np.ndarray | None = None
    """Which of them are controls, boolean ``(N,)``, where that was said."""
    positions: np.ndarray | None = None
    """Codes of the position on the plate, ``(N,)``, likewise."""


class Network(Protocol):
    """One block: from prepared inputs to an embedding, as :class:`scbd.nn.Features` and :class:`scbd.nn.Block` are."""

    training: bool

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        ...

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Embedding ``(B, D)``, or what it is computed from ``(B, R)``."""
        ...

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Have the intermediate representation of every forward pass looked at, until the handle is removed."""
        ...


class Objective(nn.Module, ABC):
    """What a plan trains: a module, or something around one.

    Examples
    --------
    >>> isinstance(model.module, scbd.model.Objective)
    True
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are."""

    @abstractmethod
    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Losses of a batch; in evaluation mode, those that validation looks at.

        Parameters
        ----------
        inputs
            As stored: images ``(B, C, H, W)`` or vectors ``(B, F)``.
        y, e
            Codes of perturbation and environment, int64 ``(B,)``.
        ramp
            Factor of what pulls against the main loss, below 1 while it warms up.
        generator
            Source of what is random in a training step; without one, nothing is.
        """

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values that a resumed run must share."""
        return {}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """What sets alpha while it trains, where something does."""
        return None


class EmbeddingModule(Objective):
    """The network of a system with its objective: blocks that embed, and the preparation of their inputs.

    A subclass makes :attr:`content`, and maybe :attr:`style`, in its constructor, and says in :meth:`forward` what is
    learned.

    Parameters
    ----------
    preprocess
        From inputs as stored to what the networks take; on the device, and saved with the model.

    Attributes
    ----------
    content
        The network of z_c.
    style
        That of z_s; `None` for systems with a single block.

    Examples
    --------
    A network that learns whether a cell is a control, and nothing else:

    >>> class ControlModule(scbd.model.EmbeddingModule):
    ...     def __init__(self, preprocess, encoder, control):
    ...         super().__init__(preprocess)
    ...         self.content = scbd.nn.Features(encoder, self.preprocess.output_shape)
    ...         self.head = torch.nn.Linear(self.content.n_features, 1)
    ...         self.control = control
    ...
    ...     def forward(self, inputs, y, e, *, ramp=1.0, generator=None):
    ...         logits = self.head(self.content(self.preprocess(inputs, generator)))[:, 0].float()
    ...         is_control = (y == self.control).float()
    ...         loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, is_control)
    ...         return scbd.model.Losses(loss)
    >>> module = ControlModule(scbd.nn.Preprocess((4, 32, 32), "uint8"), "small", control=0)
    >>> module.embed(torch.zeros(2, 4, 32, 32, dtype=torch.uint8), "c", "embedding").shape
    torch.Size([2, 256])

    The model that makes it is the example of :class:`ImageModel`.
    """

    content: Any
    style: Any

    def __init__(self, preprocess: Preprocess | FeatureScaling) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.style = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.preprocess.mean.device

    @property
    def is_fitted(self) -> bool:
        """Whether :meth:`fit` has been called, or has nothing to do."""
        return all(bool(part.fitted) for part in (self.preprocess, *self._transforms().values()))

    def fit(self, sample: Sample) -> None:
        """Learn from training cells what needs no gradient: scales, and what stands before the encoders of features.

        What stands before that of z_c is learned from perturbations, before that of z_s from environments.

        Raises
        ------
        ValueError
            If the cells do not allow for it, see :class:`scbd.nn.InputTransform`.
        """
        self.preprocess.fit(sample.batches(), sample.controls)
        transforms = self._transforms()
        if not transforms:
            return
        features = np.concatenate([self.preprocess(batch.to(self.device)).cpu().numpy() for batch in sample.batches()])
        if "c" in transforms:
            transforms["c"].fit(features, sample.y, sample.controls, sample.positions)
        if "s" in transforms:
            # each cell once an environment, of which it may have several
            labels = self.environments(sample.e)
            n = labels.shape[1]
            controls = None if sample.controls is None else np.tile(sample.controls, n)
            transforms["s"].fit(np.tile(features, (n, 1)), labels.T.ravel(), controls)

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Codes of the environments that z_s tells apart, ``(N, C)``, of the codes ``e (N,)`` of their cross."""
        return e[:, None]

    def _transforms(self) -> dict[BlockName, InputTransform]:
        blocks: dict[BlockName, Any] = {"c": self.content, "s": self.style}
        found = {name: block.transform for name, block in blocks.items() if isinstance(block, Features)}
        return {name: transform for name, transform in found.items() if transform is not None}

    def width(self, block: BlockName, representation: Representation) -> int:
        """Dimension of what :meth:`embed` returns."""
        return self.network(block).width(representation)

    def embed(self, inputs: Tensor, block: BlockName, representation: Representation) -> Tensor:
        """Embed inputs as stored: ``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        return self.network(block).represent(self.preprocess(inputs), representation)

    def network(self, block: BlockName) -> Network:
        """That of a block which the module has."""
        return self.content if block == "c" else self.style

    def networks(self) -> Iterable[nn.Module]:
        """Those that are worth compiling."""
        return [network for network in (self.content, self.style) if network is not None]

    def compile_blocks(self) -> None:
        """Let :func:`torch.compile` have the networks, in place: parameters and their names stay."""
        for network in self.networks():
            network.compile()

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Make what is saved but not made by the constructor (part of scvi-tools' loading contract)."""
