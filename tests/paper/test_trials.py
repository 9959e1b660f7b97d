from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from paper import systems
from paper.systems import VERSIONS
from paper.trials import Results, Trial

TRIAL = Trial("domain generalization", "colored_mnist", "SCBD", 3, {"n_train": 10}, {"alpha": 1.0}, {"lr": 0.1})


def test_key_equal_trials_is_equal_other_trials_differ():
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
    # the order of settings does not matter
    one, two = (Trial("p", "d", "s", model=model) for model in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one.key == two.key


def test_add_row_contains_trial_scores_and_run(tmp_path):
    results = Results(tmp_path)
    assert results.missing([TRIAL]) and results.frame().empty
    results.add(TRIAL, {"r_c out": 0.5}, {"seconds": 2.0})
    assert not Results(tmp_path).missing([TRIAL])
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
    assert Trial(**results.rows()[TRIAL.key]["trial"]) == TRIAL


def test_fold_frame_is_unchanged(tmp_path):
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
    new = replace(TRIAL, seed=6)
    assert again.missing([new, *others, TRIAL]) == [new]


@pytest.mark.parametrize("model", [{}, {"alpha": "auto"}, {"alpha": 1.0}])
def test_key_changed_rule_of_alpha_changes_only_automatic_alpha(monkeypatch, model):
    new, erm = (Trial("domain generalization", "colored_mnist", name, model=model) for name in ("SCBD", "ERM"))
    before = new.key, erm.key
    monkeypatch.setattr(systems, "RULES_OF_ALPHA", systems.RULES_OF_ALPHA + 1)
    assert (new.key == before[0]) == (model.get("alpha") == 1.0)
    assert erm.key == before[1]


def test_key_changed_scores_changes_only_trials_of_their_protocol(monkeypatch):
    read, plain = (Trial(name, "colored_mnist", "ERM") for name in ("counterfactuals", "domain generalization"))
    before = read.key, plain.key
    monkeypatch.setitem(systems.CHANGED_SCORES, "counterfactuals", systems.CHANGED_SCORES["counterfactuals"] + 1)
    assert read.key != before[0] and plain.key == before[1]


def test_results_rows_of_other_version_are_excluded_and_kept(tmp_path, monkeypatch):
    Results(tmp_path).add(TRIAL, {"r_c out": 0.5}, {})
    old = tmp_path / "rows" / f"{TRIAL.key}.json"
    row = json.loads(old.read_text())
    assert row.pop("meaning") == 1
    old.write_text(json.dumps(row))  # early rows do not contain a version
    assert not Results(tmp_path).missing([TRIAL]) and not Results(tmp_path).left_out()
    monkeypatch.setitem(VERSIONS, "SCBD", 2)
    results = Results(tmp_path)
    assert results.missing([TRIAL]) and results.frame().empty and results.left_out() == [old.stem]
    results.add(TRIAL, {"r_c out": 0.7}, {})
    assert not results.missing([TRIAL]) and list(results.frame()["r_c out"]) == [0.7]
    assert json.loads(old.read_text())["scores"] == {"r_c out": 0.5}
    # the reverse case: rows of a newer version of scbd
    monkeypatch.setitem(VERSIONS, "SCBD", 1)
    for _ in ("running", "at rest"):
        assert list(Results(tmp_path).frame()["r_c out"]) == [0.5] and len(Results(tmp_path).left_out()) == 1
        results.fold()


@pytest.mark.parametrize("text", ["", '{"format": 1, "tri', "[]", '{"trial": {}}', '{"format": 2, "trial": {}}'])
@pytest.mark.parametrize("name", ["rows/broken.json", "rows.jsonl"])
def test_results_broken_rows_raise_with_file_name_and_are_kept(tmp_path, name, text):
    (tmp_path / "rows").mkdir()
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(ValueError, match=name):
        Results(tmp_path)
    assert (tmp_path / name).read_text() == text + "\n"


def make_results(out: Path) -> Results:
    """Return results with two folded rows, one of which was run again, and one row that is not folded."""
    results = Results(out)
    for seeds, scores in (((1, 2), {"a": 1}), ((2, 3), {"a": 2})):
        for seed in seeds:
            results.add(replace(TRIAL, seed=seed), scores, {})
        if scores["a"] == 1:
            results.fold()
    return results


def test_frame_row_file_replaces_folded_row_of_same_key(tmp_path):
    results = make_results(tmp_path)
    before = results.frame()
    assert before.sort_values("seed")["a"].tolist() == [1, 2, 2]
    results.fold()
    pd.testing.assert_frame_equal(results.frame(), before)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


class Killed(BaseException):
    """Exception after which no further code runs, as after a kill."""


def test_fold_killed_at_any_step_loses_no_row_and_next_call_completes(tmp_path, monkeypatch):
    for moment in itertools.count():
        results = make_results(tmp_path / str(moment))
        before, moments = results.rows(), itertools.count()
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink", "rmdir"):
                done = getattr(os, name)

                def step(*given, done=done, moment=moment, moments=moments, **how):
                    if next(moments) >= moment:
                        raise Killed
                    return done(*given, **how)

                patch.setattr(os, name, step)
            try:
                results.fold()
            except Killed:
                assert results.rows() == before
            else:
                break
        results.fold()
        assert results.rows() == before and (tmp_path / str(moment) / "rows.jsonl").is_file()
    assert moment > 4


# each process adds rows, and folds the existing rows in between
CODE = """
import os
from dataclasses import replace
from paper.trials import Results, Trial

results, workers = Results({out!r}), []
for worker in range(3):
    workers.append(os.fork())
    if not workers[-1]:
        mine = [Trial("p", "d", "s", 100 * worker + i) for i in range(20)]
        for i, trial in enumerate(mine, start=1):
            results.add(trial, {{}}, {{}})
            if i % 3 == worker:
                results.fold()
            assert not results.missing(mine[:i])
        os._exit(0)
assert not any([os.waitpid(worker, 0)[1] for worker in workers])
"""


def test_add_and_fold_in_parallel_processes_lose_no_row(tmp_path):
    folder = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, "-c", CODE.format(out=str(tmp_path))]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    results = Results(tmp_path)
    results.fold()
    assert sorted(results.frame()["seed"]) == [100 * worker + i for worker in range(3) for i in range(20)]
