"""Write small files in the layouts of published data sets."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a gzipped IDX file of bytes, the format of MNIST."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_mnist(folder: Path, n_train: int = 400, n_test: int = 200) -> Path:
    """Write the four files of MNIST, with scikit-learn's digits."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8), np.ones((1, 4, 4)))[:, 2:-2, 2:-2] * 15
    folder.mkdir(parents=True)
    for part, rows in (("train", slice(0, n_train)), ("t10k", slice(n_train, n_train + n_test))):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    return folder


def write_patch(path: Path, value: int, size: int) -> None:
    """Write a square picture whose red channel has the given value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 4), [value, 0, 0, 255], dtype=np.uint8)).save(path)


def write_camelyon17(folder: Path, table: pd.DataFrame) -> Path:
    """Write Camelyon17 in the layout of WILDS; the red channel identifies the patch."""
    for i, row in enumerate(table.itertuples()):
        node = f"patient_{row.patient}_node_{row.node}"
        write_patch(folder / "patches" / node / f"patch_{node}_x_{row.x_coord}_y_{row.y_coord}.png", 20 * i % 256, 96)
    table.to_csv(folder / "metadata.csv")
    return folder


def camelyon17_table(patients: Sequence[str], centers: Sequence[int], splits: Sequence[int]) -> pd.DataFrame:
    """Return a table with one row per patch, every second one with a tumor."""
    n = len(patients)
    table = pd.DataFrame({"patient": patients, "node": 4, "x_coord": np.arange(n) * 32, "y_coord": 64})
    return table.assign(tumor=np.arange(n) % 2, slide=7, center=centers, split=splits)


def write_rxrx1(folder: Path, table: pd.DataFrame, size: int = 256) -> Path:
    """Write RxRx1 in the layout of WILDS; the red channel identifies the image."""
    for i, row in enumerate(table.itertuples()):
        plate = folder / "images" / str(row.experiment) / f"Plate{row.plate}"
        write_patch(plate / f"{row.well}_s{row.site}.png", 40 * i % 256, size)
    table.to_csv(folder / "metadata.csv", index=False)
    return folder


def write_domains(folder: Path, domains: Sequence[str], classes: Sequence[str], n: int = 5, size: int = 24) -> Path:
    """Write a data set in DomainBed's layout; the red channel encodes the domain, the green one the class."""
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            directory = folder / domain / name
            directory.mkdir(parents=True)
            for i in range(n):
                pixels = np.full((size, size + 8, 3), [50 * d, 30 * c, i], dtype=np.uint8)
                Image.fromarray(pixels).save(directory / f"pic_{i}.png")
    return folder


def write_lmdb(folder: Path, values: Mapping[str, bytes]) -> Path:
    """Write an LMDB database with the given keys and values."""
    import lmdb

    with lmdb.open(str(folder), map_size=2**28) as database, database.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key.encode(), value)
    return folder


def cpjump1_table(n_plates: int = 5, n_compounds: int = 16, n_controls: int = 8, n_features: int = 12) -> pd.DataFrame:
    """Return wells of plates of one layout at two time points; two compounds have a second position."""
    rng = np.random.default_rng(0)
    compounds = [f"BRD-{i:03d}" for i in range(n_compounds)]
    layout = [*compounds, *compounds[:2], *["DMSO"] * n_controls]
    effects = {name: rng.normal(size=n_features) for name in compounds} | {"DMSO": np.zeros(n_features)}
    rows = []
    for plate in range(n_plates):
        shift = rng.normal(size=n_features)
        for place, compound in enumerate(layout):
            control, number = compound == "DMSO", 0 if compound == "DMSO" else compounds.index(compound)
            about = {
                "Metadata_Plate": f"BR{plate:05d}",
                "Metadata_Well": f"{chr(65 + place // 12)}{place % 12 + 1:02d}",
                "Metadata_broad_sample": compound,
                "Metadata_pert_iname": compound.lower(),
                "Metadata_control_type": "negcon" if control else None,
                "Metadata_gene": None if control else f"GENE{number % 4}",
                "Metadata_smiles": "C",
                "Metadata_moa": None if control else f"moa {number % 5}",
                "Metadata_hours": 24 if plate < 2 else 48,
            }
            values = effects[compound] + shift + 0.3 * rng.normal(size=n_features)
            rows.append(about | {f"Cells_{i}": value for i, value in enumerate(values)})
    return pd.DataFrame(rows)


def breinig2015_table(n: int = 600, n_targets: int = 5, n_features: int = 8) -> pd.DataFrame:
    """Return features and labels of cells of two replicates and several targets."""
    rng = np.random.default_rng(0)
    target, replicate = rng.integers(n_targets, size=n), rng.integers(1, 3, size=n)
    about = {
        "cell_code": [f"cell_{i}" for i in range(n)],
        "cell_id": np.arange(n),
        "plate": [f"P{i % 2}" for i in target],
        "replicate": replicate,
        "well": [f"M{i:02d}" for i in target],
        "field": rng.integers(4, size=n),
        "target": [f"target_{i}" for i in target],
        "split": "train",
    }
    features = rng.normal(size=(n, n_features)) + rng.normal(size=(n_targets, n_features))[target] + replicate[:, None]
    return pd.DataFrame(about | {f"x{i}": features[:, i] for i in range(n_features)})


def bbbc021_table(n_features: int = 12) -> pd.DataFrame:
    """Return wells of two weeks with three plates each: six DMSO wells, and five compounds at two concentrations.

    The second week has other compounds, of the same five mechanisms.
    """
    rng = np.random.default_rng(0)
    mechanisms, rows = rng.normal(size=(5, n_features)), []
    for week in (1, 2):
        shift = rng.normal(size=n_features)
        for replicate in (1, 2, 3):
            wells = [("DMSO", 0.0, "DMSO", shift)] * 6
            for i, effect in enumerate(mechanisms):
                wells += [(f"drug {week}{i}", dose, f"moa {i}", shift + dose * effect) for dose in (1.0, 3.0)]
            for place, (compound, concentration, moa, mean) in enumerate(wells):
                about = {
                    "week": f"Week{week}",
                    "plate": f"Week{week}_{replicate}",
                    "well": f"{chr(66 + place // 4)}{place % 4 + 2:02d}",
                    "replicate": replicate,
                    "compound": compound,
                    "concentration": concentration,
                    "moa": moa,
                }
                values = mean + 0.3 * rng.normal(size=n_features)
                rows.append(about | {f"Cells_{i}": value for i, value in enumerate(values)})
    return pd.DataFrame(rows)


def rhogtpase_table(n_genes: int = 8, n_controls: int = 16, n_features: int = 10) -> pd.DataFrame:
    """Return wells of four screens, two plates each, in which positions are those of the library.

    One gene is missing in one library, and each plate has a well with another number of seeded cells.
    """
    rng = np.random.default_rng(0)
    effects, rows = 2 * rng.normal(size=(n_genes, n_features)), []
    for cell_line in ("LM2", "MDA-MB-231"):
        for library in ("siGENOME", "ONTARGETPlus"):
            genes = np.arange(n_genes - (library == "siGENOME"))
            layout = genes if library == "siGENOME" else genes[::-1]
            wells = [(f"gene {gene}", "", effects[gene]) for gene in layout]
            wells += [("control", "negative control", np.zeros(n_features))] * n_controls
            wells += [("seeded 500", "technical control", np.ones(n_features))]
            for plate in ("1A", "1B"):
                shift = rng.normal(size=n_features)
                for place, (gene, control_type, mean) in enumerate(wells):
                    about = {
                        "screen": f"{cell_line}_{library}",
                        "cell_line": cell_line,
                        "library": library,
                        "plate": f"{cell_line}_{library}_{plate}",
                        "well": f"{chr(67 + place // 6)}{place % 6 + 3:02d}",
                        "row": 3 + place // 6,
                        "column": 3 + place % 6,
                        "gene": gene,
                        "control_type": control_type,
                        "sirna_pool": f"{library} {gene}",
                        "n_cells": 500,
                    }
                    values = mean + shift + 0.3 * rng.normal(size=n_features)
                    rows.append(about | {f"Nucleus {i}": value for i, value in enumerate(values)})
    return pd.DataFrame(rows)


def write_real_wells(folder: Path) -> Path:
    """Write both tables of the experiment with real wells."""
    folder.mkdir(parents=True)
    bbbc021_table().to_parquet(folder / "bbbc021_ljosa_wells.parquet")
    rhogtpase_table().to_parquet(folder / "rhogtpase_wells.parquet")
    return folder


def write_real_images(folder: Path) -> Path:
    """Write small files of the experiment with real images: mitotic figures, BBBC021 crops and MitoCheck nuclei."""
    folder.mkdir(parents=True)
    rng, n = np.random.default_rng(0), 240
    numbers = np.arange(n)
    scanners = [None if i % 8 == 7 else "scanner " + "abc"[i % 3] for i in range(n)]
    mitoses = pd.DataFrame({"label": np.resize(["Normal", "Normal", "Atypical", "Normal"], n), "scanner": scanners})
    mitoses["set"] = np.where(mitoses["scanner"].isna(), "AtNorM-MD", "AMi-Br")
    mitoses["jpeg"] = [_jpeg(rng.integers(0, 60, (64, 64, 3)) + 60 * (i % 3)) for i in numbers]
    mitoses.to_parquet(folder / "mitosis_scanners.parquet")

    week = numbers // 60
    plates = [f"Week{w + 1}_{i % 3}" for i, w in zip(numbers, week, strict=True)]
    drugs = np.where(numbers % 4 == 0, "DMSO", np.where(numbers % 4 == 1, "Epithelial", "Actin disruptors"))
    screen = pd.DataFrame({"plate": plates, "week": [f"Week{w + 1}" for w in week], "moa": drugs})
    screen.to_csv(folder / "bbbc021_many_plates_obs.csv", index=False)
    crops = rng.integers(0, 200, (n, 64, 64, 3)) + 10 * (numbers % 4)[:, None, None, None]
    np.savez(folder / "bbbc021_many_plates.npz", images=crops.astype(np.uint8))

    phenotypes = np.resize(["Interphase", "Apoptosis", "OutOfFocus", "Binuclear"], n)
    nuclei = pd.DataFrame({"phenotype": phenotypes, "plate": [f"plate {i % 8}" for i in numbers // 4]})
    nuclei.to_csv(folder / "mitocheck_obs.csv", index=False)
    images = rng.integers(0, 200, (n, 1, 64, 64)) + 10 * (numbers % 4)[:, None, None, None]
    np.savez(folder / "mitocheck_crops_1x64x64.npz", images=images.astype(np.uint8))
    return folder


def _jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()
