"""The library of a simulated screen: what its genes and guides do, and which cells of which wells carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.datasets._simulated_images import PHENOTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping


def phenotypes_of(
    rng: np.random.Generator,
    more: np.random.Generator,
    n_complexes: int,
    genes_per_complex: int,
    sizes: Mapping[str, float],
) -> tuple[pd.DataFrame, pd.Series]:
    """Log-effect of each gene on each phenotype, and each gene's complex."""
    sd = np.array(list(PHENOTYPES.values()))
    of_complex = rng.normal(size=(n_complexes, len(sd)))
    # equally strong complexes, before each has its own strength: directions differ
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


def guides_of(rng: np.random.Generator, genes: list[str], guides_per_gene: int) -> pd.DataFrame:
    """A row a guide: its gene, its name, and how well it knocks its gene down."""
    of_guide = [gene for gene in genes for _ in range(guides_per_gene * (2 if gene == "nontargeting" else 1))]
    number = pd.Series(of_guide).groupby(of_guide).cumcount() + 1
    return pd.DataFrame(
        {
            "gene": of_guide,
            "sgRNA": [f"{gene}_sg{i}" for gene, i in zip(of_guide, number, strict=True)],
            "efficacy": rng.uniform(0.5, 1.0, len(of_guide)),
        }
    )


def cells_of(rng: np.random.Generator, n_cells: int, library: pd.DataFrame, control_fraction: float) -> pd.DataFrame:
    """A row a cell: its guide's. Guides are unequally abundant, as in a real library; each has a cell."""
    is_control = (library["gene"] == "nontargeting").to_numpy()
    weight = rng.gamma(5.0, size=len(library))
    weight[is_control] *= control_fraction / weight[is_control].sum()
    weight[~is_control] *= (1 - control_fraction) / weight[~is_control].sum()
    extra = rng.choice(len(library), size=n_cells - len(library), p=weight)
    guide = rng.permutation(np.concatenate([np.arange(len(library)), extra]))
    return library.iloc[guide].set_index(pd.Index([f"cell_{i}" for i in range(n_cells)]))


def wells_of_cells(
    rng: np.random.Generator,
    more: np.random.Generator,
    genes: pd.Categorical,
    density: np.ndarray,
    plates: np.ndarray,
    design: Mapping[str, float],
) -> np.ndarray:
    """The well of each cell, ``(n_cells,)``, from the gene of each, and the density and plate of each well."""
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
        # controls, the last, are on all plates: their map is none
        of_cell = np.append(more.permutation(len(names) - 1) % n_maps, -1)[code]
        for plate_map in range(n_maps):
            here, wells = np.flatnonzero(of_cell == plate_map), np.flatnonzero(plates % n_maps == plate_map)
            well[here] = more.choice(wells, size=len(here), p=weight[wells] / weight[wells].sum())
    return well
