"""Plot of the training curves of a model: losses and diagnostics by training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.pl._style import wrap_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

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
# Titles of the panels, by the name of the curves in the history; "{}" stands for "train" or "validation". Curves
# without "{}" are measured in validation only. Panels are drawn in this order.
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
    "z_c_spread": "total variance of z_c (0: collapsed)",
    "z_c_effective_rank": "effective rank of z_c",
}
_STAGE_STYLES: dict[str, dict[str, Any]] = {
    "train": {"lw": 1, "color": "#56B4E9"},
    "validation": {"marker": "o", "ms": 3, "color": "k"},
}
# Marker of a curve that has a value for a single step only. A line cannot be drawn for a single value.
_POINT = {"marker": "o", "ms": 3}
# Line at the value of a collapsed embedding.
_COLLAPSED: dict[str, Any] = {"ls": "--", "lw": 1}
# maximum number of characters per line in the title of a panel
_TITLE_WIDTH = 23


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
    replaced = {loss for name, loss in _INFORMATION_NAMES.items() if name.format("train") in history}
    panels = [name for name in _PANELS if name.format("train") in history and name not in replaced]
    if not panels:
        msg = "The history is empty: train the model first."
        raise ValueError(msg)
    n_lines = -(-len(panels) // 2)
    size = 6.4, 2.4 * n_lines + 0.5
    figure, axes = plt.subplots(n_lines, min(len(panels), 2), figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for ax, name in zip(axes.flat, panels, strict=False):
        stages = _STAGE_STYLES if "{}" in name else ["validation"]
        curves = {
            stage: history[key].iloc[:, 0].astype(float) for stage in stages if (key := name.format(stage)) in history
        }
        title = _PANELS[name]
        if name == "{}_loss" and replaced:
            title = f"{title}, compared with the last step"
            curves = {stage: curve - _last_finite(curve) for stage, curve in curves.items()}
        elif name == _INVARIANCE and _IN_STANDARD_ERRORS.format("train") in history:
            title = f"{title}, in standard errors"
            legend["chance"] = ax.axhspan(*_CHANCE, color="0.9", label="chance")
        elif name in _INFORMATION_NAMES:
            legend["collapsed"] = ax.axhline(0.0, color="0.5", **_COLLAPSED, label="collapsed")
        elif name == _SUPERVISED_NAME and ceiling is not None:
            stage = list(curves)[-1]
            label = f"collapsed ({stage})"
            legend[label] = ax.axhline(ceiling, color=_STAGE_STYLES[stage]["color"], **_COLLAPSED, label=label)
        for stage, curve in curves.items():
            style = _STAGE_STYLES[stage] | (_POINT if len(curve) == 1 else {})
            legend[stage], *_ = ax.plot(curve, label=stage, **style)
        if "{}" not in name:
            ax.set_ylim(0, None)
        ax.set_title(wrap_name(title, _TITLE_WIDTH), fontsize="small")
        ax.set_xlabel("step")
    # The legend is drawn below the panels, because it would cover curves within a panel.
    order = sorted(legend, key=lambda label: label not in _STAGE_STYLES)
    handles = [legend[label] for label in order]
    figure.legend(handles, order, frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    for ax in axes.flat:
        # The horizontal axis has few ticks, because the large step numbers of long trainings would overlap.
        ax.locator_params(axis="x", nbins=3)
        ax.tick_params(labelsize="small")
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    return axes.flat[: len(panels)]


def _last_finite(curve: pd.Series) -> float:
    """Return the last finite value of a curve; 0 if there is none."""
    finite = curve[np.isfinite(curve)]
    return finite.iloc[-1] if len(finite) else 0.0
