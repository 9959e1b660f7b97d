from __future__ import annotations

import gzip
import hashlib

import pandas as pd
import pytest

from scbd.datasets import _networks as module
from scbd.datasets import corum, gene_pairs, gene_sets


def test_gene_sets_real_corum_clusters_returns_known_counts(shared):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    assert list(net.columns) == ["source", "target"]
    assert net["source"].nunique() == 2696
    assert net["target"].nunique() == 3541
    assert corum(shared / "corum" / "CORUM_clusters.tsv").equals(net)


def test_corum_real_table_returns_known_counts(shared):
    path = shared / "corum" / "allComplexes_v3.0.txt"
    net = corum(path)
    assert net["source"].nunique() == 2916
    assert not net.duplicated().any()
    assert not net["target"].str.contains(r"^\s|\s$|;").any()
    assert corum(path, organism="Mouse")["source"].nunique() > 500
    with pytest.raises(ValueError, match="no complex of organism 'Yeast'"):
        corum(path, organism="Yeast")


@pytest.mark.parametrize(
    ("name", "n"), [("CORUM", 37649), ("HuMAP", 58538), ("StringDB", 58059), ("Reactome", 18565), ("SIGNOR", 11617)]
)
def test_gene_pairs_real_files_returns_known_counts(shared, name, n):
    net = gene_pairs(shared / "corum" / f"{name}.txt")
    assert len(net) == n
    assert (net["source"] < net["target"]).all()


def test_corum_checksum_real_file_matches(shared):
    file = shared / "corum" / module._CORUM["url"].rsplit("/", 1)[1]
    assert module._CORUM["checksum"] == "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()


# the same three complexes in the columns of releases 3.0, 4.x and 5.x
COMPLEXES = pd.DataFrame(
    {
        "id": ["1", "2", "3"],
        "name": ["one", "two", "m"],
        "organism": ["Human", "Human", "Mouse"],
        "genes": ["A;B", "B; C;", "D"],
    }
)
COLUMNS = {
    "3.0": {"id": "ComplexID", "name": "ComplexName", "organism": "Organism", "genes": "subunits(Gene name)"},
    "4.1": {"id": "ComplexID", "organism": "Organism", "genes": "subunits(Gene name)", "name": "ComplexName"},
    "5.0": {"id": "complex_id", "name": "complex_name", "organism": "organism", "genes": "subunits_gene_name"},
}
LAYOUTS = {
    release: COMPLEXES[list(columns)].rename(columns=columns).to_csv(sep="\t", index=False)
    for release, columns in COLUMNS.items()
}


@pytest.mark.parametrize("release", LAYOUTS)
def test_corum_any_release_reads_columns_by_name(tmp_path, release):
    path = tmp_path / "allComplexes.txt"
    path.write_text(LAYOUTS[release])
    assert corum(path).to_numpy().tolist() == [["one", "A"], ["one", "B"], ["two", "B"], ["two", "C"]]


def test_corum_organism_given_returns_its_complexes(tmp_path):
    path = tmp_path / "allComplexes.txt"
    path.write_text(LAYOUTS["3.0"])
    assert corum(path, organism="mouse").to_numpy().tolist() == [["m", "D"]]
    with pytest.raises(ValueError, match="no complex of organism 'Yeast'"):
        corum(path, organism="Yeast")


def test_corum_one_complex_per_line_is_equal_to_gene_sets(tmp_path):
    path = tmp_path / "clusters.tsv"
    path.write_text("one\tA B\n\ntwo\tB B C\n")
    expected = [["one", "A"], ["one", "B"], ["two", "B"], ["two", "C"]]
    assert corum(path).to_numpy().tolist() == gene_sets(path).to_numpy().tolist() == expected


def test_corum_duplicate_names_are_numbered(tmp_path):
    path = tmp_path / "allComplexes.txt"
    path.write_text(LAYOUTS["3.0"].replace("two", "one"))
    assert set(corum(path)["source"]) == {"one [1]", "one [2]"}


def test_networks_attrs_state_sets_or_pairs(tmp_path):
    (tmp_path / "sets.tsv").write_text("one\tA B\n")
    (tmp_path / "CORUM.txt").write_text("a,b\nB,A\nB,C\n")
    (tmp_path / "all.txt").write_text(LAYOUTS["3.0"])
    sets = gene_sets(tmp_path / "sets.tsv"), corum(tmp_path / "sets.tsv"), corum(tmp_path / "all.txt")
    assert [net.attrs["kind"] for net in sets] == ["sets"] * 3
    net = gene_pairs(tmp_path / "CORUM.txt")
    assert net.attrs["kind"] == net[net["source"] == "A"].drop_duplicates().attrs["kind"] == "pairs"


def test_gene_pairs_duplicates_and_self_pairs_are_dropped(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("entity1,entity2\nB,A\nA,B\nA,A\nC , A\n")
    assert gene_pairs(path).to_numpy().tolist() == [["A", "B"], ["A", "C"]]


def test_corum_without_path_downloads_with_checksum_and_licence(tmp_path, monkeypatch):
    licences = []

    def fetch(url, *, checksum, folder, licence):
        name = url.rsplit("/", 1)[1]
        assert url.startswith("https://") and checksum == module._CORUM["checksum"]
        (tmp_path / name).write_text(LAYOUTS["3.0"])
        licences.append(licence)
        return tmp_path / name

    monkeypatch.setattr(module, "download_cached", fetch)
    assert len(corum()) == 4
    assert licences == ["CC-BY-NC 4.0"]


def test_gene_sets_gmt_description_is_not_a_gene(tmp_path):
    (tmp_path / "sets.gmt").write_text("exosome\thttp://a.site\tEXOSC1\tEXOSC2\nempty\tno genes\n")
    assert gene_sets(tmp_path / "sets.gmt").to_numpy().tolist() == [["exosome", "EXOSC1"], ["exosome", "EXOSC2"]]


def test_networks_invalid_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        gene_sets(tmp_path / "no.tsv")
    path = tmp_path / "x.tsv"
    path.write_text("a\tb\tc\n1\t2\t3\n")
    with pytest.raises(ValueError, match="is no CORUM table: it lacks columns for complexid, complexname"):
        corum(path)
    path.write_text("one\tA B\ntwo A B\n")
    with pytest.raises(ValueError, match="line 2: a set is a name, a tab and genes; got 'two A B'"):
        gene_sets(path)
    pd.DataFrame({"a": ["A"]}).to_csv(path, index=False)
    with pytest.raises(ValueError, match="pairs are a CSV of two columns"):
        gene_pairs(path)


TABLE = [
    ("EXOSC1", "RNA exosome"),
    ("EXOSC2", "RNA exosome"),
    ("PCNA", "PCNA clamp complex"),
    ("RFC1", "PCNA clamp complex"),
]


@pytest.mark.parametrize(("name", "mark"), [("t.tsv", "\t"), ("t.csv", ","), ("t.txt", "\t")])
@pytest.mark.parametrize(
    "names", [("gene_name", "group"), ("Gene Symbol", "Complex"), ("complex", "gene"), ("term", "genes")]
)
@pytest.mark.parametrize("read", [gene_sets, corum])
def test_gene_sets_table_with_named_columns_returns_sets(tmp_path, name, mark, names, read):
    if read is corum and mark == ",":
        return
    order = 1 if names[0] in ("complex", "term") else -1
    lines = [names, *(pair[::-order] for pair in TABLE)]
    if names[1] == "genes":
        lines = [names, ("RNA exosome", "EXOSC1; EXOSC2"), ("PCNA clamp complex", "PCNA; RFC1")]
    (tmp_path / name).write_text("\n".join(mark.join(line) for line in lines))
    net = read(tmp_path / name)
    assert sorted(zip(net["target"], net["source"], strict=True)) == sorted(TABLE) and net.attrs["kind"] == "sets"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("headless.tsv", "\n".join("\t".join(pair) for pair in TABLE), "several lines have the genes"),
        ("turned.tsv", "\n".join("\t".join(pair[::-1]) for pair in TABLE), "several lines have the name 'RNA exosome'"),
        ("wide.tsv", "gene_name\tcluster\tcomplex\nPCNA\t1\tclamp", "gene_name, cluster, complex"),
        ("empty.txt", "\n", "empty"),
        ("names.txt", "exosome\t\nclamp\tPCNA", "line 1"),
    ],
)
def test_gene_sets_other_layout_raises(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        gene_sets(tmp_path / name)


def test_gene_sets_any_separator_splits_genes(tmp_path):
    (tmp_path / "sets.txt").write_text("exosome\tEXOSC1, EXOSC2\nclamp\tPCNA;RFC1\nHLA\tHLA-A HLA-B\tHLA-C\n")
    assert gene_sets(tmp_path / "sets.txt")["target"].tolist() == [
        "EXOSC1",
        "EXOSC2",
        "PCNA",
        "RFC1",
        "HLA-A",
        "HLA-B",
        "HLA-C",
    ]


def test_gene_pairs_headless_file_is_read_and_groups_raise(tmp_path):
    (tmp_path / "headless.csv").write_text("A,B\nB,C\nA,C\n")
    assert len(gene_pairs(tmp_path / "headless.csv")) == 3
    (tmp_path / "groups.csv").write_text("gene,complex\nPCNA,clamp\n")
    with pytest.raises(ValueError, match="gene_sets"):
        gene_pairs(tmp_path / "groups.csv")


def test_gene_pairs_numbers_next_to_names_raise_and_pairs_of_numbers_are_read(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("sample,a,b\n3,TP53,MDM2\n1,PCNA,RFC1\n")
    with pytest.raises(ValueError, match="numbers"):
        gene_pairs(path)
    path.write_text("entrez1,entrez2,score\n7157,4193,0.9\n5111,5981,0.8\n")
    assert gene_pairs(path).to_numpy().tolist() == [["4193", "7157"], ["5111", "5981"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\nTP53,MDM2\nA,\n,B\n , \n", [["MDM2", "TP53"]]),
        ("SET,ANP32A\nANP32A,XPO1\nSET,XPO1\n", [["ANP32A", "SET"], ["ANP32A", "XPO1"], ["SET", "XPO1"]]),
        ("SET,ANP32A\nANP32A,XPO1\n", [["ANP32A", "SET"], ["ANP32A", "XPO1"]]),
        ("TP53, MDM2\nPCNA, MDM2\n", [["MDM2", "TP53"], ["MDM2", "PCNA"]]),
        ("TP53,TP53\nTP53,MDM2\n", [["MDM2", "TP53"]]),
        ("SET1,GENE2\nA,B\n", [["A", "B"]]),
        ("protein,protein,score,score\nA,B,1,2\n", [["A", "B"]]),
        ("a,b\n", []),
    ],
)
def test_gene_pairs_each_line_of_two_genes_is_a_pair(tmp_path, text, expected):
    (tmp_path / "pairs.csv").write_text(text)
    net = gene_pairs(tmp_path / "pairs.csv")
    assert net.to_numpy().tolist() == expected and list(net) == ["source", "target"]


def test_gene_sets_genes_named_like_columns_are_genes(tmp_path):
    expected = [["one", "GENE1"], ["one", "GENE2"], ["two", "GENE3"], ["two", "TARGET"]]
    (tmp_path / "sets.txt").write_text("one\tGENE1 GENE2\ntwo\tGENE3 TARGET\n")
    assert gene_sets(tmp_path / "sets.txt").to_numpy().tolist() == expected
    (tmp_path / "single.txt").write_text("one\tGENE1\ntwo\tGENE3 GENE4\n")
    assert len(gene_sets(tmp_path / "single.txt")) == 3
    for genes in (["GENE1", "GENE2"], ["TARGET", "SYMBOL"]):
        content = "\t".join(["one", "about", *genes]) + "\ntwo\tabout\tGENE3\n"
        (tmp_path / "sets.gmt").write_text(content)
        (tmp_path / "sets.gmt.gz").write_bytes(gzip.compress(content.encode()))
        for name in ("sets.gmt", "sets.gmt.gz"):
            assert gene_sets(tmp_path / name)["target"].tolist() == [*genes, "GENE3"]


def test_gene_sets_without_a_name_are_no_sets(tmp_path):
    (tmp_path / "sets.txt").write_text("one\tA B\n\tC D\n")
    with pytest.raises(ValueError, match="line 2"):
        gene_sets(tmp_path / "sets.txt")
    (tmp_path / "table.csv").write_text("gene,complex\nA,one\nB,\n")
    assert gene_sets(tmp_path / "table.csv").to_numpy().tolist() == [["one", "A"]]


@pytest.mark.parametrize("name", ["cluster", "complex_id"])
def test_gene_sets_numbers_of_sets_are_no_row_numbers(tmp_path, name):
    (tmp_path / "c.csv").write_text(f"{name},genes\n1,A;B\n2,C;D\n3,E;F\n")
    assert gene_sets(tmp_path / "c.csv").values.tolist()[:2] == [["1", "A"], ["1", "B"]]
    (tmp_path / "d.csv").write_text("cluster,genes,size\n1,A;B,2\n2,C;D,2\n3,E;F,2\n")
    assert gene_sets(tmp_path / "d.csv")["source"].tolist() == ["1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize("score", ["900", "0.9", "high"])
def test_gene_pairs_numbers_of_genes_are_no_row_numbers(tmp_path, score):
    (tmp_path / "p.csv").write_text(f"gene1,gene2,score\n100,200,{score}\n101,300,{score}\n102,200,{score}\n")
    assert gene_pairs(tmp_path / "p.csv").values.tolist() == [["100", "200"], ["101", "300"], ["102", "200"]]
