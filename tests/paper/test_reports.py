"""Test tables and figures that reports make of rows."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers.markdown_tables import cells, rows_of
from helpers.reference_images import is_drawn

from paper import plots
from paper.grids.comparisons import lengths_report, rivals_report, screen_systems_report
from paper.grids.environments import transfer_report, wells_report
from paper.grids.generalization import (
    ablation_report,
    bounded_report,
    generalization_report,
    long_report,
    systems_report,
)
from paper.grids.maps import digits_map_report, screen_map_report
from paper.grids.pictures import counterfactual_report
from paper.grids.profiles import profiles_report
from paper.grids.screens import correction_report, neighbours_report
from paper.reports import (
    by_alpha,
    by_variant,
    chosen,
    cost_of_choosing,
    in_out_correlation,
    selection_regret,
    setting_of,
    settings_table,
)
from paper.reproduce import EXPERIMENTS
from paper.trials import as_frame


def test_settings_table_shows_settings_and_duration_per_system():
    rows = [
        {"system": "SCBD", "seconds": seconds, "steps": 1000.0, "lr": lr, "device": "cpu", "batch_size": 512}
        for seconds, lr in ((60.0, 1e-3), (120.0, 1e-4))
    ]
    more = [{"system": "ERM", "seconds": 60.0, "steps": 9.0, "standardize_by": "auto"}]
    more += [{"system": "pixel PCA", "seconds": 6.0}]
    lines = [cells(line) for line in settings_table(pd.DataFrame([*rows, *more])).splitlines()]
    assert lines[0] == [
        "system",
        "inputs standardised",
        "encoder",
        "steps",
        "batch size",
        "lr",
        "precision",
        "device",
        "runs",
        "minutes a run",
    ]
    assert lines[2] == ["SCBD", "over all cells", "–", "1000", "512", "0.0001, 0.001", "–", "cpu", "2", "1.5 ± 0.7"]
    assert lines[3][:3] == ["ERM", "within environments", "–"]
    assert lines[4] == ["pixel PCA", *["–"] * 7, "1", "0.1"]


def make_alpha_rows(alphas: list[float | str]) -> pd.DataFrame:
    """Return rows in which accuracy falls with alpha and the desired score rises."""
    columns = ["seed", "alpha", "seen", "wanted"]
    return pd.DataFrame([(0, alpha, 0.9 - 0.01 * i, 0.5 + 0.1 * i) for i, alpha in enumerate(alphas)], columns=columns)


def test_by_alpha_automatic_alpha_is_last():
    assert list(by_alpha(make_alpha_rows([10.0, "auto", 3.0, 0.0]))["alpha"]) == [0.0, 3.0, 10.0, "auto"]


def test_cost_of_choosing_returns_percentage_points_below_best():
    # accuracies 0.9, 0.89, 0.88, 0.87: the last is below 97 % of the best
    text = cost_of_choosing(make_alpha_rows([0.0, 1.0, 2.0, 3.0]), "seen", "wanted", "score")
    assert "seed by seed: 2 (1). Its score is 10.0 percentage points below that of the best alpha." in text


@pytest.mark.parametrize("alphas", [[], [1.0], [1.0, "auto"]])
def test_cost_of_choosing_fewer_than_two_alphas_returns_empty_text(alphas):
    assert cost_of_choosing(make_alpha_rows(alphas), "seen", "wanted", "score") == ""


def test_selection_regret_is_computed_per_seed():
    rows: list[tuple[Any, ...]] = [
        (0, 0.0, 0.9, 0.2),
        (0, 1.0, 0.9, 0.5),
        (0, 10.0, 0.5, 0.8),
        (1, 0.0, 0.9, 0.6),
        (1, 1.0, 0.8, 0.4),
    ]
    found = selection_regret(pd.DataFrame(rows, columns=["seed", "alpha", "z_c in", "z_c out"]))
    assert found[["alpha", "best"]].to_numpy().tolist() == [[1, 10], [0, 0]]
    np.testing.assert_allclose(found["regret"], [0.3, 0])
    rows += [(0, "auto", 0.9, 0.75), (1, "auto", 0.9, 0.7)]
    found = selection_regret(pd.DataFrame(rows, columns=["seed", "alpha", "z_c in", "z_c out"]))
    np.testing.assert_allclose(found["regret"], [0.3, 0])
    np.testing.assert_allclose(found["auto, regret"], [0.05, -0.1])


def test_in_out_correlation_is_equal_to_pandas():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"own in": rng.random(20), "own out": rng.random(20)})
    found = in_out_correlation(frame)
    assert found["pearson"] == pytest.approx(frame["own in"].corr(frame["own out"]))
    assert found["spearman"] == pytest.approx(frame["own in"].corr(frame["own out"], method="spearman"))
    strong = frame[frame["own in"] >= frame["own in"].median()]
    assert found["strong"] == pytest.approx(strong["own in"].corr(strong["own out"])) and found["n"] == 20


def test_in_out_correlation_weak_runs_strong_is_negative():
    frame = pd.DataFrame({"a": [0.1, 0.2, 0.3, 0.9, 0.95, 1.0], "b": [0.1, 0.2, 0.3, 0.8, 0.7, 0.6]})
    found = in_out_correlation(frame, ins="a", outs="b")
    assert found["pearson"] > 0.5 and found["strong"] == pytest.approx(-1)


def test_in_out_correlation_constant_accuracy_returns_nan():
    assert np.isnan(in_out_correlation(pd.DataFrame({"own in": [1.0] * 4, "own out": [0.1, 0.2, 0.3, 0.4]}))["pearson"])


def make_rows(values: list[tuple[str, int, float, float]], head: str) -> pd.DataFrame:
    columns = ["system", "seed", "lr", head]
    rows: list[dict[str, Any]] = [dict(zip(columns, value, strict=True)) for value in values]
    return pd.DataFrame(rows)


def test_chosen_two_seeds_returns_one_setting_for_both():
    """If settings were chosen per seed, the table would mix both learning rates."""
    frame = make_rows(
        [("ERM", 0, 1e-4, 0.9), ("ERM", 0, 1e-3, 0.8), ("ERM", 1, 1e-4, 0.1), ("ERM", 1, 1e-3, 0.7)], "own in"
    )
    found = chosen(frame, ["system"])
    assert found["lr"].tolist() == [1e-3, 1e-3] and found["seed"].tolist() == [0, 1]
    assert chosen(frame.iloc[:0], ["system"]).empty


def test_chosen_missing_online_head_uses_fitted_classifier():
    """Accuracies of two classifiers are not comparable.

    If the accuracy of the online head is missing for some runs, the fitted classifier is used for all.
    """
    frame = make_rows([("iVAE", 0, 1e-4, 0.99), ("iVAE", 0, 1e-3, 0.5)], "own in").assign(**{"r_c in": [0.8, 0.9]})
    assert chosen(frame, ["system"])["lr"].tolist() == [1e-4]
    frame.loc[1, "own in"] = None
    assert chosen(frame, ["system"])["lr"].tolist() == [1e-3]


def test_setting_of_returns_searched_settings_only():
    frame = pd.DataFrame({"lr": [1e-3, 1e-3], "alpha": ["auto", 0.1], "seconds": [1.0, 2.0]})
    assert setting_of(frame).tolist() == ["0.001 auto", "0.001 0.1"]


def test_bounded_report_orders_random_encoder_scbd_oracle(tmp_path):
    rows = [{"system": name, "alpha": 0.01, "z_c out": z} for name, z in (("oracle", 0.99), ("SCBD", 0.98))]
    rows += [{"system": "random encoder", "alpha": 0.0, "z_c out": 0.5}, rows[1] | {"z_c out": 0.97}]
    lines = [cells(line) for line in bounded_report(pd.DataFrame(rows), tmp_path).splitlines()[2:]]
    assert lines == [
        ["random encoder", "50.0", "1"],
        ["SCBD, alpha 0.01", "97.5 ± 0.7", "2"],
        ["oracle", "99.0", "1"],
    ]


def generalization_rows(**more) -> pd.DataFrame:
    """Return two seeds of the controls, of SCBD at two alphas and of ERM at three learning rates."""
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


def test_generalization_report_shows_alphas_controls_and_paper(tmp_path):
    text = generalization_report(generalization_rows(), tmp_path)
    head, _, *lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == ["pixel PCA", "random encoder", "SCBD, alpha 0", "SCBD, alpha 10", "ERM"]
    table = pd.DataFrame(lines, columns=head).set_index("name")
    out = table["out of distribution, %"]
    assert out["SCBD, alpha 10"] == "93.0 ± 1.4" and out["random encoder"] == "70.0 ± 0.0"
    # ERM is chosen by its accuracy in distribution, here the setting that is worst out of distribution
    assert table.loc["ERM", "out, online head, %"] == "40.0 ± 0.0" and out["ERM"] == "30.0 ± 0.0"
    assert table.loc["ERM", "in, online head, %"] == "90.0 ± 0.0"
    assert table.loc["SCBD, alpha 0", "paper: out, %"] == "25.5 ± 3.0" and table.loc["ERM", "z_c out, %"] == "–"
    assert (table["runs"] == "2").all()
    assert "choose_alpha" not in text  # these rows lack the scores that it needs
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


def test_generalization_report_two_domains_writes_table_per_domain(tmp_path):
    frame = pd.concat([generalization_rows(test_environment=name) for name in ("photo", "sketch")])
    text = generalization_report(frame.assign(dataset="pacs"), tmp_path)
    assert text.count("held out") == 2 and "97.0 ± 0.8" in text and "70.6 ± 4.9" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"alpha_photo.png", "alpha_sketch.png", "erm_photo.png", "erm_sketch.png"}


def test_generalization_report_seed_with_one_alpha_is_not_counted(tmp_path):
    frame = generalization_rows(**{"z_c in": 0.9})
    unfinished = frame[(frame["seed"] == 0) | (frame["alpha"] != 10)]
    assert "seed by seed: 10 (1). Its" in generalization_report(unfinished, tmp_path)
    first = frame[(frame["system"] == "SCBD") & (frame["alpha"] == 0)]
    auto = first.assign(alpha="auto")
    assert "choose_alpha" not in generalization_report(pd.concat([first, auto]), tmp_path)


@pytest.mark.parametrize("system", ["SCBD", "ERM"])
def test_generalization_report_one_row_returns_one_line(tmp_path, system):
    frame = generalization_rows()
    text = generalization_report(frame[frame["system"] == system].head(1), tmp_path)
    assert text.count("\n") == 2


def test_ablation_report_shows_one_setting_at_a_time(tmp_path):
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
    assert is_drawn(tmp_path / "ablations.png") and not (tmp_path / "blocks.png").exists()
    curves = [
        {"encoder": encoder, "style_target": target, "alpha": alpha}
        for encoder in ("densenet121", "resnet18")
        for target in ("ye", None)
        for alpha in (0.0, 10.0, 192.0)
    ]
    rows = [base | {"encoder": "densenet121"} | change for change in [*changes, *curves]]
    text = ablation_report(pd.DataFrame(rows), tmp_path)
    assert "| resnet18 | none | 192 | 90.0 | 80.0 | 1 |" in text and is_drawn(tmp_path / "blocks.png")


def test_long_report_draws_history_of_run(tmp_path):
    (tmp_path / "runs" / "key").mkdir(parents=True)
    (tmp_path / "runs" / "key" / "history.csv").write_text("step,train_supervised_c\n1,6.2\n2,6.1\n")
    row = {"key": "key", "system": "SCBD", "alpha": 192.0, "steps": 2, "r_c out": 0.7, "ceiling": 6.24}
    text = long_report(pd.DataFrame([row]), tmp_path)
    assert "| SCBD, alpha 192 | 2 | 70.0 | 6.24 | 1 |" in text
    assert (tmp_path / "key.png").exists()


def make_system_row(system: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"dataset": "colored_mnist", "system": system, "seed": seed} | more


def test_systems_report_chooses_in_distribution_and_shows_paper(tmp_path):
    rows = [
        make_system_row("CORAL", seed, penalty=p, **{"own in": i, "own out": o, "r_c in": 1 - i, "r_c out": o / 2})
        for seed in (0, 1)
        for p, i, o in ((0.1, 0.9, 0.3 + 0.1 * seed), (1.0, 0.8, 0.9))
    ]
    rows += [
        make_system_row("iVAE", 0, **{"r_c in": 0.7, "r_c out": 0.6}),
        make_system_row("random encoder", 0, alpha=0.0, **{"r_c in": 0.9, "r_c out": 0.5}),
    ]
    rows.append(make_system_row("pixel PCA", 0, **{"r_c in": 0.92, "r_c out": 0.91}))
    rows += [
        make_system_row("SCBD", 0, alpha=a, **{"r_c in": 0.98, "r_c out": 0.97, "z_c out": 0.96})
        for a in ("auto", 0.01)
    ]
    text = systems_report(pd.DataFrame(rows), tmp_path)
    found = {line["name"]: line for line in rows_of(text)}
    # by its online head, which also selects the setting
    assert found["CORAL"]["out, online head, %"] == "35.0 ± 7.1" and found["CORAL"]["paper: out, %"] == "37.6 ± 3.6"
    assert found["CORAL"]["out of distribution, %"] == "17.5 ± 3.5"
    assert found["pixel PCA"]["out of distribution, %"] == "91.0" and found["iVAE"]["out, online head, %"] == "–"
    assert found["iVAE"]["out of distribution, %"] == "60.0" and found["SCBD, alpha auto"]["z_c out, %"] == "96.0"
    assert is_drawn(tmp_path / "trade_off.png")


def test_screen_systems_report_names_differ_between_variants(tmp_path):
    scores = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1, "y_probe_f1": 0.2, "relationship_area": 0.3}
    rows = [make_system_row("iVAE", 0, style_posterior=p, **scores) for p in ("xe", "x")] + [
        make_system_row("pixel PCA, TVN", 0, **scores)
    ]
    rows += [
        make_system_row("SCBD", 0, alpha=a, invariance=f, **scores) for a, f in ((8.0, "listing"), ("auto", "variance"))
    ]
    text = screen_systems_report(pd.DataFrame(rows), tmp_path)
    for name in ("iVAE", "iVAE, x only", "pixel PCA, TVN", "listing, alpha 8", "variance, alpha auto"):
        assert f"| {name} |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"trade_off.png", "batch_correction.png"}


def test_correction_report_orders_rows_and_draws_available_scores(tmp_path):
    scores = {"relationship_area": 0.5, "e_probe_f1": 0.4, "e_probe_chance_f1": 0.1, "y_probe_f1": 0.3}
    rows: list[dict[str, Any]] = [{"system": "pixel PCA"} | scores]
    rows += [{"system": "random encoder", "alpha": 0.0} | scores]
    rows += [{"system": "SCBD", "alpha": alpha} | scores | {"e_probe_f1": 0.2} for alpha in (8.0, 0.0, 0.0)]
    text = correction_report(pd.DataFrame(rows), tmp_path)
    names = [cells(line)[0] for line in text.splitlines()[2:]]
    assert names == ["random encoder", "pixel PCA", "SCBD, alpha 0", "SCBD, alpha 8"]
    assert "| pixel PCA | 0.500 | 0.300 | 0.400 | 0.100 | 1 |" in text
    assert is_drawn(tmp_path / "batch_correction.png") and not (tmp_path / "precision_recall.png").exists()
    # earlier rows have no curve
    rows[0] |= {"precision at 80": 0.1, "recall at 80": 0.6, "precision at 99": 0.8, "recall at 99": 0.2}
    correction_report(pd.DataFrame(rows), tmp_path)
    assert is_drawn(tmp_path / "precision_recall.png")


def test_correction_report_two_forms_of_invariance_names_differ(tmp_path):
    scores = {"relationship_area": 0.5, "e_probe_f1": 0.4, "y_probe_f1": 0.3}
    forms = [("variance", "auto"), ("variance", 0.01), ("variance", 0.0), ("listing", 8.0)]
    rows = [{"system": "SCBD", "invariance": form, "alpha": alpha} | scores for form, alpha in forms]
    text = correction_report(pd.DataFrame(rows), tmp_path)
    names = [cells(line)[0] for line in text.splitlines()[2:]]
    assert names == ["listing, alpha 8", "variance, alpha 0", "variance, alpha 0.01", "variance, alpha auto"]


def make_length_row(system: str, steps: int, **more: Any) -> dict[str, Any]:
    return {"system": system, "steps": steps, "seed": 0, "lr": 0.001} | more


def test_lengths_report_digits_shows_setting_best_in_distribution(tmp_path):
    settings = [(500, 0.001, 0.9, 0.8), (500, 0.0001, 0.7, 0.99), (2000, 0.001, 0.6, 0.98), (2000, 0.0001, 0.95, 0.5)]
    rows = [make_length_row("iVAE", steps, lr=lr, **{"r_c in": i, "r_c out": o}) for steps, lr, i, o in settings]
    found = rows_of(lengths_report(pd.DataFrame(rows), tmp_path))
    assert [(line["steps"], line["out of distribution, %"]) for line in found] == [("500", "80.0"), ("2000", "50.0")]
    assert is_drawn(tmp_path / "lengths.png")


def test_lengths_report_screen_orders_models_by_steps(tmp_path):
    scores = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1}
    posteriors = {"VAE": None, "iVAE": "x"}
    rows = [
        make_length_row(system, steps, style_posterior=posterior, **scores)
        for steps in (1200, 400)
        for system, posterior in posteriors.items()
    ]
    found = rows_of(lengths_report(pd.DataFrame(rows), tmp_path))
    names = [(line["name"], line["steps"]) for line in found]
    assert names == [("VAE", "400"), ("VAE", "1200"), ("iVAE, x only", "400"), ("iVAE, x only", "1200")]


def make_keyed_row(key: str, system: str, **scores: Any) -> dict[str, Any]:
    return {"key": key, "system": system, "seed": 0} | scores


def variant_scores(of: str, f1: float) -> dict[str, float]:
    """Return the scores of one variant in a row."""
    scores = {"relationship_map_unseen": 1 - f1, "e_probe_f1": f1, "e_probe_quadratic_f1": f1}
    return {of + name: value for name, value in (scores | {"e_probe_neighbours_f1": f1}).items()}


ROWS = [
    make_keyed_row(
        "a",
        "obsm",
        **variant_scores("", 0.01),
        **variant_scores("standardised: ", 0.02),
        **variant_scores("chance: ", 0.2),
    ),
    make_keyed_row(
        "b",
        "pixel PCA",
        **variant_scores("", 0.9),
        **variant_scores("standardised: ", 0.1),
        **variant_scores("chance: ", 0.4),
    ),
    make_keyed_row("c", "pixel PCA, TVN", **variant_scores("", 0.3)),
    make_keyed_row(
        "d", "SCBD", alpha="auto", learned_c=0.5, **variant_scores("", 0.2), **variant_scores("standardised: ", 0.15)
    ),
    make_keyed_row(
        "e", "mcVAE", **variant_scores("salient block: ", 0.6), **variant_scores("both blocks, standardised: ", 0.7)
    ),
]


def test_rivals_report_row_with_variants_returns_line_per_variant(tmp_path):
    found = rows_of(rivals_report(pd.DataFrame(ROWS), tmp_path))
    assert [(line["name"], line["well F1, linear"]) for line in found] == [
        ("truth", "0.010"),
        ("truth, standardised", "0.020"),
        ("pixel PCA", "0.900"),
        ("pixel PCA, standardised", "0.100"),
        ("pixel PCA, TVN", "0.300"),
        ("SCBD, alpha auto", "0.200"),
        ("SCBD, alpha auto, standardised", "0.150"),
        ("mcVAE, salient block", "0.600"),
        ("mcVAE, both blocks, standardised", "0.700"),
        ("chance", "0.300 ± 0.141"),
    ]
    # the share learned in training is shown only once per run
    assert [line["learned"] for line in found if line["name"].startswith("SCBD")] == ["0.50", "–"]
    assert {path.name for path in tmp_path.iterdir()} == {"systems.png", "corrections.png"}
    assert all(map(is_drawn, tmp_path.iterdir()))


def test_by_variant_one_score_per_row_returns_equal_rows():
    frame = pd.DataFrame({"name": ["b", "a"], "e_probe_f1": [0.1, np.nan], "y": [np.nan, 1.0]}, index=[7, 3])
    lines = by_variant(frame, ["e_probe_f1", "y"])
    pd.testing.assert_frame_equal(lines[frame.columns], frame.reset_index(drop=True))


def test_neighbours_report_shows_differences_within_seeds(tmp_path):
    scores = [(0, False, 0.5), (0, True, 0.6), (1, False, 0.9), (1, True, 0.9), (2, True, 0.1)]
    same = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1}
    rows = [{"seed": seed, "neighbours": way, "y_probe_f1": f1} | same for seed, way, f1 in scores]
    text = neighbours_report(pd.DataFrame(rows), tmp_path)
    both, difference = text.split("In stretches less any, seed by seed:")
    assert [(row["cells"], row["gene F1"], row["runs"]) for row in rows_of(both.strip())] == [
        ("any", "0.700 ± 0.283", "2"),
        ("in stretches", "0.533 ± 0.404", "3"),
    ]
    assert [row["gene F1"] for row in rows_of(difference.strip())] == ["0.050 ± 0.071"]


def test_digits_map_report_shows_line_per_setting(tmp_path):
    def make_row(form, alpha, **settings) -> dict[str, Any]:
        scores = {"z_c in": 0.9, "z_c out": 0.8, "r_c out": 0.7, "e from r_c": 0.5, "learned_c": 0.6, "ceiling": 6.0}
        return {"invariance": form, "alpha": alpha, "batch_size": 512} | scores | settings

    rows = [make_row(form, alpha) for form in ("listing", "variance") for alpha in (0.0, 1.0)]
    rows += [
        make_row("listing", 1.0, batch_size=128, **{"z_c out": 0.5}),
        make_row("variance", 1.0, n_environments=34.0),
    ]
    rows += [
        make_row("variance", 1.0, n_environments=34.0, imbalance=0.6),
        make_row("listing", 1.0, include_self=False),
    ]
    rows += [make_row("listing", 1.0, n_digits=5.0)]
    head, _, *lines = [cells(line) for line in digits_map_report(pd.DataFrame(rows), tmp_path).splitlines()]
    found = {tuple(line[:6]): line[head.index("z_c out, %")] for line in lines}
    assert found["listing", "yes", "128", "2", "10", "1"] == "50.0" and len(found) == len(rows)
    assert {("variance", "yes", "512", n, "10", "1") for n in ("2", "34", "34, unequal")} <= set(found)
    assert {("listing", "no", "512", "2", "10", "1"), ("listing", "yes", "512", "2", "5", "1")} <= set(found)
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "learned.png", "environment.png"}


def test_screen_map_report_draws_well_score_above_chance(tmp_path, monkeypatch):
    def make_row(form, alpha, f1, chance, **settings) -> dict[str, Any]:
        scores = {"relationship_average_precision": 0.9, "y_probe_f1": 0.2, "spread": 0.1}
        scores |= {"e_probe_f1": f1, "e_probe_chance_f1": chance}
        return {"invariance": form, "alpha": alpha, "batch_size": 512, "n_wells": 34} | scores | settings

    rows = [make_row(form, alpha, 0.1, 0.02) for form in ("listing", "variance") for alpha in (0.0, 1.0)]
    rows += [make_row("variance", 1.0, 0.75, 0.5, n_wells=2), make_row("variance", 1.0, 0.1, 0.02, well_imbalance=0.6)]
    rows += [make_row("listing", 1.0, 0.1, 0.02, n_complexes=3.0)]
    drawn: list[pd.DataFrame] = []
    by_group = plots.by_group

    def record_and_draw(frame, setting, score, *rest, **how):
        if score == "e above chance":
            drawn.append(frame)
        return by_group(frame, setting, score, *rest, **how)

    monkeypatch.setattr(plots, "by_group", record_and_draw)
    head, _, *lines = [cells(line) for line in screen_map_report(pd.DataFrame(rows), tmp_path).splitlines()]
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "spread.png", "environment.png"}
    assert head[:5] == ["form", "cells a batch", "wells", "complexes", "alpha"]
    found = {tuple(line[:5]): dict(zip(head, line, strict=True)) for line in lines}
    assert len(found) == len(rows)
    assert found["variance", "512", "2", "12", "1"]["well F1"] == "0.750"
    assert {key[2:4] for key in found} == {("34", "12"), ("2", "12"), ("34, unequal", "12"), ("34", "3")}
    wells = pd.concat(drawn)
    assert wells.loc[wells["environments"] == "2", "e above chance"].unique() == pytest.approx([0.5])


def test_transfer_report_returns_line_per_way_to_embed_new_plate(tmp_path):
    scores = {"y AUROC": 0.7, "y F1": 0.1, "new or old": 0.9}
    own = {f"standardised by its own controls: {name}": value / 2 for name, value in scores.items()}
    without = {f"as training cells: {name}": value for name, value in scores.items()}
    rows = [
        {"key": "a", "system": "SCBD", "alpha": None, "norm": None} | own | without,
        {"key": "b", "system": "SCBD", "alpha": "auto", "norm": "instance"} | without,
        {"key": "c", "system": "ERM", "alpha": None, "norm": None} | without,
    ]
    found = rows_of(transfer_report(pd.DataFrame(rows), tmp_path))
    assert [(line["name"], line["gene AUROC"]) for line in found] == [
        ("SCBD, alpha auto, standardised by its own controls", "0.350"),
        ("SCBD, alpha auto, as training cells", "0.700"),
        ("SCBD, alpha auto, norm instance, as training cells", "0.700"),
        ("ERM, as training cells", "0.700"),
    ]
    wells = {"replicates seen": 0.5, "e, linear": 0.4, "floor-corrected": 0.2}
    text = wells_report(pd.DataFrame([{"key": "a", "system": "SCBD", "encoder": "linear"} | wells]), tmp_path)
    assert [line["name"] for line in rows_of(text)] == ["SCBD, linear"]


def test_profiles_report_names_state_explicit_settings(tmp_path):
    """A row with `whitening=None` is named differently from a row without this setting."""
    asked: list[dict[str, Any]] = [
        {},
        {"whitening": None},
        {"whitening": "lda"},
        {"whitening_kwargs": {"position_weight": 0.0}},
        {"lr": 0.1},
    ]
    rows = [{"system": "SCBD", "floor": 0.25 + i} | settings for i, settings in enumerate(asked)]
    report = profiles_report(as_frame(rows), tmp_path)
    names = [line.split(" | ")[0].removeprefix("| ") for line in report.splitlines()[2:]]
    told = ["", ", whitening none", ", whitening lda", ", position_weight 0", ", lr 0.1"]
    assert names == [f"SCBD{setting}" for setting in told]
    assert np.unique([line.split(" | ")[1] for line in report.splitlines()[2:]]).size == 5


def counterfactual_runs() -> pd.DataFrame:
    """Return two seeds of SCBD at three alphas with each decoder, and of the iVAE."""
    objectives = [{"invariance": "listing", "alpha": alpha} for alpha in (192.0, 64.0)]
    objectives.append({"invariance": "variance", "alpha": "auto"})
    decoders: tuple[dict[str, Any], ...] = ({"joint": True, "cycle": 1.0}, {"joint": True, "cycle": 0.0}, {})
    rows = [
        {"system": "SCBD", "seed": seed, "decoder": {"width": 8, **how}} | objective
        for seed in (1, 0)
        for objective in objectives
        for how in decoders
    ]
    rows += [{"system": "iVAE", "seed": seed} for seed in (1, 0)]
    scores = {"digit kept": 0.5, "mse": 0.01}
    return pd.DataFrame([{"key": f"run-{number}"} | row | scores for number, row in enumerate(rows)])


def test_counterfactual_report_orders_decoders(tmp_path):
    frame = counterfactual_runs()
    lines = [cells(line)[:4] for line in counterfactual_report(frame, tmp_path).splitlines()[2:12]]
    decoders = ["after", "with encoders, no cycle", "with encoders, cycle"]
    names = ["listing, alpha 64", "listing, alpha 192", "variance, alpha auto"]
    expected = [[name, how, "50.0 ± 0.0", "0.0100 ± 0.0000"] for name in names for how in decoders]
    assert lines == [*expected, ["iVAE", "of its own", *expected[0][2:]]]
    assert not list(tmp_path.iterdir())  # no run has stored pictures
    (line,) = counterfactual_report(frame[frame["system"] == "iVAE"].dropna(axis=1), tmp_path).splitlines()[2:3]
    assert cells(line)[:3] == ["iVAE", "of its own", "50.0 ± 0.0"]


def test_counterfactual_report_stored_pictures_draws_one_seed(tmp_path, monkeypatch):
    """The figure shows decoders trained after the encoders, at the largest alpha; other runs are excluded."""
    frame, shown = counterfactual_runs(), []
    for number, key in enumerate(frame["key"]):
        folder = tmp_path / "runs" / key
        folder.mkdir(parents=True)
        picture = np.full((2, 3, 4, 4), number / 100, dtype=np.float32)
        kept: dict[str, Any] = {"original": picture, "style of the next": picture}
        np.savez(folder / "pictures.npz", **kept)
    monkeypatch.setattr("paper.grids.pictures.save_figure", lambda figure, path: shown.append((figure, path)))
    counterfactual_report(frame, tmp_path)
    by_name = {path.name: np.reshape(figure.axes, (2, -1)) for figure, path in shown}
    assert list(by_name) == ["pictures_SCBD.png", "pictures_iVAE.png"]
    for axes in by_name.values():
        assert [ax.get_ylabel() for ax in axes[:, 0]] == ["original", "style\nof the next"]
    axes = np.concatenate([*by_name.values()], axis=1)
    titles = ["listing, alpha 192", "variance, alpha auto", "iVAE"]
    assert [ax.get_title("left") for ax in axes[0, ::2]] == titles
    rows = frame.assign(alpha=frame["alpha"].astype(str), number=range(len(frame)))
    rows = rows[(rows["seed"] == 0) & (rows["alpha"] != "64.0")]
    after = rows[[not (isinstance(how, dict) and "joint" in how) for how in rows["decoder"]]]["number"]
    drawn = [float(np.asarray(ax.images[0].get_array()).max()) for ax in axes[1, ::2]]
    np.testing.assert_allclose(drawn, after / 100, atol=1e-6)
    plt.close("all")


def test_pacs_systems_report_averages_domains_per_seed(tmp_path):
    rows = [
        {
            "dataset": "pacs",
            "system": "ERM",
            "seed": seed,
            "test_environment": domain,
            "lr": lr,
            "key": f"{domain}{seed}",
        }
        | {"r_c in": 0.9 - lr, "own in": 0.9 - lr, "r_c out": 0.5, "own out": out + 0.02 * seed - lr}
        for domain, out in {"art_painting": 0.4, "cartoon": 0.5, "photo": 0.6, "sketch": 0.7}.items()
        for seed in range(3)
        for lr in (0.0, 0.1)
    ]
    text = EXPERIMENTS["pacs-systems"].report(pd.DataFrame(rows), tmp_path)
    average = text.split("### Average over domains")[1]
    assert "| ERM | 90.0 ± 0.0 | 50.0 ± 0.0 | 90.0 ± 0.0 | 57.0 ± 2.0 | 3 | 85.7 |" in average
    # a seed with a missing domain has no average
    text = EXPERIMENTS["pacs-systems"].report(pd.DataFrame([r for r in rows if r["key"] != "sketch2"]), tmp_path)
    assert "| 56.0 ± 1.4 | 2 | 85.7 |" in text.split("### Average over domains")[1]
