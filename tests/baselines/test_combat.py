from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scanpy
from anndata import AnnData
from small_tables import wells

from scbd.baselines import combat


def test_it_is_scanpys():
    cells, well, _ = wells(d=6)
    table = AnnData(cells, obs=pd.DataFrame({"well": pd.Categorical(well)}, index=np.arange(900).astype(str)))
    np.testing.assert_allclose(combat(cells, well), scanpy.pp.combat(table, "well", inplace=False), rtol=1e-5)
    means = np.stack([combat(cells, well)[well == w].mean(0) for w in "012"])
    assert np.ptp(means, axis=0).max() < 0.02 * np.ptp([cells[well == w].mean(0) for w in "012"], axis=0).max()


def test_features_that_do_not_vary_within_wells_say_nothing_of_others():
    cells, well, _ = wells(d=6)
    flat = np.concatenate([cells, np.ones((900, 1)), (well == "1")[:, None]], axis=1)
    found = combat(flat, well)
    np.testing.assert_array_equal(found[:, :6], combat(cells, well))
    np.testing.assert_allclose(found[:, 6:], [[1, 1 / 3]] * 900, rtol=1e-6)
    partly = np.concatenate([cells, np.where(well == "1", 0.0, cells[:, 0])[:, None]], axis=1)
    assert np.isfinite(combat(partly, well)).all()


def test_what_cannot_be_corrected_is_said():
    cells, well, _ = wells(30)
    with pytest.raises(ValueError, match="There is one environment \\(plate 1\\): nothing can be corrected"):
        combat(cells, ["plate 1"] * 30)
    with pytest.raises(ValueError, match="1 environments have fewer than two rows \\(such as 'alone'\\)"):
        combat(cells, np.where(np.arange(30) == 3, "alone", well.astype(object)))
    with pytest.raises(ValueError, match="1 features vary within environments: ComBat learns from one feature about"):
        combat(cells[:, :1], well)
