from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import scbd
from scbd.data import open_screen, read_crops, read_profiles
from scbd.data._formats import _KINDS, detect_kind, walk_folders
from scbd.data._tables import TABLE_ENDINGS, is_table, read_first_rows, read_table_file


def store(attributes: dict, version: int) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.mkdir()
        if version == 3:
            text = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            (path / "zarr.json").write_text(json.dumps(text))
        else:
            (path / ".zgroup").write_text('{"zarr_format": 2}')
            (path / ".zattrs").write_text(json.dumps(attributes))

    return write


def folder(name: str, content: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        (path / "inside").mkdir(parents=True)
        (path / "inside" / name).write_bytes(content)

    return write


def database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as opened:
        pd.DataFrame({"ImageNumber": [1]}).to_sql("Per_Image", opened)


def write_deepprofiler(path: Path) -> None:
    np.savez(path, features=np.zeros((3, 2)), locations=np.zeros((3, 2)))


def make_writer_of_files(*names: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("ImageNumber\n1\n")

    return write


def lmdb(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(b"")


def picture(path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), "uint8")).save(path)


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.h5ad", lambda path: make_cells(4).write_h5ad(path), "anndata"),
    ("a.zarr", store({"encoding-type": "anndata"}, 3), "anndata"),
    ("a.zarr", store({}, 2), "anndata"),
    ("image.zarr", store({"multiscales": [{}]}, 2), "ome_image"),
    ("image.ome.zarr", store({"ome": {"multiscales": [{}]}}, 3), "ome_image"),
    ("image_without_ending", store({"ome": {"multiscales": [{}]}}, 3), "ome_image"),
    ("plate.zarr", store({"plate": {"wells": []}}, 2), "ome_plate"),
    ("plate.zarr", store({"ome": {"plate": {}}}, 3), "ome_plate"),
    ("sdata.zarr", store({"spatialdata_attrs": {"version": "0.2"}}, 3), "spatialdata"),
    ("field.tiff", picture, "field"),
    ("field.PNG", picture, "field"),
    ("a.npy", lambda path: np.save(path, np.zeros((2, 1, 4, 4))), "arrays"),
    ("a.npz", lambda path: np.savez(path, images=np.zeros((2, 1, 4, 4))), "arrays"),
    ("features.npz", write_deepprofiler, "deepprofiler"),
    ("t.csv", lambda path: path.write_text("gene,file\na,x/1.TIF\n"), "image_table"),
    ("t.tsv", lambda path: path.write_text("gene\tarea\na\t1\n"), "profiles"),
    ("t.parquet", lambda path: make_wells().to_df().to_parquet(path), "profiles"),
    ("empty.parquet", lambda path: make_wells().to_df().head(0).to_parquet(path), "profiles"),
    ("Cells.csv", lambda path: path.write_text("ImageNumber,ObjectNumber\n1,1\n"), "cellprofiler_table"),
    ("MyExpt_Image.csv", lambda path: path.write_text("Count,ImageNumber\n1,1\n"), "cellprofiler_table"),
    ("out.sqlite", database, "cellprofiler"),
    ("out", folder("MyExpt_Image.csv", b"ImageNumber\n1\n"), "cellprofiler"),
    ("out", make_writer_of_files("A01_overlay.png", "Image.csv", "Nuclei.csv"), "cellprofiler"),
    ("crops", folder("1.png", b""), "image_folder"),
    ("crops", make_writer_of_files("a/1.png", "labels.csv"), "image_folder"),
    ("profiles", make_writer_of_files("P1/P1.csv", "P2/P2.csv"), "tables"),
    ("t.parquet", make_writer_of_files("plate=P1/0.parquet", "plate=P2/0.parquet"), "tables"),
    ("without_places.npz", lambda path: np.savez(path, features=np.zeros((3, 2))), "deepprofiler"),
    ("lmdb", lmdb, "lmdb"),
    ("notes.txt", lambda path: path.write_text("hello"), "unknown"),
    ("empty", lambda path: path.mkdir(), "unknown"),
]


@pytest.mark.parametrize(("name", "write", "expected"), FILES, ids=[f"{name}-{kind}" for name, _, kind in FILES])
def test_detect_kind_each_kind_is_detected_and_readers_advise(tmp_path, name, write, expected):
    """A reader that cannot read a kind raises an error that names the function that can."""
    write(tmp_path / name)
    kind = detect_kind(tmp_path / name)
    assert kind.name == expected
    # each of these readers tries to read the table that the other one reads
    taken = [("image_table", read_profiles), ("profiles", read_crops)]
    for read in (read_crops, read_profiles, open_screen):
        if kind.name in ("unknown", "anndata") or f"scbd.data.{read.__name__}" in kind.advice:
            continue
        if (kind.name, read) in taken:
            continue
        with pytest.raises(ValueError, match=re.escape(f"{name} is {kind.about}: {kind.advice}.")):
            read(tmp_path / name)


def test_kinds_functions_named_in_advice_exist():
    named = {name for kind in _KINDS.values() for name in re.findall(r"scbd\.data\.(\w+)", kind.advice)}
    assert all(hasattr(scbd.data, name) for name in named) and "read_crops" in named


def test_read_crops_table_without_images_raises(tmp_path):
    make_wells().to_df().to_csv(tmp_path / "wells.csv")
    with pytest.raises(KeyError, match=r"no column 'path' .*file_columns=…; a table of features .*read_profiles"):
        read_crops(tmp_path / "wells.csv")


def test_open_screen_cells_without_images_raises(tmp_path):
    make_wells().write_h5ad(tmp_path / "wells.h5ad")
    for read in (open_screen, read_crops):
        with pytest.raises(KeyError, match="no images .*layer='X'"):
            read(tmp_path / "wells.h5ad")


@pytest.mark.parametrize("text", ["", "{", '{"attributes": 3}'])
def test_detect_kind_unreadable_metadata_returns_anndata(tmp_path, text):
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "zarr.json").write_text(text)
    assert detect_kind(tmp_path / "a.zarr").name == "anndata"


@pytest.mark.parametrize("ending", [ending for ending in TABLE_ENDINGS if not ending.endswith(".zst")])
@given(st.integers(0, 12), st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True))
def test_read_table_file_returns_written_table(tmp_path_factory, ending, n, columns):
    frame = pd.DataFrame({column: range(place, n + place) for place, column in enumerate(columns)})
    path = tmp_path_factory.mktemp("tables") / f"t{ending}"
    write_table(frame, path)
    pd.testing.assert_frame_equal(read_table_file(path), frame, check_dtype=n > 0)
    pd.testing.assert_frame_equal(read_first_rows(path), frame.head(5), check_dtype=n > 0)


@pytest.mark.parametrize("ending", [ending for ending in TABLE_ENDINGS if not ending.endswith(".zst")])
def test_read_table_file_numeric_names_keep_leading_zeros(tmp_path, ending):
    plates = pd.DataFrame({"plate": ["0012", "113", "0014"], "dose": [0.5, 0, 10.25], "n": [0, 10, 7]})
    write_table(plates, tmp_path / f"t{ending}")
    for read in (read_table_file, read_first_rows):
        pd.testing.assert_frame_equal(read(tmp_path / f"t{ending}"), plates)


def write_table(frame: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")


def test_read_table_file_unreadable_table_raises(tmp_path, monkeypatch):
    assert is_table("A.CSV") and is_table(Path("x/a.tsv.gz")) and not is_table("a.txt.zip") and not is_table("csv")
    (tmp_path / "wells.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for read in (read_table_file, read_first_rows):
        with pytest.raises(ValueError, match=r"a.txt is no table"):
            read(tmp_path / "a.txt")
        with pytest.raises(FileNotFoundError, match=r"a.csv"):
            read(tmp_path / "a.csv")
        with pytest.raises(ImportError, match=r"wells.parquet .*pip install pyarrow"):
            read(tmp_path / "wells.parquet")


def files(folder: Path) -> list[str]:
    return [
        os.path.relpath(os.path.join(place, name), folder) for place, names in walk_folders(folder) for name in names
    ]


def test_walk_folders_skips_hidden_files_and_circular_links(tmp_path):
    tree = tmp_path / "tree"
    for name in ("b/2.png", "b/1.png", "a/deep/3.png", ".hidden/4.png", "__MACOSX/5.png", ".6.png", "7.png"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    assert files(tree) == ["7.png", "a/deep/3.png", "b/1.png", "b/2.png"]
    (tmp_path / "linked").mkdir()
    for name in ("x", "y"):  # two links to one folder are two classes
        (tmp_path / "linked" / name).symlink_to(tree / "b")
    assert files(tmp_path / "linked") == ["x/1.png", "x/2.png", "y/1.png", "y/2.png"]
    (tree / "a" / "up").symlink_to(tree)
    (tree / "b" / "to a").symlink_to(tree / "a")
    (tree / "a" / "to b").symlink_to(tree / "b")
    found = files(tree)
    assert found[:2] == ["7.png", "a/deep/3.png"] and {"a/to b/1.png", "b/to a/deep/3.png"} < set(found)
    assert len(found) == 7
