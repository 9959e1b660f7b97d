"""IRM: features on which one classifier is best in every environment (Arjovsky et al., 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scbd._checks import check_count
from scbd.baselines._batches import EnvironmentBatches
from scbd.baselines._classifier import ClassifierModel, PenaltyModule

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

    Parameters
    ----------
    anneal_steps
        Training batches with a penalty of weight 1, before the full weight.
    """

    updates: Tensor

    def __init__(self, *args: Any, anneal_steps: int, **kwargs: Any) -> None:
        check_count("anneal_steps", anneal_steps, 0)
        super().__init__(*args, **kwargs)
        self.anneal_steps = anneal_steps
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return super().settings | {"anneal_steps": self.anneal_steps}

    def penalise(self, batch: Outputs) -> Tensor:
        """Mean over environments with two cells or more, in units of the full weight."""
        slopes = []
        for part in batch.by_environment():
            if len(part.y) > 1:
                chosen = part.logits.gather(1, part.y[:, None])[:, 0]
                slope = (part.logits.softmax(1) * part.logits).sum(1) - chosen
                slopes.append(slope[::2].mean() * slope[1::2].mean())
        self.updates += 1
        annealed = torch.where(self.updates > self.anneal_steps, 1.0, 1 / max(self.penalty, 1.0))
        return annealed * torch.stack(slopes).mean() if slopes else batch.logits.new_zeros(())


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
        Training batches at a weight of 1 before that (DomainBed's 500 by default). The optimiser goes on with what it
        knows, where DomainBed starts it anew.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        ``image_size``, ``intensity``, ``standardize``, ``augment``, see :class:`scbd.nn.Preprocess`.

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

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "resnet18",
        penalty: float = 100.0,
        anneal_steps: int = 500,
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess, penalty=penalty, anneal_steps=anneal_steps)
