"""Scaling of features by median and median absolute deviation, over the controls if there are enough of them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from scbd._shared.checks import check_number, inflect
from scbd._shared.linear_maps import inverse_deviations
from scbd.nn._environment_scaling import EnvironmentScaling

if TYPE_CHECKING:
    from collections.abc import Iterable


logger = logging.getLogger(__name__)

# standard deviation of a normal distribution, in units of its median absolute deviation (MAD)
_SD_PER_MAD = 1.4826
# minimum number of controls for scaling features by the controls; with fewer controls, all training cells are used
_MIN_CONTROLS = 16


class FeatureScaling(nn.Module):
    r"""Robust scaling and clipping of features: :math:`(x - \mathrm{median}) / (1.4826\, \mathrm{MAD})`.

    Median and median absolute deviation (MAD) of a feature are computed over the controls if there are at least 16,
    otherwise over all training cells. After scaling by controls, the variation of controls has the same size in every
    feature. Some features are scaled differently:

    - A feature whose MAD is 0, because most cells have the same value, is scaled by its standard deviation.
    - A feature that does not vary among controls is scaled by its variation among all training cells.
    - A feature that is constant among all training cells becomes 0.

    Differences that could be due to rounding in the dtype of the features, about a millionth of a feature's largest
    value in float32, do not count as variation.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    standardize
        Whether to scale and clip features. With `False`, features are neither scaled nor clipped.
    clip
        Scaled features are clipped to plus or minus this number of standard deviations. With `None`, they are not
        clipped, so that outliers are kept.

    Attributes
    ----------
    mean, sd
        Centre and scale of each feature, buffers of shape ``(F,)``. They are 0 and 1 before :meth:`fit`. The scale of a
        constant feature is 0.

    Raises
    ------
    ValueError
        If ``clip`` is not above 0.

    Examples
    --------
    >>> scaling = scbd.nn.FeatureScaling(3)
    >>> features = torch.tensor([[1.0, 0.0, 7.0], [2.0, 0.0, 9.0], [3.0, 0.0, 300.0]])
    >>> scaling.fit([features])
    >>> scaling(features)[:, 1]  # the constant feature becomes 0
    tensor([0., 0., 0.])
    """

    image_size = None
    intensity = "none"

    def __init__(self, n_features: int, *, standardize: bool = True, clip: float | None = 20.0) -> None:
        super().__init__()
        if clip is not None:
            check_number("clip", clip)
            if clip == 0:
                msg = "clip=0 leaves nothing of any feature: give a number of standard deviations, or None."
                raise ValueError(msg)
        self.standardize, self.clip = standardize, clip
        self.output_shape = (n_features,)
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("sd", torch.ones(n_features))
        self.register_buffer("fitted", torch.tensor(not standardize))
        self.environments: EnvironmentScaling | None = None

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Estimate the centre and scale of each feature from training cells.

        A warning is logged in three cases: if there are controls but fewer than 16; if some features do not vary among
        controls; if some features do not vary at all, and are therefore excluded (they become 0).

        Parameters
        ----------
        batches
            Batches of features as stored, before any scaling, ``(B, F)`` each.
        controls
            Which cells are controls, boolean ``(N,)``, in the order of the rows of all batches. If at least 16 cells
            are controls, only controls are used.

        Raises
        ------
        ValueError
            If there are no cells, a cell has NaN or infinite features, or no feature varies.
        """
        parts = [batch.float().numpy() for batch in batches]
        if not parts:
            msg = "FeatureScaling.fit was given no features."
            raise ValueError(msg)
        features = np.concatenate(parts)
        if not np.isfinite(features).all():
            msg = (
                "Some cells have missing or infinite features, from which no scale can be estimated: drop them, or "
                "fill the values in (np.isfinite(features).all(axis=1) is True for valid cells)."
            )
            raise ValueError(msg)
        reference = features
        if controls is not None and controls.sum() >= _MIN_CONTROLS:
            reference = features[controls]
        elif controls is not None:
            said = "Features are scaled by all training cells: %d of them %s, and scaling by controls takes %d."
            logger.warning(said, controls.sum(), inflect(controls.sum(), "is a control", "are controls"), _MIN_CONTROLS)
        centre = np.median(reference, axis=0)
        spread = _robust_scale(reference, centre)
        if reference is not features and not spread.all():
            still = spread == 0
            spread[still] = _robust_scale(features, np.median(features, axis=0))[still]
            if n := np.count_nonzero(spread[still]):
                said = "%d %s not vary among controls, and %s scaled by all training cells."
                logger.warning(said, n, inflect(n, "feature does", "features do"), inflect(n, "is", "are"))
        if not spread.any():
            msg = (
                "No feature varies among training cells by more than 32 bits can tell from its size: subtract from "
                "each its mean before."
            )
            raise ValueError(msg)
        if n := np.count_nonzero(spread == 0):
            logger.warning(
                "%d of %d features %s not vary among training cells, or by no more than 32 bits can resolve at %s "
                "size, and %s excluded. To keep a feature that does vary, subtract its mean before.",
                *(n, len(spread), inflect(n, "does", "do"), inflect(n, "its", "their"), inflect(n, "is", "are")),
            )
        self.mean.copy_(torch.from_numpy(centre))
        self.sd.copy_(torch.from_numpy(spread))
        self.fitted.fill_(True)

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scale and clip features ``(B, F)`` as stored, of any dtype; the result is float32."""
        return self._cut(self.scaled(features))

    def scaled(self, features: Tensor) -> Tensor:
        """Scale features ``(B, F)`` without clipping; the result is float32.

        The inputs are features as stored, or features whose scaling was undone by :meth:`intensities`.
        """
        features = features.to(torch.float32)
        if not self.standardize:
            return features
        # a constant feature, whose scale is 0, is divided by infinity instead, so that it becomes 0
        return (features - self.mean) / self.sd.masked_fill(self.sd == 0, math.inf)

    # ``scaled_inputs`` returns the values from which the statistics of environments are estimated. Preprocess has a
    # method of the same name, which takes images as stored; there it differs from the method ``scaled``, which takes
    # intensities.
    scaled_inputs = scaled

    def within(self, prepared: Tensor, features: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Scale features ``(B, F)`` as stored, standardise them per environment, and clip the result.

        ``codes`` are the codes of the cells' environments, ``(B, K)``. The argument ``prepared``, the result of
        :meth:`forward`, is not used, since it is clipped already.
        """
        return self._cut(environments(self.scaled(features), codes))

    def _cut(self, scaled: Tensor) -> Tensor:
        if self.clip is None or not self.standardize:
            return scaled
        # infinite values are invalid, not outliers: they become NaN
        return scaled.clamp(-self.clip, self.clip).masked_fill(scaled.isinf(), math.nan)

    def measured(self, features: Tensor) -> Tensor:
        """Convert features ``(B, F)`` as stored to float32, neither scaled nor clipped.

        The result has the units of :meth:`intensities`.
        """
        return features.to(torch.float32)

    def intensities(self, features: Tensor) -> Tensor:
        """Undo the scaling of features ``(B, F)``, which returns them to the units in which they are stored."""
        if not self.standardize:
            return features
        return features * self.sd + self.mean


def _robust_scale(features: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Compute the scale of each feature, ``(F,)``: 1.4826 MAD, the standard deviation if MAD is 0, or 0 if constant."""
    mad = _SD_PER_MAD * np.median(np.abs(features - centre), axis=0)
    sd = features.std(0, dtype=np.float64)
    kept = [np.where(inverse_deviations(spread, features) > 0, spread, 0) for spread in (mad, sd)]
    return np.where(kept[0] > 0, *kept)
