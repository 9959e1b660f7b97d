from __future__ import annotations

import pandas as pd
from markdown_tables import cells

from scbd.paper._counterfactuals import counterfactual_report


def test_counterfactuals(tmp_path):
    rows = [
        {
            "invariance": "listing",
            "alpha": alpha,
            "decoder": {"width": 8, **how},
            "digit kept": 0.5,
            "mse": 0.01,
        }
        for alpha in (10.0, 0.0)
        for how in ({"joint": True, "cycle": 1.0}, {"joint": True, "cycle": 0.0}, {})
    ]
    text = counterfactual_report(pd.DataFrame(rows), tmp_path)
    lines = [cells(line)[:5] for line in text.splitlines()[2:8]]
    decoders = ["after", "with encoders, no cycle", "with encoders, cycle"]
    assert lines == [["listing", alpha, how, "50.0", "0.0100"] for alpha in ("0", "10") for how in decoders]
