"""Whether whole environments are shifted in a table of features, which is taken out before training, and exactly."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._labels import label_values
from scbd.nn import Groups, explained_variance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anndata import AnnData

    from scbd.data import Inputs

# share of the features' variance at equal perturbation from which it is said: of normalised profiles environments
# explain 0.01; where they explain 0.29 of simulated plates, z_c loses an eighth of its score (lab book, 44)
_SHIFTED = 0.2
# rows of an environment below which mean and variance are of these rows, and not of their environment
_FEW_ROWS = 8
# rows that are looked at
_SAMPLED = 4_096


def warn_if_shifted(
    adata: AnnData, inputs: Inputs, y_columns: Sequence[str], environments: Iterable[Sequence[str]]
) -> None:
    """Warn where environments shift features as a whole: profiles are normalised before anything is learned of them.

    A linear map that starts from what perturbations differ in makes such a shift smaller, and does not take it out.
    Columns of each of ``environments`` are crossed.
    """
    found = {tuple(columns): label_values(adata.obs, columns).cat for columns in environments}
    found = {columns: of for columns, of in found.items() if adata.n_obs >= _FEW_ROWS * len(of.categories)}
    if not found:
        return
    n = adata.n_obs
    rows = np.sort(np.random.default_rng(n).choice(n, min(n, _SAMPLED), replace=False))
    features = torch.from_numpy(inputs.source(adata).read(rows)).float()
    y = Groups(_codes(label_values(adata.obs, y_columns).cat, rows))
    for columns, of in found.items():
        share = float(explained_variance(features, _codes(of, rows), y, partners="across").share)
        if share >= _SHIFTED:
            warnings.warn(_advice(inputs, columns, share), UserWarning, stacklevel=3)


def _codes(labels: Any, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(labels.codes.to_numpy()[rows].astype(np.int64))


def _advice(inputs: Inputs, columns: Sequence[str], share: float) -> str:
    """What was found, and the line that mends it."""
    column = f"adata.obs[{columns[0]!r}]"
    if len(columns) > 1:
        column = f"adata.obs[{list(columns)}].astype(str).agg(' '.join, axis=1)"
    slot, argument = ("obsm", "obsm_key") if inputs.obsm_key else ("layers", "layer")
    standardised = f"scbd.baselines.standardize_by_environment(adata.{inputs.where}, {column})"
    return (
        f"Environments ({', '.join(columns)}) explain {share:.0%} of the variance of the features at equal "
        "perturbation: whole environments are shifted, and training takes that out in part only. Standardise each "
        f"first: adata.{slot}['standardized'] = {standardised}, and set up with {argument}='standardized'. Where "
        "environments hold different perturbations, add controls=…. Treat new environments alike."
    )
