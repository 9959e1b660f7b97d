"""From features as stored to what an encoder takes: one scale for all, and no value beyond all measure."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from scbd._checks import check_number
from scbd._linear_maps import inverse_of_varying

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

# standard deviations of a normal distribution in its median absolute deviation
_MAD = 1.4826
# controls that are enough to take the scale from
_CONTROLS = 16


class FeatureScaling(nn.Module):
    r"""Robust scaling and clipping of features: :math:`(x - \mathrm{median}) / (1.4826\, \mathrm{MAD})`.

    Median and median absolute deviation (MAD) are those of the controls, where these are known, else of all training
    cells: what controls vary by has the same size in every feature. A feature whose MAD is 0, being mostly one value,
    is scaled by its standard deviation; one that controls do not vary in, by what all training cells vary by; and one
    that is constant there, too, becomes 0. Differences of a millionth of a feature's largest value are rounding.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    standardize
        Whether to scale; `False` leaves values as they are.
    clip
        Scaled values are cut off at so many standard deviations; `None` leaves outliers in.

    Attributes
    ----------
    mean, sd
        Buffers of shape ``(F,)``: centre and scale, 0 and 1 until :meth:`fit`; the scale of what is constant is 0.

    Raises
    ------
    ValueError
        If ``clip`` is not above 0.

    Examples
    --------
    >>> scaling = scbd.nn.FeatureScaling(3)
    >>> features = torch.tensor([[1.0, 0.0, 7.0], [2.0, 0.0, 9.0], [3.0, 0.0, 300.0]])
    >>> scaling.fit([features])
    >>> scaling(features)[:, 1]  # was constant
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

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Learn each feature's centre and scale from some rows.

        Parameters
        ----------
        batches
            Features as stored, ``(B, F)`` each.
        controls
            Which of all their rows are controls, boolean ``(N,)``; they count alone if they are at least 16. A log
            message says so if they are fewer.

        Raises
        ------
        ValueError
            If there is no row to learn from, one holds a NaN or an infinity, or no feature varies. A log message says
            how many do not, if some do.
        """
        parts = [batch.float().numpy() for batch in batches]
        if not parts:
            msg = "FeatureScaling.fit was given no features."
            raise ValueError(msg)
        features = np.concatenate(parts)
        if not np.isfinite(features).all():
            msg = (
                "Some cells have missing or infinite features, from which no scale can be learned: drop them, or fill "
                "the values in (np.isfinite(features).all(axis=1) tells which are fine)."
            )
            raise ValueError(msg)
        reference = features
        if controls is not None and controls.sum() >= _CONTROLS:
            reference = features[controls]
        elif controls is not None:
            said = "Features are scaled by all training cells: %d of them are controls, and it takes %d."
            logger.warning(said, controls.sum(), _CONTROLS)
        centre = np.median(reference, axis=0)
        spread = _spread(reference, centre)
        if reference is not features and not spread.all():
            still = spread == 0
            spread[still] = _spread(features, np.median(features, axis=0))[still]
            if n := np.count_nonzero(spread[still]):
                logger.warning("%d features do not vary among controls, and are scaled by all training cells.", n)
        if not spread.any():
            msg = (
                "No feature varies among training cells by more than 32 bits can tell from its size: subtract from "
                "each its mean before."
            )
            raise ValueError(msg)
        if n := np.count_nonzero(spread == 0):
            logger.warning(
                "%d of %d features do not vary among training cells, or by no more than 32 bits can tell from their "
                "size: they are left out. If they do vary, subtract from each its mean before.",
                n,
                len(spread),
            )
        self.mean.copy_(torch.from_numpy(centre))
        self.sd.copy_(torch.from_numpy(spread))
        self.fitted.fill_(True)

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Prepare stored features ``(B, F)`` of any dtype, float32."""
        scaled = self.scaled(features)
        if self.clip is None or not self.standardize:
            return scaled
        # an infinite value is no outlier
        return scaled.clamp(-self.clip, self.clip).masked_fill(scaled.isinf(), math.nan)

    def scaled(self, features: Tensor) -> Tensor:
        """Stored features ``(B, F)`` before anything is cut off, float32."""
        features = features.to(torch.float32)
        if not self.standardize:
            return features
        # divided by infinity, what was constant stays out of everything
        return (features - self.mean) / self.sd.masked_fill(self.sd == 0, math.inf)

    def limits(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows of :meth:`scaled` from elsewhere would be cut off about their own median, ``(F,)`` each.

        Rows that vary less than what was fitted are cut off at as many units.
        """
        assert self.clip is not None
        centre = scaled.median(0).values
        reach = self.clip * (_MAD * (scaled - centre).abs().median(0).values).clamp(min=1)
        return centre - reach, centre + reach

    def measured(self, features: Tensor) -> Tensor:
        """Stored features ``(B, F)`` in the units of :meth:`intensities`, which are their own: not clipped; float32."""
        return features.to(torch.float32)

    def intensities(self, features: Tensor) -> Tensor:
        """What prepared features ``(B, F)`` were before they were scaled."""
        if not self.standardize:
            return features
        return features * self.sd + self.mean


def _spread(features: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """MAD in standard deviations, else the standard deviation, else 0, of each feature ``(F,)``."""
    mad = _MAD * np.median(np.abs(features - centre), axis=0)
    sd = features.std(0, dtype=np.float64)
    kept = [np.where(inverse_of_varying(spread, features) > 0, spread, 0) for spread in (mad, sd)]
    return np.where(kept[0] > 0, *kept)
