"""Which cells a probe learns from, and which it is tested on, so that nothing but the embedding tells the label."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.metrics._table import label_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def split_groups(
    codes: np.ndarray, groups: np.ndarray, train_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Masks ``(N,)`` of cells to learn from and to test on: whole groups, of each label some on either side.

    Labels are taken one after another, those with fewest groups first, and of their groups that lie on no side yet the
    fraction is drawn that is missing. Cells of labels that have groups on one side only are on neither.

    Parameters
    ----------
    codes, groups
        Label and group of each cell, integers ``(N,)``. A group may hold several labels.
    train_fraction
        Of each label's groups, to learn from; at least one, and not all.
    rng
        What the groups are drawn by.
    """
    of_label = pd.DataFrame({"label": codes, "group": groups}).drop_duplicates().groupby("label")["group"]
    learns = np.full(groups.max() + 1, -1)  # not decided
    for label in of_label.size().sort_values(kind="stable").index:
        mine = rng.permutation(of_label.get_group(label).to_numpy())
        if len(mine) < 2:
            continue
        free = mine[learns[mine] < 0]
        wanted = np.clip(round(train_fraction * len(mine)), 1, len(mine) - 1) - (learns[mine] == 1).sum()
        learns[free] = 0
        learns[free[: max(0, wanted)]] = 1
    side = learns[groups]
    n = codes.max() + 1
    both = (np.bincount(codes[side == 1], minlength=n) > 0) & (np.bincount(codes[side == 0], minlength=n) > 0)
    return (side == 1) & both[codes], (side == 0) & both[codes]


def probe_groups(
    adata: AnnData,
    y_key: str,
    e_key: str | Sequence[str] | None,
    guide_key: str | None,
    group_key: str | Sequence[str] | None,
) -> np.ndarray | None:
    """What the probe of y holds out, ``(N,)``, as :func:`scbd.metrics.benchmark` says of ``group_key``.

    Warns
    -----
    UserWarning
        If perturbations and environments nest so that any probe of the perturbation may read the environment.
    """
    if group_key != "auto":
        return None if group_key is None else label_names(adata, group_key)
    e, guide = (None if key is None else label_names(adata, key) for key in (e_key, guide_key))
    groups, wrong = groups_of_design(label_names(adata, y_key), e, guide)
    if wrong is not None:
        msg = (
            f"Between y_key={y_key!r} and e_key={e_key!r}, {wrong}: an embedding that holds the environment alone "
            "also predicts the perturbation. y_probe_f1 and similar scores do not measure biology alone here."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    return groups


def groups_of_design(
    y: np.ndarray, e: np.ndarray | None, guide: np.ndarray | None
) -> tuple[np.ndarray | None, str | None]:
    """What a probe of y should hold out as a whole, so that it cannot read the environment or the guide instead.

    Environments, where most cells lie in one that holds a single perturbation (wells of an arrayed screen), together
    with the guides that share them; otherwise guides, where they belong to one perturbation; otherwise nothing.

    Parameters
    ----------
    y, e, guide
        Labels ``(N,)``.

    Returns
    -------
    Groups ``(N,)`` or None, and what is wrong with the design, for a sentence, or None.
    """
    guide = guide if guide is not None and _tells(guide, y) else None
    if e is None or len(np.unique(e)) < 2:
        return _first_divisible(y, guide), None
    if not _tells(e, y):
        return _first_divisible(y, guide), "most perturbations lie in one environment only" if _tells(y, e) else None
    groups = _first_divisible(y, None if guide is None else _joined(e, guide), e)
    wrong = "most environments hold one perturbation, and fewer than two perturbations have two environments"
    return groups, wrong if groups is None else None


def _first_divisible(label: np.ndarray, *candidates: np.ndarray | None) -> np.ndarray | None:
    """The first groups of which two labels have several."""
    for group in candidates:
        if group is not None:
            pairs = pd.DataFrame({"label": label, "group": group}).drop_duplicates()
            if (pairs.groupby("label").size() > 1).sum() > 1:
                return group
    return None


def _tells(group: np.ndarray, label: np.ndarray) -> bool:
    """Whether most cells lie in a group of a single label."""
    pairs = pd.DataFrame({"group": group, "label": label}).value_counts()
    sizes, n_labels = pairs.groupby(level="group").sum(), pairs.groupby(level="group").size()
    return bool(sizes[n_labels == 1].sum() > 0.5 * len(group))


def _joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Components of what shares a group of either kind, integers ``(N,)``."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    (first, a), (second, b) = (np.unique(groups, return_inverse=True) for groups in (one, other))
    size = len(first) + len(second)
    links = coo_array((np.ones(len(a)), (a, len(first) + b)), shape=(size, size))
    return connected_components(links, directed=False)[1][a]
