from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st

from scbd import SCBDModel
from scbd.datasets import simulated_profiles
from scbd.model._confounding import contrasts_told, order_told, warn_if_confounded
from scbd.nn import Numbers


def test_confounded_labels_warn_with_the_table(cells):
    cells.obs["site"] = np.where(cells.obs["gene"] == "gene_0", "alone", "together")
    with pytest.warns(UserWarning, match="confounded") as caught:
        SCBDModel.setup_anndata(cells, "gene", "site")
    said = str(caught[0].message)
    assert "1 of 2 environments were seen with one perturbation only" in said
    assert "4 of 4 perturbations were seen in one environment only" in said
    assert "alone" in said and "gene_0" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCBDModel.setup_anndata(make_cells(), "gene", "well")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("design", ["one plate a gene", "one gene a well", "both", "nearly"])
def test_what_is_shown_of_a_large_table_holds_cells(design, turned):
    genes, rng = np.arange(60).repeat(10), np.random.default_rng(0)
    y, e = {
        "one plate a gene": (genes, (59 - genes) // 3),
        "one gene a well": (genes[::-1] // 3, np.arange(600)),
        "both": (np.r_[genes, genes % 40, np.zeros(600, int)], np.r_[genes * 0, np.arange(600) % 7, 10 + genes]),
        "nearly": (genes, np.where(rng.random(600) < 0.95, genes * 7 % 20, rng.integers(20, size=600))),
    }[design]
    y, e = (e, y) if turned else (y, e)
    obs = pd.DataFrame({"gene": [f"g{i:03}" for i in y], "plate": [f"p{i:03}" for i in e]})
    with pytest.warns(UserWarning, match="y and e are confounded") as caught:
        warn_if_confounded(obs, ["gene"], ["plate"])
    lines = str(caught[0].message).splitlines()
    counts = np.array([line.split()[1:] for line in lines[3:]], dtype=int)
    assert max(counts.shape) <= 12 and counts.any(0).all() and counts.any(1).all()
    assert f", {counts.shape[0]} × {counts.shape[1]} of " in lines[0]


def codes(followed: float, n_y: int, n_e: int) -> tuple[np.ndarray, np.ndarray]:
    """So many of the cells are where a rule puts them, the finer label in one of the coarser; others anywhere."""
    rng = np.random.default_rng(0)
    fine, rule = rng.integers(max(n_y, n_e), size=20_000), rng.random(20_000) < followed
    coarse = np.where(rule, fine % min(n_y, n_e), rng.integers(min(n_y, n_e), size=20_000))
    return (fine, coarse) if n_y >= n_e else (coarse, fine)


def test_rounding_leaves_no_less_than_nothing():
    """A warning said that -0% can be told."""
    assert contrasts_told(np.arange(72), np.repeat(np.arange(4), 18)) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=40))
def test_the_contrasts_that_can_be_told_are_a_trace(cells):
    y, e = (np.unique(column, return_inverse=True)[1] for column in np.array(cells).T)
    if max(y) < max(e):
        y, e = e, y
    of_y, of_e = np.eye(max(y) + 1)[y], np.eye(max(e) + 1)[e]
    apart = np.eye(len(y)) - of_y @ np.linalg.pinv(of_y)
    seen = np.trace(apart @ of_e @ np.linalg.pinv(of_e) @ apart)
    expected = seen / max(e) if max(e) else 0
    assert contrasts_told(y, e) == pytest.approx(expected, abs=1e-9)
    assert contrasts_told(e, y) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=2, max_size=40))
def test_what_can_be_told_of_an_order_is_a_trace_too(cells):
    codes, numbers = np.array(cells).T
    y = np.unique(codes, return_inverse=True)[1]
    of_y, terms = np.eye(max(y) + 1)[y], Numbers(torch.from_numpy(numbers)).terms.numpy()
    in_common = np.trace(terms.T @ of_y @ np.linalg.pinv(of_y) @ terms)
    fewer = min(len(set(numbers)) - 1, 4, max(y))
    expected = 1 - in_common / fewer if fewer else 0
    assert order_told(y, numbers.astype(float)) == pytest.approx(expected, abs=1e-9)
    assert order_told(2 * y, np.exp(numbers)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n_y", "n_e"), [(40, 4), (10, 10), (2, 76)])
def test_how_much_a_design_can_tell(n_y, n_e):
    for followed in (0, 0.5, 0.9, 0.95):
        assert contrasts_told(*codes(followed, n_y, n_e)) == pytest.approx(1 - followed**2, abs=0.04)
    assert contrasts_told(*codes(1, n_y, n_e)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("n_y", "n_e", "one"), [(40, 4, "environments"), (2, 76, "perturbations")])
def test_what_is_nearly_confounded_is_warned_of(n_y, n_e, one):
    """Nobody is in one environment only, so that none is named."""
    for followed, warned in ((0.95, True), (0.92, True), (0.8, False), (0.0, False)):
        y, e = codes(followed, n_y, n_e)
        seen = pd.crosstab(y, e) > 0
        assert seen.sum(0).min() > 1 and seen.sum(1).min() > 1
        obs = pd.DataFrame({"gene": [f"g{i}" for i in y], "plate": [f"p{i}" for i in e]})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_if_confounded(obs, ["gene"], ["plate"])
        assert len(caught) == warned
        if warned:
            assert f"y and e are confounded (plate): {contrasts_told(y, e):.0%} of what {one} can differ in" in str(
                caught[0].message
            )
            assert "only" not in str(caught[0].message)


def test_columns_side_by_side_are_judged_one_by_one():
    """Each position has another compound on each plate, and each plate all compounds; their cross has one each."""
    wells = simulated_profiles(64, 12, n_features=4, one_layout=False, plate_effect=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCBDModel.setup_anndata(wells, "perturbation", ["plate", "well"], layer="X")
    with pytest.warns(UserWarning, match="1152 of 1152 environments.*or columns side by side"):
        SCBDModel.setup_anndata(wells, "perturbation", ["plate", "well"], e_columns="crossed", layer="X")
    same = simulated_profiles(64, 12, n_features=4, plate_effect=0.1)  # a compound has one position
    with pytest.warns(UserWarning, match=r"y and e are confounded \(well\)") as caught:
        SCBDModel.setup_anndata(same, "perturbation", ["plate", "well"], layer="X")
    assert len(caught) == 1


def test_a_few_that_are_confounded_among_many_are_no_matter():
    obs = pd.DataFrame({"gene": np.arange(600) % 30, "plate": np.arange(600) // 30 % 4}).astype(str)
    obs.loc[obs["gene"] == "0", "plate"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_confounded(obs, ["gene"], ["plate"])
