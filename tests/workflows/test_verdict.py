"""Tests of the verdict of a run, on embeddings with known content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from scbd._workflows.candidates import CellLabels
from scbd._workflows.compare import MIN_UNSEEN_PERTURBATIONS
from scbd._workflows.evidence import answer_questions, predict_environments
from scbd._workflows.verdict import MARGIN, judge_embeddings

pytestmark = pytest.mark.filterwarnings("ignore:Logistic regression")
N_DIMENSIONS = 24


class Screen:
    """Cells of genes and controls in wells, and terms of embeddings: effects of genes and wells, and noise."""

    def __init__(self, n_genes: int = 8, n_wells: int = 6, n_cells: int = 1_500, n_unseen: int = 0, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.gene = self.rng.integers(n_genes + 1, size=n_cells)  # 0: controls
        self.well = self.rng.integers(n_wells, size=n_cells)
        self.is_train = (self.rng.random(n_cells) < 0.7) & (self.gene <= n_genes - n_unseen)
        self.more: dict[str, Any] = {}

    @property
    def labels(self) -> CellLabels:
        y = np.array(["control", *(f"g{i}" for i in range(1, 200))], dtype=object)[self.gene]
        wells = np.array([f"w{i}" for i in range(200)], dtype=object)[self.well]
        parts = {"y_name": "gene", "y": y, "environments": {"well": wells}, "is_train": self.is_train}
        return CellLabels(**(parts | {"is_control": self.gene == 0} | self.more))

    def effects(self, codes: np.ndarray, size: float = 1.0, seed: int = 0) -> np.ndarray:
        """Return each cell's effect, drawn once per value of a label, ``(N, D)``."""
        rng = np.random.default_rng(seed)
        return size * rng.normal(size=(codes.max() + 1, N_DIMENSIONS))[codes]

    def noise(self, size: float = 1.0) -> np.ndarray:
        return size * self.rng.normal(size=(len(self.gene), N_DIMENSIONS))

    def of_gene(self, size: float = 1.0) -> np.ndarray:
        return self.effects(self.gene, size, 1)

    def of_well(self, size: float = 1.0) -> np.ndarray:
        return self.effects(self.well, size, 2)


def best_embedding(screen: Screen, **embeddings: np.ndarray) -> str | None:
    return judge_embeddings(screen.labels, embeddings).best


def test_judge_embeddings_map_and_cloud_best_is_the_map():
    """The cloud carries no wells and weak gene effects; the map carries weak wells and strong gene effects."""
    screen = Screen()
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + screen.of_well(1.0) + noise
    cloud = screen.of_gene(0.1) + noise
    mapped = screen.of_gene(0.5) + screen.of_well(0.3) + noise
    embeddings = {"inputs": inputs, "cloud": cloud, "map": mapped}
    assert best_embedding(screen, **embeddings) == "map"
    (measure,) = predict_environments(screen.labels, embeddings, seed=0).values()
    f1 = {name: score.value for name, score in measure.scores.items()}
    assert f1["cloud"] < f1["map"] < f1["inputs"]


def test_judge_embeddings_genes_in_some_weeks_design_is_not_batch_effect():
    """Genes 1 to 6 lie in one of three pairs of weeks: knowing the gene predicts the week."""
    screen = Screen(n_genes=6, n_wells=6, n_cells=2_000)
    pair = (screen.gene - 1) // 2
    keep = (screen.gene == 0) | (screen.well // 2 == pair)
    for name in ("gene", "well", "is_train"):
        setattr(screen, name, getattr(screen, name)[keep])
    noise = screen.noise()
    inputs = screen.of_gene(0.5) + screen.of_well(0.4) + noise
    assert best_embedding(screen, inputs=inputs, perfect=screen.of_gene(1.0) + 0.5 * noise) == "perfect"


@pytest.mark.parametrize(("gain", "expected"), [(0.0, "inputs"), (0.4, "mine")])
def test_judge_embeddings_equal_scores_best_is_the_simplest(gain, expected):
    screen = Screen()
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "mine": inputs + screen.of_gene(gain)})
    scores = verdict.scores.set_index("embedding")["value"].iloc[:2]
    assert verdict.best == expected
    assert (scores["mine"] > scores["inputs"] + MARGIN) == (expected == "mine")


def test_judge_embeddings_uncertain_lead_is_called_uncertain():
    screen = Screen(n_genes=4, n_cells=700)
    one, two = (screen.of_gene(0.3) + screen.noise() for _ in range(2))
    scores = judge_embeddings(screen.labels, {"one": one, "two": two}).scores.set_index("embedding")["value"].iloc[:2]
    assert abs(scores["one"] - scores["two"]) > MARGIN, "choose another seed"
    first, second = ({"one": one, "two": two}, {"two": two, "one": one})
    assert (
        judge_embeddings(screen.labels, first).best == judge_embeddings(screen.labels, second).best == scores.idxmax()
    )
    assert "uncertain" in judge_embeddings(screen.labels, first).text


@pytest.mark.parametrize("n_unseen", [0, 4, MIN_UNSEEN_PERTURBATIONS])
def test_judge_embeddings_memorised_labels_lose_with_enough_unseen_labels(n_unseen):
    screen = Screen(n_genes=30, n_cells=4_000, n_unseen=n_unseen)
    noise, seen = screen.noise(), (screen.gene <= 30 - n_unseen)[:, None]
    inputs = screen.of_gene(0.3) + noise
    memorised = screen.of_gene(0.1) + seen * screen.effects(screen.gene, 1.0, 9) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "memorised": memorised})
    assert verdict.best == ("inputs" if n_unseen == MIN_UNSEEN_PERTURBATIONS else "memorised")
    groups = {"not trained on" in measure for measure in verdict.scores["measure"]}
    assert (True in groups) == (n_unseen > 0)
    assert any("Every gene was trained on" in note for note in verdict.notes) == (n_unseen == 0)


@pytest.mark.parametrize("same", [False, True])
def test_judge_embeddings_positions_given_uses_replicates_elsewhere(same):
    """Each gene has one position in wells 0 to 2 and another one in wells 3 to 5, or the same in all."""
    screen = Screen(n_genes=12, n_wells=6, n_cells=3_000)
    position = screen.gene if same else screen.gene + 20 * (screen.well // 3)
    screen.more["position"] = position.astype(str)
    noise = screen.noise()
    verdict = judge_embeddings(
        screen.labels,
        {"inputs": screen.of_gene(0.4) + noise, "positions": screen.effects(position, 0.8, 5) + noise},
    )
    assert verdict.best == ("positions" if same else "inputs")
    assert ("another position" in verdict.text) != same
    assert any("position" in note for note in verdict.notes) == same


def make_nested_screen(**more: Any) -> Screen:
    """Return a screen of two weeks (its wells): each gene lies in one week, controls lie in both."""
    screen = Screen(n_genes=12, n_wells=2, n_cells=3_000)
    keep = (screen.gene == 0) | (screen.gene % 2 == screen.well)
    for name in ("gene", "well", "is_train"):
        setattr(screen, name, getattr(screen, name)[keep])
    screen.more = {"y_name": "gene"} | more
    return screen


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("mechanisms", "another gene of the same moa in another well"),
        ("guides", "another guide of the same gene"),
        ("places", "the same gene in another plate"),
        (None, "probes of single held-out cells"),
    ],
)
def test_judge_embeddings_nested_design_uses_available_labels(column, words):
    screen = make_nested_screen()
    n = len(screen.gene)
    guide, plate = screen.gene * 3 + screen.rng.integers(3, size=n), screen.well * 3 + screen.rng.integers(3, size=n)
    mechanism = (screen.gene - 1) // 4  # genes 1 to 4, two of them in each week, share a mechanism
    of_column = {"mechanisms": ("moa", mechanism), "guides": ("guide", guide), "places": ("plate", plate)}
    if column:
        name, codes = of_column[column]
        screen.more[column] = {name: codes.astype(str)}
    effect = screen.effects(mechanism + 1, 0.5, 3) + screen.of_gene(0.3)
    noise = screen.noise()
    verdict = judge_embeddings(
        screen.labels, {"inputs": effect / 2 + screen.of_well(1.0) + noise, "clean": effect + noise}
    )
    assert verdict.best == "clean" and words in verdict.text


def test_answer_questions_unknown_mechanism_is_excluded():
    """Genes 9 to 12 have no mechanism: they are neither positives of each other nor negatives."""
    screen = make_nested_screen()
    mechanism = np.where(screen.gene > 8, -1, (screen.gene - 1) // 4)
    known = np.array(["a", "b", ""], dtype=object)[np.where(screen.gene == 0, -1, mechanism)]
    screen.more["mechanisms"] = {"moa": known}
    z = screen.effects(mechanism + 1, 0.5, 3) + screen.noise()
    found = next(answer_questions(screen.labels, {"z": z}))
    assert found is not None and list(found.labels) == ["a", "b"]
    moved = z + 9 * (screen.gene > 8)[:, None] * screen.rng.normal(size=N_DIMENSIONS)
    again = next(answer_questions(screen.labels, {"z": moved}))
    assert again is not None
    pd.testing.assert_frame_equal(found.tables["z"], again.tables["z"])


def test_judge_embeddings_replicates_in_one_week_best_lacks_week_effect():
    """The inputs score highest, because replicates lie in the same week and the inputs separate the weeks."""
    screen = make_nested_screen()
    plate = screen.well * 3 + screen.rng.integers(3, size=len(screen.gene))
    screen.more["places"] = {"plate": plate.astype(str)}
    noise = screen.noise()
    inputs, clean = screen.of_gene(0.4) + screen.of_well(2.0) + noise, screen.of_gene(0.3) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "clean": clean})
    scores = verdict.scores.set_index("embedding")["value"].iloc[:2]
    assert verdict.best == "clean" and scores["inputs"] > scores["clean"]


@pytest.mark.parametrize(
    ("size", "with_mechanisms", "expected"), [(0.25, True, "clean"), (0.25, False, "inputs"), (0.0, True, "inputs")]
)
def test_judge_embeddings_uncertain_order_is_decided_by_mechanism_if_given(size, with_mechanisms, expected):
    screen = Screen(n_genes=12, n_wells=6, n_cells=2_400)
    mechanism = np.where(screen.gene > 0, (screen.gene - 1) // 2, -1)
    if with_mechanisms:
        screen.more["mechanisms"] = {"moa": np.where(mechanism < 0, "", mechanism.astype(str))}
    noise, own = screen.noise(), screen.of_gene(0.3)
    inputs, clean = own + noise, 0.5 * own + screen.effects(mechanism + 1, size, 6) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "clean": clean})
    assert verdict.best == expected
    assert ("of the same moa" in verdict.text) == (expected == "clean")


def test_judge_embeddings_one_gene_per_well_best_is_clean():
    screen = Screen(n_genes=8, n_wells=27, n_cells=2_700)
    screen.gene = screen.well % 9
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + screen.of_well(0.6) + noise
    assert best_embedding(screen, inputs=inputs, clean=screen.of_gene(0.3) + screen.of_well(0.1) + noise) == "clean"


def test_judge_embeddings_one_well_per_gene_compares_with_control_wells():
    """Half of the wells hold controls; differences as large as those between these wells are no evidence."""
    screen = Screen(n_genes=10, n_wells=20, n_cells=4_000)
    screen.gene = np.where(screen.well < 10, screen.well + 1, 0)
    noise = screen.noise()
    wells = screen.of_well(1.0) + noise
    assert best_embedding(screen, inputs=wells) is None
    assert best_embedding(screen, inputs=wells, clean=screen.of_gene(0.5) + screen.of_well(0.05) + noise) == "clean"


@pytest.mark.parametrize("what", ["noise", "point", "wells"])
def test_judge_embeddings_nothing_above_chance_best_is_none(what):
    screen = Screen()
    z = {"noise": screen.noise(), "point": np.ones((1_500, 3)), "wells": screen.of_well() + screen.noise(0.1)}[what]
    verdict = judge_embeddings(screen.labels, {"inputs": z, "again": z})
    assert verdict.best is None and "No embedding is called best" in verdict.text


def test_judge_embeddings_few_held_out_cells_best_is_none():
    screen = Screen()
    screen.is_train[:] = True
    screen.is_train[:49] = False
    assert best_embedding(screen, inputs=screen.of_gene(9.0)) is None


def test_judge_embeddings_one_environment_no_controls_returns_best():
    screen = Screen(n_wells=1)
    screen.more["is_control"] = np.zeros(1_500, dtype=bool)
    verdict = judge_embeddings(
        screen.labels, {"inputs": screen.of_gene(0.2) + screen.noise(), "mine": screen.of_gene(1.0)}
    )
    assert verdict.best == "mine"


@pytest.mark.parametrize("named_controls", [True, False])
def test_predict_environments_wells_differing_in_variance_are_detected(named_controls):
    """A linear probe cannot detect wells that differ in variance only; the perturbation must not help."""
    screen = Screen(n_genes=3, n_wells=2, n_cells=3_000)
    if not named_controls:
        screen.more["is_control"] = np.zeros(3_000, dtype=bool)
    noise = screen.noise()
    scaled = noise * np.where(screen.well == 0, 1.0, 2.0)[:, None]
    (measure,) = predict_environments(screen.labels, {"noise": noise, "scaled": scaled}, seed=0).values()
    assert measure.scores["scaled"].value > 0.8 and abs(measure.scores["noise"].value - 0.5) < 0.1
    assert ("controls" in measure.words) == named_controls


def test_predict_environments_nested_genes_score_is_near_chance():
    screen = make_nested_screen()
    (measure,) = predict_environments(screen.labels, {"genes": screen.of_gene(5.0) + screen.noise()}, seed=0).values()
    assert measure.scores["genes"].value < 0.6


def test_answer_questions_scaled_embedding_resamples_are_paired():
    """Two embeddings that differ by a scale have equal scores in every resample."""
    screen = Screen()
    z = screen.of_gene(0.3) + screen.noise()
    found = next(answer_questions(screen.labels, {"one": z, "two": 7 * z}))
    assert found is not None
    measure = found.measure(np.full(len(found.labels), True), seed=0)
    difference = measure.scores["one"].minus(measure.scores["two"])
    np.testing.assert_allclose(difference.draws, 0, atol=1e-12)
    assert isinstance(measure.table(), pd.DataFrame) and len(measure.table()) == 2
