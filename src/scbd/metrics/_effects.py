"""Magnitude and consistency of the effect of each perturbation, with p values from permuted labels.

The magnitude is the distance of a perturbation from the controls, and the consistency is the similarity of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from scbd._shared.checks import check_count
from scbd._shared.messages import warn_user
from scbd.metrics._arguments import (
    control_rows,
    get_finite_embedding,
    get_label_texts,
    random_rows,
    training_mask_or_none,
    warn_if_models_are_mixed,
    warn_if_seen_in_training,
)
from scbd.metrics._average_precision import scale_to_unit_length
from scbd.metrics._resampling import permute_within_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# number of random permutations of the labels for which scores are computed at once
_PERMUTATIONS_PER_BLOCK = 100
# Maximum number of rows per perturbation and environment (median over perturbations) in a table of wells. With more
# rows, a warning states that the rows are probably cells, because a plate rarely holds more than 8 wells of one
# perturbation, and a well rarely holds fewer than 8 cells.
_MAX_WELLS_PER_ENVIRONMENT = 8


def perturbation_effects(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    y_key: str | Sequence[str],
    control: object | Sequence[object],
    e_key: str | Sequence[str] | None = None,
    trained_on: str | ArrayLike | None = None,
    max_cells: int = 500,
    n_permutations: int = 1_000,
    seed: int = 0,
) -> pd.DataFrame:
    r"""Compute the magnitude and the consistency of each perturbation, with p values from permuted labels.

    **Magnitude** is the energy distance between the rows :math:`x` of a perturbation and the controls :math:`c`,
    :math:`2 \mathbb{E} \lVert x - c \rVert - \mathbb{E} \lVert x - x' \rVert - \mathbb{E} \lVert c - c' \rVert`. No row
    is compared with itself. The mean over permuted labels is subtracted from the energy distance, so that the magnitude
    of a perturbation without effect is 0 on average.

    **Consistency** is the mean cosine between two rows of a perturbation, after the mean of the controls is subtracted.

    For the **p values**, the labels "perturbation" and "control" are exchanged at random between the rows of a
    perturbation and its controls. The p value is the proportion of random labels for which the magnitude (or the
    consistency) is at least as large as for the true labels.

    If all plates have the same layout, positions on the plate have effects as well. This function does not distinguish
    effects of positions from effects of perturbations. :func:`replicate_retrieval` estimates effects of positions by
    its floor, the score of control positions.

    Parameters
    ----------
    adata
        Wells, or cells of a pooled screen. Rows are treated as independent. Cells of an arrayed screen share the effect
        of their well: average them to wells first.
    rep
        Key of ``obsm``, a layer, ``"X"``, or an array ``(N, D)``.
    y_key
        Column of ``obs`` with the perturbation, or several columns for their cross.
    control
        Value or values of ``y_key`` for unperturbed rows.
    e_key
        Column of ``obs`` with the environment, or several columns for their cross. If it is given, a perturbation is
        compared with controls of its own environments only, labels are permuted within environments, and consistency is
        computed from pairs of rows in different environments.
    trained_on
        Rows that the embedding was trained on, in the formats that :func:`replicate_retrieval` accepts. They are only
        used to warn if perturbations were seen in training.
    max_cells
        Maximum number of rows of each perturbation, and of its controls. If there are more rows, a random subset is
        used.
    n_permutations
        Number of random permutations of the labels. No p value is below ``1 / (n_permutations + 1)``.
    seed
        Seed of subsets and permutations.

    Returns
    -------
    Frame with one row per perturbation, sorted by name, and these columns:

    - ``n``: number of rows of the perturbation that were used
    - ``magnitude``, ``magnitude_p``, ``magnitude_q``: magnitude with its p value and q value
    - ``consistency``, ``consistency_p``, ``consistency_q``: consistency with its p value and q value

    q values are adjusted by the method of Benjamini and Hochberg. Consistency is NaN if there is no pair of rows to
    compare, for example for a single row. Magnitude and consistency are NaN if no environment of the perturbation holds
    controls.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, if there are fewer than two controls, or if all rows are controls.

    Warns
    -----
    UserWarning
        If labels differ from those of controls only in blanks, case or punctuation; if perturbations have more than 8
        rows per environment (median), which indicates that rows are cells; if some perturbations were seen in training;
        or if rows of several models of :func:`scbd.cross_fit` are compared.

    References
    ----------
    Székely and Rizzo (2013), Energy statistics. Celik et al. (2024), Building, benchmarking, and exploring perturbative
    maps of transcriptional and morphological data.

    Examples
    --------
    >>> wells = scbd.datasets.simulated_profiles(40, 4, n_controls=16, n_features=16)
    >>> how = {"y_key": "perturbation", "control": "control", "e_key": "plate", "n_permutations": 50}
    >>> effects = scbd.metrics.perturbation_effects(wells, wells.X, **how)
    >>> effects[["magnitude", "consistency"]].shape
    (40, 2)
    """
    check_count("max_cells", max_cells)
    check_count("n_permutations", n_permutations)
    x, y = np.asarray(get_finite_embedding(adata, rep), dtype=np.float64), get_label_texts(adata, y_key)
    environments = np.zeros(len(x)) if e_key is None else get_label_texts(adata, e_key)
    e = np.unique(environments, return_inverse=True)[1]
    is_control = control_rows(y, control, y_key)
    if is_control.sum() < 2 or is_control.all():
        msg = f"{is_control.sum()} of {len(y)} rows are controls: effects need two controls, and perturbations."
        raise ValueError(msg)
    _warn_if_rows_are_cells(y[~is_control], e[~is_control], in_environments=e_key is not None)
    warn_if_models_are_mixed(adata, e_key)
    warn_if_seen_in_training(y, training_mask_or_none(adata, trained_on), y[~is_control])
    rng = np.random.default_rng(seed)

    def up_to_max_cells(mask: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(mask)
        return rows[random_rows(len(rows), max_cells, rng)]

    rows = {name: up_to_max_cells(y == name) for name in np.unique(y[~is_control])}
    table = pd.DataFrame({"n": {name: len(of) for name, of in rows.items()}}, index=pd.Index(rows, name="perturbation"))
    found = []
    for of in rows.values():
        controls = up_to_max_cells(is_control & np.isin(e, e[of]))
        found.append(
            _perturbation_effect(x, e, of, controls, n_permutations, rng) if len(controls) else [(np.nan, np.nan)] * 2
        )
    for i, name in enumerate(("magnitude", "consistency")):
        table[[name, f"{name}_p"]] = [of[i] for of in found]
        p = table[f"{name}_p"].dropna()
        table[f"{name}_q"] = pd.Series(false_discovery_control(p) if len(p) else [], p.index, dtype=float)
    return table


def _warn_if_rows_are_cells(y: np.ndarray, e: np.ndarray, *, in_environments: bool) -> None:
    typical = pd.DataFrame({"y": y, "e": e}).value_counts().median()
    if typical > _MAX_WELLS_PER_ENVIRONMENT:
        msg = (
            f"Perturbations have {typical:g} rows in an environment (median), as cells have. P values take rows for "
            "independent, as cells of a pooled screen nearly are. Cells of an arrayed screen share what their well "
            f"adds: average them to wells first{'' if in_environments else '; of wells on several plates, give e_key'}."
        )
        warn_user(msg)


def _perturbation_effect(
    x: np.ndarray, e: np.ndarray, rows: np.ndarray, controls: np.ndarray, n_permutations: int, rng: np.random.Generator
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Compute the magnitude and the consistency of one perturbation, each with its p value.

    The magnitude is the energy distance between rows of the perturbation and controls, minus its expected value under
    permuted labels. ``rows`` are the row numbers of the perturbation in the embedding ``x``, and ``controls`` are those
    of the controls.
    """
    from scipy.spatial.distance import pdist, squareform

    both, elsewhere = np.concatenate([rows, controls]), bool(np.ptp(e) > 0)
    # one control is subtracted from all rows, so that x is exactly 0 if all rows are equal
    x, e = x[both] - x[controls[0]], e[both]
    distance, total = squareform(pdist(x)), x.sum(0)
    is_perturbed = np.zeros((1, len(both)))
    is_perturbed[0, : len(rows)] = 1

    def scores(labels: np.ndarray) -> np.ndarray:
        # Each row of labels is one choice of perturbed rows, with 1 for perturbed rows and 0 for controls.
        consistencies = [
            _consistency_across_environments(x, e, np.flatnonzero(chosen), total, elsewhere) for chosen in labels
        ]
        touched, inside = labels @ distance.sum(1), ((labels @ distance) * labels).sum(1)
        energies = _energy_distance_from_sums(touched, inside, distance.sum(), labels.sum(1), len(both))
        return np.stack([energies, consistencies])

    observed, n_larger = scores(is_perturbed)[:, 0], np.zeros(2)
    for start in range(0, n_permutations, _PERMUTATIONS_PER_BLOCK):
        n_in_block = min(_PERMUTATIONS_PER_BLOCK, n_permutations - start)
        null = scores(permute_within_groups(is_perturbed[0], e, n_in_block, rng))
        n_larger += np.count_nonzero(observed - 1e-9 * abs(observed) <= null.T, axis=0)
    p = np.where(np.isnan(observed), np.nan, (1 + n_larger) / (1 + n_permutations))
    expected = _expected_energy_distance(distance, is_perturbed[0], e)
    return (float(observed[0]) - expected, float(p[0])), (float(observed[1]), float(p[1]))


def _expected_energy_distance(distance: np.ndarray, chosen: np.ndarray, e: np.ndarray) -> float:
    """Compute the expected energy distance between chosen rows and all other rows, if rows are chosen at random.

    The expected value is the mean over all choices with the same number of chosen rows in each environment as in
    ``chosen``. ``chosen`` is ``(N,)``, with 1 for chosen rows and 0 for all other rows. The expected value is not 0 if
    chosen rows and other rows are distributed differently over environments: differences between environments then
    contribute to the distance.
    """
    member = (e == np.unique(e)[:, None]).astype(float)
    n, size = member @ chosen, member.sum(1)
    # Probability that both rows of a pair are chosen, as a matrix over the environments of the first and of the second
    # row. Entries on the diagonal are for two rows of the same environment.
    both = np.outer(n / size, n / size)
    np.fill_diagonal(both, n * (n - 1) / np.maximum(size * (size - 1), 1))
    between = member @ distance @ member.T
    touched = (n / size) @ between.sum(1)
    return float(_energy_distance_from_sums(touched, (both * between).sum(), distance.sum(), n.sum(), len(e)))


def _energy_distance_from_sums(touched: Any, inside: Any, total: float, n: Any, size: int) -> Any:
    """Compute the energy distance between ``n`` rows and the other ``size - n`` rows, from sums of distances.

    ``touched`` is the sum of the distances from the ``n`` rows to all rows, ``inside`` is the sum of the distances
    among the ``n`` rows, and ``total`` is the sum of the distances among all rows. ``inside`` and ``total`` count each
    pair of rows twice. The mean distance within a group of a single row counts as 0.
    """
    m, across = size - n, touched - inside
    outside = total - 2 * across - inside
    return 2 * across / (n * m) - inside / np.maximum(n * (n - 1), 1) - outside / np.maximum(m * (m - 1), 1)


def _consistency_across_environments(
    x: np.ndarray, e: np.ndarray, chosen: np.ndarray, total: np.ndarray, elsewhere: bool
) -> float:
    """Compute the consistency of chosen rows: their mean cosine with each other, relative to all other rows.

    The mean of all other rows is subtracted before cosines are computed. ``total`` is the sum of all rows, ``(D,)``. If
    ``elsewhere`` is true, only pairs of rows from different environments are used. The result is NaN if there is no
    pair of rows to compare.
    """
    own = x[chosen]
    unit, e = scale_to_unit_length(own - (total - own.sum(0)) / (len(x) - len(own))), e[chosen]
    # Sum of the rows of each group. Rows of the same group are not compared with each other. A group is a single row
    # or, if elsewhere is true, all rows of one environment.
    own, n_own = unit, np.ones(len(unit))
    if elsewhere:
        member = (e == np.unique(e)[:, None]).astype(float)
        own, n_own = member @ unit, member.sum(1)
    n_pairs = len(unit) ** 2 - np.square(n_own).sum()
    return float((np.square(unit.sum(0)).sum() - np.square(own).sum()) / n_pairs) if n_pairs else np.nan
