"""Simulation of the features of wells on plates, with known effects of perturbations and of plates.

The best embedding of the features, which shows the effects of perturbations most clearly, is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count, check_number
from scbd._shared.linear_maps import discriminant_axes, whitening_matrix
from scbd.datasets._simulated import PLATE_SHAPES, POSITION_EFFECTS, add_layout, well_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

# number of rows and number of columns of the plates that can be simulated, from small to large plates
_PLATES = [PLATE_SHAPES[n] for n in (96, 384, 1536)]
# _N_PERTURBATION_DIRECTIONS: number of directions in feature space along which perturbations differ.
# _N_PLATE_DIRECTIONS: number of directions in feature space along which plates and wells differ.
_N_PERTURBATION_DIRECTIONS, _N_PLATE_DIRECTIONS = 16, 8
# fraction of the variance of the effects of genes (perturbations) that is common to all genes of a complex
_COMPLEX_VARIANCE_FRACTION = 0.8
# number of rows of the feature table that are simulated at once
_ROWS_DRAWN_AT_ONCE = 50_000


def simulated_profiles(
    n_perturbations: int = 200,
    n_plates: int = 8,
    *,
    cells_per_well: int = 1,
    n_controls: int = 32,
    n_features: int = 128,
    genes_per_complex: int = 4,
    n_plate_maps: int = 1,
    one_layout: bool = True,
    effect_size: float = 0.5,
    active: float = 1.0,
    plate_effect: float = 0.7,
    position_effect: float = 0.3,
    well_effect: float = 0.2,
    interaction: float = 0.0,
    gain_effect: float = 0.0,
    seed: int = 0,
) -> AnnData:
    r"""Simulate a table of features of wells on plates, or of cells in wells, with a known best embedding.

    The features of a cell with perturbation :math:`y` on plate :math:`e` at position :math:`p` are

    .. math:: x = g_e \odot (b_y + a_e + c_{ye} + l_p + w_{ep} + \varepsilon).

    All terms in parentheses have mean 0, and those of perturbations, plates, wells and cells are normally distributed:

    =====================  =============================================================================
    :math:`g_e`            gains of the plate, one factor per feature; 1 with ``gain_effect=0``
    :math:`b_y`            effect of the perturbation: similar within a complex, 0 for controls
    :math:`a_e`            effect of the plate
    :math:`c_{ye}`         effect of the perturbation on this plate only (interaction)
    :math:`l_p`            gradients and edge effects of the position, the same on all plates
    :math:`w_{ep}`         effect of the well
    :math:`\varepsilon`    variation between cells of a well
    =====================  =============================================================================

    In the feature space, perturbations differ along 16 random directions, plates and wells along 8, and positions along
    three. New plates and perturbations would differ along the same directions, which is all that can be learned about
    them in advance. With ``gain_effect=0``, the best embedding is linear and is returned as ``oracle``.

    Parameters
    ----------
    n_perturbations, n_plates
        Number of perturbations, and number of plates. Plates have 96, 384 or 1,536 wells: the smallest size that is
        sufficient.
    cells_per_well
        Number of rows of the table per well: 1 (default) for a table of wells, more for a table of cells.
    n_controls
        Number of control wells on each plate.
    n_features
        Number of features.
    genes_per_complex
        Number of perturbations (genes) per complex. Perturbations of the same complex have similar effects.
    n_plate_maps
        Number of plate maps. A plate map determines which perturbations are on a plate. Each perturbation is assigned
        to one map, and each plate has one map. Controls are on all plates. With one map, every perturbation is on every
        plate.
    one_layout
        Whether a perturbation has the same position on all plates that contain it, as in most screens. Otherwise, each
        plate has its own random layout.
    effect_size, plate_effect, position_effect, well_effect, interaction
        Standard deviations, over features, of the effects of perturbations (in complexes with an effect), plates,
        positions and wells, and of the interaction of perturbation and plate. The standard deviation between cells of a
        well is 1.
    active
        Fraction of complexes that have an effect.
    gain_effect
        Standard deviation of the logarithm of the gains (factors) by which plates multiply features.
    seed
        Seed of all random numbers.

    Returns
    -------
    AnnData with features in ``X``, float32, and ``obs``: ``perturbation`` (``"control"`` or a gene), ``complex``,
    ``plate``, ``well`` (position on the plate) and ``plate_map``. The ground truth is in ``uns["truth"]``:

    - ``effects``: effect of each perturbation on each feature, perturbation × feature;
    - ``network``: data frame with the columns ``source`` (complex) and ``target`` (gene), of complexes with an effect;
    - ``oracle``: matrix, feature × component, for the best embedding, ``adata.X @ oracle``. The embedding whitens the
      variance that is not due to perturbations. Each direction is then weighted by the proportion of its variance that
      is due to perturbations. Both variances are expectations over all perturbations, plates and positions that could
      be drawn along the simulated directions.

    Raises
    ------
    ValueError
        If a number is out of range, there are more plate maps than plates or than perturbations, or a plate map needs
        more wells than the largest plate has.

    Examples
    --------
    >>> wells = scbd.datasets.simulated_profiles(40, 4, n_controls=16, n_features=16)
    >>> wells.shape  # four plates with 56 used wells each
    (224, 16)
    >>> best = wells.X @ wells.uns["truth"]["oracle"].to_numpy()
    >>> keys = {"y_key": "perturbation", "e_key": "plate", "control": "control", "n_permutations": 100}
    >>> scores = [scbd.metrics.replicate_retrieval(wells, x, **keys).mean_average_precision for x in (wells.X, best)]
    >>> scores[1] - scores[0] > 0.2  # the best embedding is better than the unmodified features
    True
    """
    from anndata import AnnData

    counts = {"n_perturbations": n_perturbations, "n_plates": n_plates, "cells_per_well": cells_per_well}
    counts |= {"n_features": n_features, "genes_per_complex": genes_per_complex, "n_plate_maps": n_plate_maps}
    for name, count in counts.items():
        check_count(name, count)
    sizes = {"effect_size": effect_size, "plate_effect": plate_effect, "position_effect": position_effect}
    sizes |= {"well_effect": well_effect, "interaction": interaction, "gain_effect": gain_effect}
    for name, size in (sizes | {"n_controls": n_controls}).items():
        check_number(name, size)
    check_number("active", active, 1)
    if n_plate_maps > min(n_plates, n_perturbations):
        msg = f"n_plate_maps={n_plate_maps}: there are fewer plates, or fewer perturbations."
        raise ValueError(msg)

    rng = np.random.default_rng(seed)
    wells = _draw_plates(rng, n_perturbations, n_plates, n_controls, n_plate_maps, one_layout)
    complexes = np.arange(n_perturbations) // genes_per_complex
    does = rng.permutation(complexes[-1] + 1)[complexes] < round(active * (complexes[-1] + 1))

    # Draw the directions in feature space along which perturbations, plates and positions have effects. New
    # perturbations and plates would differ along the same directions.
    phenotype, stain = (_draw_directions(rng, n, n_features) for n in (_N_PERTURBATION_DIRECTIONS, _N_PLATE_DIRECTIONS))
    layout = _draw_directions(rng, len(POSITION_EFFECTS), n_features)
    cell = _draw_cell_covariance_root(rng, n_features)
    effects = np.sqrt(_COMPLEX_VARIANCE_FRACTION) * rng.normal(size=(complexes[-1] + 1, len(phenotype)))[complexes]
    effects += np.sqrt(1 - _COMPLEX_VARIANCE_FRACTION) * rng.normal(size=effects.shape)
    b = effect_size * does[:, None] * effects
    c = interaction * does[:, None] * rng.normal(size=(n_plates, *b.shape))
    plate, y = wells["plate"].to_numpy(), wells["perturbation"].to_numpy()
    a = plate_effect * rng.normal(size=(n_plates, len(stain)))[plate]
    a += well_effect * rng.normal(size=(len(y), len(stain)))
    of_well = a @ stain + position_effect * wells[list(POSITION_EFFECTS)].to_numpy() @ layout
    of_well += np.where(y[:, None] < 0, 0, b[y] + c[plate, y]) @ phenotype
    gains = np.exp(gain_effect * rng.normal(size=(n_plates, n_features))).astype(np.float32)

    rows = rng.permutation(np.repeat(np.arange(len(wells)), cells_per_well))
    x = np.empty((len(rows), n_features), dtype=np.float32)
    for start in range(0, len(rows), _ROWS_DRAWN_AT_ONCE):
        of = rows[start : start + _ROWS_DRAWN_AT_ONCE]
        noise = rng.standard_normal((len(of), n_features), dtype=np.float32) @ cell
        x[start : start + _ROWS_DRAWN_AT_ONCE] = gains[plate[of]] * (of_well[of].astype(np.float32) + noise)

    # The oracle whitens the expected variance within perturbations, and weights the directions of the expected variance
    # between them.
    within = cell.T @ cell + (plate_effect**2 + well_effect**2) * stain.T @ stain
    within += position_effect**2 * layout.T @ layout + interaction**2 * does.mean() * phenotype.T @ phenotype
    between = effect_size**2 * does.mean() * phenotype.T @ phenotype
    white = whitening_matrix(within, 0.0)
    axes = white @ discriminant_axes(white.T @ between @ white, n_components=len(phenotype), rows=1)

    genes = [f"GENE{i + 1}" for i in range(n_perturbations)]
    features = [f"feature_{i + 1}" for i in range(n_features)]
    network = pd.DataFrame({"source": [f"complex_{i + 1}" for i in complexes[does]], "target": np.array(genes)[does]})
    network.attrs["kind"] = "sets"
    truth = {
        "effects": pd.DataFrame(b @ phenotype, genes, features),
        "oracle": pd.DataFrame(axes, features, [f"component_{i + 1}" for i in range(axes.shape[1])]),
        "network": network,
    }
    obs = _name_labels(wells.iloc[rows], complexes)
    return AnnData(X=x, obs=obs, var=pd.DataFrame(index=features), uns={"truth": truth})


def _draw_plates(
    rng: np.random.Generator, n_perturbations: int, n_plates: int, n_controls: int, n_maps: int, one_layout: bool
) -> pd.DataFrame:
    """Draw a table of wells: one row per well, with the codes of plate, plate map and perturbation (-1 for controls).

    The table also has the place of each well on its plate: ``row`` and ``column`` (from 0), and the standardised
    columns of :func:`add_layout`.
    """
    map_of = rng.permutation(n_perturbations) % n_maps
    sizes = np.bincount(map_of) + n_controls
    shape = next((shape for shape in _PLATES if np.prod(shape) >= sizes.max()), None)
    if shape is None:
        msg = f"{sizes.max():,} wells do not fit on a plate of 1,536: ask for more plate maps (n_plate_maps)."
        raise ValueError(msg)
    parts = []
    orders = rng.permuted(np.tile(np.arange(np.prod(shape)), (n_maps if one_layout else n_plates, 1)), axis=1)
    for plate in range(n_plates):
        of_map = np.flatnonzero(map_of == plate % n_maps)
        y = np.concatenate([of_map, np.full(n_controls, -1)])
        place = orders[plate % n_maps if one_layout else plate][: len(y)]
        labels = {"plate": plate, "plate_map": plate % n_maps, "perturbation": y}
        parts.append(pd.DataFrame(labels | {"row": place // shape[1], "column": place % shape[1]}))
    return add_layout(pd.concat(parts, ignore_index=True), shape)


def _draw_directions(rng: np.random.Generator, n: int, n_features: int) -> np.ndarray:
    """Draw ``n`` random directions in the space of F features, ``(n, F)``.

    The length of the directions is chosen such that independent coordinates with variance 1 along all of them give each
    feature an expected variance of 1.
    """
    return rng.normal(size=(n, n_features)) / np.sqrt(n)


def _draw_cell_covariance_root(rng: np.random.Generator, n_features: int) -> np.ndarray:
    """Draw a matrix ``(F, F)``, float32, that maps white noise to the variation of F features between cells of a well.

    The standard deviations along the principal axes of this variation fall from 1 to 0.1, equally spaced on a
    logarithmic scale, and are then multiplied by a common factor such that the mean variance of the features is 1.
    """
    axes = np.linalg.qr(rng.normal(size=(n_features, n_features)))[0]
    sd = np.geomspace(1, 0.1, n_features)
    return (sd[:, None] * axes / np.sqrt(np.mean(sd**2))).astype(np.float32)


def _name_labels(wells: pd.DataFrame, complexes: np.ndarray) -> pd.DataFrame:
    """Return the names of the perturbation, complex, plate, well and plate map of each row, as categorical columns."""
    y = wells["perturbation"].to_numpy()
    codes = wells.assign(complex=np.where(y < 0, -1, complexes[y]), well=100 * wells["row"] + wells["column"])
    names: dict[str, Callable[[int], str]] = {
        "perturbation": lambda y: "control" if y < 0 else f"GENE{y + 1}",
        "complex": lambda c: "none" if c < 0 else f"complex_{c + 1}",
        "plate": lambda e: f"plate_{e + 1}",
        "well": lambda place: well_name(*divmod(place, 100)),
        "plate_map": lambda m: f"map_{m + 1}",
    }
    labels = {column: pd.Categorical(codes[column]).rename_categories(name) for column, name in names.items()}
    return pd.DataFrame(labels, index=pd.RangeIndex(len(wells)).astype(str))
