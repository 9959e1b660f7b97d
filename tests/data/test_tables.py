"""Tables in many dialects: what is written is read back, or refused with the file, the line and the remedy."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import logging
import lzma
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import scbd
from scbd._shared.labels import MISSING_WORDS, label_text, label_values
from scbd._workflows.inspection import describe_path
from scbd.data import _tables, read_crops, read_profiles
from scbd.data._tables import TableError, read_first_rows, read_table_file
from scbd.datasets import corum, gene_pairs, gene_sets

LABELS = ["Metadata_Plate", "Metadata_gene", "Metadata_note"]
# labels that are easily changed: numbers in several spellings, words for missing values, marks of dialects
TRICKY = "1.1 1.10 0012 12 1E3 1000 10E2 -0 1_000 NA nan None null True TRUE a;b a|b 1,5 µM 'x' # =1 ∞ 5e-324"
texts = st.one_of(
    st.sampled_from([*TRICKY.split(), "9007199254740993"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1, max_size=6),
    st.integers(-20, 20).map(str),
    st.floats(-9, 9).map(str),
).filter(lambda text: text.strip() == text)
numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(-9, 999).map(float))


@st.composite
def tables(draw: Any) -> pd.DataFrame:
    n = draw(st.integers(1, 7))
    frame = pd.DataFrame(
        {name: pd.Series(draw(st.lists(texts, min_size=n, max_size=n)), dtype=object) for name in LABELS}
    )
    if draw(st.booleans()):
        frame.loc[draw(st.integers(0, n - 1)), LABELS[2]] = ""
    return frame.assign(
        **{f"Cells_a{i}": draw(st.lists(numbers, min_size=n, max_size=n)) for i in range(draw(st.integers(1, 3)))}
    )


def write_text(frame: pd.DataFrame, path: Path, dialect: dict[str, Any], missing: str) -> None:
    """Write a table in a dialect of text that pandas does not need to know."""
    lines: list[list[str]] = [list(frame)]
    for number, row in enumerate(frame.itertuples(index=False)):
        values = [value if isinstance(value, str) else missing if value != value else repr(value) for value in row]
        lines.append(([f"row {number}"] if dialect["rows"] else []) + values)
    if dialect["rows"] == "named":
        lines[0].insert(0, "")
    file = io.StringIO()
    writer = csv.writer(file, delimiter=dialect["mark"], quoting=dialect["quoting"], lineterminator=dialect["end"])
    for number, line in enumerate(lines):
        surplus = dialect["surplus"] if number else dialect["surplus_name"]
        writer.writerow([*line, *[""] * (0 if dialect["rows"] else surplus)])
        if dialect["blank"]:
            file.write(dialect["end"])
    content = (f"sep={dialect['mark']}{dialect['end']}" if dialect["stated"] else "") + file.getvalue()
    pack(path, content.encode(dialect["encoding"]))


def pack(path: Path, content: bytes) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(path.stem, content)
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "wb") as file:
        file.write(content)


dialects = st.fixed_dictionaries(
    {
        "mark": st.sampled_from(",\t;|"),
        "quoting": st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
        "end": st.sampled_from(["\n", "\r\n"]),
        "encoding": st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
        "rows": st.sampled_from(["", "", "named", "R"]),
        "surplus": st.integers(0, 2),
        "surplus_name": st.integers(0, 1),
        "blank": st.booleans(),
        "stated": st.booleans(),
    }
)


def spell(value: Any) -> Any:
    return None if value is None or value != value else str(value)


@pytest.mark.filterwarnings("ignore:.*has no Metadata_Plate", "ignore:.*have no Metadata_Plate")
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz", ".csv.bz2", ".tsv.xz", ".csv.zip"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(frame=tables(), dialect=dialects, missing=st.sampled_from(["", "NA", "nan", "NULL", "None", "n/a"]))
def test_read_profiles_any_dialect_returns_written_spellings_and_values(tmp_path, ending, frame, dialect, missing):
    frame.loc[len(frame) - 1, "Cells_a0"] = np.nan
    # lines with names of rows whose last field is always empty have the same form as lines that end with a delimiter
    assume(not (dialect["rows"] == "R" and missing == "" and frame.iloc[:, -1].isna().all()))
    plates = frame["Metadata_Plate"]
    assume(dialect["rows"] or not (plates.is_unique and plates.str.isdecimal().all()))
    path = tmp_path / f"t{ending}"
    write_text(frame, path, dialect, missing)
    found = read_profiles(path, missing="keep")
    np.testing.assert_array_equal(found.X, frame.filter(like="Cells_").to_numpy(np.float32))
    assert list(found.obs) == LABELS
    for name in LABELS:
        written = [spell(value) if value != "" else None for value in frame[name]]
        read = [spell(value) for value in found.obs[name]]
        if found.obs[name].dtype.kind == "f":  # of numbers, a word for missing values is missing
            written = [None if str(value).strip().lower() in MISSING_WORDS else value for value in written]
            read = [value and str(float(value)) for value in read]
            written = [value and str(float(value)) for value in written]
        assert read == written
    if dialect["rows"]:
        assert list(found.obs_names) == [f"row {number}" for number in range(len(frame))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(values=st.lists(texts, min_size=1, max_size=8))
def test_read_table_file_different_spellings_never_become_equal(tmp_path, values):
    pd.DataFrame({"plate": values, "row": range(len(values))}).to_csv(tmp_path / "t.csv", index=False)
    found = read_table_file(tmp_path / "t.csv")["plate"]
    if found.dtype.kind in "iu":
        assert [str(value) for value in found] == values
    there = [(value, spelt) for value, spelt in zip(found, values, strict=True) if value == value]
    assert len({str(value) for value, _ in there}) == len({spelt for _, spelt in there})


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], "i"),
        ([0.5, 1.0, 1e-5], "f"),
        (["0.5", "1", "10"], "f"),
        (["1", "1.0", "2"], "O"),
        ([1, None, 2], "f"),
        (["1", "NA", "2"], "f"),
        (["12345678901234567", "", "1"], "O"),
        (["12345678901234567890", "1", "2"], "O"),
        ([True, False, True], "b"),
        (["TRUE", "FALSE", "TRUE"], "O"),
        (["1.10", "1.1", "1.2"], "O"),
        (["inf", "1.5", "2.5"], "O"),
        ([None, None, None], "f"),
        (["NA", "NA", "NA"], "O"),
    ],
)
def test_read_table_file_only_exactly_spelled_numbers_become_numbers(tmp_path, values, kind):
    pd.DataFrame({"x": values, "y": "a"}, dtype=object).to_csv(tmp_path / "t.csv", index=False)
    assert read_table_file(tmp_path / "t.csv")["x"].dtype.kind == kind


PARQUET: dict[str, Any] = {
    "dictionary": lambda arrow: arrow.array(["0012", "12", "1.10"]).dictionary_encode(),
    "large_string": lambda arrow: arrow.array(["0012", "12", "1.10"], arrow.large_string()),
    "string": lambda arrow: arrow.array(["0012", "12", None]),
    "null": lambda arrow: arrow.nulls(3),
    "date": lambda arrow: arrow.array([datetime.date(2026, 1, day) for day in (1, 2, 3)]),
    "timestamp": lambda arrow: arrow.array([datetime.datetime(2026, 1, day) for day in (1, 2, 3)]),
    "bool": lambda arrow: arrow.array([True, None, False]),
    "uint8": lambda arrow: arrow.array([1, 2, 3], arrow.uint8()),
    "decimal": lambda arrow: arrow.array([Decimal("1.10"), Decimal("1.20"), None]),
    "duration": lambda arrow: arrow.array([datetime.timedelta(hours=hour) for hour in (1, 2, 3)]),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_read_profiles_parquet_types_of_labels_keep_their_text(tmp_path, kind):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = PARQUET[kind](arrow)
    parquet.write_table(arrow.table({"label": column, "Cells_a": [1.0, 2.0, 3.0]}), tmp_path / "t.parquet")
    found = read_profiles(tmp_path / "t.parquet").obs["label"]
    for value, written in zip(found, column.to_pylist(), strict=True):
        assert pd.isna(value) if written is None else str(written) in str(value)


@pytest.mark.parametrize("kind", ["float16", "float64", "int8", "decimal", "dictionary", "text", "bool", "null"])
def test_read_profiles_parquet_types_of_features_are_numbers(tmp_path, kind):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = {
        "float16": lambda: arrow.array(np.array([1, 0, 1], np.float16)),
        "decimal": lambda: arrow.array([Decimal("1.0"), Decimal("0.0"), Decimal("1.0")]),
        "dictionary": lambda: arrow.array([1.0, 0.0, 1.0]).dictionary_encode(),
        "text": lambda: arrow.array(["1", "0.0", "1e0"]),
        "bool": lambda: arrow.array([True, False, True]),
        "null": lambda: arrow.nulls(3),
    }.get(kind, lambda: arrow.array([1, 0, 1], getattr(arrow, kind)()))()
    parquet.write_table(arrow.table({"Cells_a": column, "Cells_b": [1.0, 2.0, 3.0]}), tmp_path / "t.parquet")
    found = read_profiles(tmp_path / "t.parquet", missing="keep").X[:, 0]
    np.testing.assert_array_equal(found, [np.nan] * 3 if kind == "null" else [1, 0, 1])


def test_read_profiles_parquet_with_levels_of_names_raises(tmp_path):
    frame = pd.DataFrame({"plate": ["P1", "P2"] * 3, "Cells_a": 1.0}).groupby("plate").agg(["mean", "std"])
    frame.reset_index().to_parquet(tmp_path / "t.parquet")
    for read in (read_profiles, read_crops, read_first_rows):
        with pytest.raises(ValueError, match=r"t.parquet .*2 levels"):
            read(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plate,Cells_a\nP1,1\nP2\n", "line 3: 1 field"),
        ("plate,Cells_a\nP1,1\nP2,2,3\n", "line 3: 3 fields"),
        ("plate,Cells_a\n\n\nP1,1\n\nP2,2,3\n", "line 6: 3 fields"),
        ("plate,Cells_a\nP1,1,,x\nP2,2,,y\n", "line 2: 4 fields"),
        ('plate,Cells_a\n"P\n1",1\nP2,2,3\n', "line 4: 3 fields"),
        ("# of May\nplate,Cells_a,n\nP1,1,2\n", "first line"),
        ("My plate,,\nplate,well,Cells_a\nP1,A1,1\n", "no name for a column in its first line"),
        ("plate,Cells_a,\nrow 1,P1,1\n", "no name for a column in its first line"),
        ('plate,Cells_a\nP1,1\n"P2,2\n', "line 3: .*quotation"),
        ('plate,Cells_a\n"P1"x,1\n', "line 2: .*quotation"),
        ("plate,Cells_a\nP1,1\nP\0,2\n", "line 3: null bytes"),
        ("plate,Cells_a,Cells_a\nP1,1,2\n", "two columns named 'Cells_a'"),
        ("plate,Cells_a,Cells_b\nx,px,µm\nP1,1,2\nP2,3,4\n", "words in the first row of values"),
        ("\n", "t.csv is empty"),
        ("plate,Cells_a,note\n1,P1,1,\n2,P2,2,\n", "names of rows.*superfluous"),
        ("plate,well\nP1,A1,1\nP1,A2,2\n", "names of rows.*last column has no name"),
        # the first rows, from which the kind of table is detected, suffice for neither reading
        ("plate,well\n" + "".join(f"P{n},A1,1\n" for n in [*range(9), 0]), "last column has no name"),
    ],
)
def test_read_profiles_irregular_text_raises_with_line(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_profiles(tmp_path / "t.csv")
    with pytest.raises(ValueError, match=r"t\.csv"):
        read_profiles(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["P1,1,", "P1,2,"], [["P1", 1], ["P1", 2]]),
        (["1,1,", "2,2,", "1,3,"], [["1", 1], ["2", 2], ["1", 3]]),
        (["3,P1,1", "9,P1,2"], [["P1", 1], ["P1", 2]]),
        # all rows decide, and not only the first ones
        ([f"{n % 7},{n}," for n in range(9)], [[str(n % 7), n] for n in range(9)]),
    ],
)
def test_read_table_file_one_field_more_in_each_line_is_read(tmp_path, lines, expected):
    (tmp_path / "t.csv").write_text("\n".join(["plate,n", *lines]))
    for read in (read_table_file, read_first_rows):
        found = read(tmp_path / "t.csv")
        assert found.astype({"plate": str}).to_numpy().tolist() == expected[: len(found)]


def test_read_table_file_one_empty_field_more_after_unique_labels_is_logged(tmp_path, caplog):
    (tmp_path / "t.csv").write_text("well,gene\nA1,x,\nA2,y,\n")
    assert read_table_file(tmp_path / "t.csv").to_numpy().tolist() == [["A1", "x"], ["A2", "y"]]
    assert [record.levelname for record in caplog.records if "t.csv" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize(
    ("text", "n_columns"),
    [
        ("plate;dose, in µM;Cells_a\nP1;1;2\nP2;1;2\n", 3),
        ("plate;dose, in µM;Cells_a, b\nP1;1,5;2,5\nP2;1,5;2,5\n", 3),
        ("plate;dose\tx|y;Cells_a\nP1;1;2\n", 3),
        ('"plate";"dose, in µM";"Cells_a"\n"P1";1;2\n', 3),
        ("plate|dose, in µM; or nM|Cells_a\nP1|1|2\n", 3),
        ("plate,dose;unit,note\nP1,1;µM,x;y\n", 3),
        ("plate,dose;unit,note\nr1,P1,1;µM,x;y\nr2,P1,1;µM,x;y\n", 3),
        ("plate,a|b\nP1,2\n", 2),
    ],
)
def test_read_table_file_delimiter_divides_all_lines(tmp_path, ending, text, n_columns):
    if ending == "tsv" and text.startswith("plate,"):
        text = text.translate({ord(","): "\t"})
    (tmp_path / f"t.{ending}").write_text(text, encoding="utf-8")
    assert read_table_file(tmp_path / f"t.{ending}").shape[1] == n_columns


def damage(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(range(200, 240)) + content[len(content) // 2 + 40 :]


def make_damaged_zip(path: Path, fault: str) -> None:
    pack(path, b"a\tB C\n" * 9)
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # flags and, behind them, the method
        start = content.index(mark) + place
        content[start : start + 4] = b"\1\0\0\0" if fault == "encrypted" else b"\0\0\x63\0"
    path.write_bytes(content)


@pytest.mark.parametrize(
    "fault", ["gz damaged", "gz truncated", "gz foreign", "bz2 truncated", "xz damaged", "zip encrypted", "zip method"]
)
@pytest.mark.parametrize("read", [read_profiles, gene_sets, gene_pairs, corum])
def test_open_text_damaged_packed_file_raises_with_path(tmp_path, fault, read):
    ending, what = fault.split()
    path = tmp_path / f"t.csv.{ending}"
    if ending == "zip":
        make_damaged_zip(path, what)
    else:
        pack(path, "".join(f"{n}\t{n * 7919 % 1013} B\n" for n in range(3000)).encode())
        content = path.read_bytes()
        path.write_bytes({"damaged": damage(content), "truncated": content[:-9], "foreign": b"plate,a\n1,2\n"}[what])
    with pytest.raises(ValueError, match=f"t.csv.{ending}"):
        read(path)


@pytest.mark.parametrize("content", ["gz", "zip", "parquet"])
@pytest.mark.parametrize("read", [read_profiles, gene_sets, gene_pairs, corum])
def test_open_text_content_of_another_kind_is_named(tmp_path, content, read):
    written = tmp_path / f"t.csv.{content}"
    if content == "parquet":
        pytest.importorskip("pyarrow")
        pd.DataFrame({"plate": ["P1"], "Cells_a": [1.0]}).to_parquet(written)
    else:
        pack(written, b"plate,Cells_a\nP1,1\n")
    written.rename(tmp_path / "t.csv")
    with pytest.raises(ValueError, match=rf"t\.csv .*\.{content}"):
        read(tmp_path / "t.csv")


def test_read_table_file_long_field_is_read(tmp_path):
    limit = csv.field_size_limit()
    pd.DataFrame({"plate": ["P1"], "emb": ["1," * 100_000]}).to_csv(tmp_path / "t.csv", index=False)
    assert read_table_file(tmp_path / "t.csv")["emb"].str.len().tolist() == [200_000]
    assert csv.field_size_limit() == limit


def test_read_table_file_missing_words_of_pandas_are_missing_in_numbers_only(tmp_path):
    words = sorted(pd._libs.parsers.STR_NA_VALUES)
    frame = pd.DataFrame({"Cells_a": [*words, "1.5"], "label": [*words, "x"], "row": range(len(words) + 1)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = read_profiles(tmp_path / "t.csv", missing="keep")
    np.testing.assert_array_equal(found.X[:, 0], [*[np.nan] * len(words), 1.5])
    assert found.obs["label"].dropna().tolist() == [*filter(None, words), "x"]


def test_open_text_other_encoding_raises_with_line(tmp_path):
    table = "plate,Cells_a\nP1,1\nµ,2\n"
    sets = "one\tx\tA B\nSjögren\tx\tC D\n"
    for name, text, line, read in [
        ("t.csv", table, 3, read_profiles),
        ("t.csv.gz", table, 3, read_profiles),
        ("map.csv", table, 3, lambda path: read_crops(make_crops(tmp_path), table=path)),
        ("s.gmt", sets, 2, gene_sets),
        ("s.csv", "gene,complex\nA,B\nC,ö\n", 3, gene_sets),
        ("p.csv", "a,b\nA,ö\n", 2, gene_pairs),
        ("c.tsv", sets, 2, corum),
    ]:
        pack(tmp_path / name, text.encode("latin-1"))
        with pytest.raises(ValueError, match=f"{name}, line {line}: .*encoding"):
            read(tmp_path / name)


@pytest.mark.parametrize("kind", ["int64", "uint64", "int16", "uint8"])
def test_read_profiles_parquet_integers_with_missing_values_stay_exact(tmp_path, kind):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    large = np.iinfo(kind).max
    plates = [None, large, large - 1, large]
    columns = {"plate": plates, "whole": plates[1:] + [1], "Cells_a": [7, None, 8, 9]}
    table = {name: arrow.array(values, getattr(arrow, kind)()) for name, values in columns.items()}
    parquet.write_table(arrow.table(table | {"Cells_b": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match="1 row has no plate"):
        found = read_profiles(tmp_path / "t.parquet", missing="keep")
    np.testing.assert_array_equal(found.X[:, 0], [7, np.nan, 8, 9])
    assert found.obs["whole"].tolist() == columns["whole"]
    labels = label_values(found.obs, "plate", allow_missing=True)
    assert [None if pd.isna(label) else label_text(label) for label in labels] == [
        None if plate is None else str(plate) for plate in plates
    ]
    crossed = label_values(found.obs, ["plate", "whole"], allow_missing=True).dropna().tolist()
    assert crossed[0] == f"{large} × {large - 1}"
    found.write_h5ad(tmp_path / "t.h5ad")
    again = anndata.read_h5ad(tmp_path / "t.h5ad").obs["plate"]
    assert [str(plate) for plate in again[1:]] == [str(plate) for plate in plates[1:]]


def write_parts(folder: Path, *parts: Any) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        parquet.write_table(part, folder / f"part-{number}.parquet")
    return folder


def test_read_profiles_parts_keep_all_columns_and_names_of_folders(tmp_path):
    rng = np.random.default_rng(0)
    first, second = (wells("P", rng).drop(columns="Metadata_Plate") for _ in range(2))
    second = second.assign(compound="x", Cells_new=1.0)[["Cells_new", *second, "compound"]]
    for plate, table in (("0012", first), ("12", second), ("a%2Fb", second)):
        (tmp_path / "t" / f"plate={plate}").mkdir(parents=True)
        table.to_parquet(tmp_path / "t" / f"plate={plate}" / "0.parquet")
    (tmp_path / "t" / "_SUCCESS").touch()
    found = read_profiles(tmp_path / "t", missing="keep")
    assert found.obs["plate"].tolist() == ["0012"] * 8 + ["12"] * 8 + ["a/b"] * 8
    assert found.obs["compound"].isna().tolist() == [True] * 8 + [False] * 16
    np.testing.assert_array_equal(found[:, "Cells_new"].X.ravel(), [np.nan] * 8 + [1] * 16)
    expected = [*first["Cells_a0"], *second["Cells_a0"], *second["Cells_a0"]]
    np.testing.assert_array_equal(found[:, "Cells_a0"].X.ravel(), np.array(expected, np.float32))
    assert {"compound", "plate", "Cells_new"} <= set(read_first_rows(tmp_path / "t"))
    with pytest.warns(UserWarning, match="Cells_new.*no value in plate 0012"):
        assert "plate" in describe_path(tmp_path / "t")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([None, None], ["x", "0012"], [None, None, "x", "0012"]),
        ([None], [20231115000000001, 20231115000000002], [None, 20231115000000001, 20231115000000002]),
        ([1, 2], [0.5, None], [1, 2, 0.5, None]),
        ([1, 12], ["0012", "x"], ["1", "12", "0012", "x"]),
        ([20231115000000001], [0.5], ["20231115000000001", "0.5"]),
        ([0.5], [datetime.date(2026, 1, 2)], ["0.5", "2026-01-02"]),
    ],
)
def test_read_table_file_parts_with_columns_of_several_types_lose_no_value(tmp_path, first, second, expected):
    arrow = pytest.importorskip("pyarrow")
    for parts, values in (((first, second), expected), ((second, first), None)):
        folder = write_parts(tmp_path / "t.parquet", *(arrow.table({"a": part}) for part in parts))
        found = [None if pd.isna(value) else value for value in read_table_file(folder)["a"]]
        assert found == (values or [*expected[len(first) :], *expected[: len(first)]])


def test_read_profiles_folder_of_parts_in_another_format_raises(tmp_path):
    for name in ("csv", "parquet"):
        (tmp_path / name / "plate=P1").mkdir(parents=True)
        (tmp_path / name / "plate=P1" / f"0.{name}").write_text("well,Cells_a\nA1,1\n")
        with pytest.raises(ValueError, match=rf"plate=P1/0\.{name} .*Parquet"):
            read_profiles(tmp_path / name)
    (tmp_path / "empty.parquet").mkdir()
    with pytest.raises(ValueError, match=r"empty\.parquet"):
        read_profiles(tmp_path / "empty.parquet")


def make_crops(folder: Path, n: int = 4) -> Path:
    np.save(folder / "crops.npy", np.arange(n * 9, dtype="uint8").reshape(n, 1, 3, 3))
    return folder / "crops.npy"


def test_read_table_file_zip_of_several_files_raises(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.csv.zip", "w") as archive:
        archive.writestr("a.csv", "x\n1\n")
        archive.writestr("b.csv", "x\n1\n")
    with pytest.raises(TableError, match=r"2 files \(a.csv, b.csv\)"):
        read_table_file(tmp_path / "t.csv.zip")


def test_read_table_file_repeated_or_empty_columns_are_dropped_and_logged(tmp_path, caplog):
    (tmp_path / "t.csv").write_text(",well,well,,\n0,A1,A1,,\n1,A2,A2,,\n,,,,\n")
    with caplog.at_level(logging.INFO, "scbd"):
        found = read_table_file(tmp_path / "t.csv")
    assert found.to_dict("list") == {"well": ["A1", "A2"]}
    assert all(word in caplog.text for word in ("t.csv", "labels: well", "dropped", "1 empty line"))


@pytest.mark.parametrize("rows", [[3, 0, 1, 2], [0, 1, 2, 3], [2, 5, 7, 9], [0, 1, 0, 1], [1, 2, 3, 4]])
@pytest.mark.parametrize("place", ["csv", "parquet", "memory"])
def test_read_crops_sorted_table_raises(tmp_path, rows, place):
    table = pd.DataFrame({"gene": list("abcd")}, index=rows)
    given: Any = table if place == "memory" else tmp_path / f"t.{place}"
    if place != "memory":
        table.to_csv(given) if place == "csv" else table.to_parquet(given)
    if rows[0] == 3:
        with pytest.raises(ValueError, match=r"numbered 3, 0, 1, 2.*sort"):
            read_crops(make_crops(tmp_path), table=given)
    else:
        assert read_crops(make_crops(tmp_path), table=given).obs["gene"].tolist() == list("abcd")


@pytest.mark.parametrize("rows", [[3, 0, 1, 2], [4, 1, 2, 3], [3.0, 0.0, 1.0, 2.0], ["3", "0", "1", "2"]])
@pytest.mark.parametrize("name", ["index", "X", "row", "Unnamed: 0.1", "cell"])
@pytest.mark.parametrize("place", ["csv", "memory"])
def test_read_crops_sorted_numbers_in_first_column_raise(tmp_path, rows, name, place):
    table = pd.DataFrame({name: rows, "gene": list("abcd"), "dose": [4, 1, 3, 2]})
    if isinstance(rows[0], float):
        table = table.set_index(name)
    given: Any = table if place == "memory" else tmp_path / "t.csv"
    if place != "memory":
        table.to_csv(given, index=isinstance(rows[0], float))
    with pytest.raises(ValueError, match=r"numbered [34].*sort"):
        read_crops(make_crops(tmp_path), table=given)


@pytest.mark.parametrize("place", ["index", "column"])
def test_read_crops_sorted_names_with_numbers_warn(tmp_path, place):
    table = pd.DataFrame({"cell": [f"P1_cell_{row}" for row in (3, 0, 1, 2)], "gene": list("abcd")})
    given = table.set_index("cell") if place == "index" else table
    with pytest.warns(UserWarning, match="numbered P1_cell_3, P1_cell_0"):
        assert read_crops(make_crops(tmp_path), table=given).obs["gene"].tolist() == list("abcd")
    in_order = table.assign(cell=sorted(table["cell"]))
    assert read_crops(make_crops(tmp_path), table=in_order).obs["gene"].tolist() == list("abcd")


@pytest.mark.parametrize(
    "values", [[5, 3, 9, 1], [0, 2, 1, 1], [1.5, 0.0, 2.0, 3.0], ["x3", "y0", "x1", "x2"], [0, 1, 2, 3], [1, 0, 1, 0]]
)
def test_read_crops_first_column_other_than_row_numbers_is_read(tmp_path, values):
    table = pd.DataFrame({"dose": values, "gene": list("abcd")})
    assert read_crops(make_crops(tmp_path), table=table).obs["gene"].tolist() == list("abcd")


@pytest.mark.parametrize("names", [["a", "b", "a", "b"], ["0", "1", "2", "3"]])
@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_read_profiles_anndata_is_joined_by_position(tmp_path, names):
    obs = pd.DataFrame({"plate": list("PPQQ")}, index=names)
    values = np.arange(8, dtype="float32").reshape(4, 2)
    cells = anndata.AnnData(values, obs=obs, var=pd.DataFrame(index=["area", "shape"]))
    cells.write_h5ad(tmp_path / "t.h5ad")
    found = read_profiles(tmp_path / "t.h5ad")
    np.testing.assert_array_equal(found.X, values)
    assert found.obs["plate"].tolist() == list("PPQQ") and found.obs_names.is_unique


def test_read_profiles_anndata_with_repeated_or_missing_columns_raises(tmp_path):
    obs = pd.DataFrame({"area": [1.0, 2.0]}, index=["a", "b"])
    anndata.AnnData(np.ones((2, 1), "float32"), obs=obs, var=pd.DataFrame(index=["area"])).write_h5ad(
        tmp_path / "a.h5ad"
    )
    anndata.AnnData(obs=obs).write_h5ad(tmp_path / "b.h5ad")
    with pytest.raises(ValueError, match=r"a.h5ad .*area"):
        read_profiles(tmp_path / "a.h5ad")
    with pytest.raises(ValueError, match=r"b.h5ad has no X"):
        read_profiles(tmp_path / "b.h5ad")


def wells(plate: str, rng: np.random.Generator, n: int = 8) -> pd.DataFrame:
    about = {
        "Metadata_Plate": plate,
        "Metadata_Well": [f"A{i:02d}" for i in range(1, n + 1)],
        "gene": list("ab") * (n // 2),
    }
    return pd.DataFrame(about | {f"Cells_a{i}": rng.normal(size=n) for i in range(3)})


@pytest.mark.parametrize("second", ["normalised", "other format", "selected", "half"])
def test_read_profiles_same_wells_in_two_files_raises(tmp_path, second):
    raw = wells("1001", np.random.default_rng(0))
    raw.to_csv(tmp_path / "raw.csv", index=False)
    again = raw.assign(Cells_a0=raw["Cells_a0"] - 1)
    again = {"selected": again.drop(columns="Cells_a1"), "half": again.head(5)}.get(second, again)
    if second == "other format":
        again.to_parquet(tmp_path / "again.parquet")
    else:
        again.to_csv(tmp_path / "again.csv.gz", index=False)
    wells("1002", np.random.default_rng(1)).to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(ValueError, match=r"again.*raw.csv hold the same wells"):
        read_profiles(tmp_path)


def test_read_profiles_parts_of_a_plate_are_accepted(tmp_path):
    rng = np.random.default_rng(0)
    cells = pd.concat([wells("1001", rng)] * 9).sort_values("Metadata_Well", ignore_index=True)
    cells[:31].to_csv(tmp_path / "part-0.csv", index=False)  # a well is in both parts
    cells[31:].to_csv(tmp_path / "part-1.csv", index=False)
    assert read_profiles(tmp_path).n_obs == len(cells)
    times = [wells("1001", rng).assign(hours=hours) for hours in (24, 48)]
    for number, table in enumerate(times):
        (tmp_path / "times").mkdir(exist_ok=True)
        table.to_csv(tmp_path / "times" / f"{number}.csv", index=False)
    assert read_profiles(tmp_path / "times").n_obs == 16


def test_read_profiles_spelling_is_kept_over_several_files(tmp_path):
    """A column becomes numeric only if it is in all files."""
    for number, plate in enumerate(["1.1", "1.10", "0012"]):
        pd.DataFrame({"Metadata_Plate": [plate] * 2, "n": number, "Cells_a": [1.0, 2.0]}).to_csv(
            tmp_path / f"{number}.csv", index=False
        )
    found = read_profiles([tmp_path / f"{number}.csv" for number in range(3)])
    assert found.obs["Metadata_Plate"].tolist() == ["1.1", "1.1", "1.10", "1.10", "0012", "0012"]
    assert found.obs["n"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("missing", ["median", "drop"])
def test_read_profiles_group_without_values_costs_only_its_rows(tmp_path, missing):
    table = pd.concat([wells(plate, np.random.default_rng(0)) for plate in ("P1", "P2", "P3")], ignore_index=True)
    table.loc[table["Metadata_Plate"] == "P2", [f"Cells_a{i}" for i in range(3)]] = np.nan
    table.loc[0, "Metadata_Plate"] = None
    table.to_csv(tmp_path / "t.csv", index=False)
    table[["Metadata_Plate", "gene"]].to_csv(tmp_path / "map.csv", index=False)
    with pytest.warns(UserWarning, match="1 row has no Metadata_Plate; 8 of 24 rows have no value.*Metadata_Plate P2"):
        found = read_profiles(tmp_path / "t.csv", missing=missing)
    assert found.shape == (16, 3)
    with pytest.warns(UserWarning, match=r"1 of 2 files has no feature .*map.csv"):
        assert read_profiles(tmp_path, missing=missing).shape == (16, 3)


def test_read_profiles_lacking_feature_names_its_plate(tmp_path):
    table = pd.concat([wells(plate, np.random.default_rng(0)) for plate in ("P1", "P2")], ignore_index=True)
    table.loc[table["Metadata_Plate"] == "P2", "Cells_a1"] = np.nan
    table.to_csv(tmp_path / "t.csv", index=False)
    with pytest.warns(UserWarning, match=r"\(Cells_a1\): no value in Metadata_Plate P2"):
        assert read_profiles(tmp_path / "t.csv").shape == (16, 2)


def test_read_profiles_what_is_named_wins(tmp_path):
    rng = np.random.default_rng(0)
    names = ["X_1", "X_10", "X_2", "image_x", *map(str, range(12))]
    table = pd.DataFrame(rng.normal(size=(6, len(names))), columns=names).assign(file="a.png", gene=list("aabbcc"))
    table.to_csv(tmp_path / "t.csv", index=False)
    for features, expected in [
        ("X_1", ["X_1"]),
        (["X_1", "X_2"], ["X_1", "X_2"]),
        ("0:11", [*map(str, range(12))]),
        (["3:5", "9"], ["3", "4", "5", "9"]),
    ]:
        assert read_profiles(tmp_path / "t.csv", features=features, missing="keep").var_names.tolist() == expected
    with pytest.warns(UserWarning, match=r"3 columns named like positions.*X_1, X_10, X_2"):
        assert read_profiles(tmp_path / "t.csv", features="X_").n_vars == 3


def test_read_profiles_text_in_a_feature_names_line_and_file(tmp_path):
    for name in "ab":
        frame = wells(name, np.random.default_rng(0)).astype({"Cells_a1": object})
        frame.loc[3, "Cells_a1"] = "12,345.60" if name == "b" else 1.0
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.warns(UserWarning, match=r"Cells_a1 in 1 row, such as '12,345.60' in line 5 of .*b.csv"):
        read_profiles(tmp_path)
    frame["Cells_a1"] = "1,234.5"
    frame.to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(TypeError, match="thousands=','"):
        read_profiles(tmp_path / "c.csv")


@pytest.mark.parametrize("name", ["p.csv", "p.txt", "p.tsv"])
def test_gene_pairs_row_numbers_are_not_genes(tmp_path, name):
    mark = "\t" if name == "p.tsv" else ","
    pairs = pd.DataFrame({"a": ["TP53", "PCNA"], "b": ["MDM2", "RFC1"]})
    for header in ("named", "R"):
        text = pairs.to_csv(sep=mark)
        (tmp_path / name).write_text(text if header == "named" else text[1:])
        net = gene_pairs(tmp_path / name)
        assert net.to_numpy().tolist() == [["MDM2", "TP53"], ["PCNA", "RFC1"]]


@pytest.mark.parametrize("names", [["X"], ["index"], ["...1"], ["", "Unnamed: 0"], ["Unnamed: 0.1", "Unnamed: 0"]])
@pytest.mark.parametrize("rows", [[0, 1], [1, 2], [3, 8]])
def test_networks_row_numbers_of_any_name_are_not_genes(tmp_path, names, rows):
    numbers = pd.DataFrame(dict.fromkeys(names, rows))
    pairs = pd.DataFrame({"a": ["TP53", "PCNA"], "b": ["MDM2", "RFC1"]})
    pd.concat([numbers, pairs], axis=1).to_csv(tmp_path / "p.csv", index=False)
    assert gene_pairs(tmp_path / "p.csv").to_numpy().tolist() == [["MDM2", "TP53"], ["PCNA", "RFC1"]]
    sets = pd.DataFrame({"gene": ["TP53", "PCNA"], "module": ["one", "two"]})
    pd.concat([numbers, sets], axis=1).to_csv(tmp_path / "s.csv", index=False)
    assert gene_sets(tmp_path / "s.csv").to_numpy().tolist() == [["one", "TP53"], ["two", "PCNA"]]


def test_gene_sets_row_numbers_and_surplus_fields_are_ignored(tmp_path):
    for text in (
        ",gene,complex\n0,A,one\n1,B,one\n",
        "gene,complex\nA,one,\nB,one,\n",
        "gene;complex\nA;one\nB;one\n",
        '"gene","complex"\n"1","A","one"\n"2","B","one"\n',
    ):
        (tmp_path / "s.csv").write_text(text)
        assert gene_sets(tmp_path / "s.csv").to_numpy().tolist() == [["one", "A"], ["one", "B"]]


def test_describe_path_proposes_ranges_and_names_missing_columns(tmp_path):
    rng = np.random.default_rng(0)
    values = pd.DataFrame(rng.normal(size=(12, 30)))
    genes = [f"{letter}{number}" for letter in "ABCDEFGHIJKLMNO" for number in (1, 2)]
    for names, proposed in [(map(str, range(30)), "0:29"), (genes, "A1:O2"), ([f"X_{i}" for i in range(30)], "X")]:
        table = values.set_axis(list(names), axis=1)
        table.insert(0, "gene", list("abc") * 4)
        table.to_csv(tmp_path / "t.csv", index=False)
        with pytest.warns(UserWarning, match="positions") if proposed == "X" else pytest.MonkeyPatch.context():
            found = describe_path(tmp_path / "t.csv")
        assert f"--features {proposed} " in found and "30 features" in found
        assert "no column of plates and wells" in found and "Metadata_Plate=" in found


def test_read_profiles_wide_table_parses_values_once_and_features_as_numbers(tmp_path, monkeypatch):
    """A second pass over the values, or text in each of thousands of features, would take most of the time."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(96, 200)).round(3)).add_prefix("Cells_Texture_")
    table.insert(0, "Metadata_Plate", ["P1", "P2"] * 48)
    table.to_csv(tmp_path / "t.csv", index=False)
    n_parsed: list[int] = []
    converted: list[str] = []
    read_csv, exact_numbers = pd.read_csv, _tables._exact_numbers

    def counted_read_csv(*args: Any, **how: Any) -> pd.DataFrame:
        frame = read_csv(*args, **how)
        n_parsed.append(len(frame))
        return frame

    def counted_exact_numbers(texts: pd.Series) -> Any:
        converted.extend([str(texts.name)] * (len(texts) == len(table)))
        return exact_numbers(texts)

    monkeypatch.setattr(pd, "read_csv", counted_read_csv)
    monkeypatch.setattr(_tables, "_exact_numbers", counted_exact_numbers)
    for read in (read_profiles, describe_path):
        n_parsed.clear()
        converted.clear()
        read(tmp_path / "t.csv")
        assert n_parsed.count(len(table)) == 1 and max(set(n_parsed) - {len(table)}, default=0) <= 5
        assert converted == ["Metadata_Plate"]


def test_open_screen_x_of_an_old_anndata_is_read(tmp_path):
    import h5py

    anndata.AnnData(np.ones((4, 2), "float32")).write_h5ad(tmp_path / "t.h5ad")
    with h5py.File(tmp_path / "t.h5ad", "r+") as file:
        del file["X"].attrs["encoding-type"]
    assert scbd.data.open_screen(tmp_path / "t.h5ad", layer="X").X.shape == (4, 2)
