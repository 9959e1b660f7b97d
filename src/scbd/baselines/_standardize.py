"""Mean 0 and variance 1 in every environment: what a reviewer asks for before a network is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._linear_maps import mean_and_factor
from scbd.baselines._tables import environment_codes, read_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# of a value, below which a difference from the mean of a constant feature is none
_ROUNDING = 1e-6


def standardize_by_environment(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    scale: bool = True,
) -> np.ndarray:
    """Give every environment mean 0 and variance 1, feature by feature.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells mean and variance are taken from, booleans ``(N,)`` or row numbers; all by default. With controls,
        an environment that holds other perturbations keeps what those do.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Every environment needs
        two of them at least: a test plate takes part with its controls.
    scale
        Also divide by the standard deviation; `False` centres only. A feature that is constant in an environment is
        centred only.

    Returns
    -------
    float32 ``(N, D)``.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, or an environment has fewer than two rows to learn from.

    Examples
    --------
    >>> features = np.array([[1.0], [3.0], [11.0], [13.0]])  # the second well is brighter
    >>> scbd.baselines.standardize_by_environment(features, ["A1", "A1", "A2", "A2"], scale=False).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    table = read_table(features, fit=fit, controls=controls)
    codes, names = environment_codes(environments, table)
    corrected = np.empty(table.features.shape, dtype=np.float32)
    for code in range(len(names)):
        here = codes == code
        mean, factor = mean_and_factor(table.features[here & table.reference])
        centred = table.features[here] - mean
        # of what is constant here, rounding is left: a probe that scales it would read the environment from it
        centred[(factor == 0) & (np.abs(centred) <= _ROUNDING * np.abs(mean))] = 0
        corrected[here] = centred * np.where(factor > 0, factor, 1) if scale else centred
    return corrected
