"""The pages of the API list what is public, and everything public has an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_screen

import scbd

API = Path(__file__).parents[1] / "docs" / "api"
# what others may bring in place of ours, and arguments: nothing that could be called
NOT_CALLED = {"scbd.data.BatchSampler", "scbd.data.ImageSource", "scbd.datasets.HARD_SCREEN"}


def listed() -> list[str]:
    """Names on the pages of the API."""
    names, package = [], ""
    for line in [line for page in sorted(API.glob("*.md")) for line in page.read_text(encoding="utf-8").splitlines()]:
        if match := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            package = match[1]
        elif match := re.fullmatch(r"   (\w+)", line):
            names.append(f"{package}.{match[1]}")
    return names


LISTED = listed()
PACKAGES = sorted({name.rpartition(".")[0] for name in LISTED})


@pytest.mark.skipif(not LISTED, reason="a source distribution comes without docs")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_lists_what_its_package_exports(package):
    module = importlib.import_module(package)
    exported = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
    exported -= {"SCBDModel"} if package == "scbd.model" else set()  # on the page of scbd
    here = [name.rpartition(".")[2] for name in LISTED if name.rpartition(".")[0] == package]
    assert sorted(here) == sorted(exported - {name.rpartition(".")[2] for name in NOT_CALLED})


@pytest.fixture(scope="module")
def embedded() -> Any:
    """What examples call ``adata`` and ``model``: a small screen, and a model that has seen it."""
    adata = make_screen()
    scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    model = scbd.SCBDModel(adata, encoder="small")
    how: dict[str, Any] = {"max_steps": 20, "batch_size": 100, "lr": 1e-3, "enable_progress_bar": False}
    model.train(**how)
    model.train_decoder(width=8, **how)
    for block in "cs":
        adata.obsm[f"X_scbd_{block}"] = model.get_latent_representation(block=block)
    return adata, model


@pytest.mark.filterwarnings("ignore")  # of models that were trained for two steps
@pytest.mark.parametrize("name", LISTED)
def test_examples_run(name, embedded, hasty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata, model = embedded
    given = {"adata": adata.copy(), "model": model, "net": adata.uns["truth"]["network"]}
    given |= {"scbd": scbd, "np": np, "pd": pd, "torch": torch}
    package, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(package), short)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(found) or "", given, name, None, None)
    assert example.examples, "no example"
    said: list[str] = []
    # which would talk where the tests do (pytest -v)
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    plt.close("all")
    assert not said, "".join(said)
