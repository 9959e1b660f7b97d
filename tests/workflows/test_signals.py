"""Commands that receive SIGTERM or Ctrl-C: exit status, message, and what is left to continue from."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import anndata
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from conftest import contents, make_cells
from matplotlib.figure import Figure
from PIL import Image

from scbd import SCBDModel, cli
from scbd._workflows import demo as demo_module
from scbd._workflows import inspection as inspection_module
from scbd._workflows import select_alpha as select_alpha_module
from scbd._workflows.select_alpha import AlphaSelection
from scbd.cli import main
from scbd.data import _screens, open_screen, verify_screen
from scbd.data._block_store import BlockStore
from scbd.model._callbacks import find_checkpoint
from scbd.model._plan import TrainingPlan

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:Scores are")
BOTH = (signal.SIGTERM, signal.SIGINT)
QUICK = ["--encoder", "small", "--max-steps", "3", "--batch-size", "24", "--accelerator", "cpu"]
READERS: dict[str, Callable[[Path], Any]] = {
    ".ckpt": lambda path: torch.load(path, weights_only=True),
    ".csv": pd.read_csv,
    ".h5ad": anndata.read_h5ad,
    ".json": lambda path: json.loads(path.read_text()),
    ".png": lambda path: Image.open(path).load(),
    ".html": lambda path: path.read_text(),
    ".pt": lambda path: torch.load(path, weights_only=False),
    ".txt": lambda path: path.read_text(),
}


def fail(*args: Any) -> None:
    raise AssertionError("the signal came to the handler from before the command")


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep signals from the process that runs the tests, and require that each command restores the handlers."""
    monkeypatch.setattr(cli, "_CLEANUP_SECONDS", 600)
    monkeypatch.setattr("gc.freeze", lambda: None)  # the process that runs the tests goes on
    monkeypatch.setattr("scbd.pl.umap_blocks", lambda *args, **how: plt.subplots(squeeze=False)[1])  # takes seconds
    before = {number: signal.signal(number, fail) for number in BOTH}
    alarm, hook = signal.getsignal(signal.SIGALRM), sys.unraisablehook
    yield
    assert sys.unraisablehook is hook
    assert all(signal.getsignal(number) is fail for number in BOTH)
    assert signal.getsignal(signal.SIGALRM) is alarm and signal.alarm(0) == 0
    for number, handler in before.items():
        signal.signal(number, handler)


def send_after(patch: pytest.MonkeyPatch, where: Any, name: str, number: int, call: int = 1) -> None:
    """Send this process a signal at the end of a function: if it writes a file, before the file has its name."""
    original, calls = getattr(where, name), iter(range(1, 10_000))

    def sending(*args: Any, **how: Any) -> Any:
        result = original(*args, **how)
        if next(calls) == call:
            signal.raise_signal(number)
        return result

    patch.setattr(where, name, sending)


def read_all(folder: Path) -> None:
    """Read each file, which raises if a file is not whole, and require that no other file is there."""
    for path in folder.rglob("*"):
        if path.is_file():
            READERS[path.suffix](path)


def end_by_signal(capsys: pytest.CaptureFixture[str], number: int, command: list[str]) -> str:
    """Run a command, require that the signal ends it, and return the sentence on standard error."""
    capsys.readouterr()
    assert main(command) == 128 + number
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if signal.Signals(number).name in line]
    assert len(said) == 1 and said[0] is lines[-1] and not any("Traceback" in line for line in lines)
    return said[0]


@pytest.mark.usefixtures("permuted_once")
def test_run_ended_in_any_stage_continues_with_the_printed_command(tmp_path, monkeypatch, capsys):
    from scbd._workflows import run as run_module

    stages = [
        (inspection_module, "open_cells", 1),
        (SCBDModel, "setup_anndata", 1),
        (TrainingPlan, "training_step", 2),
        (TrainingPlan, "validation_step", 1),
        (TrainingPlan, "training_step", 1),
        (torch, "save", 1),  # of a checkpoint
        (SCBDModel, "save", 1),
        (run_module, "compute_input_pca", 1),
        (AnnData, "write_h5ad", 1),
        (run_module, "evaluate", 1),
        (Figure, "savefig", 2),
    ]
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    whole, out = tmp_path / "whole", tmp_path / "out"
    start = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", *QUICK, "--out"]
    assert main([*start, str(whole)]) == 0
    command = [*start, str(out)]
    for (where, name, call), number in zip(stages, cycle(BOTH), strict=False):
        with monkeypatch.context() as patch:
            send_after(patch, where, name, number, call)
            said = end_by_signal(capsys, number, command)
        read_all(out)
        assert not (out / "umap.png").exists()
        command = shlex.split(said.partition("call: scbd ")[2])
    assert find_checkpoint(out / "checkpoints", resume=True).step == 3  # type: ignore[union-attr]
    assert main(command) == 0
    read_all(out)
    assert contents(out).keys() == contents(whole).keys()
    for name in ("metrics.csv", "history.csv", "verdict.txt"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    embedded, expected = (anndata.read_h5ad(folder / "cells.h5ad").obsm["X_scbd_c"] for folder in (out, whole))
    np.testing.assert_array_equal(embedded, expected)


@pytest.mark.usefixtures("permuted_once")
def test_select_alpha_ended_in_any_stage_continues_when_called_again(tmp_path, monkeypatch, capsys):

    stages = [
        (inspection_module, "open_cells", 1),
        (SCBDModel, "setup_anndata", 1),
        (TrainingPlan, "training_step", 5),  # of the second model
        (TrainingPlan, "training_step", 1),
        (select_alpha_module, "_score_run", 2),
        (AlphaSelection, "plot", 1),
        (Figure, "savefig", 1),
    ]
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    start = ["select-alpha", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", *QUICK]
    start += ["--alphas", "0", "0.01", "--out"]
    assert main([*start, str(tmp_path / "whole")]) == 0
    out = tmp_path / "out"
    for (where, name, call), number in zip(stages, cycle(BOTH), strict=False):
        with monkeypatch.context() as patch:
            send_after(patch, where, name, number, call)
            assert "call the same command again" in end_by_signal(capsys, number, [*start, str(out)])
        read_all(out)
        assert not (out / "curve.png").exists()
    with monkeypatch.context() as patch:
        patch.setattr(SCBDModel, "train", None)  # nothing is left to train
        assert main([*start, str(out)]) == 0
    assert (out / "runs.csv").read_bytes() == (tmp_path / "whole" / "runs.csv").read_bytes()


def test_convert_ended_in_any_stage_continues_when_called_again(tmp_path, monkeypatch, capsys):
    from scbd.data import _readers

    stages = [
        (_readers, "read_crops", 1),
        (_screens, "output_intensity_range", 1),
        (BlockStore, "_write_header", 1),
        (BlockStore, "write", 2),  # in a thread
        (BlockStore, "done", 2),
    ]
    monkeypatch.setattr(_screens, "_BLOCK_BYTES", 25 * 2 * 16 * 16)
    make_cells().write_h5ad(tmp_path / "plate.h5ad")
    start = ["convert", str(tmp_path / "plate.h5ad"), "--y-key", "gene", "--verify", "--out"]
    assert main([*start, str(tmp_path / "whole.zarr")]) == 0
    out = tmp_path / "out" / "screen.zarr"
    for (where, name, call), number in zip(stages, cycle(BOTH), strict=False):
        with monkeypatch.context() as patch:
            send_after(patch, where, name, number, call)
            assert "call the same command again" in end_by_signal(capsys, number, [*start, str(out)])
        assert not out.exists()
    send_after(monkeypatch, _screens, "verify_screen", signal.SIGTERM)
    assert "it is complete" in end_by_signal(capsys, signal.SIGTERM, [*start, str(out)])
    verify_screen(out)
    assert [path.name for path in out.parent.iterdir()] == ["screen.zarr"]
    images, expected = (open_screen(path).obsm["single_cell_images"] for path in (out, tmp_path / "whole.zarr"))
    np.testing.assert_array_equal(np.asarray(images), np.asarray(expected))


@pytest.mark.usefixtures("permuted_once")
def test_demo_ended_in_any_stage_starts_again(tmp_path, monkeypatch, capsys):
    stages = [
        (demo_module, "colored_digits", 1),
        (demo_module, "pixel_pca", 1),
        (TrainingPlan, "training_step", 2),
        (demo_module, "score_embedding", 2),
        (pd.DataFrame, "to_csv", 1),
        (Figure, "savefig", 2),
    ]
    digits = demo_module.colored_digits()[::12].copy()
    monkeypatch.setattr(demo_module, "colored_digits", lambda **how: digits.copy())
    monkeypatch.setitem(demo_module.RANDOM_ENCODER_TRAINING, "max_steps", 2)
    monkeypatch.setitem(demo_module.DIGITS_TRAINING, "batch_size", 64)
    command = ["demo", "digits", "--max-steps", "2", "--out", str(tmp_path / "demo")]
    for (where, name, call), number in zip(stages, cycle(BOTH), strict=False):
        with monkeypatch.context() as patch:
            send_after(patch, where, name, number, call)
            assert "Call the same command again" in end_by_signal(capsys, number, command)
        read_all(tmp_path)
        assert not (tmp_path / "demo" / "umap.png").exists()
    assert main(command) == 0
    read_all(tmp_path)


SLOW = """
import sys, time
from scbd.cli import main
from scbd.model._plan import TrainingPlan

step = TrainingPlan.training_step
TrainingPlan.training_step = lambda *args: (time.sleep(0.3), step(*args))[1]
sys.exit(main(sys.argv[1:]))
"""


def test_run_process_terminated_in_training_exits_with_143(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    command = ["run", str(tmp_path / "cells.h5ad"), "--y-key", "gene", "--e-key", "well", *QUICK]
    command[command.index("--max-steps") + 1] = "20"
    command += ["--out", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-c", SLOW, *command], stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (tmp_path / "out" / "checkpoints" / "last.ckpt").exists():
            time.sleep(0.02)
        process.terminate()
        said = process.communicate()[1].splitlines()
    assert process.returncode == 143 and "SIGTERM" in said[-1] and sum("SIGTERM" in line for line in said) == 1
    assert main(shlex.split(said[-1].partition("call: scbd ")[2])) == 0
    assert (tmp_path / "out" / "cells.h5ad").is_file()


# torch is the first import that takes seconds
IMPORTING = """
import os, signal, sys, time

class Stage:
    def find_spec(self, name, *rest):
        if name == "torch":
            {happens}

sys.meta_path.insert(0, Stage())
from scbd import cli

cli._CLEANUP_SECONDS = 1
sys.exit(cli.main(["run", "cells.h5ad", "--y-key", "gene", "--e-key", "well", "--out", "out"]))
"""
SWALLOWED = """
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            except BaseException:
                {then}
                time.sleep(60)
"""
UNRAISABLE = """
            class Object:
                def __del__(self):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
            Object()
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.kill(os.getpid(), signal.SIGINT)", 130),
        (SWALLOWED.format(then=""), 143),
        (SWALLOWED.format(then="os.kill(os.getpid(), signal.SIGINT)"), 143),
        (UNRAISABLE, 143),
    ],
    ids=["SIGTERM", "SIGINT", "swallowed", "second signal", "unraisable"],
)
def test_main_signal_while_importing_exits_with_one_message(happens, status, tmp_path):
    """Also if an import or a finaliser swallows the exception, and if a second signal follows."""
    code = IMPORTING.format(happens=happens)
    make_cells().write_h5ad(tmp_path / "cells.h5ad")  # commands read labels before they load torch
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("terminated by") == 1
    assert "scbd run cells.h5ad --y-key gene --e-key well --out out --resume" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


def test_main_command_swallows_signal_exits_with_its_status(monkeypatch, capsys):
    def swallow_exit(*args: Any, **how: Any) -> str:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            return "all is well"
        raise AssertionError

    monkeypatch.setattr("scbd._workflows.inspection.describe_path", swallow_exit)
    assert "SIGTERM" in end_by_signal(capsys, signal.SIGTERM, ["inspect", "."])


def test_main_ignored_sigint_stays_ignored(monkeypatch):
    """Shells start background jobs with SIGINT ignored."""
    monkeypatch.setattr(
        "scbd._workflows.inspection.describe_path", lambda *args, **how: signal.raise_signal(signal.SIGINT)
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["inspect", "."]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, fail)


def test_main_in_a_thread_runs_without_installing_handlers(monkeypatch):
    statuses: list[int] = []
    monkeypatch.setattr("scbd._workflows.inspection.describe_path", lambda *args, **how: "a table")
    thread = threading.Thread(target=lambda: statuses.append(main(["inspect", "."])))
    thread.start()
    thread.join()
    assert statuses == [0]
