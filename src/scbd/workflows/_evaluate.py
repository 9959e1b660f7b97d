"""How well embeddings predict labels: a table."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd._matrices import dense
from scbd.baselines import pixel_pca
from scbd.metrics import check_keys, label_probe, trained_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

    from scbd.data import Inputs

PIXEL_PCA_KEY, FEATURE_PCA_KEY = "X_pixel_pca", "X_feature_pca"
_COMPONENTS, _PCA_CELLS = 50, 20_000
_EMBEDDINGS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY, "pixel PCA": PIXEL_PCA_KEY}
_PROBE_CELLS = 100_000
# with fewer, a score on cells that were not trained on is mostly noise
_HELD_OUT_CELLS = 50


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


def evaluate(
    adata: AnnData,
    label_keys: Sequence[str],
    *,
    embeddings: Mapping[str, str] | None = None,
    train_indices: np.ndarray | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """How well z_c, z_s and a PCA of the pixels predict each label, one row an embedding and label.

    Parameters
    ----------
    adata
        Embedded cells.
    label_keys
        Columns of ``obs``.
    embeddings
        Name and ``obsm`` key of each; by default z_c, z_s and a PCA of the pixels, in ``X_scbd_c``, ``X_scbd_s`` and
        ``X_pixel_pca``.
    train_indices
        Cells the encoders were trained on, row numbers or a mask ``(N,)``: probes learn from these and are tested on
        all others. Without them, or where they leave too few others, probes split all cells at random.
    seed
        Seed of the probes.

    Returns
    -------
    The scores of :func:`scbd.metrics.label_probe`, and ``tested_on``: ``"held-out cells"`` or ``"all cells"``.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    TypeError
        If an embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If an embedding is sparse, or see :func:`scbd.metrics.label_probe`.

    Warns
    -----
    UserWarning
        If ``train_indices`` leave too few cells, so that cells are scored that the encoders were trained on.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> report = scbd.workflows.evaluate(adata, ["gene", "well"], train_indices=model.train_indices)
    >>> len(report)  # three embeddings, two labels
    6
    """
    embeddings = _EMBEDDINGS if embeddings is None else embeddings
    check_keys(adata, embeddings.values(), label_keys)
    train = None if train_indices is None else trained_rows(adata, train_indices)
    if train is not None and (left := int((~train).sum())) < _HELD_OUT_CELLS:
        train = None
        msg = (
            f"Scores are flattering: they are of all cells, as {left} of {adata.n_obs:,} were not trained on, and "
            f"{_HELD_OUT_CELLS} are needed. To hold more out, train with train_size=0.7 or split=…"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    spaces = {name: dense(adata.obsm[key], f"obsm[{key!r}]") for name, key in embeddings.items()}
    rows = []
    for label in label_keys:
        for name, space in spaces.items():
            scores: dict[str, Any] = {"tested_on": "all cells" if train is None else "held-out cells"}
            scores |= label_probe(space, adata.obs[label], train=train, max_cells=_PROBE_CELLS, seed=seed)
            rows.append({"embedding": name, "label": label, **scores})
    return pd.DataFrame(rows)
