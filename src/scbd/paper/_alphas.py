"""Rows by alpha: their order, and what choosing one of them cost."""

from __future__ import annotations

import pandas as pd

from scbd.paper._tables import Column, mean_sd
from scbd.workflows import selection_regret


def by_alpha(frame: pd.DataFrame) -> pd.DataFrame:
    """Sorted by alpha, what finds it itself last."""
    return frame.sort_values("alpha", kind="stable", key=lambda alphas: pd.to_numeric(alphas, errors="coerce"))


def cost_of_choosing(scbd: pd.DataFrame, ins: str, outs: str, what: str) -> str:
    """What choosing alpha without the test environment would have cost, as a paragraph; nothing where nothing varies.

    Parameters
    ----------
    scbd
        Rows of SCBD.
    ins, outs
        Columns of the accuracy to choose by, and of the score that is wanted.
    what
        Name of that score.
    """
    if not {ins, outs, "alpha"} <= set(scbd):
        return ""
    # a seed that is not finished may have one alpha, or none but "auto"
    numbers = pd.to_numeric(scbd["alpha"], errors="coerce")
    scbd = scbd[numbers.groupby(scbd["seed"]).transform("nunique") > 1]
    if scbd.empty:
        return ""
    found = selection_regret(scbd, ins=ins, outs=outs)
    alphas = ", ".join(f"{alpha:g} ({n})" for alpha, n in found["alpha"].value_counts().sort_index().items())
    points = Column("", 100.0, 1)
    text = (
        f"\n\nAlpha as `choose_alpha` takes it from what is seen in distribution, seed by seed: {alphas}. Its {what} "
        f"is {mean_sd(found['regret'], points)} percentage points below that of the best alpha"
    )
    auto = f', that of `alpha="auto"` {mean_sd(found["auto, regret"], points)}' if "auto, regret" in found else ""
    return f"{text}{auto}."
