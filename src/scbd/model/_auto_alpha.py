"""Automatic adjustment of alpha, the weight of the invariance loss, during training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# maximum alpha, in nats per standard error, in data where environments interact with labels; alpha reaches it when the
# normalised supervised information of z_c is 1
_MAX_ALPHA_INTERACTION = 0.05
# maximum alpha, in nats per standard error, in data where an environment shifts the cells of all labels equally
_MAX_ALPHA_SHIFT = 0.005
# _HALF_WEIGHT_INTERACTION is the interaction of environment and label, as a fraction of the variance, at which alpha is
# halfway between its value for interactions and its value for equal shifts of all labels. _HALF_WEIGHT_EFFECT is the
# effect of the environment on z_c, in standard errors of a batch, at which alpha for equal shifts is half its maximum.
_HALF_WEIGHT_INTERACTION, _HALF_WEIGHT_EFFECT = 0.1, 1.0
# _N_BATCHES_AVERAGED is the number of training batches over which the supervised information of z_c and the effect of
# the environment are averaged. _N_BATCHES_AVERAGED_INTERACTION is the number for the interaction of environment and
# label. It is smaller, because the encoder may remove an interaction within a few batches.
_N_BATCHES_AVERAGED, _N_BATCHES_AVERAGED_INTERACTION = 50, 10
# minimum normalised supervised information of training cells; below it, the ratio of the information of validation
# cells to that of training cells is not updated
_MIN_INFORMATION = 0.02


class AutoAlpha(nn.Module):
    r"""Rule that adapts alpha, the weight of the invariance loss, during training.

    Alpha increases with the information that z_c has learned about the perturbation labels, and with the effect of
    environments on z_c. Two cases are distinguished:

    - Environments *interact* with labels: the same feature indicates different labels in different environments (a
      shade means a high digit in one colour, and a low digit in the other). Such features mislead, and alpha is large.
    - Environments shift the cells of all labels equally. Such a shift does not mislead, and a small alpha suffices to
      mix the environments.

    The formula combines the two cases:

    .. math:: \alpha = w \cdot 0.05\, q + (1 - w)\, \frac{t^2}{t^2 + 1} \min(0.05\, q,\; 0.005),
              \qquad w = \frac{b^4}{b^4 + 0.1^4}.

    - :math:`w`, from 0 to 1, is the weight of the first case. It increases with the interaction :math:`b`.
    - :math:`q` is the normalised supervised information: the information of z_c about the labels, from 0 (z_c is
      collapsed to a point) to 1 (z_c separates all labels). Alpha therefore increases from 0 as z_c learns, and
      decreases if the invariance loss hinders learning. Information from overfitting does not count: the value of
      :math:`q` in training batches is multiplied by the ratio of the information of validation cells to that of
      training cells (at most 1). For this ratio, training cells are drawn in the same way as validation cells
      (:meth:`scbd.data.ImageDataModule.matched_dataloader`).
    - :math:`b` is the interaction of environment and label, as a fraction of the variance. It is computed for every
      intermediate representation of the encoder and for z_c, and the largest value is used. The interaction is averaged
      over about ten batches, and :math:`b` is the maximum of this average so far.
    - :math:`t` is the effect of the environment on z_c, in units of its standard error in one batch.

    :math:`q` and :math:`t` are averages over about the last fifty training batches. The averages are buffers of this
    module and are saved with the weights. A later training run therefore continues with the averages of the earlier
    run.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small", alpha="auto")
    >>> float(model.module.current_alpha)  # before training, z_c has no label information, so that alpha is 0
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
        """Current value of alpha, the weight of the invariance loss, as a scalar tensor."""
        misled = self.most_interaction**4
        shown = self.environment.clamp(min=0) ** 2
        full = _MAX_ALPHA_INTERACTION * self.learned * self.kept
        of_shift = full.clamp(max=_MAX_ALPHA_SHIFT) * (shown / (shown + _HALF_WEIGHT_EFFECT**2))
        return of_shift.lerp(full, misled / (misled + _HALF_WEIGHT_INTERACTION**4))

    @torch.no_grad()
    def observe(self, learned: Tensor, interaction: Tensor, environment: Tensor) -> None:
        """Update the moving averages from which alpha is computed with the values of one training batch.

        Parameters
        ----------
        learned
            Normalised supervised information of z_c in the batch, a scalar.
        interaction
            Interaction of environment and label in the batch, as a fraction of the variance, a scalar.
        environment
            Effect of the environment on z_c in the batch, in standard errors, a scalar.
        """
        self.learned.lerp_(learned.to(self.learned).clamp(min=0), 1 / _N_BATCHES_AVERAGED)
        self.interaction.lerp_(interaction.to(self.learned), 1 / _N_BATCHES_AVERAGED_INTERACTION)
        self.most_interaction.copy_(torch.maximum(self.most_interaction, self.interaction))
        self.environment.lerp_(environment.to(self.learned), 1 / _N_BATCHES_AVERAGED)

    @torch.no_grad()
    def validate(self, new: Tensor, known: Tensor) -> None:
        """Update the ratio by which overfitting lowers alpha.

        This is the ratio of the mean supervised information of validation cells to that of training cells. It is not
        updated if the training cells have nearly no supervised information.

        Parameters
        ----------
        new
            Normalised supervised information of z_c in each batch of validation cells. Values of 0 are ignored, because
            they come from batches whose labels carry no information.
        known
            Normalised supervised information of z_c in each batch of training cells, drawn in the same way as the
            validation cells. Values of 0 are ignored as well.
        """
        of_new, of_known = (shares[shares != 0].to(self.learned) for shares in (new, known))
        if len(of_new) and len(of_known) and of_known.mean() > _MIN_INFORMATION:
            self.kept.copy_((of_new.mean() / of_known.mean()).clamp(0, 1))
