"""Baseline classifiers of the perturbation: ERM, CORAL, DANN, IRM, group DRO and Fish.

All classifiers have one encoder and one linear classification head. ERM minimises the cross-entropy of the
perturbation. CORAL, DANN and IRM add a penalty on differences between environments to this loss, group DRO gives more
weight to environments with a large cross-entropy, and Fish changes the optimiser.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
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
from scbd.model._base import ImageModel, encoder_name
from scbd.model._interfaces import EmbeddingModule, Losses
from scbd.model._plan import TrainingPlan
from scbd.nn._distributed import gather_rows
from scbd.nn._encoders import Encoder
from scbd.nn._groups import Groups, copy_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData

    from scbd.nn._encoders import Norm
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess
    from scbd.nn._input_transform import InputTransform


class ClassifierOutputs(NamedTuple):
    """Network outputs and labels of the B cells in a batch, from which the loss is computed."""

    features: Tensor
    """Output of the encoder, which is the input of the classification head, float32 ``(B, R)``."""
    logits: Tensor
    """Output of the classification head, one logit per cell and perturbation, float32 ``(B, n_labels)``."""
    y: Tensor
    """Integer code of each cell's perturbation, ``(B,)``."""
    e: Tensor
    """Integer code of each cell's environment, ``(B,)``."""

    def by_environment(self) -> Iterator[ClassifierOutputs]:
        """Yield the network outputs and labels of the batch in groups, one group of cells per environment."""
        groups = Groups.of(self.e)
        order = copy_to(self.e.device, np.argsort(groups.codes, kind="stable"))
        parts = (part.index_select(0, order).split(groups.counts.tolist()) for part in self)
        yield from map(ClassifierOutputs, *parts)


class ClassifierModule(EmbeddingModule):
    """Encoder with a linear head that classifies the perturbation, trained by cross-entropy.

    Subclasses override :meth:`objective` to change the loss.

    Parameters
    ----------
    preprocess
        Module that prepares stored images or features for the encoder.
    encoder
        Name of an encoder or a PyTorch module, see :func:`scbd.nn.build_encoder`.
    n_labels, n_environments
        Number of different perturbations, and number of different environments.
    transform
        Transform, such as whitening, that is applied to prepared features before the encoder. Default: no transform.
    norm
        Kind of normalisation layers, used if the encoder is given by name; see :func:`scbd.nn.build_encoder`.
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
        """Compute the loss of a batch, and the terms of the loss; see :class:`scbd.model.EmbeddingModule`.

        In evaluation mode, the loss is the cross-entropy without penalty, because settings are chosen by how well the
        classifier predicts perturbations of validation cells.
        """
        features = self.content(self.prepare(inputs, e, generator).within)
        logits = self.head(features).float()
        if not self.training:
            return Losses(F.cross_entropy(logits, y))
        with torch.autocast(features.device.type, enabled=False):
            return self.objective(ClassifierOutputs(*map(gather_rows, (features.float(), logits, y, e))), ramp)

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the loss of a training batch, which is the cross-entropy of the perturbation in this base class.

        Parameters
        ----------
        batch
            Network outputs and labels of the cells.
        ramp
            Factor, from 0 to 1, by which a penalty is multiplied; below 1 while the penalty warms up.
        """
        return Losses(F.cross_entropy(batch.logits, batch.y))


class PenaltyModule(ClassifierModule):
    """Classifier trained by cross-entropy plus a weighted penalty on differences between environments.

    Parameters
    ----------
    penalty
        Weight of the penalty in the loss.
    **kwargs
        See :class:`ClassifierModule`.

    Raises
    ------
    ValueError
        If ``penalty`` is negative, infinite or not a number.
    """

    def __init__(self, *args: Any, penalty: float, **kwargs: Any) -> None:
        check_number("penalty", penalty)
        super().__init__(*args, **kwargs)
        self.penalty = penalty

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the loss, here the weight of the penalty. A resumed training run must have the same settings."""
        return {"penalty": self.penalty}

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the loss of a training batch: the cross-entropy plus the weighted penalty."""
        error, penalty = F.cross_entropy(batch.logits, batch.y), self.penalise(batch)
        return Losses(error + ramp * self.penalty * penalty, {"cross_entropy": error, "penalty": penalty})

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the penalty of a training batch, a scalar that is not yet multiplied by its weight."""
        raise NotImplementedError


class ClassifierModel(ImageModel):
    """Base class of the baseline classifiers.

    A subclass specifies the class of its network (``_module``), and adds the arguments of its method.
    """

    module: ClassifierModule
    _module: ClassVar[type[ClassifierModule]] = ClassifierModule
    traits = replace(
        ImageModel.traits,
        batches=ShuffledBatches,
        # A trained model takes no new perturbations, because its classification head has one output per perturbation.
        fixed_labels=(Y_REGISTRY,),
        next_step="predict(), or get_latent_representation()",
    )

    def _set_up(self, encoder: str | nn.Module, preprocess: dict[str, Any], **objective: Any) -> None:
        """Make the network from the encoder, the settings of the preprocessing and the settings of the loss."""
        encoder = self._encoder(encoder)
        self._encoder_name = encoder_name(encoder)
        settings: dict[str, Any] = {"standardize_by": "auto", "augment": True} | preprocess
        whitening, how = settings.pop("whitening", "auto"), settings.pop("whitening_kwargs", None)
        norm = settings.pop("norm", "batch")
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
    """Classifier of the perturbation trained by cross-entropy alone (empirical risk minimisation, ERM).

    ERM is the standard baseline of domain generalisation: its loss ignores environments. The embedding,
    ``get_latent_representation()``, is the output of the encoder, before the linear classification head.

    Parameters
    ----------
    adata
        AnnData of the cells, on which :meth:`setup_anndata` was called.
    encoder
        Name of an encoder or a PyTorch module, see :class:`scbd.SCBDModel`.
    registry
        Labels and settings of a saved model, which :meth:`load` uses to make the model without data. Not given
        otherwise.
    **preprocess
        Settings of the preprocessing.

        For images: ``image_size`` (pixels per side), ``intensity`` (transform of pixel values), ``standardize`` (scale
        channels to mean 0 and variance 1) and ``augment`` (random flips and rotations by right angles), see
        :class:`scbd.nn.Preprocess`; and ``norm`` (kind of normalisation layers in the encoder).

        For features: ``standardize`` (scale features to mean 0 and variance 1), ``clip`` (number of standard deviations
        at which scaled features are cut off), ``whitening`` (transform before the encoder) and ``whitening_kwargs``
        (settings of this transform).

        For images and features: ``standardize_by`` (cells by which inputs are standardised per environment). See
        :class:`scbd.SCBDModel` for all of these settings.

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
    r"""Classifier with a penalty on differences between environments in the mean and covariance of features.

    The penalty is the mean, over all pairs of environments :math:`e, e'` in a batch, of

    .. math:: \frac{1}{R} \lVert \mu_e - \mu_{e'} \rVert^2 + \frac{1}{R^2} \lVert C_e - C_{e'} \rVert_F^2

    where :math:`\mu_e` and :math:`C_e` are the mean and the covariance of the encoder's ``R`` output features over the
    cells of environment :math:`e`. Environments with a single cell in the batch are excluded.
    """

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the mean difference between pairs of environments in the mean and covariance of features.

        The result is 0 if fewer than two environments have at least two cells in the batch.
        """
        moments = [(f.mean(0), _covariance(f)) for f, *_ in batch.by_environment() if len(f) > 1]
        apart = [
            sum(((a - b).square().mean() for a, b in zip(one, other, strict=True)), batch.features.new_zeros(()))
            for one, other in combinations(moments, 2)
        ]
        return torch.stack(apart).mean() if apart else batch.features.new_zeros(())


def _covariance(features: Tensor) -> Tensor:
    """Compute the covariance of features ``(N, R)``; torch.cov would read values, for which the CPU waits for a GPU."""
    centred = features - features.mean(0)
    return centred.T @ centred / (len(features) - 1)


class PenaltyModel(ClassifierModel):
    """Base class of the classifiers whose constructor has the weight of a penalty as its only further argument."""

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


class CORALModel(PenaltyModel):
    """Classifier whose features are trained to have similar means and covariances in all environments (Deep CORAL).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the penalty on differences between environments in the mean and covariance of features. Makino et al.
        (2025) search 0.1, 1 and 10.

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


# number of units in each of the two hidden layers of DANN's discriminator, which predicts the environment
_DISCRIMINATOR_WIDTH = 1024


class GradientReversal(torch.autograd.Function):
    """Identity function whose gradient is multiplied by a negative factor in the backward pass.

    Layers after this function (the discriminator) learn to reduce the loss, and layers before it (the encoder) learn to
    increase the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Return the input ``x`` unchanged, and store ``weight`` for the backward pass."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the output multiplied by minus ``weight``, as the gradient of the input."""
        return -ctx.weight * gradients[0], None


class DANNModule(PenaltyModule):
    """Classifier whose encoder is trained against a discriminator that predicts the environment (gradient reversal).

    The loss is the classifier's cross-entropy of the perturbation plus the discriminator's cross-entropy of the
    environment. Between the encoder and the discriminator, the gradient is reversed and multiplied by ``penalty``. The
    penalty therefore affects only the encoder: the discriminator itself is always trained at full strength.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width, layers = _DISCRIMINATOR_WIDTH, []
        for n_inputs in (self.content.n_features, width):
            layers += [nn.Linear(n_inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
        self.discriminator = nn.Sequential(*layers, nn.Linear(width, self.n_environments))

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Compute the loss of a training batch: the cross-entropy of the perturbation plus that of the environment.

        The environment is predicted by the discriminator, behind the gradient reversal.
        """
        error = F.cross_entropy(batch.logits, batch.y)
        seen = GradientReversal.apply(batch.features, ramp * self.penalty)
        told = F.cross_entropy(self.discriminator(seen), batch.e)
        return Losses(error + told, {"cross_entropy": error, "discriminator": told})


class DANNModel(PenaltyModel):
    """Classifier whose features are trained such that a discriminator cannot predict the environment (DANN).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Factor of the reversed gradient: the strength with which the encoder is trained against the discriminator.
        Makino et al. (2025) search 0.1, 1 and 10.

    References
    ----------
    Ganin et al. (2016), Domain-adversarial training of neural networks.

    Encoder, classification head and discriminator have a common optimiser and learning rate. The penalty is constant
    from the first step, whereas Ganin et al. increase it from 0. WILDS multiplies the discriminator's own gradient by
    the penalty, too; this makes no difference, because AdamW normalises gradients by their magnitude. DomainBed
    alternates steps of the discriminator with steps of the encoder.

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


class IRMModule(PenaltyModule):
    r"""Classifier with the penalty of invariant risk minimisation (IRMv1).

    The penalty is small if the same scale of the logits is optimal in all environments. Let the logits :math:`\ell` be
    multiplied by a scale :math:`s`. The penalty is the squared derivative of an environment's cross-entropy with
    respect to :math:`s`, at :math:`s = 1`, averaged over environments.

    The derivative is the mean over cells of :math:`g = \sum_k p_k \ell_k - \ell_y`, with :math:`p` the softmax of the
    logits and :math:`y` the perturbation of the cell. The square of this mean is estimated without bias: the cells of
    the environment are divided into two halves, and the mean of :math:`g` over one half is multiplied by the mean over
    the other half. The code of Arjovsky et al., DomainBed and WILDS do the same. The estimate can be negative.
    """

    def penalise(self, batch: ClassifierOutputs) -> Tensor:
        """Compute the penalty of a batch: the mean over environments with at least two cells in the batch."""
        slopes = []
        for part in batch.by_environment():
            if len(part.y) > 1:
                chosen = part.logits.gather(1, part.y[:, None])[:, 0]
                slope = (part.logits.softmax(1) * part.logits).sum(1) - chosen
                slopes.append(slope[::2].mean() * slope[1::2].mean())
        return torch.stack(slopes).mean() if slopes else batch.logits.new_zeros(())


class IRMPlan(TrainingPlan):
    """Training plan of IRM, in which the weight of the penalty is at most 1 in the first steps, and full afterwards.

    Parameters
    ----------
    module
        The network.
    anneal_steps
        Number of training steps before the penalty has its full weight. Steps of earlier runs are counted.
    reset_optimizer
        Whether to clear the optimiser's running averages of gradients at the first step with the full weight.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: IRMModule, *, anneal_steps: int, reset_optimizer: bool = False, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.anneal_steps, self.reset_optimizer = anneal_steps, reset_optimizer
        # Factor by which the weight of the penalty is multiplied in the first steps. The factor reduces a weight above
        # 1 to 1, and keeps a smaller weight.
        self.first_share = 1 / max(module.penalty, 1.0)
        self.preliminary_steps = anneal_steps if self.first_share < 1 else 0

    def ramp(self, step: int) -> float:
        """Return the factor by which the weight of the penalty is multiplied at a step of this run.

        During the first ``anneal_steps`` training steps, the factor reduces a weight above 1 to 1.
        """
        share = 1.0 if self.first_step + step >= self.anneal_steps else self.first_share
        return share * super().ramp(step)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Clear the optimiser's running averages, if requested, when the penalty reaches its full weight."""
        if self.reset_optimizer and self.first_step + self.global_step == self.anneal_steps:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()


class IRMModel(ClassifierModel):
    """Classifier trained such that the same scale of the logits is optimal in all environments (IRM).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the penalty: the squared derivative of an environment's cross-entropy with respect to a scale of the
        logits. Makino et al. (2025) search 1, 10, 100 and 1,000.
    anneal_steps
        Number of first training steps, in which the penalty has weight 1 instead of its full weight (default 500, as in
        DomainBed). Train for more steps than this. With ``train(load_best=True)``, only network weights from later
        steps are considered. A penalty below 1 applies from the first step, whereas DomainBed begins with 1.
    reset_optimizer
        Clear the optimiser's running averages of gradients after the first ``anneal_steps`` steps, as DomainBed and
        WILDS do, because gradients were much smaller in these steps. By default the averages are kept.

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
    r"""Classifier whose loss gives most weight to the environments with the largest cross-entropy.

    The loss of a training batch is :math:`\sum_e q_e L_e`, the sum over the environments in the batch of their
    cross-entropy :math:`L_e` times their weight :math:`q_e`. The weights are updated before the loss is computed: for
    each environment in the batch, :math:`q_e` is multiplied by :math:`\exp(\eta L_e)`. Then the weights of all
    environments are divided by their sum.

    Parameters
    ----------
    step_size
        Rate :math:`\eta` at which the weights of environments are updated.
    """

    weights: Tensor

    def __init__(self, *args: Any, step_size: float, **kwargs: Any) -> None:
        check_number("step_size", step_size)
        super().__init__(*args, **kwargs)
        self.step_size = step_size
        self.register_buffer("weights", torch.full((self.n_environments,), 1 / self.n_environments))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the loss, here the rate ``step_size``. A resumed training run must have the same settings."""
        return {"step_size": self.step_size}

    def objective(self, batch: ClassifierOutputs, ramp: float) -> Losses:
        """Update the weights of environments, and compute the weighted cross-entropy of a training batch.

        The largest unweighted cross-entropy of an environment is returned as well, as ``"worst"``.
        """
        here = copy_to(batch.e.device, Groups.of(batch.e).distinct_labels)
        errors = torch.stack([F.cross_entropy(part.logits, part.y) for part in batch.by_environment()])
        with torch.no_grad():
            self.weights[here] *= torch.exp(ramp * self.step_size * errors)
            self.weights /= self.weights.sum()
        return Losses((self.weights[here].clone() * errors).sum(), {"worst": errors.max()})


class GroupDROModel(ClassifierModel):
    """Classifier trained mostly on the environments with the largest cross-entropy (group DRO).

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    step_size
        Rate at which the weights of environments with a large cross-entropy increase; 0.01 in the paper.

    References
    ----------
    Sagawa et al. (2020), Distributionally robust neural networks for group shifts.

    The weights of all environments sum to 1, but the loss is a sum over the environments in the batch only. If a batch
    contains few of many environments, its loss and thus the optimisation step are smaller, as in WILDS. The
    environments of a batch are drawn with probabilities proportional to their numbers of cells; WILDS draws
    environments with equal probability.

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
    r"""Optimiser of Fish: AdamW in rounds of one step per environment.

    A round starts at the parameters :math:`\theta`. One AdamW step on each environment, in random order, leads to the
    parameters :math:`\tilde\theta`. At the end of the round, only a fraction :math:`\epsilon` of this displacement is
    kept: :math:`\theta \leftarrow \theta + \epsilon (\tilde\theta - \theta)`. To first order, a round follows the mean
    gradient and increases the inner product between gradients of different environments. All steps before the first
    round are ordinary AdamW steps.

    Outside of the context :meth:`ahead`, the parameters have the values :math:`\theta` from the end of the last round,
    even within a round. These values are validated, saved and returned after training. The intermediate values in an
    unfinished round are stored in the optimiser's state.

    Parameters
    ----------
    parameters
        Parameters of the network to optimise.
    meta_lr
        Fraction :math:`\epsilon` of the displacement over a round that is kept.
    n_environments
        Number of environments, which is the number of steps in a round.
    pretrain_steps
        Number of ordinary AdamW steps before the first round.
    first_step
        Number of steps in earlier training runs, which count towards ``pretrain_steps``.
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
        r"""Set the parameters to their intermediate values in the current round, for the duration of one step.

        The forward pass, the backward pass and :meth:`step` on the batch of one environment must take place in this
        context. On exit, the parameters return to the values :math:`\theta` from before the round. If the step
        completes the round, they are set to the updated :math:`\theta`. After an error, the previous values are
        restored.
        """
        settings = self.param_groups[0]  # the settings of the rounds are the same in all groups
        parameters = [p for group in self.param_groups for p in group["params"]]
        n_steps_in_rounds = settings["n_steps"] + 1 - settings["pretrain"]
        if n_steps_in_rounds <= 0:
            yield
        else:
            before = [p.detach().clone() for p in parameters]
            _set_parameters(parameters, [self.state[p].get("ahead", p) for p in parameters])
            try:
                yield
            except BaseException:
                _set_parameters(parameters, before)
                raise
            if n_steps_in_rounds % settings["round"] == 0:
                for p in parameters:
                    self.state[p].pop("ahead", None)
                after = [
                    torch.lerp(old, p.detach(), settings["meta_lr"]) for old, p in zip(before, parameters, strict=True)
                ]
                _set_parameters(parameters, after)
            else:
                for p in parameters:
                    # No value may be stored in an empty state of a parameter, because AdamW initialises its running
                    # averages for a parameter only if the state is empty. The state is empty as long as the parameter
                    # has had no gradient.
                    if self.state[p]:
                        self.state[p]["ahead"] = p.detach().clone()
                _set_parameters(parameters, before)
        for group in self.param_groups:
            group["n_steps"] += 1


@torch.no_grad()
def _set_parameters(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for p, values in zip(parameters, weights, strict=True):
        p.copy_(values)


class FishPlan(TrainingPlan):
    """Training plan of Fish, with the optimiser :class:`FishAdamW`.

    Parameters
    ----------
    module
        The network.
    meta_lr
        Fraction of the displacement over a round that is kept, see :class:`FishAdamW`.
    pretrain_steps
        Minimum number of ordinary AdamW steps before the first round. The sampler rounds it up to a multiple of the
        number of environments.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: Any, *, meta_lr: float, pretrain_steps: int, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.meta_lr = meta_lr
        self.preliminary_steps = pretrain_steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser :class:`FishAdamW`, whose rounds have one step per environment of the training cells."""
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
        """Run one training step, including its forward pass, with the intermediate parameters of the current round."""
        with optimizer.optimizer.ahead():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class FishModel(ClassifierModel):
    """Classifier trained along directions in which the gradients of all environments agree (Fish).

    Training begins with ordinary steps on batches of all environments. Then it proceeds in rounds: a round has one step
    per environment, each on a batch of that environment. The ``max_steps`` of :meth:`train` count both kinds of steps.

    At the end of a round, the network's weights keep a fraction of their displacement over the round. The weights that
    are validated, saved and returned are those after the last complete round, so that the steps of an incomplete round
    have no effect.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    meta_lr
        Fraction of the weights' displacement over a round that is kept. Makino et al. (2025) search 0.001, 0.01 and
        0.1. The code of Shi et al. divides this value by the number of environments, DomainBed does not. To reproduce
        the code of Shi et al., give the divided value.
    pretrain_steps
        Minimum number of ordinary steps before the first round. It is rounded up to a multiple of the number of
        environments. Train for more steps than this. With ``train(load_best=True)``, only weights from later steps are
        considered. Makino et al. (2025) search 1,000 and 10,000.

    References
    ----------
    Shi et al. (2022), Gradient matching for domain generalization, algorithm 1.

    The running statistics of BatchNorm are not part of the rounds and change with every batch. DomainBed interpolates
    these statistics together with the weights.

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
