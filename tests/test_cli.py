from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import anndata
import docstring_parser
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells
from helpers.reference_images import is_drawn
from PIL import Image

import scbd
from scbd import cli
from scbd._workflows import speed as speed_module
from scbd.cli import CellOptions, ModelOptions, TrainingOptions, main
from scbd.data import open_screen

QUICK = ["--max-steps", "3", "--batch-size", "24", "--accelerator", "cpu"]


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_run_images_writes_report_settings_and_embeddings(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    command = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "plate", "well"]
    command += ["--out", str(tmp_path / "out"), "--encoder", "small", "--e-columns", "crossed"]
    command += ["--style-target", "none", *QUICK]
    assert main(command) == 0
    said = capsys.readouterr()
    assert (tmp_path / "out" / "verdict.txt").read_text() in said.out
    assert str(tmp_path / "out" / "report.html") in said.out
    assert "plate × well" in set(pd.read_csv(tmp_path / "out" / "metrics.csv")["label"])
    decided = "3 steps of 24 cells", "flipped", "standardised within", "held out"
    assert all(said.err.count(part) == 1 for part in decided), said.err
    asked = json.loads((tmp_path / "out" / "settings.json").read_text())["data"]
    assert asked["e_columns"] == "crossed"
    embedded = anndata.read_h5ad(tmp_path / "out" / "cells.h5ad")
    assert "X_scbd_c" in embedded.obsm and "X_scbd_s" not in embedded.obsm
    assert is_drawn(tmp_path / "out" / "umap.png")
    assert main(command) == 2  # existing results are not overwritten
    assert "out" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_run_table_writes_model_metrics_and_cells(tmp_path):
    wells = make_wells()
    table = pd.concat([wells.obs, wells.to_df().add_prefix("Cells_")], axis=1)
    table.to_csv(tmp_path / "wells.csv", index=False)
    command = ["run", str(tmp_path / "wells.csv"), "--y-key", "compound", "--e-key", "plate", "--control", "DMSO"]
    command += ["--position-key", "well", "--whitening", "lda", "--out", str(tmp_path / "out"), *QUICK]
    assert main(command) == 0
    assert {"model", "metrics.csv", "cells.h5ad"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.filterwarnings("ignore:z_c has")
def test_select_alpha_prints_alphas(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    command = ["select-alpha", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well"]
    assert main([*command, "--out", str(tmp_path / "out"), "--alphas", "0", "0.01", "--encoder", "small", *QUICK]) == 0
    assert "0.01" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["images", "table"])
def test_benchmark_prints_rates_and_stops_after_measured_time(kind, tmp_path, capsys, monkeypatch):
    clocks: list[speed_module._SpeedCallback] = []

    class Clock(speed_module._SpeedCallback):
        def __init__(self) -> None:
            clocks.append(self)

    monkeypatch.setattr(speed_module, "_SpeedCallback", Clock)
    monkeypatch.setattr(speed_module, "_MEASURED_SECONDS", 1e-6)
    command = ["benchmark", str(tmp_path / "cells.h5ad"), "--e-key", "plate", "--accelerator", "cpu"]
    if kind == "images":
        make_cells().write_h5ad(tmp_path / "cells.h5ad")
        command += ["--y-key", "gene", "--encoder", "small", "--max-steps", "200"]
    else:
        make_wells().write_h5ad(tmp_path / "cells.h5ad")
        command += ["--y-key", "compound", "--control", "DMSO", "--layer", "X", "--max-steps", "200"]
    assert main(command) == 0
    said = capsys.readouterr().out
    rates = re.findall(r"(reading|training|embedding) +([\d,]+) cells/s", said)
    assert [name for name, _ in rates] == ["reading", "training", "embedding"]
    assert all(int(rate.replace(",", "")) > 0 for _, rate in rates)
    assert "On cpu, 1 threads" in said and "200 steps" in said and "0:00:00" not in said
    assert len(clocks[0]._ends) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


def test_convert_two_plates_and_inspect_print_summary(tmp_path, capsys):
    plates = []
    for number in range(2):
        plates.append(tmp_path / f"plate_{number}.h5ad")
        make_cells(20, seed=number).write_h5ad(plates[-1])
    screen = tmp_path / "screen.zarr"
    assert main(["convert", *map(str, plates), "--y-key", "gene", "--out", str(screen), "--verify"]) == 0
    assert "40 cells" in capsys.readouterr().out and open_screen(screen).n_obs == 40
    assert main(["inspect", str(screen)]) == 0
    assert "scbd run" in capsys.readouterr().out


def test_convert_one_table_for_two_plates_is_refused(tmp_path, capsys):
    plates = [str(tmp_path / f"{name}.npy") for name in "ab"]
    for plate in plates:
        np.save(plate, make_cells(20).obsm["single_cell_images"])
    make_cells(20).obs.to_csv(tmp_path / "t.csv", index=False)
    command = ["--table", str(tmp_path / "t.csv"), "--y-key", "gene", "--out", str(tmp_path / "s.zarr")]
    assert main(["convert", *plates, *command]) == 2
    assert "its own table" in capsys.readouterr().err and not (tmp_path / "s.zarr").exists()
    assert main(["convert", plates[0], *command]) == 0


@pytest.mark.parametrize("fit", ["pad", "12"])
def test_convert_fit_images_of_several_sizes_have_equal_size(fit, tmp_path):
    for label, side in (("a", 8), ("b", 12)):
        (tmp_path / "crops" / label).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(np.full((side, side), 1000, "uint16")).save(tmp_path / "crops" / label / f"{number}.png")
    how = ["--fit", fit, "--dtype", "uint8", "--intensity-range", "0", "1000", "--compression", "zstd"]
    assert main(["convert", str(tmp_path / "crops"), "--y-key", "label", *how, "--out", str(tmp_path / "s.zarr")]) == 0
    screen = open_screen(tmp_path / "s.zarr")
    bright = (np.asarray(screen.obsm["single_cell_images"]) == 255).sum(axis=(1, 2, 3))
    assert dict(zip(screen.obs["label"], bright, strict=True)) == {"a": 64, "b": 144}


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["run", "nowhere.h5ad", "--y-key", "gene", "--e-key", "well", "--out", "out"], "nowhere.h5ad"),
        (["run", "nowhere.h5ad", "--y-key", "gene", "--out", "out"], "--e-key"),
        (["inspect", "nowhere.h5ad"], "nowhere.h5ad"),
        (["run", "x.h5ad", "--y-key", "a", "--e-key", "b", "--out", "out", "--max-stepss", "3"], "--max-steps"),
        (["runs"], "run"),
    ],
)
def test_main_invalid_arguments_exits_with_2(command, named, capsys):
    assert main(command) == 2
    printed = capsys.readouterr()
    assert named in printed.err + printed.out and "Traceback" not in printed.err + printed.out


def test_training_options_defaults_equal_arguments_of_train():
    train = inspect.signature(scbd.SCBDModel.train).parameters
    for field in fields(TrainingOptions):
        assert field.default == train[field.name].default, field.name


def test_model_options_not_given_leave_preset_unchanged():
    assert ModelOptions().kwargs() == {"preset": "screen"}
    given = ModelOptions(preset="paper", style_target="none", augment=True)
    assert given.kwargs() == {"preset": "paper", "style_target": None, "augment": True}


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_run_preset_sets_model_that_is_saved(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    command = [
        "run",
        str(tmp_path / "cells.h5ad"),
        "--y-key",
        "gene",
        "--e-key",
        "well",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--preset", "domain_generalization", "--n-latent", "6", "--encoder", "small", *QUICK]) == 0
    model = scbd.SCBDModel.load(tmp_path / "out" / "model", adata=False)
    given = {**model.init_params_["non_kwargs"], **model.init_params_["kwargs"]["module_kwargs"]}
    assert given["preset"] == "domain_generalization" and given["n_latent"] == 6
    assert given["standardize_by"] is None and not given["standardize"] and not given["augment"]


@pytest.mark.parametrize(
    "described",
    [
        cli.inspect,
        cli.benchmark,
        cli.convert,
        cli.run,
        cli.select_alpha,
        cli.demo,
        CellOptions,
        ModelOptions,
        TrainingOptions,
    ],
)
def test_options_each_is_described_in_docstring(described):
    """The help is made from the docstrings."""
    named = {parameter.arg_name for parameter in docstring_parser.parse(described.__doc__).params}
    assert named == set(inspect.signature(described).parameters) - {"cells", "model", "training"}


def test_package_run_as_module_prints_version():
    shown = subprocess.run([sys.executable, "-m", "scbd", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"scbd {scbd.__version__}" and Path(scbd.__file__).exists()


def test_parse_args_no_augment_disables_default():
    _, bound, _ = cli.app.parse_args(["run", "x", "--y-key", "a", "--e-key", "b", "--out", "o", "--no-augment"])
    assert bound.arguments["model"].kwargs()["augment"] is False


def test_inspect_warning_is_printed_without_source_line(tmp_path):
    """The source line of a Python warning means nothing to a user of the command."""
    table = pd.DataFrame(
        {"Metadata_Plate": ["P1", "P2"] * 4, "Cells_a": [1.0, np.nan] + [2.0, 3.0] * 3, "Cells_b": 1.0}
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    command = [sys.executable, "-m", "scbd", "inspect", str(tmp_path / "t.csv")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert any(line.startswith("scbd: ") and "1 missing value in 1 row " in line for line in said.splitlines())
    assert ".py" not in said
