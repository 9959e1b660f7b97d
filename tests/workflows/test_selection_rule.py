from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.workflows import best_setting


def test_one_setting_for_all_seeds():
    """The small rate is best on the first seed, and worse in the mean."""
    accuracy = pd.Series([0.9, 0.8, 0.1, 0.7])
    assert best_setting(accuracy, pd.Series(["small", "large", "small", "large"])) == "large"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8)), min_size=1))
def test_no_setting_has_a_higher_mean(runs):
    of: dict[str, list[int]] = {}
    for setting, accuracy in runs:
        of.setdefault(setting, []).append(accuracy)
    means = {setting: sum(accuracies) / len(accuracies) for setting, accuracies in of.items()}
    settings, accuracies = zip(*runs, strict=True)
    assert means[best_setting(pd.Series(accuracies), pd.Series(settings))] == max(means.values())


def test_of_equals_the_first_is_taken():
    assert best_setting(pd.Series([0.5, 0.5]), pd.Series(["z", "a"])) == "z"


def test_the_index_of_runs_does_not_matter():
    accuracy = pd.Series([0.2, 0.9], index=[7, 3])
    assert best_setting(accuracy, pd.Series(["a", "b"])) == "b"


@given(st.lists(st.integers(0, 8), min_size=4, max_size=4), st.integers(0, 1))
def test_what_is_left_of_a_setting_whose_runs_were_lost_is_not_chosen(accuracies, lost):
    accuracy = pd.Series(accuracies, dtype=float)
    accuracy[2 * lost] = np.nan
    setting = pd.Series(["a", "a", "b", "b"])
    assert best_setting(accuracy, setting) == ("a" if lost else "b")
    accuracy[3 - 2 * lost] = np.nan
    with pytest.raises(ValueError, match="Each of 2 settings has a run whose accuracy is NaN"):
        best_setting(accuracy, setting)
