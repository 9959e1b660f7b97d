r"""Multinomial logistic regression: scikit-learn's objective, in a fraction of its time.

.. math:: \min_{W, b} \; \sum_i \mathrm{CE}(W x_i + b, u_i) + \tfrac{1}{2C} \lVert W \rVert^2

on standardised features :math:`x`. Along their principal axes the penalty stays what it is, and the curvature is nearly
diagonal: that of class :math:`k` along an axis of variance :math:`\lambda` is about
:math:`p_k (1 - p_k) \lambda + 1 / (nC)` a cell. Divided by its root, L-BFGS needs tens of steps in place of hundreds,
whether cells rule (features are then whitened) or the penalty does, as with many classes of few cells each. Starting
from the solution on a subset saves most of the passes over all cells.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._threads import one_blas_thread
from scbd.metrics._principal_axes import PrincipalAxes, principal_axes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scipy.optimize import OptimizeResult
    from torch import Tensor

# cells of the subsets that come before all of them, which are solved roughly; only if there are many more cells, and
# some of each class
_SUBSETS = (4_000, 32_000)
_SUBSET_ITERATIONS = 20
_MANY_MORE, _OF_EACH = 4, 50
# logits that stay in the processor's cache, and cells that are enough for a product of matrices to be fast
_LOGITS, _CELLS = 1 << 18, 128
# values that one thread has read before several have begun
_FEW_VALUES = 1 << 20
# cells read at a time
_BLOCK = 1 << 17
# features are kept between passes up to this size, and made anew from the source beyond
_CACHE_BYTES = 2 << 30
# in tolerances: what another step may gain of the objective where steps end
_GAIN = 5.0
# what scipy says where it took all steps that it was allowed
_UNFINISHED = 1
# of L-BFGS: gradients that it remembers, and a relative change of the objective that float32 cannot tell
_MEMORY, _ROUNDING = 10, 1e-9


@dataclass
class Logistic:
    """A fitted classifier of codes ``0 … K - 1``: logits are ``x @ weight.T + bias``, on raw features ``(N, D)``."""

    weight: np.ndarray
    bias: np.ndarray
    mean: np.ndarray
    """Of what was learned from, ``(D,)``, which is subtracted before anything is multiplied in float32."""
    objective: float

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 ``(N, K)``."""
        at_mean = self.bias + self.weight @ self.mean
        return _centred(x, self.mean) @ self.weight.T.astype(np.float32) + at_mean.astype(np.float32)


def fit_logistic(
    x: Any,
    codes: np.ndarray,
    rows: np.ndarray | None = None,
    *,
    c: float = 1.0,
    max_iter: int = 200,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> Logistic:
    """Fit a classifier of integer codes.

    Parameters
    ----------
    x
        Features ``(N, D)``, an array or a memory-map; read in blocks.
    codes
        ``0 … K - 1`` of all rows of ``x``.
    rows
        Rows to learn from, sorted; all by default.
    c
        Inverse strength of the penalty, as in scikit-learn.
    max_iter
        L-BFGS iterations on all cells.
    tolerance
        Stop when no component of the gradient, averaged over cells, is larger (scikit-learn's rule and default), and
        one more step would gain less than five times as much of the objective: of thousands of classes each has so
        small a gradient that the first says nothing.
    seed
        Seed of the subsets.

    Warns
    -----
    UserWarning
        If the iterations end before.
    """
    rows = np.arange(len(x)) if rows is None else rows
    few = len(rows) * x.shape[1] < _FEW_VALUES
    with one_blas_thread(torch_too=True) if few else nullcontext():
        return _fit(x, codes, rows, c, max_iter, tolerance, seed)


def _fit(x: Any, codes: np.ndarray, rows: np.ndarray, c: float, max_iter: int, tolerance: float, seed: int) -> Logistic:
    n, k = len(rows), int(codes[rows].max()) + 1
    found = principal_axes(x, rows)
    # as it will be subtracted: the bias then takes up the rest
    found = found._replace(mean=found.mean.astype(np.float32).astype(np.float64))
    share = (np.bincount(codes[rows], minlength=k) + 0.5) / (n + 0.5 * k)
    penalty = np.append(np.full(len(found.variance), 1 / (c * n)), 0.0)
    curvature = (share * (1 - share))[:, None] * np.append(found.variance, 1.0) + penalty
    problem = _Problem(penalty, 1 / np.sqrt(np.maximum(curvature, np.finfo(float).tiny)), found.axes, tolerance)
    weight = np.zeros_like(curvature)
    weight[:, -1] = np.log(share)
    order = np.random.default_rng(seed).permutation(n)
    for size in (s for s in _SUBSETS if _MANY_MORE * s < n and _OF_EACH * k < s):
        part = _Rotated(x, codes, rows[np.sort(order[:size])], found)
        weight = problem.minimise(weight, part, _SUBSET_ITERATIONS)[0]
    weight, result = problem.minimise(weight, _Rotated(x, codes, rows, found), max_iter)
    if result.status == _UNFINISHED:
        msg = (
            f"Logistic regression of {n:,} cells and {k:,} classes has not converged in {result.nit} steps: "
            "a better fit to these cells exists, and scores may be a little low."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    raw = weight[:, :-1] @ found.axes.T / found.sd
    return Logistic(raw, weight[:, -1] - raw @ found.mean, found.mean, float(result.fun) * n)


def _centred(x: Any, mean: np.ndarray) -> np.ndarray:
    """Differences from the mean as float32, which would lose the digits of features that are far from the origin."""
    x = np.asarray(x)
    return x - mean.astype(np.float32) if x.dtype == np.float32 else (x - mean).astype(np.float32)


class _Rotated:
    """Blocks of features along their axes, with a one for the bias, and of codes, as often as asked for."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray, found: PrincipalAxes) -> None:
        self._source = x, codes, rows, found.mean, (found.axes / found.sd[:, None]).astype(np.float32)
        self._cache = list(self._read()) if 4 * len(rows) * found.axes.shape[1] <= _CACHE_BYTES else None

    def __len__(self) -> int:
        return len(self._source[2])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._cache) if self._cache is not None else self._read()

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        import torch

        x, codes, rows, mean, matrix = self._source
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            v = np.ones((len(block), matrix.shape[1] + 1), dtype=np.float32)
            np.matmul(_centred(x[block], mean), matrix, out=v[:, :-1])
            yield torch.from_numpy(v), torch.from_numpy(codes[block].astype(np.int64))


class _Problem:
    """The objective a cell, of weights ``(K, R + 1)`` in units in which its curvature is near 1."""

    def __init__(self, penalty: np.ndarray, unit: np.ndarray, axes: np.ndarray, tolerance: float) -> None:
        self._penalty, self._unit, self._axes, self._tolerance = penalty, unit, axes, tolerance
        self._value, self._gradient = 0.0, np.zeros_like(unit)

    def minimise(self, weight: np.ndarray, cells: _Rotated, max_iter: int) -> tuple[np.ndarray, OptimizeResult]:
        """From some weights: better ones, and what scipy says of them; steps end where :meth:`is_solved`."""
        from scipy.optimize import minimize

        def value(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            weight = scaled.reshape(self._unit.shape) * self._unit
            of_cells, gradient = _cross_entropy(cells, weight)
            self._value = of_cells + 0.5 * float((weight * self._penalty * weight).sum())
            self._gradient = gradient + self._penalty * weight
            return self._value, (self._gradient * self._unit).ravel()

        def stop(intermediate_result: OptimizeResult) -> None:
            if self.is_solved():
                raise StopIteration

        options = {"maxiter": max_iter, "maxcor": _MEMORY, "gtol": 0.0, "ftol": _ROUNDING}
        start = (weight / self._unit).ravel()
        with one_blas_thread():
            result = minimize(value, start, jac=True, method="L-BFGS-B", callback=stop, options=options)
        return result.x.reshape(self._unit.shape) * self._unit, result

    def is_solved(self) -> bool:
        """Whether another step would gain little, and the gradient of standardised features is as small as asked."""
        gain = 0.5 * np.square(self._gradient * self._unit).sum()
        if gain > _GAIN * self._tolerance * self._value:
            return False
        of_features, of_bias = self._gradient[:, :-1] @ self._axes.T, self._gradient[:, -1]
        return max(np.abs(of_features).max(initial=0), np.abs(of_bias).max()) <= self._tolerance


def _cross_entropy(cells: _Rotated, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean over cells, and its gradient, ``(K, R + 1)``."""
    import torch

    w = torch.from_numpy(weight.astype(np.float32)).T
    total, gradient = 0.0, torch.zeros(w.shape[1], w.shape[0])
    size = max(_CELLS, _LOGITS // w.shape[1])
    for block in cells:
        for v, label in zip(*(part.split(size) for part in block), strict=True):
            logits = v @ w
            logits -= logits.amax(dim=1, keepdim=True)
            own = logits.gather(1, label[:, None])
            exponential = logits.exp_()
            normaliser = exponential.sum(dim=1, keepdim=True)
            total += float((normaliser.log() - own).sum())
            # residuals are this over the normaliser, by which few features are sooner divided than many classes
            exponential.scatter_add_(1, label[:, None], -normaliser)
            gradient.addmm_(exponential.T, v / normaliser)
    return total / len(cells), gradient.double().numpy() / len(cells)
