from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from markdown_tables import cells

from scbd.paper._generalization import cmnist, generalization_report


def test_controls_and_erm_go_with_every_sweep():
    trials = cmnist("small", None)
    control = [trial for trial in trials if trial.system == "random encoder"]
    assert len(control) == 5 and all(trial.training["lr"] == 0 for trial in control)
    pixels = [trial for trial in trials if trial.system == "pixel PCA"]
    assert [trial.seed for trial in pixels] == list(range(5))
    erm = [trial for trial in trials if trial.system == "ERM"]
    assert {trial.training["lr"] for trial in erm} == {1e-4, 1e-3, 1e-2}
    assert {trial.training["batch_size"] for trial in erm} == {32}


def generalization_rows(**more) -> pd.DataFrame:
    """Two seeds of a control, two alphas and three runs of ERM; accuracy falls in, rises out."""
    rows: list[dict[str, Any]] = []
    for seed in (0, 1):
        same: dict[str, Any] = {"dataset": "colored_mnist", "seed": seed} | more
        rows.append(same | {"system": "pixel PCA", "r_c in": 0.92, "r_c out": 0.91})
        shared = same | {"supervised_c": 4.0, "ceiling": 6.0, "spread": 0.5}
        rows.append(shared | {"system": "random encoder", "alpha": 0.0, "r_c in": 0.9, "r_c out": 0.7, "z_c out": 0.3})
        for alpha, r_in, out in [(10.0, 0.95, 0.92 + 0.02 * seed), (0.0, 1.0, 0.25)]:
            rows.append(shared | {"system": "SCBD", "alpha": alpha, "r_c in": r_in, "r_c out": out, "z_c out": out})
        for lr, own, out in [(1e-4, 0.7, 0.6), (1e-3, 0.9, 0.4), (1e-2, 0.8, 0.5)]:
            rows.append(same | {"system": "ERM", "lr": lr, "own in": own, "own out": out, "r_c out": 0.3})
    return pd.DataFrame(rows)


def test_alpha_against_accuracy_beside_controls_and_the_paper(tmp_path):
    text = generalization_report(generalization_rows(), tmp_path)
    head, _, *lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == ["pixel PCA", "random encoder", "SCBD, alpha 0", "SCBD, alpha 10", "ERM"]
    table = pd.DataFrame(lines, columns=head).set_index("name")
    out = table["out of distribution, %"]
    assert out["SCBD, alpha 10"] == "93.0 ± 1.4" and out["random encoder"] == "70.0 ± 0.0"
    # ERM is chosen by its accuracy in distribution: the worst one out of it
    assert table.loc["ERM", "out, online head, %"] == "40.0 ± 0.0" and out["ERM"] == "30.0 ± 0.0"
    assert table.loc["ERM", "in, online head, %"] == "90.0 ± 0.0"
    assert table.loc["SCBD, alpha 0", "paper: out, %"] == "25.5 ± 3.0" and table.loc["ERM", "z_c out, %"] == "–"
    assert (table["runs"] == "2").all()
    assert "choose_alpha" not in text  # rows without what it takes
    with_z_c = generalization_rows().assign(**{"z_c in": 0.9})
    said = "seed by seed: 10 (2). Its accuracy of $z_c$ out of distribution is 0.0 ± 0.0 percentage points below that"
    assert f"{said} of the best alpha." in generalization_report(with_z_c, tmp_path)
    auto = with_z_c[with_z_c["alpha"] == 0].assign(alpha="auto", **{"z_c out": 0.9})
    text_with_auto = generalization_report(pd.concat([with_z_c, auto[auto["system"] == "SCBD"]]), tmp_path)
    assert (
        f'{said} of the best alpha, that of `alpha="auto"` 3.0 ± 1.4.' in text_with_auto
        and "SCBD, alpha auto" in text_with_auto
    )
    assert "ERM, 6 runs: in- and out-of-distribution accuracy correlate with -1.00" in text
    assert {path.name for path in tmp_path.iterdir()} == {"alpha.png", "erm.png"}


def test_one_table_a_held_out_domain(tmp_path):
    frame = pd.concat([generalization_rows(test_environment=name) for name in ("photo", "sketch")])
    text = generalization_report(frame.assign(dataset="pacs"), tmp_path)
    assert text.count("held out") == 2 and "97.0 ± 0.8" in text and "70.6 ± 4.9" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"alpha_photo.png", "alpha_sketch.png", "erm_photo.png", "erm_sketch.png"}


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
