"""A screen is written by processes that are killed at random moments, without warning, until it is whole."""

from __future__ import annotations

import pytest
from conftest import contents, make_plates
from killing import WRITING, kill_until

from scbd.data import verify_screen, write_screen


@pytest.mark.parametrize(("name", "compression"), [("s.h5ad", None), ("s.zarr", "lz4")])
def test_killed_at_random_moments(tmp_path, name, compression):
    plates = make_plates(3, 60)
    write_screen(tmp_path / f"whole_{name}", plates, y_key="gene", compression=compression, block_size=4)
    path = tmp_path / name
    code = WRITING.format(path=str(path), cells=60, compression=compression)
    assert kill_until(path, code, longest=0.5) >= 2
    verify_screen(path)
    assert contents(path) == contents(tmp_path / f"whole_{name}")
