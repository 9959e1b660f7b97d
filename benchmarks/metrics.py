"""Speed of the metrics against what they replace: both forms interleaved in one process, with the difference.

python benchmarks/metrics.py [--cells 200000] [--repeats 3] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from scbd.metrics import Relations, relationship_average_precision, relationship_curve, relationship_recall
from scbd.metrics._logistic import fit_logistic
from scbd.metrics.relationships import PERCENTILES


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def interleaved(naive: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> tuple[dict[str, Any], Any, Any]:
    ours()  # first calls load libraries
    seconds = np.array([[timed(naive)[0], timed(ours)[0]] for _ in range(repeats)])
    ratios = seconds[:, 0] / seconds[:, 1]
    row = {
        "naive_s": float(seconds[:, 0].mean()),
        "ours_s": float(seconds[:, 1].mean()),
        "ratio": float(ratios.mean()),
        "ratio_sd": float(ratios.std(ddof=1)) if repeats > 1 else float("nan"),
    }
    return row, naive(), ours()


def probe(n: int, repeats: int) -> dict[str, Any]:
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
    row["objective_naive"] = objective(theirs.coef_, theirs.intercept_)
    row["objective_ours"] = objective(ours.weight * scaler.scale_, ours.bias + ours.weight @ scaler.mean_)
    row["same_prediction"] = float((ours.logits(x).argmax(axis=1) == theirs.predict(scaled)).mean())
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


def curve(n_genes: int, repeats: int) -> dict[str, Any]:
    """Twenty percentiles of all pairs of genes."""
    relations = Relations(*screen(n_genes, n_genes // 4), universe="profiles")
    row, theirs, ours = interleaved(
        lambda: naive_curve(relations.cosine, relations.related), lambda: relationship_curve(relations), repeats
    )
    difference = np.abs(np.array(theirs) - ours[["precision", "recall"]].to_numpy()).max()
    return {"claim": f"curve, {n_genes:,} genes", **row, "difference": float(difference)}


def full(n_genes: int, n_complexes: int, repeats: int) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        full(5000, 2700, arguments.repeats),
        curve(1000, arguments.repeats),
        probe(arguments.cells, arguments.repeats),
    ]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(pd.DataFrame(rows).set_index("claim").T.to_string(float_format=lambda value: f"{value:.5g}", na_rep=""))
    print(machine)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
