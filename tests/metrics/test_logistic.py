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
