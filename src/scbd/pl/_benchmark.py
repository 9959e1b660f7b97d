"""Biology up, batch down: the paper's figure, and what stands behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.pl._looks import legend, look

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

_NAMES = {
    "relationship_area": "area, known relations",
    "relationship_recall": "recall of known relations",
    "relationship_average_precision": "average precision, known relations",
    "y_probe_f1": "F1 of the perturbation",
    "e_probe_f1": "F1 of the environment",
    "e_probe_quadratic_f1": "F1 of the environment, quadratic",
    "e_probe_neighbours_f1": "F1 of the environment, neighbours",
    "ilisi": "mixing of environments (iLISI)",
    "same_environment_neighbours": "neighbours of the same environment",
    "silhouette": "silhouette by environment",
}
# rows with what chance gives, and what is good of batch metrics that are not better the lower they are
_CHANCE = {
    "y_probe_f1": "y_probe_chance_f1",
    "e_probe_f1": "e_probe_chance_f1",
    "e_probe_quadratic_f1": "e_probe_quadratic_chance_f1",
    "e_probe_neighbours_f1": "e_probe_neighbours_chance_f1",
    "ilisi": "ilisi_expected",
    "same_environment_neighbours": "same_environment_expected",
    "silhouette": "silhouette_expected",
}
_GOOD = dict.fromkeys(["same_environment_neighbours", "silhouette"], "nearer to chance") | {"ilisi": "higher"}


def benchmark(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", axes: np.ndarray | None = None
) -> np.ndarray:
    """Draw two panels, one bar a representation: how much biology, and how much batch; what chance gives as a line.

    Parameters
    ----------
    frame
        From :func:`scbd.metrics.benchmark`: ``metric, representation, key, value``. Several keys of a representation
        (training seeds) give a bar of their mean, with their standard deviation.
    biology, batch
        Metrics of the panels. By default the first there is of the relationship area and the perturbation probe.
    axes
        Two axes to draw on.

    Returns
    -------
    The two axes.

    Raises
    ------
    ValueError
        If a metric is not in the frame.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> axes = scbd.pl.benchmark(frame, biology="y_probe_f1")
    """
    import matplotlib.pyplot as plt

    if biology is None:
        biology = "relationship_area" if (frame["metric"] == "relationship_area").any() else "y_probe_f1"
    for metric in (biology, batch):
        if not (frame["metric"] == metric).any():
            msg = f"The frame has no metric {metric!r}; there are: {', '.join(frame['metric'].unique())}."
            raise ValueError(msg)
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    order = list(dict.fromkeys(frame["representation"]))
    for ax, metric, good in zip(axes, (biology, batch), ("higher", _GOOD.get(batch, "lower")), strict=True):
        values = frame[frame["metric"] == metric].groupby("representation")["value"]
        mean, sd = values.mean().reindex(order), values.std().reindex(order).fillna(0)
        ax.bar(order, mean, yerr=sd.where(sd > 0), color="#56B4E9", edgecolor="k", capsize=4)
        ax.set(ylabel=_NAMES.get(metric, metric), title=f"{good} is better")
        plt.setp(ax.get_xticklabels(), rotation=35, ha="right", rotation_mode="anchor")  # names end below their bar
        chance = frame.loc[frame["metric"] == _CHANCE.get(metric), "value"]
        if len(chance):
            ax.axhline(chance.mean(), ls="--", color="k", lw=1, label="chance")
            ax.legend(frameon=False)
    return axes


def relationship_curve(
    curves: pd.DataFrame | Mapping[str, pd.DataFrame], *, prevalence: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw precision against recall of known relations.

    Parameters
    ----------
    curves
        From :func:`scbd.metrics.relationship_curve`, one or several by name.
    prevalence
        Fraction of pairs that are related, drawn as a line: the precision without information.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> ax = scbd.pl.relationship_curve({"z_c": curve})
    """
    import matplotlib.pyplot as plt

    if isinstance(curves, pd.DataFrame):
        curves = {"": curves}
    if ax is None:
        _, ax = plt.subplots(figsize=(4.6, 3.6), layout="constrained")
    for i, (name, curve) in enumerate(curves.items()):
        ax.plot(curve["recall"], curve["precision"], **look(i)._asdict(), ms=3, label=name or None)
    if prevalence is not None:
        ax.axhline(prevalence, color="0.5", lw=1, label="no information")
    ax.set(xlabel="recall", ylabel="precision", ylim=(0, None))
    legend(ax)
    return ax


def complexes(table: pd.DataFrame, *, n: int = 20, ax: Axes | None = None) -> Axes:
    """Draw the mean cosine of the complexes that are found most clearly.

    Parameters
    ----------
    table
        From :func:`scbd.metrics.complex_table`.
    n
        How many.
    ax
        Axes to draw on.

    Returns
    -------
    The axes. Filled: false discovery rate below 5 %.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> table = scbd.metrics.complex_table(profiles, net, n_permutations=50)
    >>> ax = scbd.pl.complexes(table)
    """
    import matplotlib.pyplot as plt

    shown = table.head(n).iloc[::-1]
    if ax is None:
        _, ax = plt.subplots(figsize=(6.5, 0.28 * len(shown) + 1), layout="constrained")
    found = (shown["fdr"] < 0.05).to_numpy()
    names = [f"{name[:48]} ({size})" for name, size in zip(shown.index.astype(str), shown["size"], strict=True)]
    ax.hlines(names, 0, shown["mean_cosine"], color="0.7")
    ax.scatter(shown["mean_cosine"], names, c=np.where(found, "#0072B2", "w"), edgecolors="#0072B2", zorder=3)
    ax.set(xlabel="mean cosine between its genes", xlim=(min(0, shown["mean_cosine"].min()), 1))
    ax.margins(y=0.02)
    return ax
