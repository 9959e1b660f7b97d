"""What code a result comes from."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import scbd


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
