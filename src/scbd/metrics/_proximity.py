"""Whether genes look alike because they lie on one arm of a chromosome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._checks import check_count
from scbd._messages import head
from scbd.metrics._average_precision import rounded, unit_rows
from scbd.metrics._table import label_names, representation

if TYPE_CHECKING:
    from anndata import AnnData

# cosines that are ranked at a time
_BLOCK = 1 << 22
_ALL = "all"


def proximity_bias(profiles: AnnData, arm_key: str, *, n_permutations: int = 1_000, seed: int = 0) -> pd.DataFrame:
    """How often a gene looks more like one of its chromosome arm than like one of another arm.

    A nuclease that cuts a chromosome may cost a cell the whole arm beyond the cut. Guides of one arm then look alike,
    whatever their genes do, and so does a map of them: complexes whose genes are neighbours are found for a wrong
    reason. Not all that is alike on an arm is bias: genes of a family often lie side by side.

    Parameters
    ----------
    profiles
        One row a gene, see :func:`aggregate`. Guides may be given as well, where each gene has one: several of a gene
        are alike for a good reason, and lie on one arm.
    arm_key
        Column of ``obs`` with the arm, such as ``"7q"``; or with the chromosome.
    n_permutations
        Random assignments of genes to arms; no p value is below ``1 / (n_permutations + 1)``.
    seed
        Seed of these assignments.

    Returns
    -------
    Frame with a row an arm that has two genes, sorted by name, and one row ``"all"`` before them: ``n_genes``;
    ``probability`` that of two other genes, one of its arm and one of another, a gene has the higher cosine to the
    first, where equal cosines count half: 0.5 by chance and if all profiles are equal; ``p_value``, one-sided; and
    ``q_value`` (Benjamini and Hochberg over arms; of ``"all"`` its p value).

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If a gene has no arm or several profiles, profiles are not finite, or there are no two arms, one with two genes.

    References
    ----------
    Lazar et al. (2024), High-resolution genome-wide mapping of chromosome-arm-scale truncations induced by CRISPR-Cas9
    editing.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> profiles.obs["arm"] = ["1p", "1p", "7q", "7q"]
    >>> table = scbd.metrics.proximity_bias(profiles, "arm", n_permutations=100)
    >>> table.index.to_list()
    ['all', '1p', '7q']
    """
    from scipy.stats import false_discovery_control

    check_count("n_permutations", n_permutations)
    x = representation(profiles, profiles.X.toarray() if sparse.issparse(profiles.X) else np.asarray(profiles.X))
    names, arms, counts = np.unique(label_names(profiles, arm_key).astype(str), return_inverse=True, return_counts=True)
    _check(profiles, arm_key, counts)
    ranks, members = _ranks(unit_rows(x)), [np.flatnonzero(arms == arm) for arm in np.flatnonzero(counts > 1)]
    sizes = np.array([len(rows) for rows in members])
    observed = _probabilities(ranks, members)
    rng, n_larger = np.random.default_rng(seed), np.zeros(len(observed))
    for _ in range(n_permutations):
        order = rng.permutation(len(x))
        n_larger += _probabilities(ranks, [order[rows] for rows in members]) >= observed - 1e-12
    p = (1 + n_larger) / (1 + n_permutations)
    return pd.DataFrame(
        {
            "n_genes": [sizes.sum(), *sizes],
            "probability": observed,
            "p_value": p,
            "q_value": [p[0], *false_discovery_control(p[1:])],
        },
        index=pd.Index([_ALL, *names[counts > 1].tolist()], name="arm"),
    )


def _check(profiles: AnnData, arm_key: str, counts: np.ndarray) -> None:
    repeated = profiles.obs_names[profiles.obs_names.duplicated()].unique()
    if len(repeated):
        msg = (
            f"{len(repeated)} genes have several profiles ({head(repeated)}): average them, for example with "
            "scbd.metrics.aggregate."
        )
        raise ValueError(msg)
    if len(counts) < 2 or counts.max() < 2:
        msg = (
            f"obs[{arm_key!r}] has {len(counts)} arms, the largest of {counts.max()} genes: to compare genes of one "
            "arm with those of others takes two arms, and two genes on one."
        )
        raise ValueError(msg)


def _ranks(unit: np.ndarray) -> np.ndarray:
    """Of all other genes by their cosine to each, from 1 for the farthest, equal ones sharing theirs; 0 of itself."""
    from scipy.stats import rankdata

    n = len(unit)
    ranks = np.empty((n, n), dtype=np.float32)  # exact for halves up to 8 million
    for start in range(0, n, size := max(1, _BLOCK // n)):
        cosine = rounded(unit[start : start + size] @ unit.T)
        cosine[np.arange(len(cosine)), np.arange(start, start + len(cosine))] = -np.inf
        ranks[start : start + size] = rankdata(cosine, axis=1) - 1
    return ranks


def _probabilities(ranks: np.ndarray, members: list[np.ndarray]) -> np.ndarray:
    """Of all genes, and of those of each arm: ranks of others on the arm, less those that these give each other."""
    sizes, n = np.array([len(rows) for rows in members]), len(ranks)
    of_pairs = ranks.ravel()
    # rows in order lie together in memory, which halves the time
    sums = np.array([of_pairs.take((of := np.sort(rows))[:, None] * n + of).sum(dtype=np.float64) for rows in members])
    mates, others = sizes - 1, n - sizes
    of_arm = (sums / sizes - mates * (mates + 1) / 2) / (mates * others)
    return np.array([np.average(of_arm, weights=sizes), *of_arm])
