"""All systems of the paper on a screen beside each other: the grid, and what is made of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._budgets import (
    NEW_CELLS,
    OURS,
    SCREENS,
    UNEQUAL_WELLS,
    new_cells_settings,
    new_cells_trial,
    seeds_of,
)
from scbd.paper._experiment import Experiment
from scbd.paper._rivals import corrected_pixels
from scbd.paper._screens import correction_report
from scbd.paper._tables import CORRECTION, names_of
from scbd.paper._variants import by_variant

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


# ComBat and Harmony see the cells that are scored, too
_CHEAP = ("standardised", "ComBat", "Harmony", "WCCN")


def screen_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of an easy simulated screen: features, latent-variable models and SCBD (paper, figure 4)."""
    published, contrastive = new_cells_settings(budget)
    # decoders are slow: twice the time of a contrastive run at a fifth of its images, at the small budget
    steps, size = {"smoke": (40, 128), "small": (400, 256), "paper": (contrastive["max_steps"], 1024)}[budget]
    bound = contrastive | {"max_steps": steps, "batch_size": size}
    pixels = {"n_components": 64}
    wells = pixels | {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    block = published | {"style_target": None}
    systems: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("pixel PCA", pixels, NEW_CELLS),
        ("pixel PCA, centred", wells, NEW_CELLS),
        ("pixel PCA, TVN", wells, NEW_CELLS),
        *((name, model, NEW_CELLS) for name, model in corrected_pixels(_CHEAP)),
        ("ERM", {"encoder": published["encoder"]}, contrastive),
        ("VAE", {"n_latent": 64}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "xe"}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "x"}, bound),
        ("mcVAE", {"n_latent": 32, "kl_warmup_steps": bound["max_steps"] // 2}, bound),
        *(("SCBD", block | {"alpha": alpha}, contrastive) for alpha in (0.0, 1.0, 8.0)),
        *(("SCBD", block | OURS | {"alpha": alpha}, contrastive) for alpha in (0.0, 0.003, 0.01, 0.03, "auto")),
    ]
    return [
        new_cells_trial(seed, SCREENS[budget] | UNEQUAL_WELLS, model, how, system)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system, model, how in systems
    ]


def screen_systems_report(frame: pd.DataFrame, out: Path) -> str:
    """Biology and batch of each system: a table, bars, and one against the other."""
    form = frame["invariance"].map({"listing": "SCBD, published", "variance": "SCBD"}).fillna(frame["system"])
    named = by_variant(frame.assign(system=form, name=names_of(frame)), CORRECTION)
    named["setting"] = named["name"]
    traced = ["SCBD, published", "SCBD"]
    x, y = "e_probe_f1", "relationship_average_precision"
    ax = pl.trade_off(named, x, y, setting="setting", traced=traced)
    ax.set(xlabel="F1 of the well (lower is better)", ylabel="average precision of complexes")
    save_figure(cast("Figure", ax.figure), out / "trade_off.png")
    return correction_report(frame, out)


EXPERIMENTS = {"screen-systems": Experiment(screen_systems, screen_systems_report)}
