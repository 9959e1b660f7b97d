from __future__ import annotations

import pandas as pd
from markdown_tables import cells

from scbd.paper._tables import settings_table


def test_what_was_run_and_how_long():
    rows = [
        {"system": "SCBD", "seconds": seconds, "steps": 1000.0, "lr": lr, "device": "cpu", "batch_size": 512}
        for seconds, lr in ((60.0, 1e-3), (120.0, 1e-4))
    ]
    lines = [
        cells(line)
        for line in settings_table(pd.DataFrame([*rows, {"system": "pixel PCA", "seconds": 6.0}])).splitlines()
    ]
    assert lines[0] == [
        "system",
        "encoder",
        "steps",
        "batch size",
        "lr",
        "precision",
        "device",
        "runs",
        "minutes a run",
    ]
    assert lines[2] == ["SCBD", "–", "1000", "512", "0.0001, 0.001", "–", "cpu", "2", "1.5 ± 0.7"]
    assert lines[3] == ["pixel PCA", *["–"] * 6, "1", "0.1"]
