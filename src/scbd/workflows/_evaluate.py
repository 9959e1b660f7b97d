"""How well embeddings predict labels: a table."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd.metrics import check_keys, label_probe, stored_embedding, trained_rows
from scbd.workflows._simple import PIXEL_PCA_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

_EMBEDDINGS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY, "pixel PCA": PIXEL_PCA_KEY}
_PROBE_CELLS = 100_000
# with fewer, a score on cells that were not trained on is mostly noise
_HELD_OUT_CELLS = 50


def evaluate(
    adata: AnnData,
    label_keys: Sequence[str],
    *,
    embeddings: Mapping[str, str | np.ndarray] | None = None,
    train_indices: str | ArrayLike | None = None,
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
        Name of each and its key in ``obsm``, or an array ``(N, D)``; by default z_c, z_s and a PCA of the pixels, in
        ``X_scbd_c``, ``X_scbd_s`` and ``X_pixel_pca``.
    train_indices
        Cells the encoders were trained on, row numbers, a mask ``(N,)``, or a column of ``obs`` that says ``True`` or
        ``"train"`` there, such as ``"scbd_split"`` of ``scbd run``: probes learn from these and are tested on all
        others. Without them, or where they leave too few others, probes split all cells at random.
        :func:`scbd.workflows.compare` has probes that learn from a part of the others, which are fewer: its scores are
        lower.
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
    check_keys(adata, [key for key in embeddings.values() if isinstance(key, str)], label_keys)
    train = None if train_indices is None else trained_rows(adata, train_indices, "train_indices")
    if train is not None and (left := int((~train).sum())) < _HELD_OUT_CELLS:
        train = None
        msg = (
            f"Scores are flattering: they are of all cells, as {left} of {adata.n_obs:,} were not trained on, and "
            f"{_HELD_OUT_CELLS} are needed. To hold more out, train with train_size=0.7 or split=…"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    spaces = {
        name: stored_embedding(adata, given) if isinstance(given, str) else given for name, given in embeddings.items()
    }
    rows = []
    for label in label_keys:
        for name, space in spaces.items():
            scores: dict[str, Any] = {"tested_on": "all cells" if train is None else "held-out cells"}
            scores |= label_probe(space, adata.obs[label], train=train, max_cells=_PROBE_CELLS, seed=seed)
            rows.append({"embedding": name, "label": label, **scores})
    return pd.DataFrame(rows)
