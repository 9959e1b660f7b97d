"""Where inputs are stored: one small protocol, and what it is there for, from memory to object stores."""

from scbd.data.sources._arrays import ArraySource, ImageSource, count_rows, non_finite_rows, target_of
from scbd.data.sources._derived import CentredSource, ColumnSource, DerivedSource
from scbd.data.sources._image_files import FileSource
from scbd.data.sources._kinds import (
    FEATURES,
    IMAGE_DTYPES,
    IMAGES,
    InputKind,
    channels_last,
    check_features,
    check_images,
)
from scbd.data.sources._lmdb_crops import LMDBSource
from scbd.data.sources._sliced import SlicedSource
from scbd.data.sources._zarr_arrays import ZarrSource

__all__ = [
    "FEATURES",
    "IMAGES",
    "IMAGE_DTYPES",
    "ArraySource",
    "CentredSource",
    "ColumnSource",
    "DerivedSource",
    "FileSource",
    "InputKind",
    "SlicedSource",
    "ImageSource",
    "LMDBSource",
    "ZarrSource",
    "channels_last",
    "check_features",
    "check_images",
    "count_rows",
    "non_finite_rows",
    "target_of",
]

# for other packages of scbd; no part of the API
from scbd.data.sources._derived import columns_of as columns_of
from scbd.data.sources._derived import source_at_rest as source_at_rest
from scbd.data.sources._fitting import Fit as Fit
from scbd.data.sources._fitting import fitted_size as fitted_size
from scbd.data.sources._lmdb_crops import open_lmdb as open_lmdb
from scbd.data.sources._lmdb_crops import parsed_key as parsed_key
from scbd.data.sources._lmdb_crops import parsed_keys as parsed_keys
from scbd.data.sources._unreadable import Unreadable as Unreadable
