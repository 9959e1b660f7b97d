from __future__ import annotations

import pandas as pd
from markdown_tables import cells

from scbd.paper._counterfactuals import counterfactual_report


def test_counterfactuals(tmp_path):
    rows = [
        {
            "alpha": alpha,
            "decoder": {"width": 8, "joint": joint} if joint else {"width": 8},
            "digit kept": 0.5,
            "mse": 0.01,
        }
        for alpha in (10.0, 0.0)
        for joint in (True, False)
    ]
    text = counterfactual_report(pd.DataFrame(rows), tmp_path)
    lines = [cells(line)[:4] for line in text.splitlines()[2:6]]
    assert lines[0] == ["0", "after", "50.0", "0.0100"] and lines[-1] == ["10", "with encoders", "50.0", "0.0100"]
