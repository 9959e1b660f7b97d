from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest

from scbd.workflows import Results, Trial, _systems
from scbd.workflows._rows import FORMAT
from scbd.workflows._systems import MEANINGS

TRIAL = Trial("domain generalization", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.1})


def test_a_key_is_the_same_for_the_same_trial_and_another_for_any_other():
    same = Trial("domain generalization", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.1})
    assert TRIAL.key == same.key and TRIAL.key.startswith("colored-mnist-scbd-seed-3-")
    others = [
        Trial("batch correction", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.1}),
        Trial("domain generalization", "colored_mnist", "SCBD", 4, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.1}),
        Trial("domain generalization", "colored_mnist", "SCBD", 3, {}, {"alpha": 1.0}, {"lr": 0.1}),
        Trial("domain generalization", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 2.0}, {"lr": 0.1}),
        Trial("domain generalization", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.2}),
    ]
    assert len({trial.key for trial in [TRIAL, *others]}) == 6
    # the order in which settings are named does not matter
    one, two = (Trial("p", "d", "s", model=model) for model in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one.key == two.key


def test_rows_hold_everything_needed_to_run_again(tmp_path):
    results = Results(tmp_path)
    assert TRIAL not in results and results.frame().empty
    results.add(TRIAL, {"r_c out": 0.5}, {"seconds": 2.0})
    assert TRIAL in Results(tmp_path)
    (row,) = results.frame().to_dict("records")
    assert row == {
        "key": TRIAL.key,
        "protocol": "domain generalization",
        "dataset": "colored_mnist",
        "system": "SCBD",
        "seed": 3,
        "n_train": 10,
        "alpha": 1.0,
        "lr": 0.1,
        "r_c out": 0.5,
        "seconds": 2.0,
    }
    assert results.trial(TRIAL.key) == TRIAL
    with pytest.raises(KeyError, match="has no row 'nothing'"):
        results.trial("nothing")


def test_at_rest_they_are_the_same(tmp_path):
    others = [replace(TRIAL, seed=seed) for seed in (5, 4)]
    results = Results(tmp_path)
    for trial in (*others, TRIAL):
        results.add(
            trial, {"r_c out": 0.1 + 0.2, "r_c in": float("nan")}, {"warnings": ["\u2026\u2028"], "resumed": False}
        )
    frame = results.frame()
    results.fold()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    again = Results(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), frame, check_exact=True)
    assert again.trial(TRIAL.key) == TRIAL and repr(again).endswith(": 3 runs")
    new = replace(TRIAL, seed=6)
    assert again.missing([new, *others, TRIAL]) == [new]


def test_the_folder_of_files_is_not_the_directory(tmp_path):
    """Which it was before rows were folded: else nothing would be found there, without a word."""
    results = Results(tmp_path)
    results.add(TRIAL, {}, {})
    for _ in ("running", "at rest"):
        with pytest.raises(ValueError, match=rf"rows holds runs only until .*: give the directory above, {tmp_path}\."):
            Results(tmp_path / "rows")
        results.fold()
    assert Results(tmp_path / "elsewhere" / "rows").frame().empty


def test_rows_of_another_version_are_refused_and_kept(tmp_path):
    results = Results(tmp_path)
    results.add(TRIAL, {}, {})
    path = tmp_path / "rows" / f"{TRIAL.key}.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {"format": FORMAT + 1}))
    with pytest.raises(
        ValueError, match=rf"another version of scbd .rows of format {FORMAT + 1}, this one has {FORMAT}"
    ):
        Results(tmp_path)
    assert json.loads(path.read_text())["format"] == FORMAT + 1


@pytest.mark.parametrize("model", [{}, {"alpha": "auto"}, {"alpha": 1.0}])
def test_a_rule_of_alpha_that_has_changed_concerns_the_rows_it_chose_for(monkeypatch, model):
    new, erm = (Trial("domain generalization", "colored_mnist", name, model=model) for name in ("SCBD", "ERM"))
    before = new.key, erm.key
    monkeypatch.setattr(_systems, "RULES_OF_ALPHA", _systems.RULES_OF_ALPHA + 1)
    assert (new.key == before[0]) == (model.get("alpha") == 1.0)
    assert erm.key == before[1]


def test_a_way_to_score_that_has_changed_concerns_the_rows_of_its_protocol(monkeypatch):
    read, plain = (Trial(name, "colored_mnist", "ERM") for name in ("counterfactuals", "domain generalization"))
    before = read.key, plain.key
    monkeypatch.setitem(_systems.CHANGED_SCORES, "counterfactuals", _systems.CHANGED_SCORES["counterfactuals"] + 1)
    assert read.key != before[0] and plain.key == before[1]


def test_rows_of_a_system_that_has_changed_are_left_out_and_kept(tmp_path, monkeypatch):
    Results(tmp_path).add(TRIAL, {"r_c out": 0.5}, {})
    old = tmp_path / "rows" / f"{TRIAL.key}.json"
    row = json.loads(old.read_text())
    assert row.pop("meaning") == 1
    old.write_text(json.dumps(row))  # rows once named none
    assert TRIAL in Results(tmp_path) and not Results(tmp_path).left_out()
    monkeypatch.setitem(MEANINGS, "SCBD", 2)
    results = Results(tmp_path)
    assert TRIAL not in results and results.frame().empty and results.left_out() == [old.stem]
    results.add(TRIAL, {"r_c out": 0.7}, {})
    assert TRIAL in results and list(results.frame()["r_c out"]) == [0.7]
    assert json.loads(old.read_text())["scores"] == {"r_c out": 0.5}
    # the other way round, rows of a newer scbd
    monkeypatch.setitem(MEANINGS, "SCBD", 1)
    for _ in ("running", "at rest"):
        assert list(Results(tmp_path).frame()["r_c out"]) == [0.5] and len(Results(tmp_path).left_out()) == 1
        results.fold()


@pytest.mark.parametrize("text", ["", '{"format": 1, "tri', "[]", '{"trial": {}}'])
def test_broken_rows_are_named(tmp_path, text):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "broken.json").write_text(text)
    with pytest.raises(ValueError, match="broken.json is no row of an experiment, or is truncated .*: move it away"):
        Results(tmp_path)


def test_a_half_written_row_is_no_row(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / f".{TRIAL.key}.json").write_text('{"form')
    assert TRIAL not in Results(tmp_path)
