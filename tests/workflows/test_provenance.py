from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import scbd
from scbd.workflows._provenance import commit_of, versions


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A package in a checkout of its own, whatever git knows of this machine and its user."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=package.parent, check=True)
    return package


def test_the_commit_of_a_checkout_and_whether_files_have_changed(checkout):
    found = commit_of(checkout)
    assert len(found) == 40 and int(found, 16)
    (checkout.parent / "notes.txt").write_text("not of the package")
    assert commit_of(checkout) == found
    (checkout / "new.py").write_text("")
    assert commit_of(checkout) == f"{found}-dirty"


def test_a_package_that_only_lies_below_a_checkout_has_no_commit(checkout):
    installed = checkout.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert commit_of(installed) == ""


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout) == ""


def test_versions():
    found = versions("anndata")
    assert found.keys() == {"scbd", "torch", "anndata", "commit"} and found["scbd"] == scbd.__version__
