from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scbd

SOURCE = Path(scbd.__file__).parent

# a package sees what stands before it here, and itself
ORDER = (
    *("_lazy", "_checks", "_files", "_linear_maps", "_anndata", "nn", "data", "metrics", "datasets", "pl", "model"),
    *("baselines", "_compare", "_inspect", "_candidates", "_evidence", "_verdict", "_report", "_run_report", "_run"),
    *("_speed", "_select", "_cross_fit", "_demo", "cli", "__main__"),
)


def imported(path: Path) -> set[str]:
    """Packages and modules right under scbd that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "scbd":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("scbd.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=str)
def test_imports_go_one_way(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own != "__init__":  # which loads on first use
        assert imported(path) & set(ORDER) <= set(ORDER[: ORDER.index(own) + 1])


def loaded_by(statement: str, folder: Path | None = None) -> set[str]:
    """Packages that are loaded once a statement was run, in a process of its own."""
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
def test_what_is_light_does_not_wait_for_what_is_heavy(statement, heavy, tmp_path):
    assert not loaded_by(statement, tmp_path) & heavy


@pytest.mark.parametrize("name", [None, "baselines", "data", "datasets", "metrics", "model", "nn", "pl"])
def test_public_names_are_there(name):
    package = scbd if name is None else getattr(scbd, name)
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, public) is not None for public in package.__all__)
    with pytest.raises(AttributeError, match="SCBD_"):
        package.SCBD_  # noqa: B018


def test_files_of_a_package_are_its_own():
    """A name without an underscore is for users."""
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    assert {str(path) for path in files if not path.name.startswith("_")} == {"cli.py"}
