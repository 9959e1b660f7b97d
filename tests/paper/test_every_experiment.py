"""Run the experiments of `python benchmarks/paper list`, from files in the official layout to tables and figures.

Each system, each data set and each report is run once. An experiment is not run if others cover all of its systems,
data sets and reports. Trials that repeat the settings of an earlier experiment on other cells are reduced to a few,
which the report needs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers.dataset_files import (
    breinig2015_table,
    camelyon17_table,
    cpjump1_table,
    write_camelyon17,
    write_domains,
    write_lmdb,
    write_mnist,
    write_real_images,
    write_real_wells,
    write_rxrx1,
)
from helpers.reference_images import is_drawn

import paper
from paper import picture_scores
from paper.datasets import DATASETS
from paper.loaders import PACS_CLASSES, PACS_DOMAINS, VLCS_CLASSES, VLCS_DOMAINS
from paper.reproduce import EXPERIMENTS, written
from paper.runner import run_trials
from paper.systems import parts_of
from paper.trials import Trial
from scbd import datasets
from scbd.corrections._correct import CORRECTIONS

pytestmark = [
    pytest.mark.filterwarnings("ignore:z_c has collapsed", "ignore:.*ConvergenceWarning", "ignore:Cells of equal"),
    pytest.mark.usefixtures("permuted_once"),
]
GENES = ["nontargeting", "AAAS", "NUP107", "NUP133", "H2-K1"]
# not run here: other experiments cover their trials. Their reports are also covered by other experiments, or
# test_results.py writes them from stored rows.
ALIKE = {"camelyon17-systems", "camelyon17-ablations", "pacs-systems", "vlcs-systems", "cmnist-alphas", "pacs-alphas"}
ALIKE |= {"funk22", "screen", "screen-variance", "screen-map", "screen-lengths"}
# experiments that write tables, but no figures
UNDRAWN = {"cmnist-variance", "screen-neighbours"}
UNDRAWN |= {
    "cmnist-preset",
    "real-images",
    "cpjump1",
    "cpjump1-settings",
    "cpjump1-ablations",
    "breinig2015",
    "new-plates",
    "new-plates-cpjump1",
}
UNDRAWN |= {"real-wells"}
UNDRAWN |= {"effect-pictures", "hidden-cmnist", "hidden-screen", "hidden-cpjump1"}
RUN = [name for name in EXPERIMENTS if name not in ALIKE]
# maximum number of trials per experiment that repeat the settings of earlier experiments
REPEATED = 4
RESULTS = Path(paper.__file__).with_name("results")


def mnist(folder: Path) -> Path:
    return write_mnist(folder)


def camelyon17(folder: Path) -> Path:
    centers = [0, 3, 4, 0, 3, 4, 1, 2] * 12
    splits = [0, 0, 0, 1, 1, 1, 0, 0] * 12
    return write_camelyon17(folder, camelyon17_table([f"{i // 8:03d}" for i in range(96)], centers, splits))


def rxrx1(folder: Path) -> Path:
    rows = [
        ("HEPG2", f"HEPG2-{e:02d}", 1, f"B{sirna:02d}", site, sirna, dataset)
        for e, dataset in enumerate(["train", "train", "train", "val", "test"])
        for sirna in range(12)
        for site in (1, 2)
    ]
    columns = ["cell_type", "experiment", "plate", "well", "site", "sirna_id", "dataset"]
    return write_rxrx1(folder, pd.DataFrame(rows, columns=columns), size=64)


def pacs(folder: Path) -> Path:
    return write_domains(folder, PACS_DOMAINS, PACS_CLASSES, n=6)


def vlcs(folder: Path) -> Path:
    return write_domains(folder, VLCS_DOMAINS, VLCS_CLASSES, n=6)


def funk22(folder: Path) -> Path:
    rng, values = np.random.default_rng(0), {}
    for i in range(150):
        crop = rng.integers(0, 2000 + 500 * (i % 5), (4, 100, 100), dtype=np.uint16)
        values[f"{i:04d}_2020_6W_A{i % 3}_{i}_{GENES[i % 5]}_{i}"] = crop.tobytes()
    cells = datasets.funk22(write_lmdb(folder.with_name("crops"), values))
    cells.obs["sgRNA"], cells.obsm["X_cellprofiler"] = cells.obs["gene"], rng.normal(size=(150, 4))
    cells.write_h5ad(folder)
    return folder


def funk22_plates(folder: Path) -> Path:
    rng, values = np.random.default_rng(0), {}
    for i in range(240):
        gene, plate = GENES[i % 5], "ABC"[i // 5 % 3]
        crop = rng.random((4, 24, 24), dtype=np.float32) * (1 + i % 5)
        values[f"{gene};{gene}{i // 120};20200202_6W-LaC024{plate};A{i // 15 % 2};1;{i}"] = (crop / 5).tobytes()
    return write_lmdb(folder, values)


def funk22_cellprofiler(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(200, 4)), columns=list("abcd"))
    genes = np.resize(GENES, 200)
    table.assign(gene_symbol_0=genes, sgRNA_0=genes, plate="P", well=np.arange(200) // 50).to_parquet(folder)
    return folder


def cpjump1(file: Path) -> Path:
    cpjump1_table().to_parquet(file)
    return file


def breinig2015(file: Path) -> Path:
    breinig2015_table().to_parquet(file)
    return file


FILES = {
    **dict.fromkeys(("bbbc021_crops", "mitocheck_crops", "mitosis_scanners"), (write_real_images, "crops")),
    "bbbc021_wells": (write_real_wells, "wells"),
    "breinig2015": (breinig2015, "cells.parquet"),
    "camelyon17": (camelyon17, "camelyon17_v1.0"),
    "colored_mnist": (mnist, "mnist"),
    "cpjump1": (cpjump1, "wells.parquet"),
    "funk22": (funk22, "screen.h5ad"),
    "funk22_cellprofiler": (funk22_cellprofiler, "features.parquet"),
    "funk22_plates": (funk22_plates, "crops"),
    "pacs": (pacs, "PACS"),
    "rxrx1": (rxrx1, "rxrx1_v1.0"),
    "vlcs": (vlcs, "VLCS"),
}
# texts that the table must contain, in addition to the names of the systems
TOLD = {f"hidden-{name}": ["known", "inferred", "agreement"] for name in ("cmnist", "screen", "cpjump1")}
TOLD |= {"real-wells": ["new DMSO wells", "one library"]}
TOLD |= {"effect-pictures": ["mean difference in the well", "hard"]}
TOLD |= {"counterfactuals": ["with encoders", "colour moved"]}
# profile tables, whose experiments do not set a number of steps
TABLES = {"bbbc021_wells", "breinig2015", "cpjump1", "cpjump1_hidden", "rhogtpase_wells"}
# smaller sizes of data sets that accept a size
SMALLER: dict[str, dict[str, Any]] = {
    "colored_mnist": {"n_train": 200, "n_test": 40},
    "simulated_screen": {"n_cells": 500, "n_wells": 2, "n_plate_maps": 1, "image_size": 16, "n_complexes": 3}
    | {"guides_per_gene": 1},
    "simulated_screen_fold": {"n_cells": 600, "n_wells": 8, "plate_wells": 6, "n_plate_maps": 1}
    | {"image_size": 16, "n_complexes": 3, "genes_per_complex": 3},
    "simulated_screen_plates": {"n_cells": 900, "n_complexes": 3, "n_wells": 18, "control_fraction": 0.2}
    | {"image_size": 16},
    "drawn_screen_fold": {"n_cells": 600},
}
SMALLER |= {
    "colored_mnist_hidden": SMALLER["colored_mnist"] | {"n_inferred": 2},
    "simulated_screen_untold": SMALLER["simulated_screen_fold"],
    "simulated_screen_hidden": SMALLER["simulated_screen_fold"] | {"n_inferred": 8},
    "simulated_screen_half_hidden": SMALLER["simulated_screen_fold"] | {"n_inferred": 4},
}


def shrink_trial(trial: Trial) -> Trial:
    """Return the trial with fewer steps and fewer cells."""

    def shrink_settings(settings: dict[str, Any]) -> dict[str, Any]:
        changed = {name: max(2, n // 20) for name, n in settings.items() if name in ("max_steps", "pretrain_steps")}
        changed |= {"batch_size": max(16, settings["batch_size"] // 8)} if "batch_size" in settings else {}
        changed |= {"decoder": shrink_settings(settings["decoder"])} if "decoder" in settings else {}
        return settings | changed

    data = {**trial.data, **SMALLER.get(trial.dataset, {})}
    model = shrink_settings(dict(trial.model)) | ({"image_size": 32} if "image_size" in trial.model else {})
    training = shrink_settings(dict(trial.training)) | ({"max_steps": 5} if trial.dataset in TABLES else {})
    return replace(trial, data=data, model=model, training=training)


def describe_settings(trial: Trial) -> str:
    """Describe a trial by its protocol, features, inputs of its corrections and non-numeric settings."""
    features, corrections = parts_of(trial.system)
    told = [CORRECTIONS[name].needs for name in corrections]  # tests/corrections tests their results
    words = [{k: v for k, v in sorted(d.items()) if not is_number(v)} for d in (trial.model, trial.training)]
    return repr([trial.protocol, features, *told, *words])


def describe_data_and_settings(trial: Trial) -> str:
    """Describe a trial by its data set and its settings."""
    return trial.dataset + describe_settings(trial)


def select_trials(name: str) -> list[Trial]:
    """Return the last trial of each kind: in a sweep, the one with the largest alpha.

    Of trials whose settings occur in an earlier experiment, only the first few are returned.
    """
    *others, own = (map(shrink_trial, EXPERIMENTS[each].trials("smoke", None)) for each in RUN[: RUN.index(name) + 1])
    before = {describe_settings(trial) for trials in others for trial in trials}
    trials = {describe_data_and_settings(trial): trial for trial in own}.values()
    repeated = [trial for trial in trials if describe_settings(trial) in before]
    return [trial for trial in trials if trial not in repeated[REPEATED:]]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_experiments_not_run_are_covered_by_experiments_run():
    run, alike = ([EXPERIMENTS[name].trials("smoke", None) for name in names] for names in (RUN, sorted(ALIKE)))
    of_run, of_alike = ([trial for trials in grids for trial in trials] for grids in (run, alike))
    assert {trial.dataset for trial in of_alike} <= {trial.dataset for trial in of_run}
    assert {describe_settings(trial) for trial in of_alike} <= {describe_settings(trial) for trial in of_run}
    reports = {EXPERIMENTS[name].report for name in RUN}
    assert all(EXPERIMENTS[name].report in reports or (RESULTS / name / "table.md").is_file() for name in ALIKE)


@pytest.mark.parametrize("name", RUN)
def test_run_trials_each_experiment_writes_table_and_figures(name, tmp_path, monkeypatch):
    for steps, n in {
        "_PASSES": 0,
        "_LEAST_STEPS": 2,
    }.items():  # shorten the training of the digit reader, which is repeated for each trial
        monkeypatch.setattr(picture_scores, steps, n)
    net = pd.DataFrame({"source": "Nup107-160", "target": ["NUP107", "NUP133"]})
    for dataset in ("funk22", "funk22_cellprofiler", "funk22_plates"):  # otherwise CORUM would be downloaded
        monkeypatch.setitem(DATASETS, dataset, replace(DATASETS[dataset], relations=lambda adata: net))
    trials = select_trials(name)
    make, file = FILES.get(trials[0].dataset, (None, ""))
    path = None if make is None else make(tmp_path / file)
    out = tmp_path / "out"
    run_trials(trials, out, path=path)
    frame = written(name, trials, out)
    plt.close("all")
    assert list(frame["key"]) == [trial.key for trial in trials]
    table = (out / "table.md").read_text()
    for system in {trial.system for trial in trials}:
        assert f"| {system} |" in table  # settings and duration of the runs
    assert all(told in table for told in TOLD.get(name, []))
    figures = list(out.glob("*.png"))
    assert bool(figures) == (name not in UNDRAWN) and all(map(is_drawn, figures))
