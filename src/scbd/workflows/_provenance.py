"""What code, and what cells, a result comes from."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import scbd
from scbd._labels import label_values
from scbd.data import digest_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.data import Inputs


def digest_of(adata: AnnData, label_keys: Sequence[str], inputs: Inputs, split: str | None = None) -> str:
    """Digest of images or features, the labels and the column of the split, if it is one: of all that a run looks at.

    Raises
    ------
    KeyError, ValueError
        If inputs or a label are missing, or a cell has no label.
    """
    told = {key: label_values(adata.obs, key) for key in label_keys}
    if split is not None and split in adata.obs:
        told |= {split: adata.obs[split]}
    return digest_cells(inputs.source(adata), pd.DataFrame(told))


def versions(*others: str) -> dict[str, str]:
    """Versions of scbd, torch and other packages, and :func:`commit`."""
    return {name: version(name) for name in ("scbd", "torch", *others)} | {"commit": commit()}


@cache
def commit() -> str:
    """The git commit of the package, with ``-dirty`` where its files have changed; nothing outside of a checkout."""
    return commit_of(Path(scbd.__file__).parent)


def commit_of(folder: Path) -> str:
    """The same of a folder with an ``__init__.py``."""
    try:
        # installed packages may lie below a checkout that has nothing to do with them
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(folder, "status", "--porcelain", "--", ".")
        return _git(folder, "rev-parse", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
