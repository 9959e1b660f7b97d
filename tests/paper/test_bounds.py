from __future__ import annotations

import pandas as pd
from markdown_tables import cells

from scbd.paper._bounds import bounded_report


def test_between_a_random_encoder_and_an_oracle(tmp_path):
    rows = [{"system": name, "alpha": 0.01, "z_c out": z} for name, z in (("oracle", 0.99), ("SCBD", 0.98))]
    rows += [{"system": "random encoder", "alpha": 0.0, "z_c out": 0.5}, rows[1] | {"z_c out": 0.97}]
    lines = [cells(line) for line in bounded_report(pd.DataFrame(rows), tmp_path).splitlines()[2:]]
    assert lines == [
        ["random encoder", "50.0", "1"],
        ["SCBD, alpha 0.01", "97.5 ± 0.7", "2"],
        ["oracle", "99.0", "1"],
    ]
