"""Perturbations that an embedding was trained on: it finds their replicates, whether or not they do anything."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY, SEEN_KEY, STYLE_KEY
from scbd._messages import head

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def seen_rows(obs: pd.DataFrame, embedding_key: str) -> np.ndarray | None:
    """A mask ``(N,)`` of rows whose perturbation was trained on, or `None` where nothing says so.

    ``scbd run`` says it in ``obs["scbd_seen"]``, of embeddings under the names that it gives.
    """
    if embedding_key not in (CONTENT_KEY, STYLE_KEY) or SEEN_KEY not in obs:
        return None
    return obs[SEEN_KEY].astype(str).to_numpy() == "True"


def warn_of_seen(labels: np.ndarray, seen: np.ndarray | None, scored: ArrayLike, *, stacklevel: int = 3) -> None:
    """Warn if perturbations that are scored were trained on.

    Parameters
    ----------
    labels
        Perturbation of each row, ``(N,)``.
    seen
        Mask ``(N,)`` of rows that were trained on, or of their perturbations; `None`: nobody knows.
    scored
        Perturbations that are scored, once or more often.
    stacklevel
        As :func:`warnings.warn` has it, seen from here.
    """
    if seen is None:
        return
    asked = pd.unique(np.asarray(scored))
    known = np.intersect1d(asked, pd.unique(labels[seen]))
    if len(known):
        msg = (
            f"The embedding was trained on {len(known):,} of {len(asked):,} perturbations that are scored "
            f"({head(known)}). Training pulls rows of a perturbation together, even if it does nothing: of these, "
            "neither scores nor q values say that there is an effect. Train without some "
            "(scbd.data.hold_out_perturbations), and score those."
        )
        warnings.warn(msg, UserWarning, stacklevel=stacklevel)
