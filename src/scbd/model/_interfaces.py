"""Interfaces that a new method implements in order to be trained, saved and used like the models of this package.

A method consists of two or three classes:

- Its *module*, an :class:`EmbeddingModule`, is the network with its objective.
- Its *model*, an :class:`ImageModel`, is the class that users work with. Its constructor creates the module.
- Its *plan*, a subclass of :class:`TrainingPlan`, is needed only if the training steps differ from the standard ones.

The base classes provide all else: checks, splits, batches, resuming, embedding and saving.

A model may also define its :class:`ModelTraits`; the methods ``_summary_lines`` and ``_result_lines``, which
``print(model)`` uses; and the methods ``_before_training`` and ``_after_training``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scbd.model._auto_alpha import AutoAlpha
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    from scbd.data._loading import ImageDataModule
    from scbd.model._plan import TrainingPlan
    from scbd.nn._encoders import Representation
    from scbd.nn._environment_scaling import EnvironmentScaling
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess
    from scbd.nn._input_transform import InputTransform

BlockName = Literal["c", "s"]
Alpha = float | Literal["auto"]


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model class beyond its module, stored in ``ImageModel.traits``.

    A subclass replaces the properties that differ. A constructor may replace ``self.traits`` if they depend on its
    arguments.
    """

    batches: type[ImageDataModule]
    """Class of the data module, which decides which cells form a batch."""
    plan: type[TrainingPlan]
    """Class of the training plan, which defines a training step."""
    batch_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the data module."""
    plan_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the training plan; a resumed run must use the same ones."""
    fixed_labels: tuple[str, ...] = ()
    """Registry keys of labels for which the network has parameters, so that it cannot be trained on new labels."""
    side_by_side: bool = False
    """True if the model can treat several environment columns separately, and continuous covariates.

    Continuous covariates are the entry ``numbers`` of a batch.
    """
    derived_attributes: Mapping[str, type] = field(default_factory=dict)
    """Attributes derived from the weights, each with the type of its empty value.

    They are reset to the empty value when the weights change.
    """
    next_step: str = "get_latent_representation(block='c')"
    """Call that ``print(model)`` suggests once the model is trained."""


class Losses(NamedTuple):
    """Losses of a batch, as an objective returns them.

    Examples
    --------
    >>> error, penalty = torch.tensor(2.0), torch.tensor(0.5)
    >>> losses = scbd.model.Losses(error + penalty, {"penalty": penalty})  # logged as train_loss and train_penalty
    >>> losses.loss
    tensor(2.5000)
    """

    loss: Tensor
    """Loss to minimise, a scalar with gradient."""
    parts: Mapping[str, Tensor] = MappingProxyType({})
    """Further scalars to log, by name. ``alpha="auto"`` follows the part named ``learned_c``."""
    z_c: Tensor | None = None
    """Embeddings of the batch ``(B, D)``, without gradient, for objectives that can collapse.

    The training plan logs the total variance and the effective rank of these embeddings.
    """


class TrainingSample(NamedTuple):
    """Training cells to which input scales and input transforms are fitted, without gradients."""

    batches: Callable[[], Iterable[Tensor]]
    """Function that reads the inputs of the cells as stored; it can be called repeatedly."""
    y: np.ndarray
    """Codes of the perturbations, integer ``(N,)``."""
    e: np.ndarray
    """Codes of the environments, integer ``(N,)``."""
    controls: np.ndarray | None = None
    """Mask of the controls, boolean ``(N,)``; `None` if controls were not named."""
    positions: np.ndarray | None = None
    """Codes of the positions on the plate, integer ``(N,)``; `None` if positions were not named."""
    reference: ReferenceBatches | None = None
    """Reference cells of the environments, if inputs are standardised per environment."""


class ReferenceBatches(NamedTuple):
    """Reference cells, such as controls, from which mean and deviation of each environment are estimated."""

    batches: Callable[[], Iterable[Tensor]]
    """Function that reads the inputs of the cells as stored; it can be called repeatedly."""
    codes: np.ndarray
    """Codes of the cells' environments, int64 ``(N, K)``, for each of K columns of environments.

    Crossed columns count as one.
    """
    used: np.ndarray
    """Mask of the cells that are reference cells of their environment in a column, boolean ``(N, K)``."""
    controls: np.ndarray | None = None
    """Mask of the controls that are reference cells of environments without other reference cells, boolean ``(N, K)``.

    Used if environments are standardised by all of their cells. An environment whose perturbations differ from those of
    the other environments is then standardised by its controls.
    """

    def as_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``codes``, ``used`` and ``controls`` as tensors, for :meth:`scbd.nn.EnvironmentScaling.learn`."""
        controls = None if self.controls is None else torch.from_numpy(self.controls)
        return torch.from_numpy(self.codes), torch.from_numpy(self.used), controls


class PreparedInputs(NamedTuple):
    """Inputs of a batch, prepared for the networks."""

    whole: Tensor
    """Inputs standardised over all cells, from which z_s is computed, and which a decoder reconstructs."""
    within: Tensor
    """Inputs from which z_c is computed: standardised per environment if the model does so, else equal to ``whole``."""


class EmbeddingNetwork(Protocol):
    """Network that maps prepared inputs to an embedding: :class:`scbd.nn.Encoder` or :class:`scbd.nn.Block`."""

    training: bool

    def width(self, representation: Representation) -> int:
        """Return the dimension of a representation, D or R."""
        ...

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Return the embedding ``(B, D)``, or the intermediate representation r ``(B, R)`` before the projection."""
        ...

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``look`` with the intermediate representation of every forward pass, until the handle is removed."""
        ...


class Objective(nn.Module, ABC):
    """Objective that a training plan minimises: a module, or a wrapper of one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the parameters."""

    @abstractmethod
    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Compute the losses of a batch: for training, or in evaluation mode for validation.

        Parameters
        ----------
        inputs
            Inputs as stored: images ``(B, C, H, W)`` or features ``(B, F)``.
        y, e
            Codes of perturbation and environment, int64 ``(B,)``.
        ramp
            Factor of the terms that oppose the main loss, such as the invariance loss. It is below 1 during warm-up.
        generator
            Random number generator of a training step, for example for augmentation. Without one, the computation is
            deterministic.
        """

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share, as plain values."""
        return {}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha during training; `None` if alpha is constant."""
        return None


class EmbeddingModule(Objective):
    """Network of a method with its objective: one or two embedding networks, and the preparation of their inputs.

    The constructor of a subclass creates :attr:`content`, and optionally :attr:`style`. The subclass implements
    :meth:`forward`, which computes the loss.

    Parameters
    ----------
    preprocess
        Preparation of the inputs: maps inputs as stored to inputs of the networks, on the device. It is saved with the
        model.

    Attributes
    ----------
    content
        Network that computes z_c.
    style
        Network that computes z_s; `None` for methods with a single embedding.

    Examples
    --------
    A network that only learns whether a cell is a control:

    >>> class ControlModule(scbd.model.EmbeddingModule):
    ...     def __init__(self, preprocess, encoder, control):
    ...         super().__init__(preprocess)
    ...         self.content = scbd.nn.Encoder(encoder, self.preprocess.output_shape)
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

    The example of :class:`ImageModel` shows a model that creates such a module.
    """

    content: Any
    style: Any

    def __init__(self, preprocess: Preprocess | FeatureScaling) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.style = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.preprocess.mean.device

    @property
    def is_fitted(self) -> bool:
        """True if :meth:`fit` has been called, or there is nothing to fit."""
        return all(bool(part.fitted) for part in (self.preprocess, *self._transforms().values()))

    def fit(self, sample: TrainingSample) -> None:
        """Fit the input scales and, for features, the linear transforms before the encoders.

        These parts need no gradient. The transform before the encoder of z_c is fitted with the perturbation labels,
        and the transform before the encoder of z_s with the environment labels.

        Parameters
        ----------
        sample
            Training cells to fit to.

        Raises
        ------
        ValueError
            If the transforms cannot be fitted to these cells, see :class:`scbd.nn.InputTransform`.
        """
        self.preprocess.fit(sample.batches(), sample.controls)
        if sample.reference is not None:
            self.estimate_environment_statistics(sample.reference)
        transforms = self._transforms()
        if not transforms:
            return
        codes, start, parts = torch.from_numpy(sample.e), 0, []
        for batch in sample.batches():
            part = slice(start, start := start + len(batch))
            parts.append([values.cpu().numpy() for values in self.prepare(batch.to(self.device), codes[part])])
        whole, within = map(np.concatenate, zip(*parts, strict=True))
        if "c" in transforms:
            transforms["c"].fit(within, sample.y, sample.controls, sample.positions)
        if "s" in transforms:
            # a cell that has several environments is repeated once per environment
            labels = self.environments(sample.e)
            n = labels.shape[1]
            controls = None if sample.controls is None else np.tile(sample.controls, n)
            transforms["s"].fit(np.tile(whole, (n, 1)), labels.T.ravel(), controls)

    def estimate_environment_statistics(self, reference: ReferenceBatches) -> None:
        """Estimate mean and deviation of the inputs of each environment, except those estimated before."""
        environments = self.preprocess.environments
        assert environments is not None
        environments.learn(
            lambda: (self.preprocess.scaled_inputs(batch.to(self.device)) for batch in reference.batches()),
            *reference.as_tensors(),
        )

    def prepare(
        self,
        inputs: Tensor,
        e: Tensor | None,
        generator: torch.Generator | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> PreparedInputs:
        """Prepare inputs as stored for the networks.

        Parameters
        ----------
        inputs
            Inputs of a batch, as stored.
        e
            Codes of the environments, int64 ``(B,)``; or of each of K columns, int64 ``(B, K)``. Cells with code -1, or
            all cells if `None`, have no known environment, and are standardised over all cells only.
        generator
            Random number generator of the augmentation.
        environments
            Statistics of environments to use in place of those estimated from training cells.
        """
        whole = self.preprocess(inputs, generator)
        environments = environments or self.preprocess.environments
        if environments is None or e is None:
            return PreparedInputs(whole, whole)
        return PreparedInputs(
            whole, self.preprocess.within(whole, inputs, environments, self.columns(e.to(whole.device)))
        )

    def columns(self, e: Tensor) -> Tensor:
        """Return the codes of the environments in each column, ``(B, K)``.

        Parameters
        ----------
        e
            Codes of the environments, or of the cross of several columns, ``(B,)``; codes ``(B, K)`` are returned
            unmodified.
        """
        return e[:, None] if e.ndim == 1 else e

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Return the codes of the environments that z_s distinguishes, ``(N, C)``.

        Parameters
        ----------
        e
            Codes of the environments, or of the cross of several columns, ``(N,)``.
        """
        return e[:, None]

    def _transforms(self) -> dict[BlockName, InputTransform]:
        blocks: dict[BlockName, Any] = {"c": self.content, "s": self.style}
        found = {name: block.transform for name, block in blocks.items() if isinstance(block, Encoder)}
        return {name: transform for name, transform in found.items() if transform is not None}

    def width(self, block: BlockName, representation: Representation) -> int:
        """Return the dimension of a representation of a block."""
        return self.network(block).width(representation)

    def embed(
        self,
        inputs: Tensor,
        block: BlockName,
        representation: Representation,
        e: Tensor | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Tensor:
        """Embed inputs as stored: return ``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``.

        Parameters
        ----------
        inputs, e, environments
            See :meth:`prepare`.
        block
            ``"c"`` for z_c, or ``"s"`` for z_s.
        representation
            ``"embedding"`` for z, or ``"intermediate"`` for r.
        """
        prepared = self.prepare(inputs, e, environments=environments)
        return self.network(block).represent(prepared.within if block == "c" else prepared.whole, representation)

    def network(self, block: BlockName) -> EmbeddingNetwork:
        """Return the network of a block."""
        return self.content if block == "c" else self.style

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Create parts that are saved but not created by the constructor (scvi-tools calls this method on loading)."""
