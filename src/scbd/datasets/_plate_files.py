"""Fields of a plate written as files: OME-Zarr with label images, or a TIFF for each channel and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import zarr
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

# micrometres
_PIXEL_SIZE = 0.65


class Field(NamedTuple):
    """A field of view, and its nuclei."""

    well: str
    """Such as ``"A01"``."""
    number: int
    """In its well, from 0."""
    channels: list[str]
    image: np.ndarray
    """uint8 ``(channels, height, width)``."""
    labels: np.ndarray
    """Whose nucleus is where, int32 ``(height, width)``; 0 is background."""
    nuclei: pd.DataFrame
    """A row a cell: ``label``, and its centroid ``y`` and ``x``."""


def write_ome_zarr(folder: Path, fields: Iterable[Field]) -> pd.DataFrame:
    """The plate ``plate.zarr`` (HCS layout, version 0.5) with the label images ``nuclei``.

    Returns
    -------
    All nuclei, with the name of their ``field``.
    """
    plate = zarr.open_group(folder / "plate.zarr", mode="w")
    wells: dict[str, list[str]] = {}
    found = []
    for field in fields:
        path = f"{field.well[:-2]}/{int(field.well[-2:])}"
        wells.setdefault(path, []).append(str(field.number))
        image = plate.create_group(f"{path}/{field.number}")
        _write_image(image, "cyx", field.image, omero={"channels": [{"label": name} for name in field.channels]})
        _describe(image.create_group("labels"), labels=["nuclei"])
        _write_image(image.create_group("labels/nuclei"), "yx", field.labels, **{"image-label": {}})
        found.append(field.nuclei.assign(field=f"{path}/{field.number}"))
    for path, numbers in wells.items():
        _describe(plate[path], well={"images": [{"path": number} for number in numbers]})
    rows, columns = (list(dict.fromkeys(path.split("/")[axis] for path in wells)) for axis in (0, 1))
    placed = [
        {"path": path, "rowIndex": rows.index(path.split("/")[0]), "columnIndex": columns.index(path.split("/")[1])}
        for path in wells
    ]
    axes = {"rows": [{"name": name} for name in rows], "columns": [{"name": name} for name in columns]}
    _describe(plate, plate={"name": "simulated", **axes, "wells": placed})
    return pd.concat(found)


def _write_image(group: zarr.Group, axes: str, pixels: np.ndarray, **metadata: Any) -> None:
    """An image of one scale."""
    space = {"type": "space", "unit": "micrometer"}
    kinds = [{"name": axis, **({"type": "channel"} if axis == "c" else space)} for axis in axes]
    scale = [{"type": "scale", "scale": [1.0 if axis == "c" else _PIXEL_SIZE for axis in axes]}]
    group.create_array("0", data=pixels)
    _describe(
        group,
        multiscales=[{"axes": kinds, "datasets": [{"path": "0", "coordinateTransformations": scale}]}],
        **metadata,
    )


def _describe(group: Any, **metadata: Any) -> None:
    group.attrs["ome"] = {"version": "0.5", **metadata}


def write_tiff(folder: Path, fields: Iterable[Field]) -> pd.DataFrame:
    """A file for each field and channel, and ``fields.csv``, which says what they are.

    Returns
    -------
    All nuclei, with the name of their ``field``.
    """
    (folder / "images").mkdir()
    found, table = [], []
    for field in fields:
        name = f"{field.well}_s{field.number + 1}"
        files = [f"images/{name}_w{number}.tif" for number in range(1, len(field.channels) + 1)]
        for file, channel in zip(files, field.image, strict=True):
            Image.fromarray(channel).save(folder / file)
        table.append({"field": name, "well": field.well} | dict(zip(field.channels, files, strict=True)))
        found.append(field.nuclei.assign(field=name))
    pd.DataFrame(table).to_csv(folder / "fields.csv", index=False)
    return pd.concat(found)


Writer: TypeAlias = "Callable[[Path, Iterable[Field]], pd.DataFrame]"
# what writes each form, and how its table finds nuclei
FORMS: dict[str, tuple[Writer, list[str]]] = {
    "ome-zarr": (write_ome_zarr, ["field", "label"]),
    "tiff": (write_tiff, ["field", "y", "x"]),
}
