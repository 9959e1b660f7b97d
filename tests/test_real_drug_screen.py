"""Test statements of the notebook on a real drug screen, with its first cells."""

from __future__ import annotations

import os
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import run_cells


@pytest.fixture(scope="module")
def page(shared) -> Any:
    """Names that the cells before the training define."""
    if not (shared / "real").is_dir():
        pytest.skip("the crops of BBBC021 are not here: no folder real in the folder of real data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SCBD_DATA", str(shared))
        yield run_cells("real_drug_screen", lambda _, source: source.startswith("how = "))
    plt.close("all")


def test_real_drug_screen_notebook_states_confounding_of_compounds_and_weeks(page):
    assert page.adata.shape == (1_996, 3) and page.obs["plate"].nunique() == 55
    assert (page.weeks == 1).sum() == 37 and set(page.weeks.index[page.weeks == 10]) == {"DMSO", "taxol"}
    assert "37 of 39 values of compound occur in only one" in page.done.stdout
    assert any("Only controls and taxol link the environments" in str(one.message) for one in page.caught)


def test_real_drug_screen_notebook_each_week_has_controls_and_new_plates(page):
    of_week = page.cells_per("week")
    assert of_week["number"] == 10 and of_week["DMSO cells, lowest"] >= 4 > page.cells_per("plate")["DMSO cells, mean"]
    plates, weeks, mechanisms = (page.obs[key].to_numpy() for key in ("plate", "week", "moa"))
    used = page.train | np.isin(np.arange(page.adata.n_obs), page.split.validation)
    assert not set(plates[page.test]) & set(plates[used])
    for values in (weeks, mechanisms):
        assert set(values[page.test]) == set(values[page.train]) == set(values)
