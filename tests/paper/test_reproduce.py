from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from official import write_mnist

from scbd.cli import main
from scbd.paper import _budgets, _spaces, reproduce
from scbd.paper._reproduce import EXPERIMENTS
from scbd.workflows import DATASETS, UNTRAINED

pytestmark = [pytest.mark.filterwarnings("ignore:z_c has collapsed"), pytest.mark.usefixtures("permuted_once")]


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Four small files in the layout of MNIST, and a budget that is over in seconds."""
    model, training = _budgets.SIZES["smoke"]
    monkeypatch.setitem(_budgets.SIZES, "smoke", (model | {}, training | {"max_steps": 3, "batch_size": 64}))
    monkeypatch.setitem(_budgets.DATA, ("colored_mnist", "smoke"), {"n_train": 300, "n_test": 100})
    monkeypatch.setattr(_spaces, "UNTRAINED", UNTRAINED | {"max_steps": 2})
    return write_mnist(tmp_path / "mnist")


def test_colored_mnist_end_to_end_and_again(tmp_path, digits, monkeypatch):
    out = tmp_path / "out"
    frame = reproduce("cmnist", path=digits, out=out)
    assert list(frame["system"]) == ["pixel PCA", "random encoder", *["SCBD"] * 3, *["ERM"] * 3]
    # every row of an encoder has its control beside it
    encoders = frame[frame["system"] != "pixel PCA"]
    for part in ("in", "out"):
        assert (encoders[f"random encoder, r_c {part}"] == encoders[f"r_c {part}"].iloc[0]).all()
    assert {"rows.jsonl", "runs", "table.md", "alpha.png", "erm.png"} == {path.name for path in out.iterdir()}
    rows = (out / "rows.jsonl").read_text()
    assert len(rows.splitlines()) == 8
    # nothing in a row names this machine's folders
    assert str(tmp_path) not in rows
    (out / "table.md").unlink()
    monkeypatch.setattr("scbd.workflows._runner.run_trial", None)  # whatever would be run fails
    assert reproduce("cmnist", path=digits, out=out).equals(frame)
    assert reproduce("cmnist", out=out, report_only=True).equals(frame)
    assert (out / "table.md").exists()


def test_the_command_line(tmp_path, digits, capsys):
    arguments = ["reproduce", "cmnist-long", "--data", str(digits), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--shard", "1/1", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "| SCBD, alpha 192 | 60 |" in printed and str(tmp_path / "out") in printed
    assert main([*arguments, "--report"]) == 0
    assert main(["reproduce", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in EXPERIMENTS)
    for wrong, message in [
        (["reproduce", "mnist"], "There is no experiment 'mnist': use one of cmnist"),
        (["reproduce", "cmnist", "--budget", "huge"], "There is no budget 'huge': use one of smoke, small, paper"),
        (["reproduce", "vlcs"], "vlcs is not downloaded by scbd: see scbd.datasets.vlcs for its source"),
        (["reproduce", "cmnist", "--seeds", "0"], "--seeds 0: run at least one seed"),
        (["reproduce", "screen", "--report", "--out", str(tmp_path / "none")], "has no finished run of screen"),
        (["reproduce", "cmnist", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")], "lacks train-images"),
    ]:
        assert main(wrong) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") <= 2


def test_a_bad_shard_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "cmnist", "--shard", "one"])
    assert "'one' is no share of the work: write 1/4 for the first of four" in capsys.readouterr().err


def test_a_table_of_features_end_to_end(tmp_path, monkeypatch):
    """Genes of one complex share a direction; wells shift all features, and are gone once standardised."""
    rng = np.random.default_rng(0)
    complexes = {f"G{i}": i % 6 for i in range(24)}
    genes = rng.choice([*complexes, *["nontargeting"] * 24], 1200)
    wells, directions = rng.integers(4, size=1200), np.eye(6)
    features = rng.normal(size=(1200, 6)) + 20.0 * wells[:, None]
    for gene, of in complexes.items():
        features[genes == gene] += 3 * directions[of]
    table = pd.DataFrame(features, columns=[f"feature {i}" for i in range(6)])
    table = table.assign(gene_symbol_0=genes, sgRNA_0=genes, plate="P", well=wells.astype(str))
    table.to_parquet(tmp_path / "features.parquet")
    pairs = [(a, b) for a in complexes for b in complexes if a < b and complexes[a] == complexes[b]]
    net = pd.DataFrame(pairs, columns=["source", "target"])
    known = replace(DATASETS["funk22_cellprofiler"], relations=lambda adata: net)
    monkeypatch.setitem(DATASETS, "funk22_cellprofiler", known)
    frame = reproduce("funk22-cellprofiler", path=tmp_path / "features.parquet", out=tmp_path / "out", n_seeds=1)
    assert frame["relationship_average_precision"].item() > 0.9 and frame["e_probe_f1"].item() < 0.4
    assert "| CellProfiler |" in (tmp_path / "out" / "table.md").read_text()
    table.drop(columns="well").to_parquet(tmp_path / "features.parquet")
    with pytest.raises(KeyError, match="obs has no 'well'"):
        reproduce("funk22-cellprofiler", path=tmp_path / "features.parquet", out=tmp_path / "other", n_seeds=1)
