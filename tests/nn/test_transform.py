"""The linear map before an encoder of features, against naive forms and what it is there for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scbd.nn import InputTransform, _transform


def labelled(n_labels: int = 20, n: int = 30, f: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels differ in two directions, cells within a label mostly in another."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n_labels), n)
    features = rng.normal(size=(n_labels * n, f))
    features[:, 0] += 3 * rng.normal(size=n_labels)[labels]
    features[:, 1] += 2 * rng.normal(size=n_labels)[labels]
    features[:, 2] *= 10
    return features.astype(np.float32), labels


def naive_within(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    centred = np.concatenate([features[labels == u] - features[labels == u].mean(0) for u in np.unique(labels)])
    return centred.T @ centred / (len(features) - len(np.unique(labels)))


def mapped(transform: InputTransform, features: np.ndarray) -> np.ndarray:
    return transform(torch.from_numpy(features)).numpy()


def test_there_are_no_more_discriminants_than_labels_less_one():
    """Beyond, directions are of noise, and would be as long as those of labels."""
    features, labels = labelled(n_labels=4, f=8)
    transform = InputTransform(8, "lda")
    transform.fit(features, labels)
    assert mapped(transform, features)[:, :3].std(0).min() > 0.1 and not mapped(transform, features)[:, 3:].any()


@pytest.mark.parametrize("kind", ["lda", "plda"])
def test_labels_that_differ_in_nothing_leave_directions_to_cells(kind):
    """Plates that were standardised one by one have one mean: nothing but rounding, which is no direction."""
    features, labels = labelled(n_labels=4, f=8)
    means = np.stack([features[labels == u].mean(0) for u in range(4)])
    features -= means[labels]
    transform, within = InputTransform(8, kind), InputTransform(8, "within")
    transform.fit(features, labels)
    within.fit(features, labels)
    one, other = (mapped(t, features) for t in (transform, within))
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1), rtol=1e-4)


def test_what_has_no_inverse_is_said_to():
    features, labels = labelled(f=8)
    features[:, 5] = 0
    for kind in ("within", "controls", "plda"):
        transform = InputTransform(8, kind, regularization=0)
        with pytest.raises(ValueError, match="regularization=0: the covariance has no inverse"):
            transform.fit(features, labels, controls=labels == 0)


@given(seed=st.integers(0, 100), f=st.integers(3, 9))
def test_within_makes_variation_within_labels_white(seed, f):
    features, labels = labelled(f=f, seed=seed)
    transform = InputTransform(f, "within", regularization=0)
    transform.fit(features, labels)
    white = mapped(transform, features).astype(np.float64)
    np.testing.assert_allclose(naive_within(white, labels), np.eye(f), atol=1e-3)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-3)


def test_controls_makes_controls_white():
    features, labels = labelled()
    controls = labels == 0
    transform = InputTransform(8, "controls", regularization=0)
    transform.fit(features, labels, controls)
    white = mapped(transform, features[controls])
    np.testing.assert_allclose(np.cov(white, rowvar=False), np.eye(8), atol=1e-3)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-4)  # centred on controls


def test_discriminants_keep_what_labels_differ_in():
    features, labels = labelled()
    for kind in ("lda", "plda"):
        transform = InputTransform(8, kind, n_components=2, regularization=0.01)
        transform.fit(features, labels)
        found = mapped(transform, features)
        means = np.stack([found[labels == u].mean(0) for u in range(20)])
        assert (means.var(0) / naive_within(found, labels).diagonal() > 2).all()
    gains = np.sqrt(np.square(transform.matrix.numpy()).sum(0))
    assert gains[0] > gains[1]  # what says more of labels counts for more


def test_what_positions_of_controls_differ_by_is_taken_out():
    rng = np.random.default_rng(0)
    n_plates, n_positions = 6, 16
    place = rng.normal(size=(n_positions, 1)) * np.array([[4.0, 0, 0, 0, 0, 0]])
    features = (place + rng.normal(size=(n_plates, n_positions, 6))).reshape(-1, 6).astype(np.float32)
    positions = np.tile(np.arange(n_positions), n_plates)
    controls = positions < 8
    labels = np.where(controls, 0, positions)  # a compound is a position
    sizes = {}
    for weight in (0.0, 3.0):
        transform = InputTransform(6, "within", position_weight=weight)
        transform.fit(features, labels, controls, positions)
        means = np.stack([mapped(transform, features[positions == p]).mean(0) for p in range(8, n_positions)])
        sizes[weight] = means.var(0).sum()
    assert sizes[3.0] < 0.5 * sizes[0.0]


def test_it_begins_as_the_identity_and_is_saved():
    features, labels = labelled()
    transform = InputTransform(8, n_components=3)
    np.testing.assert_array_equal(mapped(transform, features), features[:, :3])
    assert not transform.fitted
    transform.fit(features, labels)
    other = InputTransform(8, n_components=3)
    other.load_state_dict(transform.state_dict())
    assert other.fitted
    np.testing.assert_array_equal(mapped(other, features), mapped(transform, features))


def test_bad_input_is_said():
    features, labels = labelled()
    with pytest.raises(ValueError, match="whitening='zca' is not known: use one of within, controls, lda, plda"):
        InputTransform(8, "zca")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"n_components=9 \(n_latent of a linear encoder\): there are 8 features.*at most 8"
    ):
        InputTransform(8, n_components=9)
    with pytest.raises(ValueError, match="regularization=-1"):
        InputTransform(8, regularization=-1)
    with pytest.raises(ValueError, match="Each of the 600 training cells has a label of its own"):
        InputTransform(8).fit(features, np.arange(600))
    with pytest.raises(ValueError, match="whitening='plda' learns what labels differ in"):
        InputTransform(8).fit(features, np.zeros(600))
    with pytest.raises(ValueError, match="fewer than two among the training cells"):
        InputTransform(8, "controls").fit(features, labels, np.zeros(600, dtype=bool))


@pytest.mark.parametrize("kind", ["within", "controls", "lda", "plda"])
@pytest.mark.parametrize("n_components", [4, 30, 45])
def test_of_few_rows_and_many_features_the_map_is_the_same(monkeypatch, kind, n_components):
    """It is learned among the directions in which rows differ: a wide table took minutes."""
    features, labels = labelled(n_labels=9, n=4, f=100)
    known = {"controls": labels < 3, "positions": np.tile(np.arange(4), 9)}
    new = labelled(n_labels=5, n=2, f=100, seed=1)[0]
    seen: list[int] = []
    decompose = np.linalg.eigh

    def watched(matrix):
        seen.append(len(matrix))
        return decompose(matrix)

    monkeypatch.setattr(np.linalg, "eigh", watched)
    few = InputTransform(100, kind, n_components=n_components)
    few.fit(features, labels, **known)
    assert max(seen) == max(36, n_components)
    monkeypatch.setattr(_transform, "span_of_few", lambda *_: None)
    full = InputTransform(100, kind, n_components=n_components)
    full.fit(features, labels, **known)
    assert max(seen) == 100
    told = 8 if kind in ("lda", "plda") else 35  # as many axes as labels, or rows, differ in; the others are any
    for cells in (features, new):
        one, other = (np.abs(mapped(transform, cells)[:, :told]) for transform in (few, full))
        np.testing.assert_allclose(one, other, atol=1e-3 * other.max())
