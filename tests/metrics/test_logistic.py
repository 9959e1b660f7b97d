from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler

import scbd.metrics._logistic as module
from scbd.metrics._logistic import fit_logistic
from scbd.metrics._probes import macro_f1


def data(n: int = 3000, k: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated components of very different scale, far from the origin."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(k, size=n)
    mix = rng.normal(size=(8, 8)) * np.exp(rng.normal(size=8))
    return (rng.normal(size=(n, 8)) + 0.7 * rng.normal(size=(k, 8))[codes]) @ mix + 50, codes


def objective(x: np.ndarray, codes: np.ndarray, weight: np.ndarray, bias: np.ndarray, c: float) -> float:
    logits = x @ weight.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    cross_entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), codes]
    return float(cross_entropy.sum() + 0.5 / c * np.square(weight).sum())


@pytest.mark.parametrize("c", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("n", [300, 20_000])
def test_the_optimum_is_scikit_learns(c, n):
    x, codes = data(n)
    scaler = StandardScaler().fit(x)
    theirs = LogisticRegression(C=c, max_iter=5000, tol=1e-8).fit(scaler.transform(x), codes)
    ours = fit_logistic(x, codes, c=c, tolerance=1e-6, max_iter=1000)
    weight = ours.weight * scaler.scale_
    bias = ours.bias + ours.weight @ scaler.mean_
    best = objective(scaler.transform(x), codes, theirs.coef_, theirs.intercept_, c)
    found = objective(scaler.transform(x), codes, weight, bias, c)
    assert found <= best * (1 + 1e-5)
    assert ours.objective == pytest.approx(found, rel=1e-4)
    assert (ours.logits(x).argmax(axis=1) == theirs.predict(scaler.transform(x))).mean() > 0.995


def groups(n: int, d: int, k: int, *, apart: float, correlated: bool) -> tuple[np.ndarray, np.ndarray]:
    """As many cells of each class, float32 as embeddings are."""
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(n) % k)
    x = rng.normal(size=(n, d)) + apart * rng.normal(size=(k, d))[codes]
    mix = rng.normal(size=(d, d)) * np.exp(rng.normal(size=d)) if correlated else np.eye(d)
    return (x @ mix).astype(np.float32), codes


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "k", "apart"),
    [(6 * 400, 32, 400, 1.0), (20 * 300, 64, 300, 0.7), (60, 500, 3, 0.3), (40, 40, 3, 0.3), (4000, 32, 34, 0.35)],
)
def test_at_the_same_tolerance_the_objective_is_as_low(n, d, k, apart, correlated):
    """Many classes of few cells, more features than cells, and features of all kinds."""
    x, codes = groups(n, d, k, apart=apart, correlated=correlated)
    scaler = StandardScaler().fit(x.astype(np.float64))
    scaled = scaler.transform(x.astype(np.float64))
    theirs = LogisticRegression(max_iter=1000).fit(scaled, codes)
    ours = fit_logistic(x, codes)
    best = objective(scaled, codes, theirs.coef_, theirs.intercept_, 1.0)
    weight = ours.weight * scaler.scale_
    assert objective(scaled, codes, weight, ours.bias + ours.weight @ scaler.mean_, 1.0) <= best * 1.001


def test_what_has_not_converged_says_so():
    x, codes = data()
    with pytest.warns(UserWarning, match="of 3,000 cells and 5 classes has not converged in 2 steps"):
        fit_logistic(x, codes, max_iter=2)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_features_far_from_the_origin_keep_their_digits(offset):
    x, codes = data()
    near, far = fit_logistic(x, codes), fit_logistic(x + offset, codes)
    assert (far.logits(x + offset).argmax(axis=1) == near.logits(x).argmax(axis=1)).mean() > 0.999
    assert far.objective == pytest.approx(near.objective, rel=1e-4)


def test_rows_and_blocks_and_memory_maps_change_nothing(tmp_path, monkeypatch):
    x, codes = data()
    rows = np.arange(0, 3000, 2)
    expected = fit_logistic(x[rows], codes[rows], tolerance=1e-6)
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr(module, "_BLOCK", 97)
    monkeypatch.setattr(module, "_CACHE_BYTES", 0)
    ours = fit_logistic(np.load(tmp_path / "x.npy", mmap_mode="r"), codes, rows, tolerance=1e-6)
    np.testing.assert_allclose(ours.weight, expected.weight, rtol=1e-2, atol=1e-3)
    assert ours.objective == pytest.approx(expected.objective, rel=1e-5)


def test_components_without_variance_are_no_trouble():
    x, codes = data(500)
    flat = np.hstack([x, np.ones((500, 1)), x[:, :1]])
    ours = fit_logistic(flat, codes)
    assert np.isfinite(ours.weight).all()
    same = (ours.logits(flat).argmax(axis=1) == fit_logistic(x, codes).logits(x).argmax(axis=1)).mean()
    assert same > 0.98


def test_a_cell_far_outside_does_not_overflow():
    """Where all the others need a large weight, its logits are beyond what exp can take."""
    x = np.random.default_rng(0).normal(size=(2000, 1))
    codes = (x[:, 0] > 0).astype(int)
    x[codes == 1] += 1
    x[np.flatnonzero(codes)[0]] = 1000
    ours = fit_logistic(x, codes, c=1e6)
    assert np.isfinite(ours.objective) and np.isfinite(ours.weight).all()
    assert ours.logits(x).max() > 100
    assert (ours.logits(x).argmax(axis=1) == codes).mean() > 0.99


def test_macro_f1_is_scikit_learns():
    rng = np.random.default_rng(0)
    for _ in range(20):
        truth, predicted = rng.integers(6, size=30), rng.integers(8, size=30)
        assert macro_f1(truth, predicted) == pytest.approx(f1_score(truth, predicted, average="macro", zero_division=0))
