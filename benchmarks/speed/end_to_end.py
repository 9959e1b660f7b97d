"""Where the time of `scbd run` goes: import, set-up, training, embedding, evaluation, pictures."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from _compare import Row, timed
from _scale import Scale
from anndata import AnnData

import scbd
from scbd import cli
from scbd._workflows import run as run_module
from scbd.model import EmbeddingModule, SCBDModel, _train

PARTS: list[tuple[str, Any, str]] = [
    ("set-up", SCBDModel, "setup_anndata"),
    ("split", _train, "choose_split"),
    ("channel statistics", EmbeddingModule, "fit"),
    ("train", SCBDModel, "train"),
    ("embed", SCBDModel, "get_latent_representation"),
    ("input PCA", run_module, "compute_input_pca"),
    ("corrected inputs", run_module, "compute_corrected_inputs"),
    ("verdict", run_module, "judge_embeddings"),
    ("evaluate", run_module, "evaluate"),
    ("save the model", SCBDModel, "save"),
    ("report", run_module, "write_report"),
    ("pictures", run_module, "_write_pictures"),
    ("write the cells", AnnData, "write_h5ad"),
]
WITHIN = {"train": ("split", "channel statistics")}


def rows(scale: Scale) -> list[Row]:
    """Crops and wells at the defaults of the command, from the file to the pictures; import beside them, once."""
    importing = timed(
        lambda: subprocess.run([sys.executable, "-c", "import scbd._workflows.run, scbd.data"], check=True)
    )[0]
    table: list[Row] = [{"claim": "import", "ours_s": importing}]
    brief = scale.of("", "--max-steps 2 --batch-size 24")
    n, side = scale.of((3000, 64), (300, 32))
    crops = scbd.datasets.simulated_screen(n, image_size=side)
    what = f"{n:,} crops of 4×{side}×{side}"
    table += parts(crops, what, f"--y-key gene --e-key well --control nontargeting {brief}")
    perturbations, plates, controls, features = scale.of((100, 12, 25, 600), (10, 4, 5, 16))
    size = {"cells_per_well": 1, "n_controls": controls, "n_features": features}
    wells = scbd.datasets.simulated_profiles(perturbations, plates, **size)
    what = f"{wells.n_obs:,} wells × {features}"
    return table + parts(wells, what, f"--y-key perturbation --e-key plate --control control --layer X {brief}")


def parts(cells: AnnData, what: str, how: str) -> list[Row]:
    """Seconds of `scbd run`, and of which parts."""
    spent = dict.fromkeys((name for name, _, _ in PARTS), 0.0)

    def clocked(name: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "cells.h5ad"
        cells.write_h5ad(path)
        for name, owner, attribute in PARTS:
            stack.enter_context(mock.patch.object(owner, attribute, clocked(name, getattr(owner, attribute))))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        command = f"run {path} {how} --out {folder}/out --accelerator cpu"
        total, code = timed(lambda: cli.main(command.split()))
    assert code == 0
    for outer, inner in WITHIN.items():
        spent[outer] -= sum(spent[name] for name in inner)
    spent["everything else"] = total - sum(spent.values())
    return [{"claim": f"scbd run of {what}", "ours_s": total}] + [
        {"claim": f"{what}: {name}", "ours_s": seconds, "note": f"{seconds / total:.1%}"}
        for name, seconds in spent.items()
        if seconds > 0  # parts that a part calls may take a little more than is left of it
    ]
