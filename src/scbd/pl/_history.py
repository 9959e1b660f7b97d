"""Plot of the training curves of a model: losses and diagnostics by training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scbd.pl._style import wrap_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes

_SUPERVISED_NAME = "{}_supervised_c"
# Mapping from the name of the normalised supervised information in the history to the name of the supervised loss. If
# the history has the information, it is drawn in place of the loss, because losses cannot be compared between batch
# sizes.
_INFORMATION_NAMES = {"{}_learned_c": _SUPERVISED_NAME, "{}_learned_s": "{}_supervised_s"}
_INVARIANCE = "{}_invariance_c"
# Name of a curve that is in the history only if the invariance loss is measured in standard errors, as with the form
# "variance". This curve serves only to detect the unit of the loss, and is not drawn.
_IN_STANDARD_ERRORS = "{}_environment_c"
# Range of the invariance loss that is expected by chance, in standard errors. It is drawn as a shaded band.
_CHANCE = (-2, 2)
# Titles of the panels, by the name of the curves in the history; "{}" stands for "train" or "validation". Panels are
# drawn in this order.
_PANELS = {
    "{}_learned_c": "supervised information of z_c (0: collapsed, 1: all)",
    "{}_learned_s": "supervised information of z_s (0: collapsed, 1: all)",
    "{}_loss": "loss",
    _SUPERVISED_NAME: "supervised loss of z_c",
    "{}_supervised_s": "supervised loss of z_s",
    _INVARIANCE: "invariance loss of z_c",
    "{}_reconstruction": "reconstruction loss",
    "{}_cycle": "distance of exchanged pictures",
    "decoder_{}_loss": "loss of the decoder",
}
_STAGE_STYLES: dict[str, dict[str, Any]] = {
    "train": {"lw": 1, "color": "#56B4E9"},
    "validation": {"marker": "o", "ms": 3, "color": "k"},
}
# Marker of a curve that has a value for a single step only. A line cannot be drawn for a single value.
_POINT = {"marker": "o", "ms": 3}
# maximum number of characters per line in the title of a panel
_TITLE_WIDTH = 23
_HEALTH_TITLES = {"z_c_spread": "total variance of z_c (0: collapsed)", "z_c_effective_rank": "effective rank of z_c"}


class _Curve(NamedTuple):
    steps: np.ndarray
    values: np.ndarray


def history(history: Mapping[str, pd.DataFrame] | None, *, ceiling: float | None = None) -> np.ndarray:
    """Draw training and validation curves by step, and two diagnostics of a collapse of z_c.

    An embedding is collapsed if all cells lie at one point. The diagnostics are the total variance and the effective
    rank of z_c.

    Contrastive losses grow with the logarithm of the batch size, and validation batches are often smaller than training
    batches. The validation loss is then lower than the training loss, whether or not the model fits. Therefore, values
    that can be compared between training and validation are drawn if the history has them:

    - In place of the supervised losses, normalised supervised information. It is 0 for a collapsed embedding, 1 if all
      labels are distinguished, and below 0 for an embedding that is worse than a collapsed one.
    - In place of the total loss, its difference from its value at the last step.

    The model has overfitted if the information is much lower on validation cells than on training cells, or if the
    total validation loss was lower before the end.

    The default form of the invariance loss, ``"variance"``, measures how much more environments differ than by chance,
    in standard errors. The range that is expected by chance, from -2 to 2, is shaded. Values far below -2 are not a
    problem: environments then differ less than by chance, for example because each environment was standardised by all
    of its cells.

    Parameters
    ----------
    history
        ``model.history``: one data frame per metric, indexed by step.
    ceiling
        Supervised loss of a collapsed embedding, ``model.health["ceiling"]``: the logarithm of the batch size in
        validation (in training, if there was no validation). It is drawn as a line only if the history lacks normalised
        supervised information, as in models of older versions.

    Returns
    -------
    Array of axes, one per panel. The legend is below the panels.

    Raises
    ------
    ValueError
        If the history is empty, because the model was not trained yet.

    Examples
    --------
    >>> axes = scbd.pl.history(model.history, ceiling=model.health["ceiling"])
    """
    import matplotlib.pyplot as plt

    history = history or {}
    is_comparable = any(name.format("train") in history for name in _INFORMATION_NAMES)
    replaced = {loss for name, loss in _INFORMATION_NAMES.items() if name.format("train") in history}
    panels = [name for name in _PANELS if name.format("train") in history and name not in replaced]
    health = [name for name in _HEALTH_TITLES if name in history]
    if not panels:
        msg = "The history is empty: train the model first."
        raise ValueError(msg)
    n = len(panels) + len(health)
    n_lines = -(-n // 2)
    size = 6.4, 2.4 * n_lines + 0.5
    figure, axes = plt.subplots(n_lines, min(n, 2), figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for ax, name in zip(axes.flat, panels, strict=False):
        curves = {part: _curve(history[name.format(part)]) for part in _STAGE_STYLES if name.format(part) in history}
        title = _PANELS[name]
        if name == "{}_loss" and is_comparable:
            title = f"{title}, compared with the last step"
            curves = {part: _subtract_last(curve) for part, curve in curves.items()}
        elif name == _INVARIANCE and _IN_STANDARD_ERRORS.format("train") in history:
            title = f"{title}, in standard errors"
            legend["chance"] = ax.axhspan(*_CHANCE, color="0.9", label="chance")
        elif name in _INFORMATION_NAMES:
            legend["collapsed"] = _draw_line(ax, 0.0, "0.5", "collapsed")
        elif name == _SUPERVISED_NAME and ceiling is not None:
            part = list(curves)[-1]
            label = f"collapsed ({part})"
            legend[label] = _draw_line(ax, ceiling, _STAGE_STYLES[part]["color"], label)
        for part, curve in curves.items():
            looks = _STAGE_STYLES[part] | (_POINT if len(curve.steps) == 1 else {})
            legend[part], *_ = ax.plot(curve.steps, curve.values, label=part, **looks)
        ax.set_title(wrap_name(title, _TITLE_WIDTH), fontsize="small")
        ax.set_xlabel("step")
    for ax, name in zip(list(axes.flat)[len(panels) :], health, strict=False):
        curve = _curve(history[name])
        legend["validation"], *_ = ax.plot(curve.steps, curve.values, **_STAGE_STYLES["validation"])
        ax.set_title(wrap_name(_HEALTH_TITLES[name], _TITLE_WIDTH), fontsize="small")
        ax.set(xlabel="step", ylim=(0, None))
    # The legend is drawn below the panels, because it would cover curves within a panel.
    order = sorted(legend, key=lambda label: label not in _STAGE_STYLES)
    handles = [legend[label] for label in order]
    figure.legend(handles, order, frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    for ax in axes.flat:
        # The horizontal axis has few ticks, because the large step numbers of long trainings would overlap.
        ax.locator_params(axis="x", nbins=3)
        ax.tick_params(labelsize="small")
    for ax in list(axes.flat)[n:]:
        ax.set_axis_off()
    return axes.flatten()[:n]


def _curve(frame: pd.DataFrame) -> _Curve:
    return _Curve(frame.index.to_numpy(), frame.iloc[:, 0].to_numpy(dtype=float))


def _subtract_last(curve: _Curve) -> _Curve:
    """Subtract the last finite value of a curve from all its values, so that the curve ends at 0."""
    finite = curve.values[np.isfinite(curve.values)]
    return curve._replace(values=curve.values - finite[-1]) if len(finite) else curve


def _draw_line(ax: Axes, height: float, color: str, label: str) -> Any:
    return ax.axhline(height, ls="--", lw=1, color=color, label=label)
