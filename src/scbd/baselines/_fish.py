"""Fish: steps that agree between environments (Shi et al., 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scbd.baselines._batches import AlternatingBatches, AlternatingSampler
from scbd.baselines._classifier import ClassifierModel
from scbd.model._plan import TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch import nn


class FishAdamW(torch.optim.AdamW):
    r"""AdamW in rounds: one step an environment, of which a fraction is kept.

    A round goes from :math:`\theta` by one step on each environment, in random order, to :math:`\tilde\theta`; then
    :math:`\theta \leftarrow \theta + \epsilon (\tilde\theta - \theta)`. To first order, that follows the mean gradient
    and raises the inner product of the gradients of different environments. Before, all steps are plain ones.

    Parameters
    ----------
    parameters
        To optimise.
    meta_lr
        :math:`\epsilon`.
    n_environments
        Steps in a round.
    pretrain_steps
        Plain steps before the first round; begun rounds are left out.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on one environment; the last of a round also draws back."""
        starts: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            if group["n_steps"] >= group["pretrain"] and group["n_steps"] % group["round"] == 0:
                starts |= {p: p.clone() for p in group["params"]}
        loss = super().step(closure)
        for p, start in starts.items():  # not before: AdamW begins where there is no state
            self.state[p]["start"] = start
        for group in self.param_groups:
            group["n_steps"] += 1
            if group["n_steps"] % group["round"] == 0:
                for p in group["params"]:
                    start = self.state[p].pop("start", None)
                    if start is not None:
                        p.copy_(torch.lerp(start, p, group["meta_lr"]))
        return loss


class FishPlan(TrainingPlan):
    """The plan of all image models, with the optimiser of Fish.

    Parameters
    ----------
    module
        The network.
    meta_lr, pretrain_steps
        See :class:`FishAdamW`.
    **kwargs
        See :class:`scbd.model._plan.TrainingPlan`.
    """

    def __init__(self, module: Any, *, meta_lr: float, pretrain_steps: int, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.meta_lr = meta_lr
        self.pretrain_steps = pretrain_steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in rounds of as many steps as the training cells have environments."""
        sampler = self.trainer.datamodule.train_sampler  # type: ignore[attr-defined]
        assert isinstance(sampler, AlternatingSampler)
        return FishAdamW(
            self.module.parameters(),
            lr=self.lr,
            weight_decay=self.weight_decay,
            meta_lr=self.meta_lr,
            n_environments=sampler.n_environments,
            pretrain_steps=self.pretrain_steps,
            first_step=self.first_step,
        )


class FishModel(ClassifierModel):
    """A classifier that moves where the gradients of all environments agree.

    After plain steps, a step is one batch of one environment: ``max_steps`` counts all, and a round has as many as
    there are environments.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    meta_lr
        Share of a round's way that is kept; the paper searches 0.001, 0.01 and 0.1.
    pretrain_steps
        Plain steps, on batches of all environments, before the first round; the paper searches 1,000 and 10,000.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        ``image_size``, ``intensity``, ``standardize``, ``augment``, see :class:`scbd.nn.Preprocess`.

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
        encoder: str | nn.Module = "resnet18",
        meta_lr: float = 0.01,
        pretrain_steps: int = 1000,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        if not 0 < meta_lr <= 1 or pretrain_steps < 0:
            msg = f"meta_lr={meta_lr}, pretrain_steps={pretrain_steps}: a share above 0, and a number of steps."
            raise ValueError(msg)
        self._data_settings = {"pretrain_steps": pretrain_steps}
        self._plan_settings = {"meta_lr": meta_lr, "pretrain_steps": pretrain_steps}
        self._set_up(encoder, preprocess)
