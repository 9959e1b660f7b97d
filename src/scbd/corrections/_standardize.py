"""Standardisation of features within each environment, a simple correction for effects of environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._shared.linear_maps import mean_and_inverse_deviation, relative_rounding_error
from scbd.corrections._tables import environment_codes, log_constant_features, read_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def standardize_by_environment(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    scale: bool = True,
) -> np.ndarray:
    """Standardise each feature to mean 0 and variance 1 within each environment.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls. If given, mean and variance are estimated from the
        controls, otherwise from all cells. If environments contain different perturbations, standardisation by controls
        preserves the effects of perturbations, whereas standardisation by all cells removes part of these effects.
    fit
        Cells from which mean and variance may be estimated, as a boolean mask ``(N,)`` or row numbers. Default: all
        cells. Each environment needs at least two of these cells (two controls, if ``controls`` are given). To correct
        a test plate, include the controls of this plate in ``fit``.
    scale
        Whether to divide by the standard deviation, in addition to subtracting the mean. Features that are constant in
        an environment, or vary only by the rounding of their dtype, are not divided; a log message names these
        features.

    Returns
    -------
    Standardised features, float32 ``(N, D)``.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, or an environment has fewer than two cells from which
        mean and variance can be estimated.

    Examples
    --------
    >>> features = np.array([[1.0], [3.0], [11.0], [13.0]])  # the second well is brighter
    >>> scbd.corrections.standardize_by_environment(features, ["A1", "A1", "A2", "A2"], scale=False).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    table = read_table(features, fit=fit, controls=controls)
    codes, names = environment_codes(environments, table)
    corrected = np.empty(table.features.shape, dtype=np.float32)
    constant = np.zeros(table.features.shape[1], dtype=bool)
    for code in range(len(names)):
        here = codes == code
        mean, factor = mean_and_inverse_deviation(table.features[here & table.reference])
        centred = table.features[here] - mean
        # Centred values of constant features are set to 0 if they are only rounding errors. Otherwise, a classifier
        # that rescales features could predict the environment from the rounding errors.
        rounding = relative_rounding_error(table.features.dtype) * np.abs(mean)
        centred[:, (factor == 0) & (np.abs(centred).max(0) <= rounding)] = 0
        corrected[here] = centred * np.where(factor > 0, factor, 1) if scale else centred
        constant |= factor == 0
    if scale:
        log_constant_features(table, constant, "Only centred, in one environment or more,")
    return corrected
