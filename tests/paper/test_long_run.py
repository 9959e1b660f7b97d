from __future__ import annotations

import pandas as pd

from scbd.paper._long_run import long_report


def test_a_long_run_shows_its_course(tmp_path):
    (tmp_path / "runs" / "key").mkdir(parents=True)
    (tmp_path / "runs" / "key" / "history.csv").write_text("step,train_supervised_c\n1,6.2\n2,6.1\n")
    row = {"key": "key", "system": "SCBD", "alpha": 192.0, "steps": 2, "r_c out": 0.7, "ceiling": 6.24}
    text = long_report(pd.DataFrame([row]), tmp_path)
    assert "| SCBD, alpha 192 | 2 | 70.0 | 6.24 | 1 |" in text
    assert (tmp_path / "key.png").exists()
