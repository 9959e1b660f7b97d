from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

from scbd.metrics import benchmark
from scbd.metrics._design import groups_of_design, split_groups


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=2, max_size=60),
    st.floats(0.05, 0.95),
    st.integers(0, 9),
)
def test_every_label_that_is_scored_is_learned_from_other_groups(cells, fraction, seed):
    codes, groups = np.array(cells).T
    learned, test = split_groups(codes, groups, fraction, np.random.default_rng(seed))
    assert not set(groups[learned]) & set(groups[test])
    assert set(codes[learned]) == set(codes[test])
    in_one_group = {code for code in codes if len(set(groups[codes == code])) == 1}
    assert not in_one_group & set(codes[learned])


@given(st.integers(2, 9), st.floats(0.05, 0.95), st.integers(0, 9))
def test_groups_of_one_label_are_split_within_it(n_groups, fraction, seed):
    codes = np.repeat(np.arange(4), 3 * n_groups)
    groups = np.repeat(np.arange(4 * n_groups), 3)
    learned, test = split_groups(codes, groups, fraction, np.random.default_rng(seed))
    assert (learned ^ test).all()
    wanted = np.clip(round(fraction * n_groups), 1, n_groups - 1)
    assert [len(set(groups[learned & (codes == code)])) for code in range(4)] == [wanted] * 4


def test_all_groups_are_drawn_alike():
    codes, groups = np.repeat([0, 1], 8), np.arange(16) // 2
    rng = np.random.default_rng(0)
    learned = np.mean([split_groups(codes, groups, 0.5, rng)[0] for _ in range(400)], axis=0)
    np.testing.assert_allclose(learned, 0.5, atol=0.1)


def arrayed(n_wells: int = 60, n_genes: int = 20, n_cells: int = 40, seed: int = 0) -> AnnData:
    """Each well holds one gene; one embedding holds the well alone, the other the gene alone."""
    rng = np.random.default_rng(seed)
    well = np.repeat(np.arange(n_wells), n_cells)
    gene = well % n_genes
    obs = pd.DataFrame({"well": well, "gene": gene}).astype(str)
    obs.index = obs.index.astype(str)
    noise = rng.normal(size=(2, len(well), 20))
    wells = 3 * rng.normal(size=(n_wells, 20))[well]
    genes = 3 * rng.normal(size=(n_genes, 20))[gene]
    return AnnData(obs=obs, obsm={"well": wells + noise[0], "gene": genes + noise[1]})


def scores(adata: AnnData, key: str, **settings: object) -> pd.Series:
    frame = benchmark(adata, [key], y_key="gene", e_key="well", n_neighbors=10, **settings)  # type: ignore[arg-type]
    return frame.set_index("metric")["value"]


def test_the_probe_of_the_perturbation_does_not_read_the_well():
    adata = arrayed()
    well, gene = scores(adata, "well"), scores(adata, "gene")
    assert well["y_probe_f1"] < 0.1 and gene["y_probe_f1"] > 0.95
    assert scores(adata, "well", group_key=None)["y_probe_f1"] > 0.9  # as it was
    assert scores(adata, "well", group_key="well")["y_probe_f1"] == well["y_probe_f1"]
    assert well["e_probe_f1"] > 0.9


def test_where_nothing_can_be_held_out_it_is_said():
    adata = arrayed(12, 12, 20)
    said = "most environments hold one perturbation, and fewer than two perturbations have two environments"
    with pytest.warns(UserWarning, match=f"Between y_key='gene' and e_key='well', {said}"):
        scores(adata, "well")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores(adata, "well", group_key=None)


def test_perturbations_of_one_environment_each_are_said():
    adata = arrayed(24, 24, 20)
    adata.obs["well"] = (adata.obs["gene"].astype(int) // 6).astype(str)
    with pytest.warns(UserWarning, match="most perturbations lie in one environment only"):
        scores(adata, "gene")


def pooled(n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gene, e = rng.integers(5, size=n), rng.integers(6, size=n)
    return gene, e, 4 * gene + rng.integers(4, size=n)


def test_guides_are_held_out_in_a_pooled_screen():
    gene, e, guide = pooled()
    groups, wrong = groups_of_design(gene, e, guide)
    assert wrong is None
    np.testing.assert_array_equal(groups, guide)
    assert groups_of_design(gene, e, None) == (None, None)
    assert groups_of_design(gene, e, gene) == (None, None)  # one guide a gene
    assert groups_of_design(gene, None, None) == (None, None)
    assert groups_of_design(gene, e, guide % 4) == (None, None)  # guides that are named alike for all genes


def test_wells_and_their_guides_are_held_out_together():
    """Two guides a gene, each in two wells of its own."""
    well = np.repeat(np.arange(16), 5)
    guide, gene = well // 2, well // 4
    groups, wrong = groups_of_design(gene, well, guide)
    assert groups is not None and wrong is None
    assert len(np.unique(groups)) == 8 and len(set(zip(groups, guide, strict=True))) == 8
    # guides that share all wells of their gene cannot be held out: wells are
    mixed = np.tile(np.arange(5) % 2, 16) + 2 * gene
    np.testing.assert_array_equal(groups_of_design(gene, well, mixed)[0], well)
