from __future__ import annotations

import os

import pytest

from scbd.data._walking import walked


@pytest.fixture
def tree(tmp_path):
    for name in ("b/2.png", "b/1.png", "a/deep/3.png", ".hidden/4.png", "__MACOSX/5.png", ".6.png", "7.png"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()
    return tmp_path / "tree"


def files(folder) -> list[str]:
    return [os.path.relpath(os.path.join(place, name), folder) for place, names in walked(folder) for name in names]


def test_what_systems_leave_is_passed_over(tree):
    assert files(tree) == ["7.png", "a/deep/3.png", "b/1.png", "b/2.png"]


def test_links_are_followed_but_not_in_circles(tree, tmp_path):
    (tmp_path / "linked").mkdir()
    for name in ("x", "y"):  # twice the same is two classes
        (tmp_path / "linked" / name).symlink_to(tree / "b")
    assert files(tmp_path / "linked") == ["x/1.png", "x/2.png", "y/1.png", "y/2.png"]
    (tree / "a" / "up").symlink_to(tree)
    (tree / "b" / "to a").symlink_to(tree / "a")
    (tree / "a" / "to b").symlink_to(tree / "b")
    found = files(tree)
    assert found[:2] == ["7.png", "a/deep/3.png"] and {"a/to b/1.png", "b/to a/deep/3.png"} < set(found)
    assert len(found) == 7
