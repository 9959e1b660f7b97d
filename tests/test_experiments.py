from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

import scbd
from scbd import experiments


@pytest.fixture
def untouched(monkeypatch):
    """As it is when nobody has asked for a name yet."""
    for name in experiments.__all__:
        monkeypatch.delitem(vars(experiments), name, raising=False)


@pytest.mark.parametrize("name", experiments.__all__)
def test_every_old_name_is_the_new_one_and_says_where_it_is(name, untouched):
    home = "paper" if name in scbd.paper.__all__ else "workflows"
    with pytest.warns(DeprecationWarning, match=rf"scbd\.experiments\.{name} has moved: use scbd\.{home}\.{name},"):
        found = getattr(experiments, name)
    assert found is getattr(getattr(scbd, home), name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(experiments, name) is found  # said once


def test_the_names_of_before_are_all_there():
    assert len(experiments.__all__) == len(set(experiments.__all__)) == 23
    assert set(experiments.__all__) <= set(dir(experiments))
    with pytest.raises(AttributeError, match="module 'scbd.experiments' has no attribute '_grid'"):
        experiments._grid  # noqa: B018


def test_the_warning_is_about_the_line_that_asks(untouched):
    with pytest.warns(DeprecationWarning) as caught:
        from scbd.experiments import select_alpha
    assert select_alpha is scbd.select_alpha
    assert [warning.filename for warning in caught] == [__file__]


def test_nothing_is_said_or_loaded_before_a_name_is_asked_for():
    code = "import sys, scbd.experiments; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "scbd.workflows", "scbd.paper"} & set(done.stdout.split())
