"""From rows to the paper's tables and figures: everything here can be made again from ``rows/`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pandas as pd

from scbd import pl
from scbd.workflows._assumption import in_out_correlation
from scbd.workflows._alpha_rule import selection_regret
from scbd._files import save_figure
from scbd.paper._published import HELD_OUT, TABLE_1
from scbd.paper._tables import Column, markdown, mean_sd, only, percent, table, value_of, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ACCURACIES = {
    "r_c in": percent("in distribution"),
    "r_c out": percent("out of distribution"),
    "z_c in": percent("z_c in"),
    "z_c out": percent("z_c out"),
    "e from r_c": percent("e from r_c"),
    "e from z_c": percent("e from z_c"),
}
HEALTH = {
    "supervised_c": Column("L_c"),
    "ceiling": Column("of a point"),
    "learned_c": Column("learned"),
    "spread": Column("spread"),
    "effective_rank": Column("rank", digits=1),
    "final_alpha": Column("alpha at the end", digits=3),
}
_COUNTERFACTUALS = {
    "digit kept": percent("digit kept"),
    "color moved": percent("colour moved"),
    "shade error": Column("shade error"),
    "digit reconstructed": percent("digit reconstructed"),
    "color reconstructed": percent("colour reconstructed"),
    "mse": Column("squared error", digits=4),
    "mse of the mean image": Column("of the mean image", digits=4),
    "reader": percent("reader on originals"),
}
CORRECTION = {
    "relationship_area": Column("area, complexes", digits=3),
    "relationship_average_precision": Column("average precision", digits=3),
    "relationship_recall": Column("recall", digits=3),
    "y_probe_f1": Column("gene F1", digits=3),
    "e_probe_f1": Column("well F1", digits=3),
    "e_probe_chance_f1": Column("chance", digits=3),
    "ilisi": Column("iLISI", digits=3),
}
_FACTORS = {"n_latent": "embedding size", "batch_size": "batch size", "weight_decay": "weight decay"}


def generalization_report(frame: pd.DataFrame, out: Path) -> str:
    """Accuracy at each alpha with its controls, and ERM's correlation; one table and two figures a test environment.

    Parameters
    ----------
    frame
        Rows of :class:`Results`.
    out
        Directory for the figures.

    Returns
    -------
    The tables, as Markdown.
    """
    held_out = "test_environment" in frame
    parts = [
        _generalization(part, out, str(name) if held_out else "")
        for name, part in (frame.groupby("test_environment") if held_out else [("", frame)])
    ]
    return "\n\n".join(parts)


def bounded_report(frame: pd.DataFrame, out: Path) -> str:
    """Accuracy between an encoder that was never trained and an oracle: a table."""
    systems = ["random encoder", "SCBD", "oracle"]
    frame = frame.sort_values("system", key=lambda names: names.map(systems.index), kind="stable")
    return table(frame.assign(name=names_of(frame)), ["name"], ACCURACIES | HEALTH)


def ablation_report(frame: pd.DataFrame, out: Path) -> str:
    """One setting changed at a time: a table and a figure of three panels."""
    import matplotlib.pyplot as plt

    frame = frame.assign(style_target=frame["style_target"].fillna("none"))
    base = {column: frame[column].mode()[0] for column in [*_FACTORS, "style_target", "alpha"]}
    tables, figure = [], plt.figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, len(_FACTORS))
    for ax, (factor, name) in zip(axes, _FACTORS.items(), strict=True):
        part = only(frame, {column: value for column, value in base.items() if column != factor})
        part = part.sort_values(factor, kind="stable")
        pl.sweep(part, factor, {"r_c in": "in distribution", "r_c out": "out of distribution"}, ax=ax).set(xlabel=name)
        tables.append(f"**{name}**\n\n" + table(part, [factor], ACCURACIES | HEALTH))
    part = only(frame, {column: base[column] for column in _FACTORS})
    tables.append("**style target** (none: a single block)\n\n" + table(part, ["style_target", "alpha"], ACCURACIES))
    save_figure(figure, out / "ablations.png")
    return "\n\n".join(tables)


def correction_report(frame: pd.DataFrame, out: Path) -> str:
    """Biology up, batch down: a table and the paper's figure of two panels."""
    frame = _by_alpha(frame) if "alpha" in frame else frame
    for column in ("invariance", "system"):
        if column in frame:
            frame = frame.sort_values(column, ascending=column != "system", kind="stable")
    named = frame.assign(name=names_of(frame))
    order = list(named["name"].unique())
    long = named.melt("name", [c for c in CORRECTION if c in named], "metric", "value").dropna()
    long = long.rename(columns={"name": "representation"}).assign(key="")
    long = long.sort_values("representation", key=lambda names: names.map(order.index), kind="stable")
    save_figure(pl.benchmark(long)[0].figure, out / "batch_correction.png")
    return table(named, ["name"], CORRECTION | HEALTH)


def new_cells_report(frame: pd.DataFrame, out: Path) -> str:
    """The same for a sweep of alpha on new cells, and what choosing it by their perturbation costs in biology."""
    score = {"ins": "y_probe_accuracy", "outs": "relationship_average_precision"}
    return correction_report(frame, out) + _selected(frame, **score, what="average precision")


def counterfactual_report(frame: pd.DataFrame, out: Path) -> str:
    """Digits and colours read from pictures with exchanged blocks."""
    together = [bool(decoder.get("joint")) for decoder in frame["decoder"]]
    frame = frame.assign(decoder=pd.Series(together, frame.index).map({True: "with encoders", False: "after"}))
    by = ["alpha", "decoder"]
    frame = frame.sort_values(by, kind="stable")
    return table(frame, by, _COUNTERFACTUALS) + "\n\n" + table(frame, by, ACCURACIES | HEALTH)


def long_report(frame: pd.DataFrame, out: Path) -> str:
    """The course of z_c over a long run; ``runs/`` has the histories."""
    text = table(frame.assign(name=names_of(frame)), ["name", "steps"], ACCURACIES | HEALTH)
    for key, ceiling in zip(frame["key"], frame["ceiling"], strict=True):
        path = out / "runs" / key / "history.csv"
        if path.is_file():
            history = pd.read_csv(path, index_col="step")
            frames = {name: history[[name]].dropna() for name in history}
            save_figure(pl.history(frames, ceiling=ceiling)[0].figure, out / f"{key}.png")
    return text


def settings_table(frame: pd.DataFrame) -> str:
    """What was run, how long, and on what, one line a system, as Markdown."""
    columns = ["encoder", "steps", "batch_size", "lr", "precision", "device"]
    lines = [["system", *(column.replace("_", " ") for column in columns), "runs", "minutes a run"]]
    lines.append(["---"] * len(lines[0]))
    for system, part in frame.groupby("system", sort=False):
        cells = [values_of(part[column]) if column in part else "–" for column in columns]
        lines.append([str(system), *cells, str(len(part)), mean_sd(part["seconds"], Column("", 1 / 60, 1))])
    return markdown(lines)


def _generalization(frame: pd.DataFrame, out: Path, environment: str) -> str:
    scbd, erm = frame[frame["system"] == "SCBD"], frame[frame["system"] == "ERM"]
    control = frame[frame["system"] == "random encoder"]
    chosen = _chosen(erm)
    own = chosen.assign(**{f"r_c {part}": chosen.get(f"own {part}") for part in ("in", "out")})
    rows = pd.concat([part for part in (control, _by_alpha(scbd), own) if len(part)])
    rows = rows.assign(name=names_of(rows))
    published = HELD_OUT.get(environment) or TABLE_1.get(frame["dataset"].iloc[0], {})
    text = table(rows, ["name"], ACCURACIES | HEALTH, published=published)
    suffix = f"_{environment}" if environment else ""
    if len(scbd):
        shown = {"r_c in": "in distribution", "r_c out": "out of distribution", "z_c out": "out, z_c itself"}
        ax = pl.sweep(scbd, "alpha", shown, control=control[list(shown)].mean() if len(control) else None)
        ax.set(ylabel="accuracy", title=environment)
        save_figure(_figure(ax), out / f"alpha{suffix}.png")
    text += _selected(scbd, "z_c in", "z_c out", "accuracy of $z_c$ out of distribution")
    if len(erm) > 2:
        ax = pl.in_against_out(erm)
        save_figure(_figure(ax), out / f"erm{suffix}.png")
        found = in_out_correlation(erm)
        text += (
            f"\n\nERM, {found['n']:.0f} runs: in- and out-of-distribution accuracy correlate with "
            f"{found['pearson']:.2f} (ranks {found['spearman']:.2f}; better half {found['strong']:.2f})."
        )
    return f"### {environment} held out\n\n{text}" if environment else text


def _selected(scbd: pd.DataFrame, ins: str, outs: str, what: str) -> str:
    """What choosing alpha without the test environment would have cost."""
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
        f"is {mean_sd(found['regret'], points)} points below that of the best alpha"
    )
    auto = f', that of `alpha="auto"` {mean_sd(found["auto, regret"], points)}' if "auto, regret" in found else ""
    return f"{text}{auto}."


def _by_alpha(frame: pd.DataFrame) -> pd.DataFrame:
    """Sorted by alpha, what finds it itself last."""
    return frame.sort_values("alpha", kind="stable", key=lambda alphas: pd.to_numeric(alphas, errors="coerce"))


def _chosen(erm: pd.DataFrame) -> pd.DataFrame:
    """Each seed's ERM run of the best accuracy in distribution: the paper's selection, blind to the test."""
    if erm.empty:
        return erm
    return erm.loc[erm.groupby("seed")["own in"].idxmax()]


def names_of(frame: pd.DataFrame) -> pd.Series:
    """What each row is called in a table: the system, and what was varied of it."""
    if "style_posterior" in frame:
        only = frame["style_posterior"].eq("x").map({True: ", x only", False: ""})
        frame = frame.assign(system=frame["system"] + only)
    scbd = frame["system"] == "SCBD"
    if "alpha" not in frame:
        return frame["system"]
    several = "invariance" in frame and frame.loc[scbd, "invariance"].nunique() > 1
    what = frame["invariance"] if several else frame["system"]
    return frame["system"].where(~scbd, what + ", alpha " + frame["alpha"].map(value_of))


def _figure(ax: Axes) -> Figure:
    return cast("Figure", ax.figure)
