from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from conftest import make_cells, make_plates

from scbd.cli import main
from scbd.data import ArraySource, Crops, open_screen, write_screen
from scbd.data.stores._sources import say_what_recurs, source_names

IMAGES = "single_cell_images"


def crops(name: str = "cells", n: int = 12, **columns) -> Crops:
    cells = make_cells(n)
    return Crops(ArraySource(cells.obsm[IMAGES]), cells.obs.assign(**columns), ["a", "b"], name)


def test_wells_of_several_files_are_told_apart_by_the_file(tmp_path, capsys):
    for number, plate in enumerate(make_plates(2)):
        plate.obs = plate.obs.drop(columns="plate")
        plate.write_h5ad(tmp_path / f"p{number}.h5ad")
    files = [str(tmp_path / f"p{number}.h5ad") for number in range(2)]
    assert main(["convert", *files, "--y-key", "gene", "--out", str(tmp_path / "s.h5ad")]) == 0
    told = capsys.readouterr().err
    assert "well: 3 values occur in several files; where these stand for different ones" in told
    assert "by the file, --e-key source well." in told and "gene:" not in told
    screen = open_screen(tmp_path / "s.h5ad")
    assert sorted(screen.obs["source"]) == ["p0"] * 40 + ["p1"] * 40
    for source, image in zip(screen.obs["source"], screen.obsm[IMAGES], strict=True):
        assert source == f"p{image[0, 0, 0]}"


def test_of_one_file_nothing_is_added(tmp_path, capsys):
    assert list(write_screen(tmp_path / "s.h5ad", make_plates(1), y_key="gene").obs) == ["gene", "well", "plate"]
    assert not capsys.readouterr().err


def test_a_column_of_that_name_stays(tmp_path):
    both = [crops(source="vendor A"), crops(source=pd.Categorical(["vendor B"] * 12))]
    assert set(write_screen(tmp_path / "s.h5ad", both, y_key="gene").obs["source"]) == {"vendor A", "vendor B"}


def test_a_later_plate_has_another_name_than_those_before(tmp_path):
    write_screen(tmp_path / "s.h5ad", make_plates(2), y_key="gene")
    found = write_screen(tmp_path / "t.zarr", [tmp_path / "s.h5ad", make_plates(3)[2]], y_key="gene")
    pairs = found.obs[["source", "plate"]].drop_duplicates().sort_values("plate").to_numpy().tolist()
    assert pairs == [["plate 0", "plate_0"], ["plate 1", "plate_1"], ["plate 1 2", "plate_2"]]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/p1.h5sc", "x/p2.h5sc"], ["p1", "p2"]),
        (["x/p1/cells.csv", "x/p2/cells.csv"], ["p1/cells.csv", "p2/cells.csv"]),
        (["plate.1", "plate.2"], ["plate.1", "plate.2"]),
        (["cells", "cells"], ["cells 0", "cells 1"]),
        (["cells.csv", "a/cells.csv"], ["cells.csv", "a/cells.csv"]),
    ],
)
def test_names_are_as_short_as_they_can_be(paths, names):
    assert source_names([crops(str(Path(path))) for path in paths]) == names


def test_only_what_may_be_an_environment_is_said(capsys):
    """Not what goes with the perturbation, and no numbers."""
    genes = make_cells(12).obs["gene"].astype(str)
    guides = [f"{gene}_{n % 2}" for n, gene in enumerate(genes)]
    columns = {"guide": guides, "complex": genes.replace({"gene_1": "gene_0"}), "area": range(12)}
    say_what_recurs([crops(**columns, date="Monday"), crops(**columns)], "gene")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["well", "plate"]
