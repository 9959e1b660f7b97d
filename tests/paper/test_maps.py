from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from markdown_tables import cells

from scbd import pl
from scbd.paper._maps import digits_map_report, screen_map_report


def test_the_map_of_regimes(tmp_path):
    def row(form, alpha, **settings) -> dict[str, Any]:
        scores = {"z_c in": 0.9, "z_c out": 0.8, "r_c out": 0.7, "e from r_c": 0.5, "learned_c": 0.6, "ceiling": 6.0}
        return {"invariance": form, "alpha": alpha, "batch_size": 512} | scores | settings

    rows = [row(form, alpha) for form in ("listing", "variance") for alpha in (0.0, 1.0)]
    rows += [row("listing", 1.0, batch_size=128, **{"z_c out": 0.5}), row("variance", 1.0, n_environments=34.0)]
    rows += [row("variance", 1.0, n_environments=34.0, imbalance=0.6), row("listing", 1.0, include_self=False)]
    rows += [row("listing", 1.0, n_digits=5.0)]
    head, _, *lines = [cells(line) for line in digits_map_report(pd.DataFrame(rows), tmp_path).splitlines()]
    found = {tuple(line[:6]): line[head.index("z_c out, %")] for line in lines}
    assert found["listing", "yes", "128", "2", "10", "1"] == "50.0" and len(found) == len(rows)
    assert {("variance", "yes", "512", n, "10", "1") for n in ("2", "34", "34, unequal")} <= set(found)
    assert {("listing", "no", "512", "2", "10", "1"), ("listing", "yes", "512", "2", "5", "1")} <= set(found)
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "learned.png", "environment.png"}


def test_the_map_of_a_screen_counts_from_chance(tmp_path, monkeypatch):
    def row(form, alpha, f1, chance, **settings) -> dict[str, Any]:
        scores = {"relationship_average_precision": 0.9, "y_probe_f1": 0.2, "spread": 0.1}
        scores |= {"e_probe_f1": f1, "e_probe_chance_f1": chance}
        return {"invariance": form, "alpha": alpha, "batch_size": 512, "n_wells": 34} | scores | settings

    rows = [row(form, alpha, 0.1, 0.02) for form in ("listing", "variance") for alpha in (0.0, 1.0)]
    rows += [row("variance", 1.0, 0.75, 0.5, n_wells=2), row("variance", 1.0, 0.1, 0.02, well_imbalance=0.6)]
    rows += [row("listing", 1.0, 0.1, 0.02, n_complexes=3.0)]
    drawn: list[pd.DataFrame] = []
    by_group = pl.by_group

    def watched(frame, setting, score, *rest, **how):
        if score == "e above chance":
            drawn.append(frame)
        return by_group(frame, setting, score, *rest, **how)

    monkeypatch.setattr(pl, "by_group", watched)
    head, _, *lines = [cells(line) for line in screen_map_report(pd.DataFrame(rows), tmp_path).splitlines()]
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "spread.png", "environment.png"}
    assert head[:5] == ["form", "cells a batch", "wells", "complexes", "alpha"]
    found = {tuple(line[:5]): dict(zip(head, line, strict=True)) for line in lines}
    assert len(found) == len(rows)
    assert found["variance", "512", "2", "12", "1"]["well F1"] == "0.750"
    assert {key[2:4] for key in found} == {("34", "12"), ("2", "12"), ("34, unequal", "12"), ("34", "3")}
    wells = pd.concat(drawn)
    assert wells.loc[wells["environments"] == "2", "e above chance"].unique() == pytest.approx([0.5])
