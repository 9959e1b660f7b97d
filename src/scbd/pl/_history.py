"""Training curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.pl._looks import wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

_SUPERVISED = "{}_supervised_c"
# by the name in the history, with the part of the cells left open
_PANELS = {
    "{}_loss": "loss",
    _SUPERVISED: "supervised loss of z_c",
    "{}_supervised_s": "supervised loss of z_s",
    "{}_invariance_c": "invariance loss of z_c",
    "{}_reconstruction": "reconstruction loss",
    "{}_cycle": "distance of exchanged pictures",
    "decoder_{}_loss": "loss of the decoder",
}
_PARTS: dict[str, dict[str, Any]] = {
    "train": {"lw": 1, "color": "#56B4E9"},
    "validation": {"marker": "o", "ms": 3, "color": "k"},
}
# of a single step, which is no line
_POINT = {"marker": "o", "ms": 3}
# characters of a line above a panel
_TITLE = 23
_HEALTH = {"z_c_spread": "spread of z_c (0: collapsed)", "z_c_effective_rank": "effective rank of z_c"}


def history(history: Mapping[str, pd.DataFrame] | None, *, ceiling: float | None = None) -> np.ndarray:
    """Draw training and validation losses by step, those of a decoder too, and whether z_c has collapsed.

    Parameters
    ----------
    history
        ``model.history``: one frame a metric, indexed by step.
    ceiling
        Supervised loss of a collapsed embedding, where all cells have the same vector: ``model.health["ceiling"]``.
        That is the logarithm of the size of a batch, and is drawn as a line for the batches that the health is measured
        on: of validation, or of training where there is no validation. Larger batches of training have more.

    Returns
    -------
    Axes, one a panel. The legend stands below them.

    Raises
    ------
    ValueError
        If the history is empty, as before training.

    Examples
    --------
    >>> axes = scbd.pl.history(model.history, ceiling=model.health["ceiling"])
    """
    import matplotlib.pyplot as plt

    history = history or {}
    panels = [name for name in _PANELS if name.format("train") in history]
    health = [name for name in _HEALTH if name in history]
    if not panels:
        msg = "The history is empty: train the model first."
        raise ValueError(msg)
    n = len(panels) + len(health)
    lines = -(-n // 2)
    size = 6.4, 2.4 * lines + 0.5
    figure, axes = plt.subplots(lines, min(n, 2), figsize=size, squeeze=False, layout="constrained")
    named: dict[str, Any] = {}
    for ax, name in zip(axes.flat, panels, strict=False):
        drawn = [part for part in _PARTS if name.format(part) in history]
        for part in drawn:
            frame = history[name.format(part)]
            looks = _PARTS[part] | (_POINT if len(frame) == 1 else {})
            named[part], *_ = ax.plot(frame.index, frame.iloc[:, 0].astype(float), label=part, **looks)
        if ceiling is not None and name == _SUPERVISED:
            collapsed = f"collapsed ({drawn[-1]})"
            named[collapsed] = ax.axhline(ceiling, ls="--", color=_PARTS[drawn[-1]]["color"], label=collapsed)
        ax.set_title(wrapped(_PANELS[name], _TITLE), fontsize="small")
        ax.set_xlabel("step")
    # once, below: within a panel, it lies on a line
    figure.legend(named.values(), named, frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    for ax in axes.flat:
        ax.locator_params(axis="x", nbins=3)  # numbers of long runs are wide
        ax.tick_params(labelsize="small")
    for ax, name in zip(list(axes.flat)[len(panels) :], health, strict=False):
        frame = history[name]
        ax.plot(frame.index, frame.iloc[:, 0].astype(float), "ko-", ms=3)
        ax.set_title(wrapped(_HEALTH[name], _TITLE), fontsize="small")
        ax.set(xlabel="step", ylim=(0, None))
    for ax in list(axes.flat)[n:]:
        ax.set_axis_off()
    return axes.flatten()[:n]
