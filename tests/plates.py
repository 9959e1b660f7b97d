"""Plates in the layout of OME-Zarr's specification, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr

WELLS = {"A/1": ["0", "1"], "B/12": ["0"]}
NAMES = ["DNA", "actin"]


def pixels(well: str, field: str) -> np.ndarray:
    seed = [ord(letter) for letter in well + field]
    return np.random.default_rng(seed).integers(0, 60_000, (2, 48, 64)).astype("uint16")


def metadata_of_image(version: str, unit: str | None = "micrometer") -> dict[str, Any]:
    """Two scales, of which the whole is scaled once more."""
    space = {"type": "space"} | ({"unit": unit} if unit else {})
    axes = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}]
    axes += [{"name": axis, **space} for axis in "zyx"]
    datasets = [
        {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1, scale, scale]}]}
        for level, scale in enumerate((0.5, 1.0))
    ]
    whole = [{"type": "scale", "scale": [1, 1, 1, 1.3, 1.3]}, {"type": "translation", "translation": [0, 0, 0, 9, 9]}]
    image = {"version": version, "axes": axes, "datasets": datasets, "coordinateTransformations": whole}
    return {"multiscales": [image], "omero": {"channels": [{"label": name} for name in NAMES]}}


def put(group: Any, metadata: dict[str, Any], version: str) -> None:
    group.attrs.update(metadata if version == "0.4" else {"ome": metadata | {"version": version}})


def add_image(group: Any, image: np.ndarray, version: str, unit: str | None = "micrometer") -> None:
    put(group, metadata_of_image(version, unit), version)
    for level, step in enumerate((1, 2)):
        data = image[None, :, None, ::step, ::step]
        how: Any = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if version == "0.4" else {}
        group.create_array(str(level), data=data, chunks=(1, 1, 1, 32, 32), **how)


def make_plate(path: Path, version: str = "0.5", unit: str | None = "micrometer") -> Path:
    plate = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    wells = [{"path": well, "rowIndex": "AB".index(well[0]), "columnIndex": int(well[2:]) - 1} for well in WELLS]
    rows, columns = ([{"name": name} for name in names] for names in ("AB", ("1", "12")))
    put(plate, {"plate": {"version": version, "wells": wells, "rows": rows, "columns": columns}}, version)
    for well, fields in WELLS.items():
        group = plate.create_group(well)
        put(group, {"well": {"images": [{"path": field} for field in fields], "version": version}}, version)
        for field in fields:
            image = group.create_group(field)
            add_image(image, pixels(well, field), version, unit)
            nuclei = np.zeros((1, 48, 64), "uint16")
            nuclei[0, 20:25, 30:41] = 3
            add_image(image.create_group("labels/nuclei"), nuclei, version)
    return path
