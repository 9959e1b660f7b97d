"""Make cells and tables of features with a known structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData


def make_cells(n: int = 96, shape: tuple[int, int, int] = (2, 16, 16), dtype: str = "uint8", seed: int = 0) -> AnnData:
    """Return cells whose brightness encodes the perturbation and whose left edge encodes the environment."""
    rng = np.random.default_rng(seed)
    y, e = rng.integers(4, size=n), rng.integers(3, size=n)
    images = rng.normal(40, 5, (n, *shape)) + 30 * y[:, None, None, None]
    images[:, :, :, :4] += 40 * e[:, None, None, None]
    obs = pd.DataFrame(
        {
            "gene": pd.Categorical([f"gene_{i}" for i in y]),
            "well": pd.Categorical([f"well_{i}" for i in e]),
            "plate": pd.Categorical([f"plate_{i % 2}" for i in e]),
        },
        index=[f"cell_{i}" for i in range(n)],
    )
    images = np.clip(images, 0, 255).astype(dtype)
    var = pd.DataFrame(index=[f"channel_{i}" for i in range(shape[0])])
    return AnnData(obs=obs, var=var, obsm={"single_cell_images": images})


def make_wells(
    n_compounds: int = 12, n_plates: int = 4, n_controls: int = 6, n_features: int = 10, seed: int = 0
) -> AnnData:
    """Return features of wells of plates of one layout: one well per compound and plate, and wells of controls.

    Features depend on the compound, and more strongly on the plate and the position.
    """
    rng = np.random.default_rng(seed)
    n_wells = n_compounds + n_controls
    compound = np.array([*(f"compound_{i}" for i in range(n_compounds)), *["DMSO"] * n_controls])
    effect = rng.normal(size=(n_wells, n_features))
    effect[n_compounds:] = 0
    place = rng.normal(size=(n_wells, 2)) @ rng.normal(size=(2, n_features))
    plate = 3 * rng.normal(size=(n_plates, n_features))
    values = plate[:, None] + effect + place + 0.3 * rng.normal(size=(n_plates, n_wells, n_features))
    obs = pd.DataFrame(
        {
            "compound": pd.Categorical(np.tile(compound, n_plates)),
            "plate": pd.Categorical(np.repeat([f"plate_{i}" for i in range(n_plates)], n_wells)),
            "well": pd.Categorical(np.tile([f"W{i:02}" for i in range(n_wells)], n_plates)),
        },
        index=[f"well_{i}" for i in range(n_wells * n_plates)],
    )
    var = pd.DataFrame(index=[f"feature_{i}" for i in range(n_features)])
    return AnnData(X=values.reshape(-1, n_features).astype(np.float32), obs=obs, var=var)


def wells(n: int = 900, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features of cells with a separate shift and linear map in each of three wells; a third are controls."""
    rng = np.random.default_rng(seed)
    well, control = np.arange(n) % 3, np.arange(n) // 3 % 3 == 0
    cells = rng.normal(size=(n, d)) + 2.0 * ~control[:, None]
    for w in range(3):
        cells[well == w] = cells[well == w] @ (np.eye(d) + 0.4 * rng.normal(size=(d, d))) + 5 * rng.normal(size=d)
    return cells, well.astype(str), control


class Plates(NamedTuple):
    """Features and labels of wells, one row per well."""

    features: np.ndarray
    compounds: np.ndarray
    plates: np.ndarray
    positions: np.ndarray
    controls: np.ndarray


def plates(d: int = 6, n_plates: int = 4, n_compounds: int = 15, n_controls: int = 8, seed: int = 0) -> Plates:
    """Return plates of one layout: each compound has one position, controls have several; units of features differ."""
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
    """Return profiles and complexes of genes; genes of the first ``found`` complexes share a direction."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_sets * size, 16))
    for i in range(found):
        x[i * size : (i + 1) * size] += 3 * rng.normal(size=16)
    genes = [f"G{i}" for i in range(len(x))]
    net = pd.DataFrame({"source": [f"complex {i // size}" for i in range(len(x))], "target": genes})
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), net


def funk_profiles(shared: Path, columns: Any = range(64), drop_control: bool = False) -> AnnData:
    """Return real mcVAE profiles of Funk et al., standardised as in the paper."""
    pytest.importorskip("pyarrow", reason="reading the real profiles needs pyarrow")
    frame = pd.read_parquet(shared / "funk22" / "df_standardized_mitosis.parquet")[[str(i) for i in columns]]
    frame = frame - frame.loc["nontargeting"]
    if drop_control:
        frame = frame.drop("nontargeting")
    frame = (frame - frame.mean()) / frame.std(ddof=1)
    return AnnData(X=frame.to_numpy(), obs=pd.DataFrame(index=list(frame.index)))
