from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.spatial.distance import pdist, squareform

from scbd.datasets import simulated_screen
from scbd.datasets._simulated import PHENOTYPES, _draw

SMALL: dict[str, Any] = {"n_complexes": 3, "genes_per_complex": 2, "guides_per_gene": 2, "n_wells": 4, "image_size": 32}


def test_layout(tmp_path):
    cells = simulated_screen(400, **SMALL)
    assert cells.obsm["single_cell_images"].shape == (400, 4, 32, 32)
    assert cells.obsm["single_cell_images"].dtype == np.uint8
    assert cells.obs["gene"].nunique() == 7
    assert cells.obs["sgRNA"].nunique() == 6 * 2 + 4
    assert cells.obs["well"].nunique() == 4
    assert (cells.obs.groupby("sgRNA", observed=True)["gene"].nunique() == 1).all()
    network = cells.uns["truth"]["network"]
    assert list(network.columns) == ["source", "target"]
    assert network["source"].value_counts().to_dict() == {f"complex_{i}": 2 for i in (1, 2, 3)}
    pairs = dict(zip(network["target"], network["source"], strict=True)) | {"nontargeting": "none"}
    assert (cells.obs["gene"].astype(str).map(pairs) == cells.obs["complex"].astype(str)).all()
    cells.write_h5ad(tmp_path / "screen.h5ad")


def test_seed_decides_everything():
    one, two, three = (simulated_screen(60, **SMALL, seed=s).obsm["single_cell_images"] for s in (0, 0, 1))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, three)


def test_genes_of_a_complex_share_their_phenotype():
    truth = simulated_screen(300, n_complexes=4, genes_per_complex=3, guides_per_gene=1, image_size=16).uns["truth"]
    effects = truth["phenotypes"].drop("nontargeting")
    distance = squareform(pdist(effects, "correlation"))
    same = np.repeat(np.arange(4), 3)[:, None] == np.repeat(np.arange(4), 3)[None, :]
    off_diagonal = ~np.eye(12, dtype=bool)
    assert distance[same & off_diagonal].max() < distance[~same].min() + 0.3
    assert (truth["phenotypes"].loc["nontargeting"] == 0).all()
    assert truth["efficacy"]["efficacy"].between(0.5, 1).all()


def brightness(cells) -> pd.DataFrame:
    return pd.DataFrame(cells.obsm["single_cell_images"].mean((2, 3)), index=cells.obs_names)


def test_effects_are_what_was_asked_for():
    """Means of genes differ with an effect, those of wells with a well effect, and neither without."""

    def variance_explained(cells, column):
        values = brightness(cells)
        return float((values.groupby(cells.obs[column].to_numpy()).transform("mean").var() / values.var()).mean())

    plain = simulated_screen(1500, **SMALL, effect_size=0, well_effect=0)
    genes = simulated_screen(1500, **SMALL, effect_size=2, well_effect=0)
    wells = simulated_screen(1500, **SMALL, effect_size=0, well_effect=1)
    assert variance_explained(plain, "gene") < 0.02 > variance_explained(plain, "well")
    assert variance_explained(genes, "gene") > 0.15
    assert variance_explained(wells, "well") > 0.3
    assert variance_explained(wells, "gene") < 0.02


def test_a_guide_does_what_it_knocks_down():
    one_gene = SMALL | {"n_complexes": 1, "genes_per_complex": 1, "guides_per_gene": 6, "image_size": 16}
    cells = simulated_screen(1500, **one_gene, effect_size=3, well_effect=0)
    means = brightness(cells).groupby(cells.obs["sgRNA"].to_numpy()).mean()
    targeted = ~means.index.str.startswith("nontargeting")
    effect = np.linalg.norm(means[targeted] - means[~targeted].mean(), axis=1)
    efficacy = cells.uns["truth"]["efficacy"].loc[means.index[targeted], "efficacy"]
    assert np.corrcoef(effect, efficacy)[0, 1] > 0.8


def test_a_nucleus_that_is_elongated_is_as_large_as_before():
    """Its two axes change by one factor, each in its own direction."""
    plain = np.ones((64, len(PHENOTYPES)))
    stretched = plain.copy()
    stretched[:, list(PHENOTYPES).index("nucleus_elongation")] = 1.6
    bright, as_bright = (_draw(np.random.default_rng(0), cells, 64)[:, 2].mean() for cells in (plain, stretched))
    assert as_bright == pytest.approx(bright, rel=0.05)


@pytest.mark.parametrize(("imbalance", "low", "high"), [(0.0, 0.0, 0.2), (0.8, 0.5, 1.1)])
def test_wells_are_as_unequal_as_asked_for(imbalance, low, high):
    cells = simulated_screen(2000, **SMALL | {"n_wells": 40, "image_size": 16}, well_imbalance=imbalance)
    counts = cells.obs["well"].value_counts()
    assert low < counts.std() / counts.mean() < high
    assert cells.obs.groupby("gene", observed=True)["well"].nunique().min() > 20


@pytest.mark.parametrize(("confounding", "wells_per_gene"), [(0.0, 4), (1.0, 1)])
def test_confounding(confounding, wells_per_gene):
    cells = simulated_screen(600, **SMALL, confounding=confounding)
    assert set(cells.obs.groupby("gene", observed=True)["well"].nunique()) == {wells_per_gene}


def test_controls():
    cells = simulated_screen(5000, **SMALL | {"image_size": 16}, control_fraction=0.3)
    assert 0.25 < (cells.obs["gene"] == "nontargeting").mean() < 0.35


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"n_cells": 10}, "n_cells=10 is less than one cell for each of the 16 guides"),
        ({"confounding": 2}, "confounding and control_fraction lie between 0 and 1"),
        ({"well_imbalance": -1}, "well_imbalance are not negative"),
        ({"n_wells": 0}, "must be at least 1, image_size at least 16"),
    ],
)
def test_bad_input(kwargs, said):
    with pytest.raises(ValueError, match=said):
        simulated_screen(**{"n_cells": 100} | SMALL | kwargs)
