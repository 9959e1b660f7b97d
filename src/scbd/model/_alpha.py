"""``alpha="auto"``: invariance in proportion to what has been learned."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Alpha = float | Literal["auto"]

# borne by all that was tried, in nats a standard error: docs/research.md
GENTLE_ALPHA = 0.01
# where everything that the labels say is learned
_FULL_ALPHA = 0.05
# batches that are looked back on
_HORIZON = 50
# a share of the labels below which it is too early to say what new cells take of it
_SOMETHING = 0.02


class AutoAlpha(nn.Module):
    r"""Alpha that follows what z_c has learned.

    How much invariance an embedding bears depends on how clear its labels are: where z_c can tell them all, the
    supervised loss has force to spare; where most cells do not show what was done to them, the noise of the invariance
    loss is soon louder than they are. What a run shows of that is :math:`q`, the share of what the labels say that z_c
    tells (:func:`scbd.nn.share_learned`): 0 for a point, 1 at best. Cells that are learned by heart show more than they
    have to say, so that :math:`q` counts as far as validation cells bear it out:

    .. math:: \alpha = 0.05\, \langle \max(q, 0) \rangle\, \frac{\max(q_{new}, 0)}{q_{known}},

    averaged over the last fifty training batches or so, and 0 before the first; :math:`q_{new}` is that of the last
    validation, and :math:`q_{known}` that of as many training cells of the same labels, looked at in the same way
    (:meth:`scbd.data.ImageDataModule.matched_dataloader`). The ratio is at most 1, as it is before the first or without
    validation cells. Alpha warms up with learning, and falls where it is too much: an embedding that becomes a point
    has none. Nothing else is looked at, and no environment that is left out.

    The state is in buffers: it is saved with the weights, and whatever run goes on with those goes on with it.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small", alpha="auto")
    >>> float(model.module.current_alpha)  # nothing has been learned yet
    0.0
    """

    learned: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learned", torch.zeros(()))
        self.register_buffer("kept", torch.ones(()))

    @property
    def alpha(self) -> Tensor:
        """As of now, a scalar."""
        return _FULL_ALPHA * self.learned * self.kept

    @torch.no_grad()
    def observe(self, learned: Tensor) -> None:
        """Look at what a training batch says was learned, a scalar."""
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _HORIZON)

    @torch.no_grad()
    def validate(self, new: Tensor, known: Tensor) -> None:
        """Look at what batches of validation cells and of training cells say, drawn alike, one number each.

        A batch of 0 is one whose labels say nothing.
        """
        of_new, of_known = (shares[shares != 0].to(self.learned) for shares in (new, known))
        if len(of_new) and len(of_known) and of_known.mean() > _SOMETHING:
            self.kept.copy_((of_new.mean() / of_known.mean()).clamp(0, 1))
