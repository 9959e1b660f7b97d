"""Test that the API pages list all public names, and run the examples of all docstrings."""

from __future__ import annotations

import ast
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
# interfaces that users implement, and a dictionary of arguments: none of them is called
NOT_CALLED = {"scbd.data.BatchSampler", "scbd.data.ImageSource", "scbd.datasets.HARD_SCREEN"}


def listed_names() -> list[str]:
    """Return the names listed on the API pages."""
    names, package = [], ""
    for line in [line for page in sorted(API.glob("*.md")) for line in page.read_text(encoding="utf-8").splitlines()]:
        if match := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            package = match[1]
        elif match := re.fullmatch(r"   (\w+)", line):
            names.append(f"{package}.{match[1]}")
    return names


LISTED = listed_names()
PACKAGES = sorted({name.rpartition(".")[0] for name in LISTED})


@pytest.mark.skipif(not LISTED, reason="a source distribution comes without docs")
@pytest.mark.parametrize("package", PACKAGES)
def test_api_page_lists_all_exports_of_its_package(package):
    module = importlib.import_module(package)
    exported = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
    exported -= {"SCBDModel"} if package == "scbd.model" else set()  # listed on the page of scbd
    here = [name.rpartition(".")[2] for name in LISTED if name.rpartition(".")[0] == package]
    assert sorted(here) == sorted(exported - {name.rpartition(".")[2] for name in NOT_CALLED})


@pytest.fixture(scope="module")
def embedded() -> Any:
    """``adata`` and ``model`` of the examples: a small screen, and a model trained on it."""
    adata = make_screen()
    scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    model = scbd.SCBDModel(adata, encoder="small")
    how: dict[str, Any] = {"max_steps": 20, "batch_size": 100, "lr": 1e-3, "enable_progress_bar": False}
    model.train(**how)
    model.train_decoder(width=8, **how)
    for block in "cs":
        adata.obsm[f"X_scbd_{block}"] = model.get_latent_representation(block=block)
    return adata, model


@pytest.fixture
def run_example(embedded, hasty, tmp_path, monkeypatch):
    """Return a function that runs the examples of a docstring with the variables that the API page lists."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, name: str, **names: Any) -> int:
        adata, model = embedded
        given = {"adata": adata.copy(), "model": model, "net": adata.uns["truth"]["network"]}
        given |= {"scbd": scbd, "np": np, "pd": pd, "torch": torch, **names}
        example = doctest.DocTestParser().get_doctest(text, given, name, None, None)
        failures: list[str] = []
        # verbose=False: otherwise doctest prints what it runs under pytest -v
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
        plt.close("all")
        assert not failures, "".join(failures)
        return len(example.examples)

    return run


@pytest.mark.filterwarnings("ignore")  # models are trained for two steps
@pytest.mark.parametrize("name", LISTED)
def test_examples_of_public_names_run(name, run_example):
    package, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(package), short)
    assert run_example(inspect.getdoc(found) or "", name), "no example"


SOURCE = Path(scbd.__file__).parent


def private_examples() -> list[str]:
    """Return functions and classes with examples that the pages of the API do not list, as ``module:name``."""
    public = {name.rpartition(".")[2] for name in LISTED}
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(("scbd", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in public:
                found += [f"{module}:{node.name}"] if ">>>" in (ast.get_docstring(node) or "") else []
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", private_examples())
def test_examples_of_private_names_run(name, run_example):
    module, _, short = name.partition(":")
    names = vars(importlib.import_module(module))
    run_example(inspect.getdoc(names[short]) or "", name, **names)
