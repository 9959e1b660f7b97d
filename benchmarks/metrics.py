"""The metrics against what they replace."""

from __future__ import annotations

import numpy as np
import pandas as pd
from _compare import Row, interleaved, timed
from _scale import Scale
from anndata import AnnData
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from scbd.metrics import Relations, relationship_average_precision, relationship_curve, relationship_recall
from scbd.metrics._logistic import fit_logistic
from scbd.metrics._relationships import PERCENTILES


def probe(n: int, repeats: int) -> Row:
    """34 wells from 64 correlated components: scikit-learn's lbfgs against ours, at the same objective."""
    rng = np.random.default_rng(0)
    codes = rng.integers(34, size=n)
    mix = rng.normal(size=(64, 64)) * np.exp(rng.normal(size=64))
    x = ((rng.normal(size=(n, 64)) + 0.35 * rng.normal(size=(34, 64))[codes]) @ mix).astype(np.float32)
    scaler = StandardScaler().fit(x)
    scaled = scaler.transform(x)

    def objective(weight: np.ndarray, bias: np.ndarray) -> float:
        logits = scaled.astype(np.float64) @ weight.T + bias
        logits -= logits.max(axis=1, keepdims=True)
        entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(n), codes]
        return float(entropy.sum() + 0.5 * np.square(weight).sum())

    row, theirs, ours = interleaved(
        lambda: LogisticRegression(max_iter=1000).fit(scaled, codes), lambda: fit_logistic(x, codes), repeats
    )
    mine = objective(ours.weight * scaler.scale_, ours.bias + ours.weight @ scaler.mean_)
    lower = 1 - mine / objective(theirs.coef_, theirs.intercept_)
    same = float((ours.logits(x).argmax(axis=1) == theirs.predict(scaled)).mean())
    row["note"] = f"objective lower by {lower:.1e}, {same:.2%} of predictions equal"
    return {"claim": f"probe, {n:,} × 64 → 34", **row}


def naive_curve(cosine: np.ndarray, related: np.ndarray) -> list[tuple[float, float]]:
    """Lists of Python floats, one threshold after another."""
    square, upper = cosine.ravel().tolist(), np.triu_indices(len(cosine), 1)
    pairs = list(zip(cosine[upper].tolist(), related[upper].tolist(), strict=True))
    n_related = sum(known for _, known in pairs)
    points = []
    for percentile in PERCENTILES:
        high, low = np.percentile(square, percentile), np.percentile(square, 100 - percentile)
        hits = [known for value, known in pairs if value >= high or value <= low]
        points.append((sum(hits) / len(hits), sum(hits) / n_related))
    return points


def curve(n_genes: int, repeats: int) -> Row:
    """Twenty percentiles of all pairs of genes."""
    relations = Relations(*screen(n_genes, n_genes // 4), universe="profiles")
    row, theirs, ours = interleaved(
        lambda: naive_curve(relations.cosine, relations.related), lambda: relationship_curve(relations), repeats
    )
    difference = np.abs(np.array(theirs) - ours[["precision", "recall"]].to_numpy()).max()
    return {"claim": f"curve, {n_genes:,} genes", **row, "difference": float(difference)}


def full(n_genes: int, n_complexes: int, repeats: int) -> Row:
    """Everything a map is scored by, from profiles and network: no naive form ends in reasonable time."""
    profiles, net = screen(n_genes, n_complexes)

    def score() -> None:
        relations = Relations(profiles, net, universe="profiles")
        relationship_curve(relations)
        relationship_recall(relations)
        relationship_average_precision(relations)

    score()
    seconds = [timed(score)[0] for _ in range(repeats)]
    return {
        "claim": f"curve + recall + AP, {n_genes:,} genes, {n_complexes:,} complexes",
        "ours_s": float(np.mean(seconds)),
    }


def screen(n_genes: int, n_complexes: int) -> tuple[AnnData, pd.DataFrame]:
    rng = np.random.default_rng(0)
    genes = [f"G{i}" for i in range(n_genes)]
    members = [(f"c{i}", g) for i in range(n_complexes) for g in rng.choice(genes, rng.integers(2, 12), replace=False)]
    x = rng.normal(size=(n_genes, 64)).astype(np.float32)
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), pd.DataFrame(members, columns=["source", "target"])


def rows(scale: Scale) -> list[Row]:
    n_genes, n_complexes = scale.of((5000, 2700), (60, 20))
    return [
        full(n_genes, n_complexes, scale.repeats),
        curve(scale.of(1000, 60), scale.repeats),
        probe(scale.of(200_000, 400), scale.repeats),
    ]
