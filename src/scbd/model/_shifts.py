"""Whether whole environments are shifted in a table of features, which is taken out before training, and exactly."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from scbd._labels import label_values
from scbd.nn import explained_variance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data import Inputs

# share of the features' variance at equal perturbation from which it is said: of normalised profiles environments
# explain 0.01, of the raw tables that were seen 0.5 and more
_SHIFTED = 0.2
# rows of an environment below which mean and variance are of these rows, and not of their environment
_FEW_ROWS = 8
# rows that are looked at
_SAMPLED = 4_096


def warn_if_shifted(adata: AnnData, inputs: Inputs, y_columns: Sequence[str], e_columns: Sequence[str]) -> None:
    """Warn where environments shift features as a whole: profiles are normalised before anything is learned of them.

    A linear map that starts from what perturbations differ in makes such a shift smaller, and does not take it out.
    """
    rows = np.sort(np.random.default_rng(adata.n_obs).permutation(adata.n_obs)[:_SAMPLED])
    if len(rows) < 2:
        return
    labels, environments = (label_values(adata.obs, columns).cat for columns in (y_columns, e_columns))
    if adata.n_obs < _FEW_ROWS * len(environments.categories):
        return
    y, e = (torch.from_numpy(of.codes.to_numpy()[rows].astype(np.int64)) for of in (labels, environments))
    features = torch.from_numpy(inputs.source(adata).read(rows)).float()
    share = float(explained_variance(features, e, y, partners="across").share)
    if share < _SHIFTED:
        return
    column = f"adata.obs[{e_columns[0]!r}]"
    if len(e_columns) > 1:
        column = f"adata.obs[{list(e_columns)}].astype(str).agg(' '.join, axis=1)"
    slot, argument = ("obsm", "obsm_key") if inputs.obsm_key else ("layers", "layer")
    standardised = f"scbd.baselines.standardize_by_environment(adata.{inputs.where}, {column})"
    msg = (
        f"Environments ({', '.join(e_columns)}) explain {share:.0%} of the variance of the features at equal "
        "perturbation: whole environments are shifted, and training takes that out in part only. Standardise each "
        f"first: adata.{slot}['standardized'] = {standardised}, and set up with {argument}='standardized'. Where "
        "environments hold different perturbations, add controls=…. Treat new environments alike."
    )
    warnings.warn(msg, UserWarning, stacklevel=3)
