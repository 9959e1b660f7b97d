"""Screens on disk: crops from what people have, written once, read by row ever after."""

from scbd.data.stores._adding import add_to_screen
from scbd.data.stores._crops import Crops
from scbd.data.stores._hdf5 import memory_map_h5ad
from scbd.data.stores._opening import open_embedding, open_screen
from scbd.data.stores._readers import read_crops
from scbd.data.stores._verifying import verify_screen
from scbd.data.stores._writing import write_screen

__all__ = [
    "Crops",
    "add_to_screen",
    "memory_map_h5ad",
    "open_embedding",
    "open_screen",
    "read_crops",
    "verify_screen",
    "write_screen",
]

# for other packages of scbd; no part of the API
from scbd.data.stores._block_file import BlockFile as BlockFile
from scbd.data.stores._block_file import exists as exists
from scbd.data.stores._opening import image_keys as image_keys
from scbd.data.stores._tables import storable as storable
