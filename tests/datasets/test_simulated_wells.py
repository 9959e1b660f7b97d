from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scbd.datasets._simulated_images import CHANNELS
from scbd.datasets._simulated_wells import looks, places, strengths

NOTHING: dict[str, float] = dict.fromkeys(
    ["well_effect", "plate_effect", "position_effect", "camera_effect", "density_effect"], 0.0
)
GAINS = [f"gain_{channel}" for channel in CHANNELS]


def looks_of(n_wells: int, **effects: float) -> Any:
    rng = np.random.default_rng(0)
    where = places(n_wells, 96)
    return where, looks(rng, rng.spawn(1)[0], where, 96, NOTHING | effects)


def test_wells_without_a_layout_are_as_they_were():
    assert list(places(8, None).index) == [f"P1_W{i}" for i in range(1, 7)] + ["P2_W1", "P2_W2"]
    assert list(places(8, None)) == ["plate"]


def test_plates_are_filled_row_by_row():
    where = places(100, 96)
    assert where.index.is_unique and where["plate"].value_counts().to_dict() == {"P1": 96, "P2": 4}
    assert where.loc["P1_B12"].to_dict() == {"plate": "P1", "row": 2, "column": 12, "position": "B12"}
    assert list(where.index[[0, 95, 96, 99]]) == ["P1_A01", "P1_H12", "P2_A01", "P2_A04"]


def test_without_effects_all_wells_look_alike():
    _, wells = looks_of(288)
    assert (wells.nunique() == 1).all()
    assert (wells[[*GAINS, "gamma", "density"]] == 1).all(axis=None)
    assert (wells[["tilt_x", "tilt_y", "saturation"]] == 0).all(axis=None)


@pytest.mark.parametrize(("effect", "column"), [("plate_effect", "plate"), ("position_effect", "position")])
def test_plates_and_positions_have_a_look_of_their_own(effect, column):
    where, wells = looks_of(288, **{effect: 1.0})
    there = wells.groupby(where[column].to_numpy()).transform("mean")
    np.testing.assert_allclose(wells, there, rtol=1e-12)
    assert (wells[[*GAINS, "tilt_x", "blur", "background"]].nunique() > 1).all()


def test_a_position_effect_has_gradients_and_edges():
    where, wells = looks_of(96, position_effect=1.0)
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
def test_sizes_of_effects(effect, columns, sd):
    _, wells = looks_of(2000, **{effect: 2.0})
    np.testing.assert_allclose(np.log(wells[columns]).std(), 2 * sd, rtol=0.1)


def test_how_strongly_effects_show_is_told_by_how_wells_look():
    rng = np.random.default_rng(0)
    _, wells = looks_of(288, well_effect=1.0)
    log = np.log(strengths(rng, wells, 0.4))
    np.testing.assert_allclose(log.mean(), 0, atol=1e-12)
    np.testing.assert_allclose(log.std(ddof=0), 0.4)
    design = np.column_stack([np.ones(len(wells)), wells])
    fit, *_ = np.linalg.lstsq(design, log, rcond=None)
    np.testing.assert_allclose(design @ fit, log, atol=1e-8)
    assert (strengths(rng, wells, 0.0) == 1).all(axis=None)
    # wells of one look show all alike
    assert (strengths(rng, looks_of(288)[1], 0.4) == 1).all(axis=None)
