"""A simulated optical pooled screen: known complexes, imperfect guides, wells with their own look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._keys import IMAGE_KEY
from scbd.datasets._simulated_images import CHANNELS, PHENOTYPES, draw, photograph
from scbd.datasets._simulated_library import cells_of, guides_of, phenotypes_of, wells_of_cells
from scbd.datasets._simulated_plates import SHAPES
from scbd.datasets._simulated_wells import drawn_parameters, looks, places, strengths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData

HARD_SCREEN: dict[str, Any] = {
    "n_complexes": 50,
    "genes_per_complex": 6,
    "guides_per_gene": 2,
    "n_wells": 34,
    "plate_wells": 6,
    "n_plate_maps": 3,
    "image_size": 32,
    "effect_size": 0.35,
    "effect_spread": 0.7,
    "active": 0.4,
    "well_effect": 1.0,
    "plate_effect": 0.7,
    "position_effect": 0.7,
    "camera_effect": 1.0,
    "density_effect": 1.0,
    "interaction": 0.5,
    "well_imbalance": 0.3,
}
_COUNTS = ("n_complexes", "genes_per_complex", "guides_per_gene", "n_wells", "n_plate_maps")
_SIZES = (
    *("effect_size", "effect_spread", "interaction", "well_effect", "plate_effect", "position_effect"),
    *("camera_effect", "density_effect", "well_imbalance"),
)
_SHARES = ("active", "confounding", "control_fraction")
_BLOCK = 512


def simulated_screen(
    n_cells: int = 20_000,
    *,
    n_complexes: int = 12,
    genes_per_complex: int = 4,
    guides_per_gene: int = 4,
    n_wells: int = 6,
    plate_wells: int | None = None,
    n_plate_maps: int = 1,
    image_size: int = 64,
    effect_size: float = 1.0,
    effect_spread: float = 0.0,
    active: float = 1.0,
    well_effect: float = 1.0,
    plate_effect: float = 0.0,
    position_effect: float = 0.0,
    camera_effect: float = 0.0,
    density_effect: float = 0.0,
    interaction: float = 0.0,
    well_imbalance: float = 0.0,
    confounding: float = 0.0,
    control_fraction: float = 0.1,
    seed: int = 0,
) -> AnnData:
    """Simulate cells of an optical pooled screen in four channels (DNA damage, F-actin, DNA, microtubules).

    Genes of a complex share a phenotype, up to a small part of their own; guides knock their gene down more or less
    well; non-targeting guides do nothing. Each well has its own stain intensities, uneven illumination, focus and
    background, which have nothing to do with the perturbations unless ``confounding`` or ``n_plate_maps`` says so.

    The defaults are easy: complexes are found without any correction. ``simulated_screen(**scbd.datasets.HARD_SCREEN)``
    is a screen that tells methods apart, see Notes.

    Parameters
    ----------
    n_cells
        Number of cells.
    n_complexes, genes_per_complex, guides_per_gene
        Layout of the library. There are twice ``guides_per_gene`` non-targeting guides.
    n_wells
        Number of wells.
    plate_wells
        Wells of a plate: 6, 24, 96, 384 or 1,536, in rows and columns that are filled row by row. `None` for plates of
        up to six wells that have no rows and columns.
    n_plate_maps
        Genes are dealt to so many plate maps, and plates to one of these each, in turn: a gene is in wells of the
        plates of its map only. Controls are on all. With one, every gene is on every plate.
    image_size
        Pixels a side; a cell fills about 0.8 of it.
    effect_size
        Strength of the phenotypes, in units of about two standard deviations between cells.
    effect_spread
        How unequal complexes are: standard deviation of the logarithm of their strength.
    active
        Share of the complexes that do anything.
    well_effect, plate_effect, position_effect
        Strength of what each well has of its own, of what wells of a plate have in common, and of gradients and edges
        that all plates share (these need ``plate_wells``): on stain, illumination, focus and background. Of 1, stains
        differ by 30 %; 0 for none.
    camera_effect
        Strength of how cameras differ between wells: gamma (25 % at 1), saturation, and more of focus. It bends
        intensities, so that no linear correction undoes it.
    density_effect
        Strength of how wells differ in density (20 % at 1): in crowded wells, cells are more and smaller.
    interaction
        Standard deviation, over wells, of the logarithm of how strongly a phenotype shows; how a well looks decides.
    well_imbalance
        How unequal wells are: coefficient of variation of their expected numbers of cells; 0 for equal ones.
    confounding
        Between 0 (every gene equally often in every well) and 1 (every gene in one well only).
    control_fraction
        Fraction of non-targeting cells.
    seed
        Seed of everything.

    Returns
    -------
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(n_cells, 4, image_size, image_size)``; ``obs``: ``gene``,
    ``sgRNA``, ``complex``, ``well``, ``plate``, with ``plate_wells`` also ``row``, ``column`` (integers from 1) and
    ``position`` (such as ``"A01"``). The truth is in ``obsm["X_oracle"]``, float32 ``(n_cells, 8)``: the phenotypes of
    each cell, before density and camera, in units of their standard deviation between cells; and in ``uns["truth"]``:
    ``phenotypes`` (gene × phenotype), ``efficacy`` (guide), ``wells`` (well × effect), ``strengths`` (well ×
    phenotype), ``network`` (frame ``source, target``: complex and gene, of all complexes, as real lists have them,
    whether they do anything or not).

    Raises
    ------
    ValueError
        If a number is out of range, there are fewer cells than guides, positions have an effect on plates without a
        layout, there are more plate maps than plates, or both ``confounding`` and ``n_plate_maps`` are given.

    Notes
    -----
    ``scbd.datasets.HARD_SCREEN`` holds arguments; change some by ``HARD_SCREEN | {"n_wells": 384, "plate_wells": 24}``.
    It has 300 genes in 50 complexes, of which 20 do something; each gene is in wells of two of six plates, with about
    five of 20,000 cells in each. Average precision of complexes is then 0.04 from pixels, 0.11 from pixels standardised
    by well, 0.14 with TVN by well and 0.28 from ``X_oracle`` (three seeds; chance 0.017; of 8,000 cells 0.03, 0.07,
    0.09 and 0.21). Without any effect of wells, pixels would have 0.14, and 0.20 with TVN. Which simulated
    screen a real one resembles is not known: of the published profiles of Funk et al., CORUM's complexes have 0.20
    (chance 0.027), and 0.13 of their background components. A linear probe predicts the well from pixels with an F1 of
    0.98, and no longer once they are standardised by well (0.04); a quadratic one still does (0.43). Ten thousand cells
    of 32 × 32 pixels take about three seconds on one core.

    References
    ----------
    Funk et al. (2022), The phenotypic landscape of essential human genes.

    Examples
    --------
    >>> screen = scbd.datasets.simulated_screen(500, image_size=32, n_complexes=3, genes_per_complex=2)
    >>> screen.obs["gene"].nunique()  # six genes, and controls that target none
    7
    >>> screen.uns["truth"]["network"].columns.to_list()
    ['source', 'target']

    A hard one, on plates of 24 wells, and what the best embedding gains on the pixels:

    >>> setting = scbd.datasets.HARD_SCREEN | {"n_wells": 72, "plate_wells": 24}
    >>> screen = scbd.datasets.simulated_screen(3_000, **setting)
    >>> screen.obsm["X_pixels"] = scbd.baselines.pixel_pca(screen, n_components=16)
    >>> known = screen.uns["truth"]["network"]
    >>> profiles = [scbd.metrics.aggregate(screen, key, gene_key="gene") for key in ("X_oracle", "X_pixels")]
    >>> best, pixels = (scbd.metrics.relationship_average_precision(each, known) for each in profiles)
    >>> best - pixels > 0.02  # the regret of the pixels
    True
    """
    # every argument by its name: nothing else is defined yet
    cells = simulated_cells(locals())
    return cells.with_obsm({IMAGE_KEY: _crops(cells, image_size)})


class SimulatedCells(NamedTuple):
    """Cells before anybody has photographed them."""

    obs: pd.DataFrame
    oracle: np.ndarray
    """What is shown, in units of its standard deviation between cells: float32 ``(n_cells, 8)``."""
    parameters: np.ndarray
    """What :func:`draw` draws, float ``(n_cells, 8)``."""
    wells: pd.DataFrame
    """How the images of each well look."""
    well: np.ndarray
    """Of each cell its row of ``wells``."""
    truth: dict[str, Any]
    rng: np.random.Generator

    def with_obsm(self, obsm: Mapping[str, np.ndarray]) -> AnnData:
        """The cells and the truth about them, with more in ``obsm``."""
        from anndata import AnnData

        var = pd.DataFrame(index=list(CHANNELS))
        return AnnData(obs=self.obs, var=var, obsm={**obsm, "X_oracle": self.oracle}, uns={"truth": self.truth})


def simulated_cells(arguments: Mapping[str, Any]) -> SimulatedCells:
    """What :func:`simulated_screen` photographs.

    Parameters
    ----------
    arguments
        All of :func:`simulated_screen`, by name.

    Raises
    ------
    ValueError
        As said there.
    """
    n_cells, plate_wells = arguments["n_cells"], arguments["plate_wells"]
    counts, sizes, shares = ({name: arguments[name] for name in names} for names in (_COUNTS, _SIZES, _SHARES))
    _check(n_cells, arguments["image_size"], counts, sizes, shares)
    _check_plates(plate_wells, counts, sizes | shares)

    rng = np.random.default_rng(arguments["seed"])
    # draws what came later, so that older screens stay as they were
    more = rng.spawn(1)[0]
    library = (counts["n_complexes"], counts["genes_per_complex"])
    phenotypes, complexes = phenotypes_of(rng, more, *library, sizes | shares)
    guides = guides_of(rng, list(phenotypes.index), counts["guides_per_gene"])
    where = places(counts["n_wells"], plate_wells)
    wells = looks(rng, more, where, plate_wells, sizes)
    cells = cells_of(rng, n_cells, guides, shares["control_fraction"])
    genes = pd.Categorical(cells["gene"], phenotypes.index)
    density, plate = wells["density"].to_numpy(), pd.factorize(where["plate"])[0]
    well = wells_of_cells(rng, more, genes, density, plate, arguments)
    strength = strengths(more, wells, sizes["interaction"])

    mean = phenotypes.to_numpy()[genes.codes] * cells["efficacy"].to_numpy()[:, None] * strength.to_numpy()[well]
    sd = np.array(list(PHENOTYPES.values()))
    shown = mean + rng.normal(size=mean.shape) * sd
    parameters = drawn_parameters(shown, density[well])
    truth = {"phenotypes": phenotypes, "efficacy": guides.set_index("sgRNA")[["efficacy"]], "wells": wells}
    truth |= {"strengths": strength, "network": _network(complexes)}
    obs = _obs(cells.assign(complex=cells["gene"].map(complexes)), where, well)
    return SimulatedCells(obs, (shown / sd).astype(np.float32), parameters, wells, well, truth, rng)


def _obs(cells: pd.DataFrame, where: pd.DataFrame, well: np.ndarray) -> pd.DataFrame:
    """Guide, gene and complex of each cell, and its place: categories, but numbers of rows and columns."""
    here = where.rename_axis("well").reset_index().iloc[well].set_index(cells.index)
    obs = cells[["gene", "sgRNA", "complex"]].join(here)
    return obs.astype(dict.fromkeys(obs.columns.difference(["row", "column"]), "category"))


def _network(complexes: pd.Series) -> pd.DataFrame:
    network = complexes.drop("nontargeting").rename_axis("target").rename("source").reset_index()[["source", "target"]]
    network.attrs["kind"] = "sets"
    return network


def _crops(cells: SimulatedCells, size: int) -> np.ndarray:
    """Cells drawn and photographed in their wells one by one, uint8 ``(n_cells, 4, size, size)``."""
    images = np.empty((len(cells.obs), len(CHANNELS), size, size), dtype=np.uint8)
    for start in range(0, len(images), _BLOCK):
        rows = slice(start, start + _BLOCK)
        drawn = draw(cells.rng, cells.parameters[rows], size)
        images[rows] = photograph(cells.rng, drawn, cells.wells.iloc[cells.well[rows]], size)
    return images


def _check(
    n_cells: int, image_size: int, counts: Mapping[str, int], sizes: Mapping[str, float], shares: Mapping[str, float]
) -> None:
    least = {"image_size": 16} | dict.fromkeys(counts, 1) | dict.fromkeys(sizes, 0)
    for name, value in {"image_size": image_size, **counts, **sizes}.items():
        if value < least[name]:
            msg = f"{name}={value}: give at least {least[name]}."
            raise ValueError(msg)
    for name, value in shares.items():
        if not 0 <= value <= 1:
            msg = f"{name}={value} is a share: give a number between 0 and 1."
            raise ValueError(msg)
    if shares["control_fraction"] == 1:
        msg = "control_fraction=1 leaves no cells for genes: give less than 1."
        raise ValueError(msg)
    n_guides = (counts["n_complexes"] * counts["genes_per_complex"] + 2) * counts["guides_per_gene"]
    if n_cells < n_guides:
        msg = f"n_cells={n_cells} is less than one cell for each of the {n_guides} guides: ask for more cells."
        raise ValueError(msg)


def _check_plates(plate_wells: int | None, counts: Mapping[str, int], effects: Mapping[str, float]) -> None:
    if plate_wells is not None and plate_wells not in SHAPES:
        msg = f"plate_wells={plate_wells}: plates have {', '.join(map(str, SHAPES))} wells; None for no layout."
        raise ValueError(msg)
    if effects["position_effect"] and plate_wells is None:
        msg = "position_effect needs plates that have positions: give plate_wells, such as 24."
        raise ValueError(msg)
    n_maps, n_plates = counts["n_plate_maps"], -(-counts["n_wells"] // (plate_wells or 6))
    if n_maps > min(n_plates, counts["n_complexes"] * counts["genes_per_complex"]):
        msg = f"n_plate_maps={n_maps}: there are fewer plates, or fewer genes."
        raise ValueError(msg)
    if n_maps > 1 and effects["confounding"]:
        msg = "confounding and n_plate_maps both say which wells a gene is in: give one of them."
        raise ValueError(msg)
