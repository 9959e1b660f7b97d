"""Linear maps of features before the encoder, estimated from training cells: whitening and discriminant axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from scbd._shared.checks import check_choice, check_count, check_number
from scbd._shared.linear_maps import (
    covariance,
    discriminant_axes,
    label_means,
    random_rotation,
    span_of_rows,
    whitening_matrix,
    within_covariance,
)

if TYPE_CHECKING:
    pass

Whitening = Literal["within", "controls", "lda", "plda"]

# weight with which the covariance of label means is shrunk towards a multiple of the identity, since a few hundred
# labels are too few to estimate this covariance in a thousand directions
_SHRINKAGE = 0.1
# variance of label means, in units of the variance within labels, below which label means differ only by rounding
_BETWEEN_VARIANCE_TOLERANCE = 1e-9


class InputTransform(nn.Module):
    r"""Linear map of scaled features, fitted to training cells before training starts and saved with the network.

    Let :math:`S_w` be the covariance of cells around the mean of their label. The argument ``kind`` selects one of four
    maps:

    ``"within"``
        :math:`(S_w + \gamma S_p + \lambda I)^{-1/2}`, up to a rotation (within-class covariance normalisation). After
        this map, variation that does not depend on labels has the same variance in all directions. :math:`S_p` is the
        covariance of the means of controls at each plate position. It is used if controls and positions are given.
        Positions matter if all plates have the same layout: each perturbation then always has the same position, and an
        effect of the position looks like an effect of the perturbation.
    ``"controls"``
        :math:`(S_0 + \lambda I)^{-1/2}`, up to a rotation, with :math:`S_0` the covariance of the controls (sphering).
    ``"lda"``
        The map ``"within"``, followed by a projection on the directions in which the means of labels differ most, all
        with the same scale (linear discriminant analysis with shrinkage). With L labels there are L - 1 such
        directions. All further components of the output are 0.
    ``"plda"``
        The map ``"within"``, followed by a projection on the same directions as in ``"lda"``, each multiplied by
        :math:`b / (b + 1 / n)` (probabilistic linear discriminant analysis). Here :math:`b` is the variance between
        labels in a direction, and :math:`n` is the median number of cells per label. If a profile is the mean of n
        cells of a label, this factor is the proportion of the variance of profiles that is due to labels. Finally the
        axes are rotated by a fixed random rotation, so that scaling each axis (as probes and ``scanpy.pp.scale`` do)
        does not undo the weighting.

    If controls are given, the mean of the controls is mapped to 0, otherwise the mean of all cells. If the means of all
    labels are equal, there are no directions in which they differ, and ``"lda"`` and ``"plda"`` are the same map as
    ``"within"``. This is the case, for example, if plates are the labels and each plate was standardised before.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    kind
        The kind of map: ``"within"``, ``"controls"``, ``"lda"`` or ``"plda"``, see above.
    n_components
        Number of output dimensions ``K``, at most ``F``. The directions with the largest variance are kept; for
        ``"lda"`` and ``"plda"``, the directions with the largest variance between labels. Default: ``F``.
    regularization
        :math:`\lambda`, the variance that is added in all directions, in units of the variance of the scaled features.
    position_weight
        :math:`\gamma`, the weight of the covariance :math:`S_p` between plate positions.

    Attributes
    ----------
    matrix, offset
        Matrix ``(F, K)`` and offset ``(K,)`` of the map, buffers. The output is ``features @ matrix + offset``.

    Raises
    ------
    ValueError
        If ``kind`` is unknown, or a numerical argument is out of range.

    References
    ----------
    Hatch, Kajarekar and Stolcke (2006), Within-class covariance normalization for SVM-based speaker recognition. Ioffe
    (2006), Probabilistic linear discriminant analysis.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> gene = np.repeat(np.arange(4), 50)
    >>> features = (rng.normal(size=(200, 6)) + gene[:, None]).astype(np.float32)
    >>> transform = scbd.nn.InputTransform(6, "plda", n_components=2)
    >>> transform.fit(features, gene)
    >>> transform(torch.from_numpy(features)).shape
    torch.Size([200, 2])
    """

    def __init__(
        self,
        n_features: int,
        kind: Whitening = "plda",
        *,
        n_components: int | None = None,
        regularization: float = 1.0,
        position_weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_choice("whitening", kind, Whitening)
        check_number("regularization", regularization)
        check_number("position_weight", position_weight)
        n_components = n_features if n_components is None else n_components
        check_count("n_components", n_components)
        if n_components > n_features:
            msg = (
                f"n_components={n_components} (n_latent of a linear encoder): there are {n_features} features, and no "
                f"more directions. Give at most {n_features}."
            )
            raise ValueError(msg)
        self.kind, self.regularization, self.position_weight = kind, regularization, position_weight
        self.output_shape = (n_components,)
        self.register_buffer("matrix", torch.eye(n_features, n_components))
        self.register_buffer("offset", torch.zeros(n_components))
        self.register_buffer("fitted", torch.tensor(False))

    matrix: Tensor
    offset: Tensor
    fitted: Tensor

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        controls: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> None:
        """Estimate the matrix and the offset of the map from training cells.

        Parameters
        ----------
        features
            Scaled features of the training cells, ``(N, F)``.
        labels
            Label of each cell, ``(N,)``.
        controls
            Which cells are controls, boolean ``(N,)``. Required for ``"controls"``, otherwise optional.
        positions
            Plate position of each cell, ``(N,)``. Used together with ``controls`` for the covariance :math:`S_p`;
            optional.

        Raises
        ------
        ValueError
            If no label has two cells (unless ``kind`` is ``"controls"``), if all cells have one label (``"lda"`` and
            ``"plda"``), if there are fewer than two controls (``"controls"``), or if ``regularization`` is 0 and the
            covariance has no inverse.
        """
        basis = span_of_rows(features, self.output_shape[0])
        if basis is None:
            matrix = self._matrix(features, labels, controls, positions)
        else:
            # with far fewer cells than features, the same map is computed faster in the space that the cells span
            centred = features - features.mean(0, dtype=np.float64)
            matrix = basis @ self._matrix(centred @ basis, labels, controls, positions)
        known = controls is not None and controls.any()
        mean = features[controls if known else slice(None)].mean(0, dtype=np.float64)
        self.matrix.copy_(torch.from_numpy(matrix))
        self.offset.copy_(torch.from_numpy(-mean @ matrix))
        self.fitted.fill_(True)

    def forward(self, features: Tensor) -> Tensor:
        """Apply the map to scaled features ``(B, F)``, which gives ``(B, K)``."""
        return features @ self.matrix + self.offset

    def _matrix(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        controls: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> np.ndarray:
        """Compute the matrix ``(D, K)`` of the map for features ``(N, D)`` of training cells.

        ``D`` is the number of features. If there are far fewer cells than features, ``D`` is the dimension of the space
        that the cells span, and ``features`` are coordinates in this space.
        """
        spread = self._spread(features, labels, controls, positions)
        matrix = whitening_matrix(spread, self.regularization)
        n_components = self.output_shape[0]
        between = self._between(features, labels, matrix)
        if between is not None:
            # number of cells per profile, where a profile is the mean of all cells of a label
            rows = float(np.median(np.unique(labels, return_counts=True)[1])) if self.kind == "plda" else None
            matrix = matrix @ discriminant_axes(
                between, shrinkage=_SHRINKAGE, n_components=n_components, rows=rows, n_features=len(self.matrix)
            )
            if rows is None:  # means of L labels differ in L - 1 directions; further directions are arbitrary
                matrix[:, len(np.unique(labels)) - 1 :] = 0
            else:  # after a rotation, scaling each axis does not undo the weights of the directions
                matrix = matrix @ random_rotation(n_components)
        elif n_components < len(self.matrix):
            # the kept directions are those in which the whitened cells have the largest variance; it is large where the
            # variance of all cells exceeds the variance within labels
            matrix = matrix @ discriminant_axes(matrix.T @ covariance(features) @ matrix, n_components=n_components)
        return matrix

    def _between(self, features: np.ndarray, labels: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
        """Compute the covariance of the means of labels after whitening by ``matrix``, ``(D, D)``.

        The result is `None` if it is not needed (``kind`` is neither ``"lda"`` nor ``"plda"``), or if all labels have
        the same mean.
        """
        if self.kind not in ("lda", "plda"):
            return None
        _, means, _ = label_means(features, labels)
        if len(means) < 2:
            msg = f"whitening={self.kind!r} learns what labels differ in, and all training cells have one label."
            raise ValueError(msg)
        between = matrix.T @ covariance(means) @ matrix
        return between if np.trace(between) > _BETWEEN_VARIANCE_TOLERANCE * len(self.matrix) else None

    def _spread(
        self, features: np.ndarray, labels: np.ndarray, controls: np.ndarray | None, positions: np.ndarray | None
    ) -> np.ndarray:
        """Compute the covariance that whitening equalises, ``(D, D)``: variation that does not depend on labels.

        It is the covariance of the controls for ``"controls"``, otherwise the covariance within labels. The covariance
        of the means of controls between plate positions is added to the latter if positions are given.
        """
        if self.kind == "controls":
            if controls is None or controls.sum() < 2:
                msg = (
                    "whitening='controls' learns from controls, and there are fewer than two among the training cells: "
                    "name them with control=…, or use another whitening."
                )
                raise ValueError(msg)
            return covariance(features[controls])
        if len(np.unique(labels)) == len(labels):
            msg = (
                f"Each of the {len(labels)} training cells has a label of its own, so that variation within "
                "labels is not known. Use replicates, or whitening=None."
            )
            raise ValueError(msg)
        spread = within_covariance(features, labels)
        if controls is not None and positions is not None and self.position_weight:
            _, means, _ = label_means(features[controls], positions[controls])
            if len(means) > 1:
                spread += self.position_weight * covariance(means)
        return spread
