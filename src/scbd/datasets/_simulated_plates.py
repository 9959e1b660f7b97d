"""Plates of simulated data: their shapes, what their wells are called, and what differs from place to place."""

from __future__ import annotations

import numpy as np
import pandas as pd

# rows and columns, by number of wells
SHAPES = {6: (2, 3), 24: (4, 6), 96: (8, 12), 384: (16, 24), 1536: (32, 48)}
# by what positions differ
LAYOUT = ("down", "across", "edge")


def add_layout(wells: pd.DataFrame, shape: tuple[int, int]) -> pd.DataFrame:
    """Gradients and edges from ``row`` and ``column`` (from 0): columns of mean 0 and variance 1, or 0 if constant."""
    row, column = wells["row"], wells["column"]
    edge = np.minimum.reduce([row, column, shape[0] - 1 - row, shape[1] - 1 - column]) == 0
    for name, values in zip(LAYOUT, (row, column, edge), strict=True):
        wells[name] = (values - values.mean()) / (values.std() or 1)
    return wells


def well_name(row: int, column: int) -> str:
    """Rows are letters: A01, and AA01 behind Z01."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return ("A" if row >= 26 else "") + letters[row % 26] + f"{column + 1:02}"
