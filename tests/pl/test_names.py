from __future__ import annotations

import pytest

from scbd.pl._names import wrapped


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("short", "short"),
        ("standardised by plate, whitened", "standardised by\nplate, whitened"),
        ("Metadata_plate_and_source", "Metadata_plate_\nand_source"),
        ("x" * 33, "x" * 16 + "\n" + "x" * 16 + "\nx"),
        ("the embedding $z_c$ of cells", "the embedding\n$z_c$ of cells"),
        (3, "3"),
        ("", ""),
    ],
)
def test_names_are_broken_where_words_end(name, lines):
    assert wrapped(name, 16 * 0.55 * 10 / 72 + 1e-6) == lines
