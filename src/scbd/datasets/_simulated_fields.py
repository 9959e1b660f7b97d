"""A simulated plate of fields of view, in files as microscopes and segmentation leave them."""

from __future__ import annotations

import inspect
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from scipy import ndimage

from scbd.datasets._plate_files import FORMS, Field
from scbd.datasets._simulated import simulated_cells, simulated_screen
from scbd.datasets._simulated_images import CHANNELS, draw, photograph
from scbd.datasets._simulated_plates import SHAPES, well_name

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from anndata import AnnData

    from scbd.datasets._simulated import SimulatedCells

_DNA = CHANNELS.index("DNA")


def simulated_plate(
    folder: str | os.PathLike[str],
    n_cells: int = 1_200,
    *,
    form: Literal["ome-zarr", "tiff"] = "ome-zarr",
    n_fields: int = 2,
    plate_wells: int = 6,
    image_size: int = 32,
    seed: int = 0,
    **settings: Any,
) -> AnnData:
    """Write a simulated optical pooled screen as a plate of fields of view, to try out how real ones are read.

    Cells are those of :func:`simulated_screen`. They lie in fields, close to each other, and each field is photographed
    as a whole, with the stain, illumination and focus of its well. Barcodes have been read: a table says which gene
    each nucleus lacks.

    Parameters
    ----------
    folder
        To write to; made where it is not there.
    n_cells
        Number of cells.
    form
        ``"ome-zarr"``: the plate ``plate.zarr`` in the HCS layout (version 0.5), with the label images ``nuclei``, and
        ``nuclei.csv`` with ``field``, ``label``, ``gene`` and ``sgRNA``. ``"tiff"``: in ``images`` a file for each
        field and channel, such as ``A01_s1_w3.tif``; ``fields.csv`` with ``field``, ``well`` and a column of paths for
        each channel; and ``nuclei.csv`` with ``field``, ``y`` and ``x`` (pixels), ``gene`` and ``sgRNA``. Both have the
        same pixels.
    n_fields
        Fields of a well.
    plate_wells
        Wells of the plate: 6, 24, 96, 384 or 1,536.
    image_size
        Pixels a side of a crop that holds one cell.
    seed
        Seed of everything.
    **settings
        More arguments of :func:`simulated_screen`, but ``n_wells``.

    Returns
    -------
    AnnData with the truth of :func:`simulated_screen`, without images. ``obs`` also has each cell's ``field`` (as the
    tables call it), ``label``, and the centroid of its nucleus, ``y`` and ``x``, in pixels.

    Raises
    ------
    FileExistsError
        If a plate lies there; nothing is written.
    TypeError, ValueError
        If an argument is not known or out of range; before anything is written.

    Examples
    --------
    >>> truth = scbd.datasets.simulated_plate("plate", 300, n_complexes=3, genes_per_complex=2)
    >>> fields = scbd.data.read_plate("plate/plate.zarr", labels="nuclei")
    >>> nuclei = pd.read_csv("plate/nuclei.csv")
    >>> scbd.data.crop_cells(fields, nuclei, labels=fields["labels"], size=32, edge="reflect")
    Crops 'cells': 300 of 4 × 32 × 32 uint8 (DNA damage, F-actin, DNA, microtubules)
    """
    if form not in FORMS:
        msg = f"form={form!r} is not known: use {' or '.join(map(repr, FORMS))}."
        raise ValueError(msg)
    if n_fields < 1:
        msg = f"n_fields={n_fields}: give at least 1."
        raise ValueError(msg)
    named = {"n_wells": plate_wells, "plate_wells": plate_wells, "image_size": image_size, "seed": seed}
    bound = inspect.signature(simulated_screen).bind(n_cells, **named, **settings)
    bound.apply_defaults()
    cells = simulated_cells(bound.arguments)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        msg = f"{folder} is there already, and not an empty folder: give a new one."
        raise FileExistsError(msg)
    folder.mkdir(parents=True, exist_ok=True)
    write, columns = FORMS[form]
    nuclei = write(folder, _photographed(cells, n_fields, image_size))
    cells.obs[["field", "label", "y", "x"]] = nuclei.loc[cells.obs.index, ["field", "label", "y", "x"]]
    table = cells.obs.loc[nuclei.index, [*columns, "gene", "sgRNA"]]
    table.to_csv(folder / "nuclei.csv", index=False)
    return cells.with_obsm({})


def _photographed(cells: SimulatedCells, n_fields: int, size: int) -> Iterator[Field]:
    """All fields of a plate, well by well; cells at random on a grid that has a place for each."""
    rng, n_columns = cells.rng, SHAPES[len(cells.wells)][1]
    number = rng.integers(0, n_fields, len(cells.well))
    n_sites = math.ceil(math.sqrt(np.bincount(cells.well * n_fields + number).max()))
    slack = size // 4
    side = n_sites * size + slack
    for well, one in itertools.product(range(len(cells.wells)), range(n_fields)):
        rows = np.flatnonzero((cells.well == well) & (number == one))
        corners = size * np.stack(np.divmod(rng.permutation(n_sites**2)[: len(rows)], n_sites), axis=1)
        corners += rng.integers(0, slack + 1, corners.shape)
        image = np.zeros((1, len(CHANNELS), side, side), np.float32)
        labels = np.zeros((side, side), np.int32)
        drawn = draw(rng, cells.parameters[rows], size)
        for label, ((top, left), cell) in enumerate(zip(corners, drawn, strict=True), start=1):
            here = (slice(top, top + size), slice(left, left + size))
            image[0, :, *here] += cell
            labels[here][cell[_DNA] > cell[_DNA].max() / 2] = label
        shown = photograph(rng, image, cells.wells.iloc[[well]], size)[0]
        name = well_name(*divmod(well, n_columns))
        yield Field(name, one, list(CHANNELS), shown, labels, _centroids(labels, cells.obs.index[rows]))


def _centroids(labels: np.ndarray, names: pd.Index) -> pd.DataFrame:
    """Of each label its cell and the middle of its pixels."""
    label = np.arange(1, len(names) + 1)
    yx = np.array(ndimage.center_of_mass(labels > 0, labels, label)).reshape(-1, 2)
    return pd.DataFrame({"label": label, "y": yx[:, 0], "x": yx[:, 1]}, index=names)
