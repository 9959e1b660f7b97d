"""The map of regimes: from rows to figures of where z_c learns, goes blind or dies."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from scbd import pl
from scbd.experiments._files import save_figure
from scbd.experiments._reports import ACCURACIES, HEALTH
from scbd.experiments._tables import only, table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

# what rows do not say where it is the default
_DEFAULTS = {"n_environments": 2, "imbalance": 0.0, "n_digits": 10, "include_self": True}
_FACTORS = {"batch": "cells a batch", "environments": "environments", "labels": "labels"}
_FORMS = ("listing", "variance", "mean", "mass")
_FIGURES = {
    "map": ("z_c out", "white digits from $z_c$"),
    "learned": ("learned_c", "learned of the labels"),
    "environment": ("e from r_c", "environment from $r_c$"),
}


def map_report(frame: pd.DataFrame, out: Path) -> str:
    """Regimes of alpha by form of invariance, batch, environments and labels: three figures and a table.

    A row of panels a form, a column a factor, a line a value of it: white digits, how much of what the labels say was
    learned, and how well the environment is read.
    """
    import matplotlib.pyplot as plt

    frame = _named(frame).sort_values(["batch_size", "n_environments", "imbalance", "n_digits"], kind="stable")
    usual = frame["with_self"] == "yes"
    base = {"batch": frame["batch"].mode()[0], "environments": "2", "labels": 10}
    forms = [form for form in _FORMS if form in set(frame["form"])]
    for name, (score, label) in _FIGURES.items():
        figure = plt.figure(figsize=(4 * len(_FACTORS), 2.8 * len(forms)), layout="constrained")
        axes = figure.subplots(len(forms), len(_FACTORS), squeeze=False)
        for (form, (factor, title)), ax in zip(product(forms, _FACTORS.items()), axes.flat, strict=True):
            others = {column: value for column, value in base.items() if column != factor}
            part = only(frame[usual], {"form": form} | others)
            if factor != "batch" and part[factor].nunique() == 1:
                ax.set_axis_off()  # this form was tried at one value of it
                continue
            pl.by_group(part, "alpha", score, factor, ax=ax)
            ax.set(title=f"{form}, by {title}", ylabel=label, ylim=(-0.02, 1.02))
        save_figure(figure, out / f"{name}.png")
    by = ["form", "with_self", *_FACTORS, "alpha"]
    shown = {key: ACCURACIES[key] for key in ("z_c in", "z_c out", "r_c out", "e from r_c")}
    return table(frame.sort_values(["form", "with_self", "batch"], kind="stable"), by, shown | HEALTH)


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with the factors by the names that are shown."""
    frame = frame.assign(**{c: frame[c].where(frame[c].notna(), v) if c in frame else v for c, v in _DEFAULTS.items()})
    unequal = frame["imbalance"].astype(float).gt(0).map({True: ", unequal", False: ""})
    return frame.assign(
        form=frame["invariance"],
        with_self=frame["include_self"].map({True: "yes", False: "no"}),
        batch=frame["batch_size"].astype(int),
        environments=frame["n_environments"].astype(int).astype(str) + unequal,
        labels=frame["n_digits"].astype(int),
    )
