from __future__ import annotations

import pandas as pd
from markdown_tables import rows_of

from scbd.paper._new_plates import new_plates, new_plates_cpjump1, transfer_report, wells_report


def test_every_system_is_trained_in_every_split():
    trials = new_plates("small", None)
    assert {trial.data["fold"] for trial in trials} == set(range(5))
    of_one = [trial for trial in trials if trial.data["fold"] == 0]
    assert [trial.system for trial in of_one] == ["SCBD", "SCBD", "SCBD", "ERM"]
    assert [trial.model.get("norm") for trial in of_one] == [None, "instance", None, None]
    assert {trial.data["n_wells"] // trial.data["plate_wells"] for trial in trials} == {6}
    assert len(new_plates_cpjump1("small", None)) == 10


def test_ways_to_embed_a_new_plate_are_lines_of_a_table(tmp_path):
    scores = {"y AUROC": 0.7, "y F1": 0.1, "new or old": 0.9}
    adapted = {f"adapted on controls: {name}": value / 2 for name, value in scores.items()}
    rows = [
        {"key": "a", "system": "SCBD", "alpha": None, "norm": None} | scores | adapted,
        {"key": "b", "system": "SCBD", "alpha": "auto", "norm": "instance"} | scores,
        {"key": "c", "system": "ERM", "alpha": None, "norm": None} | scores,
    ]
    found = rows_of(transfer_report(pd.DataFrame(rows), tmp_path))
    assert [(line["name"], line["gene AUROC"]) for line in found] == [
        ("SCBD, alpha auto", "0.700"),
        ("SCBD, alpha auto, adapted on controls", "0.350"),
        ("SCBD, alpha auto, norm instance", "0.700"),
        ("ERM", "0.700"),
    ]
    wells = {"replicates seen": 0.5, "e, linear": 0.4, "floor-corrected": 0.2}
    text = wells_report(pd.DataFrame([{"key": "a", "system": "SCBD", "encoder": "linear"} | wells]), tmp_path)
    assert [line["name"] for line in rows_of(text)] == ["SCBD, linear"]
