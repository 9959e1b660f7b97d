"""Networks of known relations between genes, read from files as data frames with columns ``source`` and ``target``.

The column ``target`` contains genes. For a data frame ``net``, the attribute ``net.attrs["kind"]`` specifies the
content of ``source``: names of gene sets, such as complexes (``"sets"``), or genes (``"pairs"``). Pandas keeps this
attribute in boolean selections, copies and ``drop_duplicates``, but loses it in ``merge`` and in files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scbd._shared.files import check_file
from scbd.data._tables import hold_whole_numbers, open_text, read_text
from scbd.datasets._download import download_cached

if TYPE_CHECKING:
    from collections.abc import Sequence

# Accepted names of the column of genes in a table. Names are compared in lower case and without characters other than
# letters and digits. Digits are kept, so that a gene GENE1 is not taken for the name of a column.
_GENES = ("gene", "genes", "genename", "genesymbol", "symbol", "hgncsymbol", "target")
# Names of a column of gene sets. A table with such a column holds sets of genes and not pairs of genes.
_SETS = ("group", "complex", "complexname", "set", "geneset", "pathway", "pathwayname")
# accepted names of the column of gene sets in a table with one gene and its set per line
_GROUPS = (*_SETS, "term", "source", "cluster")
# names of columns of row numbers, apart from names such as "...1"; in a table of pairs, also those of their numbers
_ROW_NUMBERS = ("", "x", "index", "row", "rowid", "rowname", "rownames", "rownumber")
_PAIR_NUMBERS = (*_ROW_NUMBERS, "id", "no", "number")
# Maximum fraction of the sets in a file that may have exactly the same genes as another set. With a larger fraction,
# the file is not accepted as a list of sets.
_MAX_DUPLICATE_FRACTION = 0.5
_CORUM = {
    "url": "https://mips.helmholtz-muenchen.de/corum/download/releases/old/allComplexes_v3.0.txt",
    "checksum": "sha256:833a2b73db8d745070daf86c22c9ca5c844a33483f4a15aaed4c4c80dbafe521",
    "licence": "CC-BY-NC 4.0",
}


def corum(path: str | os.PathLike[str] | None = None, *, organism: str = "Human") -> pd.DataFrame:
    """Read the protein complexes of the database CORUM, as a data frame with one row per complex and gene.

    CORUM is licensed CC-BY-NC 4.0 (not for commercial use). It is therefore not part of this package, and is downloaded
    instead.

    Parameters
    ----------
    path
        One of two kinds of file:

        - the official table ``allComplexes`` (tab-separated). Releases 3.0 to 5.x have different names and orders of
          columns; columns are recognised by name.
        - a file with one complex per line, in the form ``name<TAB>GENE GENE …``.

        By default release 3.0 is downloaded once, with a verified checksum.
    organism
        Only complexes of this organism are read. The argument has no effect on a file with one complex per line.

    Returns
    -------
    Data frame with the columns ``source`` (complex) and ``target`` (gene symbol), without duplicates. Its
    ``attrs["kind"]`` is ``"sets"``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ConnectionError
        If the table cannot be downloaded.
    ValueError
        If the file has neither of the two forms, or has no complex of the organism.

    References
    ----------
    Giurgiu et al. (2019), CORUM: the comprehensive resource of mammalian protein complexes (2019).

    Examples
    --------
    >>> net = scbd.datasets.corum()  # downloaded once, then read from the cache  # doctest: +SKIP
    >>> net = scbd.datasets.corum("coreComplexes.txt")  # or a file of your own  # doctest: +SKIP
    """
    if path is None:
        path = download_cached(**_CORUM, folder="networks")
    path = check_file(path)
    with open_text(path) as file:
        header = [_normalise_column_name(name) for name in file.readline().rstrip("\r\n").split("\t")]
    if len(header) == 2:
        return gene_sets(path)
    # names of columns in CORUM release 3.0 are ComplexID, ComplexName, Organism and subunits(Gene name); releases 5.x
    # use complex_id, …, subunits_gene_name
    wanted = {"id": "complexid", "name": "complexname", "organism": "organism", "genes": "subunitsgenename"}
    if not set(wanted.values()) <= set(header):
        msg = f"{path} is no CORUM table: it lacks columns for {', '.join(sorted(set(wanted.values()) - set(header)))}."
        raise ValueError(msg)
    with open_text(path) as file:
        how = {"dtype": str, "keep_default_na": False, "quoting": 3, "index_col": False}
        table = pd.read_csv(file, sep="\t", names=header, skiprows=1, **how)
    table = table[table[wanted["organism"]].str.lower() == organism.lower()]
    if table.empty:
        msg = f"{path} has no complex of organism {organism!r}."
        raise ValueError(msg)
    name, genes = table[wanted["name"]], table[wanted["genes"]].str.split(";")
    # Several complexes may have the same name. To keep them separate, the identifier of the complex is appended to such
    # a name.
    name = name.where(~name.duplicated(keep=False), name + " [" + table[wanted["id"]] + "]")
    return _finish_network(pd.DataFrame({"source": name, "target": genes}).explode("target"), "sets")


def gene_sets(path: str | os.PathLike[str]) -> pd.DataFrame:
    r"""Read sets of genes, such as complexes or pathways, from a file with a list of sets or a table of genes.

    A **list** has one set per line, ``name<TAB>GENE GENE …``. In a ``.gmt`` file, the second field is a description,
    which is ignored. Genes are separated by blanks, tabs, commas, semicolons or vertical bars.

    A **table** (``.csv``, or tab-separated with any other extension) has one gene and the name of its set per line. The
    first line of the table names the columns, for example ``gene,complex``.

    Parameters
    ----------
    path
        Path of the file. It is read as a table if its first line names a column of genes, otherwise as a list.

    Returns
    -------
    Data frame with the columns ``source`` (set) and ``target`` (gene), without duplicates. Its ``attrs["kind"]`` is
    ``"sets"``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is empty, or not encoded as UTF-8 or UTF-16. If a line of a list does not consist of a name and
        genes, several lines have the same name, or more than half of the lines have the same genes as another line. If
        a table does not have exactly one column of genes and one column of sets.

    Examples
    --------
    >>> with open("complexes.gmt", "w") as file:
    ...     _ = file.write("exosome\tcore\tEXOSC1\tEXOSC2\n")
    >>> scbd.datasets.gene_sets("complexes.gmt")["target"].to_list()
    ['EXOSC1', 'EXOSC2']
    """
    path = check_file(path)
    with open_text(path) as file:
        lines = [line for line in file.read().splitlines() if line.strip()]
    if not lines:
        msg = f"{path} is empty: there is no set."
        raise ValueError(msg)
    is_gmt = ".gmt" in path.name.lower()
    header = re.split(r"[,;|\t]" if ".csv" in path.name.lower() else "\t", lines[0])
    if len(header) > 1 and not is_gmt and any(_normalise_column_name(name) in _GENES for name in header):
        return _read_gene_table(path)
    sets: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines, start=1):
        name, tab, members = line.partition("\t")
        if is_gmt:
            members = members.partition("\t")[2]
        found = [gene for gene in re.split(r"[\s,;|]+", members) if gene]
        if not name.strip() or not tab or not (found or is_gmt):
            msg = f"{path}, line {number}: a set is a name, a tab and genes; got {line[:60]!r}."
            raise ValueError(msg)
        sets.append((name, found))
    names = pd.Series([name for name, _ in sets])
    contents = pd.Series([" ".join(sorted(members)) or name for name, members in sets])
    for what, words, most in (("name", names, 0), ("genes", contents, _MAX_DUPLICATE_FRACTION)):
        if words.duplicated(keep=False).mean() > most:
            several = words[words.duplicated()].iloc[0]
            msg = (
                f"{path} is no list of sets: several lines have the {what} {several!r}. Give a line to each set, or a "
                "table of genes and groups, whose first line calls the columns (gene, complex)."
            )
            raise ValueError(msg)
    rows = [(name, gene) for name, members in sets for gene in members]
    return _finish_network(pd.DataFrame(rows, columns=["source", "target"]), "sets")


def _read_gene_table(path: Path) -> pd.DataFrame:
    """Read sets of genes from a table with one column of genes and one column with the name of each gene's set."""
    table = _drop_row_numbers(read_text(path).frame.rename(columns=str.strip).fillna(""), _ROW_NUMBERS)
    genes = [name for name in table if _normalise_column_name(name) in _GENES]
    others = [name for name in table if name not in genes]
    groups = others if len(others) == 1 else [name for name in others if _normalise_column_name(name) in _GROUPS]
    if len(genes) > 1 or len(groups) != 1:
        msg = (
            f"{path} is a table of {', '.join(table)}, of which {'no' if not groups else 'no single'} column is known "
            "to name the group of a gene: keep two, gene and complex."
        )
        raise ValueError(msg)
    found = table[[groups[0], genes[0]]].set_axis(["source", "target"], axis=1)
    found["target"] = found["target"].str.split(r"[\s,;|]+", regex=True)
    return _finish_network(found.explode("target"), "sets")


def gene_pairs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read pairs of related genes from the first two columns of a CSV file, apart from row numbers.

    The two genes of a pair are sorted by name, and each pair is kept once. Pairs of a gene with itself, and lines
    without two genes, are excluded. The first line is read as column names, unless one of its first two entries also
    occurs as a gene in other lines.

    Parameters
    ----------
    path
        Path of the CSV file.

    Returns
    -------
    Data frame with one pair of genes per row, in the columns ``source`` and ``target``. Its ``attrs["kind"]`` is
    ``"pairs"``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file cannot be read as a table or has fewer than two columns, if the name of one of the first two
        columns indicates sets of genes, such as ``complex``, or if only one of the two columns holds whole numbers.

    Examples
    --------
    >>> pd.DataFrame({"gene1": ["EXOSC1"], "gene2": ["EXOSC2"]}).to_csv("pairs.csv", index=False)
    >>> scbd.datasets.gene_pairs("pairs.csv").iloc[0].to_list()
    ['EXOSC1', 'EXOSC2']
    """
    path = check_file(path)
    table = _drop_row_numbers(read_text(path, tidy=False).frame.fillna(""), _PAIR_NUMBERS)
    if table.shape[1] < 2:
        msg = f"{path} has {table.shape[1]} column: pairs are a CSV of two columns of genes."
        raise ValueError(msg)
    lines = np.char.strip(np.vstack([table.columns[:2], table.iloc[:, :2]]).astype(str))
    names, genes = lines[0], lines[1:]
    # if an entry of the first line also occurs as a gene in other lines, the first line is a pair and not column names
    if not {*names}.isdisjoint(genes.ravel()):
        genes = lines
    elif any(_normalise_column_name(name) in _SETS for name in names):
        msg = f"{path} is a table of {names[0]} and {names[1]}, not of pairs: read it with gene_sets."
        raise ValueError(msg)
    net = pd.DataFrame(genes, columns=["source", "target"])
    if hold_whole_numbers(net["source"]) != hold_whole_numbers(net["target"]):
        msg = f"{path} has numbers in one of its first two columns, and names in the other: keep two columns of genes."
        raise ValueError(msg)
    net[:] = np.sort(net.to_numpy(), axis=1)
    return _finish_network(net[net["source"] != net["target"]], "pairs")


def _drop_row_numbers(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Drop leading columns that have no name, or that hold increasing whole numbers and have one of ``names``.

    Columns with a name are dropped only while at least two other columns remain.
    """
    n = 0
    while n < table.shape[1]:
        name, column = str(table.columns[n]), table.iloc[:, n]
        is_named_so = (plain := _normalise_column_name(name)) in names or plain.isdecimal()
        is_counted = hold_whole_numbers(column) and bool((np.diff(column.astype(float)) > 0).all())
        if not (name.startswith("Unnamed: ") or (is_named_so and is_counted and n + 2 < table.shape[1])):
            break
        n += 1
    return table.iloc[:, n:]


def _normalise_column_name(column: str) -> str:
    return re.sub(r"[^a-z0-9]", "", column.lower())


def _finish_network(net: pd.DataFrame, kind: Literal["pairs", "sets"]) -> pd.DataFrame:
    net = net.assign(target=net["target"].str.strip())
    net = net[(net["source"] != "") & (net["target"] != "")].drop_duplicates().reset_index(drop=True)
    net.attrs["kind"] = kind
    return net
