from __future__ import annotations

from typing import Any

import pandas as pd

from scbd.paper._chosen import chosen, setting_of


def runs(values: list[tuple[str, int, float, float]], head: str) -> pd.DataFrame:
    columns = ["system", "seed", "lr", head]
    rows: list[dict[str, Any]] = [dict(zip(columns, value, strict=True)) for value in values]
    return pd.DataFrame(rows)


def test_seeds_are_not_mixed():
    """Chosen seed by seed, the table would show a mixture of both rates."""
    frame = runs([("ERM", 0, 1e-4, 0.9), ("ERM", 0, 1e-3, 0.8), ("ERM", 1, 1e-4, 0.1), ("ERM", 1, 1e-3, 0.7)], "own in")
    found = chosen(frame, ["system"])
    assert found["lr"].tolist() == [1e-3, 1e-3] and found["seed"].tolist() == [0, 1]
    assert chosen(frame.iloc[:0], ["system"]).empty


def test_heads_are_not_mixed():
    """Accuracies of two heads cannot be compared: without all of the own head's, it is the fitted one."""
    frame = runs([("iVAE", 0, 1e-4, 0.99), ("iVAE", 0, 1e-3, 0.5)], "own in").assign(**{"r_c in": [0.8, 0.9]})
    assert chosen(frame, ["system"])["lr"].tolist() == [1e-4]
    frame.loc[1, "own in"] = None
    assert chosen(frame, ["system"])["lr"].tolist() == [1e-3]


def test_settings_are_told_apart_by_what_is_searched():
    frame = pd.DataFrame({"lr": [1e-3, 1e-3], "alpha": ["auto", 0.1], "seconds": [1.0, 2.0]})
    assert setting_of(frame).tolist() == ["0.001 auto", "0.001 0.1"]
