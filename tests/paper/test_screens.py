from __future__ import annotations

import pandas as pd
from markdown_tables import cells
from pictures import is_drawn

from scbd.paper._screens import correction_report


def test_batch_correction(tmp_path):
    scores = {"relationship_area": 0.5, "e_probe_f1": 0.4, "e_probe_chance_f1": 0.1, "y_probe_f1": 0.3}
    rows = [{"system": "pixel PCA"} | scores, {"system": "random encoder", "alpha": 0.0} | scores]
    rows += [{"system": "SCBD", "alpha": alpha} | scores | {"e_probe_f1": 0.2} for alpha in (8.0, 0.0, 0.0)]
    text = correction_report(pd.DataFrame(rows), tmp_path)
    names = [cells(line)[0] for line in text.splitlines()[2:]]
    assert names == ["random encoder", "pixel PCA", "SCBD, alpha 0", "SCBD, alpha 8"]
    assert "| pixel PCA | 0.500 | 0.300 | 0.400 | 0.100 | 1 |" in text
    assert is_drawn(tmp_path / "batch_correction.png")


def test_two_forms_of_invariance_are_told_apart(tmp_path):
    scores = {"relationship_area": 0.5, "e_probe_f1": 0.4, "y_probe_f1": 0.3}
    forms = [("variance", "auto"), ("variance", 0.01), ("variance", 0.0), ("listing", 8.0)]
    rows = [{"system": "SCBD", "invariance": form, "alpha": alpha} | scores for form, alpha in forms]
    text = correction_report(pd.DataFrame(rows), tmp_path)
    names = [cells(line)[0] for line in text.splitlines()[2:]]
    assert names == ["listing, alpha 8", "variance, alpha 0", "variance, alpha 0.01", "variance, alpha auto"]
