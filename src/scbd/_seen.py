"""Perturbations that an embedding was trained on: it finds their replicates, whether or not they do anything."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import SEEN_KEY, SEEN_OF_KEY
from scbd._messages import head

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def mark_seen(obs: pd.DataFrame, seen: np.ndarray, z_c: np.ndarray) -> None:
    """Write whose perturbation z_c ``(N, D)`` was trained on, a mask ``(N,)``, such that :func:`seen_rows` finds it."""
    obs[SEEN_KEY], obs[SEEN_OF_KEY] = seen, z_c[:, 0].astype(np.float32)


def seen_rows(obs: pd.DataFrame, values: Any) -> np.ndarray | None:
    """A mask ``(N,)`` of rows whose perturbation an embedding was trained on, or `None` where nothing says so.

    ``scbd run`` says it in ``obs["scbd_seen"]``, of the z_c that it wrote: of others, such as that of a model that was
    trained later, it does not hold, whatever their name is.
    """
    if SEEN_KEY not in obs or SEEN_OF_KEY not in obs or not values.shape[1]:
        return None
    if not np.array_equal(np.asarray(values[:, 0], dtype=np.float32), obs[SEEN_OF_KEY].to_numpy(np.float32)):
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
