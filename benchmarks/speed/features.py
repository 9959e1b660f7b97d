"""Feature tables: a million cells trained and embedded, and rivals on a hundred thousand."""

from __future__ import annotations

import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from _compare import Row, said, timed
from _scale import Scale
from anndata import AnnData

from scbd import SCBDModel
from scbd.corrections import combat, harmony
from scbd.data import open_screen
from scbd.datasets import simulated_profiles
from scbd.metrics import label_probe, predict_labels

_KEYS = {"y_key": "perturbation", "e_key": "plate"}


def simulated(n_perturbations: int, n_plates: int, cells_per_well: int, n_features: int) -> AnnData:
    """Cells of plates that each have a layout of their own; on a tenth of the plates, nothing is trained."""
    size = {"cells_per_well": cells_per_well, "n_controls": 8, "n_features": n_features}
    cells = simulated_profiles(n_perturbations, n_plates, **size, effect_size=0.3, one_layout=False)
    plates = cells.obs["plate"]
    cells.obs["split"] = np.where(plates.isin(plates.cat.categories[: max(2, n_plates // 10)]), "test", "train")
    return cells


def by_scbd(cells: AnnData, max_steps: int | None) -> np.ndarray:
    """z_c, of a model at its defaults that has a z_s, too."""
    SCBDModel.setup_anndata(cells, **_KEYS, layer="X", control="control")
    model = SCBDModel(cells)
    length = {} if max_steps is None else {"max_steps": max_steps}
    model.train(split="split", enable_progress_bar=False, **length)
    return model.get_latent_representation(enable_progress_bar=False)


def by_scvi(cells: AnnData, max_epochs: int | None) -> np.ndarray:
    """scVI at its defaults but for the likelihood, which for features is normal; it takes no numbers below zero."""
    import scvi

    shifted = AnnData(X=cells.X - cells.X.min(0), obs=cells.obs)
    scvi.model.SCVI.setup_anndata(shifted, batch_key="plate")
    model = scvi.model.SCVI(shifted, gene_likelihood="normal")
    model.train(max_epochs=max_epochs, enable_progress_bar=False)
    return model.get_latent_representation()


def rows(scale: Scale) -> list[Row]:
    """A million cells in a process of its own, whose memory is watched; then rivals, one after the other."""
    size = scale.of((200, 50, 97, 512), (8, 4, 2, 16))
    length = scale.of([], ["2"])
    n, seconds, mib, *read = said("features.py", *map(str, size), *length)
    claim = f"train and embed {n:,.0f} cells × {size[-1]}, {size[0]} perturbations, {size[1]} plates"
    note = f"memory beyond the mapped table; scbd reads {_told(read)}"
    found: list[Row] = [{"claim": claim, "ours_s": seconds, "ours_mib": mib, "note": note}]
    cells = simulated(*scale.of((200, 50, 10, 128), (8, 4, 2, 16)))
    ours, z = timed(lambda: by_scbd(cells, scale.of(None, 2)))
    oracle = cells.X @ cells.uns["truth"]["oracle"].to_numpy()
    known = "; ".join(f"{name} {_told(scores(x, cells))}" for name, x in {"best": oracle, "scbd": z}.items())
    plates = cells.obs["plate"].to_numpy()
    rivals: dict[str, Callable[[], np.ndarray]] = {
        "ComBat": lambda: combat(cells.X, plates),
        "Harmony": lambda: harmony(cells.X, plates, n_components=None),
        "scVI": lambda: by_scvi(cells, scale.of(None, 1)),
    }
    for name, correct in rivals.items():
        theirs, corrected = timed(correct)
        row = {"claim": f"{name}, {cells.n_obs:,} cells × {cells.n_vars}", "naive_s": theirs, "ours_s": ours}
        found.append(row | {"ratio": theirs / ours, "note": f"{name} {_told(scores(corrected, cells))}; {known}"})
    return found


def _told(accuracies: list[float]) -> str:
    return " and ".join(f"{accuracy:.3f}" for accuracy in accuracies)


def scores(z: np.ndarray, cells: AnnData) -> list[float]:
    """How well linear probes read the perturbation from plate to plate, and the plate, where nothing was trained."""
    new = (cells.obs["split"] == "test").to_numpy()
    z, y, plates = z[new], *(cells.obs[key][new].astype(str).to_numpy() for key in _KEYS.values())
    last = plates == max(plates)
    right = predict_labels(z[~last], y[~last], z[last], classifier="linear") == y[last]
    return [float(right.mean()), label_probe(z, plates)["accuracy"]]


@contextmanager
def watched() -> Iterator[list[float]]:
    """The most memory that is no file's, in MiB beyond what there was, looked at fifty times a second."""
    before, done, peak = _anonymous(), threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def main(*numbers: int) -> None:
    """Print cells, seconds, MiB, and what is read of perturbation and plate."""
    warnings.filterwarnings("ignore")
    size, length = numbers[:4], numbers[4:]
    with tempfile.TemporaryDirectory() as folder:
        simulated(*size).write_h5ad(Path(folder) / "cells.h5ad")
        cells = open_screen(Path(folder) / "cells.h5ad", layer="X")
        with watched() as peak:
            seconds, z = timed(lambda: by_scbd(cells, length[0] if length else None))
        print(cells.n_obs, seconds, peak[0], *scores(z, cells))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
