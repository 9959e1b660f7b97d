"""Crops of cells from SpatialData: positions by its transformations, labels by its table."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._messages import head, missing_key
from scbd.data.fields._cells import LABEL
from scbd.data.fields._crop_cells import crop_cells
from scbd.data.fields._field import ArrayField
from scbd.data.fields._labels import measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data.stores import Crops

_PLANE = ("x", "y")


def from_spatialdata(
    sdata: Any,
    images: str | Sequence[str],
    cells: str | Sequence[str],
    *,
    size: int,
    table: str | None = None,
    coordinate_system: str | None = None,
    **how: Any,
) -> Crops:
    """Crops of cells of a SpatialData object, see :func:`crop_cells`.

    Centroids are carried from the cells' own coordinates, by their transformation and that of the image, to pixels of
    the image, whatever these are: scaled, shifted, turned. Of a multiscale image the full resolution is taken. Crops
    lie along the axes of the image; an image that is turned is not turned back.

    Parameters
    ----------
    sdata
        :class:`spatialdata.SpatialData`.
    images
        Name of an image, or of several, which are fields.
    cells
        Of each image the name of the shapes, points or labels that are its cells.
    size
        Height and width of crops, in pixels of the image.
    table
        Name of the table that annotates the cells, if there are several. Cells that it does not have are left out.
    coordinate_system
        In which cells and image lie, if they have several in common, none of which is ``"global"``.
    **how
        ``channels``, ``edge``, ``mask`` (for labels that have the image's pixels), ``resample_to`` (in units of the
        coordinate system) and ``invalid`` of :func:`crop_cells`.

    Returns
    -------
    :class:`Crops`. ``obs`` has the columns of the annotating table, then ``field`` (the image), ``instance`` (index of
    the shape or point, number of the label), and ``y`` and ``x``, in pixels of the image.

    Raises
    ------
    KeyError, ValueError
        If elements or tables are not there, have no coordinate system in common, or the table has none of the cells; or
        what :func:`crop_cells` says.

    Warns
    -----
    UserWarning
        If cells are left out, or their crops reach over an edge.

    References
    ----------
    Marconato et al. (2025), SpatialData.

    Examples
    --------
    >>> from spatialdata import SpatialData  # doctest: +SKIP
    >>> sdata = SpatialData.read("well.zarr")  # doctest: +SKIP
    >>> crops = scbd.data.from_spatialdata(sdata, "image", "cells", size=32, edge="drop")  # doctest: +SKIP
    >>> screen = scbd.data.write_screen("screen.zarr", crops, y_key="gene")  # doctest: +SKIP
    """
    pairs = _pairs(images, cells)
    fields, found, masks = {}, [], {}
    for image_name, cells_name in pairs:
        image, element = _element(sdata, "images", image_name), _element(sdata, "cells", cells_name)
        system = _system(image, element, (image_name, cells_name), coordinate_system)
        to_system = _matrix(image, system)
        fields[image_name] = _field(image, image_name, np.linalg.norm(to_system[:2, :2], axis=0))
        instances, xy, labels = _centroids(element, cells_name)
        to_pixels = np.linalg.inv(to_system) @ _matrix(element, system)
        # the middle of the first pixel is at 0.5 there
        x, y = to_pixels[:2, :2] @ xy.T + to_pixels[:2, 2:] - 0.5
        if (
            labels is not None
            and labels.shape[1:] == fields[image_name].shape[1:]
            and np.allclose(to_pixels, np.eye(3))
        ):
            masks[image_name] = labels
        places = {"field": image_name, "instance": instances, "y": y, "x": x}
        found.append(_annotated(sdata, table, cells_name, pd.DataFrame(places)))
    obs = pd.concat(found)
    if how.get("mask") is not None:
        without = [name for name, _ in pairs if name not in masks]
        if without:
            msg = f"mask={how['mask']!r}: the cells of {head(without)} are no labels that have the pixels of the image."
            raise ValueError(msg)
        how |= {"labels": masks}
        obs[LABEL] = obs["instance"]
    return crop_cells(fields, obs, size=size, **how)


def _pairs(images: str | Sequence[str], cells: str | Sequence[str]) -> list[tuple[str, str]]:
    several, of_each = ([names] if isinstance(names, str) else list(names) for names in (images, cells))
    if len(several) != len(of_each) or not several:
        msg = f"There are {len(several)} images and {len(of_each)} elements with cells: give one of each image."
        raise ValueError(msg)
    if len(set(several)) < len(several):
        msg = f"images names {head(several)}: give each once."
        raise ValueError(msg)
    return list(zip(several, of_each, strict=True))


def _element(sdata: Any, argument: str, name: str) -> Any:
    kinds = ("images",) if argument == "images" else ("shapes", "points", "labels")
    known = {key: element for kind in kinds for key, element in getattr(sdata, kind).items()}
    if name not in known:
        raise KeyError(missing_key(" and ".join(kinds), name, known, argument))
    return known[name]


def _system(image: Any, element: Any, names: tuple[str, str], wanted: str | None) -> str:
    """The coordinate system in which both lie."""
    from spatialdata.transformations import get_transformation

    of_image, of_cells = (get_transformation(one, get_all=True) for one in (image, element))
    common = [name for name in of_image if name in of_cells]
    if wanted is None and ("global" in common or len(common) == 1):
        return "global" if "global" in common else common[0]
    if wanted is None or wanted not in common:
        msg = f"{names[0]!r} and {names[1]!r} have in common the coordinate systems {head(common) or 'none'}: name one."
        raise ValueError(msg)
    return wanted


def _matrix(element: Any, system: str) -> np.ndarray:
    """From the element's own coordinates, (x, y, 1)."""
    from spatialdata.transformations import get_transformation

    return get_transformation(element, system).to_affine_matrix(_PLANE, _PLANE)


def _full_resolution(element: Any) -> Any:
    """Of a tree of scales the first; what has one is it."""
    return next(iter(next(iter(element.children.values())).values())) if hasattr(element, "children") else element


def _field(image: Any, name: str, xy_size: np.ndarray) -> ArrayField:
    image = _full_resolution(image)
    names = image.coords["c"].values
    channels = None if names.dtype.kind in "iu" else names.tolist()
    pixel_size = float(xy_size[1]), float(xy_size[0])
    return ArrayField(image.data, f"image {name!r}", "".join(image.dims), channels, pixel_size)


def _centroids(element: Any, name: str) -> tuple[np.ndarray, np.ndarray, ArrayField | None]:
    """Instances, their centroids in the element's own coordinates, float ``(N, 2)`` of x and y, and what labels are."""
    if hasattr(element, "geometry"):
        points = element.geometry.centroid
        return element.index.to_numpy(), np.stack([points.x, points.y], axis=1), None
    if hasattr(element, "compute") and hasattr(element, "columns"):
        table = element[["x", "y"]].compute()
        return table.index.to_numpy(), table.to_numpy(np.float64), None
    labels = _full_resolution(element)
    field = ArrayField(labels.data, f"labels {name!r}", "".join(labels.dims))
    found = measured({name: field}, [name])
    return found[LABEL].to_numpy(), found[["x", "y"]].to_numpy() + 0.5, field


def _annotated(sdata: Any, wanted: str | None, name: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Cells with their rows of the table; all of them if no table annotates them."""
    cells = cells.set_axis(f"{name}_" + cells["instance"].astype(str))
    names = [key for key, one in sdata.tables.items() if name in _regions(one)]
    if wanted is not None and wanted not in names:
        msg = f"{missing_key(f'What annotates {name!r}', wanted, names)}"
        raise KeyError(msg)
    if wanted is None and len(names) > 1:
        msg = f"{name!r} is annotated by the tables {head(names)}: name one with table."
        raise ValueError(msg)
    if not names:
        return cells
    table = sdata.tables[wanted or names[0]]
    region, instance = (table.uns["spatialdata_attrs"][key] for key in ("region_key", "instance_key"))
    obs = table.obs[(table.obs[region] == name).to_numpy()]
    rows = pd.Index(obs[instance]).get_indexer(cells["instance"])
    known = rows >= 0
    if not known.any():
        kinds = f"{obs[instance].dtype} and {cells['instance'].dtype}"
        msg = f"The table {wanted or names[0]!r} has none of the cells of {name!r}: are instances alike ({kinds})?"
        raise ValueError(msg)
    if not known.all():
        msg = f"{(~known).sum():,} of {len(known):,} cells of {name!r} have no row in their table: they are left out."
        warnings.warn(msg, UserWarning, stacklevel=3)
    obs = obs.iloc[rows[known]].drop(columns=[region, instance])
    return obs.assign(**{str(key): cells[key].to_numpy()[known] for key in cells})


def _regions(table: Any) -> list[str]:
    region = table.uns.get("spatialdata_attrs", {}).get("region", [])
    return [region] if isinstance(region, str) else list(region)
