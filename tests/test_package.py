from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scbd

SOURCE = Path(scbd.__file__).parent

# who may import whom: a package sees what stands before it here, and itself
ROOMS = {
    "_checks": set(),
    "_command_line": set(),
    "_outputs": set(),
    "_keys": set(),
    "_messages": set(),
    "_sizes": set(),
    "_threads": set(),
    "_labels": {"_messages"},
    "nn": {"_checks", "_sizes"},
    "data": {"_keys", "_labels", "_messages", "_sizes", "_threads"},
    "metrics": {"_labels", "_threads"},
    "datasets": {"_keys", "data"},
    "pl": {"_keys", "_threads"},
    "model": {"_checks", "_keys", "_labels", "_messages", "_sizes", "nn", "data"},
    "baselines": {"_checks", "_keys", "_labels", "_messages", "nn", "data", "model"},
    "workflows": {"_checks", "_outputs", "_keys", "_labels", "data", "datasets", "metrics", "model", "baselines", "pl"},
    "paper": {"_outputs", "_keys", "datasets", "model", "pl", "workflows"},
    "experiments": {"paper", "workflows"},
    "cli": {"_command_line", "data", "paper", "workflows"},
}


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "scbd":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("scbd.")}
    return found


@pytest.mark.parametrize("path", [p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.stem in ROOMS], ids=str)
def test_imports_go_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert imported_rooms(path) <= ROOMS[room] | {room}


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_scbd_loads_next_to_nothing():
    assert not loaded_by("import scbd; scbd.__version__") & {
        "torch",
        "scvi",
        "anndata",
        "numpy",
        "pandas",
        "matplotlib",
    }


def test_metrics_and_plots_need_neither_scvi_nor_lightning():
    assert not loaded_by("import scbd.metrics, scbd.pl") & {"scvi", "lightning", "torch"}


def test_public_names():
    assert scbd.SCBDModel.__name__ == "SCBDModel"
    assert set(scbd.__all__) < set(dir(scbd))
    for name in scbd.__all__:
        assert getattr(scbd, name) is not None
    with pytest.raises(AttributeError, match="module 'scbd' has no attribute 'SCBD'"):
        scbd.SCBD  # noqa: B018
