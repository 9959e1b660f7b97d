from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd.data import ArraySource
from scbd.data._digests import digest_cells


def digest(cells, columns=("gene", "well")):
    return digest_cells(ArraySource(cells.obsm["single_cell_images"]), cells.obs[list(columns)])


def test_the_same_cells_have_the_same_digest(cells):
    again = cells.copy()
    again.obs["gene"] = again.obs["gene"].cat.reorder_categories(again.obs["gene"].cat.categories[::-1])
    assert digest(again) == digest(cells)


def corrected(cells):
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"] + 1


def relabelled(cells):
    cells.obs["gene"] = np.where(np.arange(cells.n_obs) == 7, "gene_1", cells.obs["gene"].astype(str))


def wider(cells):
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"].astype("uint16")


def corrected_at_the_end(cells):
    """Beyond the first sixty-four: what is looked at is drawn from all."""
    cells.obsm["single_cell_images"][70:] += 1


def reshaped(cells):
    """The same bytes."""
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"].reshape(-1, 1, 32, 16)


@pytest.mark.parametrize("change", [corrected, corrected_at_the_end, relabelled, reshaped, wider])
def test_other_cells_have_another(cells, change):
    before = digest(cells)
    change(cells)
    assert digest(cells) != before


def test_names_of_columns_count(cells):
    source = ArraySource(cells.obsm["single_cell_images"])
    table = cells.obs[["gene", "well"]]
    assert digest_cells(source, table) != digest_cells(source, table.set_axis(["well", "gene"], axis=1))


def test_order_counts_for_tables_of_several_blocks(cells, monkeypatch):
    monkeypatch.setattr("scbd.data._digests._HASHED", 10)
    assert digest_cells(None, cells.obs) != digest_cells(None, cells.obs.iloc[::-1])
    assert digest_cells(None, cells.obs) == digest_cells(None, cells.obs.copy())


def test_a_part_costs_what_it_holds_whatever_categories_there_are(cells, monkeypatch):
    """Names of all cells in a categorical: they were hashed again with every part."""
    hashed = []
    original = pd.Categorical._hash_pandas_object

    def counted(values, **how):
        hashed.append(len(values.categories))
        return original(values, **how)

    monkeypatch.setattr(pd.Categorical, "_hash_pandas_object", counted)
    monkeypatch.setattr("scbd.data._digests._HASHED", 10)
    cells.obs["name"] = pd.Categorical(cells.obs_names)
    digest_cells(None, cells.obs[["name"]])
    assert max(hashed) == 10
