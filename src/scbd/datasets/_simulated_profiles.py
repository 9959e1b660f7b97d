"""Simulated plates as tables of features: one layout, edges and gradients, plate maps; the best embedding is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_count, check_number
from scbd._linear_maps import discriminants, whitening
from scbd.datasets._simulated import LAYOUT, SHAPES, add_layout, well_name

if TYPE_CHECKING:
    from anndata import AnnData

# of the plates that are made
_PLATES = [SHAPES[n] for n in (96, 384, 1536)]
# along how many directions perturbations differ, and plates and wells
_PHENOTYPES, _STAINS = 16, 8
# of the variance of what genes of a complex do, the share that they have in common
_SHARED = 0.8
_BLOCK = 50_000


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
    r"""Simulate plates of wells, or of cells in wells, as features: made at once, with a best embedding that is known.

    Features of a cell of perturbation :math:`y` on plate :math:`e`, at position :math:`p`, are

    .. math:: x = g_e \odot (b_y + a_e + c_{ye} + l_p + w_{ep} + \varepsilon),

    all of them normal with mean 0: what the perturbation does (:math:`b_y`; complexes do much the same, and controls
    nothing), the plate, what the perturbation does on this plate alone, edges and gradients that all plates share, the
    well, and the cell. Perturbations differ along 16 directions of the features, plates and wells along 8, positions
    along 3: all that can be learned of plates and perturbations yet to come. With ``gain_effect=0``, where no plate
    multiplies (:math:`g_e = 1`), the best embedding is linear, and told.

    Parameters
    ----------
    n_perturbations, n_plates
        How many there are. Plates have 96, 384 or 1,536 wells, whichever holds them.
    cells_per_well
        Rows a well: 1 for a table of wells.
    n_controls
        Wells of controls on each plate.
    n_features
        Number of features.
    genes_per_complex
        Perturbations that do much the same.
    n_plate_maps
        Perturbations are dealt to so many plate maps, and plates to one of these each; controls are on all. With one,
        every perturbation is on every plate.
    one_layout
        Whether a perturbation has the same position on all its plates, as in most screens; otherwise, each plate has
        a layout of its own.
    effect_size, plate_effect, position_effect, well_effect, interaction
        Standard deviations, over features, of what active perturbations, plates, positions, wells, and perturbation and
        plate together do; that of cells in a well is 1.
    active
        Share of the complexes that do anything.
    gain_effect
        Standard deviation of the logarithm of what plates multiply features by.
    seed
        Seed of everything.

    Returns
    -------
    AnnData with ``X`` float32 and ``obs``: ``perturbation`` (``"control"`` or a gene), ``complex``, ``plate``,
    ``well`` (position on the plate), ``plate_map``. The truth is in ``uns["truth"]``: ``effects`` (perturbation ×
    feature), ``network`` (frame ``source, target``: complex and gene, of active ones), and ``oracle`` (feature ×
    component): of ``adata.X @ oracle``, each direction is weighed by the share of its variance that belongs to
    perturbations, where the rest has been made white; over all perturbations, plates and positions that could be drawn
    along these directions.

    Raises
    ------
    ValueError
        If a number is out of range, or more wells are asked for than the largest plate has.

    Examples
    --------
    >>> wells = scbd.datasets.simulated_profiles(40, 4, n_controls=16, n_features=16)
    >>> wells.shape  # four plates of 56 wells
    (224, 16)
    >>> best = wells.X @ wells.uns["truth"]["oracle"].to_numpy()
    >>> keys = {"y_key": "perturbation", "e_key": "plate", "control": "control", "n_permutations": 100}
    >>> scores = [scbd.metrics.replicate_retrieval(wells, x, **keys).mean_average_precision for x in (wells.X, best)]
    >>> scores[1] - scores[0] > 0.2  # the regret of the features as they are
    True
    """
    sizes = {"effect_size": effect_size, "plate_effect": plate_effect, "position_effect": position_effect}
    sizes |= {"well_effect": well_effect, "interaction": interaction, "gain_effect": gain_effect}
    counts = {"n_perturbations": n_perturbations, "n_plates": n_plates, "cells_per_well": cells_per_well}
    counts |= {"n_features": n_features, "genes_per_complex": genes_per_complex, "n_plate_maps": n_plate_maps}
    _check(counts, sizes | {"n_controls": n_controls}, active)
    rng = np.random.default_rng(seed)
    wells = _layout(rng, n_perturbations, n_plates, n_controls, n_plate_maps, one_layout)
    complexes = np.arange(n_perturbations) // genes_per_complex
    does = rng.permutation(complexes[-1] + 1)[complexes] < round(active * (complexes[-1] + 1))

    # what differs, and along which directions of the features; new plates and perturbations differ along the same
    phenotype, stain = (_directions(rng, n, n_features) for n in (_PHENOTYPES, _STAINS))
    layout = _directions(rng, len(LAYOUT), n_features)
    cell = _cells(rng, n_features)
    b = np.sqrt(_SHARED) * rng.normal(size=(complexes[-1] + 1, _PHENOTYPES))[complexes]
    b = effect_size * does[:, None] * (b + np.sqrt(1 - _SHARED) * rng.normal(size=b.shape))
    c = interaction * does[:, None] * rng.normal(size=(n_plates, *b.shape))
    plate, y = wells["plate"].to_numpy(), wells["perturbation"].to_numpy()
    a = plate_effect * rng.normal(size=(n_plates, _STAINS))[plate] + well_effect * rng.normal(size=(len(y), _STAINS))
    of_well = a @ stain + position_effect * wells[list(LAYOUT)].to_numpy() @ layout
    of_well += np.where(y[:, None] < 0, 0, b[y] + c[plate, y]) @ phenotype
    gains = np.exp(gain_effect * rng.normal(size=(n_plates, n_features))).astype(np.float32)

    rows = rng.permutation(np.repeat(np.arange(len(wells)), cells_per_well))
    x = np.empty((len(rows), n_features), dtype=np.float32)
    for start in range(0, len(rows), _BLOCK):
        of = rows[start : start + _BLOCK]
        noise = rng.standard_normal((len(of), n_features), dtype=np.float32) @ cell
        x[start : start + _BLOCK] = gains[plate[of]] * (of_well[of].astype(np.float32) + noise)

    within = cell.T @ cell + (plate_effect**2 + well_effect**2) * stain.T @ stain
    within += position_effect**2 * layout.T @ layout + interaction**2 * does.mean() * phenotype.T @ phenotype
    truth = _truth(b @ phenotype, complexes, does, within, effect_size**2 * does.mean() * phenotype.T @ phenotype)
    return _table(x, wells.iloc[rows], complexes, truth)


def _check(counts: dict[str, int], sizes: dict[str, float], active: float) -> None:
    for name, n in counts.items():
        check_count(name, n)
    for name, size in sizes.items():
        check_number(name, size)
    check_number("active", active, 1)
    if counts["n_plate_maps"] > min(counts["n_plates"], counts["n_perturbations"]):
        msg = f"n_plate_maps={counts['n_plate_maps']}: there are fewer plates, or fewer perturbations."
        raise ValueError(msg)


def _layout(
    rng: np.random.Generator, n_perturbations: int, n_plates: int, n_controls: int, n_maps: int, one_layout: bool
) -> pd.DataFrame:
    """A row a well: codes of plate, plate map and perturbation (-1: control), its place, and what places differ by."""
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
        about = {"plate": plate, "plate_map": plate % n_maps, "perturbation": y}
        parts.append(pd.DataFrame(about | {"row": place // shape[1], "column": place % shape[1]}))
    return add_layout(pd.concat(parts, ignore_index=True), shape)


def _directions(rng: np.random.Generator, n: int, n_features: int) -> np.ndarray:
    """``(n, F)``: along so many, something of variance one has that variance in a feature, on average."""
    return rng.normal(size=(n, n_features)) / np.sqrt(n)


def _cells(rng: np.random.Generator, n_features: int) -> np.ndarray:
    """``(F, F)`` float32: cells of a well vary along few directions much, along most a little; by one in all."""
    axes = np.linalg.qr(rng.normal(size=(n_features, n_features)))[0]
    sd = np.geomspace(1, 0.1, n_features)
    return (sd[:, None] * axes / np.sqrt(np.mean(sd**2))).astype(np.float32)


def _truth(
    effects: np.ndarray, complexes: np.ndarray, does: np.ndarray, within: np.ndarray, between: np.ndarray
) -> dict[str, pd.DataFrame]:
    genes, features = [_gene(y) for y in range(len(effects))], [_feature(i) for i in range(len(within))]
    white = whitening(within, 0.0)
    axes = white @ discriminants(white.T @ between @ white, n_components=_PHENOTYPES, rows=1)
    components = [f"component_{i + 1}" for i in range(axes.shape[1])]
    network = pd.DataFrame({"source": [_complex(c) for c in complexes[does]], "target": np.array(genes)[does]})
    network.attrs["kind"] = "sets"
    return {
        "effects": pd.DataFrame(effects, genes, features),
        "oracle": pd.DataFrame(axes, features, components),
        "network": network,
    }


def _table(x: np.ndarray, wells: pd.DataFrame, complexes: np.ndarray, truth: dict[str, pd.DataFrame]) -> AnnData:
    from anndata import AnnData

    codes = wells["perturbation"].to_numpy()
    named = {
        "perturbation": (codes, lambda y: "control" if y < 0 else _gene(y)),
        "complex": (np.where(codes < 0, -1, complexes[codes]), lambda c: "none" if c < 0 else _complex(c)),
        "plate": (wells["plate"].to_numpy(), lambda e: f"plate_{e + 1}"),
        "well": (
            100 * wells["row"].to_numpy() + wells["column"].to_numpy(),
            lambda place: well_name(*divmod(place, 100)),
        ),
        "plate_map": (wells["plate_map"].to_numpy(), lambda m: f"map_{m + 1}"),
    }
    obs = pd.DataFrame(index=pd.RangeIndex(len(x)).astype(str))
    for column, (values, name) in named.items():
        there, found = np.unique(values, return_inverse=True)
        obs[column] = pd.Categorical.from_codes(found, [name(value) for value in there])
    var = pd.DataFrame(index=[_feature(i) for i in range(x.shape[1])])
    return AnnData(X=x, obs=obs, var=var, uns={"truth": truth})


def _gene(y: int) -> str:
    return f"GENE{y + 1}"


def _complex(c: int) -> str:
    return f"complex_{c + 1}"


def _feature(i: int) -> str:
    return f"feature_{i + 1}"
