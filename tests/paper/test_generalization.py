from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from markdown_tables import cells
from pictures import is_drawn

from scbd import pl
from scbd.paper._maps import digits_map_report, screen_map_report
from scbd.paper._generalization import (
    ablation_report,
    bounded_report,
    correction_report,
    counterfactual_report,
    generalization_report,
    long_report,
    settings_table,
)


def generalization_rows(**more) -> pd.DataFrame:
    """Two seeds of a control, two alphas and three runs of ERM; accuracy falls in, rises out."""
    rows: list[dict[str, Any]] = []
    for seed in (0, 1):
        shared: dict[str, Any] = {
            "dataset": "colored_mnist",
            "seed": seed,
            "supervised_c": 4.0,
            "ceiling": 6.0,
            "spread": 0.5,
        } | more
        rows.append(shared | {"system": "random encoder", "alpha": 0.0, "r_c in": 0.9, "r_c out": 0.7, "z_c out": 0.3})
        for alpha, r_in, out in [(10.0, 0.95, 0.92 + 0.02 * seed), (0.0, 1.0, 0.25)]:
            rows.append(shared | {"system": "SCBD", "alpha": alpha, "r_c in": r_in, "r_c out": out, "z_c out": out})
        for own, out in [(0.7, 0.6), (0.9, 0.4), (0.8, 0.5)]:
            rows.append(
                {"dataset": "colored_mnist", "seed": seed, "system": "ERM", "own in": own, "own out": out} | more
            )
    return pd.DataFrame(rows)


def test_alpha_against_accuracy_beside_controls_and_the_paper(tmp_path):
    text = generalization_report(generalization_rows(), tmp_path)
    head, _, *lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == ["random encoder", "SCBD, alpha 0", "SCBD, alpha 10", "ERM"]
    table = pd.DataFrame(lines, columns=head).set_index("name")
    out = table["out of distribution, %"]
    assert out["SCBD, alpha 10"] == "93.0 ± 1.4" and out["random encoder"] == "70.0 ± 0.0"
    # ERM is chosen by its accuracy in distribution: the worst one out of it
    assert out["ERM"] == "40.0 ± 0.0" and table.loc["ERM", "in distribution, %"] == "90.0 ± 0.0"
    assert table.loc["SCBD, alpha 0", "paper: out, %"] == "25.5 ± 3.0" and table.loc["ERM", "z_c out, %"] == "–"
    assert (table["runs"] == "2").all()
    assert "choose_alpha" not in text  # rows without what it takes
    with_z_c = generalization_rows().assign(**{"z_c in": 0.9})
    said = "seed by seed: 10 (2). Its accuracy of $z_c$ out of distribution is 0.0 ± 0.0 points below that of the best"
    assert f"{said} alpha." in generalization_report(with_z_c, tmp_path)
    auto = with_z_c[with_z_c["alpha"] == 0].assign(alpha="auto", **{"z_c out": 0.9})
    text_with_auto = generalization_report(pd.concat([with_z_c, auto[auto["system"] == "SCBD"]]), tmp_path)
    assert f'{said} alpha, that of `alpha="auto"` 3.0 ± 1.4.' in text_with_auto and "SCBD, alpha auto" in text_with_auto
    assert "ERM, 6 runs: in- and out-of-distribution accuracy correlate with -1.00" in text
    assert {path.name for path in tmp_path.iterdir()} == {"alpha.png", "erm.png"}


def test_one_table_a_held_out_domain(tmp_path):
    frame = pd.concat([generalization_rows(test_environment=name) for name in ("photo", "sketch")])
    text = generalization_report(frame.assign(dataset="pacs"), tmp_path)
    assert text.count("held out") == 2 and "97.0 ± 0.8" in text and "70.6 ± 4.9" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"alpha_photo.png", "alpha_sketch.png", "erm_photo.png", "erm_sketch.png"}


def test_ablations(tmp_path):
    base: dict[str, Any] = {
        "n_latent": 128,
        "batch_size": 512,
        "weight_decay": 0.01,
        "style_target": "ye",
        "alpha": 10.0,
    }
    base |= {"r_c in": 0.9, "r_c out": 0.8}
    changes: list[dict[str, Any]] = [
        {},
        {},
        {"n_latent": 32, "r_c out": 0.7},
        {"batch_size": 128},
        {"weight_decay": 0.1},
    ]
    changes += [{"style_target": None, "r_c out": 0.6}, {"style_target": None, "alpha": 0.0}]
    text = ablation_report(pd.DataFrame([base | change for change in changes]), tmp_path)
    assert "| 32 | 90.0 | 70.0 | 1 |" in text and "| 128 | 90.0 ± 0.0 | 80.0 ± 0.0 | 2 |" in text
    assert "| none | 10 | 90.0 | 60.0 | 1 |" in text
    assert is_drawn(tmp_path / "ablations.png")


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


def test_between_a_random_encoder_and_an_oracle(tmp_path):
    rows = [{"system": name, "alpha": 0.01, "z_c out": z} for name, z in (("oracle", 0.99), ("SCBD", 0.98))]
    rows += [{"system": "random encoder", "alpha": 0.0, "z_c out": 0.5}, rows[1] | {"z_c out": 0.97}]
    lines = [cells(line) for line in bounded_report(pd.DataFrame(rows), tmp_path).splitlines()[2:]]
    assert lines == [
        ["random encoder", "50.0", "1"],
        ["SCBD, alpha 0.01", "97.5 ± 0.7", "2"],
        ["oracle", "99.0", "1"],
    ]


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


def test_a_long_run_shows_its_course(tmp_path):
    (tmp_path / "runs" / "key").mkdir(parents=True)
    (tmp_path / "runs" / "key" / "history.csv").write_text("step,train_supervised_c\n1,6.2\n2,6.1\n")
    row = {"key": "key", "system": "SCBD", "alpha": 192.0, "steps": 2, "r_c out": 0.7, "ceiling": 6.24}
    text = long_report(pd.DataFrame([row]), tmp_path)
    assert "| SCBD, alpha 192 | 2 | 70.0 | 6.24 | 1 |" in text
    assert (tmp_path / "key.png").exists()


def test_a_seed_with_one_alpha_is_chosen_from_later(tmp_path):
    frame = generalization_rows(**{"z_c in": 0.9})
    unfinished = frame[(frame["seed"] == 0) | (frame["alpha"] != 10)]
    assert "seed by seed: 10 (1). Its" in generalization_report(unfinished, tmp_path)
    first = frame[(frame["system"] == "SCBD") & (frame["alpha"] == 0)]
    auto = first.assign(alpha="auto")
    assert "choose_alpha" not in generalization_report(pd.concat([first, auto]), tmp_path)


@pytest.mark.parametrize("system", ["SCBD", "ERM"])
def test_unfinished_grids_are_reported_as_far_as_they_are(tmp_path, system):
    frame = generalization_rows()
    text = generalization_report(frame[frame["system"] == system].head(1), tmp_path)
    assert text.count("\n") == 2


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
