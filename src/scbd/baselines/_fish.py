"""Fish: steps that agree between environments (Shi et al., 2022)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from scbd._checks import check_count
from scbd.baselines._batches import AlternatingBatches, AlternatingSampler
from scbd.baselines._classifier import ClassifierModel
from scbd.model import TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from torch import Tensor, nn


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
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    meta_lr
        Share of a round's way that is kept; the paper searches 0.001, 0.01 and 0.1. The code of Shi et al. divides it
        by the number of environments, DomainBed does not: give the quotient for the former.
    pretrain_steps
        Plain steps, on batches of all environments, before the first round, at least: they go on to a multiple of the
        number of environments: train for longer. The best weights of ``train(load_best=True)`` are of those after
        them. The paper searches 1,000 and 10,000.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`, and ``norm`` (kind of normalisation layers); of features
        ``standardize``, ``clip`` (scaled values are cut off there), ``whitening`` and ``whitening_kwargs``, as in
        :class:`scbd.SCBDModel`.

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

    _batches = AlternatingBatches
    _plan = FishPlan

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
        self._data_settings = {"pretrain_steps": pretrain_steps}
        self._plan_settings = {"meta_lr": meta_lr, "pretrain_steps": pretrain_steps}
        self._set_up(encoder, preprocess)
