"""Base classes for a new method, so that it is trained, saved and used like the models of this package.

A method consists of two or three classes:

- The *module*, an :class:`EmbeddingModule`, is the neural network with the loss that it minimises.
- The *model*, an :class:`ImageModel`, is the class that users work with. Its constructor creates the module.
- The *plan*, a subclass of :class:`TrainingPlan`, is needed only if a training step of the method differs from the
  standard step.

The base classes provide checks, splits, batches, training, resuming, embedding and saving.

A model may also define its :class:`ModelTraits`, the methods ``_summary_lines`` and ``_result_lines`` that supply the
text of ``print(model)``, and the methods ``_before_training`` and ``_after_training``.
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
    from scbd.model._environment_alignment import ResidualOffsets
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
    """Properties of a model class that determine how its models are trained, stored in ``ImageModel.traits``.

    A subclass of :class:`ImageModel` replaces the properties that differ from the defaults. If properties depend on the
    arguments of the constructor, the constructor replaces ``self.traits``.
    """

    batches: type[ImageDataModule]
    """Class of the Lightning data module, which determines the cells of each batch."""
    plan: type[TrainingPlan]
    """Class of the training plan (Lightning module), which defines a training step."""
    batch_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the constructor of the data module, in addition to those of every model."""
    plan_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the constructor of the training plan, in addition to those of every model.

    A run that is resumed must have the values of the interrupted run.
    """
    fixed_labels: tuple[str, ...] = ()
    """Registry keys of the labels, perturbation or environment, for which the network has parameters per label.

    Such a network cannot be trained on labels that were not registered when the model was created.
    """
    side_by_side: bool = False
    """True if the model supports several separate environment columns."""
    next_step: str = "get_latent_representation(block='c')"
    """Method call that ``print(model)`` suggests to the user as the next step after training."""


class Losses(NamedTuple):
    """Losses of a batch, as ``forward`` of an :class:`Objective` returns them.

    Examples
    --------
    >>> error, penalty = torch.tensor(2.0), torch.tensor(0.5)
    >>> losses = scbd.model.Losses(error + penalty, {"penalty": penalty})  # logged as train_loss and train_penalty
    >>> losses.loss
    tensor(2.5000)
    """

    loss: Tensor
    """Total loss of the batch, which training minimises; a scalar with gradient."""
    parts: Mapping[str, Tensor] = MappingProxyType({})
    """Further scalars to log, by name, such as the terms of the loss.

    ``alpha="auto"`` requires the scalar ``learned_c``, the normalised supervised information of z_c.
    """
    z_c: Tensor | None = None
    """Embeddings z_c of the batch, ``(B, D)``, without gradient; only for objectives with which z_c can collapse.

    The training plan logs the total variance and the effective rank of these embeddings, which show a collapse.
    """


@dataclass
class TrainingResults:
    """Quantities that are computed from the weights of a model after a training run; empty before training.

    A new run replaces them, since they do not apply to other weights.
    """

    centers: dict[BlockName, np.ndarray] = field(default_factory=dict)
    """Mean embedding of the controls among the training cells, ``(D,)``, by block: ``"c"`` for z_c, ``"s"`` for z_s."""
    offsets: ResidualOffsets | None = None
    """Residual offset of each environment in z_c; `None` if inputs are not standardised per environment."""
    diagnostics: Any = None
    """Diagnostics of the embeddings, such as :attr:`scbd.SCBDModel.health`; `None` if there are none."""


class TrainingSample(NamedTuple):
    """Sample of the training cells, to which the scaling and the linear transforms of inputs are fitted.

    The fit precedes training and does not use gradients.
    """

    batches: Callable[[], Iterable[Tensor]]
    """Function that returns an iterator over batches of the raw inputs of the N cells; it can be called repeatedly."""
    y: np.ndarray
    """Integer code of the perturbation of each cell in the sample, ``(N,)``."""
    e: np.ndarray
    """Integer code of the environment of each cell in the sample, ``(N,)``."""
    controls: np.ndarray | None = None
    """Mask of the controls in the sample, boolean ``(N,)``; `None` if no controls were named in ``setup_anndata``."""
    positions: np.ndarray | None = None
    """Integer code of each cell's position on the plate, ``(N,)``; `None` without ``position_key``."""
    reference: ReferenceBatches | None = None
    """Cells from which the mean and standard deviation of each environment are estimated.

    `None` if inputs are not standardised per environment.
    """


class ReferenceBatches(NamedTuple):
    """Reference cells: the cells, such as controls, from which mean and deviation of each environment are estimated."""

    batches: Callable[[], Iterable[Tensor]]
    """Function that returns an iterator over batches of the raw inputs of the N cells; it can be called repeatedly."""
    codes: np.ndarray
    """Integer codes of each cell's environment in each of K environment columns, int64 ``(N, K)``.

    If environments are combinations of several columns, these columns count as one.
    """
    used: np.ndarray
    """Mask of the cells that are reference cells of their environment in each column, boolean ``(N, K)``."""
    controls: np.ndarray | None = None
    """Mask of the controls that serve as reference cells where ``used`` marks no cell, boolean ``(N, K)``.

    If the model standardises environments with all of their cells, an environment whose perturbations differ from those
    of the other environments has no cells in ``used``, and is standardised with its controls.
    """

    def as_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Convert the arrays ``codes``, ``used`` and ``controls`` to tensors.

        They are the arguments of :meth:`scbd.nn.EnvironmentScaling.learn`.
        """
        controls = None if self.controls is None else torch.from_numpy(self.controls)
        return torch.from_numpy(self.codes), torch.from_numpy(self.used), controls


class PreparedInputs(NamedTuple):
    """Inputs of a batch after scaling and standardisation, ready for the networks of z_c and z_s."""

    whole: Tensor
    """Inputs standardised over the cells of all environments together.

    z_s is computed from these inputs, and a decoder reconstructs them.
    """
    within: Tensor
    """Inputs from which z_c is computed: standardised within each environment.

    If the model does not standardise per environment, they are equal to ``whole``.
    """


class EmbeddingNetwork(Protocol):
    """Network that computes one embedding (z_c or z_s) from scaled inputs.

    The classes :class:`scbd.nn.Encoder` and :class:`scbd.nn.Block` have this interface.
    """

    training: bool

    def width(self, representation: Representation) -> int:
        """Return the number of dimensions of the embedding, D, or of the intermediate representation r, R."""
        ...

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Compute the embedding ``(B, D)`` of a batch, or the intermediate representation r ``(B, R)``.

        The embedding is a projection of r.
        """
        ...

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a function ``look``, which every forward pass then calls with the intermediate representation r.

        The calls end when the returned handle is removed.
        """
        ...


class Objective(nn.Module, ABC):
    """Torch module that computes the loss minimised in training: the module of a model, or a wrapper around it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Torch device of the parameters."""

    @abstractmethod
    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Compute the losses of a batch of cells.

        Training calls this method in training mode, and validation calls it in evaluation mode.

        Parameters
        ----------
        inputs
            Raw inputs, as stored in the table of cells: images ``(B, C, H, W)`` or features ``(B, F)``.
        y, e
            Codes of perturbation and environment, int64 ``(B,)``.
        ramp
            Factor from 0 to 1 of the terms that oppose the main loss, such as the invariance loss. It is below 1 while
            these terms warm up at the beginning of training.
        generator
            Random number generator of the training step, for example for augmentation. With `None`, the computation is
            deterministic.
        """

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values, by name, that must be equal when an interrupted run is resumed."""
        return {}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha, the weight of the invariance loss, during training; `None` if alpha is constant."""
        return None


class EmbeddingModule(Objective):
    """Module of a method: preprocessing of the inputs, networks that compute the embeddings, and the loss.

    The constructor of a subclass creates :attr:`content`, the network of z_c, and optionally :attr:`style`, the network
    of z_s. The subclass implements :meth:`forward`, which computes the loss.

    Parameters
    ----------
    preprocess
        Module that converts raw inputs to the scaled inputs of the networks, on the device. It is saved with the model.

    Attributes
    ----------
    content
        Network that computes z_c.
    style
        Network that computes z_s; `None` for methods with a single embedding.

    Examples
    --------
    A module that learns to predict whether a cell is a control:

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
        """Torch device of the parameters."""
        return self.preprocess.mean.device

    @property
    def is_fitted(self) -> bool:
        """True if the scaling and the linear transforms of inputs have been fitted with :meth:`fit`.

        Also true if the module has no parts that need to be fitted.
        """
        return all(bool(part.fitted) for part in (self.preprocess, *self._transforms().values()))

    def fit(self, sample: TrainingSample) -> None:
        """Fit the scaling of inputs and, for features, the linear transforms before the encoders.

        The fit does not use gradients. The transform before the encoder of z_c is fitted with the perturbation labels,
        and the transform before the encoder of z_s with the environment labels.

        Parameters
        ----------
        sample
            Sample of the training cells.

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
            # A cell with several environments, such as plate and position, is repeated once per environment. The labels
            # of the cells are then these environments, one per repetition.
            labels = self.environments(sample.e)
            n = labels.shape[1]
            controls = None if sample.controls is None else np.tile(sample.controls, n)
            transforms["s"].fit(np.tile(whole, (n, 1)), labels.T.ravel(), controls)

    def estimate_environment_statistics(
        self, reference: ReferenceBatches, environments: EnvironmentScaling | None = None
    ) -> None:
        """Estimate the mean and the standard deviation of inputs in each environment from its reference cells.

        Environments that were estimated before keep their mean and standard deviation.

        Parameters
        ----------
        reference
            Reference cells of the environments, with their raw inputs.
        environments
            Module that stores the mean and the standard deviation of each environment; by default the one of the
            preprocessing.
        """
        environments = environments or self.preprocess.environments
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
        """Convert raw inputs of a batch to the scaled inputs of the networks.

        Parameters
        ----------
        inputs
            Raw inputs of a batch: images ``(B, C, H, W)`` or features ``(B, F)``.
        e
            Codes of the cells' environments, int64 ``(B,)``, or their codes in each of K environment columns, int64
            ``(B, K)``. A cell with code -1 has no known environment, so that its inputs are standardised only over the
            cells of all environments. With `None`, this applies to all cells.
        generator
            Random number generator of the augmentation.
        environments
            Mean and standard deviation of each environment, to use in place of those estimated from training cells.
        """
        whole = self.preprocess(inputs, generator)
        environments = environments or self.preprocess.environments
        if environments is None or e is None:
            return PreparedInputs(whole, whole)
        return PreparedInputs(
            whole, self.preprocess.within(whole, inputs, environments, self.columns(e.to(whole.device)))
        )

    def columns(self, e: Tensor) -> Tensor:
        """Return the codes of each cell's environments by environment column, ``(B, K)``.

        These are the environments with which inputs are standardised.

        Parameters
        ----------
        e
            Codes of the cells' environments, or of combinations of the values of several environment columns, ``(B,)``.
            Codes by column, ``(B, K)``, are returned unmodified.
        """
        return e[:, None] if e.ndim == 1 else e

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Return the codes of the environments that z_s should distinguish, ``(N, C)`` for C environments per cell.

        Environments of different columns have different codes.

        Parameters
        ----------
        e
            Codes of the cells' environments, or of combinations of the values of several environment columns, ``(N,)``.
        """
        codes = self.columns(torch.from_numpy(e)).numpy()
        numbered: np.ndarray = codes * codes.shape[1] + np.arange(codes.shape[1])
        return numbered

    def _transforms(self) -> dict[BlockName, InputTransform]:
        blocks: dict[BlockName, Any] = {"c": self.content, "s": self.style}
        return {
            name: block.transform
            for name, block in blocks.items()
            if isinstance(block, Encoder) and block.transform is not None
        }

    def width(self, block: BlockName, representation: Representation) -> int:
        """Return the number of dimensions of z or r of a block.

        Parameters
        ----------
        block
            ``"c"`` for z_c and r_c, or ``"s"`` for z_s and r_s.
        representation
            ``"embedding"`` for z, or ``"intermediate"`` for r, the output of the encoder before the projection.
        """
        return self.network(block).width(representation)

    def embed(
        self,
        inputs: Tensor,
        block: BlockName,
        representation: Representation,
        e: Tensor | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Tensor:
        """Compute the embedding z, ``(B, D)``, or the intermediate representation r, ``(B, R)``, from raw inputs.

        Parameters
        ----------
        inputs, e, environments
            See :meth:`prepare`.
        block
            ``"c"`` for z_c or r_c, which carry the perturbation; ``"s"`` for z_s or r_s, which carry the environment.
        representation
            ``"embedding"`` for z, or ``"intermediate"`` for r, the output of the encoder before the projection.
        """
        prepared = self.prepare(inputs, e, environments=environments)
        return self.network(block).represent(prepared.within if block == "c" else prepared.whole, representation)

    def network(self, block: BlockName) -> EmbeddingNetwork:
        """Return the network that computes z_c (block ``"c"``) or z_s (block ``"s"``)."""
        return self.content if block == "c" else self.style

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Create submodules that a saved model has but that the constructor does not create.

        scvi-tools calls this method when it loads a model, before it loads the weights.
        """
