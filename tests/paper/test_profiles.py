"""Tables of feature tables name what was asked of each system."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scbd.paper._profiles import profiles_report


def test_settings_are_told_where_they_were_asked_for(tmp_path):
    """Without whitening is another system than one that was asked for nothing."""
    asked: list[dict[str, Any]] = [
        {},
        {"whitening": None},
        {"whitening": "lda"},
        {"whitening_kwargs": {"position_weight": 0.0}},
        {"lr": 0.1},
    ]
    rows = [{"system": "SCBD", "floor": 0.25 + i} | settings for i, settings in enumerate(asked)]
    report = profiles_report(pd.DataFrame(rows), tmp_path)
    names = [line.split(" | ")[0].removeprefix("| ") for line in report.splitlines()[2:]]
    told = ["", ", whitening none", ", whitening lda", ", position_weight 0", ", lr 0.1"]
    assert names == [f"SCBD{setting}" for setting in told]
    assert np.unique([line.split(" | ")[1] for line in report.splitlines()[2:]]).size == 5
