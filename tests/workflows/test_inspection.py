"""Tests of opening cells and inspecting files, without importing the libraries that train models."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from conftest import IMAGE_KEY as KEY
from conftest import make_cells, make_wells
from PIL import Image

from scbd._workflows.inspection import _count_values, describe_path, open_cells, propose_options
from scbd.cli import main
from scbd.data import write_screen

HEAVY = {"torch", "lightning", "scvi", "scanpy", "sklearn", "matplotlib"}
ANNDATA, PANDAS = {"anndata", "zarr"}, {"pandas", "numpy"}


def test_open_cells_image_or_obsm_key_returns_its_location(tmp_path):
    cells = make_cells()
    cells.obsm["other"] = cells.obsm.pop(KEY)
    cells.obsm["X_dino"] = np.ones((cells.n_obs, 3), "float32")
    cells.write_h5ad(tmp_path / "cells.h5ad")
    found, where = open_cells(tmp_path / "cells.h5ad", image_key="other")
    assert where == {"image_key": "other"} and "other" in found.obsm
    found, where = open_cells(tmp_path / "cells.h5ad", obsm_key="X_dino")
    assert where == {"obsm_key": "X_dino"} and found.obsm["X_dino"].shape == (cells.n_obs, 3)


@pytest.mark.parametrize("layer", [None, "X"])
@pytest.mark.parametrize(("ending", "write"), [("csv", "to_csv"), ("parquet", "to_parquet")])
@pytest.mark.filterwarnings("ignore:Transforming to str index")
def test_open_cells_feature_table_returns_features_and_labels(ending, write, layer, tmp_path):
    wells = make_wells()
    getattr(wells.to_df().join(wells.obs).reset_index(drop=True), write)(tmp_path / f"wells.{ending}", index=False)
    found, where = open_cells(tmp_path / f"wells.{ending}", layer=layer)
    assert where == {"layer": "X"}
    np.testing.assert_allclose(found.X, wells.X, rtol=1e-6)
    assert found.obs["compound"].tolist() == wells.obs["compound"].tolist()


def test_open_cells_numeric_labels_are_not_features(tmp_path):
    wells = make_wells()
    table = wells.to_df().join(wells.obs).assign(donor=np.arange(wells.n_obs) % 3, dose=1.5)
    table.to_csv(tmp_path / "wells.csv", index=False)
    found, _ = open_cells(tmp_path / "wells.csv")
    assert found.var_names.tolist() == wells.var_names.tolist()
    assert found.obs["donor"].tolist() == table["donor"].tolist() and set(found.obs["dose"]) == {1.5}
    found, _ = open_cells(tmp_path / "wells.csv", features=["dose", "feature_1"])
    assert found.var_names.tolist() == ["feature_1", "dose"]


def test_open_cells_inapplicable_options_raises(tmp_path):
    make_wells().to_df().to_csv(tmp_path / "wells.csv")
    make_wells().write_h5ad(tmp_path / "wells.h5ad")
    (tmp_path / "crops.csv").write_text("gene,dna,actin\na,0_dna.tif,0_actin.tif\n")
    for name, how, error, named in (
        ("wells.csv", {"layer": "scaled"}, ValueError, "layer"),
        ("wells.csv", {"obsm_key": "X_dino"}, ValueError, "obsm_key"),
        ("wells.h5ad", {"layer": "X", "features": ["donor"]}, ValueError, "features"),
        ("crops.csv", {}, ValueError, "scbd convert .*crops.csv --file-columns dna actin"),
        ("none.csv", {}, FileNotFoundError, "none.csv"),
    ):
        with pytest.raises(error, match=named):
            open_cells(tmp_path / name, **how)


def write_pictures(path: Path) -> None:
    """Write crops in two folders, and a table of them."""
    names = [f"{row % 2}/{row}.png" for row in range(8)]
    for row, name in enumerate(names):
        (path.parent / name).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(row).integers(1, 200, (6, 6, 3), dtype="uint8")
        Image.fromarray(pixels).save(path.parent / name)
    pd.DataFrame({"gene": list("aabb") * 2, "file": names}).to_csv(path, index=False)


@pytest.mark.filterwarnings("ignore:Transforming to str index")
@pytest.mark.parametrize(
    ("name", "write", "lines", "command"),
    [
        (
            "screen.h5ad",
            lambda path: make_cells().write_h5ad(path),
            ["96 cells of 2 × 16 × 16 uint8", "channel channel_0: ", "column gene: 4 values (gene_"],
            "scbd run {} --y-key gene --e-key plate --out results",
        ),
        (
            "wells.h5ad",
            lambda path: make_wells().write_h5ad(path),
            ["72 cells or wells of 10 features: feature_0", "column plate: 4 values"],
            "scbd run {} --layer X --y-key compound --e-key plate --control DMSO --position-key well --out",
        ),
        (
            "my cells.csv",
            write_pictures,
            ["names image files", "8 cells of 3 × 6 × 6"],
            "scbd convert {} --file-columns file --y-key gene --out",
        ),
        (
            "crops.npy",
            lambda path: np.save(path, make_cells().obsm[KEY]),
            ["No column has values", "one row per image, in their order"],
            "scbd convert {} --table labels.csv --y-key",
        ),
        (
            "wells.parquet",
            lambda path: make_wells().to_df().to_parquet(path),
            ["of 10 features", "No column has values"],
            "add columns with the perturbation and the environment",
        ),
        ("notes.txt", lambda path: path.write_text("hello"), ["of no known kind"], "give .h5ad"),
    ],
)
def test_describe_path_any_kind_describes_it_and_proposes_a_command(tmp_path, name, write, lines, command):
    write(tmp_path / name)
    found = describe_path(tmp_path / name)
    assert all(line in found for line in lines), found
    assert command.format(shlex.quote(str(tmp_path / name))) in found.splitlines()[-1]


def test_inspect_image_key_given_names_it_in_the_command(tmp_path, capsys):
    cells: Any = make_cells()
    cells.obsm["crops"] = cells.obsm.pop(KEY)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    assert main(["inspect", str(tmp_path / "cells.h5ad"), "--image-key", "crops"]) == 0
    assert "--image-key crops --y-key" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "cells.h5ad"), "--image-key", "masks"]) == 2
    (tmp_path / "cut.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n and no more")
    for name in ("cut.h5ad", "none"):
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err


RUN = ["run", "wells.csv", "--y-key", "compound", "--e-key", "plate", "--out", "out"]
OF_NONE = ["none.csv", "--y-key", "compound", "--e-key", "plate"]


@pytest.mark.parametrize(
    ("absent", "command", "code"),
    [
        (HEAVY, ["inspect", "cells.h5ad"], 0),
        (HEAVY, ["inspect", "screen.zarr"], 0),
        (HEAVY, [*RUN, "--features", "none"], 2),
        (HEAVY, [*RUN, "--position-key", "none"], 2),
        (HEAVY | ANNDATA, ["inspect", "wells.csv"], 0),
        (HEAVY | ANNDATA, ["inspect", "crops.csv"], 0),
        (HEAVY | ANNDATA, ["inspect", "0"], 0),
        (HEAVY | ANNDATA | PANDAS, ["--help"], 0),
        (HEAVY | ANNDATA | PANDAS, ["--version"], 0),
        (HEAVY | ANNDATA | PANDAS, ["run", "--help"], 0),
        (HEAVY | ANNDATA | PANDAS, [*RUN, "--max-stepz", "1"], 2),
        (HEAVY | ANNDATA | PANDAS, [*RUN, "--missing", "maybe"], 2),
        (HEAVY | ANNDATA | PANDAS, ["run", "wells.csv", "--e-key", "plate", "--out", "out"], 2),
        (HEAVY | ANNDATA | PANDAS, ["inspect", "none.csv"], 2),
        (HEAVY | ANNDATA | PANDAS, ["run", *OF_NONE, "--out", "out"], 2),
        (HEAVY | ANNDATA | PANDAS, ["select-alpha", *OF_NONE, "--out", "out"], 2),
        (HEAVY | ANNDATA | PANDAS, ["benchmark", *OF_NONE], 2),
        (HEAVY | ANNDATA | PANDAS, ["convert", "none.csv", "--y-key", "compound", "--out", "new.zarr"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_main_commands_without_training_import_no_heavy_module(example_files, absent, command, code):
    run = "import json, sys; from scbd.cli import main; print(json.dumps([main(sys.argv[1:]), *sys.modules]))"
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", run, *command], cwd=example_files, **how)
    found, *modules = json.loads(done.stdout.splitlines()[-1])
    assert found == code, done.stderr
    assert not absent & set(modules)


@pytest.fixture(scope="module")
def example_files(tmp_path_factory):
    """Return a folder with one file or folder of each of several kinds."""
    path = tmp_path_factory.mktemp("files")
    write_wells(path / "wells.csv")
    make_cells().write_h5ad(path / "cells.h5ad")
    write_screen(path / "screen.zarr", make_cells(), y_key="gene")
    write_pictures(path / "crops.csv")
    return path


def write_wells(path: Path) -> pd.DataFrame:
    wells = make_wells()
    table = wells.to_df().join(wells.obs)
    table.to_csv(path, index=False)
    return table


def lines_of(found: str, *beginnings: str) -> list[str]:
    return [line for line in found.splitlines() if line.startswith(beginnings)]


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:y and e are confounded", "ignore:Scores are")
@pytest.mark.parametrize(
    ("columns", "rename"),
    [
        ({"ratio of YAP/TAZ": 0.5}, {}),
        ({"..": 1.5, "_index": 2.5}, {}),
        ({}, {"plate": "Metadata/Plate"}),
        ({"nucleus line": "HeLa"}, {f"feature_{i}": f"nucleus {i}" for i in range(10)}),
    ],
    ids=["a slash in a column", "reserved names", "a slash in e_key", "text among the features"],
)
def test_inspect_table_proposes_a_command_that_run_accepts(tmp_path, capsys, monkeypatch, columns, rename):
    write_wells(tmp_path / "wells.csv").assign(**columns).rename(columns=rename).to_csv(
        tmp_path / "wells.csv", index=False
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scbd._workflows.run._write_pictures", lambda *args: None)
    assert main(["inspect", "wells.csv"]) == 0
    (proposed,) = lines_of(capsys.readouterr().out, "Next: ")
    assert "…" not in proposed
    quick = ["--max-steps", "1", "--accelerator", "cpu"]
    assert main([*shlex.split(proposed.removeprefix("Next: scbd ")), *quick]) == 0
    cells, logged = anndata.read_h5ad("results/cells.h5ad"), capsys.readouterr().err
    for name in (*columns, *rename.values()):
        assert name in [*cells.obs, *cells.var_names] or f"{name!r} as " in logged


def test_describe_path_table_names_numeric_columns_not_taken(tmp_path):
    wells = make_wells()
    features = wells.to_df().set_axis([f"nucleus {i}" for i in range(9)] + ["Number of cells"], axis=1)
    more = {"number of spots": features["nucleus 1"], "number of holes": 1.5, "number of edges": 2.5}
    table = features.assign(**{"mean of YAP": features["nucleus 0"], **more}).join(wells.obs)
    table.to_csv(tmp_path / "wells.csv", index=False)
    found = describe_path(tmp_path / "wells.csv")
    assert lines_of(found, "Not taken") == [
        "Not taken as features: 2 columns of numbers (Number of cells, mean of YAP); to take them, add their names, or "
        "what they begin with, to --features."
    ]
    (counts,) = lines_of(found, "Among the features are counts")
    assert all(name in counts for name in more)
    assert "--features nucleus number " in found


@pytest.mark.parametrize(("column", "ending"), [("cell_mask", ""), ("nuclei", "_seg")])
def test_describe_path_table_with_masks_proposes_only_channels(tmp_path, column, ending):
    write_pictures(tmp_path / "crops.csv")
    table = pd.read_csv(tmp_path / "crops.csv")
    table[column] = table["file"].str.replace(".png", f"{ending}.png")
    for image, mask in zip(table["file"], table[column], strict=True):
        (tmp_path / mask).write_bytes((tmp_path / image).read_bytes())
    table.to_csv(tmp_path / "crops.csv", index=False)
    found = describe_path(tmp_path / "crops.csv")
    assert "--file-columns file --y-key gene" in found and "8 cells of 3 × 6 × 6" in found
    assert lines_of(found, "Not taken as channels")[0].endswith(f"{column}.")


def test_describe_path_many_images_states_sample_size_of_the_range(tmp_path):
    make_cells(96).write_h5ad(tmp_path / "many.h5ad")
    make_cells(60).write_h5ad(tmp_path / "few.h5ad")
    assert all(
        "in a random sample of 64 cells" in x for x in lines_of(describe_path(tmp_path / "many.h5ad"), "  channel")
    )
    assert not any("sample" in x for x in lines_of(describe_path(tmp_path / "few.h5ad"), "  channel"))


def test_describe_path_unlabelled_images_proposes_table_for_convert(tmp_path, monkeypatch):
    write_pictures(tmp_path / "crops.csv")
    (tmp_path / "png").mkdir()
    for file in tmp_path.glob("[01]/*.png"):
        file.rename(tmp_path / "png" / file.name)
    found = describe_path(tmp_path / "png")
    assert "a column with its name, such as 0.png" in found
    (proposed,) = lines_of(found, "Next: ")
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"name": [f"{i}.png" for i in range(8)], "gene": list("aabb") * 2}).to_csv("labels.csv", index=False)
    assert main(shlex.split(proposed.removeprefix("Next: scbd ").replace("…", "gene"))) == 0
    assert "column gene: 2 values" in describe_path(tmp_path / "screen.zarr")


def make_screen_labels(**columns: Any) -> pd.DataFrame:
    """Return labels of eight perturbations in two weeks, half in each, with three replicates on separate plates."""
    rows = pd.MultiIndex.from_product([range(8), range(3), range(4)], names=["gene", "rep", "cell"]).to_frame(
        index=False
    )
    week = rows["gene"] % 2
    given = {"week": week, "plate": 3 * week + rows["rep"], "replicate": rows["rep"], "well": rows["gene"]}
    return pd.DataFrame(
        {name: name + values.astype(str) for name, values in (given | {"gene": rows["gene"]}).items()}
    ).assign(**columns)


@pytest.mark.parametrize(
    ("obs", "of_features", "e_key", "named"),
    [
        (
            make_screen_labels(),
            False,
            "plate",
            ["week (2 values; 8 of 8 values of gene occur in only one)", "well (8", "replicate (3"],
        ),
        (make_screen_labels(), True, "plate", ["week", "replicate"]),
        (
            make_screen_labels(batch="one").assign(batch=lambda d: d["plate"].isin(["plate0", "plate3"])),
            False,
            "batch",
            ["plate"],
        ),
        (make_screen_labels().drop(columns="plate"), False, "week", ["replicate"]),
        (make_screen_labels().drop(columns=["plate", "week"]), False, "well", ["replicate"]),
        (make_screen_labels().drop(columns=["plate", "week"]), True, "replicate", []),
        *(
            (make_screen_labels().rename(columns={"plate": name})[["gene", name]], False, name, [])
            for name in ("Imaging day", "run_id", "Metadata_Slide", "donor", "acquisition date", "site", "Experiment")
        ),
        (make_screen_labels()[["gene"]], False, None, []),
    ],
)
def test_propose_options_e_key_is_coarsest_with_repeated_perturbations(obs, of_features, e_key, named):
    options, notes = propose_options(obs, _count_values(obs), of_features=of_features)
    assert f"--e-key {'…' if e_key is None else shlex.quote(e_key)} " in options
    others = [note for note in notes if note.startswith("Proposed environment")]
    assert len(others) == bool(named) and all(name in others[0] for name in named)
    assert (e_key is None) == any("fill in --e-key" in note for note in notes)


def test_propose_options_column_marking_controls_is_noted():
    kinds = {"gene0": "negative control", "gene1": "technical control", "gene2": "positive control"}
    obs = make_screen_labels(control_type=lambda d: d["gene"].map(kinds))
    options, notes = propose_options(obs, _count_values(obs), of_features=True)
    assert "--control" not in options
    (note,) = [note for note in notes if "control_type" in note]
    assert all(f"{kind}: {gene}" in note for gene, kind in kinds.items()) and "--control" in note
    obs["gene"] = obs["gene"].replace("gene0", "DMSO")
    only = obs[~obs["gene"].isin(["gene1", "gene2"])]
    options, notes = propose_options(only, _count_values(only), of_features=True)
    assert "--control DMSO" in options and not any("control_type" in note for note in notes)


def test_propose_options_column_with_missing_values_is_noted():
    """Training refuses rows without a label."""
    obs = make_screen_labels()
    obs.loc[[0, 1, 2], "plate"] = None
    _, notes = propose_options(obs, _count_values(obs), of_features=False)
    assert "Column plate has no value in 3 of 96 rows: fill it in, or remove these rows." in notes


@pytest.mark.parametrize(
    ("columns", "of_features", "keys"),
    [
        ({"sgRNA": ["a", "b"], "Metadata_Gene": ["NT", "TP53"]}, False, "--y-key Metadata_Gene --e-key … --control NT"),
        ({"what": ["mock", "x"], "batch": [1, 2]}, False, "--y-key what --e-key batch --control mock"),
        ({"gene": ["a", "b"], "compound": ["c", "d"]}, False, "--y-key … --e-key …"),
        (
            {"gene": ["a b", "non targeting"], "control type": ["negcon", "trt"], "well": ["A1", "A2"]},
            False,
            "--y-key gene --e-key well --control 'non targeting'",
        ),
        (
            {
                "Metadata_Compound": ["DMSO", "Vehicle", "x"],
                "Metadata_Plate": [1, 2, 3],
                "Metadata_Well": ["A", "B", "C"],
            },
            True,
            "--y-key Metadata_Compound --e-key Metadata_Plate --control DMSO Vehicle --position-key Metadata_Well",
        ),
    ],
)
def test_propose_options_ambiguous_columns_are_left_to_fill_in(columns, of_features, keys):
    obs = pd.DataFrame({name: values * 3 for name, values in columns.items()})
    assert propose_options(obs, _count_values(obs), of_features=of_features)[0] == f"{keys} --out results"


@pytest.mark.parametrize(
    ("names", "labels", "proposed"),
    [
        ([str(i) for i in range(12)], {"plate": [1, 2], "dose": [0.5, 1.0]}, "0:11"),
        ([f"f{i}" for i in range(12)], {"fold": [1, 2]}, "f0:f11"),
        ([f"z{i}" for i in range(12)], {"zoom": [1.5, 2.5]}, "z0:z11"),
        ("MYC TP53 KRAS EGFR ATM RB1".split(), {"batch": [1, 2]}, "MYC:RB1"),
    ],
    ids=["numbers", "a label with the prefix", "a quantity with the prefix", "names of genes"],
)
@pytest.mark.parametrize("float_format", [None, "%.4f", "%.18e"])
@pytest.mark.parametrize("are_first", [True, False])
def test_describe_path_numeric_labels_are_no_features(tmp_path, names, labels, proposed, float_format, are_first):
    rng = np.random.default_rng(0)
    columns = {name: np.repeat(values, 12) for name, values in labels.items()}
    parts = [pd.DataFrame({"gene": np.resize(["nt", "a", "b"], 24), **columns})]
    parts.append(pd.DataFrame(rng.normal(size=(24, len(names))), columns=names))
    table = pd.concat(parts if are_first else parts[::-1], axis=1)
    table.to_csv(tmp_path / "t.csv", index=False, float_format=float_format)
    found = describe_path(tmp_path / "t.csv")
    assert f"24 cells or wells of {len(names)} features" in found
    assert found.split("--features ")[1].split(" --y-key")[0] == proposed


def test_describe_path_whole_numbers_with_a_gap_are_labels(tmp_path):
    plates = [np.nan, *np.repeat([24277.0, 24278.0], 12)[1:]]
    table = pd.DataFrame({"Plate": plates, "gene": np.resize(["nt", "a", "b"], 24)})
    table = table.join(pd.DataFrame(np.random.default_rng(0).normal(size=(24, 4))).add_prefix("Cells_a"))
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.warns(UserWarning, match="no Plate"):
        assert "column Plate: 2 values (24278 12, 24277 11)" in describe_path(tmp_path / "t.csv")
