from __future__ import annotations

import pytest

from scbd._measure_names import measure_name


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("e_probe_f1", "F1 of the environment"),
        ("relationship_recall (corum 4.0)", "recall of known relations (corum 4.0)"),
        ("mine (of a network)", "mine (of a network)"),
        ("retrieval_moa_map", "retrieval moa map"),
        ("", ""),
    ],
)
def test_scores_have_names_in_words(metric, name):
    assert measure_name(metric) == name
