"""Corrections of feature tables, which learn in closed form: rows beside what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd import baselines
from scbd._labels import label_values
from scbd.nn import FeatureScaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

    from scbd.workflows._datasets import Dataset


class Table:
    """Features of a data set with the labels that corrections ask for.

    Features are scaled and clipped as those of a model are, by the same rows: what is compared is what comes after.

    Parameters
    ----------
    adata
        Its table.
    dataset
        Its columns.
    fit
        Rows that may be learned from, boolean ``(N,)``.
    """

    def __init__(self, adata: AnnData, dataset: Dataset, fit: np.ndarray) -> None:
        self.fit = fit
        self.stored = dataset.inputs(adata).source(adata).read(slice(None))
        self.labels = label_values(adata.obs, dataset.y_key).astype(str).to_numpy()
        self.environments = label_values(adata.obs, dataset.e_key).astype(str).to_numpy()
        control, position_key = dataset.setup.get("control"), dataset.setup.get("position_key")
        self.controls = None if control is None else self.labels == str(control)
        positions = None if position_key is None else label_values(adata.obs, position_key)
        self.positions = None if positions is None else positions.astype(str).to_numpy()
        # controls that may be learned from on new plates as well, where plates are moved onto each other
        known = adata.obs.get("known_position", False)
        self.known_controls = {"fit": fit | np.asarray(known), "controls": self.controls}
        scaling = FeatureScaling(self.stored.shape[1])
        scaling.fit([torch.from_numpy(self.stored[fit])], None if self.controls is None else self.controls[fit])
        self.features = scaling(torch.from_numpy(self.stored)).numpy()

    @property
    def known(self) -> dict[str, Any]:
        """What functions of :mod:`scbd.baselines` take beside features and labels."""
        return {"fit": self.fit, "controls": self.controls}


def _standardized(table: Table, *, on_controls: bool = False, **settings: Any) -> np.ndarray:
    known = table.known_controls if on_controls else {}
    return baselines.standardize_by_environment(table.features, table.environments, **known, **settings)


def _within(correct: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def corrected(table: Table, *, by_position: bool = False, **settings: Any) -> np.ndarray:
        positions = {"positions": table.positions} if by_position else {}
        return correct(table.features, table.labels, **table.known, **positions, **settings)

    return corrected


def _harmony(table: Table, *, on: str | None = None, seed: int = 0, **settings: Any) -> np.ndarray:
    features = table.features if on is None else RIVALS[on](table)
    return baselines.harmony(features, table.environments, seed=seed, **settings)


# packages that are not installed with scbd
NEEDED = {"Harmony": "harmonypy"}

# "standardised", ComBat and Harmony see all rows by construction: each environment is moved onto the others; on
# controls, "standardised" and TVN see those of new environments that nobody is scored against
RIVALS: dict[str, Callable[..., np.ndarray]] = {
    "features": lambda table: table.stored,
    "scaled": lambda table: table.features,
    "standardised": _standardized,
    "sphering": lambda table, **settings: baselines.sphering(table.features, **table.known, **settings),
    "TVN": lambda table, **settings: baselines.tvn(
        table.features, table.environments, **table.known_controls, **settings
    ),
    "WCCN": _within(baselines.wccn),
    "LDA": _within(baselines.lda),
    "PLDA": _within(baselines.plda),
    "ComBat": lambda table: baselines.combat(table.features, table.environments),
    "Harmony": _harmony,
}
