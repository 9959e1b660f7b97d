"""Wells of a simulated screen: where they lie, what their images have of their own, and how strongly effects show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.datasets._simulated_images import CHANNELS, PHENOTYPES
from scbd.datasets._simulated_plates import LAYOUT, SHAPES, add_layout, well_name

if TYPE_CHECKING:
    from collections.abc import Mapping

# what plates and positions change too, each by so much, as a logarithm or, of tilts, as it is
_STAIN = {
    **{f"gain_{channel}": 0.3 for channel in CHANNELS},
    "tilt_x": 0.3,
    "tilt_y": 0.3,
    "blur": 0.3,
    "background": 0.5,
}


def places(n_wells: int, plate_wells: int | None) -> pd.DataFrame:
    """A row a well: ``plate``; where plates have a layout, ``row`` and ``column`` (from 1) and ``position``."""
    number = np.arange(n_wells)
    if plate_wells is None:
        names = [f"P{i // 6 + 1}_W{i % 6 + 1}" for i in number]
        return pd.DataFrame({"plate": [f"P{i // 6 + 1}" for i in number]}, index=names)
    # plates are filled row by row
    row, column = np.divmod(number % plate_wells, SHAPES[plate_wells][1])
    plate = [f"P{i // plate_wells + 1}" for i in number]
    frame = pd.DataFrame({"plate": plate, "row": row + 1, "column": column + 1})
    frame["position"] = [well_name(*place) for place in zip(row, column, strict=True)]
    return frame.set_index(frame["plate"] + "_" + frame["position"]).rename_axis(None)


def looks(
    rng: np.random.Generator,
    more: np.random.Generator,
    places: pd.DataFrame,
    plate_wells: int | None,
    effects: Mapping[str, float],
) -> pd.DataFrame:
    """What the images of each well have of their own; ``more`` draws what came later, so that older screens stay."""
    wells = _own(rng, places.index, effects["well_effect"])
    plate = pd.factorize(places["plate"])[0]
    shared = effects["plate_effect"] * more.normal(size=(plate.max() + 1, len(_STAIN)))[plate]
    if plate_wells is not None:
        layout = add_layout(places[["row", "column"]] - 1, SHAPES[plate_wells])[list(LAYOUT)].to_numpy()
        loadings = more.normal(size=(len(LAYOUT), len(_STAIN))) / np.sqrt(len(LAYOUT))
        shared = shared + effects["position_effect"] * layout @ loadings
    for name, by in zip(_STAIN, (shared * list(_STAIN.values())).T, strict=True):
        wells[name] = wells[name] + by if name.startswith("tilt") else wells[name] * np.exp(by)
    camera, crowd = effects["camera_effect"], effects["density_effect"]
    wells["blur"] *= np.exp(0.5 * camera * more.normal(size=len(wells)))
    wells["gamma"] = np.exp(0.25 * camera * more.normal(size=len(wells)))
    wells["saturation"] = 0.5 * camera * more.random(len(wells))
    wells["density"] = np.exp(0.2 * crowd * more.normal(size=len(wells)))
    return wells


def _own(rng: np.random.Generator, names: pd.Index, strength: float) -> pd.DataFrame:
    """Stain, illumination, focus and background of wells that have nothing in common."""
    n = len(names)
    columns = {f"gain_{channel}": np.exp(0.3 * strength * rng.normal(size=n)) for channel in CHANNELS}
    columns |= {f"tilt_{axis}": 0.3 * strength * rng.normal(size=n) for axis in "xy"}
    columns["blur"] = 0.5 + 0.6 * strength * rng.random(n)
    columns["background"] = 0.02 + 0.05 * strength * rng.random(n)
    return pd.DataFrame(columns, index=names)


def strengths(more: np.random.Generator, wells: pd.DataFrame, interaction: float) -> pd.DataFrame:
    """How strongly each phenotype shows in each well, ``(wells, phenotypes)``: told by how the well looks."""
    look = _standardised(wells.to_numpy())
    weights = more.normal(size=(look.shape[1], len(PHENOTYPES)))
    return pd.DataFrame(
        np.exp(interaction * _standardised(look @ weights)), index=wells.index, columns=list(PHENOTYPES)
    )


def drawn_parameters(shown: np.ndarray, density: np.ndarray | float) -> np.ndarray:
    """What is drawn of cells that show phenotypes ``(n, phenotypes)``, logarithms, in wells of such density."""
    parameters = np.exp(shown)
    # where cells are crowded they are smaller, their nuclei less so
    for name, power in (("cell_size", 0.5), ("nucleus_size", 0.25)):
        parameters[:, list(PHENOTYPES).index(name)] /= density**power
    return parameters


def _standardised(values: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and variance 1, or of zeros."""
    sd = values.std(0)
    varies = sd > 1e-12 * np.abs(values).max(0)
    return np.where(varies, (values - values.mean(0)) / np.where(varies, sd, 1), 0)
