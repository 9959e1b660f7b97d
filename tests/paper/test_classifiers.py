from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from markdown_tables import rows_of
from pictures import is_drawn

from scbd.paper._classifiers import camelyon17_systems, cmnist_systems, pacs_systems, systems_report, vlcs_systems
from scbd.paper._generalization import camelyon17, cmnist, pacs
from scbd.workflows import MODEL_SPACE


def test_colored_mnist_and_camelyon17_have_the_paper_s_space():
    """Appendix of the paper, table of the search space; five epochs of Camelyon17 are no epochs of Colored MNIST."""
    sizes = {"ERM": 1, "CORAL": 3, "DANN": 3, "IRM": 4, "Fish": 6, "Group DRO": 1}
    for grid, lengths in ((cmnist_systems, {1500, 30_000, 150_000}), (camelyon17_systems, {47_260})):
        trials = grid("paper", None)
        assert {trial.seed for trial in trials} == set(range(10))
        for system, size in sizes.items():
            mine = [trial for trial in trials if trial.system == system]
            assert len(mine) == 10 * size * 9 * len(lengths)
            assert {trial.training["batch_size"] for trial in mine} == {32}
            assert {trial.training["max_steps"] - trial.model.get("pretrain_steps", 0) for trial in mine} == lengths
            assert {trial.training["weight_decay"] for trial in mine} == {0, 0.001, 0.01}
        # the paper has one rate of latent-variable models
        (ivae,) = {trial.training["lr"] for trial in trials if trial.system == "iVAE"}
        assert ivae == 1e-4
        published = [t.model["alpha"] for t in trials if t.system == "SCBD" and t.model["invariance"] == "listing"]
        assert set(published) == {0, 192}
    assert {trial.model["penalty"] for trial in cmnist_systems("paper", 1) if trial.system == "IRM"} == {
        1,
        10,
        100,
        1000,
    }


@pytest.mark.parametrize("grid", [pacs_systems, vlcs_systems])
def test_domains_have_the_systems_of_their_table(grid):
    trials = grid("paper", None)
    systems = {"ERM", "CORAL", "DANN", "IRM", "Group DRO", "SCBD", "random encoder", "pixel PCA"}
    assert {trial.system for trial in trials} == systems and {trial.seed for trial in trials} == {0, 1, 2}
    assert len({trial.data["test_environment"] for trial in trials}) == 4
    assert {trial.data["image_size"] for trial in trials} == {224}
    trained = [trial for trial in trials if "encoder" in trial.model]
    assert {trial.model["encoder"] for trial in trained} == {"resnet50"}
    assert {trial.training["max_steps"] for trial in trials if trial.system == "ERM"} == {5000}
    assert {trial.model["alpha"] for trial in trained if trial.system == "SCBD"} == {0, "auto"}


@pytest.mark.parametrize(
    ("sweep", "systems"), [(cmnist, cmnist_systems), (camelyon17, camelyon17_systems), (pacs, pacs_systems)]
)
def test_erm_of_a_sweep_is_that_of_the_table(sweep, systems):
    """At the paper's budget there is one space, and a run answers for both."""
    clouds = [{trial.key for trial in grid("paper", None) if trial.system == "ERM"} for grid in (sweep, systems)]
    assert clouds[0] == clouds[1]


def test_small_runs_are_as_many_as_were_run():
    systems = {*MODEL_SPACE, "SCBD", "random encoder", "pixel PCA"}
    assert {trial.system for trial in cmnist_systems("small", 1)} == systems
    assert len(cmnist_systems("small", None)) == 102


def row(system: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"dataset": "colored_mnist", "system": system, "seed": seed} | more


def test_each_system_is_chosen_in_distribution_and_stands_beside_the_paper(tmp_path):
    rows = [
        row("CORAL", seed, penalty=p, **{"own in": i, "own out": o, "r_c in": 1 - i, "r_c out": o / 2})
        for seed in (0, 1)
        for p, i, o in ((0.1, 0.9, 0.3 + 0.1 * seed), (1.0, 0.8, 0.9))
    ]
    rows += [
        row("iVAE", 0, **{"r_c in": 0.7, "r_c out": 0.6}),
        row("random encoder", 0, alpha=0.0, **{"r_c in": 0.9, "r_c out": 0.5}),
    ]
    rows.append(row("pixel PCA", 0, **{"r_c in": 0.92, "r_c out": 0.91}))
    rows += [row("SCBD", 0, alpha=a, **{"r_c in": 0.98, "r_c out": 0.97, "z_c out": 0.96}) for a in ("auto", 0.01)]
    text = systems_report(pd.DataFrame(rows), tmp_path)
    found = {line["name"]: line for line in rows_of(text)}
    # by its own head, which is the one that it is chosen by
    assert found["CORAL"]["out, online head, %"] == "35.0 ± 7.1" and found["CORAL"]["paper: out, %"] == "37.6 ± 3.6"
    assert found["CORAL"]["out of distribution, %"] == "17.5 ± 3.5"
    assert found["pixel PCA"]["out of distribution, %"] == "91.0" and found["iVAE"]["out, online head, %"] == "–"
    assert found["iVAE"]["out of distribution, %"] == "60.0" and found["SCBD, alpha auto"]["z_c out, %"] == "96.0"
    assert is_drawn(tmp_path / "trade_off.png")


def test_one_table_a_held_out_domain(tmp_path):
    rows = [
        row("SCBD", 0, alpha=a, invariance=f, test_environment=d, **{"r_c in": 0.9, "r_c out": 0.5, "z_c out": 0.5})
        for d in ("photo", "sketch")
        for a, f in ((0.0, "listing"), ("auto", "variance"))
    ]
    text = systems_report(pd.DataFrame(rows).assign(dataset="pacs"), tmp_path)
    assert text.count("held out") == 2 and "| listing, alpha 0 | 90.0 | 50.0 | 50.0 | 1 | 97.0 ± 0.8 |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"trade_off_photo.png", "trade_off_sketch.png"}
