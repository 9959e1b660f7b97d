"""Fields of OME-Zarr: single images, and plates of wells, by their metadata, through Zarr alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._messages import head
from scbd.data._prefetch import worked_on
from scbd.data.fields._field import ArrayField

if TYPE_CHECKING:
    from zarr.abc.store import Store

# of files of format 2, which name Python functions to be called; these only turn bytes into numbers
_CODECS = {"blosc", "zlib", "gzip", "zstd", "lz4", "bz2", "lzma", "delta", "shuffle"}
# of a micrometre
_UNITS = {"nanometer": 1e-3, "millimeter": 1e3}


def read_plate(path: str | os.PathLike[str] | Store, *, labels: str | None = None) -> pd.DataFrame:
    """Fields of an OME-Zarr plate (the HCS layout, versions 0.4 and 0.5), for :func:`crop_cells`.

    Only metadata are read. Of multiscale images the full resolution is taken.

    Parameters
    ----------
    path
        The plate: a ``.zarr`` folder, its URL, or a store of Zarr's.
    labels
        Name of the label images that lie beside the images, such as ``"nuclei"``.

    Returns
    -------
    A row a field. Its name, such as ``"A/1/0"``, is well and field; columns are

    - ``well``, such as ``"A1"``, with ``row`` and ``column``, and ``field``, the name of the image in its well;
    - ``image``: channels, height and width, read when asked for; :func:`numpy.asarray` has it all;
    - ``channels``: names, where the plate tells them;
    - ``pixel_size``: height and width of a pixel, in the plate's own unit, micrometres where it is of another;
    - ``labels``, if they were asked for.

    Add columns (the gene of each well, say): :func:`crop_cells` hands them on to the cells.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    KeyError, ValueError
        If it is no plate, lacks a well or field that it names, or has no such labels; if a field has several planes or
        time points.

    References
    ----------
    Moore et al. (2021), OME-NGFF.

    Examples
    --------
    >>> import zarr
    >>> plate = zarr.open_group("plate.zarr", mode="w")
    >>> plate.attrs["ome"] = {"version": "0.5", "plate": {"wells": [{"path": "A/1"}]}}
    >>> plate.create_group("A/1").attrs["ome"] = {"well": {"images": [{"path": "0"}]}}
    >>> axes = [{"name": axis, "type": "space"} for axis in "yx"]
    >>> scale = [{"type": "scale", "scale": [0.65, 0.65]}]
    >>> image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    >>> field = plate.create_group("A/1/0")
    >>> field.attrs["ome"] = {"multiscales": [image]}
    >>> field.create_array("0", data=np.zeros((200, 200), "uint16")) is not None
    True
    >>> fields = scbd.data.read_plate("plate.zarr")
    >>> fields.loc["A/1/0", ["well", "pixel_size"]].tolist()
    ['A1', (0.65, 0.65)]
    """
    group = _opened(path)
    plate = _ome(group).get("plate")
    if plate is None:
        other = " It is an image: give its path to crop_cells." if "multiscales" in _ome(group) else ""
        msg = f"{path} is no OME-Zarr plate: its metadata name no wells.{other}"
        raise ValueError(msg)
    wells = [well["path"] for well in plate.get("wells", [])]
    rows = [row for found in worked_on(lambda well: _fields_of(group, well, labels), wells) for row in found]
    if not rows:
        msg = f"{path} is a plate without fields."
        raise ValueError(msg)
    table = pd.DataFrame(rows).set_index("name")
    table.index.name = None
    return table


def _fields_of(group: Any, well: str, labels: str | None) -> list[dict[str, Any]]:
    """Rows of one well."""
    row, column = well.split("/")[:2]
    images = _ome(_inside(group, well)).get("well", {}).get("images", [])
    found = []
    for path in (image["path"] for image in images):
        name = f"{well}/{path}"
        image = _inside(group, name)
        field = image_field(image, f"{name} of {group.store}")
        one = {"name": name, "well": row + column, "row": row, "column": column, "field": str(path), "image": field}
        one |= {"channels": field.channels, "pixel_size": field.pixel_size}
        if labels is not None:
            one["labels"] = image_field(_inside(group, f"{name}/labels/{labels}"), f"labels of {name}")
        found.append(one)
    return found


def open_zarr(path: str | os.PathLike[str]) -> ArrayField:
    """A field in a Zarr array, or in an OME-Zarr image.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none.
    """
    found = _opened(path)
    if hasattr(found, "shape"):
        return ArrayField(_safe(found, str(path)), str(path))
    metadata = _ome(found)
    if "multiscales" not in metadata:
        plate = "is a plate: give crop_cells what read_plate finds in it" if "plate" in metadata else "is no image"
        msg = f"{path} {plate} (it holds {head(sorted(found)) or 'nothing'})."
        raise ValueError(msg)
    return image_field(found, str(path))


def image_field(group: Any, where: str) -> ArrayField:
    """The full resolution of an OME-Zarr image.

    Raises
    ------
    ValueError
        If its metadata name none, or it has several planes or time points.
    """
    metadata = _ome(group)
    if not metadata.get("multiscales"):
        msg = f"{where} is no OME-Zarr image: its metadata name no multiscales."
        raise ValueError(msg)
    image = metadata["multiscales"][0]
    first = image["datasets"][0]
    array = _safe(_inside(group, first["path"]), where)
    # earlier versions name them shortly, or not at all
    axes = [axis if isinstance(axis, dict) else {"name": axis} for axis in image.get("axes", "tczyx")]
    scale = np.ones(array.ndim)
    for step in (*first.get("coordinateTransformations", ()), *image.get("coordinateTransformations", ())):
        scale = scale * step.get("scale", 1)
    size = {
        axis["name"]: length * _UNITS.get(axis.get("unit", ""), 1) for axis, length in zip(axes, scale, strict=True)
    }
    named = [channel.get("label") for channel in metadata.get("omero", {}).get("channels", [])]
    field = ArrayField(array, where, "".join(axis["name"] for axis in axes), None, (float(size["y"]), float(size["x"])))
    if len(named) == field.shape[0] and all(named):
        field.channels = [str(name) for name in named]
    return field


def _opened(path: Any) -> Any:
    import zarr

    if isinstance(path, (str, os.PathLike)) and "://" not in str(path) and not os.path.exists(path):
        msg = f"There is nothing at {path}."
        raise FileNotFoundError(msg)
    try:
        return zarr.open(path, mode="r")
    except (FileNotFoundError, ValueError, KeyError) as error:
        msg = f"{path} is no Zarr store ({error})."
        raise ValueError(msg) from error


def _inside(group: Any, path: str) -> Any:
    try:
        return group[path]
    except KeyError as error:
        msg = f"{group.store} has no {f'{group.path}/{path}'.strip('/')}, which was asked for or its metadata name."
        raise KeyError(msg) from error
    except ValueError as error:
        msg = f"{f'{group.path}/{path}'.strip('/')} of {group.store} cannot be read ({error})."
        raise ValueError(msg) from error


def _ome(group: Any) -> dict[str, Any]:
    """Metadata, wherever the version has them."""
    attributes = dict(group.attrs)
    return attributes.get("ome", attributes)


def _safe(array: Any, where: str) -> Any:
    """An array of numbers whose reading calls nothing but decoders of numbers."""
    metadata = array.metadata
    codecs = [metadata.compressor, *(metadata.filters or ())] if metadata.zarr_format == 2 else []
    names = [codec.codec_id for codec in codecs if codec is not None]
    if array.dtype.kind not in "buif" or not set(names) <= _CODECS:
        msg = (
            f"{where} holds {array.dtype}, through {head(names) or 'nothing'}: fields are numbers, plainly compressed."
        )
        raise ValueError(msg)
    return array
