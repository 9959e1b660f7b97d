"""What a system must bring to be trained, saved and embedded from like any other: read this to add one.

A system is two classes, or three. Its *module*, an :class:`EmbeddingModule`, is the network with its objective. Its
*model*, an :class:`ImageModel`, is what users see: it makes the module in its constructor. A system with training steps
of its own has a *plan* as well, a subclass of :class:`TrainingPlan`. All else (checks, splits, batches, resuming,
embedding, saving) follows.

What a model may say beside: its :class:`Traits`; ``_parts`` and ``_outcome``, for ``print(model)``;
``_before_training`` and ``_after_training``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    from scbd.data._loading import ImageDataModule
    from scbd.model._plan import TrainingPlan
    from scbd.nn._encoders import Representation
    from scbd.nn._inputs import EnvironmentScaling, FeatureScaling, InputTransform, Preprocess

BlockName = Literal["c", "s"]
Alpha = float | Literal["auto"]


# all of it, in nats a standard error: where all that the labels say is learned, and environments change what they mean
_FULL_ALPHA = 0.05
# where they do the same to all labels
_MAIN_EFFECT = 0.005
# where half of it is due: an interaction, as a share of the variance; the environment in z_c, in standard errors of a
# batch
_INTERACTION, _SHOWN = 0.1, 1.0
# batches that are looked back on; for an interaction, which an encoder may soon be rid of
_HORIZON, _A_MOMENT = 50, 10
# a share of the labels below which it is too early to say what new cells take of it
_SOMETHING = 0.02


@dataclass(frozen=True)
class Traits:
    """What a model is beside its module: ``ImageModel.traits``, of which a subclass replaces what differs.

    A constructor may replace ``self.traits`` likewise, where its arguments decide.
    """

    batches: type[ImageDataModule]
    """Which cells meet in a batch."""
    plan: type[TrainingPlan]
    """What a training step is."""
    batch_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the batches."""
    plan_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the plan; a resumed run must share them."""
    fixed_labels: tuple[str, ...] = ()
    """Registries of labels that the network has parameters for: training meets no new ones."""
    side_by_side: bool = False
    """Whether a cell may have several environments, each apart, and numbers: its batches have ``numbers`` then."""
    findings: Mapping[str, type] = field(default_factory=dict)
    """Attributes with what was found of the weights, and what an empty one is made by: others know nothing of them."""
    next_step: str = "get_latent_representation(block='c')"
    """What a trained model is asked."""


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
    """Training cells from which is learned what needs no gradient: scales, and what stands before encoders."""

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
    reference: Reference | None = None
    """What environments are known by, where inputs are standardised within them."""


class Reference(NamedTuple):
    """Cells that environments are known by, such as their controls."""

    batches: Callable[[], Iterable[Tensor]]
    """Reads their inputs as stored, as often as it is called."""
    codes: np.ndarray
    """Their environments, int64 ``(N, K)``: of each column, or of the one that columns were crossed to."""
    used: np.ndarray
    """Whether a column's environments are known by a cell, boolean ``(N, K)``."""
    controls: np.ndarray | None = None
    """Where they are known by all cells: controls, which new environments of other perturbations are known by."""

    def of_cells(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """All but the inputs, as :meth:`scbd.nn.EnvironmentScaling.learn` takes it."""
        controls = None if self.controls is None else torch.from_numpy(self.controls)
        return torch.from_numpy(self.codes), torch.from_numpy(self.used), controls


class Prepared(NamedTuple):
    """Inputs of a batch as networks take them."""

    whole: Tensor
    """Standardised over all cells: what z_s is of, and what a decoder is to make."""
    within: Tensor
    """Standardised within environments, if the model does so: what z_c is of."""


class Network(Protocol):
    """One block: from prepared inputs to an embedding, as :class:`scbd.nn.Encoder` and :class:`scbd.nn.Block` are."""

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
    """What a plan trains: a module, or something around one."""

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
        if sample.reference is not None:
            self.learn_environments(sample.reference)
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
            # each cell once an environment, of which it may have several
            labels = self.environments(sample.e)
            n = labels.shape[1]
            controls = None if sample.controls is None else np.tile(sample.controls, n)
            transforms["s"].fit(np.tile(whole, (n, 1)), labels.T.ravel(), controls)

    def learn_environments(self, reference: Reference) -> None:
        """Learn what inputs are standardised by within environments, of those that are not known yet."""
        environments = self.preprocess.environments
        assert environments is not None
        environments.learn(
            lambda: (self.preprocess.scaled_inputs(batch.to(self.device)) for batch in reference.batches()),
            *reference.of_cells(),
        )

    def prepare(
        self,
        inputs: Tensor,
        e: Tensor | None,
        generator: torch.Generator | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Prepared:
        """Prepare inputs as stored.

        Parameters
        ----------
        inputs
            Of a batch.
        e
            Codes of their environments, int64 ``(B,)``, or of each column, ``(B, K)``; -1, or `None` for all, where
            they are not known: then they are standardised over all cells alone.
        generator
            Source of what is random.
        environments
            Other statistics than those learned from training cells.
        """
        whole = self.preprocess(inputs, generator)
        environments = environments or self.preprocess.environments
        if environments is None or e is None:
            return Prepared(whole, whole)
        return Prepared(whole, self.preprocess.within(whole, inputs, environments, self.columns(e.to(whole.device))))

    def columns(self, e: Tensor) -> Tensor:
        """Codes of the environments in each column, ``(B, K)``, of codes of their cross, ``(B,)``."""
        return e[:, None] if e.ndim == 1 else e

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Codes of the environments that z_s tells apart, ``(N, C)``, of the codes ``e (N,)`` of their cross."""
        return e[:, None]

    def _transforms(self) -> dict[BlockName, InputTransform]:
        blocks: dict[BlockName, Any] = {"c": self.content, "s": self.style}
        found = {name: block.transform for name, block in blocks.items() if isinstance(block, Encoder)}
        return {name: transform for name, transform in found.items() if transform is not None}

    def width(self, block: BlockName, representation: Representation) -> int:
        """Dimension of what :meth:`embed` returns."""
        return self.network(block).width(representation)

    def embed(
        self,
        inputs: Tensor,
        block: BlockName,
        representation: Representation,
        e: Tensor | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Tensor:
        """Embed inputs as stored: ``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``; see :meth:`prepare`."""
        prepared = self.prepare(inputs, e, environments=environments)
        return self.network(block).represent(prepared.within if block == "c" else prepared.whole, representation)

    def network(self, block: BlockName) -> Network:
        """That of a block which the module has."""
        return self.content if block == "c" else self.style

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Make what is saved but not made by the constructor (part of scvi-tools' loading contract)."""


class AutoAlpha(nn.Module):
    r"""Alpha that follows what z_c has learned, and what environments do to it.

    Environments mislead where they *interact* with labels (a shade is a high digit in one colour, and a low one in the
    other): all of the dose is due. Environments that shift all cells alike mislead nobody: a small dose mixes them.

    .. math:: \alpha = w \cdot 0.05\, q + (1 - w)\, \frac{t^2}{t^2 + 1} \min(0.05\, q,\; 0.005),
              \qquad w = \frac{b^4}{b^4 + 0.1^4}.

    - :math:`q` is the share of what the labels say that z_c carries, from 0 for a point to 1:
      alpha warms up with learning, and falls where it is too much. It is that of
      training batches, times the ratio of validation cells to training cells that are drawn alike
      (:meth:`scbd.data.ImageDataModule.matched_dataloader`), 1 at most: what is learned by heart does not count.
    - :math:`b` is the interaction as a share of the variance, at the stage that has most of it:
      the most that ten batches have shown.
    - :math:`t` is by how many standard errors a batch shows the environment in z_c.

    :math:`q` and :math:`t` are averages over the last fifty training batches or so. The state is in buffers: it is
    saved with the weights, and whatever run goes on with those goes on with it.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small", alpha="auto")
    >>> float(model.module.current_alpha)  # nothing has been learned yet
    0.0
    """

    learned: Tensor
    kept: Tensor
    interaction: Tensor
    most_interaction: Tensor
    environment: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("learned", "interaction", "most_interaction", "environment"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("kept", torch.ones(()))

    @property
    def alpha(self) -> Tensor:
        """As of now, a scalar."""
        misled = self.most_interaction**4 / (self.most_interaction**4 + _INTERACTION**4)
        shown = self.environment.clamp(min=0) ** 2
        full = _FULL_ALPHA * self.learned * self.kept
        return misled * full + (1 - misled) * full.clamp(max=_MAIN_EFFECT) * shown / (shown + _SHOWN**2)

    @torch.no_grad()
    def observe(self, learned: Tensor, interaction: Tensor, environment: Tensor) -> None:
        """Look at what a training batch says was learned, and of what environments do, scalars."""
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _HORIZON)
        self.interaction.lerp_(interaction.to(self.learned), 1 / _A_MOMENT)
        self.most_interaction.copy_(torch.maximum(self.most_interaction, self.interaction))
        self.environment.lerp_(environment.to(self.learned), 1 / _HORIZON)

    @torch.no_grad()
    def validate(self, new: Tensor, known: Tensor) -> None:
        """Look at what batches of validation cells and of training cells say, drawn alike, one number each.

        A batch of 0 is one whose labels say nothing.
        """
        of_new, of_known = (shares[shares != 0].to(self.learned) for shares in (new, known))
        if len(of_new) and len(of_known) and of_known.mean() > _SOMETHING:
            self.kept.copy_((of_new.mean() / of_known.mean()).clamp(0, 1))
