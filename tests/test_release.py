"""Test that addresses, versions, README links and the name of a release are the same in all files."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
URLS = PROJECT["project"]["urls"]
VERSION = PROJECT["project"]["version"]

pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="a source distribution comes without .github")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_urls_are_equal_in_all_metadata_files():
    citation, listing = read("CITATION.cff"), read(".github/ecosystem/meta.yaml")
    assert citation["repository-code"] == listing["project_home"] == URLS["Source"]
    assert citation["url"] == listing["documentation_home"] == URLS["Documentation"]
    assert listing["tutorials_home"].startswith(URLS["Documentation"])
    assert URLS["Issues"].startswith(URLS["Source"]) and URLS["Changelog"].startswith(URLS["Source"])


def test_citation_version_is_equal_to_project():
    assert read("CITATION.cff")["version"] == VERSION


def test_changelog_first_release_is_project_version():
    release = re.match(r"\d+\.\d+\.\d+", VERSION)
    assert release is not None
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", release[0]]


def test_ecosystem_listing_has_required_fields():
    listing = read(".github/ecosystem/meta.yaml")
    asked = "name description project_home documentation_home install primary_category tags license language contact"
    assert set(f"{asked} category".split()) <= listing.keys() and "version" not in listing
    # the terms of the schema that apply to this package
    terms = ["imaging", "perturbation", "data integration", "dimensionality reduction", "deep learning", "benchmarking"]
    assert (listing["primary_category"], listing["language"]) == ("Imaging", "Python")
    assert listing["tags"] == terms
    assert listing["name"] == listing["install"]["pypi"] == PROJECT["project"]["name"]


def on_pypi(readme: str) -> str:
    """Return a README as the build submits it to PyPI."""
    for change in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        readme = re.sub(change["pattern"], change["replacement"].replace("$HFPR_VERSION", VERSION), readme)
    return readme


def test_on_pypi_readme_links_are_absolute_and_exist():
    readme = on_pypi((ROOT / "README.md").read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)", readme) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', readme)
    assert len(targets) > 5
    assert not [target for target in targets if not target.startswith(("https://", "http://", "mailto:", "#"))]
    own = [re.match(rf"{re.escape(URLS['Source'])}/(?:raw|blob)/v{re.escape(VERSION)}/([^#?]+)", at) for at in targets]
    assert sum(found is not None for found in own) > 3
    assert not [found[1] for found in own if found is not None and not (ROOT / found[1]).exists()]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("[a](docs/x.md#y)", "[a]({url}/blob/v{version}/docs/x.md#y)"),
        ("![a b](x.png)", "![a b]({url}/raw/v{version}/x.png)"),
        ("[![a](x.png)](y.md)", "[![a]({url}/raw/v{version}/x.png)]({url}/blob/v{version}/y.md)"),
        ("[![a](https://b/x.svg)](LICENSE)", "[![a](https://b/x.svg)]({url}/blob/v{version}/LICENSE)"),
        ('<a href="y.md">', '<a href="{url}/blob/v{version}/y.md">'),
        ('<img src="x.png">', '<img src="{url}/raw/v{version}/x.png">'),
        ("[a](https://b) [c](#d) [e](mailto:f)", "[a](https://b) [c](#d) [e](mailto:f)"),
    ],
)
def test_on_pypi_relative_link_becomes_absolute(written, kind):
    assert on_pypi(written) == kind.format(url=URLS["Source"], version=VERSION)


def test_workflows_actions_are_pinned_and_read_only():
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", at) and re.search(r"# v\d", why) for at, why in used)
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_workflow_matrix_is_equal_to_python_classifiers():
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    matrix = read(".github/workflows/test.yaml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == promised and promised[0] == PROJECT["project"]["requires-python"].removeprefix(">=")
    assert set(read(".github/workflows/test.yaml")["jobs"]["check"]["needs"]) == (
        read(".github/workflows/test.yaml")["jobs"].keys() - {"check"}
    )


@pytest.fixture
def clone(tmp_path):
    """Repository with the current files of this checkout, including uncommitted changes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    for name in listed.stdout.rstrip("\0").split("\0"):
        if name.startswith(("src", "tests", ".ci", ".github")) or "/" not in name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, tmp_path / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def call(clone: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *command], cwd=clone, capture_output=True, text=True, check=False)


def test_address_script_replaces_owner_in_all_files(clone):
    done = call(clone, ".ci/address", "https://github.com/someone/scbd")
    assert not done.returncode, done.stderr
    assert call(clone, "-c", "git grep -n OWNER/scbd -- . ':!tests' ':!.ci' ':!docs'").stdout == ""
    assert "https://github.com/someone/scbd/raw/v" in (clone / "pyproject.toml").read_text(encoding="utf-8")
    assert "  - someone\n" in (clone / ".github/ecosystem/meta.yaml").read_text(encoding="utf-8")
    wrong = call(clone, ".ci/address", "github.com/someone")
    assert wrong.returncode == 2 and "is not https://github.com/WHO/NAME" in wrong.stderr
