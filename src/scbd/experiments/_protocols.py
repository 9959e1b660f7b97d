"""The paper's two protocols: train a trial's system, and score it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd.experiments._scores import generalization_scores
from scbd.experiments._systems import trained

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    from scbd.experiments._datasets import Dataset
    from scbd.experiments._trials import Trial
    from scbd.model import ImageModel

    Scored = tuple[dict[str, Any], ImageModel | None]


def domain_generalization(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Learn y in some environments, predict it in one that was never seen (paper, section 4.1).

    Weights are those of the lowest validation loss, in distribution; the test environment is looked at once, here.
    """
    model = trained(trial, adata, dataset, directory)
    return generalization_scores(adata, model, y_key=dataset.y_key, e_key=dataset.e_key), model


PROTOCOLS: dict[str, Callable[[Trial, AnnData, Dataset, Path], Scored]] = {
    "domain generalization": domain_generalization,
}
