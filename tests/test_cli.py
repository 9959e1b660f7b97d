from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells
from pictures import is_drawn

from scbd.cli import main
from scbd.data import open_screen


@pytest.mark.filterwarnings("ignore:z_c has")
def test_run(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    arguments = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "plate", "well"]
    settings = ["--out", str(tmp_path / "out"), "--encoder", "small", "--max-steps", "3", "--batch-size", "24"]
    assert main([*arguments, *settings, "--accelerator", "cpu", "--perturbations-per-batch", "none"]) == 0
    printed = capsys.readouterr().out
    assert "plate × well" in printed
    assert str(tmp_path / "out") in printed
    assert (tmp_path / "out" / "metrics.csv").exists()
    assert main([*arguments, *settings]) == 2
    assert "already holds files" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:z_c has")
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
    convert = ["convert", "--y-key", "gene"]
    arguments = [*convert, str(tmp_path / "cells.h5ad"), "--out", str(tmp_path / "screen.zarr")]
    assert main([*arguments, "--compression", "lz4", "--image-size", "8", "--verify"]) == 0
    assert f"96 cells of 2 × 8 × 8 uint8: {tmp_path / 'screen.zarr'}" in capsys.readouterr().out
    assert main([*arguments, "--compression", "lz4"]) == 2
    assert "exists: it is kept" in capsys.readouterr().err
    late = [str(tmp_path / "late.npz"), "--table", str(tmp_path / "late.csv"), "--channels", "dna", "actin"]
    assert main([*convert, *late, "--out", str(tmp_path / "late.h5ad")]) == 0
    assert list(open_screen(tmp_path / "late.h5ad").var_names) == ["dna", "actin"]
    both = [str(tmp_path / "cells.h5ad"), *late]
    assert main([*convert, *both, "--out", str(tmp_path / "x.h5ad")]) == 2
    assert "--table has the rows of one plate" in capsys.readouterr().err


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


def test_demo_and_help(tmp_path, capsys, monkeypatch):
    import pandas as pd

    import scbd.experiments

    monkeypatch.setattr(
        scbd.experiments, "demo", lambda out, **kwargs: pd.DataFrame({"z_c white": [0.5]}, index=["alpha = 3"])
    )
    assert main(["demo", "--out", str(tmp_path), "--alpha", "3"]) == 0
    assert "alpha = 3" in capsys.readouterr().out
    for arguments in (["--help"], ["run", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert leaving.value.code == 0
    assert "--alpha" in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    import scbd.experiments

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(scbd.experiments, "demo", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
