"""Images of single cells (crops) in LMDB databases, in the format of Funk et al. (2022)."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np
import pandas as pd

from scbd.data._sources import allocate_output, as_row_numbers, check_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zarr

    Images: TypeAlias = np.ndarray | h5py.Dataset | zarr.Array

# shape (channels, height, width) and dtype of the crops that Funk et al. (2022) published
_FUNK22_CROP: tuple[tuple[int, int, int], str] = ((4, 100, 100), "uint16")
# Separator of the parts of a database key that names the guide RNA of the cell. The parts are
# gene;guide;plate;well;tile;UID.
_KEY_SEPARATOR = b";"


class LMDBSource:
    """Source of cell images in an LMDB database, the format in which some optical pooled screens are published.

    Each value of the database holds the image of one cell, as raw bytes or in the ``.npy`` format.

    Parameters
    ----------
    path
        Folder with ``data.mdb``.
    keys
        Key of each cell in the database, in the order of the rows of this source.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If the folder holds no database, or one that cannot be read.
    """

    in_memory = False
    concurrent = True

    def __init__(self, path: Path, keys: Sequence[bytes] | np.ndarray) -> None:
        self._path, self._keys = path, keys
        self._database = open_lmdb(path)
        shape, dtype = self._guide_layout() if len(keys) and _KEY_SEPARATOR in bytes(keys[0]) else _FUNK22_CROP
        self.shape, self.dtype = (len(keys), *shape), np.dtype(dtype)
        check_images(self.shape, self.dtype, str(path))

    def _guide_layout(self) -> tuple[tuple[int, int, int], str]:
        """Return shape and dtype of the crops in a database whose keys name the guide RNA of the cells.

        These crops have four channels of float32. Their height and width, which are equal, are computed from the number
        of bytes of the first crop.
        """
        channels, dtype = _FUNK22_CROP[0][0], "float32"
        with self._database.begin(buffers=True) as transaction:
            n_bytes = len(transaction.get(bytes(self._keys[0])) or b"")
        side = math.isqrt(n_bytes // (channels * np.dtype(dtype).itemsize))
        return (channels, side, side), dtype

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Return the images of the cells in the given rows, in the order of these rows.

        Raises
        ------
        IndexError
            If a row does not exist.
        KeyError, ValueError
            If the key of a cell is missing from the database, or its value does not hold a crop of the expected shape
            and dtype. The message names the key.
        """
        out = allocate_output(self, rows, out)
        with self._database.begin(buffers=True) as transaction:
            for place, row in enumerate(as_row_numbers(rows, self.shape[0]).tolist()):
                key = bytes(self._keys[row])
                out[place] = self._crop(transaction.get(key), key)
        return out

    def _crop(self, value: Any, key: bytes) -> np.ndarray:
        """Decode the image of one cell from the value that the database stores for its key, ``(C, H, W)``."""
        shape = self.shape[1:]
        if value is None:
            msg = f"{self._path} has no key {key!r}."
            raise KeyError(msg)
        if len(value) == math.prod(shape) * self.dtype.itemsize:
            return np.frombuffer(value, self.dtype).reshape(shape)
        try:
            crop = np.load(io.BytesIO(value), allow_pickle=False)
        except (ValueError, EOFError, OSError):
            crop = np.empty(0)
        if crop.shape != shape or crop.dtype != self.dtype:
            wanted = f"{' × '.join(map(str, shape))} {self.dtype}"
            msg = f"{self._path}: the value of {key!r} is no crop of {wanted} ({len(value)} bytes)."
            raise ValueError(msg)
        return crop


def open_lmdb(path: Path) -> Any:
    """Open an LMDB database of cell images for reading.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If the folder holds no ``data.mdb``, or if ``data.mdb`` is truncated or not an LMDB.
    """
    if not (path / "data.mdb").is_file():
        msg = f"There is no LMDB at {path}: give the folder that holds data.mdb."
        raise FileNotFoundError(msg)
    try:
        import lmdb
    except ImportError as error:
        msg = "Crops in an LMDB need one more package: pip install lmdb."
        raise ImportError(msg) from error
    try:
        return lmdb.open(str(path), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        msg = f"{path} is no LMDB, or is truncated ({error})."
        raise ValueError(msg) from error


def read_lmdb_keys(path: Path) -> np.ndarray:
    """Return the keys of all cells in an LMDB database, bytes ``(N,)``.

    Keys are in the order in which the database stores them. Images are read fastest in this order.

    Raises
    ------
    ImportError, FileNotFoundError
        See :func:`open_lmdb`.
    ValueError
        If the database cannot be read, or is empty.
    """
    with open_lmdb(path) as database, database.begin() as transaction:
        keys = np.array(list(transaction.cursor().iternext(keys=True, values=False)))
    if not len(keys):
        msg = f"{path} has no cell."
        raise ValueError(msg)
    return keys


def parse_keys(keys: Sequence[bytes] | np.ndarray) -> pd.DataFrame:
    """Parse the keys of an LMDB database of cell images into a table with one row per cell.

    The columns are ``plate``, ``well`` (plate and well, joined by an underscore), ``tile`` and ``gene``. If keys also
    name the guide RNA, a column ``sgRNA`` is added. The index holds the unique identifier (UID) of each cell. In
    databases whose keys name the guide RNA, the UID is the number of the cell's row in the table that is published with
    the database.

    Raises
    ------
    ValueError
        If a key has neither of the two layouts that :func:`parse_key` reads.
    """
    found = pd.DataFrame(map(parse_key, keys), columns=["uid", "plate", "well", "tile", "gene", "sgRNA"], dtype=str)
    found["well"] = found["plate"] + "_" + found["well"]
    named = [] if found["sgRNA"].eq("").all() else ["sgRNA"]
    obs = found[["plate", "well", "tile", "gene", *named]].astype("category")
    return obs.set_axis(pd.Index(found["uid"], dtype=str, name=None))


def parse_key(key: bytes) -> list[str]:
    """Split the key of a cell in an LMDB database into UID, plate, well, tile, gene and guide RNA.

    Two layouts of keys are read:

    - ``UID_plate_well_tile_gene_index``, of the cells that Funk et al. (2022) published. The guide RNA is then an empty
      string, and the name of the plate may contain underscores;
    - ``gene;guide;plate;well;tile;UID``, which the code of Yao et al. (2024) reads.

    Raises
    ------
    ValueError
        If the key has neither layout.
    """
    text = key.decode(errors="replace")
    if _KEY_SEPARATOR.decode() in text:
        parts = text.split(_KEY_SEPARATOR.decode())
        if len(parts) == 6:
            gene, guide, plate, well, tile, uid = parts
            return [uid, plate, well, tile, gene, guide]
    elif len(parts := text.split("_")) > 5:
        return [parts[0], "_".join(parts[1:-4]), *parts[-4:-1], ""]
    msg = f"The key {key!r} is neither UID_plate_well_tile_gene_index nor gene;guide;plate;well;tile;UID."
    raise ValueError(msg)
