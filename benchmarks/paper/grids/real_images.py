"""Small crops of real cells: predict the label in environments that were held out, and the environment of new cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from paper.grids.shared import Budget, Experiment, seeds_of
from paper.reports import Column, names_of, table
from paper.scores import PROBE_KINDS
from paper.trials import Trial

if TYPE_CHECKING:
    from pathlib import Path

DATA = {"mitosis_scanners": "Mitosis, a scanner held out", "bbbc021_crops": "BBBC021, a quarter of the plates held out",
        "mitocheck_crops": "MitoCheck, a quarter of the plates held out"}  # fmt: skip
_AUTO: dict[str, Any] = {"standardize_by": "auto", "encoder": "small"}
_SCBD = _AUTO | {"style_target": None}
# name in the table, system, arguments of the model
_SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("pixel PCA", {"n_components": 64}),
    # unlike the components, statistics of an environment are estimated from all of its cells, without labels
    ("pixel PCA, standardised", {"n_components": 64, "standardised": {"fit": None}}),
    ("ERM", _AUTO),
    ("ERM", _AUTO | {"norm": "instance"}),
    ("CORAL", _AUTO),
    ("DANN", _AUTO),
    ("SCBD", _SCBD | {"alpha": 0.0}),
    ("SCBD", _SCBD | {"alpha": "auto"}),
    ("SCBD", _SCBD | {"alpha": "auto", "standardize_by": None}),
]
_TRAINING: dict[str, Any] = {"lr": 1e-3, "split": "split"}
_LENGTHS: dict[str, dict[str, Any]] = {
    "smoke": {"max_steps": 4, "batch_size": 64},
    "small": {"max_steps": 200, "batch_size": 256},
    "paper": {"max_steps": 1_000, "batch_size": 256},
}
_COLUMNS = {
    f"{block} {score}": Column(f"{block}: {shown}, %", 100, 1)
    for block in ("r_c", "z_c")
    for score, shown in {
        "held out": "label, held out",
        **{f"environment, {kind}": f"environment, {kind}" for kind in PROBE_KINDS},
    }.items()
}
_CHANCES = {f"environment chance, {kind}": Column(f"chance, {kind}, %", 100, 1) for kind in PROBE_KINDS}


def real_images(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Real images: an environment is left out with each seed, and its labels are predicted."""
    return [
        Trial(
            "held-out environments",
            dataset,
            system,
            seed,
            {"fold": seed},
            model,
            {} if system.startswith("pixel") else _TRAINING | _LENGTHS[budget],
        )
        for dataset in DATA
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system, model in _SYSTEMS
    ]


def images_report(frame: pd.DataFrame, out: Path) -> str:
    """One table per data set, one line per system, mean over seeds, each with another environment held out."""
    texts = []
    for dataset, title in DATA.items():
        own = frame[frame["dataset"] == dataset]
        if len(own):
            texts.append(f"### {title}\n\n{table(own.assign(name=_names(own)), ['name'], _COLUMNS | _CHANCES)}")
    return "\n\n".join(texts)


def _names(frame: pd.DataFrame) -> pd.Series:
    is_over_all = (frame["system"] == "SCBD") & frame["standardize_by"].isna()
    return names_of(frame).where(~is_over_all, names_of(frame) + ", inputs over all cells")


EXPERIMENTS = {"real-images": Experiment(real_images, images_report)}
