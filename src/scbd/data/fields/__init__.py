"""Fields of view: where they lie, and the crops of cells in them."""

from scbd.data.fields._crop_cells import crop_cells
from scbd.data.fields._ome_zarr import read_plate

__all__ = ["crop_cells", "read_plate"]
