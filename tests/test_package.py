from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scbd

SOURCE = Path(scbd.__file__).parent

# each package imports itself and packages that are listed before it
ORDER = (
    *("_shared", "nn", "data", "metrics", "corrections", "datasets", "pl", "model", "baselines"),
    *("_workflows", "cli", "__main__"),
)
# each workflow imports workflows that are listed before it
WORKFLOWS = (
    *("training_runs", "compare", "inspection", "candidates", "evidence", "verdict", "report", "report_contents"),
    *("run", "speed", "select_alpha", "cross_fit", "demo"),
)


def imported_names(path: Path, package: str = "scbd") -> set[str]:
    """Return the packages and modules directly below a package that a file imports."""
    depth = package.count(".") + 1
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            parts = node.module.split(".") if node.module else []
            found |= {parts[depth]} if len(parts) > depth else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[depth] for alias in node.names if alias.name.startswith(f"{package}.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=str)
def test_modules_import_only_packages_listed_before(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own != "__init__":  # loads subpackages on first use
        assert imported_names(path) & set(ORDER) <= set(ORDER[: ORDER.index(own) + 1])


@pytest.mark.parametrize("path", sorted((SOURCE / "_workflows").glob("*.py")), ids=str)
def test_workflows_import_only_workflows_listed_before(path):
    if path.name != "__init__.py":
        assert imported_names(path, "scbd._workflows") <= set(WORKFLOWS[: WORKFLOWS.index(path.stem)])


def loaded_packages(statement: str, folder: Path | None = None) -> set[str]:
    """Return the packages that are loaded after a statement has run in a new process."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert not ended.returncode, ended.stderr
    return set(ended.stdout.split())


TRAINS = {"torch", "scvi", "lightning", "jax"}
SCREEN = """
import numpy as np
import pandas as pd
from scbd.data import ArraySource, Crops, open_screen, verify_screen, write_screen

obs = pd.DataFrame({"gene": ["a", "b"] * 8}, index=[str(row) for row in range(16)])
write_screen("s.zarr", Crops(ArraySource(np.zeros((16, 2, 8, 8), "uint8")), obs, ["dna", "actin"]), y_key="gene")
open_screen("s.zarr"), verify_screen("s.zarr")
"""


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import scbd; scbd.__version__", {*TRAINS, "anndata", "numpy", "pandas", "matplotlib"}),
        ("import scbd.metrics, scbd.pl, scbd.datasets", TRAINS),
        (SCREEN, TRAINS),
    ],
)
def test_import_light_package_does_not_load_heavy_packages(statement, heavy, tmp_path):
    assert not loaded_packages(statement, tmp_path) & heavy


@pytest.mark.parametrize("name", [None, "baselines", "corrections", "data", "datasets", "metrics", "model", "nn", "pl"])
def test_public_names_exist_unknown_name_raises(name):
    package = scbd if name is None else getattr(scbd, name)
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, public) is not None for public in package.__all__)
    with pytest.raises(AttributeError, match="SCBD_"):
        package.SCBD_  # noqa: B018


def test_modules_only_cli_is_public():
    """Public names belong to packages; names of other modules, or of their folders, start with an underscore."""
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    assert {str(path) for path in files if not any(part.startswith("_") for part in path.parts)} == {"cli.py"}
