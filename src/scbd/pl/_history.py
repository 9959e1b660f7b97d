"""Training curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

_PANELS = {
    "loss": "loss",
    "supervised_c": "supervised loss of z_c",
    "supervised_s": "supervised loss of z_s",
    "invariance_c": "invariance loss of z_c",
}
_HEALTH = {"z_c_spread": "spread of z_c (0: collapsed)", "z_c_effective_rank": "effective rank of z_c"}


def history(history: Mapping[str, pd.DataFrame], *, ceiling: float | None = None) -> np.ndarray:
    """Draw training and validation losses by step, and how alive z_c is.

    Parameters
    ----------
    history
        ``model.history``: one frame a metric, indexed by step.
    ceiling
        Supervised loss of a collapsed embedding, drawn as a line: ``model.health["ceiling"]``.

    Returns
    -------
    Axes, one a panel.

    Raises
    ------
    ValueError
        If the history is empty.

    Examples
    --------
    >>> axes = scbd.pl.history(model.history, ceiling=model.health["ceiling"])
    """
    import matplotlib.pyplot as plt

    panels = [name for name in _PANELS if f"train_{name}" in history]
    health = [name for name in _HEALTH if name in history]
    if not panels:
        msg = "The history is empty: train the model first."
        raise ValueError(msg)
    n = len(panels) + len(health)
    figure, axes = plt.subplots(
        -(-n // 3), min(n, 3), figsize=(12, 3 * -(-n // 3)), squeeze=False, layout="constrained"
    )
    for ax, name in zip(axes.flat, panels, strict=False):
        for part, style in (
            ("train", {"lw": 1, "color": "#56B4E9"}),
            ("validation", {"marker": "o", "ms": 3, "color": "k"}),
        ):
            if f"{part}_{name}" in history:
                frame = history[f"{part}_{name}"]
                ax.plot(frame.index, frame.iloc[:, 0].astype(float), label=part, **style)
        if ceiling is not None and name == "supervised_c":
            ax.axhline(ceiling, ls="--", color="#D55E00", label="collapsed")
        ax.set(title=_PANELS[name], xlabel="step")
        ax.legend(frameon=False)
    for ax in axes.flat:
        ax.locator_params(axis="x", nbins=5)  # numbers of long runs are wide
    for ax, name in zip(list(axes.flat)[len(panels) :], health, strict=False):
        frame = history[name]
        ax.plot(frame.index, frame.iloc[:, 0].astype(float), "ko-", ms=3)
        ax.set(title=_HEALTH[name], xlabel="step", ylim=(0, None))
    for ax in list(axes.flat)[n:]:
        ax.set_axis_off()
    return axes.flatten()[:n]
