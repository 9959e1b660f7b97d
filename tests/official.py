"""Small files in the layouts in which data sets are published."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits


def write_idx(path: Path, array: np.ndarray) -> None:
    """A gzipped IDX file of bytes, as those of MNIST."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_mnist(folder: Path, n_train: int = 400, n_test: int = 200) -> Path:
    """The four files of MNIST, with scikit-learn's digits."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8), np.ones((1, 4, 4)))[:, 2:-2, 2:-2] * 15
    folder.mkdir(parents=True)
    for part, rows in (("train", slice(0, n_train)), ("t10k", slice(n_train, n_train + n_test))):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    return folder


def write_patch(path: Path, value: int, size: int) -> None:
    """A square picture whose red channel is this value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 4), [value, 0, 0, 255], dtype=np.uint8)).save(path)


def write_camelyon17(folder: Path, table: pd.DataFrame) -> Path:
    """Camelyon17 of WILDS: the red channel counts the patches."""
    for i, row in enumerate(table.itertuples()):
        node = f"patient_{row.patient}_node_{row.node}"
        write_patch(folder / "patches" / node / f"patch_{node}_x_{row.x_coord}_y_{row.y_coord}.png", 20 * i % 256, 96)
    table.to_csv(folder / "metadata.csv")
    return folder


def camelyon17_table(patients: Sequence[str], centers: Sequence[int], splits: Sequence[int]) -> pd.DataFrame:
    """A patch a row, every other one with a tumor."""
    n = len(patients)
    table = pd.DataFrame({"patient": patients, "node": 4, "x_coord": np.arange(n) * 32, "y_coord": 64})
    return table.assign(tumor=np.arange(n) % 2, slide=7, center=centers, split=splits)


def write_rxrx1(folder: Path, table: pd.DataFrame, size: int = 256) -> Path:
    """RxRx1 of WILDS: the red channel counts the images."""
    for i, row in enumerate(table.itertuples()):
        plate = folder / "images" / str(row.experiment) / f"Plate{row.plate}"
        write_patch(plate / f"{row.well}_s{row.site}.png", 40 * i % 256, size)
    table.to_csv(folder / "metadata.csv", index=False)
    return folder


def write_domains(folder: Path, domains: Sequence[str], classes: Sequence[str], n: int = 5, size: int = 24) -> Path:
    """A data set in DomainBed's layout: the red channel tells the domain, the green one the class."""
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            directory = folder / domain / name
            directory.mkdir(parents=True)
            for i in range(n):
                pixels = np.full((size, size + 8, 3), [50 * d, 30 * c, i], dtype=np.uint8)
                Image.fromarray(pixels).save(directory / f"pic_{i}.png")
    return folder


def write_lmdb(folder: Path, values: Mapping[str, bytes]) -> Path:
    """A database of crops under their keys."""
    import lmdb

    with lmdb.open(str(folder), map_size=2**28) as database, database.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key.encode(), value)
    return folder
