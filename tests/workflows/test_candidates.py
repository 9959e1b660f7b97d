"""Tests of the embeddings that a run compares with z_c, and of the cells used to standardise them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import make_wells

from scbd._workflows.candidates import (
    CellLabels,
    ReferenceCells,
    add_standardised,
    choose_reference_cells,
    compute_corrected_inputs,
    standardize_over_training_cells,
)
from scbd.corrections import standardize_by_environment


def make_well_labels(**more: Any) -> CellLabels:
    wells = make_wells()
    y = wells.obs["compound"].astype(str).to_numpy()
    parts = {"y_name": "compound", "y": y, "environments": {"plate": wells.obs["plate"].astype(str).to_numpy()}}
    parts |= {"is_train": np.arange(wells.n_obs) % 5 > 0, "is_control": y == "DMSO"}
    return CellLabels(**(parts | {"position": wells.obs["well"].astype(str).to_numpy()} | more))


def test_compute_corrected_inputs_do_not_depend_on_held_out_cells():
    labels, x = make_well_labels(), np.asarray(make_wells().X)
    reference = choose_reference_cells(labels)
    found = compute_corrected_inputs("features", x, labels, reference)
    assert [*found][:2] == ["features", "features, standardised by plate"] and [*found][-1].endswith("WCCN")
    plates = labels.environments["plate"]
    expected = standardize_by_environment(x, plates, fit=labels.is_train)
    np.testing.assert_array_equal(found["features, standardised by plate"], expected)
    other = np.where(labels.is_train[:, None], x, 7).astype(x.dtype)
    renamed = replace(labels, y=np.where(labels.is_train, labels.y, "unknown"))
    again = compute_corrected_inputs("features", other, renamed, reference)
    assert [*again] == [*found]
    for name in found:
        np.testing.assert_array_equal(found[name][labels.is_train], again[name][labels.is_train])


def test_compute_corrected_inputs_few_training_controls_omits_sphering():
    labels, x = make_well_labels(), np.asarray(make_wells().X)
    few = replace(labels, is_control=labels.is_control & (np.arange(len(x)) < 12))
    many = replace(labels, is_control=np.arange(len(x)) % 2 == 0)
    assert not any("sphered" in name for name in compute_corrected_inputs("features", x, few, None))
    found = compute_corrected_inputs("features", x, many, ReferenceCells("plate", "cells", labels.is_train))
    assert {"features, sphered", "features, standardised by plate, sphered"} <= set(found)


def test_compute_corrected_inputs_single_cell_environment_logs_omission(caplog):
    labels, x = make_well_labels(), np.asarray(make_wells().X)
    alone = replace(labels, environments={"plate": np.where(np.arange(len(x)) == 0, "alone", "p")})
    caplog.set_level("INFO")
    found = compute_corrected_inputs("features", x, alone, choose_reference_cells(alone))
    assert next(iter(found)) == "features" and "features, standardised by plate" not in found
    assert "features, standardised by plate is not compared" in caplog.text
    # the trained embedding is kept, and only its standardised form is omitted
    trained = {"z_c": x}
    add_standardised(trained, "z_c", alone, choose_reference_cells(alone))
    assert [*trained] == ["z_c"] and "z_c, standardised by plate is not compared" in caplog.text


@pytest.mark.parametrize("kind", ["cells", "controls"])
def test_choose_reference_cells_held_out_environment_uses_its_own_cells(kind):
    labels = make_well_labels()
    plate = labels.environments["plate"]
    held_out = plate == plate[0]
    labels = replace(labels, is_train=~held_out)
    reference = choose_reference_cells(labels, kind)
    assert reference is not None and reference[:2] == ("plate", kind)
    rows = reference.rows
    asked = labels.is_control if kind == "controls" else np.ones(len(plate), dtype=bool)
    np.testing.assert_array_equal(rows, asked)
    found = {"x": np.asarray(make_wells().X)}
    add_standardised(found, "x", labels, reference)
    x = found["x, standardised by plate"]
    np.testing.assert_allclose(x[held_out & asked].mean(0), 0, atol=1e-5)


def test_choose_reference_cells_nested_labels_returns_controls_or_none():
    n = 1_200
    rng = np.random.default_rng(0)
    well = rng.integers(8, size=n)
    labels = CellLabels(
        y_name="gene",
        y=rng.integers(5, size=n).astype(str),
        environments={"plate": (well // 4).astype(str), "well": well.astype(str)},
        is_train=np.ones(n, dtype=bool),
        is_control=np.zeros(n, dtype=bool),
    )
    found = choose_reference_cells(labels)
    assert found is not None and found[:2] == ("well", "cells")
    # each well holds controls and one perturbation that no other well holds
    is_control = rng.random(n) < 0.4
    nested = replace(labels, y=np.where(is_control, "DMSO", well.astype(str)), is_control=is_control)
    found = choose_reference_cells(nested)
    assert found is not None and found[:2] == ("well", "controls")
    # without controls, the effect of a well cannot be separated from the effect of its perturbation
    assert choose_reference_cells(replace(nested, y=well.astype(str), is_control=np.zeros(n, dtype=bool))) is None


def test_choose_reference_cells_counts_held_out_controls():
    """Four controls per plate are enough, as for the model, also if one of them is held out."""
    plate = np.repeat(np.arange(6), 30)
    is_control = np.tile(np.arange(30) < 4, 6)
    labels = CellLabels(
        y_name="compound",
        y=np.where(is_control, "DMSO", plate.astype(str)),
        environments={"plate": plate.astype(str)},
        is_train=np.tile(np.arange(30) != 3, 6),
        is_control=is_control,
    )
    found = choose_reference_cells(labels)
    assert found is not None and found[:2] == ("plate", "controls")
    assert choose_reference_cells(replace(labels, is_control=np.tile(np.arange(30) < 3, 6))) is None


def test_standardize_over_training_cells_constant_feature_is_zero():
    rng = np.random.default_rng(0)
    x = np.column_stack([5 + 3 * rng.normal(size=200), np.full(200, 7.0)])
    train = np.arange(200) < 150
    found = standardize_over_training_cells(x, train)
    np.testing.assert_allclose(found[train].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(found[train, 0].std(), 1, rtol=1e-6)
    assert not found[:, 1].any()
