from __future__ import annotations

from typing import Any

import pandas as pd

from scbd.paper._systems import screen_systems_report


def row(system: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"dataset": "colored_mnist", "system": system, "seed": seed} | more


def test_systems_of_a_screen_are_told_apart(tmp_path):
    scores = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1, "y_probe_f1": 0.2, "relationship_area": 0.3}
    rows = [row("iVAE", 0, style_posterior=p, **scores) for p in ("xe", "x")] + [row("pixel PCA, TVN", 0, **scores)]
    rows += [row("SCBD", 0, alpha=a, invariance=f, **scores) for a, f in ((8.0, "listing"), ("auto", "variance"))]
    text = screen_systems_report(pd.DataFrame(rows), tmp_path)
    for name in ("iVAE", "iVAE, x only", "pixel PCA, TVN", "listing, alpha 8", "variance, alpha auto"):
        assert f"| {name} |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"trade_off.png", "batch_correction.png"}
