"""Linear maps of features before the encoder, estimated from training cells: whitening and discriminant axes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from scbd._shared.checks import check_choice, check_count, check_number
from scbd._shared.linear_maps import (
    covariance,
    discriminant_axes,
    fit_discriminant_axes,
    fit_whitening_matrix,
    random_rotation,
    span_of_rows,
)

Whitening = Literal["within", "controls", "lda", "plda"]

# weight with which the covariance of label means is shrunk towards a multiple of the identity, since a few hundred
# labels are too few to estimate this covariance in a thousand directions
_SHRINKAGE = 0.1
# variance of label means, in units of the variance within labels, up to which label means differ only by rounding
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
        n_labels = len(np.unique(labels))
        if self.kind == "controls" and (controls is None or controls.sum() < 2):
            msg = (
                "whitening='controls' learns from controls, and there are fewer than two among the training cells: "
                "name them with control=…, or use another whitening."
            )
            raise ValueError(msg)
        if self.kind != "controls" and n_labels == len(labels):
            msg = (
                f"Each of the {len(labels)} training cells has a label of its own, so that variation within "
                "labels is not known. Use replicates, or whitening=None."
            )
            raise ValueError(msg)
        if self.kind in ("lda", "plda") and n_labels < 2:
            msg = f"whitening={self.kind!r} learns what labels differ in, and all training cells have one label."
            raise ValueError(msg)

        basis = span_of_rows(features, self.output_shape[0])
        if basis is None:
            matrix = self._fit_matrix(features, labels, controls, positions)
        else:
            # with far fewer cells than features, the same map is computed faster in the space that the cells span
            centred = features - features.mean(0, dtype=np.float64)
            matrix = basis @ self._fit_matrix(centred @ basis, labels, controls, positions)
        known = controls is not None and controls.any()
        mean = features[controls if known else slice(None)].mean(0, dtype=np.float64)
        self.matrix.copy_(torch.from_numpy(matrix))
        self.offset.copy_(torch.from_numpy(-mean @ matrix))
        self.fitted.fill_(True)

    def forward(self, features: Tensor) -> Tensor:
        """Apply the map to scaled features ``(B, F)``, which gives ``(B, K)``."""
        return features @ self.matrix + self.offset

    def _fit_matrix(
        self, features: np.ndarray, labels: np.ndarray, controls: np.ndarray | None, positions: np.ndarray | None
    ) -> np.ndarray:
        """Compute the matrix ``(D, K)`` of the map for features ``(N, D)`` of training cells.

        ``D`` is the number of features. If there are far fewer cells than features, ``D`` is the dimension of the space
        that the cells span, and ``features`` are coordinates in this space.
        """
        width, size = self.matrix.shape
        groups = None if self.kind == "controls" else labels
        matrix = fit_whitening_matrix(features, groups, controls, positions, self.position_weight, self.regularization)
        if self.kind in ("lda", "plda"):
            weighted = self.kind == "plda"
            axes, variance = fit_discriminant_axes(
                features, labels, matrix, weighted=weighted, shrinkage=_SHRINKAGE, n_components=size, n_features=width
            )
            if variance > _BETWEEN_VARIANCE_TOLERANCE:
                matrix = matrix @ axes
                if weighted:  # after a rotation, scaling each axis does not undo the weights of the axes
                    return matrix @ random_rotation(size)
                return np.pad(matrix, ((0, 0), (0, size - matrix.shape[1])))
        if size < width:
            # the kept directions are those in which the whitened cells have the largest variance; it is large where the
            # variance of all cells exceeds the variance within labels
            matrix = matrix @ discriminant_axes(matrix.T @ covariance(features) @ matrix, n_components=size)
        return matrix
