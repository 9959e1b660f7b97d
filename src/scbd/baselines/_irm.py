"""IRM: features on which one classifier is best in every environment (Arjovsky et al., 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scbd._checks import check_count
from scbd.baselines._batches import EnvironmentBatches
from scbd.baselines._classifier import ClassifierModel, PenaltyModule
from scbd.model import TrainingPlan

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor, nn

    from scbd.baselines._classifier import Outputs


class IRMModule(PenaltyModule):
    r"""Cross-entropy, and the squared slope of each environment's by a scale of the logits, at 1.

    The derivative of the cross-entropy of :math:`s \ell` by :math:`s` at 1 is the mean over cells of
    :math:`g = \sum_k p_k \ell_k - \ell_y`, with :math:`p` the softmax of the logits :math:`\ell`. Its square is
    estimated without bias by the product of the means over every other cell and over the rest, as in the authors' code,
    DomainBed and WILDS; so it may be negative.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(_without_counter)

    def penalise(self, batch: Outputs) -> Tensor:
        """Mean over environments with two cells or more."""
        slopes = []
        for part in batch.by_environment():
            if len(part.y) > 1:
                chosen = part.logits.gather(1, part.y[:, None])[:, 0]
                slope = (part.logits.softmax(1) * part.logits).sum(1) - chosen
                slopes.append(slope[::2].mean() * slope[1::2].mean())
        return torch.stack(slopes).mean() if slopes else batch.logits.new_zeros(())


def _without_counter(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Of models that were saved when the module itself counted steps."""
    state_dict.pop(f"{prefix}updates", None)


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
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    penalty
        Weight of the squared slopes; the paper searches 1, 10, 100 and 1,000.
    anneal_steps
        Steps at a weight of 1 before that (DomainBed's 500 by default): train for longer. The best weights of
        ``train(load_best=True)`` are of those after them. A penalty below 1 counts from the start, where DomainBed
        begins with 1.
    reset_optimizer
        Begin the optimiser anew after these steps, as DomainBed and WILDS do: what it knows of gradients is of much
        smaller ones. By default it goes on.
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
    _batches = EnvironmentBatches
    _plan = IRMPlan

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
        self._plan_settings = {"anneal_steps": anneal_steps}
        if reset_optimizer:
            self._plan_settings["reset_optimizer"] = True
        self._set_up(encoder, preprocess, penalty=penalty)
