"""What reads a label from an embedding: linear classifiers, one of squares and products, neighbours, and nearest means.

All give logits on raw embeddings, so that one probe, with one convention of splits, scores any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from scbd._linear_maps import label_means
from scbd.metrics._average_precision import rounded, unit_rows
from scbd.metrics._logistic import Logistic, fit_logistic
from scbd.metrics._principal_axes import principal_axes

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["linear", "quadratic", "neighbours", "nearest_mean"]

# with squares of all and products of the first: at most 64 + 64 + 120 features, which a few hundred cells allow
_N_COMPONENTS, _N_MULTIPLIED = 64, 16
# in standard deviations: the square of an outlier would outweigh all else
_CLIP = 5.0
_N_NEIGHBOURS = 15
# cosines, or values, held at a time
_BLOCK = 1 << 23
# of a vote: neighbours that are nearer decide between labels with as many votes, and nothing else
_NEARNESS = 1e-3


class Reader(Protocol):
    """A classifier that was fitted."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """From embeddings ``(N, D)`` to scores of labels ``(N, K)``, whose softmax are probabilities."""


def _linear(x: Any, codes: np.ndarray, rows: np.ndarray, seed: int) -> Reader:
    return fit_logistic(x, codes, rows, seed=seed)


class _Quadratic:
    """A linear classifier of whitened components, their squares and products."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray, seed: int) -> None:
        mean, sd, variance, axes = principal_axes(x, rows)
        length = np.sqrt(np.where(variance > 0, variance, 1))
        self._mean, self._matrix = mean, (axes / length / sd[:, None])[:, :_N_COMPONENTS]
        size = min(self._matrix.shape[1], _N_MULTIPLIED)
        self._pairs = np.triu_indices(size, k=1)
        self._model: Logistic = fit_logistic(_Expanded(x, self._expand), codes, rows, seed=seed)

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self._model.logits(self._expand(x))

    def _expand(self, x: np.ndarray) -> np.ndarray:
        v = ((np.asarray(x, dtype=np.float64) - self._mean) @ self._matrix).astype(np.float32).clip(-_CLIP, _CLIP)
        one, two = self._pairs
        return np.concatenate([v, np.square(v), v[:, one] * v[:, two]], axis=1)


class _Expanded:
    """Features that are made of others as they are read."""

    def __init__(self, x: Any, expand: Callable[[np.ndarray], np.ndarray]) -> None:
        self._x, self._expand = x, expand
        self.shape = (len(x), expand(np.asarray(x[:1])).shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        features = self._expand(np.atleast_2d(self._x[rows]))
        return features[0] if isinstance(rows, int | np.integer) else features


class _Neighbours:
    """Votes of the nearest by cosine; of those that are equally near, each has a share of the vote."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray, seed: int) -> None:
        self._unit = unit_rows(np.asarray(x[rows]))
        self._codes, self._n_labels = codes[rows], int(codes[rows].max()) + 1
        self._n = min(_N_NEIGHBOURS, len(rows))

    def logits(self, x: np.ndarray) -> np.ndarray:
        size = max(1, _BLOCK // len(self._unit))
        votes = np.concatenate([self._votes(x[start : start + size]) for start in range(0, len(x), size)])
        # a label without a vote is unlikely, not impossible
        return np.log(votes / self._n + 1e-6)

    def _votes(self, x: np.ndarray) -> np.ndarray:
        cosine = rounded(unit_rows(np.asarray(x)) @ self._unit.T)
        last = np.partition(cosine, -self._n, axis=1)[:, -self._n, None]
        row, cell = np.nonzero(cosine >= last)
        near = cosine[row, cell]
        nearer = near > last[row, 0]
        n_nearer = np.bincount(row, weights=nearer, minlength=len(x))
        n_last = np.bincount(row, minlength=len(x)) - n_nearer
        share = np.where(nearer, 1, ((self._n - n_nearer) / n_last)[row])
        label = row * self._n_labels + self._codes[cell]
        votes = np.bincount(label, weights=share * (1 + _NEARNESS * near), minlength=len(x) * self._n_labels)
        return votes.reshape(len(x), self._n_labels)


class _NearestMean:
    """The label whose mean is nearest: the embedding as it is, one scale for all of it.

    That scale, the variance within labels, is what distances are beside; it decides nothing. Without it, probabilities
    of an embedding in large units are all 0 or 1, and those of one in small units all alike, whatever it tells.
    """

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray, seed: int) -> None:
        learned = np.asarray(x[rows])
        of_row, self._means, counts = label_means(learned, codes[rows])
        self._variance = _variance_within(learned, of_row, self._means, len(learned) - len(counts))

    def logits(self, x: np.ndarray) -> np.ndarray:
        # minus half the squared distance, without the square of the point itself
        return (np.asarray(x) @ self._means.T - np.square(self._means).sum(1) / 2) / self._variance


def _variance_within(x: np.ndarray, codes: np.ndarray, means: np.ndarray, freedom: int) -> float:
    """Of a component around the mean of its label; where there is none, that of the means; of a point, 1."""
    size = max(1, _BLOCK // x.shape[1])
    parts = (slice(start, start + size) for start in range(0, len(x), size))
    squares = sum(float(np.square(x[part] - means[codes[part]]).sum()) for part in parts)
    within, between = squares / max(1, freedom) / x.shape[1], float(np.square(means - means.mean(0)).mean())
    eps = np.finfo(x.dtype if x.dtype.kind == "f" else np.float64).eps
    rounding = float(np.square(eps * means).mean())
    return within if within > rounding else between if between > rounding else 1.0


READERS: dict[Kind, Callable[[Any, np.ndarray, np.ndarray, int], Reader]] = {
    "linear": _linear,
    "quadratic": _Quadratic,
    "neighbours": _Neighbours,
    "nearest_mean": _NearestMean,
}


def check_kinds(*kinds: str) -> None:
    """Raise a ValueError that names the probes there are, if one is not known."""
    for kind in kinds:
        if kind not in READERS:
            msg = f"kind={kind!r} is not known: use one of {', '.join(map(repr, READERS))}."
            raise ValueError(msg)
