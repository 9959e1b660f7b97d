"""Where images lie at rest: one small protocol, and what it is there for, from memory to object stores."""

from scbd.data.sources._arrays import (
    IMAGE_DTYPES,
    ArraySource,
    ImageSource,
    check_images,
    count_rows,
    non_finite_rows,
    target_of,
)
from scbd.data.sources._image_files import FileSource
from scbd.data.sources._lmdb_crops import LMDBSource
from scbd.data.sources._sliced import SlicedSource
from scbd.data.sources._zarr_arrays import ZarrSource

__all__ = [
    "IMAGE_DTYPES",
    "ArraySource",
    "FileSource",
    "SlicedSource",
    "ImageSource",
    "LMDBSource",
    "ZarrSource",
    "check_images",
    "count_rows",
    "non_finite_rows",
    "target_of",
]

# for other packages of scbd; no part of the API
from scbd.data.sources._lmdb_crops import open_lmdb as open_lmdb
from scbd.data.sources._lmdb_crops import parsed_key as parsed_key
from scbd.data.sources._lmdb_crops import parsed_keys as parsed_keys
