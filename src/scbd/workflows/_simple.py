"""The simple embeddings that those of a run are scored beside: the inputs, as they are and standardised."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from scbd._labels import CROSS, as_columns, label_values
from scbd.baselines import pixel_pca, standardize_by_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data import Inputs

logger = logging.getLogger(__name__)

PIXEL_PCA_KEY, FEATURE_PCA_KEY = "X_pixel_pca", "X_feature_pca"
_COMPONENTS, _PCA_CELLS = 50, 20_000
# features of larger tables are read by their components alone: 200 MB, of which a probe takes a multiple
_MOST_VALUES = 50_000_000


def input_pca(adata: AnnData, inputs: Inputs, seed: int) -> np.ndarray:
    """Principal components of pixels, or of features that are standardised, float32 ``(N, 50)`` or fewer."""
    if inputs.image_key is not None:
        return pixel_pca(adata, image_key=inputs.image_key, channels=inputs.channels, seed=seed)
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    source = inputs.source(adata)
    scaler, n = StandardScaler(), source.shape[0]
    rows = np.sort(np.random.default_rng(seed).permutation(n)[:_PCA_CELLS])
    sample = scaler.fit_transform(source.read(rows))
    pca = PCA(min(_COMPONENTS, *sample.shape), svd_solver="randomized", random_state=seed).fit(sample)
    parts = (slice(start, start + _PCA_CELLS) for start in range(0, n, _PCA_CELLS))
    return np.concatenate([pca.transform(scaler.transform(source.read(part))) for part in parts]).astype(np.float32)


def simple_embeddings(
    adata: AnnData, inputs: Inputs, components: np.ndarray, e_key: str | Sequence[str]
) -> dict[str, np.ndarray]:
    """What costs nothing to have, by name: features, or components where these are too many, and the same standardised.

    Parameters
    ----------
    adata
        Cells.
    inputs
        Images or features.
    components
        Of these, see :func:`input_pca`.
    e_key
        Column of the environment that is standardised by, or several for their cross.

    Returns
    -------
    float32 ``(N, D)`` each. Standardised by all cells of an environment, without labels of the perturbation; not where
    an environment has a single cell.
    """
    source = inputs.source(adata)
    name, values = f"{'pixel' if inputs.image_key else 'feature'} PCA", components
    if not inputs.image_key and source.shape[0] * source.shape[1] <= _MOST_VALUES:
        name, values = "features", np.asarray(source.read(slice(0, source.shape[0])), dtype=np.float32)
    environments = label_values(adata.obs, e_key)
    said = f"{name}, standardised by {CROSS.join(as_columns(e_key))}"
    if environments.value_counts().min() < 2:
        logger.info("%s is left out: an environment has a single cell.", said)
        return {name: values}
    return {name: values, said: standardize_by_environment(values, environments)}
