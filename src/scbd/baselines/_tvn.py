"""Controls white, and alike in all environments."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scbd._linear_maps import LinearMap, inverse_of_varying, label_means, whitening
from scbd.baselines._tables import Table, environment_codes, read_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)


def tvn(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike,
    fit: ArrayLike | None = None,
    regularization: float = 0.5,
) -> np.ndarray:
    r"""Typical variation normalisation: make controls white, and alike in all environments.

    Each environment is centred on its own controls. Features are then rotated and scaled such that all controls
    together have unit covariance: what varies among controls is no phenotype, and directions in which they vary little
    count as much as the others. There, the covariance :math:`C_e` of each environment's controls is aligned with that
    of the others by :math:`(C_e + \lambda I)^{-1/2} P` (correlation alignment), with the :math:`P` that leaves all
    controls together white.

    Covariances are shrunk as if as many controls more had been seen as there are features, whose features know nothing
    of each other: many controls are white in the end, few in the directions that they tell of. The units of features do
    not matter.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Only the controls among
        them matter. Every environment needs two of them at least: a test plate takes part with its controls.
    regularization
        :math:`\lambda`, in units of the white controls' variance: how far covariances of single environments are
        trusted. With many times more controls in each than there are features, 0.1 leaves more of the perturbations.

    Returns
    -------
    float32 ``(N, D)``; a column less for each feature that is constant among the controls of every environment, which
    the log tells.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, an environment has fewer than two controls, no feature
        varies among them, or the regularization is not above 0.

    References
    ----------
    Ando, McLean and Berndl (2017), Improving phenotypic measurements in high-content imaging screens. Sun, Feng and
    Saenko (2016), Return of frustratingly easy domain adaptation.

    Examples
    --------
    >>> features = scbd.baselines.pixel_pca(adata, n_components=8)
    >>> controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    >>> scbd.baselines.tvn(features, np.repeat("plate 1", 240), controls=controls).shape
    (240, 8)
    """
    if not regularization > 0:
        msg = f"regularization={regularization}: a covariance of few controls cannot be inverted, give it more than 0."
        raise ValueError(msg)
    table = read_table(features, fit=fit, controls=controls)
    codes, names = environment_codes(environments, table)
    typical = _typical(table, codes)
    n_columns = typical.white.shape[1]
    corrected = np.empty((len(codes), n_columns), dtype=np.float32)
    total = np.zeros((n_columns, n_columns))
    for code in range(len(names)):
        spread = typical.spread_of(code)
        variances, axes = np.linalg.eigh(spread)
        matrix = typical.white @ (axes / np.sqrt(variances + regularization)) @ axes.T
        here = codes == code
        corrected[here] = LinearMap(matrix, -typical.means[code] @ matrix)(table.features[here])
        total += typical.share_of(code) * (axes * (variances / (variances + regularization))) @ axes.T
    variances, axes = np.linalg.eigh(total)
    return LinearMap((axes / np.sqrt(variances)) @ axes.T, np.zeros(n_columns))(corrected)


class _Typical(NamedTuple):
    """How controls vary around the mean of their environment."""

    means: np.ndarray
    """Of each environment's controls, ``(E, D)``."""
    white: np.ndarray
    """From features to where controls of all environments are white, ``(D, K)``."""
    controls: np.ndarray
    """There, the controls, around the means of their environments."""
    codes: np.ndarray
    """The environments of those."""
    shrinkage: float
    """Of covariances, towards that of scaled features which know nothing of each other."""
    unrelated: np.ndarray
    """The variances of such features there, ``(K,)``."""

    def spread_of(self, code: int) -> np.ndarray:
        """Covariance of an environment's controls, shrunk; over environments, the identity on average."""
        own = self.controls[self.codes == code]
        return (1 - self.shrinkage) * own.T @ own / (len(own) - 1) + np.diag(self.shrinkage * self.unrelated)

    def share_of(self, code: int) -> float:
        """Of all that is known of covariances, what an environment knows; they add up to 1."""
        return ((self.codes == code).sum() - 1) / (len(self.codes) - len(self.means))


def _typical(table: Table, codes: np.ndarray) -> _Typical:
    controls, codes = table.features[table.reference], codes[table.reference]
    _, means, _ = label_means(controls, codes)
    centred = controls - means[codes]
    freedom = len(centred) - len(means)
    factor = inverse_of_varying(np.sqrt((centred**2).sum(0) / freedom), controls)
    varying = np.flatnonzero(factor)
    _tell_constant(len(varying), len(factor))
    centred = centred[:, varying] * factor[varying]
    shrinkage = len(varying) / (len(varying) + freedom)
    pooled = centred.T @ centred / freedom
    white = whitening((1 - shrinkage) * pooled + shrinkage * np.eye(len(varying)), 0)
    matrix = np.zeros((len(factor), len(varying)))
    matrix[varying] = factor[varying, None] * white
    return _Typical(means, matrix, centred @ white, codes, shrinkage, (white**2).sum(0))


def _tell_constant(n_varying: int, n: int) -> None:
    if not n_varying:
        msg = "No feature varies among the controls of an environment: there is no typical variation to learn from."
        raise ValueError(msg)
    if n_varying < n:
        logger.info("Left out %d of %d features that are constant among controls.", n - n_varying, n)
