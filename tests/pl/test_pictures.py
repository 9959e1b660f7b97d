from __future__ import annotations

import numpy as np
import pytest

from scbd.pl._pictures import channels_shown


@pytest.mark.parametrize(
    ("asked", "n", "shown"),
    [(None, 3, [0, 1, 2]), (None, 1, [0]), (None, 5, [0]), ([3, 1, 0], 4, [3, 1, 0]), (2, 3, [2]), ((-1,), 4, [-1])],
)
def test_three_channels_or_one(asked, n, shown):
    assert channels_shown(asked, np.zeros((2, n, 4, 4))) == shown


@pytest.mark.parametrize("asked", [[0, 1], [], [4], [0, 1, -5], [True, False, True], ["DNA"], "DNA", 1.5, [[0, 1, 2]]])
def test_other_channels_get_a_sentence(asked):
    with pytest.raises(
        ValueError, match="name one channel to show in grey, or three as .* numbers from 0 to 3"
    ) as raised:
        channels_shown(asked, np.zeros((2, 4, 4, 4)))
    assert str(raised.value).startswith(f"channels={asked!r}: ")


def test_what_makes_no_pictures():
    with pytest.raises(ValueError, match="The model is one of features, which make no pictures"):
        channels_shown(None, np.zeros((2, 12)))
    with pytest.raises(ValueError, match="rows names no cell"):
        channels_shown(None, np.zeros((0, 3, 4, 4)))
