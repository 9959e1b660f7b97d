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


class AutoAlpha(nn.Module):
    r"""Alpha that follows what z_c has learned.

    How much invariance an embedding bears depends on how clear its labels are: where z_c can tell them all, the
    supervised loss has force to spare; where most cells do not show what was done to them, the noise of the invariance
    loss is soon louder than they are. What a run shows of that is :math:`q`, the share of what the labels say that z_c
    tells (:func:`scbd.nn.share_learned`): 0 for a point, 1 at best. So

    .. math:: \alpha = 0.05\, \langle \max(q, 0) \rangle,

    averaged over the last fifty training batches or so, and 0 before the first. Alpha warms up with
    learning, and falls where it is too much: an embedding that becomes a point has none. Nothing else is looked at, and
    no environment that is left out.

    The state is in a buffer: it is saved with the weights, and whatever run goes on with those goes on with it.
    """

    learned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learned", torch.zeros(()))

    @property
    def alpha(self) -> Tensor:
        """As of now, a scalar."""
        return _FULL_ALPHA * self.learned

    @torch.no_grad()
    def observe(self, learned: Tensor) -> None:
        """Look at what a training batch says was learned, a scalar."""
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _HORIZON)
