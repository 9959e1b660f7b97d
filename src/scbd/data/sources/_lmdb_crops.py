"""Crops in an LMDB, as optical pooled screens are published: one value a cell, what is known of it in the key."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd.data.sources._arrays import target_of
from scbd.data.sources._kinds import check_images
from scbd.data.sources._packed import Packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_KEY = ["uid", "plate", "well", "tile", "gene", "index"]
_COLUMNS = ["plate", "well", "tile", "gene"]


class LMDBSource:
    """Images in an LMDB: raw bytes, or ``.npy``.

    Parameters
    ----------
    path
        Folder with ``data.mdb``.
    keys
        Key of each cell.
    shape
        Channels, height and width of a crop.
    dtype
        Of a pixel.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If there is no database, or it is none.
    """

    in_memory = False
    concurrent = True

    def __init__(
        self, path: Path, keys: Sequence[bytes], *, shape: tuple[int, int, int] = (4, 100, 100), dtype: str = "uint16"
    ) -> None:
        self.shape = (len(keys), *shape)
        self.dtype = np.dtype(dtype)
        check_images(self.shape, self.dtype, str(path))
        self._path, self._keys = path, keys
        self._database = open_lmdb(path)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order.

        Raises
        ------
        IndexError
            If there is no such row.
        KeyError, ValueError
            If a key is missing, or its value no crop (which).
        """
        out = target_of(self, rows, out)
        numbers = range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.tolist()
        with self._database.begin(buffers=True) as transaction:
            for place, row in enumerate(numbers):
                out[place] = self._crop(transaction.get(self._keys[row]), self._keys[row])
        return out

    def _crop(self, value: Any, key: bytes) -> np.ndarray:
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
    """Open a database for reading.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If there is none, or it is foreign or truncated.
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


def lmdb_keys(path: Path) -> Sequence[bytes]:
    """All keys of a database, in its order, which is the one that disks like; in little memory.

    Raises
    ------
    ImportError, FileNotFoundError, ValueError
        See :func:`open_lmdb`; or if it is empty.
    """
    with open_lmdb(path) as database, database.begin() as transaction:
        keys = Packed(transaction.cursor().iternext(keys=True, values=False))
    if not keys:
        msg = f"{path} has no cell."
        raise ValueError(msg)
    return keys


def parsed_keys(keys: Sequence[bytes]) -> pd.DataFrame:
    """What keys say of their cells: ``plate``, ``well`` (plate and well), ``tile``, ``gene``, under the cell's UID.

    Raises
    ------
    ValueError
        If a key is not of the form ``UID_plate_well_tile_gene_index``.
    """
    uids = np.empty(len(keys), dtype=object)
    codes = np.empty((len(_COLUMNS), len(keys)), dtype=np.int32)
    found: list[dict[str, int]] = [{} for _ in _COLUMNS]
    for row, key in enumerate(keys):
        uids[row], plate, well, tile, gene, _ = parsed_key(key)
        for of_column, known, value in zip(codes, found, (plate, f"{plate}_{well}", tile, gene), strict=True):
            of_column[row] = known.setdefault(value, len(known))
    columns = {name: _sorted(of_column, known) for name, of_column, known in zip(_COLUMNS, codes, found, strict=True)}
    # without a look at each for numbers and dates, which takes memory
    return pd.DataFrame(columns, index=pd.Index(uids, dtype=str))


def _sorted(codes: np.ndarray, values: Iterable[str]) -> pd.Categorical:
    """As pandas orders what it finds by itself."""
    names = np.array(list(values), dtype=object)
    order = np.argsort(names)
    return pd.Categorical.from_codes(np.argsort(order)[codes], names[order])


def parsed_key(key: bytes) -> list[str]:
    """UID, plate, well, tile, gene, index; a plate's name may hold underscores.

    Raises
    ------
    ValueError
        If the key is not of this form.
    """
    parts = key.decode(errors="replace").split("_")
    if len(parts) < len(_KEY):
        msg = f"The key {key!r} is not of the form UID_plate_well_tile_gene_index."
        raise ValueError(msg)
    return [parts[0], "_".join(parts[1:-4]), *parts[-4:]]
