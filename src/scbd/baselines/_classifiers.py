"""Classifiers of the perturbation: ERM, and those that penalise what differs between environments.

One encoder and one linear head; what each adds to cross-entropy is its module, a screen long.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._anndata import E_REGISTRY, Y_REGISTRY
from scbd._checks import check_count, check_number
from scbd.baselines._batches import AlternatingBatches, AlternatingSampler, EnvironmentBatches, ShuffledBatches
from scbd.model._base import ImageModel
from scbd.model._contract import EmbeddingModule, Losses
from scbd.model._plan import TrainingPlan
from scbd.nn._distributed import gather
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData

    from scbd.nn._encoders import Norm
    from scbd.nn._inputs import FeatureScaling, InputTransform, Preprocess


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
        self.content = Encoder(encoder, preprocess.output_shape, transform, norm=norm)
        self.head = nn.Linear(self.content.n_features, n_labels)
        self.n_environments = n_environments

    def forward(
        self, inputs: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> Losses:
        """Losses of a batch, see :class:`scbd.model.EmbeddingModule`.

        Validation looks at cross-entropy alone: a setting is chosen by how well it predicts.
        """
        features = self.content(self.prepare(inputs, e, generator).within)
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
        check_number("penalty", penalty)
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
    traits = replace(
        ImageModel.traits,
        batches=ShuffledBatches,
        fixed_labels=(Y_REGISTRY,),  # the head's
        next_step="predict(), or get_latent_representation()",
    )

    def _set_up(self, encoder: str | nn.Module, preprocess: dict[str, Any], **objective: Any) -> None:
        """Make the module."""
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
            self._preprocess(**settings),
            encoder=encoder,
            transform=self._transform(encoder, whitening, settings=how),
            norm=norm,
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            n_environments=len(self._registered(E_REGISTRY)["categories"]),
            **objective,
        )

    @property
    def _own_head(self) -> nn.Linear:
        return self.module.head


class ERMModel(ClassifierModel):
    """A plain classifier of the perturbation, the baseline of domain generalisation.

    Its embedding, ``get_latent_representation()``, is what the encoder gives to the linear head.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`, and ``norm`` (kind of normalisation layers); of features
        ``standardize``, ``clip`` (scaled values are cut off there), ``whitening`` and ``whitening_kwargs``; of both
        ``standardize_by``, as in :class:`scbd.SCBDModel`.

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
    r"""Cross-entropy, and the mean over pairs of environments of

    .. math:: \frac{1}{R} \lVert \mu_e - \mu_{e'} \rVert^2 + \frac{1}{R^2} \lVert C_e - C_{e'} \rVert_F^2

    with mean and covariance of the ``R`` features. Environments with a single cell in the batch are left out.
    """  # noqa: D400

    def penalise(self, batch: Outputs) -> Tensor:
        """Distance of means and covariances; 0 in a batch of one environment."""
        moments = [(f.mean(0), f.T.cov()) for f, *_ in batch.by_environment() if len(f) > 1]
        apart = [
            sum(((a - b).square().mean() for a, b in zip(one, other, strict=True)), batch.features.new_zeros(()))
            for one, other in combinations(moments, 2)
        ]
        return torch.stack(apart).mean() if apart else batch.features.new_zeros(())


class CORALModel(ClassifierModel):
    """A classifier whose features have the same first two moments in all environments.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the distance of moments; the paper searches 0.1, 1 and 10.

    References
    ----------
    Sun and Saenko (2016), Deep CORAL. Means are compared besides covariances, as DomainBed and WILDS do.

    Examples
    --------
    >>> scbd.baselines.CORALModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.CORALModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = CORALModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBatches)

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


_WIDTH = 1024


class ReversedGradient(torch.autograd.Function):
    """The identity, with its gradient times minus the weight: what is above descends, what is below ascends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Pass on."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Turn round."""
        return -ctx.weight * gradients[0], None


class DANNModule(PenaltyModule):
    """Cross-entropy of y, and that of a discriminator of e, whose gradient is reversed before the features.

    The discriminator itself always learns at full strength; ``penalty`` is how strongly the encoder works against it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.content.n_features
        self.discriminator = nn.Sequential(
            nn.Linear(width, _WIDTH),
            nn.BatchNorm1d(_WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.BatchNorm1d(_WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, self.n_environments),
        )

    def objective(self, batch: Outputs, ramp: float) -> Losses:
        """Both cross-entropies."""
        error = F.cross_entropy(batch.logits, batch.y)
        seen = ReversedGradient.apply(batch.features, ramp * self.penalty)
        told = F.cross_entropy(self.discriminator(seen), batch.e)
        return Losses(error + told, {"cross_entropy": error, "discriminator": told})


class DANNModel(ClassifierModel):
    """A classifier whose features a discriminator cannot tell the environment from.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        How strongly the encoder works against the discriminator; the paper searches 0.1, 1 and 10.

    References
    ----------
    Ganin et al. (2016), Domain-adversarial training of neural networks. One optimiser and one learning rate for
    encoder, head and discriminator; the penalty is the same from the first step, where Ganin et al. let it rise from 0.
    WILDS weighs the discriminator's own gradient by the penalty as well, a factor that
    AdamW takes out again; DomainBed trains it in turns with the encoder.

    Examples
    --------
    >>> scbd.baselines.DANNModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.DANNModel(adata, encoder="small", penalty=1.0)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = DANNModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBatches, fixed_labels=(Y_REGISTRY, E_REGISTRY))

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
    r"""Cross-entropy, and the squared slope of each environment's by a scale of the logits, at 1.

    The derivative of the cross-entropy of :math:`s \ell` by :math:`s` at 1 is the mean over cells of
    :math:`g = \sum_k p_k \ell_k - \ell_y`, with :math:`p` the softmax of the logits :math:`\ell`. Its square is
    estimated without bias by the product of the means over every other cell and over the rest, as in the authors' code,
    DomainBed and WILDS; so it may be negative.
    """

    def penalise(self, batch: Outputs) -> Tensor:
        """Mean over environments with two cells or more."""
        slopes = []
        for part in batch.by_environment():
            if len(part.y) > 1:
                chosen = part.logits.gather(1, part.y[:, None])[:, 0]
                slope = (part.logits.softmax(1) * part.logits).sum(1) - chosen
                slopes.append(slope[::2].mean() * slope[1::2].mean())
        return torch.stack(slopes).mean() if slopes else batch.logits.new_zeros(())


class IRMPlan(TrainingPlan):
    """The plan of all models, with a penalty of weight 1 to begin with.

    Parameters
    ----------
    module
        The network.
    anneal_steps
        Steps before the full weight, those of earlier runs among them.
    reset_optimizer
        Whether the optimiser forgets then what it knows of smaller gradients.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: IRMModule, *, anneal_steps: int, reset_optimizer: bool = False, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.anneal_steps, self.reset_optimizer = anneal_steps, reset_optimizer
        # of the full weight
        self.first_share = 1 / max(module.penalty, 1.0)
        self.preliminary_steps = anneal_steps if self.first_share < 1 else 0

    def ramp(self, step: int) -> float:
        """Down to a weight of 1 at first, where the full one is larger."""
        share = 1.0 if self.first_step + step >= self.anneal_steps else self.first_share
        return share * super().ramp(step)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Begin the optimiser anew where the full weight begins, if so asked."""
        if self.reset_optimizer and self.first_step + self.global_step == self.anneal_steps:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()


class IRMModel(ClassifierModel):
    """A classifier that is at an optimum of its scale in every environment at once.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    penalty
        Weight of the squared slopes; the paper searches 1, 10, 100 and 1,000.
    anneal_steps
        Steps at a weight of 1 before that (DomainBed's 500 by default): train for longer. The best weights of
        ``train(load_best=True)`` are of those after them. A penalty below 1 counts from the start, where DomainBed
        begins with 1.
    reset_optimizer
        Begin the optimiser anew after these steps, as DomainBed and WILDS do: what it knows of gradients is of much
        smaller ones. By default it goes on.

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
    traits = replace(ClassifierModel.traits, batches=EnvironmentBatches, plan=IRMPlan)

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
    r"""Cross-entropy of each environment, weighted by :math:`q`, which grows where it is large.

    Every training batch multiplies :math:`q_e` by :math:`\exp(\eta L_e)` for the environments in it, and divides all by
    their sum; the loss is :math:`\sum_e q_e L_e`.

    Parameters
    ----------
    step_size
        :math:`\eta`.
    """

    weights: Tensor

    def __init__(self, *args: Any, step_size: float, **kwargs: Any) -> None:
        check_number("step_size", step_size)
        super().__init__(*args, **kwargs)
        self.step_size = step_size
        self.register_buffer("weights", torch.full((self.n_environments,), 1 / self.n_environments))

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return {"step_size": self.step_size}

    def objective(self, batch: Outputs, ramp: float) -> Losses:
        """Cross-entropies by the weights they have moved, and the largest of them."""
        here = batch.e.unique()
        errors = torch.stack([F.cross_entropy(part.logits, part.y) for part in batch.by_environment()])
        with torch.no_grad():
            self.weights[here] *= torch.exp(ramp * self.step_size * errors)
            self.weights /= self.weights.sum()
        return Losses((self.weights[here].clone() * errors).sum(), {"worst": errors.max()})


class GroupDROModel(ClassifierModel):
    """A classifier trained on whatever environment it is worst in.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    step_size
        How fast weights move towards the worst environment; 0.01 in the paper.

    References
    ----------
    Sagawa et al. (2020), Distributionally robust neural networks for group shifts. Weights sum to 1 over all
    environments, and the loss is over those in the batch: where it holds few of many, a step is smaller, as in WILDS.
    Which ones it holds is drawn in proportion to their sizes; WILDS draws them alike.

    Examples
    --------
    >>> scbd.baselines.GroupDROModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.GroupDROModel(adata, encoder="small", step_size=0.01)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    _module = GroupDROModule
    traits = replace(ClassifierModel.traits, batches=EnvironmentBatches, fixed_labels=(Y_REGISTRY, E_REGISTRY))

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
    r"""AdamW in rounds: one step an environment, of which a fraction is kept.

    A round goes from :math:`\theta` by one step on each environment, in random order, to :math:`\tilde\theta`; then
    :math:`\theta \leftarrow \theta + \epsilon (\tilde\theta - \theta)`. To first order, that follows the mean gradient
    and raises the inner product of the gradients of different environments. Before, all steps are plain ones.

    Outside of :meth:`ahead`, the parameters are :math:`\theta`, whatever the step: that is what is validated, saved and
    left in the end. How far a begun round has got is part of the optimiser's state.

    Parameters
    ----------
    parameters
        To optimise.
    meta_lr
        :math:`\epsilon`.
    n_environments
        Steps in a round.
    pretrain_steps
        Plain steps before the first round.
    first_step
        Steps of runs before, which count.
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
        """Go on with the round: the gradient and :meth:`step` of one environment belong in here."""
        kept = [self._enter(group) for group in self.param_groups]
        try:
            yield
        except BaseException:
            for group, weights in zip(self.param_groups, kept, strict=True):
                _copy(group["params"], weights)
            raise
        for group, weights in zip(self.param_groups, kept, strict=True):
            self._leave(group, weights)

    @torch.no_grad()
    def _enter(self, group: dict[str, Any]) -> list[Tensor]:
        """Put the parameters where the round has got to; what they were."""
        if group["n_steps"] < group["pretrain"]:
            return []
        kept = [p.clone() for p in group["params"]]
        _copy(group["params"], [self.state[p].get("ahead", p) for p in group["params"]])
        return kept

    @torch.no_grad()
    def _leave(self, group: dict[str, Any], kept: list[Tensor]) -> None:
        """Remember where the round has got to, or keep a share of it at its end."""
        done = group["n_steps"] + 1 - group["pretrain"]
        group["n_steps"] += 1
        for p, weights in zip(group["params"], kept, strict=False):
            if done % group["round"] == 0:
                self.state[p].pop("ahead", None)
                p.copy_(torch.lerp(weights, p, group["meta_lr"]))
            else:
                if self.state[p]:  # what has no gradient has no state, and AdamW must find none
                    self.state[p]["ahead"] = p.clone()
                p.copy_(weights)


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Set parameters; none, where there are no weights."""
    for p, values in zip(parameters, weights, strict=False):
        p.copy_(values)


class FishPlan(TrainingPlan):
    """The plan of all image models, with the optimiser of Fish.

    Parameters
    ----------
    module
        The network.
    meta_lr
        See :class:`FishAdamW`.
    pretrain_steps
        Plain steps before the first round; the sampler knows how many make whole ones.
    **kwargs
        See :class:`scbd.model.TrainingPlan`.
    """

    def __init__(self, module: Any, *, meta_lr: float, pretrain_steps: int, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.meta_lr = meta_lr
        self.preliminary_steps = pretrain_steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in rounds of as many steps as the training cells have environments."""
        sampler = self.trainer.datamodule.train_sampler  # type: ignore[attr-defined]
        assert isinstance(sampler, AlternatingSampler)
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
        """A step of a round, with the forward pass that belongs to it."""
        with optimizer.optimizer.ahead():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class FishModel(ClassifierModel):
    """A classifier that moves where the gradients of all environments agree.

    After plain steps, a step is one batch of one environment, and a round has as many as there are environments. The
    ``max_steps`` of :meth:`train` count both kinds. Weights move once a round: those that are validated, saved and left
    in the end are those after the last whole round, so that steps of a round that is not finished change nothing.

    Parameters
    ----------
    adata, encoder, registry, **preprocess
        See :class:`ERMModel`.
    meta_lr
        Share of a round's way that is kept; the paper searches 0.001, 0.01 and 0.1. The code of Shi et al. divides it
        by the number of environments, DomainBed does not: give the quotient for the former.
    pretrain_steps
        Plain steps, on batches of all environments, before the first round, at least: they go on to a multiple of the
        number of environments: train for longer. The best weights of ``train(load_best=True)`` are of those after
        them. The paper searches 1,000 and 10,000.

    References
    ----------
    Shi et al. (2022), Gradient matching for domain generalization, algorithm 1. Running statistics of BatchNorm, which
    are not optimised, move with every batch; DomainBed draws them back with the weights.

    Examples
    --------
    >>> scbd.baselines.FishModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.FishModel(adata, encoder="small", pretrain_steps=500)
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    traits = replace(ClassifierModel.traits, batches=AlternatingBatches, plan=FishPlan)

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
