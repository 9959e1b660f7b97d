"""Known answers on real wells."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from reference.rivals import retrieval, same

from scbd.baselines import plda, sphering, standardize_by_environment, wccn
from scbd.datasets import cpjump1


class Wells(NamedTuple):
    features: np.ndarray
    compounds: np.ndarray
    plates: np.ndarray
    positions: np.ndarray


@pytest.fixture
def wells(shared: Path) -> Wells:
    pytest.importorskip("pyarrow", reason="reading the real profiles needs pyarrow")
    table = cpjump1(shared / "profiles" / "cpjump1_cellprofiler_wells.parquet")
    columns = ("Metadata_broad_sample", "Metadata_Plate", "Metadata_Well")
    return Wells(table.X.clip(-20, 20), *(table.obs[column].astype(str).to_numpy() for column in columns))


def test_replicates_among_controls_of_other_plates(wells):
    """The numbers that came with the data."""
    controls, other = wells.compounds == "DMSO", ~same(wells.plates)
    positive, negative = same(wells.compounds) & other & ~controls, other & ~controls[:, None] & controls
    corrected = {
        0.5579: wells.features,
        0.5509: standardize_by_environment(wells.features, wells.plates, controls=controls),
        0.5213: standardize_by_environment(wells.features, wells.plates),
        0.6151: sphering(wells.features, controls=controls, regularization=1),
    }
    scores = [retrieval(z, positive, negative, wells.compounds) for z in corrected.values()]
    np.testing.assert_allclose(scores[:3], list(corrected)[:3], atol=5e-5)
    np.testing.assert_allclose(scores[3], 0.6151, atol=1e-3)  # how it was scaled is not said


def test_compounds_that_were_not_learned_are_found_at_other_positions(wells):
    """In the order of a pilot: linear rivals find compounds, and positions with them unless controls tell these."""
    controls, other = wells.compounds == "DMSO", ~same(wells.plates)
    places = {compound: set(wells.positions[wells.compounds == compound]) for compound in set(wells.compounds)}
    twice = np.array([len(places[compound]) == 2 for compound in wells.compounds])
    held_out = np.isin(wells.positions, sorted(places["DMSO"])[::2]) & controls
    fit = ~twice & ~held_out & (wells.plates != min(wells.plates))
    how = {"fit": fit, "controls": controls}
    tables = {
        "raw": wells.features,
        "wccn": wccn(wells.features, wells.compounds, **how),
        "plda": plda(wells.features, wells.compounds, **how),
        "plda, positions": plda(wells.features, wells.compounds, positions=wells.positions, **how),
    }
    elsewhere = same(wells.compounds) & other & ~same(wells.positions) & twice
    others = ~same(wells.compounds) & other & ~controls
    found = {name: retrieval(z, elsewhere, others, wells.compounds) for name, z in tables.items()}
    assert (
        found["raw"] + 0.02 < found["wccn"] < found["plda"] - 0.02 and found["plda, positions"] > found["wccn"] + 0.02
    )
    both = held_out & held_out[:, None] & other
    floor = {
        name: retrieval(z, both & same(wells.positions), both & ~same(wells.positions), wells.positions)
        for name, z in tables.items()
    }
    assert floor["raw"] < floor["wccn"] and floor["plda, positions"] < min(floor["wccn"], floor["plda"]) - 0.05
