"""Simulation of an optical pooled screen: images of cells, with known effects of complexes, guides and wells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.ndimage import gaussian_filter1d

from scbd._shared.checks import check_count, check_number
from scbd._shared.keys import IMAGE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData

# number of rows and number of columns of a plate, by its number of wells
PLATE_SHAPES = {6: (2, 3), 24: (4, 6), 96: (8, 12), 384: (16, 24), 1536: (32, 48)}
# maximum number of wells of a plate without rows and columns
_WELLS_PER_PLATE_WITHOUT_LAYOUT = 6
# properties of a well position that change images: row (down), column (across), and whether it is at the plate's edge
POSITION_EFFECTS = ("down", "across", "edge")


def add_layout(wells: pd.DataFrame, shape: tuple[int, int]) -> pd.DataFrame:
    """Add the columns ``down``, ``across`` and ``edge`` to a table of wells with ``row`` and ``column`` (from 0).

    The new columns hold the row of the well, its column, and whether the well is at the edge of a plate with ``shape``
    (rows, columns). Each new column is standardised to mean 0 and variance 1 over the wells; a constant column becomes
    0. The table is changed in place and returned.
    """
    row, column = wells["row"], wells["column"]
    edge = np.minimum.reduce([row, column, shape[0] - 1 - row, shape[1] - 1 - column]) == 0
    for name, values in zip(POSITION_EFFECTS, (row, column, edge), strict=True):
        wells[name] = (values - values.mean()) / (values.std() or 1)
    return wells


def well_name(row: int, column: int) -> str:
    """Return the name of a well, such as A01, from its row and column (from 0); the row after Z is AA."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return ("A" if row >= 26 else "") + letters[row % 26] + f"{column + 1:02}"


CHANNELS = ("DNA damage", "F-actin", "DNA", "microtubules")
# phenotypes of a cell that a perturbation can change, with the standard deviation of the logarithm of each phenotype
# between cells of the same guide
PHENOTYPES = {
    "nucleus_size": 0.10,
    "nucleus_elongation": 0.12,
    "dna_intensity": 0.12,
    "damage_foci": 0.25,
    "cell_size": 0.10,
    "actin_ring": 0.20,
    "tubulin_intensity": 0.15,
    "tubulin_frequency": 0.12,
}


def draw_ideal_images(
    rng: np.random.Generator, parameters: np.ndarray, size: int, centre: np.ndarray | float = 0.0
) -> np.ndarray:
    """Draw images ``(n, 4, size, size)`` of cells without noise; the brightest intensities are about 1.

    Parameters
    ----------
    rng
        Random generator of the orientations, small shifts and textures of the cells.
    parameters
        Phenotypes of the cells, ``(n, 8)``, in the order of ``PHENOTYPES``.
    size
        Side of the images in pixels.
    centre
        Position of each cell relative to the centre of the image, ``(2, n)``, in units of half a side of the image.
    """
    n = len(parameters)
    p = dict(zip(PHENOTYPES, parameters.astype(np.float32).T[:, :, None, None], strict=True))
    unit = (np.arange(size, dtype=np.float32) - (size - 1) / 2) / (size / 2)
    shift = 0.08 * rng.normal(size=(2, n, 1, 1)).astype(np.float32) + np.asarray(centre, np.float32)[..., None, None]
    x, y = unit[None, None, :] - shift[0], unit[None, :, None] - shift[1]
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1)).astype(np.float32)
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    stretch = np.sqrt(1.2 * p["nucleus_elongation"])
    nuclear_radius = np.sqrt((along / stretch) ** 2 + (across * stretch) ** 2) / (0.33 * p["nucleus_size"])
    cell_radius = np.sqrt((along / 1.1) ** 2 + (across * 1.1) ** 2) / (0.72 * p["cell_size"])
    nucleus, cell = _disk(nuclear_radius, 12), _disk(cell_radius, 10)
    phase = rng.uniform(0, 2 * np.pi, (2, n, 1, 1)).astype(np.float32)
    chromatin = 1 + 0.15 * np.sin(19 * along + phase[0]) * np.sin(17 * across + phase[1])
    dna = 0.8 * p["dna_intensity"] * nucleus * chromatin
    foci = np.zeros_like(dna)
    for _ in range(4):
        place = 0.18 * rng.normal(size=(2, n, 1, 1)).astype(np.float32)
        foci += np.exp(-((along - place[0]) ** 2 + (across - place[1]) ** 2) / 0.003)
    damage = nucleus * (0.15 + 0.4 * p["damage_foci"] * foci)
    ring = np.exp(-(((cell_radius - 0.93) / 0.1) ** 2))
    actin = 0.25 * cell + 0.6 * p["actin_ring"] * ring
    theta = np.arctan2(across, along)
    fibres = 0.6 + 0.4 * np.sin(
        9 * p["tubulin_frequency"] * (cell_radius + 0.15 * np.sin(3 * theta)) * np.pi + phase[0]
    )
    tubulin = 0.7 * p["tubulin_intensity"] * cell * fibres * (1 - 0.7 * nucleus)
    return np.stack([damage, actin, dna, tubulin], axis=1)


# _MAX_NEIGHBOURS: maximum number of neighbouring cells in the image of a cell.
# _MIN_DISTANCE and _MAX_DISTANCE: smallest and largest distance of a neighbouring cell from the centre of the image, in
# units of half a side of the image.
_MAX_NEIGHBOURS, _MIN_DISTANCE, _MAX_DISTANCE = 6, 1.1, 1.7


def draw_neighbours(rng: np.random.Generator, well: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Choose neighbours that appear in the image of each cell, at random from all cells of the same well.

    Parameters
    ----------
    rng
        Random generator.
    well
        Integer code of the well of each cell, ``(n_cells,)``.
    mean
        Mean number of neighbours of each cell, ``(n_cells,)``, at most six.

    Returns
    -------
    Row numbers of up to six neighbours of each cell, ``(n_cells, 6)``; -1 for a missing neighbour.
    """
    order = np.argsort(well, kind="stable")
    first, count = np.searchsorted(well[order], well), np.bincount(well)[well]
    which, there = rng.random((2, len(well), _MAX_NEIGHBOURS))
    found = order[first[:, None] + (which * count[:, None]).astype(int)]
    return np.where(_MAX_NEIGHBOURS * there < mean[:, None], found, -1)


def add_neighbours(rng: np.random.Generator, images: np.ndarray, around: np.ndarray, parameters: np.ndarray) -> None:
    """Draw the neighbours of each cell into the noise-free image of the cell.

    The images are changed in place. Intensities of overlapping cells add up.

    Parameters
    ----------
    rng
        Random generator of the neighbours' positions and orientations.
    images
        Images of the cells, ``(n, 4, size, size)``.
    around
        Row numbers of the neighbours of the cells in ``images``, ``(n, 6)``, see :func:`draw_neighbours`.
    parameters
        Phenotypes of all cells of the screen, ``(n_cells, 8)``.
    """
    turned = rng.uniform(0, 2 * np.pi, len(images))
    for place, other in enumerate(around.T):
        rows = np.flatnonzero(other >= 0)
        angle = turned[rows] + 2 * np.pi / _MAX_NEIGHBOURS * (place + rng.uniform(-0.25, 0.25, len(rows)))
        centre = rng.uniform(_MIN_DISTANCE, _MAX_DISTANCE, len(rows)) * np.stack([np.cos(angle), np.sin(angle)])
        images[rows] += draw_ideal_images(rng, parameters[other[rows]], images.shape[-1], centre)


def _disk(radius: np.ndarray, sharpness: float) -> np.ndarray:
    return 1 / (1 + np.exp(np.clip(sharpness * (radius - 1), -30, 30)))


def photograph(rng: np.random.Generator, images: np.ndarray, wells: pd.DataFrame, size: int) -> np.ndarray:
    """Simulate the microscope: apply the focus, stains, illumination and background of each well, and add noise.

    Parameters
    ----------
    rng
        Random generator of the noise.
    images
        Noise-free images, ``(n, 4, side, side)``, each of one or several cells. The array is overwritten.
    wells
        Table with one row per image, which contains the properties of the image's well, see
        :func:`draw_well_properties`.
    size
        Side in pixels of the image of a single cell, which determines the scale of the blur.

    Returns
    -------
    Images as recorded by the microscope, uint8 ``(n, 4, side, side)``.
    """
    unit = np.linspace(-1, 1, images.shape[-1], dtype=np.float32)
    for blur in wells["blur"].unique():
        of_well = (wells["blur"] == blur).to_numpy()
        sigma = float(blur) * size / 64
        blurred = gaussian_filter1d(images[of_well], sigma, axis=2, truncate=3)
        images[of_well] = gaussian_filter1d(blurred, sigma, axis=3, truncate=3)
    column = {name: wells[name].to_numpy(np.float32)[:, None, None, None] for name in wells}
    light = 1 + column["tilt_x"] * unit + column["tilt_y"] * unit[:, None]
    gain = wells[[f"gain_{channel}" for channel in CHANNELS]].to_numpy(np.float32)[:, :, None, None]
    images = images * gain * np.clip(light, 0.1, None) + column["background"]
    if wells["saturation"].any():
        images /= 1 + column["saturation"] * images
    if (wells["gamma"] != 1).any():
        images **= column["gamma"]
    noise = rng.standard_normal(images.shape, dtype=np.float32)
    images += noise * (0.01 + 0.04 * np.sqrt(np.clip(images, 0, None)))
    return np.clip(np.rint(120 * images), 0, 255).astype(np.uint8)


# standard deviations of the effects of plates and positions on image properties, at strength 1. Effects on the tilts of
# the illumination are added to the tilts; all other effects are added to the logarithm of the property.
_EFFECT_SDS = {
    **{f"gain_{channel}": 0.3 for channel in CHANNELS},
    "tilt_x": 0.3,
    "tilt_y": 0.3,
    "blur": 0.3,
    "background": 0.5,
}


def place_wells(n_wells: int, plate_wells: int | None) -> pd.DataFrame:
    """Return a table of the places of wells, with one row per well and the column ``plate``.

    If the number of wells per plate, ``plate_wells``, is given, the table also has the columns ``row`` and ``column``
    (from 1) and ``position`` (such as ``"A01"``).
    """
    plate, number = np.divmod(np.arange(n_wells), plate_wells or _WELLS_PER_PLATE_WITHOUT_LAYOUT)
    places = pd.DataFrame({"plate": [f"P{i + 1}" for i in plate]})
    if plate_wells is None:
        return places.set_axis(places["plate"] + [f"_W{i + 1}" for i in number]).rename_axis(None)
    # the wells of a plate are numbered row by row
    row, column = np.divmod(number, PLATE_SHAPES[plate_wells][1])
    names = [well_name(*place) for place in zip(row, column, strict=True)]
    places = places.assign(row=row + 1, column=column + 1, position=names)
    return places.set_axis(places["plate"] + "_" + places["position"])


def draw_well_properties(
    rng: np.random.Generator,
    more: np.random.Generator,
    places: pd.DataFrame,
    plate_wells: int | None,
    effects: Mapping[str, float],
) -> pd.DataFrame:
    """Draw the properties of each well that change the appearance of the well's images.

    Parameters
    ----------
    rng
        Random generator of the effects of wells on stain, illumination, focus and background.
    more
        Random generator of all other effects: of plates, positions, cameras and density. These effects were added to
        the simulation later, and a separate generator keeps screens of earlier versions unchanged.
    places
        Table of the place of each well, see :func:`place_wells`.
    plate_wells
        Number of wells per plate; `None` if plates have no layout.
    effects
        Strengths of the effects, by the names of the arguments of :func:`simulated_screen`, such as ``"plate_effect"``.

    Returns
    -------
    Table with one row per well. The columns are the gain of each stain, the tilts ``tilt_x`` and ``tilt_y`` of the
    illumination, ``blur``, ``background``, ``gamma``, ``saturation`` and ``density``.
    """
    n, strength = len(places), effects["well_effect"]
    columns = {f"gain_{channel}": np.exp(0.3 * strength * rng.normal(size=n)) for channel in CHANNELS}
    columns |= {f"tilt_{axis}": 0.3 * strength * rng.normal(size=n) for axis in "xy"}
    columns["blur"] = 0.5 + 0.6 * strength * rng.random(n)
    columns["background"] = 0.02 + 0.05 * strength * rng.random(n)
    wells = pd.DataFrame(columns, index=places.index)

    # Apply the effects of plates and positions.
    plate = pd.factorize(places["plate"])[0]
    shared = effects["plate_effect"] * more.normal(size=(plate.max() + 1, len(_EFFECT_SDS)))[plate]
    if plate_wells is not None:
        layout = add_layout(places[["row", "column"]] - 1, PLATE_SHAPES[plate_wells])[list(POSITION_EFFECTS)].to_numpy()
        loadings = more.normal(size=(len(POSITION_EFFECTS), len(_EFFECT_SDS))) / np.sqrt(len(POSITION_EFFECTS))
        shared = shared + effects["position_effect"] * layout @ loadings
    for name, by in zip(_EFFECT_SDS, (shared * list(_EFFECT_SDS.values())).T, strict=True):
        wells[name] = wells[name] + by if name.startswith("tilt") else wells[name] * np.exp(by)

    # Draw the effects of cameras, and the densities.
    camera = effects["camera_effect"]
    wells["blur"] *= np.exp(0.5 * camera * more.normal(size=n))
    wells["gamma"] = np.exp(0.25 * camera * more.normal(size=n))
    wells["saturation"] = 0.5 * camera * more.random(n)
    wells["density"] = np.exp(0.2 * effects["density_effect"] * more.normal(size=n))
    return wells


def phenotype_strengths(more: np.random.Generator, wells: pd.DataFrame, interaction: float) -> pd.DataFrame:
    """Compute the factor by which the effects on each phenotype are multiplied in each well, ``(wells, phenotypes)``.

    The logarithm of the factor is a random linear combination of the properties of the well, with standard deviation
    ``interaction`` over wells.
    """
    look = _standardize_columns(wells.to_numpy())
    weights = more.normal(size=(look.shape[1], len(PHENOTYPES)))
    return pd.DataFrame(
        np.exp(interaction * _standardize_columns(look @ weights)), index=wells.index, columns=list(PHENOTYPES)
    )


def apply_density(shown: np.ndarray, density: np.ndarray | float) -> np.ndarray:
    """Compute the phenotypes with which cells are drawn, ``(n, phenotypes)``; cells in dense wells are smaller.

    ``shown`` contains the logarithms of the phenotypes of the cells, ``density`` the relative density of the cells'
    wells.
    """
    parameters = np.exp(shown)
    # density makes cells smaller, and has a weaker effect on the size of nuclei
    for name, power in (("cell_size", 0.5), ("nucleus_size", 0.25)):
        parameters[:, list(PHENOTYPES).index(name)] /= density**power
    return parameters


def _standardize_columns(values: np.ndarray) -> np.ndarray:
    """Standardise the columns of an array to mean 0 and variance 1; constant columns become 0."""
    sd = values.std(0)
    varies = sd > 1e-12 * np.abs(values).max(0)
    return np.where(varies, (values - values.mean(0)) / np.where(varies, sd, 1), 0)


def draw_phenotypes(
    rng: np.random.Generator, more: np.random.Generator, sizes: Mapping[str, float]
) -> tuple[pd.DataFrame, pd.Series]:
    """Draw the effect of each gene on the logarithm of each phenotype, and assign genes to complexes.

    Parameters
    ----------
    rng
        Random generator of the directions of effects in the space of phenotypes.
    more
        Random generator that determines which complexes have an effect, and how strong the effects are.
    sizes
        Values of the arguments ``n_complexes``, ``genes_per_complex``, ``effect_size``, ``effect_spread`` and
        ``active`` of :func:`simulated_screen`, by name.

    Returns
    -------
    - Table of effects, gene × phenotype, with a row of zeros for ``"nontargeting"``.
    - Name of the complex of each gene.
    """
    n_complexes, genes_per_complex = int(sizes["n_complexes"]), int(sizes["genes_per_complex"])
    sd = np.array(list(PHENOTYPES.values()))
    of_complex = rng.normal(size=(n_complexes, len(sd)))
    # Scale the effects of all complexes to the same size, in different directions. The strength of each complex is
    # applied below.
    of_complex *= 2 * np.sqrt(len(sd)) / np.linalg.norm(of_complex, axis=1, keepdims=True)
    of_gene = np.repeat(of_complex, genes_per_complex, axis=0)
    of_gene = sizes["effect_size"] * sd * (of_gene + 0.3 * rng.normal(size=of_gene.shape))
    does = more.permutation(n_complexes) < round(sizes["active"] * n_complexes)
    strength = np.where(does, np.exp(sizes["effect_spread"] * more.normal(size=n_complexes)), 0)
    of_gene *= np.repeat(strength, genes_per_complex)[:, None]
    genes = [f"GENE{i + 1}" for i in range(len(of_gene))]
    complexes = [f"complex_{i // genes_per_complex + 1}" for i in range(len(of_gene))]
    values = np.vstack([of_gene, np.zeros(len(sd))])
    index = [*genes, "nontargeting"]
    return pd.DataFrame(values, index=index, columns=list(PHENOTYPES)), pd.Series([*complexes, "none"], index=index)


def draw_guides(rng: np.random.Generator, genes: list[str], guides_per_gene: int) -> pd.DataFrame:
    """Build the library of guides: one row per guide, with its gene, name and knockdown efficacy (0.5 to 1).

    The number of non-targeting guides is twice ``guides_per_gene``.
    """
    n_guides = [guides_per_gene * (2 if gene == "nontargeting" else 1) for gene in genes]
    library = pd.DataFrame({"gene": np.repeat(genes, n_guides)})
    number = library.groupby("gene").cumcount() + 1
    library["sgRNA"] = library["gene"] + "_sg" + number.astype(str)
    return library.assign(efficacy=rng.uniform(0.5, 1.0, len(library)))


def draw_cells(rng: np.random.Generator, n_cells: int, library: pd.DataFrame, control_fraction: float) -> pd.DataFrame:
    """Draw the guide of each cell, and return a table of cells, with each guide's row of the library.

    Guides have unequal abundances, as in a real library. Each guide has at least one cell.
    """
    is_control = (library["gene"] == "nontargeting").to_numpy()
    weight = rng.gamma(5.0, size=len(library))
    weight[is_control] *= control_fraction / weight[is_control].sum()
    weight[~is_control] *= (1 - control_fraction) / weight[~is_control].sum()
    extra = rng.choice(len(library), size=n_cells - len(library), p=weight)
    guide = rng.permutation(np.concatenate([np.arange(len(library)), extra]))
    return library.iloc[guide].set_axis([f"cell_{i}" for i in range(n_cells)])


def assign_wells(
    rng: np.random.Generator,
    more: np.random.Generator,
    genes: pd.Categorical,
    density: np.ndarray,
    plates: np.ndarray,
    design: Mapping[str, float],
) -> np.ndarray:
    """Draw the well of each cell, ``(n_cells,)``.

    Parameters
    ----------
    rng, more
        Random generators. ``more`` assigns genes to plate maps, and draws wells on the plates of these maps. ``rng`` is
        used for all other draws.
    genes
        Gene of each cell; the last category is that of the controls.
    density
        Relative cell density of each well, ``(n_wells,)``.
    plates
        Integer code of the plate of each well, ``(n_wells,)``.
    design
        Values of the arguments ``confounding``, ``n_plate_maps`` and ``well_imbalance`` of :func:`simulated_screen`, by
        name.
    """
    code, names = genes.codes, genes.categories
    n_wells, n_cells = len(density), len(genes)
    home = rng.integers(n_wells, size=len(names))[code]
    well = rng.integers(n_wells, size=n_cells)
    weight, imbalance = density, design["well_imbalance"]
    if imbalance:
        weight = density * rng.gamma(imbalance**-2, size=n_wells)
    if imbalance or np.ptp(density):
        well = rng.choice(n_wells, size=n_cells, p=weight / weight.sum())
    well = np.where(rng.random(n_cells) < design["confounding"], home, well)
    n_maps = int(design["n_plate_maps"])
    if n_maps > 1:
        # number of the plate map of each cell. Controls, the last category of genes, are on the plates of all maps and
        # have -1.
        of_cell = np.append(more.permutation(len(names) - 1) % n_maps, -1)[code]
        for plate_map in range(n_maps):
            here, wells = np.flatnonzero(of_cell == plate_map), np.flatnonzero(plates % n_maps == plate_map)
            well[here] = more.choice(wells, size=len(here), p=weight[wells] / weight[wells].sum())
    return well


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
# arguments of simulated_screen that must be whole numbers of at least 1
_COUNT_ARGUMENTS = ("n_complexes", "genes_per_complex", "guides_per_gene", "n_wells", "n_plate_maps")
# arguments of simulated_screen that must be numbers of at least 0
_NONNEGATIVE_ARGUMENTS = (
    *("effect_size", "effect_spread", "interaction", "well_effect", "plate_effect", "position_effect"),
    *("camera_effect", "density_effect", "well_imbalance", "neighbours"),
)
# arguments of simulated_screen that must be fractions from 0 to 1
_FRACTION_ARGUMENTS = ("active", "confounding", "control_fraction")
# number of images that are drawn at once
_IMAGES_DRAWN_AT_ONCE = 512


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
    neighbours: float = 0.0,
    confounding: float = 0.0,
    control_fraction: float = 0.1,
    seed: int = 0,
) -> AnnData:
    """Simulate images of cells of an optical pooled screen, in four channels (DNA damage, F-actin, DNA, microtubules).

    Genes of a complex have the same effect on phenotypes, up to small differences. Guides knock down their gene with
    different efficacy. Non-targeting guides have no effect. Each well has its own stain intensities, uneven
    illumination, focus and background. These properties of wells are independent of the perturbations, unless
    ``confounding`` or ``n_plate_maps`` is set.

    With the default arguments, the screen is easy: the genes of a complex are found to be similar without any
    correction for effects of wells. A screen on which methods differ is
    ``simulated_screen(**scbd.datasets.HARD_SCREEN)``, see Notes.

    Parameters
    ----------
    n_cells
        Number of cells.
    n_complexes, genes_per_complex, guides_per_gene
        Number of complexes, number of genes per complex, and number of guides per gene. The number of non-targeting
        guides is twice ``guides_per_gene``.
    n_wells
        Number of wells.
    plate_wells
        Number of wells per plate: 6, 24, 96, 384 or 1,536, arranged in rows and columns and filled row by row. With
        `None`, plates have up to six wells and no rows or columns.
    n_plate_maps
        Number of plate maps. A plate map determines which genes are on a plate. Each gene is assigned to one map, and
        maps are assigned to plates in turn. A gene occurs only in wells of plates with its map. Controls are on all
        plates. With one map, every gene is on every plate.
    image_size
        Side of the images in pixels. A cell spans about 0.8 of the side of its image.
    effect_size
        Strength of the effects of complexes on phenotypes, in units of about two standard deviations between cells.
    effect_spread
        Standard deviation, over complexes, of the logarithm of the strength of their effects; 0 for equal strength.
    active
        Fraction of complexes that have an effect.
    well_effect, plate_effect, position_effect
        Strengths of effects on stain, illumination, focus and background of images; 0 for no effect. At 1, stain
        intensities differ by 30 %.

        - ``well_effect``: effects of individual wells.
        - ``plate_effect``: effects common to all wells of a plate.
        - ``position_effect``: gradients and edge effects that are the same on all plates. Requires ``plate_wells``.
    camera_effect
        Strength of differences between wells in the camera: gamma (25 % at 1), saturation, and additional differences
        in focus. Gamma and saturation transform intensities nonlinearly, so that no linear correction removes these
        effects.
    density_effect
        Strength of differences in cell density between wells (20 % at 1). In dense wells, cells are more numerous and
        smaller.
    interaction
        Standard deviation, over wells, of the logarithm of the factor by which effects on a phenotype are multiplied in
        a well. The factor depends on the appearance of the well.
    well_imbalance
        Coefficient of variation of the expected numbers of cells per well; 0 for equal numbers.
    neighbours
        Mean number of neighbouring cells that reach into the image of a cell, at most 6. Neighbours are drawn from all
        cells of the same well, and are more numerous in dense wells. With 0, images contain a single cell, as images
        with masked neighbours do. With 5, images are about as full as real images, see Notes.
    confounding
        Degree of confounding between genes and wells: 0 (every gene equally often in every well) to 1 (every gene in
        one well only).
    control_fraction
        Fraction of cells with non-targeting guides.
    seed
        Seed of all random numbers.

    Returns
    -------
    AnnData with images in ``obsm["single_cell_images"]``, uint8 ``(n_cells, 4, image_size, image_size)``. ``obs`` has
    ``gene``, ``sgRNA`` (guide), ``complex``, ``well`` and ``plate``. With ``plate_wells``, it also has ``row``,
    ``column`` (integers from 1) and ``position`` (such as ``"A01"``). The ground truth of the simulation is stored as
    well:

    - ``obsm["X_oracle"]``, float32 ``(n_cells, 8)``: logarithms of the eight phenotypes of each cell, before effects of
      density and camera, in units of their standard deviation between cells;
    - ``uns["truth"]["phenotypes"]``: effect of each gene on each phenotype, gene × phenotype;
    - ``uns["truth"]["efficacy"]``: knockdown efficacy of each guide;
    - ``uns["truth"]["wells"]``: properties of each well that change its images, well × property;
    - ``uns["truth"]["strengths"]``: factor by which effects on a phenotype are multiplied in a well, well × phenotype;
    - ``uns["truth"]["network"]``: data frame with the columns ``source`` (complex) and ``target`` (gene). It contains
      all complexes, with or without an effect, as real lists of complexes do.

    Raises
    ------
    ValueError
        If a number is out of range, there are fewer cells than guides, ``position_effect`` is given without
        ``plate_wells``, there are more plate maps than plates or than genes, or both ``confounding`` and
        ``n_plate_maps`` are given.

    Notes
    -----
    **Hard screen.** ``scbd.datasets.HARD_SCREEN`` is a dictionary of arguments. Change some of the arguments by
    ``HARD_SCREEN | {"n_wells": 384, "plate_wells": 24}``. The screen has 300 genes in 50 complexes, of which 20
    complexes have an effect. Each gene is in wells of two of six plates, with about five of 20,000 cells in each well.
    The average precision with which genes of the same complex are retrieved (three seeds, chance 0.017) is

    ============================  ============  ===========
    Embedding                     20,000 cells  8,000 cells
    ============================  ============  ===========
    pixels                        0.04          0.03
    pixels standardised by well   0.11          0.07
    pixels with TVN by well       0.14          0.09
    ``X_oracle``                  0.28          0.21
    ============================  ============  ===========

    Without any effect of wells, the average precision would be 0.14 for pixels and 0.20 for pixels with TVN. A linear
    probe predicts the well from pixels with an F1 of 0.98, and from pixels standardised by well with an F1 of 0.04. A
    quadratic probe reaches an F1 of 0.43 from pixels standardised by well. The simulation of ten thousand cells of 32 ×
    32 pixels takes about three seconds on one core.

    It is not known which simulated screen resembles real screens most. In the published profiles of Funk et al., the
    average precision for the complexes of CORUM is 0.20 (chance 0.027), and 0.13 in the background components of these
    profiles.

    **Neighbours.** The table compares the images (crops) of cells in real and simulated screens:

    ======================================  ======================  ==============================
    Screen                                  Area covered by cells   Other nuclei per crop (mean)
    ======================================  ======================  ==============================
    Funk et al.                             95 %                    1.7
    PERISCOPE                               88 %                    5.2
    simulated, default                      52 %                    0
    simulated, ``neighbours=5``             87 %                    1.9
    ======================================  ======================  ==============================

    Neighbours make a screen slightly harder. With 8,000 cells (two seeds), ``neighbours=5`` changes

    - the average precision of complexes for :class:`scbd.SCBDModel` with the encoder ``"small"`` from 0.63 to 0.56;
    - the average precision of complexes for pixels with TVN and WCCN from 0.39 to 0.33;
    - the F1 of a linear probe that predicts the well from pixels from 0.94 to 0.87.

    References
    ----------
    Funk et al. (2022), The phenotypic landscape of essential human genes.

    Examples
    --------
    >>> screen = scbd.datasets.simulated_screen(500, image_size=32, n_complexes=3, genes_per_complex=2)
    >>> screen.obs["gene"].nunique()  # six genes, and the non-targeting controls
    7
    >>> screen.uns["truth"]["network"].columns.to_list()
    ['source', 'target']

    Simulate a hard screen on plates of 24 wells, and compare the ground truth with the pixels:

    >>> setting = scbd.datasets.HARD_SCREEN | {"n_wells": 72, "plate_wells": 24}
    >>> screen = scbd.datasets.simulated_screen(3_000, **setting)
    >>> screen.obsm["X_pixels"] = scbd.baselines.pixel_pca(screen, n_components=16)
    >>> known = screen.uns["truth"]["network"]
    >>> profiles = [scbd.metrics.aggregate(screen, key, gene_key="gene") for key in ("X_oracle", "X_pixels")]
    >>> best, pixels = (scbd.metrics.relationship_average_precision(each, known) for each in profiles)
    >>> best - pixels > 0.02  # the ground truth is better than the pixels
    True
    """
    # locals() holds the values of all arguments by name, because no other local variable exists at this point
    arguments = locals()
    from anndata import AnnData

    _check_screen_arguments(arguments)
    rng = np.random.default_rng(seed)
    # effects that were added to the simulation later have a random generator of their own, so that screens of earlier
    # versions are unchanged
    more = rng.spawn(1)[0]
    phenotypes, complexes = draw_phenotypes(rng, more, arguments)
    guides = draw_guides(rng, list(phenotypes.index), guides_per_gene)
    where = place_wells(n_wells, plate_wells)
    wells = draw_well_properties(rng, more, where, plate_wells, arguments)
    cells = draw_cells(rng, n_cells, guides, control_fraction)
    genes = pd.Categorical(cells["gene"], phenotypes.index)
    density, plate = wells["density"].to_numpy(), pd.factorize(where["plate"])[0]
    well = assign_wells(rng, more, genes, density, plate, arguments)
    strength = phenotype_strengths(more, wells, interaction)

    mean = phenotypes.to_numpy()[genes.codes] * cells["efficacy"].to_numpy()[:, None] * strength.to_numpy()[well]
    sd = np.array(list(PHENOTYPES.values()))
    shown = mean + rng.normal(size=mean.shape) * sd
    parameters = apply_density(shown, density[well])
    around = draw_neighbours(more, well, neighbours * density[well]) if neighbours else None
    images = np.empty((n_cells, len(CHANNELS), image_size, image_size), dtype=np.uint8)
    for start in range(0, n_cells, _IMAGES_DRAWN_AT_ONCE):
        rows = slice(start, start + _IMAGES_DRAWN_AT_ONCE)
        drawn = draw_ideal_images(rng, parameters[rows], image_size)
        if around is not None:
            add_neighbours(more, drawn, around[rows], parameters)
        images[rows] = photograph(rng, drawn, wells.iloc[well[rows]], image_size)

    # Label the cells with the gene, guide and complex, and with the place of the well.
    here = where.rename_axis("well").reset_index().iloc[well].set_index(cells.index)
    obs = cells[["gene", "sgRNA"]].assign(complex=cells["gene"].map(complexes)).join(here)
    obs = obs.astype(dict.fromkeys(obs.columns.difference(["row", "column"]), "category"))
    network = complexes.drop("nontargeting").rename_axis("target").rename("source").reset_index()[["source", "target"]]
    network.attrs["kind"] = "sets"
    truth = {"phenotypes": phenotypes, "efficacy": guides.set_index("sgRNA")[["efficacy"]], "wells": wells}
    truth |= {"strengths": strength, "network": network}
    return AnnData(
        obs=obs,
        var=pd.DataFrame(index=list(CHANNELS)),
        obsm={IMAGE_KEY: images, "X_oracle": (shown / sd).astype(np.float32)},
        uns={"truth": truth},
    )


def _check_screen_arguments(given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if arguments of :func:`simulated_screen` are out of range or contradict each other."""
    check_count("image_size", given["image_size"], 16)
    for name in _COUNT_ARGUMENTS:
        check_count(name, given[name])
    for name in _NONNEGATIVE_ARGUMENTS:
        check_number(name, given[name])
    for name in _FRACTION_ARGUMENTS:
        check_number(name, given[name], 1)
    if given["neighbours"] > _MAX_NEIGHBOURS:
        msg = f"neighbours={given['neighbours']}: no more than {_MAX_NEIGHBOURS} cells fit around one."
        raise ValueError(msg)
    if given["control_fraction"] == 1:
        msg = "control_fraction=1 leaves no cells for genes: give less than 1."
        raise ValueError(msg)
    n_genes = given["n_complexes"] * given["genes_per_complex"]
    n_guides = (n_genes + 2) * given["guides_per_gene"]
    if given["n_cells"] < n_guides:
        msg = f"n_cells={given['n_cells']} is less than one cell for each of the {n_guides} guides: ask for more cells."
        raise ValueError(msg)

    plate_wells, n_maps = given["plate_wells"], given["n_plate_maps"]
    if plate_wells is not None and plate_wells not in PLATE_SHAPES:
        msg = f"plate_wells={plate_wells}: plates have {', '.join(map(str, PLATE_SHAPES))} wells; None for no layout."
        raise ValueError(msg)
    if given["position_effect"] and plate_wells is None:
        msg = "position_effect needs plates that have positions: give plate_wells, such as 24."
        raise ValueError(msg)
    n_plates = -(-given["n_wells"] // (plate_wells or _WELLS_PER_PLATE_WITHOUT_LAYOUT))
    if n_maps > min(n_plates, n_genes):
        msg = f"n_plate_maps={n_maps}: there are fewer plates, or fewer genes."
        raise ValueError(msg)
    if n_maps > 1 and given["confounding"]:
        msg = "confounding and n_plate_maps both say which wells a gene is in: give one of them."
        raise ValueError(msg)
