from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import scbd

SOURCE = Path(scbd.__file__).parent

# who may import whom: a package sees what stands before it here, and itself
ROOMS = {
    "_checks": set(),
    "_argument_values": set(),
    "_option_names": {"_argument_values"},
    "_files": set(),
    "_keys": set(),
    "_lazy": set(),
    "_linear_maps": set(),
    "_measure_names": set(),
    "_messages": set(),
    "_progress": set(),
    "_sizes": set(),
    "_threads": set(),
    "_jobs": {"_files"},
    "_outputs": {"_files"},
    "_labels": {"_messages"},
    "_matrices": {"_messages"},
    "_numbers": {"_labels", "_messages"},
    "_seen": {"_keys", "_messages"},
    "nn": {"_checks", "_linear_maps", "_sizes"},
    "data": {
        *("_checks", "_files", "_jobs", "_keys", "_labels", "_lazy", "_linear_maps", "_messages", "_numbers"),
        *("_matrices", "_progress", "_seen", "_sizes", "_threads"),
    },
    "metrics": {
        *("_checks", "_keys", "_labels", "_linear_maps", "_matrices", "_measure_names", "_messages", "_numbers"),
        *("_seen", "_threads", "data"),
    },
    "datasets": {"_checks", "_files", "_keys", "_linear_maps", "_messages", "_progress", "data"},
    "pl": {"_keys", "_matrices", "_measure_names", "_threads"},
    "model": {
        *("_checks", "_files", "_jobs", "_keys", "_labels", "_lazy", "_linear_maps", "_messages", "_numbers"),
        *("_progress", "_sizes", "nn", "data"),
    },
    "_shared_options": {"_argument_values", "model"},
    "_command_line": {"_argument_values", "_shared_options"},
    "baselines": {"_checks", "_keys", "_labels", "_linear_maps", "_matrices", "_messages", "nn", "data", "model"},
    "workflows": {
        *("_checks", "_files", "_jobs", "_keys", "_labels", "_messages", "_outputs"),
        *("_seen", "data", "datasets", "metrics", "model", "baselines", "nn", "pl"),
    },
    "paper": {"_keys", "_outputs", "baselines", "datasets", "model", "pl", "workflows"},
    "experiments": {"paper", "workflows"},
    "cli": {"_argument_values", "_command_line", "_files", "_option_names", "_progress", "data", "paper", "workflows"},
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


def imports_of(path: Path) -> list[tuple[str, str | None]]:
    """Module and name of each import of scbd; no name where a module is imported as a whole."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "scbd":
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] == "scbd"]
    return found


def is_behind_the_door(module: str, name: str | None, own: str) -> bool:
    """Whether an import reaches past the ``__init__`` of a package that it does not lie in."""
    if name is not None and module == "scbd":  # a room, or a module of the floor under all rooms
        module, name = f"scbd.{name}", None
    room = [*module.split("."), ""][1]
    if not (SOURCE / room).is_dir() or room in ("", own):
        return False
    home = SOURCE.parent.joinpath(*module.split("."))
    if not home.is_dir() or any(part.startswith("_") for part in (*module.split("."), name or "")):
        return True
    return name is not None and (home / f"{name}.py").is_file() and not is_public(module, name)


def is_public(module: str, name: str) -> bool:
    """Whether a package exports something of its own under the name of one of its modules."""
    return not inspect.ismodule(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=str)
def test_packages_are_entered_by_their_init(path):
    """What is in which file of a package is its own affair; names with an underscore are, too."""
    own = path.relative_to(SOURCE).parts[0]
    assert not [found for found in imports_of(path) if is_behind_the_door(*found, own)]


@pytest.mark.parametrize(
    ("module", "name", "behind"),
    [
        ("scbd.data", "Split", False),
        ("scbd.data.stores", "BlockFile", False),
        ("scbd", "pl", False),
        ("scbd", "_keys", False),
        ("scbd._keys", "IMAGE_KEY", False),
        ("scbd.data", "_private", True),
        ("scbd.data.stores._block_file", "BlockFile", True),
        ("scbd.model._plan", "TrainingPlan", True),
        ("scbd.data.stores._block_file", None, True),
        ("scbd.model", "_plan", True),
        ("scbd.metrics._table", "check_keys", False),
    ],
)
def test_what_is_behind_the_door(module, name, behind):
    assert is_behind_the_door(module, name, "metrics") is behind


def loaded_by(statement: str, folder: Path | None = None) -> set[str]:
    """Packages that are loaded once a statement was run, in a process of its own."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert not ended.returncode, ended.stderr
    return set(ended.stdout.split())


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


HEAVY = {"torch", "scvi", "lightning", "pyro", "jax"}


@pytest.mark.parametrize("name", ["data", "datasets"])
def test_data_are_at_hand_without_what_trains(name):
    assert not loaded_by(f"import scbd.{name}") & HEAVY


CONVERT = """
import numpy as np
import pandas as pd
from scbd import cli
from scbd.data import ArraySource, Crops, add_to_screen, open_screen, verify_screen, write_screen

rng = np.random.default_rng(0)
obs = pd.DataFrame({"gene": ["a", "b"] * 8}, index=[str(row) for row in range(16)])
crops = Crops(ArraySource(rng.integers(0, 9, (16, 2, 8, 8), dtype="uint8")), obs, ["dna", "actin"])
for path in ("s.h5ad", "s.zarr"):
    write_screen(path, crops, y_key="gene")
    screen = open_screen(path)
    screen.obsm["X"] = np.zeros((16, 2))
    add_to_screen(path, screen)
    verify_screen(path)
assert cli.main(["convert", "s.h5ad", "--y-key", "gene", "--out", "again.zarr", "--verify"]) == 0
"""


def test_a_screen_is_converted_and_verified_without_what_trains(tmp_path):
    assert not loaded_by(CONVERT, tmp_path) & HEAVY


def test_names_that_load_on_first_use_are_what_they_are_where_they_are_defined():
    """The table of a lazy package, and what type checkers are told, say the same."""
    for package in (scbd, scbd.data, scbd.model):
        assert package.__file__ is not None
        tree = ast.parse(Path(package.__file__).read_text())
        blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        told = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        assert told
        for node in told:
            home = importlib.import_module(node.module or "")
            for alias in node.names:
                assert getattr(package, alias.name) is getattr(home, alias.name)
        for name in package.__all__:
            assert getattr(package, name) is not None
        assert set(package.__all__) <= set(dir(package))


def test_public_names():
    assert scbd.SCBDModel.__name__ == "SCBDModel"
    assert set(scbd.__all__) < set(dir(scbd))
    for name in scbd.__all__:
        assert getattr(scbd, name) is not None
    with pytest.raises(AttributeError, match="module 'scbd' has no attribute 'SCBD'"):
        scbd.SCBD  # noqa: B018


def test_the_files_of_a_package_are_its_own():
    """A name without an underscore is for users: packages, and the two modules that are commands or aliases."""
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    assert {str(path) for path in files if not path.name.startswith("_")} == {"cli.py", "experiments.py"}
