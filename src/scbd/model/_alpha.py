"""``alpha="auto"``: as much invariance as misleading environments need, and as what was learned allows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Alpha = float | Literal["auto"]

# tolerated by all that was tried, in nats a standard error: docs/archive/lab_book.md
GENTLE_ALPHA = 0.01
# all of it: where everything that the labels say is learned, and environments change what they mean
_FULL_ALPHA = 0.05
# where they do the same to all labels
_MAIN_EFFECT = 0.005
# where half of it is due: an interaction, as a share of the variance; the environment in z_c, in standard errors of a
# batch
_INTERACTION, _SHOWN = 0.1, 1.0
# batches that are looked back on; for an interaction, which an encoder may soon be rid of
_HORIZON, _A_MOMENT = 50, 10
# a share of the labels below which it is too early to say what new cells take of it
_SOMETHING = 0.02


class AutoAlpha(nn.Module):
    r"""Alpha that follows what z_c has learned, and what environments do to it.

    Environments mislead where they *interact* with labels: a shade is a high digit in one colour, and a low one in the
    other. Such features say most of a label and are wrong elsewhere, and an encoder that reads two of them may hide
    both; all of the dose is due, at all stages. Environments that shift all cells alike mislead nobody; a small dose
    mixes them, and costs little of what cells say.

    .. math:: \alpha = w \cdot 0.05\, q + (1 - w)\, \frac{t^2}{t^2 + 1} \min(0.05\, q,\; 0.005),
              \qquad w = \frac{b^4}{b^4 + 0.1^4}.

    - :math:`q` is the share of what the labels say that z_c tells, from 0 for a point to 1
      (:func:`scbd.nn.share_learned`). Cells that are learned by heart show more than they have to say: it is that of
      training batches, times what validation cells tell in units of as many training cells that are drawn alike
      (:meth:`scbd.data.ImageDataModule.matched_dataloader`), 1 at most. Alpha warms up with learning, and falls where
      it is too much: an embedding that becomes a point has none.
    - :math:`b` is the interaction as a share of the variance, at the stage that has most of it
      (:func:`scbd.nn.environment_effects`): the most that ten batches have shown. It is in the data for ever, also when
      the encoder no longer shows it: what is then left of it is too little to see, and enough to mislead.
    - :math:`t` is by how many standard errors a batch shows the environment in z_c: where it shows none, nothing is
      paid.

    Of :math:`q` and :math:`t`, it is the average over the last fifty training batches or so. No environment that is
    left out is looked at. The state is in buffers: it is saved with the weights, and whatever run goes on with those
    goes on with it.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small", alpha="auto")
    >>> float(model.module.current_alpha)  # nothing has been learned yet
    0.0
    """

    learned: Tensor
    kept: Tensor
    interaction: Tensor
    most_interaction: Tensor
    environment: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("learned", "interaction", "most_interaction", "environment"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("kept", torch.ones(()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # a state of before interactions were looked at: it was given all of the dose, and goes on with it
        if f"{prefix}learned" in state_dict:
            for name, value in (("interaction", 0.0), ("most_interaction", 1.0), ("environment", 0.0)):
                state_dict.setdefault(prefix + name, torch.tensor(value))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def alpha(self) -> Tensor:
        """As of now, a scalar."""
        misled = self.most_interaction**4 / (self.most_interaction**4 + _INTERACTION**4)
        shown = self.environment.clamp(min=0) ** 2
        full = _FULL_ALPHA * self.learned * self.kept
        return misled * full + (1 - misled) * full.clamp(max=_MAIN_EFFECT) * shown / (shown + _SHOWN**2)

    @torch.no_grad()
    def observe(self, learned: Tensor, interaction: Tensor, environment: Tensor) -> None:
        """Look at what a training batch says was learned, and of what environments do, scalars."""
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _HORIZON)
        self.interaction.lerp_(interaction.to(self.learned), 1 / _A_MOMENT)
        self.most_interaction.copy_(torch.maximum(self.most_interaction, self.interaction))
        self.environment.lerp_(environment.to(self.learned), 1 / _HORIZON)

    @torch.no_grad()
    def validate(self, new: Tensor, known: Tensor) -> None:
        """Look at what batches of validation cells and of training cells say, drawn alike, one number each.

        A batch of 0 is one whose labels say nothing.
        """
        of_new, of_known = (shares[shares != 0].to(self.learned) for shares in (new, known))
        if len(of_new) and len(of_known) and of_known.mean() > _SOMETHING:
            self.kept.copy_((of_new.mean() / of_known.mean()).clamp(0, 1))
