"""Corrections of feature tables, which learn in closed form: rows beside what is trained."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd.baselines import CORRECTIONS, correct
from scbd.nn import FeatureScaling
from scbd.workflows._known import known_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

    from scbd.workflows._datasets import Dataset


class Table:
    """Features of a data set with what corrections are told of its rows.

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
        self.stored = dataset.inputs(adata).source(adata).read(slice(None))
        columns = dataset.label_keys | {"position_key": dataset.setup.get("position_key")}
        self.known = known_of(adata, fit=fit, **columns)
        # controls that may be learned from on new plates as well, where plates are moved onto each other
        self.known_controls = fit | np.asarray(adata.obs.get("known_position", False))
        scaling, controls = FeatureScaling(self.stored.shape[1]), self.known.get("controls")
        scaling.fit([torch.from_numpy(self.stored[fit])], None if controls is None else controls[fit])
        self.features = scaling(torch.from_numpy(self.stored)).numpy()


def _corrected(
    table: Table,
    *,
    correction: str,
    on_controls: bool = False,
    by_position: bool = False,
    on: str | None = None,
    **settings: Any,
) -> np.ndarray:
    """Features, or what another correction made of them, corrected.

    What moves plates onto each other needs rows of all of them: on controls those at known positions, else all rows.
    """
    features = table.features if on is None else RIVALS[on](table)
    correction += " on controls" if on_controls else ""
    needs, known = CORRECTIONS[correction].needs, dict(table.known)
    if "environments" in needs:
        known["fit"] = table.known_controls if "controls" in needs else None
    if not by_position:
        known.pop("positions", None)
    return correct(features, correction, **known, **settings)


# packages that are not installed with scbd
NEEDED = {"Harmony": "harmonypy"}

RIVALS: dict[str, Callable[..., np.ndarray]] = {
    "features": lambda table: table.stored,
    "scaled": lambda table: table.features,
    **{name: partial(_corrected, correction=name) for name in CORRECTIONS},
}
