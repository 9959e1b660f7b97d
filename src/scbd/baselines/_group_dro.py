"""Group DRO: the worst environment counts most (Sagawa et al., 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from scbd._checks import check_weight
from scbd._keys import E_REGISTRY, Y_REGISTRY
from scbd.baselines._batches import EnvironmentBatches
from scbd.baselines._classifier import ClassifierModel, ClassifierModule
from scbd.model import Losses

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import Tensor, nn

    from scbd.baselines._classifier import Outputs


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
        check_weight("step_size", step_size, "is how fast weights move towards the worst environment")
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
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    step_size
        How fast weights move towards the worst environment; 0.01 in the paper.
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
    _batches = EnvironmentBatches
    _fixed_labels = (Y_REGISTRY, E_REGISTRY)

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
