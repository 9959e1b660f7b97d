from __future__ import annotations

import warnings

import numpy as np
import pytest
from conftest import make_cells

from scbd import SCBDModel


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
