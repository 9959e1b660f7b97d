from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.feature_blobs import blobs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from scbd.metrics import _probes as module
from scbd.metrics import batch_probe, benchmark, label_probe, predict_labels
from scbd.metrics._probes import (
    READERS,
    Logistic,
    choose_probe_groups,
    fit_logistic,
    macro_f1,
    principal_axes,
    resolve_probe_groups,
    split_groups,
)


def test_label_probe_separable_labels_scores_near_one():
    z, labels = blobs()
    scores = label_probe(z, labels)
    assert set(scores) == {"f1", "auroc", "accuracy", "chance_f1"}
    assert min(scores["f1"], scores["auroc"], scores["accuracy"]) > 0.99
    assert 0.1 < scores["chance_f1"] < 0.4
    alone = labels.astype(object)
    alone[0] = "a label of one cell is left out"
    assert label_probe(z, alone)["accuracy"] > 0.99


def test_label_probe_random_labels_scores_at_chance():
    z, _ = blobs(4000)
    labels = np.random.default_rng(1).integers(4, size=4000)
    scores = label_probe(z, labels)
    assert abs(scores["accuracy"] - 0.25) < 0.05
    assert abs(scores["auroc"] - 0.5) < 0.05
    assert abs(scores["f1"] - scores["chance_f1"]) < 0.08


def test_label_probe_few_cells_chance_is_averaged():
    """With two labels and few cells, the score of one permutation lies between a third and two thirds."""
    z = np.random.default_rng(0).normal(size=(120, 8))
    chance = [label_probe(z, np.arange(120) % 2, seed=seed)["chance_f1"] for seed in range(20)]
    assert np.std(chance) < 0.06 and abs(np.mean(chance) - 0.5) < 0.05


def test_label_probe_seed_and_max_cells_determine_scores():
    z, labels = blobs(distance=1.0)
    assert label_probe(z, labels, seed=1) == label_probe(z, labels, seed=1)
    assert label_probe(z, labels, seed=1) != label_probe(z, labels, seed=2)
    assert label_probe(z, labels, max_cells=100) != label_probe(z, labels)


def test_predict_labels_nearest_mean_uses_unscaled_embedding():
    """Labels differ in a direction of small variance, which a linear classifier uses and the nearest mean does not."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=400)
    z = np.stack([0.01 * labels + 0.001 * rng.normal(size=400), rng.normal(size=400)], axis=1)
    assert (predict_labels(z, labels, z) == labels).mean() > 0.99
    assert (predict_labels(z, labels, z, classifier="nearest_mean") == labels).mean() < 0.7


def test_predict_labels_nearest_mean_is_equal_to_naive():
    rng = np.random.default_rng(0)
    z, labels = 5 + 3 * rng.normal(size=(300, 4)), np.repeat(["a", "b", "c"], 100)
    z[100:] *= np.repeat([1.3, 2], 100)[:, None]
    means = np.stack([z[labels == name].mean(axis=0) for name in "abc"])
    expected = np.array(list("abc"))[np.linalg.norm(z[:, None] - means, axis=2).argmin(axis=1)]
    np.testing.assert_array_equal(predict_labels(z, labels, z, classifier="nearest_mean"), expected)


def test_label_probe_groups_are_not_split():
    """A label that follows from the group is predictable in seen groups, but not in unseen groups."""
    rng = np.random.default_rng(0)
    group = rng.integers(40, size=2000)
    z = 5 * rng.normal(size=(40, 60))[group] + rng.normal(size=(2000, 60))
    labels = (group % 2).astype(str)
    assert label_probe(z, labels)["accuracy"] > 0.95
    assert label_probe(z, labels, groups=group)["accuracy"] < 0.8


@pytest.mark.parametrize(("n_labels", "n_groups"), [(3, 2), (20, 2), (20, 4)])
def test_label_probe_perfect_embedding_unseen_groups_scores_one(n_labels, n_groups):
    """Genes are perfectly separable, and each gene has guides both for training and for testing."""
    guide = np.repeat(np.arange(n_labels * n_groups), 10)
    gene = guide // n_groups
    scores = label_probe(np.eye(n_labels)[gene], gene, groups=guide)
    assert scores["f1"] == scores["accuracy"] == scores["auroc"] == 1


def test_label_probe_label_of_one_group_is_excluded_and_logged(caplog):
    guide = np.repeat(np.arange(9), 10)
    gene = np.minimum(guide // 2, 3)
    gene[guide == 8] = 4
    with caplog.at_level(logging.WARNING, logger="scbd"):
        assert label_probe(np.eye(5)[gene], gene, groups=guide)["f1"] == 1
    assert "excludes 1 of 5 labels" in caplog.text


def test_label_probe_train_mask_or_rows_selects_training_cells():
    z, labels = blobs()
    train = np.arange(600) < 300
    wrong = np.where(train, labels, "w0")
    assert label_probe(z, labels, train=train)["accuracy"] > 0.99
    assert label_probe(z, labels, train=np.flatnonzero(train)) == label_probe(z, labels, train=train)
    assert label_probe(z, wrong, train=train)["accuracy"] == pytest.approx((labels[300:] == "w0").mean(), abs=0.02)


def test_label_probe_max_cells_training_and_test_are_disjoint():
    """Labels can only be memorised, so a cell in both training and test would be predicted correctly."""
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(600, 400)), rng.integers(2, size=600)
    assert label_probe(z, labels, max_cells=500)["accuracy"] < 0.6


Z, LABELS = blobs(40)
BAD: list[tuple[str, Any]] = [
    ("40 embeddings and 39 labels", lambda: label_probe(Z, LABELS[:39])),
    ("two labels with two cells", lambda: label_probe(Z, ["a"] * 39 + ["b"])),
    ("1 of 40 cells have no label", lambda: label_probe(Z, [None, *LABELS[1:]])),
    ("10 of 40 cells have no label", lambda: label_probe(Z, ["a"] * 15 + ["b"] * 15 + [np.nan] * 10)),
    ("train_fraction=1.5", lambda: label_probe(Z, LABELS, train_fraction=1.5)),
    ("fewer than two labels", lambda: label_probe(Z, LABELS, train=LABELS == "w0")),
    ("train names a row twice", lambda: label_probe(Z, LABELS, train=np.arange(40) % 2)),
    ("cells in one group only", lambda: label_probe(Z, LABELS, groups=LABELS)),
    ("40 labels and 39 groups", lambda: label_probe(Z, LABELS, groups=LABELS[:39])),
    ("1 of 40 cells have no group", lambda: label_probe(Z, LABELS, groups=[None, *range(39)])),
    ("two different labels", lambda: predict_labels(Z, ["a"] * 40, Z)),
    ("classifier='tree'", lambda: predict_labels(Z, LABELS, Z, classifier="tree")),  # type: ignore[arg-type]
    ("kind='cubic'", lambda: label_probe(Z, LABELS, kind="cubic")),  # type: ignore[arg-type]
    (r"shape \(40,\)", lambda: label_probe(Z[:, 0], LABELS)),
    ("8 components, .* 5", lambda: predict_labels(Z, LABELS, Z[:, :5])),
    ("infinite values in 2 of 40", lambda: predict_labels(Z, LABELS, np.where(np.arange(40)[:, None] < 2, np.inf, Z))),
    ("NaN .* in 1 of 40", lambda: label_probe(np.where(np.arange(40)[:, None] < 1, np.nan, Z), LABELS)),
]


@pytest.mark.parametrize(("names", "call"), BAD, ids=[names for names, _ in BAD])
def test_label_probe_and_predict_labels_invalid_input_raises(names, call):
    with pytest.raises(ValueError, match=names):
        call()


def test_macro_f1_is_equal_to_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(20):
        truth, predicted = rng.integers(6, size=30), rng.integers(8, size=30)
        assert macro_f1(truth, predicted) == pytest.approx(f1_score(truth, predicted, average="macro", zero_division=0))


@given(st.integers(0, 1000), st.integers(2, 60), st.integers(2, 6), st.sampled_from([1, 2, 50]))
def test_mean_auroc_is_equal_to_scikit_learn(seed, n, n_labels, n_values):
    """Scores may tie, labels may have no cell, and cells may have no label."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(-1, n_labels + 1, size=n)
    logits = rng.integers(n_values, size=(n, n_labels)) / 7
    scores = softmax(logits, axis=1)
    expected = [
        roc_auc_score(truth == label, scores[:, label]) for label in range(n_labels) if 0 < (truth == label).sum() < n
    ]
    identity = Logistic(np.eye(n_labels), np.zeros(n_labels), np.zeros(n_labels))
    found = module._mean_auroc(identity, logits, truth, rng.permutation(n), n_labels)
    assert found == pytest.approx(np.mean(expected) if expected else np.nan, abs=1e-12, nan_ok=True)


def test_batch_probe_one_or_several_columns_scores_crossed_labels():
    z, wells = blobs()
    adata = AnnData(obs=pd.DataFrame({"well": wells, "plate": ["a", "b"] * 300}, index=[str(i) for i in range(600)]))
    adata.obsm["Z"] = z
    assert batch_probe(adata, "Z", "well") == label_probe(z, wells)
    assert batch_probe(adata, "Z", ["plate", "well"])["f1"] < 0.7
    assert batch_probe(adata, "Z", "well", group_key="plate")["accuracy"] > 0.99
    with pytest.raises(KeyError, match="X_scbd_c"):
        batch_probe(adata, "X_scbd_c", "well")
    with pytest.raises(KeyError, match="plates"):
        batch_probe(adata, "Z", "plates")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=2, max_size=60),
    st.floats(0.05, 0.95),
    st.integers(0, 9),
)
def test_split_groups_test_labels_are_learned_from_other_groups(cells, fraction, seed):
    codes, groups = np.array(cells).T
    learned, test = split_groups(codes, groups, fraction, np.random.default_rng(seed))
    assert not set(groups[learned]) & set(groups[test])
    assert set(codes[learned]) == set(codes[test])
    in_one_group = {code for code in codes if len(set(groups[codes == code])) == 1}
    assert not in_one_group & set(codes[learned])


@given(st.integers(2, 9), st.floats(0.05, 0.95), st.integers(0, 9))
def test_split_groups_nested_groups_are_split_within_each_label(n_groups, fraction, seed):
    codes = np.repeat(np.arange(4), 3 * n_groups)
    groups = np.repeat(np.arange(4 * n_groups), 3)
    learned, test = split_groups(codes, groups, fraction, np.random.default_rng(seed))
    assert (learned ^ test).all()
    wanted = np.clip(round(fraction * n_groups), 1, n_groups - 1)
    assert [len(set(groups[learned & (codes == code)])) for code in range(4)] == [wanted] * 4


def test_split_groups_all_groups_are_equally_likely():
    codes, groups = np.repeat([0, 1], 8), np.arange(16) // 2
    rng = np.random.default_rng(0)
    learned = np.mean([split_groups(codes, groups, 0.5, rng)[0] for _ in range(400)], axis=0)
    np.testing.assert_allclose(learned, 0.5, atol=0.1)


def make_arrayed_screen(n_wells: int = 60, n_genes: int = 20, n_cells: int = 40, seed: int = 0) -> AnnData:
    """Make wells of one gene each, with an embedding that encodes only the well and one that encodes only the gene."""
    rng = np.random.default_rng(seed)
    well = np.repeat(np.arange(n_wells), n_cells)
    gene = well % n_genes
    obs = pd.DataFrame({"well": well, "gene": gene}).astype(str)
    obs.index = obs.index.astype(str)
    noise = rng.normal(size=(2, len(well), 20))
    wells = 3 * rng.normal(size=(n_wells, 20))[well]
    genes = 3 * rng.normal(size=(n_genes, 20))[gene]
    return AnnData(obs=obs, obsm={"well": wells + noise[0], "gene": genes + noise[1]})


def score_probe(adata: AnnData, key: str, group_key: str | None = "auto") -> dict[str, float]:
    groups = resolve_probe_groups(adata, "gene", "well", None, group_key)
    return label_probe(adata.obsm[key], adata.obs["gene"], groups=groups)


def test_label_probe_arrayed_screen_does_not_read_the_well():
    adata = make_arrayed_screen()
    well = score_probe(adata, "well")
    assert well["f1"] < 0.1 and score_probe(adata, "gene")["f1"] > 0.95
    assert score_probe(adata, "well", None)["f1"] > 0.9
    frame = benchmark(adata, ["well"], y_key="gene", e_key="well", n_neighbors=10).set_index("metric")["value"]
    assert frame["y_probe_f1"] == well["f1"] == score_probe(adata, "well", "well")["f1"] and frame["e_probe_f1"] > 0.9


def test_resolve_probe_groups_confounded_design_warns():
    adata = make_arrayed_screen(24, 24, 20)
    with pytest.warns(UserWarning, match="most environments hold one perturbation"):
        score_probe(adata, "well")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_probe(adata, "well", None)
    adata.obs["well"] = (adata.obs["gene"].astype(int) // 6).astype(str)
    with pytest.warns(UserWarning, match="most perturbations lie in one environment only"):
        score_probe(adata, "gene")


def make_pooled_screen(n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gene, e = rng.integers(5, size=n), rng.integers(6, size=n)
    return gene, e, 4 * gene + rng.integers(4, size=n)


def test_choose_probe_groups_pooled_screen_returns_guides():
    gene, e, guide = make_pooled_screen()
    groups, wrong = choose_probe_groups(gene, e, guide)
    assert wrong is None
    np.testing.assert_array_equal(groups, guide)
    assert choose_probe_groups(gene, e, None) == (None, None)
    assert choose_probe_groups(gene, e, gene) == (None, None)  # one guide per gene
    assert choose_probe_groups(gene, None, None) == (None, None)
    assert choose_probe_groups(gene, e, guide % 4) == (None, None)  # guide names that all genes share


def test_choose_probe_groups_arrayed_screen_returns_wells_and_guides():
    """Each gene has two guides, and each guide has two wells of its own."""
    well = np.repeat(np.arange(16), 5)
    guide, gene = well // 2, well // 4
    groups, wrong = choose_probe_groups(gene, well, guide)
    assert groups is not None and wrong is None
    assert len(np.unique(groups)) == 8 and len(set(zip(groups, guide, strict=True))) == 8
    # guides that share all wells of their gene cannot be held out, so wells are held out
    mixed = np.tile(np.arange(5) % 2, 16) + 2 * gene
    np.testing.assert_array_equal(choose_probe_groups(gene, well, mixed)[0], well)


def make_classes_by_variance(n: int = 1500, size: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Make two classes of equal mean, one with twice the standard deviation."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    return rng.normal(size=(n, size)) * (1 + labels[:, None]), labels


def make_classes_by_product(n: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(n, 4))
    return hidden @ rng.normal(size=(4, 4)), (hidden[:, 0] * hidden[:, 1] > 0).astype(int)


def make_classes_by_angle(n: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Make two classes that alternate with the angle of the cell."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, n)
    z = rng.uniform(0.5, 3, (n, 1)) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return z, (angle * 12 / np.pi).astype(int) % 2


@pytest.mark.parametrize(
    ("cells", "kind", "least"),
    [
        (make_classes_by_variance, "quadratic", 0.8),
        (make_classes_by_product, "quadratic", 0.85),
        (make_classes_by_angle, "neighbours", 0.85),
    ],
)
def test_label_probe_nonlinear_kind_separates_what_linear_does_not(cells, kind, least):
    z, labels = cells()
    assert label_probe(z, labels)["accuracy"] < 0.6
    assert label_probe(z, labels, kind=kind)["accuracy"] > least


@pytest.mark.parametrize("kind", READERS)
def test_label_probe_every_kind_reaches_chance_and_certainty(kind):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=900)
    scores = label_probe(rng.normal(size=(900, 5)), labels, kind=kind)
    assert abs(scores["accuracy"] - 1 / 3) < 0.08 and abs(scores["auroc"] - 0.5) < 0.08
    scores = label_probe(rng.normal(size=(900, 5)) + 9 * np.eye(5)[labels], labels, kind=kind)
    assert scores["accuracy"] > 0.99 and scores["auroc"] > 0.99 and scores["chance_f1"] < 0.5
    same = label_probe(np.ones((900, 5), dtype=np.float32), labels, kind=kind)
    assert abs(same["accuracy"] - 1 / 3) < 0.08 and same["auroc"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("kind", READERS)
def test_label_probe_units_and_memory_map_change_nothing(kind, tmp_path):
    z, labels = make_classes_by_variance(400)
    z[:, 0] = 0.5  # a constant component
    first = label_probe(z, labels, kind=kind)
    assert label_probe(64 * z, labels, kind=kind) == pytest.approx(first, abs=0.02)
    np.save(tmp_path / "z.npy", z)
    assert label_probe(np.load(tmp_path / "z.npy", mmap_mode="r"), labels, kind=kind) == first


def test_nearest_mean_reader_matches_spherical_gaussians():
    rng = np.random.default_rng(0)
    labels, means = np.repeat([0, 1, 2], 4000), 20 + 3 * rng.normal(size=(3, 4))
    z = means[labels] + 3 * rng.normal(size=(12_000, 4))
    found = softmax(READERS["nearest_mean"](z, labels, np.arange(12_000)).logits(z[::100]), axis=1)
    distance = np.square(z[::100, None] - means).sum(-1)
    np.testing.assert_allclose(found, softmax(-distance / (2 * 3**2), axis=1), atol=0.05)


def test_nearest_mean_reader_constant_labels_or_point_is_finite():
    """Training cells lie at the mean of their label, or all at a single point."""
    means, labels = np.array([[0.0, 0.1], [1.0, 0.1], [3.0, 0.1]]), np.repeat([0, 1, 2], 5)
    new = np.array([[0.4, 0.0], [2.2, 0.0]])
    one, two = (READERS["nearest_mean"](s * means[labels], labels, np.arange(15)).logits(s * new) for s in (1, 1e5))
    np.testing.assert_allclose(one, two)
    assert one.argmax(1).tolist() == [0, 2]
    point = READERS["nearest_mean"](np.full((15, 2), 0.1), labels, np.arange(15)).logits(new)
    np.testing.assert_allclose(point, point[:, :1].repeat(3, axis=1), atol=1e-9)


def naive_votes(z: np.ndarray, labels: np.ndarray, new: np.ndarray, n: int) -> np.ndarray:
    cosine = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in z] for a in new]
    nearest = [np.argsort(row)[::-1][:n] for row in cosine]
    return np.array([[np.mean(labels[near] == label) for label in range(labels.max() + 1)] for near in nearest])


def test_neighbours_reader_votes_are_equal_to_naive(monkeypatch):
    rng = np.random.default_rng(0)
    z, labels, new = rng.normal(size=(60, 4)), rng.integers(3, size=60), rng.normal(size=(20, 4))
    reader = READERS["neighbours"](z, labels, np.arange(60))
    expected = naive_votes(z, labels, new, 15)
    np.testing.assert_allclose(softmax(reader.logits(new), axis=1), expected, atol=2e-3)
    whole = reader.logits(new)
    monkeypatch.setattr(module, "_MAX_VALUES_IN_MEMORY", 130)
    np.testing.assert_array_equal(reader.logits(new), whole)


def test_neighbours_reader_tied_cells_share_votes():
    """Ten cells of one label are nearest, then forty cells of two other labels tie, in any order of rows."""
    z = np.repeat([[1.0, 0.0], [0.0, 1.0]], [10, 40], axis=0)
    labels = np.repeat([0, 1, 2], [10, 10, 30])
    for order in (np.arange(50), np.arange(50)[::-1]):
        reader = READERS["neighbours"](z[order], labels[order], np.arange(50))
        shares = softmax(reader.logits(np.array([[2.0, 0.1]])), axis=1)[0]
        np.testing.assert_allclose(shares, [10 / 15, 1.25 / 15, 3.75 / 15], atol=2e-3)


def make_classes(
    n: int, d: int, k: int, *, apart: float, correlated: bool, seed: int = 0, at: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Make equally large classes in float32; if ``correlated``, components have very different scales."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.arange(n) % k)
    x = rng.normal(size=(n, d)) + apart * rng.normal(size=(k, d))[codes]
    mix = rng.normal(size=(d, d)) * np.exp(rng.normal(size=d)) if correlated else np.eye(d)
    return (x @ mix + at).astype(np.float32), codes


def compute_objective(x: np.ndarray, codes: np.ndarray, weight: np.ndarray, bias: np.ndarray, c: float) -> float:
    logits = x @ weight.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    cross_entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), codes]
    return float(cross_entropy.sum() + 0.5 / c * np.square(weight).sum())


@pytest.mark.parametrize(
    ("n", "d", "k", "apart", "c"),
    [
        *((300, 8, 5, 0.7, c) for c in (0.01, 1.0, 100.0)),
        (6 * 100, 32, 100, 1.0, 1.0),
        (20 * 50, 64, 50, 0.7, 1.0),
        (60, 500, 3, 0.3, 1.0),
        (4000, 32, 34, 0.35, 1.0),
    ],
)
@pytest.mark.parametrize("correlated", [False, True])
def test_fit_logistic_optimum_is_equal_to_scikit_learn(n, d, k, apart, c, correlated):
    """Cases include many classes of few cells and more features than cells."""
    x, codes = make_classes(n, d, k, apart=apart, correlated=correlated, at=50)
    scaler = StandardScaler().fit(x.astype(np.float64))
    scaled = scaler.transform(x.astype(np.float64))
    theirs = LogisticRegression(C=c, max_iter=5000, tol=1e-7).fit(scaled, codes)
    ours = fit_logistic(x, codes, c=c)
    best = compute_objective(scaled, codes, theirs.coef_, theirs.intercept_, c)
    assert compute_objective(scaled, codes, ours.weight * scaler.scale_, ours.bias, c) == pytest.approx(best, rel=1e-5)
    assert (ours.logits(x).argmax(axis=1) == theirs.predict(scaled)).mean() > 0.999


def assert_equal_logits(one: Logistic, other: Logistic, x: np.ndarray) -> None:
    np.testing.assert_allclose(one.logits(x), other.logits(x), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 1000), k=st.integers(2, 12), correlated=st.booleans())
@settings(max_examples=8)
def test_fit_logistic_row_order_blocks_and_threads_change_nothing(seed, k, correlated):
    """The order of summation (order of rows, blocks, threads) does not matter."""
    x, codes = make_classes(400, 8, k, apart=0.7, correlated=correlated, seed=seed, at=50)
    expected = fit_logistic(x, codes)
    order = np.random.default_rng(seed).permutation(len(x))
    assert_equal_logits(fit_logistic(x[order], codes[order]), expected, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOGITS_PER_BLOCK", 0)
        patch.setattr(module, "_MIN_CELLS_PER_BLOCK", 37)
        patch.setattr(module, "_MAX_VALUES_IN_MEMORY", 1000)
        assert_equal_logits(fit_logistic(x, codes), expected, x)
    for n_threads in (1, 2):
        with threadpool_limits(n_threads):
            assert_equal_logits(fit_logistic(x, codes), expected, x)


def test_fit_logistic_rows_of_memory_map_are_equal_to_array(tmp_path):
    x, codes = make_classes(3000, 8, 5, apart=0.7, correlated=True)
    rows = np.arange(0, 3000, 2)
    np.save(tmp_path / "x.npy", x)
    assert_equal_logits(
        fit_logistic(np.load(tmp_path / "x.npy", mmap_mode="r"), codes, rows), fit_logistic(x[rows], codes[rows]), x
    )


def test_fit_logistic_too_few_steps_warns():
    x, codes = make_classes(300, 8, 5, apart=0.7, correlated=True)
    with pytest.warns(UserWarning, match="converged in 2 steps"):
        fit_logistic(x, codes, max_iter=2)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_fit_logistic_large_offset_changes_nothing(offset):
    x, codes = make_classes(3000, 8, 5, apart=0.7, correlated=True)
    x = x.astype(np.float64)
    far = fit_logistic(x + offset, codes).logits(x + offset)
    np.testing.assert_allclose(far, fit_logistic(x, codes).logits(x), atol=1e-4)


def test_fit_logistic_constant_component_has_zero_weight():
    x, codes = make_classes(500, 8, 5, apart=0.7, correlated=True)
    flat = np.hstack([x, np.ones((500, 1), np.float32)])
    ours = fit_logistic(flat, codes)
    np.testing.assert_allclose(ours.logits(flat), fit_logistic(x, codes).logits(x), atol=1e-6)
    assert not ours.weight[:, -1].any()


def test_fit_logistic_outlier_does_not_overflow():
    """The other cells need a large weight, with which the logits of the outlier exceed the range of exp."""
    x = np.random.default_rng(0).normal(size=(2000, 1))
    codes = (x[:, 0] > 0).astype(int)
    x[codes == 1] += 1
    x[np.flatnonzero(codes)[0]] = 1000
    ours = fit_logistic(x, codes, c=1e6)
    assert ours.logits(x).max() > 1000
    assert (ours.logits(x).argmax(axis=1) == codes).mean() > 0.99


@pytest.mark.parametrize("shape", [(200, 5), (6, 20)])
def test_principal_axes_of_rows_diagonalise_covariance(shape, monkeypatch):
    """A subset of rows is used, more or fewer than features; the last feature is twice the first."""
    monkeypatch.setattr(module, "_MAX_VALUES_IN_MEMORY", 35)
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1) + 1e5
    x[:, -1] = 2 * x[:, 0]
    rows = np.arange(1, shape[0])
    found = principal_axes(x, rows)
    np.testing.assert_allclose(found.mean, x[rows].mean(axis=0))
    np.testing.assert_allclose(found.sd, x[rows].std(axis=0))
    n_axes = min(shape[1] - 1, shape[0] - 2)
    assert found.axes.shape == (shape[1], n_axes) and (np.diff(found.variance) <= 0).all()
    np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(n_axes), atol=1e-8)
    standard = (x[rows] - found.mean) / found.sd
    np.testing.assert_allclose(np.cov((standard @ found.axes).T, ddof=0), np.diag(found.variance), atol=1e-8)
    np.testing.assert_allclose(standard @ found.axes @ found.axes.T, standard, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_principal_axes_point_returns_one_axis_without_variance(shape):
    found = principal_axes(np.ones(shape), np.arange(shape[0]))
    assert found.variance.tolist() == [0] and found.sd.tolist() == [1] * shape[1]
    assert np.isfinite(found.axes).all()
