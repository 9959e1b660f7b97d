"""Environments hidden from a model: inferred in place of the known ones, which scores alone are told of."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from scbd._labels import label_values
from scbd.data import INFERRED, infer_environments

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    from scbd.model import ImageModel
    from scbd.workflows._datasets import Dataset
    from scbd.workflows._trials import Trial

    Scored = tuple[dict[str, Any], ImageModel | None]
    Protocol = Callable[[Trial, AnnData, Dataset, Path], Scored]


def environments_hidden(
    loader: Callable[..., AnnData], y_key: str, e_key: str | None = None, **inputs: Any
) -> Callable[..., AnnData]:
    """A loader that infers environments, so many as ``n_inferred`` says, from training cells alone.

    Parameters
    ----------
    loader
        Of cells with ``obs["split"]``.
    y_key
        Column of the label.
    e_key
        Environments that stay known, beside which others are inferred.
    **inputs
        Where the inputs are, see :func:`scbd.data.infer_environments`.
    """

    @wraps(loader)
    def load(*path: Any, seed: int = 0, n_inferred: int = 2, **kwargs: Any) -> AnnData:
        adata = loader(*path, seed=seed, **kwargs)
        learned = (adata.obs["split"] == "train").to_numpy()
        found = infer_environments(adata, y_key, n_inferred, e_key=e_key, fit=learned, seed=seed, **inputs)
        adata.obs[INFERRED] = found.labels
        return adata

    return load


def told_of_agreement(protocol: Protocol) -> Protocol:
    """The same scores, and the adjusted mutual information of known and inferred environments, of training cells."""

    @wraps(protocol)
    def scored(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
        scores, model = protocol(trial, adata, dataset, directory)
        if INFERRED in adata.obs:
            from sklearn.metrics import adjusted_mutual_info_score

            learned = adata.obs.loc[adata.obs["split"] == "train"]
            known = label_values(learned, dataset.e_key).astype(str)
            scores = scores | {"agreement": float(adjusted_mutual_info_score(known, learned[INFERRED].astype(str)))}
        return scores, model

    return scored
