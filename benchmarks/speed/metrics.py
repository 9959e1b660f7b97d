"""The metrics against what they replace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from _compare import Row, interleaved
from _scale import Scale
from anndata import AnnData
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from scbd.metrics import Relations, relationship_curve
from scbd.metrics._probes import fit_logistic
from scbd.metrics._relationships import PERCENTILES


@dataclass(frozen=True)
class Case:
    """Cells of classes that lie apart, in standard deviations."""

    n: int
    n_features: int
    n_classes: int
    apart: float
    correlated: bool = False

    def __str__(self) -> str:
        """As a claim names it."""
        kind = "correlated" if self.correlated else "isotropic"
        return f"{self.n:,} × {self.n_features:,} → {self.n_classes:,}, {kind}"


CASES = [
    Case(n=200_000, n_features=64, n_classes=34, apart=0.35, correlated=True),
    Case(n=200_000, n_features=64, n_classes=34, apart=0.35),
    Case(n=8_000, n_features=32, n_classes=34, apart=0.35, correlated=True),
    Case(n=8_000, n_features=32, n_classes=34, apart=0.35),
    Case(n=60, n_features=2_000, n_classes=5, apart=0.35),
    Case(n=12_000, n_features=32, n_classes=2_000, apart=1.0),
    Case(n=40_000, n_features=64, n_classes=2_000, apart=0.7),
]


def probe(case: Case, repeats: int) -> Row:
    """Scikit-learn's lbfgs on standardised components against ours: same penalty, same tolerance."""
    x, codes = labelled(case)
    scaler = StandardScaler().fit(x)
    scaled = scaler.transform(x)

    def objective(weight: np.ndarray, bias: np.ndarray) -> float:
        entropy = 0.0
        for rows in np.array_split(np.arange(len(x)), 1 + x.shape[0] * case.n_classes // 10**7):
            logits = scaled[rows].astype(np.float64) @ weight.T + bias
            logits -= logits.max(axis=1, keepdims=True)
            entropy += (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), codes[rows]]).sum()
        return float(entropy + 0.5 * np.square(weight).sum())

    row, theirs, ours = interleaved(
        lambda: LogisticRegression(max_iter=1000).fit(scaled, codes), lambda: fit_logistic(x, codes), repeats
    )
    mine = objective(ours.weight * scaler.scale_, ours.bias)
    higher = mine / objective(theirs.coef_, theirs.intercept_) - 1
    same = float((ours.logits(x).argmax(axis=1) == theirs.predict(scaled)).mean())
    row["note"] = (
        f"objective {'higher' if higher > 0 else 'lower'} by {abs(higher):.1e}, {same:.2%} of predictions equal"
    )
    return {"claim": f"probe, {case}", **row, "difference": max(higher, 0.0)}


def labelled(case: Case) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(case.n) % case.n_classes)
    x = rng.normal(size=(case.n, case.n_features))
    x += case.apart * rng.normal(size=(case.n_classes, case.n_features))[codes]
    if case.correlated:
        x = x @ (rng.normal(size=(case.n_features, case.n_features)) * np.exp(rng.normal(size=case.n_features)))
    return x.astype(np.float32), codes


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
    cosine, related = relations.unit @ relations.unit.T, relations.known.toarray()
    row, theirs, ours = interleaved(
        lambda: naive_curve(cosine, related), lambda: relationship_curve(relations), repeats
    )
    difference = np.abs(np.array(theirs) - ours[["precision", "recall"]].to_numpy()).max()
    return {"claim": f"curve, {n_genes:,} genes", **row, "difference": float(difference)}


def screen(n_genes: int, n_complexes: int) -> tuple[AnnData, pd.DataFrame]:
    rng = np.random.default_rng(0)
    genes = [f"G{i}" for i in range(n_genes)]
    members = [(f"c{i}", g) for i in range(n_complexes) for g in rng.choice(genes, rng.integers(2, 12), replace=False)]
    x = rng.normal(size=(n_genes, 64)).astype(np.float32)
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), pd.DataFrame(members, columns=["source", "target"])


def rows(scale: Scale) -> list[Row]:
    cases = scale.of(CASES, [Case(n=400, n_features=8, n_classes=5, apart=0.35, correlated=True)])
    return [
        curve(scale.of(1000, 60), scale.repeats),
        *(probe(case, scale.repeats) for case in cases),
    ]
