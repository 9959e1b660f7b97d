from __future__ import annotations

import pytest

from scbd._progress import progress_bar


@pytest.mark.parametrize(
    ("n", "settings", "seen"),
    [
        (100, {}, False),
        (100_000, {}, True),
        (100, {"shown": True}, True),
        (100_000, {"shown": False}, False),
        (100, {"worth": 50}, True),
    ],
)
def test_a_bar_is_shown_where_waiting_is_long_or_where_it_is_asked_for(capsys, n, settings, seen):
    with progress_bar("Counting", n, unit="image", **settings) as bar:
        bar.update(n)
    said = capsys.readouterr().err
    assert ("Counting" in said and "100%" in said and " images/s" in said) is seen


def test_a_bar_goes_on_where_it_was(capsys):
    with progress_bar("Counting", 10, initial=5, shown=True):
        pass
    assert "50%" in capsys.readouterr().err
