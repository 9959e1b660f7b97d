"""Fields of view: where they lie, and the crops of cells in them."""

from scbd.data.fields._crop_cells import crop_cells
from scbd.data.fields._ome_zarr import read_plate
from scbd.data.fields._spatialdata import from_spatialdata

__all__ = ["crop_cells", "from_spatialdata", "read_plate"]
