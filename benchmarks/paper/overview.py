"""The figure of "Results in one page", from the rows of four experiments."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image

from paper.systems import best_setting
from paper.trials import Results

ROWS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "results.png"
KEPT, ALSO, BATCH = "#0b5394", "#6fa8dc", "#d9660a"
DEFAULT = "scbd, default"


def rows(experiment: str) -> pd.DataFrame:
    """Every finished run of an experiment, one a row."""
    return Results(ROWS / experiment).frame()


def at_best_rate(frame: pd.DataFrame, system: str) -> pd.DataFrame:
    """Runs of a system at the learning rate that does best in distribution, by its own head where it has one."""
    part = frame[frame["system"] == system]
    accuracy = part["own in"] if part["own in"].notna().all() else part["r_c in"]
    settings = part[["lr", "penalty", "anneal_steps"]].map(str).agg(" ".join, axis=1)
    return part[settings == best_setting(accuracy, settings)]


def digits() -> dict[str, pd.DataFrame]:
    systems, published = rows("cmnist-systems"), rows("cmnist")
    published = published[published["system"] == "SCBD"]
    ours = systems[systems["system"] == "SCBD"]
    return {
        "classifier (ERM)": at_best_rate(systems, "ERM"),
        "pixels (PCA)": systems[systems["system"] == "pixel PCA"],
        "iVAE": at_best_rate(systems, "iVAE"),
        "published loss, α = 192": published[published["alpha"] == 192],
        "published loss, α = 30": published[published["alpha"] == 30],
        DEFAULT: ours[ours["alpha"] == "auto"],
    }


def easy_screen() -> dict[str, pd.DataFrame]:
    frame = rows("screen-systems")
    ours = frame[frame["invariance"] == "variance"]
    return {
        "pixels (PCA)": frame[frame["system"] == "pixel PCA"],
        "pixels, ComBat": frame[frame["system"] == "pixel PCA, ComBat"],
        "pixels, TVN": frame[frame["system"] == "pixel PCA, TVN"],
        "ERM": frame[frame["system"] == "ERM"],
        "iVAE": frame[(frame["system"] == "iVAE") & (frame["style_posterior"] == "xe")],
        "scbd, α = 0": ours[ours["alpha"] == 0],
        DEFAULT: ours[ours["alpha"] == "auto"],
    }


def hard_screen() -> dict[str, pd.DataFrame]:
    frame = rows("screen-rivals")
    after = "standardised: "
    standardised = frame[[name for name in frame if name.startswith(after)]].rename(
        columns=lambda name: name.removeprefix(after)
    )
    ours = (frame["system"] == "SCBD") & (frame["alpha"] == "auto")
    return {
        "pixels, TVN + WCCN": frame[frame["system"] == "pixel PCA, TVN, WCCN"],
        "ERM": frame[frame["system"] == "ERM"],
        "ERM, by well": standardised[frame["system"] == "ERM"],
        DEFAULT: frame[ours],
        "scbd, by well": standardised[ours],
    }


def wells() -> dict[str, pd.DataFrame]:
    frame = rows("cpjump1")
    systems = frame["system"]
    return {
        "features": frame[systems == "features"],
        "sphering": frame[(systems == "sphering") & (frame["regularization"] == 1)],
        "Harmony": frame[(systems == "Harmony") & frame["on"].isna()],
        "PLDA, by position": frame[(systems == "PLDA") & (frame["by_position"] == True)],  # noqa: E712  missing elsewhere
        "ERM, same first map": frame[systems == "ERM"],
        DEFAULT: frame[(systems == "SCBD") & (frame["standardize_by"] == "auto")],
        "Harmony on PLDA": frame[(systems == "Harmony") & (frame["on"] == "PLDA")],
    }


def panels() -> list[tuple[str, dict[str, pd.DataFrame], dict[str, tuple[str, str]], float]]:
    """Title; runs; scores: what is kept in blue, the batch in orange; chance of the latter."""
    return [
        (
            "Colored MNIST: digits of a new colour",
            digits(),
            {"r_c out": ("white digits, accuracy", KEPT), "e from r_c": ("colour, accuracy", BATCH)},
            0.5,
        ),
        (
            "Easy simulated screen: new cells",
            easy_screen(),
            {"relationship_average_precision": ("complexes, AP", KEPT), "e_probe_f1": ("well, F1", BATCH)},
            0.02,
        ),
        (
            "Hard simulated screen: new cells",
            hard_screen(),
            {
                "relationship_average_precision": ("complexes, AP", KEPT),
                "y_probe_auroc": ("gene, AUROC", ALSO),
                "e_probe_f1": ("well, F1", BATCH),
            },
            0.03,
        ),
        (
            "CPJUMP1 wells: unseen compounds",
            wells(),
            {"across positions": ("replicates, AP", KEPT), "e, neighbours, new": ("plate, accuracy", BATCH)},
            0.2,
        ),
    ]


def draw() -> None:
    """One panel below another, so that it can be read on a phone."""
    plt.rcParams |= {"font.size": 14}
    shown = panels()
    heights = [len(systems) + 2.2 for _, systems, _, _ in shown]
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(6.2, 0.36 * sum(heights) + 0.9), height_ratios=heights, layout="constrained"
    )
    for axis, (title, systems, scores, chance) in zip(axes, shown, strict=True):
        axis.axvline(chance, color=BATCH, linestyle=":", linewidth=1.5)
        for key, (label, colour) in scores.items():
            means, spreads = zip(*(mean_sd(runs, key) for runs in systems.values()), strict=True)
            marker = "s" if colour == BATCH else "o"
            looks = {"fmt": marker, "color": colour, "markersize": 9, "elinewidth": 2, "label": label}
            axis.errorbar(means, range(len(systems)), xerr=spreads, **looks)
        axis.set(xlim=(-0.02, 1.04), ylim=(len(systems) - 0.5, -0.5), xticks=[0, 0.25, 0.5, 0.75, 1])
        axis.set_yticks(range(len(systems)), list(systems))
        for tick, name in zip(axis.get_yticklabels(), systems, strict=True):
            tick.set_fontweight("bold" if name == DEFAULT else "normal")
        axis.grid(axis="y", color="0.85")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        legend = {"loc": "lower left", "bbox_to_anchor": (-0.66, 0.97), "ncols": len(scores), "frameon": False}
        heading = axis.legend(
            **legend, title=title, alignment="left", handletextpad=0, columnspacing=0.5, borderaxespad=0, fontsize=13
        )
        heading.get_title().set(fontsize=15, fontweight="bold")
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)
    Image.open(PICTURE).convert("RGB").quantize(64).save(PICTURE, optimize=True)  # a third of the size


def mean_sd(runs: pd.DataFrame, score: str) -> tuple[float, float]:
    """Over the runs of a system."""
    values = runs[score].astype(float)
    return values.mean(), values.std()
