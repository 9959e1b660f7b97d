"""Run the code of the documentation, and test that its links and references exist."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pydoc
import re
import runpy
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_cells

import scbd
from scbd.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = ROOT / "notebooks"
FOLDERS = (DOCS, *(DOCS / name for name in ("user_guide", "how_to", "api")))
PAGES = sorted([ROOT / "README.md", *(page for folder in FOLDERS for page in folder.glob("*.md"))])
# defaults of simulated screens on pages: with more genes, probes take seconds
FEWER = {"n_complexes": 3, "genes_per_complex": 2}
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a source distribution comes without docs")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Return code blocks and the lines where they begin."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def packages_of(block: str) -> set[str]:
    return set(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and MyST name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.fixture
def setting(hasty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Variables of the first page of the guide, with fewer cells, in a folder with the files of a user."""
    monkeypatch.chdir(tmp_path)
    simulated_screen = scbd.datasets.simulated_screen
    # a page may make a large screen; that of one page needs a cell for each of 604 guides
    few = lambda n_cells, **how: simulated_screen(min(n_cells, 640), **FEWER | how)
    monkeypatch.setattr(scbd.datasets, "simulated_screen", few)
    write_files(tmp_path)
    known: dict[str, Any] = {}
    for _, block in blocks_of(DOCS / "user_guide" / "index.md", "python"):
        exec(block, known)
    yield known
    plt.close("all")


def write_files(folder: Path) -> None:
    """Write crops of two plates, and fields of view in all formats that pages read."""
    for number in (1, 2):
        make_cells(seed=number).write_h5ad(folder / f"plate_{number}.h5ad")
        (folder / f"plate_{number}.h5ad").rename(folder / f"plate_{number}.h5sc")
    for name in "ab":
        np.save(folder / f"field_{name}.npy", pixels_of_field(name))
    places = np.random.default_rng(0).uniform(0, 47, (20, 2))
    cells = pd.DataFrame(places, columns=["y", "x"]).assign(image=["a", "b"] * 10, gene="TP53")
    cells.to_csv(folder / "cells.csv", index=False)
    if importlib.util.find_spec("tifffile"):
        write_tiffs(folder)
    if importlib.util.find_spec("ome_zarr"):
        write_plate(folder / "plate.zarr")
    if importlib.util.find_spec("spatialdata"):
        write_well(folder / "well.zarr")


def pixels_of_field(name: str) -> np.ndarray:
    """Return a field of view with two channels."""
    return np.random.default_rng(ord(name)).integers(0, 60_000, (2, 48, 64)).astype("uint16")


def write_tiffs(folder: Path) -> None:
    """Write the same fields with one file per channel."""
    import tifffile

    for name in "ab":
        for number, image in enumerate(pixels_of_field(name), start=1):
            tifffile.imwrite(folder / f"{name}_w{number}.tif", image)


def write_plate(path: Path) -> None:
    """Write a plate of two wells, with two fields and one field, and a label image per field."""
    from ome_zarr import OMEZarrImage, OMEZarrLabels, OMEZarrMultiscale

    for place, name in {"A/1/0": "a", "A/1/1": "b", "B/12/0": "c"}.items():
        labels = np.zeros((1, 1, 1, 48, 64), "uint16")
        labels[..., 20:25, 30:41], labels[..., 5:9, 6:12] = 3, 8
        image, nuclei = (OMEZarrImage(of, axes="tczyx") for of in (pixels_of_field(name)[None, :, None], labels))
        of_nuclei = {"nuclei": OMEZarrLabels(nuclei, scale_factors=[2])}
        whole = OMEZarrMultiscale(image, scale_factors=[2], channel_names=["DNA", "actin"], labels=of_nuclei)
        whole.to_ome_zarr(str(path / place))


def write_well(path: Path) -> None:
    """Write an image of a well with four channels and several scales, and its cells with a table."""
    from spatialdata import SpatialData
    from spatialdata.models import Image2DModel, ShapesModel, TableModel
    from spatialdata.transformations import Scale

    rng = np.random.default_rng(0)
    image = Image2DModel.parse(
        rng.integers(0, 256, (4, 200, 200)).astype("uint8"),
        dims=("c", "y", "x"),
        scale_factors=[2],
        transformations={"global": Scale([0.65, 0.65], ("x", "y"))},
    )
    cells = ShapesModel.parse(rng.uniform(0, 130, (80, 2)), geometry=0, radius=8.0)
    obs = pd.DataFrame({"region": pd.Categorical(["cells"] * 80), "cell": range(80), "gene": ["TP53", "AKT1"] * 40})
    obs.index = obs.index.astype(str)
    table = TableModel.parse(AnnData(obs=obs), region="cells", region_key="region", instance_key="cell")
    SpatialData(images={"image": image}, shapes={"cells": cells}, tables={"table": table}).write(path)


@pytest.mark.filterwarnings("ignore")  # two steps do not train a model, and other packages have warnings of their own
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=name_of)
def test_python_blocks_of_each_page_run(page, setting):
    lacking = set()
    for line, block in blocks_of(page, "python"):
        missing = {package for package in packages_of(block) if not importlib.util.find_spec(package)}
        lacking |= missing
        if not missing:
            exec(compile("\n" * line + block, page, "exec"), setting)
    if lacking:
        pytest.skip(f"the rest ran; not installed: {', '.join(sorted(lacking))}")


def test_python_blocks_different_days_raise_the_warnings_shown():
    """A text block after a code block shows its warning, with … for omitted parts; other code blocks do not warn."""
    page = DOCS / "user_guide" / "different_days.md"
    text, known = page.read_text(encoding="utf-8"), {"scbd": scbd}
    blocks = re.findall(r"^```python\n(.*?)^```\n*(?:^```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE)
    assert len([shown for _, shown in blocks if shown]) == 5
    for block, shown in blocks:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(block, known)
        said = [str(one.message) for one in caught if one.category is UserWarning]  # without the warnings of libraries
        assert len(said) == bool(shown)
        assert not shown or re.fullmatch(".*".join(map(re.escape, re.split(r"\s*…\s*", shown.strip()))), said[0])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_each_page_have_existing_targets(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = page.parent / file if file else page
        assert other.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors_of(other), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_references_of_each_page_exist(page):
    for target in re.findall(r"\{py:\w+\}`(scbd[\w.]*)`", page.read_text(encoding="utf-8")):
        assert pydoc.locate(target) is not None, target


def shell_commands() -> list[tuple[str, str]]:
    """Return the shell commands on pages, with their page."""
    blocks = [(name_of(page), block) for page in PAGES for _, block in blocks_of(page, "bash")]
    return [(page, line) for page, block in blocks for line in block.replace("\\\n", " ").split("\n")]


def test_make_targets_on_pages_exist_in_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = {name for line in re.findall(r"^(\w[\w ]*):", makefile, re.MULTILINE) for name in line.split()}
    asked = {
        name for _, line in shell_commands() if (found := re.match(r"make ([\w ]+)", line)) for name in found[1].split()
    }
    assert {"demo", "test"} <= asked <= known


@pytest.mark.parametrize(
    ("page", "line"), [(page, line) for page, line in shell_commands() if re.match(r"scbd \w", line)]
)
def test_parse_args_accepts_each_command_on_pages(page, line):
    app.parse_args(shlex.split(line, comments=True)[1:], exit_on_error=False)  # raises where it does not know one


def test_references_in_source_are_in_bibliography():
    known = re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.compile(r"([A-Z][\w-]+)(?:, [A-Z]\w+)*(?: et al\.| and [A-Z][\w-]+)? \(((?:19|20)\d\d)\)")
    texts = [" ".join(path.read_text(encoding="utf-8").split()) for path in (ROOT / "src").rglob("*.py")]
    asked = {f"{surname.lower()}{year}" for text in texts for surname, year in named.findall(text)}
    assert asked
    assert asked <= set(known)


def inventories() -> list[tuple[str, str]]:
    """Return the names of other projects that pages link to, and the kind of each."""
    lines = [line for path in sorted((DOCS / "inventories").glob("*.inv")) for line in path.read_text().splitlines()]
    return [(line.split()[0], line.split()[1]) for line in lines if not line.startswith("#")]


@pytest.mark.filterwarnings("ignore")  # imported packages may warn
@pytest.mark.parametrize(("name", "kind"), inventories())
def test_inventory_names_exist_and_have_stated_kind(name, kind):
    if not importlib.util.find_spec(name.partition(".")[0]):
        pytest.skip("not installed")
    found = pydoc.locate(name)
    assert found is not None, "no such name: a link to it would be dead"
    assert inspect.isclass(found) == (kind == "class")


def test_own_members_each_model_member_has_a_task():
    configuration = runpy.run_path(str(DOCS / "conf.py"))
    models = [f"scbd.baselines.{name}" for name in scbd.baselines.__all__ if name.endswith("Model")]
    for owner in ("scbd.SCBDModel", "scbd.model.ImageModel", *models):
        assert configuration["own_members"](owner)["tasks"]  # raises where a member has no task


def test_readme_numbers_occur_on_results_page():
    """Numbers on the page of results are compared with the stored rows in another test."""
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Does it work?")
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    said, known = (set(re.findall(r"\d+\.\d+", text)) for text in (rest.partition("\n## ")[0], results))
    assert len(said) > 5 and said <= known


def test_stylesheets_load_only_local_files():
    for path in (DOCS / "_static").rglob("*.css"):
        for target in re.findall(r"url\(['\"]?([^)'\"]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name} asks for {target}"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_executed_in_order_with_output(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = ["".join(output.get("text", "")) for cell in cells for output in cell["outputs"]]
    assert printed and not any("site-packages" in text for text in printed)
