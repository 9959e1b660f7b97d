from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform

from scbd.baselines import pixel_pca
from scbd.corrections import standardize_by_environment
from scbd.datasets import HARD_SCREEN, simulated_screen
from scbd.datasets._simulated import (
    CHANNELS,
    PHENOTYPES,
    PLATE_SHAPES,
    POSITION_EFFECTS,
    add_layout,
    draw_ideal_images,
    draw_neighbours,
    draw_well_properties,
    phenotype_strengths,
    photograph,
    place_wells,
    well_name,
)
from scbd.metrics import aggregate, relationship_average_precision

SMALL: dict[str, Any] = {"n_complexes": 3, "genes_per_complex": 2, "guides_per_gene": 2, "n_wells": 4, "image_size": 32}


def test_simulated_screen_shapes_labels_and_network_are_consistent(tmp_path):
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


@pytest.mark.parametrize(
    ("changed", "obs", "pixels"),
    [
        ({}, "c5c56cdd5895425b", [288016752, 1042042758, 550179275, 751823007]),
        (
            {"well_imbalance": 0.6, "n_wells": 34, "seed": 3},
            "c204cfb66969715a",
            [303677513, 1242417490, 717646990, 809476064],
        ),
        (
            {"confounding": 0.5, "well_effect": 0.7, "effect_size": 1.3, "seed": 1},
            "6bba58c065e36643",
            [272307042, 1011915037, 556564043, 976729942],
        ),
    ],
)
def test_simulated_screen_published_designs_are_unchanged(changed, obs, pixels):
    """The hashes date from before plates had a layout; processors may round one pixel in a million differently."""
    cells = simulated_screen(300, **SMALL | changed)
    assert hashlib.sha256(cells.obs.to_csv().encode()).hexdigest().startswith(obs)
    images = cells.obsm["single_cell_images"].astype(np.int64)
    place = np.arange(images[:, :1].size).reshape(images[:, :1].shape) % 251
    np.testing.assert_allclose((images * place).sum((0, 2, 3)), pixels, rtol=2e-6)


def test_simulated_screen_equal_seed_returns_equal_images():
    one, two, three = (simulated_screen(60, **SMALL, seed=s).obsm["single_cell_images"] for s in (0, 0, 1))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, three)


def test_simulated_screen_genes_of_a_complex_share_phenotypes():
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


def test_simulated_screen_effect_sizes_determine_explained_variance():
    """Genes explain variance only with a gene effect, and wells only with a well effect."""

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


def test_simulated_screen_guide_effect_correlates_with_efficacy():
    one_gene = SMALL | {"n_complexes": 1, "genes_per_complex": 1, "guides_per_gene": 6, "image_size": 16}
    cells = simulated_screen(1500, **one_gene, effect_size=3, well_effect=0)
    means = brightness(cells).groupby(cells.obs["sgRNA"].to_numpy()).mean()
    targeted = ~means.index.str.startswith("nontargeting")
    effect = np.linalg.norm(means[targeted] - means[~targeted].mean(), axis=1)
    efficacy = cells.uns["truth"]["efficacy"].loc[means.index[targeted], "efficacy"]
    assert np.corrcoef(effect, efficacy)[0, 1] > 0.8


@pytest.mark.parametrize(("imbalance", "low", "high"), [(0.0, 0.0, 0.2), (0.8, 0.5, 1.1)])
def test_simulated_screen_well_imbalance_sets_variation_of_counts(imbalance, low, high):
    cells = simulated_screen(2000, **SMALL | {"n_wells": 40, "image_size": 16}, well_imbalance=imbalance)
    counts = cells.obs["well"].value_counts()
    assert low < counts.std() / counts.mean() < high
    assert cells.obs.groupby("gene", observed=True)["well"].nunique().min() > 20


@pytest.mark.parametrize(("confounding", "wells_per_gene"), [(0.0, 4), (1.0, 1)])
def test_simulated_screen_confounding_sets_wells_per_gene(confounding, wells_per_gene):
    cells = simulated_screen(600, **SMALL, confounding=confounding)
    assert set(cells.obs.groupby("gene", observed=True)["well"].nunique()) == {wells_per_gene}


def test_simulated_screen_control_fraction_is_as_requested():
    cells = simulated_screen(5000, **SMALL | {"image_size": 16}, control_fraction=0.3)
    assert 0.25 < (cells.obs["gene"] == "nontargeting").mean() < 0.35


def test_simulated_screen_active_share_of_complexes_has_effects():
    many: dict[str, Any] = {"n_complexes": 200, "guides_per_gene": 1, "image_size": 16, "active": 0.6}
    truth = simulated_screen(802, **many, effect_spread=0.7).uns["truth"]
    sd = np.array(list(PHENOTYPES.values()))
    strength = np.linalg.norm(truth["phenotypes"].drop("nontargeting") / sd, axis=1).reshape(200, 4)
    does = (strength > 0).any(axis=1)
    assert does.sum() == 120 and (strength[does] > 0).all()
    assert np.log(strength[does].mean(1)).std() == pytest.approx(0.7, rel=0.15)
    assert truth["network"]["source"].nunique() == 200


def test_simulated_screen_oracle_mean_is_phenotype_times_efficacy():
    cells = simulated_screen(4000, **SMALL | {"image_size": 16})
    truth, sd = cells.uns["truth"], np.array(list(PHENOTYPES.values()))
    by_guide = pd.DataFrame(cells.obsm["X_oracle"]).groupby(cells.obs["sgRNA"].astype(str).to_numpy())
    gene = by_guide.mean().index.str.rsplit("_", n=1).str[0]
    shown = truth["phenotypes"].loc[gene].to_numpy() / sd * truth["efficacy"].loc[by_guide.mean().index].to_numpy()
    np.testing.assert_allclose(by_guide.mean(), shown, atol=0.4)
    np.testing.assert_allclose(by_guide.std().mean(), 1, atol=0.05)


def test_simulated_screen_interaction_scales_phenotypes_by_well():
    design: dict[str, Any] = SMALL | {"n_complexes": 1, "genes_per_complex": 1, "image_size": 16, "effect_size": 3.0}
    cells = simulated_screen(8000, **design, interaction=0.5)
    truth, sd = cells.uns["truth"], np.array(list(PHENOTYPES.values()))
    gene = (cells.obs["gene"] == "GENE1").to_numpy()
    knocked = truth["efficacy"].loc[cells.obs["sgRNA"].astype(str), "efficacy"].to_numpy()
    shown = pd.DataFrame(cells.obsm["X_oracle"] / knocked[:, None])[gene]
    by_well = shown.groupby(cells.obs["well"].astype(str).to_numpy()[gene]).mean()
    expected = truth["phenotypes"].loc["GENE1"].to_numpy() / sd * truth["strengths"].loc[by_well.index]
    np.testing.assert_allclose(by_well, expected, atol=0.25)
    assert np.ptp(expected, axis=0).max() > 2


def test_simulated_screen_dense_wells_have_more_and_smaller_cells():
    design: dict[str, Any] = SMALL | {"n_wells": 24, "effect_size": 0.0, "well_effect": 0.0}
    cells = simulated_screen(3000, **design, density_effect=2.0)
    density = np.log(cells.uns["truth"]["wells"]["density"])
    counts = np.log(cells.obs["well"].value_counts())
    areas = pd.DataFrame((cells.obsm["single_cell_images"][:, 1:3] > np.array([15, 50])[:, None, None]).mean((2, 3)))
    size = np.log(areas.groupby(cells.obs["well"].astype(str).to_numpy()).mean()).loc[density.index]
    assert np.polyfit(density, counts[density.index], 1)[0] == pytest.approx(1, abs=0.2)
    # exponents of areas of cells and nuclei are twice those of their lengths, apart from cells cut off by the image
    assert np.polyfit(density, size[0], 1)[0] == pytest.approx(-1, abs=0.2)
    assert np.polyfit(density, size[1], 1)[0] == pytest.approx(-0.5, abs=0.1)


def test_simulated_screen_neighbours_add_light_at_the_edges(tmp_path):
    one, other = (simulated_screen(400, **SMALL, neighbours=number) for number in (0, 5))
    pd.testing.assert_frame_equal(one.obs, other.obs)
    np.testing.assert_array_equal(one.obsm["X_oracle"], other.obsm["X_oracle"])
    alone, among = (cells.obsm["single_cell_images"].mean((0, 1)) for cells in (one, other))
    assert among[14:18, 14:18].mean() == pytest.approx(alone[14:18, 14:18].mean(), rel=0.02)
    assert among[[0, -1]].mean() > 3 * alone[[0, -1]].mean()
    other.write_h5ad(tmp_path / "screen.h5ad")


@settings(max_examples=20, deadline=None)
@given(mean=st.floats(0, 6), n_wells=st.integers(1, 5), seed=st.integers(0, 99))
def test_draw_neighbours_are_of_the_same_well_with_requested_mean(mean, n_wells, seed):
    rng = np.random.default_rng(seed)
    well = rng.choice(2 * np.arange(n_wells), size=600)  # wells with odd codes have no cell
    around = draw_neighbours(rng, well, np.full(600, mean))
    cell, _ = np.nonzero(around >= 0)
    assert (well[around[around >= 0]] == well[cell]).all()
    assert (around >= 0).sum(1).mean() == pytest.approx(mean, abs=0.3)
    # neighbours are drawn from all cells of a well
    assert mean < 1 or len(np.unique(around)) > 200


def test_simulated_screen_dense_wells_have_more_neighbours():
    design: dict[str, Any] = SMALL | {"n_wells": 24, "effect_size": 0.0, "well_effect": 0.0, "density_effect": 2.0}
    one, other = (simulated_screen(2400, **design, neighbours=number) for number in (0, 2))
    light = other.obsm["single_cell_images"][:, 2].mean((1, 2)) - one.obsm["single_cell_images"][:, 2].mean((1, 2))
    density = np.log(one.uns["truth"]["wells"]["density"])
    of_well = np.log(pd.Series(light).groupby(one.obs["well"].astype(str).to_numpy()).mean()).loc[density.index]
    # the number of neighbours scales with the density, the area of a nucleus with density ** -0.5
    assert np.polyfit(density, of_well, 1)[0] == pytest.approx(0.5, abs=0.25)


@settings(max_examples=20, deadline=None)
@given(n_wells=st.integers(12, 60), maps=st.integers(1, 6), imbalance=st.sampled_from([0.0, 0.5]))
def test_simulated_screen_plate_maps_hold_separate_genes(n_wells, maps, imbalance):
    """A gene lies on plates of one map only; controls lie on plates of several maps."""
    n_plates = -(-n_wells // 6)
    if maps > n_plates:
        return
    design: dict[str, Any] = SMALL | {"n_wells": n_wells, "image_size": 16, "well_imbalance": imbalance}
    cells = simulated_screen(400, **design, plate_wells=6, n_plate_maps=maps, position_effect=1.0, seed=n_wells)
    obs = cells.obs
    assert (obs["well"].astype(str) == obs["plate"].astype(str) + "_" + obs["position"].astype(str)).all()
    assert obs["row"].between(1, 2).all() and obs["column"].between(1, 3).all()
    plate_map = (obs["plate"].astype(str).str[1:].astype(int) - 1) % maps
    control = (obs["gene"] == "nontargeting").to_numpy()
    assert (plate_map[~control].groupby(obs["gene"][~control], observed=True).nunique() == 1).all()
    dealt = plate_map[~control].groupby(obs["gene"][~control], observed=True).first().value_counts()
    assert len(dealt) == maps and np.ptp(dealt) <= 1
    assert maps == 1 or plate_map[control].nunique() > 1


def test_hard_screen_scores_rank_pixels_corrected_pixels_and_oracle():
    """Precision is near chance for pixels, higher for corrected pixels, and clearly highest for the oracle."""
    cells = simulated_screen(10_000, **HARD_SCREEN)
    pixels = pixel_pca(cells)
    cells.obsm["X_pixels"] = pixels
    cells.obsm["X_centred"] = standardize_by_environment(pixels, cells.obs["well"])
    score = {}
    for key in ("X_pixels", "X_centred", "X_oracle"):
        profiles = aggregate(cells, key, gene_key="gene", guide_key="sgRNA")
        score[key] = relationship_average_precision(profiles, cells.uns["truth"]["network"])
    assert 0.017 < score["X_pixels"] < score["X_centred"] - 0.02
    assert 0.05 < score["X_centred"] < score["X_oracle"] - 0.05
    assert score["X_oracle"] < 0.4


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"n_cells": 10}, "n_cells=10 is less than one cell for each of the 16 guides"),
        ({"confounding": 2}, "confounding=2: give a number from 0 to 1"),
        ({"control_fraction": 1}, "control_fraction=1 leaves no cells for genes: give less than 1"),
        ({"active": -0.1}, "active=-0.1: give a number from 0 to 1"),
        ({"well_imbalance": -1}, "well_imbalance=-1: give a number, 0 or larger"),
        ({"neighbours": -1}, "neighbours=-1: give a number, 0 or larger"),
        ({"neighbours": 7}, "neighbours=7: no more than 6 cells fit around one"),
        ({"n_wells": 0}, "n_wells=0: give a whole number, 1 or larger"),
        ({"image_size": 8}, "image_size=8: give a whole number, 16 or larger"),
        ({"plate_wells": 12}, "plate_wells=12: plates have 6, 24, 96, 384, 1536 wells"),
        ({"position_effect": 1.0}, "position_effect needs plates that have positions: give plate_wells"),
        ({"n_plate_maps": 2}, "n_plate_maps=2: there are fewer plates, or fewer genes"),
        ({"n_plate_maps": 7, "n_wells": 60}, "n_plate_maps=7: there are fewer plates, or fewer genes"),
        ({"n_plate_maps": 2, "n_wells": 12, "confounding": 0.5}, "both say which wells a gene is in: give one of them"),
    ],
)
def test_simulated_screen_invalid_input_raises(kwargs, said):
    with pytest.raises(ValueError, match=said):
        simulated_screen(**{"n_cells": 100} | SMALL | kwargs)


PLAIN = {f"gain_{channel}": 1.0 for channel in CHANNELS} | {"tilt_x": 0.0, "tilt_y": 0.0, "blur": 0.5}
PLAIN |= {"background": 0.02, "gamma": 1.0, "saturation": 0.0}


def draw_ideal_and_photographed(**changed: float) -> tuple[np.ndarray, np.ndarray]:
    """Return one channel of the same cells, flattened: ideal, and photographed in a well with changed properties."""
    ideal = draw_ideal_images(np.random.default_rng(0), np.ones((64, len(PHENOTYPES))), 32)
    wells = pd.DataFrame([PLAIN | {"blur": 1e-6} | changed] * 64)
    return ideal[:, 1].ravel(), photograph(np.random.default_rng(1), ideal.copy(), wells, 32)[:, 1].ravel() / 120


def test_draw_ideal_images_elongated_nucleus_keeps_its_area():
    """Elongation stretches one axis and shrinks the other by the same factor."""
    plain = np.ones((64, len(PHENOTYPES)))
    stretched = plain.copy()
    stretched[:, list(PHENOTYPES).index("nucleus_elongation")] = 1.6
    bright, as_bright = (
        draw_ideal_images(np.random.default_rng(0), cells, 64)[:, 2].mean() for cells in (plain, stretched)
    )
    assert as_bright == pytest.approx(bright, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "formula"),
    [
        ({}, lambda light: light),
        ({"gain_F-actin": 1.5}, lambda light: 1.5 * light),
        ({"gamma": 1.4}, lambda light: light**1.4),
        ({"saturation": 0.5}, lambda light: light / (1 + 0.5 * light)),
    ],
)
def test_photograph_gain_gamma_and_saturation_follow_their_formulas(changed, formula):
    ideal, image = draw_ideal_and_photographed(background=0.0, **changed)
    seen = ideal > 0.1  # darker pixels are clipped at 0
    by_light = pd.DataFrame({"ideal": ideal, "image": image})[seen].groupby(np.round(ideal[seen], 1)).mean()
    np.testing.assert_allclose(by_light["image"], formula(by_light["ideal"]), atol=0.02)


@pytest.mark.parametrize(("row", "column", "name"), [(0, 0, "A01"), (15, 23, "P24"), (25, 9, "Z10"), (26, 47, "AA48")])
def test_well_name_row_and_column_returns_name(row, column, name):
    assert well_name(row, column) == name


@pytest.mark.parametrize("n_wells", PLATE_SHAPES)
def test_add_layout_position_effects_are_standardised(n_wells):
    shape = PLATE_SHAPES[n_wells]
    row, column = (axis.ravel() for axis in np.indices(shape))
    layout = add_layout(pd.DataFrame({"row": row, "column": column}), shape)[list(POSITION_EFFECTS)]
    np.testing.assert_allclose(layout.mean(), 0, atol=1e-12)
    # all wells of a plate of six lie at its edge
    np.testing.assert_allclose(layout.var(ddof=0), [1, 1, n_wells > 6], rtol=0.3)
    edge = (row == 0) | (column == 0) | (row == shape[0] - 1) | (column == shape[1] - 1)
    assert n_wells == 6 or layout["edge"][edge].min() > layout["edge"][~edge].max()


NOTHING: dict[str, float] = dict.fromkeys(
    ["well_effect", "plate_effect", "position_effect", "camera_effect", "density_effect"], 0.0
)
GAINS = [f"gain_{channel}" for channel in CHANNELS]


def place_and_draw_wells(n_wells: int, **effects: float) -> Any:
    rng = np.random.default_rng(0)
    where = place_wells(n_wells, 96)
    return where, draw_well_properties(rng, rng.spawn(1)[0], where, 96, NOTHING | effects)


def test_place_wells_without_layout_returns_numbered_wells():
    assert list(place_wells(8, None).index) == [f"P1_W{i}" for i in range(1, 7)] + ["P2_W1", "P2_W2"]
    assert list(place_wells(8, None)) == ["plate"]


def test_place_wells_with_layout_fills_plates_row_by_row():
    where = place_wells(100, 96)
    assert where.index.is_unique and where["plate"].value_counts().to_dict() == {"P1": 96, "P2": 4}
    assert where.loc["P1_B12"].to_dict() == {"plate": "P1", "row": 2, "column": 12, "position": "B12"}
    assert list(where.index[[0, 95, 96, 99]]) == ["P1_A01", "P1_H12", "P2_A01", "P2_A04"]


def test_draw_well_properties_no_effects_are_equal():
    _, wells = place_and_draw_wells(288)
    assert (wells.nunique() == 1).all()
    assert (wells[[*GAINS, "gamma", "density"]] == 1).all(axis=None)
    assert (wells[["tilt_x", "tilt_y", "saturation"]] == 0).all(axis=None)


@pytest.mark.parametrize(("effect", "column"), [("plate_effect", "plate"), ("position_effect", "position")])
def test_draw_well_properties_plate_or_position_effect_is_shared(effect, column):
    where, wells = place_and_draw_wells(288, **{effect: 1.0})
    there = wells.groupby(where[column].to_numpy()).transform("mean")
    np.testing.assert_allclose(wells, there, rtol=1e-12)
    assert (wells[[*GAINS, "tilt_x", "blur", "background"]].nunique() > 1).all()


def test_draw_well_properties_position_effect_has_gradients_and_edges():
    where, wells = place_and_draw_wells(96, position_effect=1.0)
    inside = where["row"].between(2, 7) & where["column"].between(2, 11)
    design = np.column_stack([np.ones(96), where["row"], where["column"], inside])
    for name in GAINS:
        fit, *_ = np.linalg.lstsq(design, np.log(wells[name]), rcond=None)
        np.testing.assert_allclose(design @ fit, np.log(wells[name]), atol=1e-10)
        assert np.abs(fit[1:]).min() > 1e-3


@pytest.mark.parametrize(
    ("effect", "columns", "sd"),
    [
        ("well_effect", GAINS, 0.3),
        ("camera_effect", ["gamma"], 0.25),
        ("camera_effect", ["blur"], 0.5),
        ("density_effect", ["density"], 0.2),
    ],
)
def test_draw_well_properties_effect_size_sets_standard_deviation(effect, columns, sd):
    _, wells = place_and_draw_wells(2000, **{effect: 2.0})
    np.testing.assert_allclose(np.log(wells[columns]).std(), 2 * sd, rtol=0.1)


def test_phenotype_strengths_are_linear_in_well_properties():
    rng = np.random.default_rng(0)
    _, wells = place_and_draw_wells(288, well_effect=1.0)
    log = np.log(phenotype_strengths(rng, wells, 0.4))
    np.testing.assert_allclose(log.mean(), 0, atol=1e-12)
    np.testing.assert_allclose(log.std(ddof=0), 0.4)
    design = np.column_stack([np.ones(len(wells)), wells])
    fit, *_ = np.linalg.lstsq(design, log, rcond=None)
    np.testing.assert_allclose(design @ fit, log, atol=1e-8)
    assert (phenotype_strengths(rng, wells, 0.0) == 1).all(axis=None)
    # wells with equal properties have equal strengths
    assert (phenotype_strengths(rng, place_and_draw_wells(288)[1], 0.4) == 1).all(axis=None)
