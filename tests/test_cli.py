from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import anndata
import numpy as np
import pytest
from anndata import AnnData
from conftest import make_cells, make_wells
from lightning.fabric.utilities.exceptions import MisconfigurationException
from pictures import is_drawn
from PIL import Image

import scbd
from scbd import SCBDModel, _progress
from scbd import _argument_values as values
from scbd._command_line import EXPERIMENTS, actions_of, parser_of_commands
from scbd.cli import completion_script, main
from scbd.data import open_screen
from scbd.model import TrainSettings


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_run(tmp_path, capsys):
    cells = make_cells()
    cells.obs["time"] = np.arange(cells.n_obs) / 7
    cells.write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "plate", "well"]
    settings = ["--out", str(tmp_path / "out"), "--encoder", "small", "--max-steps", "3", "--batch-size", "24"]
    settings += ["--e-columns", "crossed", "--continuous-covariate-keys", "time"]
    assert main([*arguments, *settings, "--accelerator", "cpu", "--perturbations-per-batch", "none"]) == 0
    printed = capsys.readouterr().out
    assert "plate × well" in printed
    asked = json.loads((tmp_path / "out" / "settings.json").read_text())["data"]
    assert asked.items() >= {"e_columns": "crossed", "continuous_covariate_keys": ["time"]}.items()
    assert str(tmp_path / "out") in printed
    assert (tmp_path / "out" / "metrics.csv").exists()
    assert main([*arguments, *settings]) == 2
    said = capsys.readouterr().err
    assert "already holds files" in said and "(--resume)" in said and "resume=True" not in said


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
def test_run_on_features(tmp_path, capsys):
    wells = make_wells()
    wells.layers["scaled"] = wells.X
    wells.write_h5ad(tmp_path / "wells.h5ad")
    arguments = ["run", str(tmp_path / "wells.h5ad"), "--y-key", "compound", "--e-key", "plate", "--layer", "scaled"]
    arguments += ["--max-steps", "3", "--accelerator", "cpu", "--control", "DMSO", "--out", str(tmp_path / "out")]
    with pytest.warns(UserWarning) as warned:
        assert main([*arguments, "--position-key", "well", "--whitening", "lda", "--clip", "5"]) == 0
    told = " ".join(str(one.message) for one in warned)
    assert "stay on disk" in told and "of all cells, as 0 of 72 were not trained on" in told
    assert "features, standardised by plate" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["data"].items() >= {"layer": "scaled", "control": "DMSO", "position_key": "well"}.items()
    assert settings["asked"]["model"].items() >= {"whitening": "lda", "clip": 5}.items()
    with pytest.warns(UserWarning, match="stay on disk"):
        assert main([*arguments[:-1], str(tmp_path / "other"), "--position-key", "Well"]) == 2
    assert "obs has no 'Well' (its keys: compound, plate, well). Did you mean 'well'?" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(", "ignore:X of ")
def test_rows_held_out_are_scored_and_controls_may_be_several(tmp_path, capsys):
    wells = make_wells(n_compounds=24, n_plates=8)
    wells.obs["compound"] = wells.obs["compound"].astype(str).replace("compound_0", "untreated")
    wells.write_h5ad(tmp_path / "wells.h5ad")
    arguments = ["run", str(tmp_path / "wells.h5ad"), "--y-key", "compound", "--e-key", "plate", "--layer", "X"]
    arguments += ["--control", "DMSO", "untreated", "--train-size", "0.7", "--max-steps", "3", "--accelerator", "cpu"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "held-out cells" in printed and "all cells" not in printed
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["data"]["control"] == ["DMSO", "untreated"] and settings["asked"]["training"]["train_size"] == 0.7


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_a_perturbation_of_several_columns(tmp_path, capsys):
    """As `scbd inspect` says to type."""
    cells = make_cells(200)
    cells.obs["dose"] = np.where(np.arange(200) % 2, "low", "high")
    cells.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    keys, screen = ["--y-key", "gene", "dose"], str(tmp_path / "screen.h5ad")
    assert main(["convert", str(tmp_path / "cells.h5ad"), *keys, "--out", screen]) == 0
    labels = open_screen(screen).obs[["gene", "dose"]].astype(str).agg(" × ".join, axis=1)
    assert labels.is_monotonic_increasing and labels.nunique() == 8
    settings = [*keys, "--e-key", "well", "--encoder", "small", "--max-steps", "2", "--batch-size", "24"]
    settings += ["--accelerator", "cpu", "--out"]
    assert main(["run", screen, *settings, str(tmp_path / "run")]) == 0
    assert "gene × dose" in capsys.readouterr().out
    assert {"gene", "dose", "gene × dose"} <= set(anndata.read_h5ad(tmp_path / "run" / "cells.h5ad").obs)
    assert main(["select-alpha", screen, "--alphas", "0", "0.1", *settings, str(tmp_path / "alphas")]) == 0
    np.save(tmp_path / "crops.npy", cells.obsm["single_cell_images"])
    assert main(["run", str(tmp_path / "crops.npy"), *settings, str(tmp_path / "other")]) == 2
    assert "crops.npy --table … --y-key gene dose --out screen.h5ad" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "select_alpha"])
def test_what_options_name_is_no_feature(command, tmp_path, monkeypatch):
    """A label or covariate that is a number would tell the answer."""
    wells = make_wells()
    n = np.arange(wells.n_obs)
    labels = {"moa": n % 18, "batch_id": n // 18, "day": n % 2, "place": n % 18, "hours": n / 7, "cells": n, "part": 1}
    table = wells.to_df().assign(**labels, dose=0.5, donor=2)
    table.to_csv(tmp_path / "wells.csv", index=False)
    given: dict[str, AnnData] = {}
    monkeypatch.setattr(f"scbd.workflows.{command}", lambda adata, **_: given.update(cells=adata) or stop())

    def stop():
        raise ValueError

    options = ["--y-key", "moa", "--e-key", "batch_id", "day", "--position-key", "place"]
    options += ["--out", str(tmp_path / "out")]
    options += ["--continuous-covariate-keys", "hours", "cells", "--split", "part", "--obs-columns", "dose", "donor"]
    assert main([command.replace("_", "-"), str(tmp_path / "wells.csv"), *options]) == 2
    assert given["cells"].var_names.tolist() == wells.var_names.tolist()
    assert set(given["cells"].obs) == {*labels, "dose", "donor"}


def test_columns_that_a_table_does_not_have_are_named(tmp_path, capsys):
    wells = make_wells()
    wells.to_df().join(wells.obs).to_csv(tmp_path / "wells.csv", index=False)
    wells.write_h5ad(tmp_path / "wells.h5ad")
    run = ["--e-key", "plate", "--out", str(tmp_path / "out"), "--y-key"]
    assert main(["run", str(tmp_path / "wells.csv"), *run, "compount"]) == 2
    assert "has no 'compount' (its keys: compound, plate, well). Did you mean 'compound'?" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "wells.csv"), *run, "compound", "--obs-columns", "dose"]) == 2
    said = capsys.readouterr().err
    assert "has no 'dose'" in said and "Name it with --obs-columns." in said
    assert main(["run", str(tmp_path / "wells.h5ad"), *run, "compound", "--obs-columns", "dose"]) == 2
    assert "is no table of features, and has its columns in obs already: leave --obs-columns out" in (
        capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_select_alpha(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["select-alpha", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well"]
    arguments += ["--out", str(tmp_path / "out"), "--encoder", "small", "--max-steps", "3", "--batch-size", "24"]
    assert main([*arguments, "--alphas", "0", "0.02", "--accelerator", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "(kept: accuracy of at least" in printed and str(tmp_path / "out") in printed
    assert is_drawn(tmp_path / "out" / "curve.png")
    assert main([*arguments, "--alphas", "0.02"]) == 2
    assert "give at least two different ones" in capsys.readouterr().err


def test_convert(tmp_path, capsys):
    cells = make_cells()
    cells.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    np.savez(tmp_path / "late.npz", single_cell_images=make_cells(20).obsm["single_cell_images"])
    cells.obs.head(20).to_csv(tmp_path / "late.csv")
    convert = ["convert"]
    by_gene = ["--y-key", "gene", "--out"]
    arguments = [*convert, str(tmp_path / "cells.h5ad"), *by_gene, str(tmp_path / "screen.zarr")]
    assert main([*arguments, "--compression", "lz4", "--image-size", "8", "--verify"]) == 0
    assert f"96 cells of 2 × 8 × 8 uint8: {tmp_path / 'screen.zarr'}" in capsys.readouterr().out
    assert main([*arguments, "--compression", "lz4"]) == 2
    assert "exists: it is kept" in capsys.readouterr().err
    stretched = [*convert, str(tmp_path / "cells.h5ad"), *by_gene, str(tmp_path / "wide.h5ad"), "--image-size", "8x12"]
    assert main(stretched) == 0
    assert "96 cells of 2 × 8 × 12 uint8" in capsys.readouterr().out
    late = [str(tmp_path / "late.npz"), "--table", str(tmp_path / "late.csv"), "--channels", "dna", "actin"]
    assert main([*convert, *late, *by_gene, str(tmp_path / "late.h5ad")]) == 0
    assert list(open_screen(tmp_path / "late.h5ad").var_names) == ["dna", "actin"]
    twice = [str(tmp_path / "cells.h5ad"), str(tmp_path / "." / "cells.h5ad")]
    assert main([*convert, *twice, *by_gene, str(tmp_path / "x.h5ad")]) == 2
    assert "cells.h5ad is given twice" in capsys.readouterr().err
    both = [str(tmp_path / "cells.h5ad"), *late]
    assert main([*convert, *both, *by_gene, str(tmp_path / "x.h5ad")]) == 2
    assert "--table has the rows of one plate" in capsys.readouterr().err


def test_convert_a_table_of_files_that_lie_elsewhere(tmp_path, capsys):
    (tmp_path / "plate").mkdir()
    (tmp_path / "tables").mkdir()
    for number in range(6):
        pixels = np.full((8, 8), number, np.uint8)
        pixels[0, :2] = 0, 255
        Image.fromarray(pixels).save(tmp_path / "plate" / f"{number}.png")
    table = tmp_path / "tables" / "cells.csv"
    table.write_text("path,gene\n" + "".join(f"plate/{number}.png,gene_{number % 2}\n" for number in range(6)))
    convert = ["convert", str(table), "--y-key", "gene", "--out", str(tmp_path / "screen.h5ad"), "--workers", "2"]
    assert main(convert) == 2
    assert "6 of 6 files that the table names are not there" in capsys.readouterr().err
    assert main([*convert, "--root", str(tmp_path)]) == 0
    assert "6 cells of 1 × 8 × 8 uint8" in capsys.readouterr().out


def test_convert_folders_of_crops_of_any_size(tmp_path, capsys):
    for number, gene in enumerate("abab"):
        (tmp_path / "crops" / gene).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (8 + number, 9, 3), dtype="uint8")
        Image.fromarray(pixels).save(tmp_path / "crops" / gene / f"{number}.png")
    convert = ["convert", str(tmp_path / "crops"), "--y-key", "label", "--out", str(tmp_path / "screen.h5ad")]
    assert main(convert) == 2
    assert "use --fit pad or --fit crop" in capsys.readouterr().err
    assert main([*convert, "--fit", "pad", "--channels", "2", "0", "--image-size", "8"]) == 0
    assert "4 cells of 2 × 8 × 8 uint8" in capsys.readouterr().out
    screen = open_screen(tmp_path / "screen.h5ad")
    assert screen.obs["label"].tolist() == list("aabb") and list(screen.var_names) == ["channel_2", "channel_0"]


def test_channels_reach_the_model():
    arguments = parser_of_commands().parse_args(
        ["run", "x.h5ad", "--y-key", "g", "--e-key", "w", "--out", "o", "--channels", "ER", "0"]
    )
    assert arguments.channels == ["ER", "0"]


@pytest.mark.parametrize(("text", "value"), [("pad", "pad"), ("crop", "crop"), ("64", 64), ("32x64", (32, 64))])
def test_how_crops_are_fitted(text, value):
    assert values.fit(text) == value


def test_what_the_system_says_is_said(tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "screen.h5ad")

    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    monkeypatch.setattr("scbd.data.write_screen", full)
    assert main(["convert", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--out", str(tmp_path / "s.h5ad")]) == 2
    assert "No space left on device: 'screen.h5ad'" in capsys.readouterr().err


def test_mistakes_become_one_sentence(tmp_path, capsys):
    run = ["--y-key", "gene", "--e-key", "well", "--out", str(tmp_path / "out")]
    assert main(["run", str(tmp_path / "no.h5ad"), *run]) == 2
    said = capsys.readouterr().err
    assert said.startswith("scbd: There is no file")
    assert said.count("\n") == 1
    (tmp_path / "text.h5ad").write_text("text")
    assert main(["run", str(tmp_path / "text.h5ad"), *run]) == 2
    assert "truncated or of another kind" in capsys.readouterr().err
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    assert main(["run", str(tmp_path / "cells.h5ad"), "--y-key", "genes", "--e-key", "well", "--out", "x"]) == 2
    assert "Did you mean 'gene'?" in capsys.readouterr().err


def test_a_table_of_image_files_is_to_be_converted_first(tmp_path, capsys):
    (tmp_path / "crops.csv").write_text("gene,file\na,0.png\n")
    run = ["run", str(tmp_path / "crops.csv"), "--y-key", "gene", "--e-key", "well", "--out", str(tmp_path / "out")]
    assert main(run) == 2
    assert f"(scbd convert {tmp_path / 'crops.csv'} --file-columns file --y-key gene --out" in capsys.readouterr().err


def test_warnings_and_progress_name_options_too(tmp_path, capsys, monkeypatch):
    import scbd.workflows

    def stub(**kwargs):
        _progress.say("Cheaper: style_target=None; fewer max_steps.")
        message = warnings.formatwarning("e_key='time' makes many.", UserWarning, "", 0)
        raise ValueError(message)

    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    monkeypatch.setattr(scbd.workflows, "run", stub)
    run = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", "--out", str(tmp_path / "out")]
    assert main(run) == 2
    said = capsys.readouterr().err
    assert "Cheaper: --style-target none; fewer --max-steps." in said and "--e-key time makes many." in said
    _progress.say("fewer max_steps")
    assert capsys.readouterr().err == "fewer max_steps\n"


def test_demo_and_help(tmp_path, capsys, monkeypatch):
    import pandas as pd

    import scbd.paper

    monkeypatch.setattr(
        scbd.paper, "demo", lambda out, **kwargs: pd.DataFrame({"z_c white": [0.5]}, index=["alpha = 3"])
    )
    assert main(["demo", "--out", str(tmp_path), "--alpha", "3"]) == 0
    assert "alpha = 3" in capsys.readouterr().out
    for arguments in (["--help"], ["run", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert leaving.value.code == 0
    assert "--alpha" in capsys.readouterr().out


def test_help_says_what_a_user_can_know(capsys):
    said = {command: help_of(command, capsys) for command in ("run", "reproduce", "convert")}
    assert "(default: 0.1)" in said["run"] and "(2/3; of features 0)" in said["run"]
    assert "(default: True)" not in said["run"] and "(default: None)" not in said["run"]
    assert "(default: path)" in said["convert"]
    assert "(1, 1)" not in said["convert"] + said["reproduce"]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("columns", ["60", "100", "200"])
def test_names_of_experiments_are_not_broken(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert set(EXPERIMENTS) <= set(help_of("reproduce", capsys).split())


@pytest.mark.parametrize("command", ["demo", "run", "select-alpha", "reproduce"])
def test_a_command_that_trains_says_how_long_it_takes(command, capsys):
    assert "How long " in help_of(command, capsys)


def test_how_long_a_run_takes_is_what_the_defaults_are(capsys):
    from scbd.model import _registry
    from scbd.workflows import _select_alpha

    said = help_of("select-alpha", capsys)
    steps = (_registry._SOME_STEPS, _registry._FEW_STEPS, _registry._MORE_STEPS)
    small, linear, network = (some["max_steps"] for some in steps)
    assert f"small encoder in {small} steps" in said
    assert f"{linear} steps with the linear encoder and {network} with the network" in said
    assert [len(alphas) for alphas in _select_alpha._ALPHAS.values()] == [5, 6]
    assert "five runs by default (six " in said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2 / 3, "2/3"),
        (1 / 7, "1/7"),
        (0.1, "0.1"),
        (1e-4, "0.0001"),
        (20.0, "20"),
        (200.0, "200"),
        (math.pi, "3.142"),
        (math.inf, "inf"),
        (7, "7"),
        (["dna", 0.5], "dna 0.5"),
        (Path("results/demo"), "results/demo"),
    ],
)
def test_how_defaults_are_written(value, text):
    assert values.written(value) == text


def test_a_default_with_a_percent_sign_is_shown():
    parser = argparse.ArgumentParser(formatter_class=values.Help)
    parser.add_argument("--share", default="5%", help="of 100%%")
    assert "of 100% (default: 5%)" in parser.format_help()


def test_paragraphs_and_tables_of_an_epilog_stay():
    parser = argparse.ArgumentParser(formatter_class=values.Help, epilog="a  b\nc\n\n  kept    as it\n  is\n")
    assert parser.format_help().endswith("\na b c\n\n  kept    as it\n  is\n")


@pytest.mark.parametrize(("text", "value"), [("2/3", 2 / 3), ("0", 0), ("0.5", 0.5), ("1e-2", 0.01)])
def test_shares(text, value):
    assert values.share(text) == value


@pytest.mark.parametrize("text", ["1", "-0.1", "2/0", "3/2", "nan", "half"])
def test_what_is_no_share(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a share: give 0 or a number below 1"):
        values.share(text)


def test_completion_knows_commands_options_files_and_experiments(capsys):
    pytest.importorskip("shtab", reason="shtab (extra completion) is not installed")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("select-alpha", "--max-steps", "listing", "cmnist-long", "compgen_files"))
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n"], input=script, text=True, check=True)
    asked = (
        "COMP_WORDS=(scbd reproduce cmnist-l); COMP_CWORD=2; _shtab_scbd scbd cmnist-l reproduce; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    given = subprocess.run([bash], input=script + "\n" + asked, capture_output=True, text=True, check=True).stdout
    assert given.split() == ["cmnist-long", "cmnist-lengths"]
    for shell in ("zsh", "fish", "tcsh"):
        assert main(["completion", shell]) == 0
        assert "select-alpha" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'nushell' is not a shell that scbd can complete in"):
        completion_script("nushell")


def test_completion_without_its_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == 'scbd: Completion needs the package shtab: pip install "scbd[completion]"\n'


def test_arguments_of_all_commands_are_found():
    found = actions_of(parser_of_commands())
    options = {option for action in found for option in action.option_strings}
    assert {"--version", "--max-steps", "--verify", "--report"} <= options
    assert {"plates", "shell", "name"} <= {action.dest for action in found}


def test_the_experiments_that_help_names_are_those_there_are():
    assert list(scbd.paper.EXPERIMENTS) == EXPERIMENTS


def test_help_loads_next_to_nothing():
    code = "import scbd.cli, sys; scbd.cli.parser_of_commands().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scvi", "anndata", "numpy", "pandas", "matplotlib"} & set(loaded)


def test_version(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0 and capsys.readouterr().out == f"scbd {scbd.__version__}\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--seed", "-1"], "'-1' is no seed: give a whole number from 0 on"),
        (["--seed", "4294967296"], "is no seed"),
        (["--alpha", "nan"], "'nan' is no weight of the invariance loss: give a number that is 0 or larger"),
        (["--alpha", "inf"], "'inf' is no weight"),
        (["--alpha", "much"], "'much' is no weight"),
    ],
)
def test_numbers_that_cannot_be_are_said_to(wrong, said, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["run", "cells.h5ad", "--y-key", "gene", "--e-key", "well", "--out", "out", *wrong])
    assert leaving.value.code == 2 and said in capsys.readouterr().err


def test_what_other_packages_cannot_do_is_one_sentence(tmp_path, capsys, monkeypatch):
    def without(*args, **kwargs):
        msg = "No supported gpu backend\nfound!"
        raise MisconfigurationException(msg)

    monkeypatch.setattr("scbd.model._fit.L.Trainer", without)
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", "--encoder", "small"]
    out = ["--out", str(tmp_path / "out")]
    assert main([*arguments, *out]) == 2
    assert capsys.readouterr().err == "scbd: No supported gpu backend found!\n"
    assert main([*arguments, "--out", str(tmp_path / "cells.h5ad")]) == 2
    assert "cells.h5ad is a file: give a directory" in capsys.readouterr().err


def test_a_run_that_diverged_is_one_sentence(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", "--encoder", "small"]
    how = ["--max-steps", "4", "--batch-size", "24", "--lr", "1e30", "--out", str(tmp_path / "out")]
    assert main([*arguments, *how]) == 2
    assert "scbd: The training loss became nan at step 2 of 4 (lr 1e+30" in capsys.readouterr().err


def test_a_package_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    def without(*args, **kwargs):
        msg = "Install s3fs to access S3"
        raise ImportError(msg)

    monkeypatch.setattr("scbd.data.open_screen", without)
    assert main(["run", "s3://bucket/s.zarr", "--y-key", "gene", "--e-key", "well", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "scbd: Install s3fs to access S3\n"


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
def test_a_run_without_style(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", "--encoder", "small"]
    arguments += ["--out", str(tmp_path / "out"), "--max-steps", "2", "--batch-size", "24", "--accelerator", "cpu"]
    assert main([*arguments, "--style-target", "none"]) == 0
    assert "z_s" not in (tmp_path / "out" / "metrics.csv").read_text()


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    import scbd.paper

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(scbd.paper, "demo", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_defaults_of_the_command_are_those_of_the_model():
    said = vars(parser_of_commands().parse_args("run cells.h5ad --y-key gene --e-key well --out out".split()))
    model = inspect.signature(SCBDModel.__init__).parameters
    shared = said.keys() & model.keys()
    assert len(shared) > 8
    for name in shared:
        assert said[name] == model[name].default, name
    training = {option.name: option.default for option in dataclasses.fields(TrainSettings)}
    shared = said.keys() & training.keys() - {"seed"}  # a command draws the same numbers each time
    assert len(shared) > 10
    for name in shared:
        assert said[name] == training[name], name


def test_the_package_is_the_command():
    asked = subprocess.run([sys.executable, "-m", "scbd", "--version"], capture_output=True, text=True, check=True)
    assert asked.stdout == f"scbd {scbd.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "scbd", "fly"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage: scbd ")


def test_help_says_what_a_command_does_and_has_no_broken_sign(capsys):
    """A percent sign that is not doubled prints what argparse knows of the option."""
    for command in "demo inspect convert run select-alpha reproduce completion".split():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert f"\nscbd {command}: " in said and "option_strings" not in said and "%%" not in said
