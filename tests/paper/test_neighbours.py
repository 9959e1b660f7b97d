from __future__ import annotations

import pandas as pd
from markdown_tables import rows_of

from scbd.paper._neighbours import neighbours_report, screen_neighbours


def test_pairs_differ_in_who_meets_whom_alone():
    trials = screen_neighbours("small", None)
    assert len(trials) == 10
    for any_cells, stretches in zip(trials[::2], trials[1::2], strict=True):
        assert (any_cells.seed, any_cells.data, any_cells.model) == (stretches.seed, stretches.data, stretches.model)
        assert {**any_cells.training, "neighbours": True} == dict(stretches.training)
        assert not any_cells.training["neighbours"]


def test_differences_are_those_of_pairs_of_a_seed(tmp_path):
    scores = [(0, False, 0.5), (0, True, 0.6), (1, False, 0.9), (1, True, 0.9), (2, True, 0.1)]
    same = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1}
    rows = [{"seed": seed, "neighbours": way, "y_probe_f1": f1} | same for seed, way, f1 in scores]
    text = neighbours_report(pd.DataFrame(rows), tmp_path)
    both, difference = text.split("In stretches less any, seed by seed:")
    assert [(row["cells"], row["gene F1"], row["runs"]) for row in rows_of(both.strip())] == [
        ("any", "0.700 ± 0.283", "2"),
        ("in stretches", "0.533 ± 0.404", "3"),
    ]
    assert [row["gene F1"] for row in rows_of(difference.strip())] == ["0.050 ± 0.071"]
