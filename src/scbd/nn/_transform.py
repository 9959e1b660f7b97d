"""What stands before an encoder of features: a linear map, fitted in closed form, that lets it start well."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from scbd._checks import check_count, check_number
from scbd._linear_maps import covariance, discriminants, label_means, span_of_few, whitening, within_covariance

Whitening = Literal["within", "controls", "lda", "plda"]

# of the covariance of label means towards the identity: a few hundred labels say little of a thousand directions
_SHRINKAGE = 0.1
# variance between labels, in units of that within, below which it is the rounding of means that are alike
_ALIKE = 1e-9


class InputTransform(nn.Module):
    r"""A linear map of scaled features, learned from training rows before the first step, and saved with the network.

    With :math:`S_w` the covariance of cells around the mean of their label,

    ``"within"``
        :math:`(S_w + \gamma S_p + \lambda I)^{-1/2}`, which makes variation that has nothing to do with labels alike in
        all directions (within-class covariance normalisation). :math:`S_p` is the covariance of the controls' means by
        position, where both are known: where every plate has one layout, a position repeats as a perturbation does, and
        would be taken for one.
    ``"controls"``
        The same of the controls alone (sphering).
    ``"lda"``
        After ``"within"``, the directions in which the means of labels differ most, alike in length (linear
        discriminants, shrunken); of L labels there are L - 1, and what is asked for beyond is 0.
    ``"plda"``
        The same, each times :math:`b / (b + 1)`, the share of its variance that belongs to labels (probabilistic
        discriminants).

    The mean of the controls, where they are known, else of all cells, is mapped to 0. Where the means of all labels are
    the same, as those of plates that were standardised one by one, the discriminants have no direction to choose, and
    do what ``"within"`` does.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    kind
        The form, see above.
    n_components
        Dimension ``K`` of what comes out, at most ``F``: the directions of the largest variance, of labels for the
        discriminants.
    regularization
        :math:`\lambda`, in units of the scaled features' variance.
    position_weight
        :math:`\gamma`.

    Attributes
    ----------
    matrix, offset
        Buffers ``(F, K)`` and ``(K,)``.

    Raises
    ------
    ValueError
        If an argument is not known, or out of range.

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
        if kind not in get_args(Whitening):
            msg = f"whitening={kind!r} is not known: use one of {', '.join(get_args(Whitening))}, or None."
            raise ValueError(msg)
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
        """Learn the map.

        Parameters
        ----------
        features
            Scaled features of training rows, ``(N, F)``.
        labels
            Label of each, ``(N,)``.
        controls
            Which of them are controls, boolean ``(N,)``.
        positions
            Position of each on its plate, ``(N,)``.

        Raises
        ------
        ValueError
            If no label has two rows, all rows have one label, or ``"controls"`` has fewer than two controls.
        """
        basis = span_of_few(features, self.output_shape[0])
        if basis is None:
            matrix = self._matrix(features, labels, controls, positions)
        else:  # the same map, learned where there is something to learn: a cube of the rows, not of the features
            centred = features - features.mean(0, dtype=np.float64)
            matrix = basis @ self._matrix(centred @ basis, labels, controls, positions)
        known = controls is not None and controls.any()
        mean = features[controls if known else slice(None)].mean(0, dtype=np.float64)
        self.matrix.copy_(torch.from_numpy(matrix))
        self.offset.copy_(torch.from_numpy(-mean @ matrix))
        self.fitted.fill_(True)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``(B, F)`` to ``(B, K)``."""
        return features @ self.matrix + self.offset

    def _matrix(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        controls: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> np.ndarray:
        """The map of features ``(N, D)``, be it in coordinates of their own, ``(D, K)``."""
        spread = self._spread(features, labels, controls, positions)
        matrix = whitening(spread, self.regularization)
        n_components = self.output_shape[0]
        between = self._between(features, labels, matrix)
        if between is not None:
            gains, n_features = self.kind == "plda", len(self.matrix)
            matrix = matrix @ discriminants(
                between, shrinkage=_SHRINKAGE, n_components=n_components, gains=gains, n_features=n_features
            )
            if not gains:  # beyond what so many labels differ in, directions are of nothing, and as long as the others
                matrix[:, len(np.unique(labels)) - 1 :] = 0
        elif n_components < len(self.matrix):
            # of whitened cells, the directions in which there is more than variation within labels
            matrix = matrix @ discriminants(matrix.T @ covariance(features) @ matrix, n_components=n_components)
        return matrix

    def _between(self, features: np.ndarray, labels: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
        """Covariance of the whitened means of labels, if discriminants are asked for and labels differ in anything."""
        if self.kind not in ("lda", "plda"):
            return None
        _, means, _ = label_means(features, labels)
        if len(means) < 2:
            msg = f"whitening={self.kind!r} learns what labels differ in, and all training cells have one label."
            raise ValueError(msg)
        between = matrix.T @ covariance(means) @ matrix
        return between if np.trace(between) > _ALIKE * len(self.matrix) else None

    def _spread(
        self, features: np.ndarray, labels: np.ndarray, controls: np.ndarray | None, positions: np.ndarray | None
    ) -> np.ndarray:
        """Covariance of what has nothing to do with labels."""
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
