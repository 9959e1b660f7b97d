"""Classifiers of the perturbation: ERM, and methods that penalise differences between environments.

All have one encoder and one linear classification head. Each method adds its own terms to the cross-entropy, in a
module class of its own.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_count, check_number
from scbd._shared.keys import E_REGISTRY, Y_REGISTRY
from scbd.baselines._batches import (
    EnvironmentBalancedBatches,
    ShuffledBatches,
    SingleEnvironmentBatches,
    SingleEnvironmentSampler,
)
from scbd.model._base import ImageModel
from scbd.model._interfaces import EmbeddingModule, Losses
from scbd.model._plan import TrainingPlan
from scbd.nn._distributed import gather_rows
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData

    from scbd.nn._encoders import Norm
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess
    from scbd.nn._input_transform import InputTransform


class ClassifierOutputs(NamedTuple):
    """Network outputs and labels of a batch, from which the loss is computed."""

    features: Tensor
    """Output of the encoder and input of the head, float32 ``(B, R)``."""
    logits: Tensor
    """Output of the head, float32 ``(B, n_labels)``."""
    y: Tensor
    """Codes of the perturbation, ``(B,)``."""
    e: Tensor
    """Codes of the environment, ``(B,)``."""

    def by_environment(self) -> Iterator[ClassifierOutputs]:
        """Yield the outputs of each environment in the batch."""
        for environment in self.e.unique():
            rows = self.e == environment
            yield ClassifierOutputs(*(part[rows] for part in self))


class ClassifierModule(EmbeddingModule):
    """An encoder and a linear head, trained by cross-entropy; subclasses may add a penalty.

    Parameters
    ----------
    preprocess
        Module that prepares the stored inputs.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`.
    n_labels, n_environments
        Numbers of different perturbations and environments.
    transform
        Transform applied to features before the encoder.
    norm
        Kind of normalisation layers of an encoder given by name, see :func:`scbd.nn.build_encoder`.
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
        self.content = Encoder(encoder, preprocess.output_shape, transform, norm=norm)
        self.head = nn.Linear(self.content.n_features, n_labels)
        self.n_environments = n_environments

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Compute the losses of a batch, see :class:`scbd.model.EmbeddingModule`.

        The validation loss is the cross-entropy without penalty, because settings are chosen by how well they predict.
        """
        features = self.content(self.prepare(inputs, e, generator).within)
        logits = self.head(features).float()
        if not self.training:
            return Losses(F.cross_entropy(logits, y))
        with torch.autocast(features.device.type, enabled=False):
            return self.objective(ClassifierOutputs(*map(gather_rows, (features.float(), logits, y, e))), ramp)

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the losses of a training batch; here the cross-entropy.

        Parameters
        ----------
        batch
            Network outputs and labels.
        ramp
            Factor of a penalty, below 1 while the penalty warms up.
        """
        return Losses(F.cross_entropy(batch.logits, batch.y))


class PenaltyModule(ClassifierModule):
    """A classifier trained by cross-entropy plus a weighted penalty on differences between environments.

    Parameters
    ----------
    penalty
        Weight of the penalty.
    **kwargs
        See :class:`ClassifierModule`.

    Raises
    ------
    ValueError
        If the weight is negative, infinite or not a number.
    """

    def __init__(self, *args: Any, penalty: float, **kwargs: Any) -> None:
        check_number("penalty", penalty)
        super().__init__(*args, **kwargs)
        self.penalty = penalty

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the objective, which a resumed run must share."""
        return {"penalty": self.penalty}

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the cross-entropy plus the weighted penalty."""
        error, penalty = F.cross_entropy(batch.logits, batch.y), self.penalise(batch)
        return Losses(error + ramp * self.penalty * penalty, {"cross_entropy": error, "penalty": penalty})

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the penalty of a batch, a scalar."""
        raise NotImplementedError


class ClassifierModel(ImageModel):
    """Base class of the classifiers. A subclass names its module class and adds its own arguments."""

    module: ClassifierModule
    _module: ClassVar[type[ClassifierModule]] = ClassifierModule
    traits = replace(
        ImageModel.traits,
        batches=ShuffledBatches,
        fixed_labels=(Y_REGISTRY,),  # the head has one output per perturbation
        next_step="predict(), or get_latent_representation()",
    )

    def _set_up(self, encoder: str | nn.Module, preprocess: dict[str, Any], **objective: Any) -> None:
        """Make the module from the settings of encoder, preprocessing and objective."""
        encoder = self._encoder(encoder)
        settings: dict[str, Any] = {
            "standardize_by": "auto",
            "augment": True,
            "whitening": "auto",
            "whitening_kwargs": None,
            "norm": "batch",
        } | preprocess
        whitening, how, norm = (settings.pop(name) for name in ("whitening", "whitening_kwargs", "norm"))
        self.module = self._module(
            self._make_preprocess(**settings),
            encoder=encoder,
            transform=self._make_transform(encoder, whitening, settings=how),
            norm=norm,
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **objective,
        )

    @property
    def _objective_head(self) -> nn.Linear:
        return self.module.head


class ERMModel(ClassifierModel):
    """A plain classifier of the perturbation (empirical risk minimisation), the baseline of domain generalisation.

    Its embedding, ``get_latent_representation()``, is the output of the encoder, before the linear head.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Settings of the preprocessing.

        For images: ``image_size`` (pixels per side), ``intensity`` (transform of pixel values), ``standardize`` (scale
        channels to mean 0 and variance 1) and ``augment`` (random flips and rotations by right angles), as in
        :class:`scbd.nn.Preprocess`; and ``norm`` (kind of normalisation layers).

        For features: ``standardize``, ``clip`` (number of standard deviations at which scaled features are cut off),
        ``whitening`` and ``whitening_kwargs``.

        For images and features: ``standardize_by``. See :class:`scbd.SCBDModel` for these settings.

    Examples
    --------
    >>> scbd.baselines.ERMModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.ERMModel(adata, encoder="small")
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess)


class CORALModule(PenaltyModule):
    r"""A classifier with a penalty on differences between environments in the mean and covariance of features.

    The penalty is the mean over pairs of environments of

    .. math:: \frac{1}{R} \lVert \mu_e - \mu_{e'} \rVert^2 + \frac{1}{R^2} \lVert C_e - C_{e'} \rVert_F^2

    where :math:`\mu_e` and :math:`C_e` are mean and covariance of the ``R`` features in environment e. Environments
    with a single cell in the batch are excluded.
    """

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the mean distance between moments of environments; 0 for fewer than two environments."""
        moments = [(f.mean(0), f.T.cov()) for f, *_ in batch.by_environment() if len(f) > 1]
        apart = [
            sum(((a - b).square().mean() for a, b in zip(one, other, strict=True)), batch.features.new_zeros(()))
            for one, other in combinations(moments, 2)
        ]
        return torch.stack(apart).mean() if apart else batch.features.new_zeros(())


class CORALModel(ClassifierModel):
    """A classifier whose features have similar means and covariances in all environments (Deep CORAL).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the distance between moments. The paper searches 0.1, 1 and 10.

    References
    ----------
    Sun and Saenko (2016), Deep CORAL. The penalty compares means in addition to covariances, as DomainBed and WILDS do.

    Examples
    --------
    >>> scbd.baselines.CORALModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.CORALModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = CORALModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBalancedBatches)

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        penalty: float = 1.0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess, penalty=penalty)


# width of the discriminator's two hidden layers
_DISCRIMINATOR_WIDTH = 1024


class GradientReversal(torch.autograd.Function):
    """The identity, with its gradient multiplied by minus the weight.

    Layers after it learn to reduce the loss, and layers before it to increase the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Return the input unchanged."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient multiplied by minus the weight."""
        return -ctx.weight * gradients[0], None


class DANNModule(PenaltyModule):
    """A classifier whose encoder is trained against a discriminator of the environment (gradient reversal).

    The loss is the cross-entropy of y plus the discriminator's cross-entropy of e. Between features and discriminator,
    the gradient is reversed and multiplied by ``penalty``. The penalty therefore affects only the encoder: the
    discriminator itself is always trained at full strength.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.content.n_features
        self.discriminator = nn.Sequential(
            nn.Linear(width, _DISCRIMINATOR_WIDTH),
            nn.BatchNorm1d(_DISCRIMINATOR_WIDTH),
            nn.ReLU(),
            nn.Linear(_DISCRIMINATOR_WIDTH, _DISCRIMINATOR_WIDTH),
            nn.BatchNorm1d(_DISCRIMINATOR_WIDTH),
            nn.ReLU(),
            nn.Linear(_DISCRIMINATOR_WIDTH, self.n_environments),
        )

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the cross-entropy of y plus that of the discriminator."""
        error = F.cross_entropy(batch.logits, batch.y)
        seen = GradientReversal.apply(batch.features, ramp * self.penalty)
        told = F.cross_entropy(self.discriminator(seen), batch.e)
        return Losses(error + told, {"cross_entropy": error, "discriminator": told})


class DANNModel(ClassifierModel):
    """A classifier whose features do not let a discriminator predict the environment (DANN).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Factor of the reversed gradient, with which the encoder works against the discriminator. The paper searches 0.1,
        1 and 10.

    References
    ----------
    Ganin et al. (2016), Domain-adversarial training of neural networks.

    Encoder, head and discriminator share one optimiser and one learning rate. The penalty is constant from the first
    step, whereas Ganin et al. increase it from 0. WILDS multiplies the discriminator's own gradient by the penalty,
    too; this makes no difference, because AdamW normalises such a factor away. DomainBed alternates steps of the
    discriminator with steps of the encoder.

    Examples
    --------
    >>> scbd.baselines.DANNModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.DANNModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = DANNModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBalancedBatches, fixed_labels=(Y_REGISTRY, E_REGISTRY))

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        penalty: float = 1.0,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess, penalty=penalty)


class IRMModule(PenaltyModule):
    r"""A classifier with the penalty of invariant risk minimisation (IRMv1).

    Let the logits :math:`\ell` be multiplied by a scale :math:`s`. The penalty is the squared derivative of an
    environment's cross-entropy with respect to :math:`s`, at :math:`s = 1`, averaged over environments.

    The derivative is the mean over cells of :math:`g = \sum_k p_k \ell_k - \ell_y`, with :math:`p` the softmax of the
    logits. An unbiased estimate of its square is used: the mean of :math:`g` over every other cell, times the mean of
    :math:`g` over the remaining cells. The authors' code, DomainBed and WILDS do the same. The estimate can be
    negative.
    """

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the mean penalty of the environments with at least two cells in the batch."""
        slopes = []
        for part in batch.by_environment():
            if len(part.y) > 1:
                chosen = part.logits.gather(1, part.y[:, None])[:, 0]
                slope = (part.logits.softmax(1) * part.logits).sum(1) - chosen
                slopes.append(slope[::2].mean() * slope[1::2].mean())
        return torch.stack(slopes).mean() if slopes else batch.logits.new_zeros(())


class IRMPlan(TrainingPlan):
    """Training plan that begins with a penalty weight of 1.

    Parameters
    ----------
    module
        The network.
    anneal_steps
        Number of steps before the full weight, including the steps of earlier runs.
    reset_optimizer
        Clear the optimiser's running averages of gradients when the full weight begins.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: IRMModule, *, anneal_steps: int, reset_optimizer: bool = False, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.anneal_steps, self.reset_optimizer = anneal_steps, reset_optimizer
        # factor that reduces a full weight above 1 to a weight of 1
        self.first_share = 1 / max(module.penalty, 1.0)
        self.preliminary_steps = anneal_steps if self.first_share < 1 else 0

    def ramp(self, step: int) -> float:
        """Return the factor of the penalty at a step of this run.

        During the first ``anneal_steps`` steps, the factor reduces a full weight above 1 to 1.
        """
        share = 1.0 if self.first_step + step >= self.anneal_steps else self.first_share
        return share * super().ramp(step)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Clear the optimiser's state when the full weight begins, if requested."""
        if self.reset_optimizer and self.first_step + self.global_step == self.anneal_steps:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()


class IRMModel(ClassifierModel):
    """A classifier trained such that one scale of the logits is optimal in all environments (IRM).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the squared derivatives. The paper searches 1, 10, 100 and 1,000.
    anneal_steps
        Number of steps with a weight of 1 before the full weight applies (by default 500, as in DomainBed). Train for
        more steps than this. With ``train(load_best=True)``, only weights from after these steps are considered. A
        penalty below 1 applies from the start, whereas DomainBed begins with 1.
    reset_optimizer
        Clear the optimiser's state after these steps, as DomainBed and WILDS do, because it holds averages of much
        smaller gradients. By default the state is kept.

    References
    ----------
    Arjovsky et al. (2019), Invariant risk minimization.

    Examples
    --------
    >>> scbd.baselines.IRMModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.IRMModel(adata, encoder="small", penalty=100.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = IRMModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBalancedBatches, plan=IRMPlan)

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        penalty: float = 100.0,
        anneal_steps: int = 500,
        reset_optimizer: bool = False,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        check_count("anneal_steps", anneal_steps, 0)
        how = {"anneal_steps": anneal_steps, "reset_optimizer": reset_optimizer}
        self.traits = replace(self.traits, plan_kwargs=how)
        self._set_up(encoder, preprocess, penalty=penalty)


class GroupDROModule(ClassifierModule):
    r"""A classifier whose loss gives most weight to the environments with the largest cross-entropy.

    The loss of a training batch is :math:`\sum_e q_e L_e`, the sum over its environments of their cross-entropy
    :math:`L_e` times a weight :math:`q_e`. Before, the batch updates the weights: each :math:`q_e` of an environment in
    the batch is multiplied by :math:`\exp(\eta L_e)`, and then all weights are divided by their sum.

    Parameters
    ----------
    step_size
        The rate :math:`\eta`.
    """

    weights: Tensor

    def __init__(self, *args: Any, step_size: float, **kwargs: Any) -> None:
        check_number("step_size", step_size)
        super().__init__(*args, **kwargs)
        self.step_size = step_size
        self.register_buffer("weights", torch.full((self.n_environments,), 1 / self.n_environments))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the objective, which a resumed run must share."""
        return {"step_size": self.step_size}

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Update the weights, and compute the weighted cross-entropy and its largest term before weighting."""
        here = batch.e.unique()
        errors = torch.stack([F.cross_entropy(part.logits, part.y) for part in batch.by_environment()])
        with torch.no_grad():
            self.weights[here] *= torch.exp(ramp * self.step_size * errors)
            self.weights /= self.weights.sum()
        return Losses((self.weights[here].clone() * errors).sum(), {"worst": errors.max()})


class GroupDROModel(ClassifierModel):
    """A classifier trained mostly on the environments in which it is worst (group DRO).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    step_size
        Rate at which weights move towards the worst environments; 0.01 in the paper.

    References
    ----------
    Sagawa et al. (2020), Distributionally robust neural networks for group shifts.

    Weights sum to 1 over all environments, but the loss is a sum over the environments in the batch. If a batch has
    only few of many environments, its loss and thus its step are smaller, as in WILDS. The environments of a batch are
    drawn in proportion to their numbers of cells; WILDS draws them with equal probability.

    Examples
    --------
    >>> scbd.baselines.GroupDROModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.GroupDROModel(adata, encoder="small", step_size=0.01)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = GroupDROModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBalancedBatches, fixed_labels=(Y_REGISTRY, E_REGISTRY))

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        step_size: float = 0.01,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess, step_size=step_size)


class FishAdamW(torch.optim.AdamW):
    r"""AdamW in rounds: one step on each environment, after which the weights keep a fraction of their displacement.

    A round starts at the parameters :math:`\theta`. One step on each environment, in random order, leads to
    :math:`\tilde\theta`. Then :math:`\theta \leftarrow \theta + \epsilon (\tilde\theta - \theta)`. To first order, this
    follows the mean gradient and increases the inner product between gradients of different environments. All steps
    before the first round are ordinary AdamW steps.

    Outside of the context :meth:`ahead`, the parameters are always :math:`\theta`, even within a round. These values
    are validated, saved and returned after training. The intermediate parameters of an unfinished round are kept in the
    optimiser's state.

    Parameters
    ----------
    parameters
        Parameters to optimise.
    meta_lr
        The fraction :math:`\epsilon`.
    n_environments
        Number of environments, which is the number of steps in a round.
    pretrain_steps
        Number of ordinary steps before the first round.
    first_step
        Number of steps in earlier runs, which count towards ``pretrain_steps``.
    **kwargs
        See :class:`torch.optim.AdamW`.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        meta_lr: float,
        n_environments: int,
        pretrain_steps: int,
        first_step: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(parameters, **kwargs)
        for group in self.param_groups:
            group |= {"meta_lr": meta_lr, "round": n_environments, "pretrain": pretrain_steps, "n_steps": first_step}

    @contextmanager
    def ahead(self) -> Iterator[None]:
        r"""Move the parameters to their intermediate values within the round, for the duration of one step.

        The forward pass, the gradient and :meth:`step` on one environment must take place in this context. On exit, the
        parameters are :math:`\theta` again, updated if the round is complete. After an error, they are restored.
        """
        kept = [self._enter(group) for group in self.param_groups]
        try:
            yield
        except BaseException:
            for group, weights in zip(self.param_groups, kept, strict=True):
                _set_parameters(group["params"], weights)
            raise
        for group, weights in zip(self.param_groups, kept, strict=True):
            self._leave(group, weights)

    @torch.no_grad()
    def _enter(self, group: dict[str, Any]) -> list[Tensor]:
        """Set the parameters to the intermediate values of the round, and return copies of their previous values.

        Before the first round, the parameters do not change, and the list is empty.
        """
        if group["n_steps"] < group["pretrain"]:
            return []
        kept = [p.clone() for p in group["params"]]
        _set_parameters(group["params"], [self.state[p].get("ahead", p) for p in group["params"]])
        return kept

    @torch.no_grad()
    def _leave(self, group: dict[str, Any], kept: list[Tensor]) -> None:
        """Store the intermediate values and restore the parameters, or update them at the end of a round."""
        done = group["n_steps"] + 1 - group["pretrain"]
        group["n_steps"] += 1
        for p, weights in zip(group["params"], kept, strict=False):
            if done % group["round"] == 0:
                self.state[p].pop("ahead", None)
                p.copy_(torch.lerp(weights, p, group["meta_lr"]))
            else:
                if self.state[p]:  # without a gradient there is no state, and AdamW requires it to stay empty
                    self.state[p]["ahead"] = p.clone()
                p.copy_(weights)


@torch.no_grad()
def _set_parameters(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Set parameters to the values in ``weights``; do nothing if ``weights`` is empty."""
    for p, values in zip(parameters, weights, strict=False):
        p.copy_(values)


class FishPlan(TrainingPlan):
    """Training plan that uses the optimiser of Fish.

    Parameters
    ----------
    module
        The network.
    meta_lr
        See :class:`FishAdamW`.
    pretrain_steps
        Minimum number of ordinary steps before the first round. The sampler rounds it up to whole rounds.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: Any, *, meta_lr: float, pretrain_steps: int, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.meta_lr = meta_lr
        self.preliminary_steps = pretrain_steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW in rounds, with one step per environment of the training cells."""
        sampler = self.trainer.datamodule.train_sampler  # type: ignore[attr-defined]
        assert isinstance(sampler, SingleEnvironmentSampler)
        return FishAdamW(
            self.parameter_groups(),
            lr=self.lr,
            weight_decay=self.weight_decay,
            meta_lr=self.meta_lr,
            n_environments=sampler.n_environments,
            pretrain_steps=sampler.pretrain_steps,
            first_step=self.first_step,
        )

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Run a step of a round, including its forward pass, at the intermediate parameters."""
        with optimizer.optimizer.ahead():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class FishModel(ClassifierModel):
    """A classifier trained to move in directions on which the gradients of all environments agree (Fish).

    Training begins with ordinary steps on batches of all environments. Then it proceeds in rounds: a round has one step
    per environment, each on a batch of that environment. The ``max_steps`` of :meth:`train` count both kinds of steps.

    Weights change once per round. The weights that are validated, saved and returned are those after the last complete
    round, so that the steps of an incomplete round have no effect.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    meta_lr
        Fraction of the displacement over a round that is kept. The paper searches 0.001, 0.01 and 0.1. The code of Shi
        et al. divides this value by the number of environments, DomainBed does not. To reproduce the code of Shi et
        al., give the divided value.
    pretrain_steps
        Minimum number of ordinary steps before the first round. It is rounded up to a multiple of the number of
        environments. Train for more steps than this. With ``train(load_best=True)``, only weights from after these
        steps are considered. The paper searches 1,000 and 10,000.

    References
    ----------
    Shi et al. (2022), Gradient matching for domain generalization, algorithm 1.

    The running statistics of BatchNorm are not optimised and change with every batch. DomainBed interpolates them
    together with the weights.

    Examples
    --------
    >>> scbd.baselines.FishModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.FishModel(adata, encoder="small", pretrain_steps=500)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    traits = replace(ClassifierModel.traits, batches=SingleEnvironmentBatches, plan=FishPlan)

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        meta_lr: float = 0.01,
        pretrain_steps: int = 1000,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        if not 0 < meta_lr <= 1:
            msg = f"meta_lr={meta_lr}: a share above 0, at most 1."
            raise ValueError(msg)
        check_count("pretrain_steps", pretrain_steps, 0)
        self.traits = replace(
            self.traits,
            batch_kwargs={"pretrain_steps": pretrain_steps},
            plan_kwargs={"meta_lr": meta_lr, "pretrain_steps": pretrain_steps, "lr_decay": False},
        )
        self._set_up(encoder, preprocess)
