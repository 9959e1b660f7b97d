"""Tables of features with a structure that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData


def wells(n: int = 900, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features with a shift, a scale and a mixing of their own in each of three wells; a third are controls."""
    rng = np.random.default_rng(seed)
    well, control = np.arange(n) % 3, np.arange(n) // 3 % 3 == 0
    cells = rng.normal(size=(n, d)) + 2.0 * ~control[:, None]
    for w in range(3):
        cells[well == w] = cells[well == w] @ (np.eye(d) + 0.4 * rng.normal(size=(d, d))) + 5 * rng.normal(size=d)
    return cells, well.astype(str), control


class Plates(NamedTuple):
    """A row a well."""

    features: np.ndarray
    compounds: np.ndarray
    plates: np.ndarray
    positions: np.ndarray
    controls: np.ndarray


def plates(d: int = 6, n_plates: int = 4, n_compounds: int = 15, n_controls: int = 8, seed: int = 0) -> Plates:
    """Plates of one layout: a compound has one position, controls have several; features differ in their units."""
    rng = np.random.default_rng(seed)
    position = np.arange(n_compounds + n_controls)
    compound = np.where(position < n_compounds, position, -1)
    effects = np.vstack([rng.normal(size=(n_compounds, d)), np.zeros((1, d))])
    layout = 0.7 * rng.normal(size=(len(position), 1)) * rng.normal(size=d)
    noise = rng.normal(size=(n_plates, len(position), d)) @ rng.normal(size=(d, d))
    values = effects[compound] + layout + 0.5 * noise + rng.normal(size=(n_plates, 1, d))
    compounds = np.tile(np.where(compound < 0, "DMSO", compound.astype(str)), n_plates)
    names = np.repeat([f"plate {plate}" for plate in range(n_plates)], len(position))
    features = values.reshape(-1, d) * 10.0 ** rng.integers(-3, 4, size=d)
    return Plates(features, compounds, names, np.tile(position, n_plates), compounds == "DMSO")


def map_of_complexes(n_sets: int = 20, size: int = 4, found: int = 5, seed: int = 0) -> tuple[AnnData, pd.DataFrame]:
    """The first complexes share a direction, the others do not."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_sets * size, 16))
    for i in range(found):
        x[i * size : (i + 1) * size] += 3 * rng.normal(size=16)
    genes = [f"G{i}" for i in range(len(x))]
    net = pd.DataFrame({"source": [f"complex {i // size}" for i in range(len(x))], "target": genes})
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), net


def funk_profiles(shared: Path, columns: Any = range(64), drop_control: bool = False) -> AnnData:
    """Real mcVAE profiles of Funk et al., as the paper standardises them."""
    pytest.importorskip("pyarrow", reason="reading the real profiles needs pyarrow")
    frame = pd.read_parquet(shared / "funk22" / "df_standardized_mitosis.parquet")[[str(i) for i in columns]]
    frame = frame - frame.loc["nontargeting"]
    if drop_control:
        frame = frame.drop("nontargeting")
    frame = (frame - frame.mean()) / frame.std(ddof=1)
    return AnnData(X=frame.to_numpy(), obs=pd.DataFrame(index=list(frame.index)))
