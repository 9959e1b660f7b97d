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

import scbd
from scbd import _run, cli
from scbd.model import EmbeddingModule, SCBDModel, _train

PARTS: list[tuple[str, Any, str]] = [
    ("open the file", scbd.data, "open_screen"),
    ("set-up", SCBDModel, "setup_anndata"),
    ("split", _train, "choose_split"),
    ("channel statistics", EmbeddingModule, "fit"),
    ("train", SCBDModel, "train"),
    ("embed", SCBDModel, "get_latent_representation"),
    ("pixel PCA", _run, "input_pca"),
    ("standardised inputs", _run, "simple_embeddings"),
    ("evaluate", _run, "evaluated"),
    ("save the model", SCBDModel, "save"),
    ("pictures", _run, "_pictures"),
    ("write the cells", _run, "_write_cells"),
]
WITHIN = {"train": ("split", "channel statistics")}


def rows(scale: Scale) -> list[Row]:
    """One epoch over 8,000 simulated cells of 4×64×64 with ResNet-18, in the default precision, as the command does."""
    n, side, batch, encoder = scale.of((8000, 64, 1024, "resnet18"), (300, 32, 128, "small"))
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

    importing = timed(lambda: subprocess.run([sys.executable, "-c", "import scbd._run, scbd.data"], check=True))[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cells = Path(folder) / "cells.h5ad"
        scbd.datasets.simulated_screen(n, image_size=side).write_h5ad(cells)
        for name, owner, attribute in PARTS:
            stack.enter_context(mock.patch.object(owner, attribute, clocked(name, getattr(owner, attribute))))
        command = f"run {cells} --y-key gene --e-key well --out {folder}/out --max-epochs 1"
        how = f"--batch-size {batch} --encoder {encoder} --accelerator cpu"
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        total, code = timed(lambda: cli.main([*command.split(), *how.split()]))
    assert code == 0
    for outer, inner in WITHIN.items():
        spent[outer] -= sum(spent[name] for name in inner)
    table = [{"claim": "import", "ours_s": importing}]
    table += [{"claim": name, "ours_s": seconds} for name, seconds in spent.items()]
    table.append({"claim": "everything else", "ours_s": total - sum(spent.values())})
    everything = importing + total
    return [row | {"note": f"{row['ours_s'] / everything:.1%}"} for row in table] + [
        {"claim": f"scbd run, one epoch of {n:,} cells of 4×{side}×{side}", "ours_s": everything}
    ]
