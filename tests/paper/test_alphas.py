from __future__ import annotations

import pandas as pd
import pytest

from scbd.paper._alphas import by_alpha, cost_of_choosing


def rows(alphas: list[float | str]) -> pd.DataFrame:
    """Accuracy falls with alpha, what is wanted of it rises."""
    columns = ["seed", "alpha", "seen", "wanted"]
    return pd.DataFrame([(0, alpha, 0.9 - 0.01 * i, 0.5 + 0.1 * i) for i, alpha in enumerate(alphas)], columns=columns)


def test_what_finds_its_own_alpha_comes_last():
    assert list(by_alpha(rows([10.0, "auto", 3.0, 0.0]))["alpha"]) == [0.0, 3.0, 10.0, "auto"]


def test_the_cost_is_in_points_below_the_best():
    # 0.9, 0.89, 0.88, 0.87: the last is below 97 % of the best
    text = cost_of_choosing(rows([0.0, 1.0, 2.0, 3.0]), "seen", "wanted", "score")
    assert "seed by seed: 2 (1). Its score is 10.0 percentage points below that of the best alpha." in text


@pytest.mark.parametrize("alphas", [[], [1.0], [1.0, "auto"]])
def test_nothing_is_said_where_there_was_no_choice(alphas):
    assert cost_of_choosing(rows(alphas), "seen", "wanted", "score") == ""
