"""The examples of docstrings run, and everything public has one."""

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


def public() -> dict[str, Any]:
    """What the pages of the API list."""
    found, package = {}, ""
    for line in [line for page in sorted(API.glob("*.md")) for line in page.read_text(encoding="utf-8").splitlines()]:
        if match := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            package = match[1]
        elif match := re.fullmatch(r"   ([\w.]+)", line):
            *modules, name = f"{package}.{match[1]}".split(".")
            found[f"{package}.{match[1]}"] = getattr(importlib.import_module(".".join(modules)), name)
    return found


PUBLIC = public()


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


@pytest.mark.skipif(not PUBLIC, reason="a source distribution comes without docs")
def test_the_pages_of_the_api_list_much():
    assert len(PUBLIC) > 100


@pytest.mark.filterwarnings("ignore")  # of models that were trained for two steps
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, embedded, hasty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata, model = embedded
    given = {"adata": adata.copy(), "model": model, "net": adata.uns["truth"]["network"]}
    given |= {"scbd": scbd, "np": np, "pd": pd, "torch": torch}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]) or "", given, name, None, None)
    assert example.examples, "no example"
    said: list[str] = []
    # which would talk where the tests do (pytest -v)
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    plt.close("all")
    assert not said, "".join(said)
