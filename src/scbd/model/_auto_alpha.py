"""The rule that sets alpha during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    pass

# maximum alpha, in nats per standard error, if environments interact with labels: reached at a normalised supervised
# information of 1
_MAX_ALPHA_INTERACTION = 0.05
# maximum alpha, in nats per standard error, if environments shift all labels equally
_MAX_ALPHA_SHIFT = 0.005
# values at which the weights of the rule are 1/2: interaction, as a fraction of the variance; effect of the environment
# on z_c, in standard errors of a batch
_HALF_WEIGHT_INTERACTION, _HALF_WEIGHT_EFFECT = 0.1, 1.0
# lengths of the moving averages, in training batches: of the information and the environment's effect; of the
# interaction, for which the average is shorter because an encoder may soon remove the interaction
_N_BATCHES_AVERAGED, _N_BATCHES_AVERAGED_INTERACTION = 50, 10
# minimum normalised supervised information of training cells before it is compared with that of validation cells
_MIN_INFORMATION = 0.02


class AutoAlpha(nn.Module):
    r"""Rule that adapts alpha, the weight of the invariance loss, during training.

    Alpha grows with the label information that z_c has learned, and with the effect of environments. Two cases are
    distinguished:

    - Environments *interact* with labels: the same feature indicates different labels in different environments (a
      shade means a high digit in one colour, and a low digit in the other). Such features mislead, and alpha is large.
    - Environments shift the cells of all labels equally. Such a shift does not mislead, and a small alpha suffices to
      mix the environments.

    The formula combines the two cases:

    .. math:: \alpha = w \cdot 0.05\, q + (1 - w)\, \frac{t^2}{t^2 + 1} \min(0.05\, q,\; 0.005),
              \qquad w = \frac{b^4}{b^4 + 0.1^4}.

    - :math:`w`, from 0 to 1, is the weight of the first case. It increases with the interaction :math:`b`.
    - :math:`q` is the normalised supervised information of z_c, from 0 (collapsed) to 1. Alpha therefore warms up as
      z_c learns, and decreases if it hinders learning. So that overfitted information does not count, :math:`q` of
      training batches is multiplied by the ratio of the information of validation cells to that of training cells
      (at most 1). For this ratio, training cells are drawn in the same way as validation cells
      (:meth:`scbd.data.ImageDataModule.matched_dataloader`).
    - :math:`b` is the interaction, as a fraction of the variance, at the stage of the encoder where it is largest. The
      interaction is averaged over about ten batches, and :math:`b` is the maximum of this average so far.
    - :math:`t` is the effect of the environment on z_c, in standard errors of a batch.

    :math:`q` and :math:`t` are averages over about the last fifty training batches. The state is kept in buffers. It is
    saved with the weights, and a later run that continues from these weights continues with this state.

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

    @property
    def alpha(self) -> Tensor:
        """Current value of alpha, a scalar."""
        misled = self.most_interaction**4 / (self.most_interaction**4 + _HALF_WEIGHT_INTERACTION**4)
        shown = self.environment.clamp(min=0) ** 2
        full = _MAX_ALPHA_INTERACTION * self.learned * self.kept
        return misled * full + (1 - misled) * full.clamp(max=_MAX_ALPHA_SHIFT) * shown / (
            shown + _HALF_WEIGHT_EFFECT**2
        )

    @torch.no_grad()
    def observe(self, learned: Tensor, interaction: Tensor, environment: Tensor) -> None:
        """Update the moving averages with a training batch.

        Parameters
        ----------
        learned
            Normalised supervised information of z_c, a scalar.
        interaction
            Interaction of environment and label, as a fraction of the variance, a scalar.
        environment
            Effect of the environment on z_c, in standard errors, a scalar.
        """
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _N_BATCHES_AVERAGED)
        self.interaction.lerp_(interaction.to(self.learned), 1 / _N_BATCHES_AVERAGED_INTERACTION)
        self.most_interaction.copy_(torch.maximum(self.most_interaction, self.interaction))
        self.environment.lerp_(environment.to(self.learned), 1 / _N_BATCHES_AVERAGED)

    @torch.no_grad()
    def validate(self, new: Tensor, known: Tensor) -> None:
        """Update the ratio of the supervised information of validation cells to that of training cells.

        Parameters
        ----------
        new, known
            Normalised supervised information of z_c in each batch of validation cells, and in each batch of training
            cells that are drawn in the same way. Values of 0 are ignored: the labels of such a batch carry no
            information.
        """
        of_new, of_known = (shares[shares != 0].to(self.learned) for shares in (new, known))
        if len(of_new) and len(of_known) and of_known.mean() > _MIN_INFORMATION:
            self.kept.copy_((of_new.mean() / of_known.mean()).clamp(0, 1))
