from __future__ import annotations

import pytest

from scbd.pl._style import series_style, wrap_name


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("short", "short"),
        ("standardised by plate, whitened", "standardised by\nplate, whitened"),
        ("Metadata_plate_and_source", "Metadata_plate_\nand_source"),
        ("x" * 33, "x" * 16 + "\n" + "x" * 16 + "\nx"),
        (3, "3"),
        ("$\\frac{a$", "\\$\\frac{a\\$"),
        ("", ""),
    ],
)
def test_wrap_name_long_names_are_broken_at_ends_of_words(name, lines):
    assert wrap_name(name, 16) == lines


def test_series_style_88_series_are_distinct():
    assert len({(series_style(i)["color"], series_style(i)["marker"]) for i in range(88)}) == 88
