"""What environments do to all of their cells alike is taken out of inputs and of z_c, and no more than that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import IMAGE_KEY, make_cells, make_wells
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel
from scbd.data import ArraySource
from scbd.model._decoder_objective import DecoderObjective
from scbd.model._environment_alignment import EnvironmentAlignment, LabelCodes
from scbd.model._reference_cells import (
    StandardizeBy,
    choose_reference_kind,
    frequency_distance,
    frequency_overlap,
    select_reference_cells,
)
from scbd.nn._environment_scaling import EnvironmentScaling

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
CONTROL = "gene_0"


def cells_of(n: int = 480, dtype: str = "float32", seed: int = 0):
    """Cells of wells with a gain and an offset of their own, and controls."""
    cells = make_cells(n, dtype="float32", seed=seed)
    well = cells.obs["well"].cat.codes.to_numpy()[:, None, None, None]
    cells.obsm[IMAGE_KEY] = (cells.obsm[IMAGE_KEY] * (1 + 0.4 * well) + 25 * well).astype(dtype)
    return cells


def photographed(cells, gain=1.6, offset=35.0):
    """The same cells by another camera."""
    new = cells.copy()
    new.obsm[IMAGE_KEY] = (new.obsm[IMAGE_KEY] * gain + offset).astype(np.float32)
    new.obs["well"] = pd.Categorical("new " + new.obs["well"].astype(str))
    return new


def trained(cells, kind: Any = SCBDModel, *, control=CONTROL, steps=20, e_key="well", **settings):
    kind.setup_anndata(cells, y_key="gene", e_key=e_key, control=control)
    torch.manual_seed(0)  # the same weights, whichever tests ran before
    model = kind(cells, **({} if kind is VAEModel else {"encoder": "small"}) | settings)
    how = {"accelerator": "cpu", "enable_progress_bar": False}
    model.train(max_steps=steps, batch_size=48, lr=1e-3, train_size=1.0, **how)
    return model


@pytest.fixture(scope="module")
def cells():
    return cells_of()


@pytest.fixture(scope="module")
def model(cells):
    return trained(cells)


def prepared(model, cells):
    """Inputs of z_c and of z_s as the model takes them."""
    codes = torch.from_numpy(model._label_codes(cells).e)
    return [part.numpy() for part in model.module.prepare(torch.from_numpy(cells.obsm[IMAGE_KEY]), codes)]


def moments(images, chosen):
    return images[chosen].mean((0, 2, 3)), images[chosen].std((0, 2, 3))


@pytest.mark.parametrize("by", ["controls", "cells"])
def test_prepare_standardises_inputs_of_z_c_per_environment_but_not_of_z_s(cells, by):
    model = trained(cells, standardize_by=by, steps=1)
    whole, within = prepared(model, cells)
    used = (cells.obs["gene"] == CONTROL).to_numpy() if by == "controls" else np.ones(cells.n_obs, dtype=bool)
    of_wells = [used & (cells.obs["well"] == well).to_numpy() for well in cells.obs["well"].cat.categories]
    for of_all, limit in ((within, 0.15), (whole, None)):  # what few cells tell is shrunk
        means, sds = zip(*(moments(of_all, chosen) for chosen in of_wells), strict=True)
        apart = max(np.ptp(means, axis=0).max(), np.ptp(np.log(sds), axis=0).max())
        assert apart < limit if limit else apart > 0.5
    assert f"standardised within each well by its {by}" in repr(model)


def test_description_states_that_environments_with_own_perturbations_are_not_standardised(cells):
    own = cells[(cells.obs["gene"] != CONTROL).to_numpy()].copy()
    own.obs["well"] = "well of " + own.obs["gene"].astype(str)
    with pytest.warns(UserWarning, match="confounded"):
        SCBDModel.setup_anndata(own, "gene", "well")
    model = SCBDModel(own, "small")
    assert "not standardised within each well" not in repr(model)  # this is decided when training starts
    model.train(max_steps=1, batch_size=8)
    assert "not standardised within each well" in repr(model)


def test_standardize_by_none_standardises_over_all_cells(cells):
    model = trained(cells, standardize_by=None, steps=1)
    whole, within = prepared(model, cells)
    np.testing.assert_array_equal(whole, within)
    mean, sd = moments(whole, np.arange(cells.n_obs))
    np.testing.assert_allclose(mean, 0, atol=1e-4)
    np.testing.assert_allclose(sd, 1, atol=1e-3)
    z = model.get_latent_representation()
    np.testing.assert_array_equal(z, model.get_latent_representation(center=None))
    assert "standardised" not in repr(model)


def codes(y, e):
    return np.asarray(y), np.asarray(e)


SAME = codes(np.tile(np.arange(20), 40), np.repeat(np.arange(4), 200))
ARRAYED = codes(np.repeat(np.arange(40), 20), np.repeat(np.arange(40), 20))
DOZENS = codes(np.arange(3_000) % 1_000, np.repeat(np.arange(10), 300))  # plates of 300 genes each
# a tenth are controls; each of three plate maps has its own third of ninety genes
THIRDS = codes(
    np.where(np.arange(1_800) % 10, 1 + np.arange(1_800) % 30 + 30 * (np.arange(1_800) // 600), 0),
    np.repeat(np.arange(3), 600),
)
# seven tenths are controls; each of four plates has five compounds of its own
OWN_COMPOUNDS = codes(
    np.where(np.arange(2_000) % 10 < 7, 0, 1 + np.arange(2_000) // 10 % 5 + 5 * (np.arange(2_000) // 500)),
    np.repeat(np.arange(4), 500),
)
PHENOTYPES = codes([0] * 90 + [1] * 10 + [0] * 20 + [1] * 80, [0] * 100 + [1] * 100)


@pytest.mark.parametrize(
    ("design", "controls", "wanted"),
    [
        (SAME, None, ("cells", "cells")),
        (SAME, SAME[0] == 0, ("cells", "cells")),
        (THIRDS, THIRDS[0] == 0, ("controls", "cells")),
        (THIRDS, None, ("cells", "cells")),
        (DOZENS, DOZENS[0] % 10 == 0, ("controls", "cells")),
        (OWN_COMPOUNDS, OWN_COMPOUNDS[0] == 0, ("controls", "cells")),
        (PHENOTYPES, PHENOTYPES[0] == 0, ("controls", "controls")),
        (SAME, (SAME[0] == 0) & (SAME[1] == 0), ("cells", "cells")),
        (ARRAYED, None, (None, None)),
        (ARRAYED, ARRAYED[0] == 0, (None, None)),
        (DOZENS, None, ("cells", "cells")),
        (PHENOTYPES, None, (None, None)),
    ],
)
def test_choose_reference_kind_auto_follows_design(design, controls, wanted):
    y, e = design
    assert choose_reference_kind("auto", y, e, controls) == wanted


def test_fit_images_of_one_large_environment_are_not_standardised_unless_asked_or_with_controls():
    y = np.arange(1_000) % 4
    cases: list[tuple[int, bool, StandardizeBy, np.ndarray | None, dict[str, str]]] = [
        (800, True, "auto", None, {}),
        (700, True, "auto", None, {"well": "cells"}),
        (800, False, "auto", None, {"well": "cells"}),
        (800, True, "cells", None, {"well": "cells"}),
        (800, True, "auto", y == 0, {"well": "cells"}),
    ]
    for n_large, has_images, asked, controls, wanted in cases:
        e = np.where(np.arange(1_000) < n_large, 0, 1)[:, None]
        alignment = EnvironmentAlignment(asked, ["well"])
        labels = LabelCodes(y, e, [["large", "small"]], controls)
        alignment.fit(labels, np.arange(1_000), has_images=has_images)
        assert alignment.kinds == wanted


def test_choose_reference_kind_unsuitable_choice_is_kept_and_warns():
    with pytest.warns(UserWarning, match="different perturbations"):
        assert choose_reference_kind("cells", ARRAYED[0], ARRAYED[1], None) == ("cells", "cells")
    with pytest.warns(UserWarning, match="98% of the training cells"):
        assert choose_reference_kind("controls", ARRAYED[0], ARRAYED[1], ARRAYED[0] == 0) == ("controls", "controls")


@given(seed=st.integers(0, 99), n_y=st.integers(1, 6), n_e=st.integers(1, 5))
def test_frequency_distance_equals_squared_distance_minus_sampling_error(seed, n_y, n_e):
    rng = np.random.default_rng(seed)
    y, e = rng.integers(n_y, size=60), rng.integers(n_e, size=60)
    shares = np.bincount(y, minlength=n_y) / 60
    for environment, found in enumerate(frequency_distance(y, e, shares)):
        own = y[e == environment]
        naive = sum((np.mean(own == k) - shares[k]) ** 2 for k in range(n_y)) if len(own) else 0.0
        if len(own) > 1:  # the variance of a mean, of the indicator of each label
            naive -= sum((own == k).var(ddof=1) for k in range(n_y)) / len(own)
        assert found == pytest.approx(naive)


@given(seed=st.integers(0, 99), n_y=st.integers(1, 6), n=st.integers(1, 30), n_e=st.integers(1, 3))
def test_frequency_overlap_is_relative_to_overlap_by_chance(seed, n_y, n, n_e):
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(n_y))
    y, e = rng.integers(n_y, size=n * n_e), np.repeat(np.arange(n_e), n)
    by_chance = sum(stats.binom.pmf(k, n, p) * min(p, k / n) for p in shares for k in range(n + 1))
    for environment, found in enumerate(frequency_overlap(y, e, shares)):
        naive = sum(min(p, np.mean(y[e == environment] == k)) for k, p in enumerate(shares))
        assert found == pytest.approx(min(naive / max(by_chance, 0.7), 1))


def test_frequency_distance_of_random_cells_does_not_depend_on_environment_size():
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    found = [frequency_distance(rng.choice(3, 8, p=shares), np.zeros(8, dtype=int), shares)[0] for _ in range(4_000)]
    assert abs(np.mean(found)) < 0.005


@pytest.mark.parametrize("cells_of_each", [1, 2, 20])
def test_median_overlap_of_equal_perturbations_is_high_with_few_cells(cells_of_each):
    rng = np.random.default_rng(0)
    e = np.repeat(np.arange(40), 100 * cells_of_each)
    y = rng.integers(100, size=len(e))
    assert choose_reference_kind("auto", y, e, y < 6) == ("cells", "cells")


def test_train_one_perturbation_per_well_keeps_perturbation_effects():
    """Arrayed wells: what a perturbation does stands out as much as without wells."""
    cells = make_cells(320)
    cells.obs["well"] = pd.Categorical([f"well of {gene} {i % 2}" for i, gene in enumerate(cells.obs["gene"])])
    with pytest.warns(UserWarning, match="confounded"):
        model = trained(cells, control=None, alpha=0.0)
    assert not model.alignment_.kinds
    z, gene = model.get_latent_representation(), cells.obs["gene"].to_numpy()
    means = np.stack([z[gene == name].mean(0) for name in np.unique(gene)])
    assert means.var(0).sum() > 0.5 * z.var(0).sum()


def test_embed_center_auto_gives_environments_equal_means(cells, model):
    well, apart = cells.obs["well"].to_numpy(), {}
    for center in ("auto", None):
        z = model.get_latent_representation(center=center)
        means = np.stack([z[well == name].mean(0) for name in np.unique(well)])
        apart[center] = np.linalg.norm(means - means.mean(0))
    assert apart["auto"] < 0.2 * apart[None]
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", [SCBDModel, ERMModel, VAEModel])
@pytest.mark.parametrize("by", ["controls", "cells"])
def test_embed_brighter_cells_in_new_wells_gives_similar_embeddings(cells, kind, by):
    """The same cells, brighter and in wells of other names: known by the controls among them, or by all."""
    model, new = trained(cells, kind, standardize_by=by), photographed(cells)
    z, found = model.get_latent_representation(), model.get_latent_representation(new)
    blind = new.copy()
    del blind.obs["well"]
    size = np.linalg.norm(z - z.mean(0), axis=1).mean()
    assert np.linalg.norm(found - z, axis=1).mean() < 0.1 * size
    assert np.linalg.norm(model.get_latent_representation(blind) - z, axis=1).mean() > 0.5 * size


GENES = np.tile(np.arange(40), 5)  # of which 0 is the control
OTHERS = np.arange(200) + 40


@pytest.mark.parametrize(
    ("y", "wanted"),
    [
        ([*GENES, *OTHERS], "those trained on"),
        ([*GENES, *[-1] * 50], "those trained on"),
        ([0] * 10 + [3] * 90, "none"),
        ([0] * 4 + [-1] * 96, "none"),
        ([0] * 10 + [*OTHERS], "none"),
        ([3] * 50 + [4] * 50, "none"),
        ([-1] * 100, "all"),
        ([1, 2, 3, 4, 5, *[-1] * 200], "all"),
        ([1, 2, 3, 4, 5, *OTHERS], "all"),
        (OTHERS, "all"),
    ],
    ids=[
        *["and others", "and unlabelled", "one", "controls alone", "other", "two", "unlabelled"],
        *["few labels", "few of many", "dozens, no controls"],
    ],
)
def test_select_reference_cells_new_well_follows_rules(y, wanted):
    """Beside a well that holds the same."""
    y, e = codes([*y, *GENES], [0] * len(y) + [1] * len(GENES))
    of_new_well = e == 0
    found = select_reference_cells(y, e, y == 0, np.full(40, 1 / 40), 0.95)
    assert found[e == 1].all()
    expected = {"all": of_new_well, "none": np.zeros(len(y), dtype=bool), "those trained on": (y >= 0) & (y < 40)}[
        wanted
    ]
    np.testing.assert_array_equal(found[of_new_well], expected[of_new_well])


@pytest.mark.parametrize(
    ("n_controls", "n_held_out", "enough"), [(4, 1, True), (3, 0, False), (8, 4, True), (4, 3, False)]
)
def test_fit_counts_held_out_controls(n_controls, n_held_out, enough, caplog):
    """Each plate has three compounds of its own, or next to plates of the same genes, other genes."""
    within = np.arange(60 + n_controls)
    y, e = np.tile(np.where(within < 60, within % 3, 9), 6), np.repeat(np.arange(6), len(within))
    y = np.where(y < 9, 3 * e + y, 18)
    labels = LabelCodes(y, e[:, None], [[f"P{code}" for code in range(6)]], y == 18)
    rows = np.flatnonzero(np.tile(within < len(within) - n_held_out, 6))
    alignment = EnvironmentAlignment("auto", ["plate"])
    alignment.fit(labels, rows, has_images=False)
    assert alignment.kinds == ({"plate": "controls"} if enough else {})
    assert ("not standardised per plate" in caplog.text and "P0, P1" in caplog.text) != enough
    # a single plate with genes of its own, next to plates of the same genes
    y = np.where(within < 60, within % 20, 99)
    y = np.where((e == 0) & (np.tile(y, 6) < 99), 50 + np.tile(y, 6) % 3, np.tile(y, 6))
    labels = labels._replace(y=y, controls=y == 99)
    alignment = EnvironmentAlignment("auto", ["plate"])
    alignment.fit(labels, rows, has_images=False)
    assert alignment.kinds == {"plate": "cells"}
    reference = alignment.draw_reference(labels, ArraySource(np.zeros((len(y), 1, 4, 4), np.float32)), rows)
    assert (reference.controls is not None and reference.controls[reference.codes[:, 0] == 0].any()) == enough


@pytest.mark.parametrize("by", ["controls", "cells"])
def test_embed_new_wells_with_other_perturbations_are_standardised_with_controls(by, tmp_path):
    """Those of the training are known by controls, or by all of their cells, which are the same in each."""
    cells = make_cells(480, dtype="float32")
    images, well = cells.obsm[IMAGE_KEY], cells.obs["well"].cat.codes.to_numpy()[:, None, None, None]
    images[..., :4] = images[..., 4:8]  # wells differ by brightness and contrast alone
    cells.obsm[IMAGE_KEY] = (images * (1 + 0.4 * well) + 25 * well).astype(np.float32)
    model = trained(cells, standardize_by="controls" if by == "controls" else "auto")
    assert model.alignment_.kinds == {"well": by}
    chosen = np.flatnonzero(cells.obs["gene"].isin([CONTROL, "gene_3"]))
    z = model.get_latent_representation(indices=chosen)
    new = photographed(cells[chosen].copy())
    found = model.get_latent_representation(new)
    size = np.linalg.norm(z - z.mean(0), axis=1).mean()
    assert np.linalg.norm(found - z, axis=1).mean() < 0.1 * size
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), cells)
    np.testing.assert_array_equal(loaded.get_latent_representation(new), found)
    # without controls there is no telling what is the camera and what the gene
    alone = model.get_latent_representation(new[(new.obs["gene"] != CONTROL).to_numpy()].copy())
    of_gene = (cells.obs["gene"].iloc[chosen] != CONTROL).to_numpy()
    assert np.linalg.norm(alone - z[of_gene], axis=1).mean() > 0.5 * size


def in_wells(n_wells: int, n: int):
    """Cells in wells that differ in nothing."""
    cells = make_cells(n, dtype="float32")
    cells.obsm[IMAGE_KEY][..., :4] = cells.obsm[IMAGE_KEY][..., 4:8]
    cells.obs["well"] = pd.Categorical([f"well_{i % n_wells}" for i in range(n)])
    return cells


def dim(cells, well: str):
    """Another camera for one well."""
    new = cells.copy()
    new.obsm[IMAGE_KEY][(new.obs["well"] == well).to_numpy()] *= 0.4
    return new


def others_alone(cells, well: str):
    """Controls and one perturbation in a well."""
    other = (cells.obs["well"] == well) & ~cells.obs["gene"].isin([CONTROL, "gene_3"])
    return cells[~other.to_numpy()].copy()


def test_train_well_with_other_perturbations_is_standardised_with_controls():
    """And the wells that hold the same by all of their cells, whatever stands in that one."""
    cells = in_wells(6, 960)
    odd = dim(others_alone(cells, "well_5"), "well_5")
    model = trained(odd, steps=1)
    assert model.alignment_.kinds == {"well": "cells"}
    _, within = prepared(model, odd)
    well, gene = odd.obs["well"].to_numpy(), odd.obs["gene"].to_numpy()
    of_controls = [moments(within, (well == name) & (gene == CONTROL)) for name in ("well_0", "well_5")]
    np.testing.assert_allclose(of_controls[1], of_controls[0], atol=0.15)
    # what the perturbation does stays
    done = [
        (moments(within, (well == name) & (gene == "gene_3"))[0] - mean)
        for name, (mean, _) in zip(("well_0", "well_5"), of_controls, strict=True)
    ]
    np.testing.assert_allclose(done[1], done[0], atol=0.15)
    assert np.abs(done[0]).max() > 0.3


def test_train_again_wells_with_other_perturbations_are_standardised_with_controls():
    cells = in_wells(4, 640)
    first = cells[(cells.obs["well"] != "well_3").to_numpy()].copy()
    first.obs["well"] = first.obs["well"].cat.remove_unused_categories()
    model = trained(first, steps=1)
    second = dim(others_alone(cells, "well_3"), "well_3")
    model.adata = second
    model.train(max_steps=1, batch_size=48, accelerator="cpu", enable_progress_bar=False)
    _, within = prepared(model, second)
    well, control = second.obs["well"].to_numpy(), (second.obs["gene"] == CONTROL).to_numpy()
    of_controls = [moments(within, (well == name) & control) for name in ("well_0", "well_3")]
    np.testing.assert_allclose(of_controls[1], of_controls[0], atol=0.15)


def test_embed_new_environments_of_one_separate_column_use_controls():
    """The first column is known by all cells, the second by controls; both shift."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(6_000, 3)))
    control = torch.arange(6_000) % 4 == 0
    values[~control] += 2.0
    codes_of = torch.stack([torch.arange(6_000) // 4 % 3, torch.arange(6_000) // 12 % 2], 1)
    shifts = torch.tensor([0.0, 1.0, -2.0, 5.0]), torch.tensor([0.0, 3.0])

    def seen(codes_of: torch.Tensor) -> torch.Tensor:
        return values + shifts[0][codes_of[:, :1]] + shifts[1][codes_of[:, 1:]]

    used = torch.stack([torch.ones(6_000, dtype=torch.bool), control], 1)
    beside = torch.stack([control, torch.zeros(6_000, dtype=torch.bool)], 1)
    scaling = EnvironmentScaling(3, 2)
    scaling.learn(lambda: [seen(codes_of)], codes_of, used, beside)
    new = codes_of.clone()
    new[:, 0] = 3
    scaling.learn(lambda: [seen(new)], new, torch.zeros_like(used), beside)
    assert scaling.known(new).all()
    torch.testing.assert_close(scaling(seen(new), new), scaling(seen(codes_of), codes_of), atol=0.1, rtol=0.0)


def test_environment_scaling_new_well_without_trained_controls_is_unknown():
    """There is nothing that they could be brought to."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(60, 3)).astype(np.float32))
    codes_of, all_cells = torch.arange(60)[:, None] % 3, torch.ones(60, 1, dtype=torch.bool)
    scaling = EnvironmentScaling(3)
    scaling.learn(lambda: [values], codes_of, all_cells, ~all_cells)
    scaling.learn(lambda: [values + 100], torch.full((60, 1), 3), ~all_cells, all_cells)
    assert scaling.known(torch.tensor([[0], [1], [2], [3]]))[:, 0].tolist() == [True] * 3 + [False]


def test_embed_new_wells_without_reference_cells_logs_their_names(cells, model, caplog):
    new = photographed(cells)
    new = new[new.obs["gene"] != CONTROL].copy()
    found = model.get_latent_representation(new, center=None)
    assert "3 environments (new well_0, new well_1, new well_2) are standardised with" in caplog.text
    assert "no value in" not in caplog.text
    caplog.clear()
    model.get_latent_representation(new[new.obs["well"] == "new well_1"].copy(), center=None)
    assert "1 environment (new well_1) is standardised with" in caplog.text and "since it holds" in caplog.text
    caplog.clear()
    blind = new.copy()
    blind.obs = blind.obs.rename(columns={"well": "Well"})
    np.testing.assert_array_equal(found, model.get_latent_representation(blind, center=None))
    assert "no value in 'well'" in caplog.text
    caplog.clear()
    new.obs.loc[new.obs_names[:7], "well"] = np.nan
    model.get_latent_representation(new, center=None)
    assert f"7 of {new.n_obs} cells have no value in 'well'" in caplog.text


def test_embed_new_well_of_one_perturbation_is_not_standardised_with_all_cells(caplog):
    """Where training wells were: what it would lose is its perturbation."""
    cells = cells_of()
    model, new = trained(cells, control=None), photographed(cells)
    assert model.alignment_.kinds == {"well": "cells"}
    alone = new[new.obs["gene"] == "gene_3"].copy()
    found = model.get_latent_representation(alone)
    assert "3 environments (new well_0, new well_1, new well_2) are standardised with" in caplog.text
    blind = alone.copy()
    del blind.obs["well"]
    np.testing.assert_array_equal(found, model.get_latent_representation(blind))


def test_embed_table_in_parts_equals_whole_table(cells, model):
    """Known wells, new ones, and cells of which no well is known."""
    new = photographed(cells)
    names = new.obs["well"].astype(object)
    names[::3], names[1::3] = cells.obs["well"].astype(str)[::3], None
    new.obs["well"] = pd.Categorical(names)
    whole, order = model.get_latent_representation(new), np.random.default_rng(0).permutation(new.n_obs)
    np.testing.assert_allclose(model.get_latent_representation(new, order, batch_size=7), whole[order], atol=1e-5)
    before = model.get_latent_representation()
    np.testing.assert_array_equal(model.get_latent_representation(), before)


def test_load_restores_alignment_and_training_continues(cells, model, tmp_path):
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), cells)
    np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())
    both = photographed(cells)
    loaded.adata = both
    loaded.train(max_steps=2, batch_size=48, accelerator="cpu", enable_progress_bar=False)
    rows = loaded._label_codes(both).e
    environments: Any = loaded.module.preprocess.environments
    assert environments.known(torch.from_numpy(rows)).all()
    assert environments.known(torch.tensor([[0], [1], [2]])).all()


def test_train_separate_columns_aligns_each_suitable_column(cells):
    """Plates and positions side by side: plates hold the same compounds, a position a single one."""
    wells = make_wells(n_compounds=20, n_plates=6)
    with pytest.warns(UserWarning, match="confounded"):
        SCBDModel.setup_anndata(wells, "compound", ["plate", "well"], layer="X", control="DMSO")
    model = SCBDModel(wells, encoder="linear", whitening=None)
    model.train(max_steps=1, accelerator="cpu", enable_progress_bar=False)
    assert model.alignment_.kinds == {"plate": "cells"}
    plate = wells.obs["plate"].to_numpy()
    values = torch.from_numpy(np.asarray(wells.X, dtype=np.float32))
    whole, within = model.module.prepare(values, torch.from_numpy(model._label_codes(wells).e))
    spread = [
        np.ptp([part.numpy()[plate == name].mean(0) for name in np.unique(plate)], axis=0).mean()
        for part in (whole, within)
    ]
    assert spread[1] < 0.5 * spread[0]
    new = wells.copy()
    new.obs["plate"] = pd.Categorical("new " + new.obs["plate"].astype(str))
    np.testing.assert_allclose(model.get_latent_representation(new), model.get_latent_representation(), atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "message"), [("plates", "is not known: use 'auto'"), ("controls", "name controls with control=")]
)
def test_standardize_by_invalid_choice_raises_before_training(cells, asked, message):
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    with pytest.raises(ValueError, match=message):
        SCBDModel(cells, encoder="small", standardize_by=asked)


def test_decoder_target_is_standardised_over_all_cells(cells, model, monkeypatch):
    """z_s is to say it: the target is the image as it was, standardised over all cells."""
    decoder = model.module.make_decoder("gaussian", 4)
    drawn: list[torch.Tensor] = []

    def look(target: torch.Tensor, z_c: torch.Tensor, z_s: torch.Tensor) -> torch.Tensor:
        drawn.append(target)
        return z_c.sum()

    monkeypatch.setattr(decoder, "negative_log_likelihood", look)
    codes = torch.from_numpy(model._label_codes(cells).e[:8, 0])
    y = torch.from_numpy(cells.obs["gene"].cat.codes.to_numpy(dtype=np.int64)[:8])
    DecoderObjective(model.module, decoder, None)(torch.from_numpy(cells.obsm[IMAGE_KEY][:8]), y, codes)
    whole, within = prepared(model, cells)
    np.testing.assert_allclose(drawn[0].numpy(), whole[:8], atol=1e-6)
    assert np.abs(whole[:8] - within[:8]).mean() > 0.1


def test_embed_z_s_does_not_use_environments(cells, model, caplog):
    new = photographed(cells)
    new = new[new.obs["gene"] != CONTROL].copy()
    model.get_latent_representation(new, block="s")
    assert not caplog.text
