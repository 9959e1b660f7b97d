"""From features as stored to what an encoder takes: one scale for all, and no value beyond all measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from scbd._checks import check_number

if TYPE_CHECKING:
    from collections.abc import Iterable

# standard deviations of a normal distribution in its median absolute deviation
_MAD = 1.4826
# controls that are enough to take the scale from
_CONTROLS = 16


class FeatureScaling(nn.Module):
    r"""Robust scaling and clipping of features: :math:`(x - \mathrm{median}) / (1.4826\, \mathrm{MAD})`.

    Median and median absolute deviation (MAD) are those of the controls, where these are known, else of all training
    cells: what controls vary by has the same size in every feature. A feature whose MAD is 0, being mostly one value,
    is scaled by its standard deviation, and one that is constant becomes 0.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    standardize
        Whether to scale; `False` leaves values as they are.
    clip
        Values are cut off at so many standard deviations; `None` leaves outliers in.

    Attributes
    ----------
    mean, sd
        Buffers of shape ``(F,)``: centre and scale, 0 and 1 until :meth:`fit`.

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
            Which of all their rows are controls, boolean ``(N,)``; they count alone if they are at least 16.

        Raises
        ------
        ValueError
            If there is no row to learn from, or one holds a NaN or an infinity.
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
        if controls is not None and controls.sum() >= _CONTROLS:
            features = features[controls]
        centre = np.median(features, axis=0)
        spread = _MAD * np.median(np.abs(features - centre), axis=0)
        spread = np.where(spread > 0, spread, features.std(0, dtype=np.float64))
        self.mean.copy_(torch.from_numpy(centre))
        # divided by infinity, what was constant stays out of everything
        self.sd.copy_(torch.from_numpy(np.where(spread > 0, spread, np.inf)))
        self.fitted.fill_(True)

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Prepare stored features ``(B, F)`` of any dtype, float32."""
        features = features.to(torch.float32)
        if self.standardize:
            features = (features - self.mean) / self.sd
        return features if self.clip is None else features.clamp(-self.clip, self.clip)

    def intensities(self, features: Tensor) -> Tensor:
        """What prepared features ``(B, F)`` were before they were scaled."""
        if not self.standardize:
            return features
        return features * torch.where(self.sd.isfinite(), self.sd, 0.0) + self.mean
