"""The verdict of a run, on embeddings whose content is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from scbd._workflows.candidates import CellLabels
from scbd._workflows.compare import MIN_UNSEEN_PERTURBATIONS
from scbd._workflows.evidence import answer_first_question, predict_environments
from scbd._workflows.verdict import MARGIN, judge_embeddings

pytestmark = pytest.mark.filterwarnings("ignore:Logistic regression")
N_DIMENSIONS = 24


class Screen:
    """Cells of some genes and controls in wells, and embeddings made of what genes and wells do to them."""

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
        """Return what each value of a label does to its cells, ``(N, D)``."""
        rng = np.random.default_rng(seed)
        return size * rng.normal(size=(codes.max() + 1, N_DIMENSIONS))[codes]

    def noise(self, size: float = 1.0) -> np.ndarray:
        return size * self.rng.normal(size=(len(self.gene), N_DIMENSIONS))

    def of_gene(self, size: float = 1.0) -> np.ndarray:
        return self.effects(self.gene, size, 1)

    def of_well(self, size: float = 1.0) -> np.ndarray:
        return self.effects(self.well, size, 2)


def named(screen: Screen, **embeddings: np.ndarray) -> str | None:
    return judge_embeddings(screen.labels, embeddings).best


def test_judge_map_and_cloud_names_the_map():
    """A standardised embedding hides the well from every probe and shows little of genes; a map shows both."""
    screen = Screen()
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + screen.of_well(1.0) + noise
    cloud = screen.of_gene(0.1) + noise
    mapped = screen.of_gene(0.5) + screen.of_well(0.3) + noise
    embeddings = {"inputs": inputs, "cloud": cloud, "map": mapped}
    assert named(screen, **embeddings) == "map"
    (measure,) = predict_environments(screen.labels, embeddings, seed=0).values()
    f1 = {name: score.value for name, score in measure.scores.items()}
    assert f1["cloud"] < f1["map"] < f1["inputs"]


def test_judge_perturbations_in_some_environments_only_does_not_take_design_for_batch():
    """Genes 1 to 6 lie in one of three pairs of weeks: knowing the gene predicts the week."""
    screen = Screen(n_genes=6, n_wells=6, n_cells=2_000)
    pair = (screen.gene - 1) // 2
    keep = (screen.gene == 0) | (screen.well // 2 == pair)
    for name in ("gene", "well", "is_train"):
        setattr(screen, name, getattr(screen, name)[keep])
    noise = screen.noise()
    inputs = screen.of_gene(0.5) + screen.of_well(0.4) + noise
    assert named(screen, inputs=inputs, perfect=screen.of_gene(1.0) + 0.5 * noise) == "perfect"


@pytest.mark.parametrize(("gain", "expected"), [(0.0, "inputs"), (0.4, "mine")])
def test_judge_equal_scores_name_the_simplest_and_others_the_highest(gain, expected):
    screen = Screen()
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "mine": inputs + screen.of_gene(gain)})
    scores = verdict.scores.set_index("embedding")["value"].iloc[:2]
    assert verdict.best == expected
    assert (scores["mine"] > scores["inputs"] + MARGIN) == (expected == "mine")


def test_judge_uncertain_lead_is_named_and_called_uncertain():
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
def test_judge_memorised_labels_win_only_while_too_few_perturbations_are_unseen(n_unseen):
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
def test_judge_positions_given_counts_replicates_at_other_positions_where_there_are_any(same):
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


def nested(**more: Any) -> Screen:
    """Each gene lies in one of two weeks, controls in both; cells also lie on six plates, three in each week."""
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
def test_judge_perturbations_in_one_environment_each_uses_what_the_design_offers(column, words):
    screen = nested()
    n = len(screen.gene)
    guide, plate = screen.gene * 3 + screen.rng.integers(3, size=n), screen.well * 3 + screen.rng.integers(3, size=n)
    mechanism = (screen.gene - 1) // 4  # genes 1 to 4, two of them in each week, share one
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


def test_judge_perturbations_of_unknown_mechanism_take_no_part():
    """Genes 9 to 12 have no label: they are neither one mechanism nor negatives."""
    screen = nested()
    mechanism = np.where(screen.gene > 8, -1, (screen.gene - 1) // 4)
    known = np.array(["a", "b", ""], dtype=object)[np.where(screen.gene == 0, -1, mechanism)]
    screen.more["mechanisms"] = {"moa": known}
    z = screen.effects(mechanism + 1, 0.5, 3) + screen.noise()
    found = answer_first_question(screen.labels, {"z": z})
    assert found is not None and list(found.labels) == ["a", "b"]
    moved = z + 9 * (screen.gene > 8)[:, None] * screen.rng.normal(size=N_DIMENSIONS)
    again = answer_first_question(screen.labels, {"z": moved})
    assert again is not None
    pd.testing.assert_frame_equal(found.tables["z"], again.tables["z"])


def test_judge_replicates_within_an_environment_does_not_name_what_keeps_it():
    """The inputs retrieve replicates best, which here lie in the same week, and separate the weeks."""
    screen = nested()
    plate = screen.well * 3 + screen.rng.integers(3, size=len(screen.gene))
    screen.more["places"] = {"plate": plate.astype(str)}
    noise = screen.noise()
    inputs, clean = screen.of_gene(0.4) + screen.of_well(2.0) + noise, screen.of_gene(0.3) + noise
    verdict = judge_embeddings(screen.labels, {"inputs": inputs, "clean": clean})
    scores = verdict.scores.set_index("embedding")["value"].iloc[:2]
    assert verdict.best == "clean" and scores["inputs"] > scores["clean"]


def test_judge_one_perturbation_per_well_competes_with_those_of_all_wells():
    screen = Screen(n_genes=8, n_wells=27, n_cells=2_700)
    screen.gene = screen.well % 9
    noise = screen.noise()
    inputs = screen.of_gene(0.3) + screen.of_well(0.6) + noise
    assert named(screen, inputs=inputs, clean=screen.of_gene(0.3) + screen.of_well(0.1) + noise) == "clean"


def test_judge_one_well_per_perturbation_compares_wells_with_wells_of_controls():
    """Half of the wells hold controls: wells that differ as much as these show nothing."""
    screen = Screen(n_genes=10, n_wells=20, n_cells=4_000)
    screen.gene = np.where(screen.well < 10, screen.well + 1, 0)
    noise = screen.noise()
    wells = screen.of_well(1.0) + noise
    assert named(screen, inputs=wells) is None
    assert named(screen, inputs=wells, clean=screen.of_gene(0.5) + screen.of_well(0.05) + noise) == "clean"


@pytest.mark.parametrize("what", ["noise", "point", "wells"])
def test_judge_nothing_above_chance_names_nothing(what):
    screen = Screen()
    z = {"noise": screen.noise(), "point": np.ones((1_500, 3)), "wells": screen.of_well() + screen.noise(0.1)}[what]
    verdict = judge_embeddings(screen.labels, {"inputs": z, "again": z})
    assert verdict.best is None and "No embedding is called best" in verdict.text


def test_judge_few_held_out_cells_names_nothing():
    screen = Screen()
    screen.is_train[:] = True
    screen.is_train[:49] = False
    assert named(screen, inputs=screen.of_gene(9.0)) is None


def test_judge_without_controls_and_with_one_environment_answers():
    screen = Screen(n_wells=1)
    screen.more["is_control"] = np.zeros(1_500, dtype=bool)
    verdict = judge_embeddings(
        screen.labels, {"inputs": screen.of_gene(0.2) + screen.noise(), "mine": screen.of_gene(1.0)}
    )
    assert verdict.best == "mine"


@pytest.mark.parametrize("named_controls", [True, False])
def test_predict_environments_variance_alone_is_found_by_the_strongest_probe(named_controls):
    """Wells of equal means that differ in variance deceive a linear probe; the perturbation must not help."""
    screen = Screen(n_genes=3, n_wells=2, n_cells=3_000)
    if not named_controls:
        screen.more["is_control"] = np.zeros(3_000, dtype=bool)
    noise = screen.noise()
    scaled = noise * np.where(screen.well == 0, 1.0, 2.0)[:, None]
    (measure,) = predict_environments(screen.labels, {"noise": noise, "scaled": scaled}, seed=0).values()
    assert measure.scores["scaled"].value > 0.8 and abs(measure.scores["noise"].value - 0.5) < 0.1
    assert ("controls" in measure.words) == named_controls


def test_predict_environments_genes_in_one_week_each_do_not_give_the_week_away():
    screen = nested()
    (measure,) = predict_environments(screen.labels, {"genes": screen.of_gene(5.0) + screen.noise()}, seed=0).values()
    assert measure.scores["genes"].value < 0.6


def test_retrieve_resamples_are_paired():
    """Two embeddings that differ by a scale have equal scores in every resample."""
    screen = Screen()
    z = screen.of_gene(0.3) + screen.noise()
    found = answer_first_question(screen.labels, {"one": z, "two": 7 * z})
    assert found is not None
    measure = found.measure(np.full(len(found.labels), True), seed=0)
    difference = measure.scores["one"].minus(measure.scores["two"])
    np.testing.assert_allclose(difference.draws, 0, atol=1e-12)
    assert isinstance(measure.table(), pd.DataFrame) and len(measure.table()) == 2
