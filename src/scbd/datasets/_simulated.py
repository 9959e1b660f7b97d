"""A simulated optical pooled screen: known complexes, imperfect guides, wells with their own look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.ndimage import gaussian_filter1d

from scbd._keys import IMAGE_KEY

if TYPE_CHECKING:
    from anndata import AnnData

CHANNELS = ("DNA damage", "F-actin", "DNA", "microtubules")
# what a perturbation can change, and the standard deviation of each between cells of one guide
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
_BLOCK = 512


def simulated_screen(
    n_cells: int = 20_000,
    *,
    n_complexes: int = 12,
    genes_per_complex: int = 4,
    guides_per_gene: int = 4,
    n_wells: int = 6,
    image_size: int = 64,
    effect_size: float = 1.0,
    well_effect: float = 1.0,
    well_imbalance: float = 0.0,
    confounding: float = 0.0,
    control_fraction: float = 0.1,
    seed: int = 0,
) -> AnnData:
    """Simulate cells of an optical pooled screen in four channels (DNA damage, F-actin, DNA, microtubules).

    Genes of a complex share a phenotype, up to a small part of their own; guides knock their gene down more or less
    well; non-targeting guides do nothing. Each well has its own stain intensities, uneven illumination, focus and
    background, which have nothing to do with the perturbations unless ``confounding`` says so.

    Parameters
    ----------
    n_cells
        Number of cells.
    n_complexes, genes_per_complex, guides_per_gene
        Layout of the library. There are twice ``guides_per_gene`` non-targeting guides.
    n_wells
        Number of wells, on plates of up to six.
    image_size
        Pixels a side; a cell fills about 0.8 of it.
    effect_size
        Strength of the phenotypes, in units of about two standard deviations between cells.
    well_effect
        Strength of all well effects; 0 for none.
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
    AnnData with ``obsm["single_cell_images"]`` uint8 ``(n_cells, 4, image_size, image_size)``, ``obs``: ``gene``,
    ``sgRNA``, ``complex``, ``well``, ``plate``; and the truth in ``uns["truth"]``: ``phenotypes`` (gene ×
    phenotype), ``efficacy`` (guide), ``wells`` (well × effect), ``network`` (frame ``source, target``: complex and
    gene).

    Raises
    ------
    ValueError
        If a number is out of range, or there are fewer cells than guides.

    Examples
    --------
    >>> screen = scbd.datasets.simulated_screen(500, image_size=32, n_complexes=3, genes_per_complex=2)
    >>> screen.obs["gene"].nunique()  # six genes, and controls that target none
    7
    >>> screen.uns["truth"]["network"].columns.to_list()
    ['source', 'target']
    """
    n_genes = n_complexes * genes_per_complex
    n_guides = (n_genes + 2) * guides_per_gene
    if min(n_complexes, genes_per_complex, guides_per_gene, n_wells) < 1 or image_size < 16:
        msg = "n_complexes, genes_per_complex, guides_per_gene and n_wells must be at least 1, image_size at least 16."
        raise ValueError(msg)
    if not 0 <= confounding <= 1 or not 0 <= control_fraction < 1 or min(effect_size, well_effect, well_imbalance) < 0:
        msg = (
            "confounding and control_fraction lie between 0 and 1; effect_size, well_effect and well_imbalance are not "
            "negative."
        )
        raise ValueError(msg)
    if n_cells < n_guides:
        msg = f"n_cells={n_cells} is less than one cell for each of the {n_guides} guides: ask for more cells."
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    phenotypes, complexes = _phenotypes(rng, n_complexes, genes_per_complex, effect_size)
    library = _library(rng, list(phenotypes.index), guides_per_gene)
    wells = _wells(rng, n_wells, well_effect)
    cells = _cells(rng, n_cells, library, list(wells.index), well_imbalance, confounding, control_fraction)
    mean = phenotypes.loc[cells["gene"]].to_numpy() * cells["efficacy"].to_numpy()[:, None]
    parameters = np.exp(mean + rng.normal(size=mean.shape) * np.array(list(PHENOTYPES.values())))
    well_codes = pd.Categorical(cells["well"], wells.index).codes
    images = np.empty((n_cells, len(CHANNELS), image_size, image_size), dtype=np.uint8)
    for start in range(0, n_cells, _BLOCK):
        rows = slice(start, start + _BLOCK)
        drawn = _draw(rng, parameters[rows], image_size)
        images[rows] = _photograph(rng, drawn, wells.iloc[well_codes[rows]], image_size)

    from anndata import AnnData

    obs = cells.assign(complex=cells["gene"].map(complexes))[["gene", "sgRNA", "complex", "well", "plate"]]
    network = complexes.drop("nontargeting").rename_axis("target").rename("source").reset_index()[["source", "target"]]
    network.attrs["kind"] = "sets"
    return AnnData(
        obs=obs.astype("category"),
        var=pd.DataFrame(index=list(CHANNELS)),
        obsm={IMAGE_KEY: images},
        uns={
            "truth": {
                "phenotypes": phenotypes,
                "efficacy": library.set_index("sgRNA")[["efficacy"]],
                "wells": wells,
                "network": network,
            }
        },
    )


def _phenotypes(
    rng: np.random.Generator, n_complexes: int, genes_per_complex: int, effect_size: float
) -> tuple[pd.DataFrame, pd.Series]:
    """Log-effect of each gene on each phenotype, and each gene's complex."""
    sd = np.array(list(PHENOTYPES.values()))
    of_complex = rng.normal(size=(n_complexes, len(sd)))
    # equally strong complexes: their directions differ, not whether they can be seen
    of_complex *= 2 * np.sqrt(len(sd)) / np.linalg.norm(of_complex, axis=1, keepdims=True)
    of_gene = np.repeat(of_complex, genes_per_complex, axis=0)
    of_gene = effect_size * sd * (of_gene + 0.3 * rng.normal(size=of_gene.shape))
    genes = [f"GENE{i + 1}" for i in range(len(of_gene))]
    complexes = [f"complex_{i // genes_per_complex + 1}" for i in range(len(of_gene))]
    values = np.vstack([of_gene, np.zeros(len(sd))])
    index = [*genes, "nontargeting"]
    return pd.DataFrame(values, index=index, columns=list(PHENOTYPES)), pd.Series([*complexes, "none"], index=index)


def _library(rng: np.random.Generator, genes: list[str], guides_per_gene: int) -> pd.DataFrame:
    of_guide = [gene for gene in genes for _ in range(guides_per_gene * (2 if gene == "nontargeting" else 1))]
    number = pd.Series(of_guide).groupby(of_guide).cumcount() + 1
    return pd.DataFrame(
        {
            "gene": of_guide,
            "sgRNA": [f"{gene}_sg{i}" for gene, i in zip(of_guide, number, strict=True)],
            "efficacy": rng.uniform(0.5, 1.0, len(of_guide)),
        }
    )


def _wells(rng: np.random.Generator, n_wells: int, strength: float) -> pd.DataFrame:
    columns = {f"gain_{channel}": np.exp(0.3 * strength * rng.normal(size=n_wells)) for channel in CHANNELS}
    columns |= {f"tilt_{axis}": 0.3 * strength * rng.normal(size=n_wells) for axis in "xy"}
    columns["blur"] = 0.5 + 0.6 * strength * rng.random(n_wells)
    columns["background"] = 0.02 + 0.05 * strength * rng.random(n_wells)
    return pd.DataFrame(columns, index=[f"P{i // 6 + 1}_W{i % 6 + 1}" for i in range(n_wells)])


def _cells(
    rng: np.random.Generator,
    n_cells: int,
    library: pd.DataFrame,
    wells: list[str],
    well_imbalance: float,
    confounding: float,
    control_fraction: float,
) -> pd.DataFrame:
    is_control = (library["gene"] == "nontargeting").to_numpy()
    # guides are unequally abundant, as in a real library; each has a cell
    weight = rng.gamma(5.0, size=len(library))
    weight[is_control] *= control_fraction / weight[is_control].sum()
    weight[~is_control] *= (1 - control_fraction) / weight[~is_control].sum()
    extra = rng.choice(len(library), size=n_cells - len(library), p=weight)
    guide = rng.permutation(np.concatenate([np.arange(len(library)), extra]))
    cells = library.iloc[guide].set_index(pd.Index([f"cell_{i}" for i in range(n_cells)]))
    home = rng.integers(len(wells), size=library["gene"].nunique())[pd.factorize(library["gene"])[0][guide]]
    anywhere = rng.integers(len(wells), size=n_cells)
    if well_imbalance:
        weight = rng.gamma(well_imbalance**-2, size=len(wells))
        anywhere = rng.choice(len(wells), size=n_cells, p=weight / weight.sum())
    well = np.where(rng.random(n_cells) < confounding, home, anywhere)
    names = np.array(wells, dtype=object)[well]
    return cells.assign(well=names, plate=[name.split("_")[0] for name in names])


def _draw(rng: np.random.Generator, parameters: np.ndarray, size: int) -> np.ndarray:
    """Ideal images ``(n, 4, size, size)`` of cells with these phenotypes, about 1 at their brightest."""
    n = len(parameters)
    p = dict(zip(PHENOTYPES, parameters.astype(np.float32).T[:, :, None, None], strict=True))
    unit = (np.arange(size, dtype=np.float32) - (size - 1) / 2) / (size / 2)
    shift = 0.08 * rng.normal(size=(2, n, 1, 1)).astype(np.float32)
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


def _disk(radius: np.ndarray, sharpness: float) -> np.ndarray:
    return 1 / (1 + np.exp(np.clip(sharpness * (radius - 1), -30, 30)))


def _photograph(rng: np.random.Generator, images: np.ndarray, wells: pd.DataFrame, size: int) -> np.ndarray:
    """What the microscope makes of ideal images in their wells: focus, stain, illumination, background, noise."""
    unit = np.linspace(-1, 1, size, dtype=np.float32)
    for blur in wells["blur"].unique():
        of_well = (wells["blur"] == blur).to_numpy()
        sigma = float(blur) * size / 64
        blurred = gaussian_filter1d(images[of_well], sigma, axis=2, truncate=3)
        images[of_well] = gaussian_filter1d(blurred, sigma, axis=3, truncate=3)
    column = {name: wells[name].to_numpy(np.float32)[:, None, None, None] for name in wells}
    light = 1 + column["tilt_x"] * unit + column["tilt_y"] * unit[:, None]
    gain = wells[[f"gain_{channel}" for channel in CHANNELS]].to_numpy(np.float32)[:, :, None, None]
    images = images * gain * np.clip(light, 0.1, None) + column["background"]
    noise = rng.standard_normal(images.shape, dtype=np.float32)
    images += noise * (0.01 + 0.04 * np.sqrt(np.clip(images, 0, None)))
    return np.clip(np.rint(120 * images), 0, 255).astype(np.uint8)
