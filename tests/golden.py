"""Store the results of the package before a change, and compare them with the results after it.

    python tests/golden.py [PART ...]               before the change: compute, and write build/golden/PART.npz
    python tests/golden.py --check [PART ...]       after the change: compute again, and print differences (status 1)
    python tests/golden.py --time                   print CPU seconds of a step and other operations, as JSON

PART is a part, or a part and a case, such as ``models`` or ``models/decode``; all by default. For each entry, the file
holds a digest of its bytes, and some values to measure differences. Results depend on the kind of processor, so that
the files are not committed. ``PYTHONPATH=other/src`` tests another checkout.
"""

# ruff: noqa: E402
# mypy: ignore-errors
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # set before numpy is loaded: sums depend on the number of threads

import numpy as np
import pandas as pd
import scvi
import torch
from anndata import AnnData
from helpers import small_tables
from lightning.pytorch.callbacks import Callback
from scipy import sparse
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

import scbd
from scbd import SCBDModel, baselines, corrections, data, datasets, metrics, nn
from scbd.metrics._relationships import expected_relationship_scores, partner_average_precision, resampled_scores

# ---- names that may change: update them here ------------------------------------------------------------------------
IMAGE_KEY = "single_cell_images"
BASELINES = ("CORAL", "DANN", "ERM", "Fish", "GroupDRO", "IRM", "IVAE", "MCVAE", "VAE")
SIDE_BY_SIDE: dict[str, Any] = {"e_columns": "side_by_side"}
CROSSED: dict[str, Any] = {"e_columns": "crossed"}
CALLBACKS = "callbacks"  # argument of train: a list of Lightning callbacks
TRAIN: dict[str, Any] = {"batch_size": 48, "lr": 1e-3, "seed": 7, "accelerator": "cpu", "enable_progress_bar": False}
TRAIN |= {"precision": "32-true"}  # the same on every machine
RESUME: dict[str, Any] = {"resume": True}
UNCENTRED: dict[str, Any] = {"center": None}
OF_GENES: dict[str, Any] = {}  # further arguments of benchmark; formerly {"gene_key": "gene"}
EMBEDDED = "embedding.zarr"  # file name that embed_to accepts


def build_block(*args: Any, **how: Any) -> torch.nn.Module:
    return nn.Block(*args, **how)


def explained(*args: Any, **how: Any) -> list[torch.Tensor]:
    return list(nn.explained_variance(*args, **how))


def relationship_difference(one: Any, two: Any, n_bootstrap: int) -> Any:
    (first, second), _ = resampled_scores([one, two], "average_precision", 0.05, n_bootstrap, 0)
    return first[0] - second[0], *metrics.relationship_interval(one, other=two, n_bootstrap=n_bootstrap)


def relationship_retrieval(relations: Any) -> Entries:
    found = partner_average_precision(relations)
    scores = {
        "scores/mean_average_precision": found["average_precision"].mean(),
        "scores/chance": found["chance"].mean(),
    }
    return scores | {f"table/{name}": values for name, values in of_frame(found).items()}


# ---------------------------------------------------------------------------------------------------------------------

KEPT = Path(__file__).parents[1] / "build" / "golden"
N_VALUES = 96  # stored per entry
STEPS = 30
Entries = dict[str, Any]
CASES: dict[str, Callable[[], Entries]] = {}

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
torch.set_num_threads(1)


def case(name: str) -> Callable[[Callable[[], Entries]], Callable[[], Entries]]:
    """Return a decorator that registers a function as the case PART/NAME."""

    def keep(function: Callable[[], Entries]) -> Callable[[], Entries]:
        CASES[name] = function
        return function

    return keep


# ---- simulated cells: copies, independent of changes in tests -------------------------------------------------------


def make_cells(n: int = 192, **how: Any) -> AnnData:
    """Return the cells of the tests with plates, each of which contains all wells."""
    cells, rng = small_tables.make_cells(n, **how), np.random.default_rng(1)
    plate = pd.Categorical([f"plate_{i}" for i in rng.integers(2, size=n)])
    cells.obs = cells.obs.assign(plate=plate)
    return cells


def make_wells() -> AnnData:
    """Return the wells of the tests with the target of each compound, and other features in a layer."""
    wells = small_tables.make_wells(16, 5, 8, 12)
    n, n_wells = wells.n_obs, wells.obs["well"].nunique()
    target = pd.Categorical([f"target_{i % n_wells // 4}" for i in range(n)])
    wells.obs = wells.obs.assign(target=target)
    wells.layers["squared"] = wells.X * np.abs(wells.X)
    return wells


WELLS: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "control": "DMSO", "position_key": "well"}
CELLS: dict[str, Any] = {"y_key": "gene", "e_key": "well"}


def small_screen(n: int = 300, **how: Any) -> AnnData:
    settings: dict[str, Any] = {"image_size": 16, "n_complexes": 4, "genes_per_complex": 3, "guides_per_gene": 2}
    return datasets.simulated_screen(n, **settings | how)


def images_of(cells: AnnData) -> np.ndarray:
    return np.asarray(cells.obsm[IMAGE_KEY][:])


# ---- entries of models and tables -----------------------------------------------------------------------------------


def of_weights(module: torch.nn.Module) -> Entries:
    """Return digests of tensors, sorted, and their norms in order. Names of tensors do not matter."""
    found: Entries = {}
    kinds = {"parameters": module.named_parameters(), "buffers": module.named_buffers()}
    for kind, named in kinds.items():
        values = [value.detach().cpu().numpy() for _, value in named]
        found[kind] = np.array(sorted(_digest(value)[:16] for value in values))
        if kind == "parameters":
            found["norms"] = np.array([np.linalg.norm(value.astype(np.float64)) for value in values])
    return found


def of_history(model: Any) -> Entries:
    return {f"history/{name}": np.asarray(values, dtype=float) for name, values in (model.history or {}).items()}


def of_frame(frame: pd.DataFrame, rows: list[str] | None = None) -> Entries:
    """Return one entry per column, or with `rows`, columns that name rows, one entry per row with its numbers."""
    if rows:
        names = frame[rows].astype(str).agg(" ".join, axis=1)
        numbers = frame.drop(columns=rows).select_dtypes("number").astype(float)
        return {name: numbers.iloc[i].to_numpy() for i, name in enumerate(names)} | {"order": names.to_numpy(str)}
    found: Entries = {"index": frame.index.to_numpy()}
    for name, column in frame.items():
        found[str(name)] = column.astype(str).to_numpy() if column.dtype.kind not in "fiub" else column.to_numpy()
    return found


def of_anndata(adata: AnnData) -> Entries:
    found = {f"obs/{name}": values for name, values in of_frame(adata.obs).items()}
    found["var"] = adata.var_names.to_numpy()
    if adata.X is not None:
        found["X"] = adata.X.toarray() if sparse.issparse(adata.X) else np.asarray(adata.X)
    return found | {f"obsm/{name}": np.asarray(values[:]) for name, values in adata.obsm.items()}


def of_retrieval(found: Any) -> Entries:
    scores = {f"scores/{name}": value for name, value in found.scores().items()}
    return scores | {f"table/{name}": values for name, values in of_frame(found.table).items()}


def of_split(split: Any) -> Entries:
    return {name: getattr(split, name) for name in ("train", "validation", "test")}


def prefixed(name: str, entries: Entries) -> Entries:
    return {f"{name}/{key}": value for key, value in entries.items()}


def trained(kind: Any, cells: AnnData, keys: dict[str, Any], settings: dict[str, Any], **training: Any) -> Any:
    model = untrained(kind, cells, keys, settings)
    model.train(**TRAIN | {"max_steps": STEPS} | training)
    return model


def untrained(kind: Any, cells: AnnData, keys: dict[str, Any], settings: dict[str, Any]) -> Any:
    scvi.settings.seed = 0
    kind.setup_anndata(cells, **keys)
    return kind(cells, **settings)


def of_model(model: Any, blocks: str = "cs") -> Entries:
    found = of_weights(model.module) | of_history(model)
    for block in blocks:
        for representation in ("embedding", "intermediate"):
            how = {"block": block, "representation": representation}
            found[f"z_{block}/{representation}"] = model.get_latent_representation(**how)
    found["some"] = model.get_latent_representation(indices=[5, 3, 40])
    if isinstance(model, SCBDModel):
        found |= {f"health/{name}": value for name, value in model.health.items()}
    return found


# ---- models ---------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"encoder": "small", "n_latent": 6}
PUBLISHED: dict[str, Any] = {"invariance": "listing", "alpha": 1.0, "smoothing": 0.0, "include_self": True}
BOTH: dict[str, Any] = CELLS | {"e_key": ["plate", "well"]}


def on_cells(keys: dict[str, Any], settings: dict[str, Any], blocks: str = "cs", **training: Any) -> Entries:
    return of_model(trained(SCBDModel, make_cells(), keys, SMALL | settings, **training), blocks)


def on_wells(keys: dict[str, Any], settings: dict[str, Any], **training: Any) -> Entries:
    return of_model(trained(SCBDModel, make_wells(), keys, settings, **training))


SETTINGS: dict[str, Callable[[], Entries]] = {
    "image default": lambda: on_cells(CELLS, {}),
    "image small alpha": lambda: on_cells(CELLS, {"alpha": 0.02}, validate_every=10),
    "image listing": lambda: on_cells(CELLS, PUBLISHED),
    "image formula": lambda: on_cells(CELLS, PUBLISHED | {"invariance": "formula", "temperature": 0.2}),
    "image no style": lambda: on_cells(CELLS, {"style_target": None}, "c", validate_every=6, load_best=True),
    "image style ye": lambda: on_cells(CELLS, {"style_target": "ye"}, plan_kwargs={"n_steps_alpha_warmup": 10}),
    "image side by side": lambda: on_cells(BOTH | SIDE_BY_SIDE, {"norm": "group"}),
    "image crossed": lambda: on_cells(BOTH | CROSSED, {"alpha": 0.01}, perturbations_per_batch=2),
    "image augment": lambda: of_model(
        trained(
            SCBDModel,
            small_screen(image_size=20),
            CELLS | {"control": "nontargeting"},
            SMALL | {"augment": True, "image_size": 16, "intensity": "arcsinh"},
            perturbations_per_batch=None,
        )
    ),
    "table linear": lambda: on_wells(WELLS, {"encoder": "linear"}),
    "table mlp": lambda: on_wells(WELLS, {"encoder": "mlp", "n_latent": 5}, train_size=0.8, validate_every=5),
    "table lda": lambda: on_wells(
        WELLS | {"layer": "squared"}, {"encoder": "linear", "whitening": "lda", "alpha": 0.01, "n_latent": 4}
    ),
    "table listing": lambda: on_wells(WELLS, PUBLISHED | {"encoder": "linear", "whitening": None}),
}
for _name, _function in SETTINGS.items():
    case(f"models/{_name}")(_function)


class Interrupt(Callback):
    """Send Ctrl-C once, at the start of step number `step`, counted from 1."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.step = None
            os.kill(os.getpid(), signal.SIGINT)


def goes_on(cells: Callable[[], AnnData], keys: dict[str, Any], settings: dict[str, Any], **training: Any) -> Entries:
    """Return entries of an uninterrupted run and of a resumed run, and whether their weights are equal."""
    found = of_model(trained(SCBDModel, cells(), keys, settings, **training), "c")
    with tempfile.TemporaryDirectory() as folder:
        where = training | {"checkpoint_dir": folder}
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trained(SCBDModel, cells(), keys, settings, **where | {CALLBACKS: [Interrupt(15)]})
        resumed = trained(SCBDModel, cells(), keys, settings, **where | RESUME)
    found |= prefixed("interrupted", of_model(resumed, "c"))
    found["as at once"] = np.array_equal(found["interrupted/parameters"], found["parameters"])
    return found


@case("models/resume")
def _() -> Entries:
    found = prefixed("image", goes_on(make_cells, CELLS, SMALL, validate_every=5))
    return found | prefixed("table", goes_on(make_wells, WELLS, {"encoder": "mlp"}, validate_every=5))


@case("models/new_environments")
def _() -> Entries:
    """Embed cells of new environments: with controls, without controls, and without a column of environments."""
    cells, wells, found = make_cells(dtype="float32"), make_wells(), {}
    bright = AnnData(obs=cells.obs.assign(well="next month"), var=cells.var)
    bright.obsm[IMAGE_KEY] = (cells.obsm[IMAGE_KEY] * 1.6 + 35).astype(np.float32)
    shifted = AnnData(X=wells.X[:48] * 1.5 + 2, obs=wells.obs.iloc[:48].assign(plate="new"), var=wells.var)
    of_cells = trained(SCBDModel, cells, CELLS | {"control": "gene_0"}, SMALL, train_size=1.0)
    of_wells = trained(SCBDModel, wells, WELLS, {"encoder": "linear"})
    for name, model, new, column in (("image", of_cells, bright, "gene"), ("table", of_wells, shifted, "compound")):
        controls, e_key = new.obs[column].isin(["gene_0", "DMSO"]), "well" if name == "image" else "plate"
        nowhere = new.copy()
        del nowhere.obs[e_key]
        for how, table in {"controls": new, "no controls": new[~controls].copy(), "nowhere": nowhere}.items():
            for block in "cs":
                found[f"{name}/{how}/z_{block}"] = model.get_latent_representation(table, block=block)
            found[f"{name}/{how}/z_c as it is"] = model.get_latent_representation(table, **UNCENTRED)
    return found


@case("models/decode")
def _() -> Entries:
    found: Entries = {}
    for name, cells, keys, how in (("image", make_cells(), CELLS, SMALL), ("table", make_wells(), WELLS, {})):
        model = trained(SCBDModel, cells, keys, how)
        model.train_decoder(**TRAIN | {"max_steps": 20}, width=8, likelihood="gaussian")
        z_c, z_s = (model.get_latent_representation(block=block, **UNCENTRED) for block in "cs")
        each = {
            "decoded": model.decode(z_c, z_s),
            "swapped": model.swap_blocks([0, 1, 5], [2, 3, 60]),
            "reconstructed": model.reconstruct(indices=[4, 2]),
            "traversed": model.traverse([0, 1], str(cells.obs[keys["y_key"]].iloc[3]), n_steps=3),
            "intensities": model.get_intensities(indices=[4, 2]),
        }
        found |= prefixed(name, each | of_weights(model.module) | of_history(model))
    model = untrained(SCBDModel, make_cells(), CELLS, SMALL)
    model.train_decoder(**TRAIN | {"max_steps": 10}, width=8, joint=True)
    return found | prefixed("joint", of_weights(model.module) | of_history(model))


@case("models/predict")
def _() -> Entries:
    found: Entries = {}
    for name, cells, keys, how in (("image", make_cells(), CELLS, SMALL), ("table", make_wells(), WELLS, {})):
        model = trained(SCBDModel, cells, keys, how, online_head=True)
        each = {"labels": model.predict(), "proba": model.predict(return_proba=True)} | of_weights(model.module)
        found |= prefixed(name, each | of_history(model))
    return found


@case("models/embed_to")
def _() -> Entries:
    model, found = trained(SCBDModel, make_cells(), CELLS, SMALL, max_steps=5), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / EMBEDDED
        model.embed_to(path)
        embedded = data.open_embedding(path)
        found = {"names": embedded.obs_names.to_numpy()}
        found |= {name: np.asarray(embedded.obsm[name][:]) for name in ("X_scbd_c", "X_scbd_s")}
    return found


# ---- baselines ------------------------------------------------------------------------------------------------------


def on_baseline(name: str) -> Entries:
    kind = getattr(baselines, f"{name}Model")
    own: dict[str, dict[str, Any]] = {
        "MCVAE": {"control": "gene_0", "n_latent": 6, "kl_warmup_steps": 10},
        "IVAE": {"n_latent": 6},
        "VAE": {"n_latent": 6},
        "IRM": {"anneal_steps": 8},
        "Fish": {"pretrain_steps": 8},
    }
    settings = own.get(name, {}) if name.endswith("VAE") else {"encoder": "small"} | own.get(name, {})
    found: Entries = {}
    for kind_of, cells, keys in (("image", make_cells(), CELLS), ("table", make_wells(), WELLS)):
        if kind_of == "table":
            keys = {key: value for key, value in keys.items() if key != "position_key"}
            settings = {**settings, "encoder": "mlp"} if "encoder" in settings else settings
            settings = settings | ({"control": "DMSO"} if name == "MCVAE" else {})
        model = trained(kind, cells, keys, settings, max_steps=20, batch_size=16 if name.endswith("VAE") else 48)
        each = of_weights(model.module) | of_history(model) | {"z": model.get_latent_representation()}
        if model.can_predict:
            each["proba"] = model.predict(return_proba=True)
        found |= prefixed(kind_of, each)
    return found


for _name in BASELINES:
    case(f"baselines/{_name}")(lambda name=_name: on_baseline(name))

# ---- corrections ----------------------------------------------------------------------------------------------------

CORRECTIONS: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        *("centred", "standardised", "standardised on controls", "ComBat", "Harmony"),
        *("sphering", "TVN", "WCCN", "LDA", "PLDA"),
    )
}
CORRECTED_BY: dict[str, dict[str, Any]] = {
    "sphering": {"regularization": 0.2},
    "TVN": {"regularization": 0.1},
    "LDA": {"n_components": 5, "position_weight": 0.5},
    "PLDA": {"shrinkage": 0.3},
}


def on_correction(name: str) -> Entries:
    wells = make_wells()
    known = {"environments": wells.obs["plate"], "labels": wells.obs["compound"]}
    known |= {"controls": wells.obs["compound"] == "DMSO", "positions": wells.obs["well"]}
    half = np.arange(wells.n_obs) < 72
    found = {"all": corrections.correct(wells.X, name, **known)}
    if name not in ("ComBat", "Harmony"):  # these corrections always use all cells
        seen = known | {"environments": np.where(half, "seen", "also seen")}
        fit = half | (np.arange(wells.n_obs) % 5 == 0)
        found["fit"] = corrections.correct(wells.X, name, **seen, fit=fit)
    if name in CORRECTED_BY:
        found["settings"] = corrections.correct(wells.X, name, **known, **CORRECTED_BY[name])
    return found


for _name in CORRECTIONS:
    case(f"corrections/{_name}")(lambda name=_name: on_correction(name))


@case("corrections/pixel_pca")
def _() -> Entries:
    cells = small_screen()
    return {
        "all": baselines.pixel_pca(cells, n_components=8),
        "fit": baselines.pixel_pca(cells, n_components=8, fit=np.arange(300) % 3 > 0, scale_channels=False, seed=1),
    }


# ---- scores ---------------------------------------------------------------------------------------------------------

ROWS = ["metric", "representation", "key"]


def scored_screen() -> AnnData:
    screen = small_screen(900, plate_effect=0.5, n_wells=12, active=0.75)
    screen.obsm["X_pixels"] = baselines.pixel_pca(screen, n_components=8)
    return screen


def scored_wells() -> AnnData:
    return datasets.simulated_profiles(48, 5, n_controls=12, n_features=20)


def profiles_of(screen: AnnData, key: str = "X_pixels", **how: Any) -> AnnData:
    return metrics.aggregate(screen, key, gene_key="gene", guide_key="sgRNA", **how)


@case("benchmark/screen")
def _() -> Entries:
    screen = scored_screen()
    frame = metrics.benchmark(
        screen,
        {"oracle": "X_oracle", "pixels": "X_pixels"},
        **{"y_key": "gene", "e_key": "well", "guide_key": "sgRNA", "n_neighbors": 30},
        **{"net": screen.uns["truth"]["network"], "n_bootstrap": 20, "reference": "pixels"},
    )
    return of_frame(frame, ROWS)


@case("benchmark/wells")
def _() -> Entries:
    wells = scored_wells()
    wells.obsm["X_features"] = np.asarray(wells.X)
    wells.obsm["X_tvn"] = corrections.tvn(wells.X, wells.obs["plate"], controls=wells.obs["perturbation"] == "control")
    for key in ("X_features", "X_tvn"):  # as benchmark(n_pcs=6) did formerly
        scaled = StandardScaler().fit_transform(wells.obsm[key])
        wells.obsm[key] = PCA(6, random_state=0).fit_transform(scaled).astype(np.float32)
    frame = metrics.benchmark(
        wells,
        {"features": "X_features", "TVN": "X_tvn"},
        **{"y_key": "perturbation", "e_key": "plate", "control": "control", "replicates": "well"},
        **{"net": wells.uns["truth"]["network"], "label_key": "complex", "n_neighbors": 20},
    )
    return of_frame(frame, ROWS) | prefixed("summary", of_frame(metrics.summarise(frame)))


@case("benchmark/relationships")
def _() -> Entries:
    screen = scored_screen()
    net, found = screen.uns["truth"]["network"], {}
    profiles = profiles_of(screen)
    relations = metrics.Relations(profiles, net)
    better = metrics.Relations(profiles_of(screen, "X_oracle"), net)
    found["recall"] = metrics.relationship_recall(profiles, net, tail=0.1)
    found["average precision"] = metrics.relationship_average_precision(profiles, net)
    for universe in ("annotated", "profiles"):
        curve = metrics.relationship_curve(profiles, net, universe=universe)
        found |= prefixed(f"curve {universe}", of_frame(curve))
        found[f"area {universe}"] = metrics.relationship_area(curve)
    found["interval"] = metrics.relationship_interval(relations, n_bootstrap=50)
    found["interval of recall"] = metrics.relationship_interval(relations, score="recall", n_bootstrap=50, seed=3)
    found["difference"] = list(relationship_difference(better, relations, n_bootstrap=50))
    return found | prefixed("complexes", of_frame(metrics.complex_table(profiles, net, n_permutations=200)))


@case("benchmark/relationship chance and retrieval")
def _() -> Entries:
    screen = scored_screen()
    relations = metrics.Relations(profiles_of(screen), screen.uns["truth"]["network"])
    found = {f"chance/{name}": value for name, value in expected_relationship_scores(relations).items()}
    return found | prefixed("retrieval", relationship_retrieval(relations))


@case("benchmark/retrieval")
def _() -> Entries:
    wells = scored_wells()
    x = np.asarray(wells.X)
    keys: dict[str, Any] = {"y_key": "perturbation", "control": "control", "n_permutations": 500}
    found = prefixed("replicates", of_retrieval(metrics.replicate_retrieval(wells, x, **keys, e_key="plate")))
    apart = metrics.replicate_retrieval(wells, x, **keys, e_key="plate", position_key="well", seed=2)
    found |= prefixed("positions", of_retrieval(apart))
    return found | prefixed("complexes", of_retrieval(metrics.retrieval(wells, x, label_key="complex", **keys)))


@case("benchmark/probes")
def _() -> Entries:
    screen, found = scored_screen(), {}
    for kind in ("linear", "quadratic", "neighbours"):
        found |= prefixed(f"batch {kind}", metrics.batch_probe(screen, "X_pixels", "well", kind=kind))
        labels = screen.obs["gene"]
        found |= prefixed(f"label {kind}", metrics.label_probe(screen.obsm["X_pixels"], labels, kind=kind, seed=1))
    found |= prefixed("groups", metrics.batch_probe(screen, "X_pixels", "plate", group_key="well", max_cells=400))
    x, halves = screen.obsm["X_pixels"], (slice(0, 600), slice(600, None))
    for classifier in ("linear", "nearest_mean"):
        known = (x[halves[0]], labels.iloc[halves[0]], x[halves[1]])
        found[f"predicted/{classifier}"] = metrics.predict_labels(*known, classifier=classifier)
    return found


@case("benchmark/mixing, variance, aggregates")
def _() -> Entries:
    screen, found = scored_screen(), {}
    found |= prefixed("mixing", metrics.batch_mixing(screen, "X_pixels", "well", n_neighbors=30))
    found |= prefixed("mixing in genes", metrics.batch_mixing(screen, "X_pixels", "well", y_key="gene", n_neighbors=20))
    factors = {"well": "well", "gene": "gene", "guide": "sgRNA"}
    table = metrics.variance_table(screen, {"oracle": "X_oracle", "pixels": "X_pixels"}, factors)
    found |= prefixed("variance", of_frame(table))
    for name, how in {"mean": {}, "median": {"average": "median"}, "as they are": {"standardize": None}}.items():
        found |= prefixed(f"aggregate {name}", of_anndata(profiles_of(screen, **how)))
    return found


@case("benchmark/effects")
def _() -> Entries:
    how: dict[str, Any] = {"y_key": "gene", "control": "nontargeting", "e_key": "well", "n_permutations": 100}
    return of_frame(metrics.perturbation_effects(scored_screen(), "X_pixels", **how))


# ---- data -----------------------------------------------------------------------------------------------------------


def written(name: str, plates: Any, **how: Any) -> Entries:
    """Write a screen, and return rows and images as they are read back. File formats do not matter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "screen.zarr"
        data.write_screen(path, plates, **{"y_key": "gene"} | how)
        screen = data.open_screen(path)
        columns = {name: values for name, values in of_frame(screen.obs).items() if name != "index"}
        found = prefixed("obs", columns) | {"names": screen.obs_names.to_numpy(), "images": images_of(screen)}
        found["channels"] = screen.var_names.to_numpy()
    return prefixed(name, found)


def make_plates(dtype: str = "uint16") -> list[AnnData]:
    plates = []
    for number in range(3):
        plate = make_cells(50, dtype=dtype, seed=number)
        plate.obs["plate"] = f"plate_{number}"
        plate.obs_names = [f"{number}_{name}" for name in plate.obs_names]
        plate.obsm[IMAGE_KEY][:, 0, 0, 0] = number
        plate.obsm[IMAGE_KEY][:, 0, 0, 1] = np.arange(50)
        plates.append(plate)
    return plates


@case("data/write_screen")
def _() -> Entries:
    found = written("plates", make_plates(), seed=3)
    found |= written("one", make_plates()[0], y_key=["gene", "well"], compression="lz4")
    found |= written("smaller", make_plates(), image_size=8, compression="zstd")
    found |= written("scaled", make_plates(), dtype="uint8", intensity_range=(10, 200))
    return found | written("channels", make_plates("float32"), channels=["channel_1"], dtype="float16")


def codes_of(cells: AnnData) -> tuple[np.ndarray, np.ndarray]:
    return tuple(cells.obs[key].cat.codes.to_numpy() for key in ("gene", "well"))


@case("data/splits")
def _() -> Entries:
    cells = make_cells(400)
    gene, well = codes_of(cells)
    names, wells = cells.obs["gene"], cells.obs["well"]
    found = prefixed("default", of_split(data.stratified_split([gene, well])))
    found |= prefixed(
        "validation", of_split(data.stratified_split([gene], train_size=0.5, validation_size=0.2, seed=4))
    )
    found |= prefixed("rows", of_split(data.stratified_split([gene], rows=np.arange(0, 400, 3))))
    held = data.hold_out_environments(wells, ["well_1"], strata=[gene], validation_size=0.2)
    found |= prefixed("environments", of_split(held))
    found |= prefixed("perturbations", of_split(data.hold_out_perturbations(names, share=0.3, seed=2)))
    both = {"environments": wells, "held_out_environments": ["well_2"], "keep": "gene_0"}
    return found | prefixed("both", of_split(data.hold_out_perturbations(names, share=0.4, **both)))


@case("data/samplers")
def _() -> Entries:
    labels = np.random.default_rng(0).choice(20, size=500, p=np.arange(1, 21) / 210)
    rows, found = np.random.default_rng(1).permutation(600)[:500], {}
    rows = np.sort(rows)
    of: dict[str, Any] = {"labels": labels, "perturbations_per_batch": 6}
    samplers = {
        "shuffled": data.ShuffleSampler(rows, 48, n_steps=50, seed=3),
        "later": data.ShuffleSampler(rows, 48, n_steps=50, seed=3, start=23),
        "rank": data.PerturbationSampler(rows, 48, n_steps=50, rank=1, world_size=2, **of),
        "perturbations": data.PerturbationSampler(rows, 48, n_steps=50, seed=5, **of),
        "neighbours": data.PerturbationSampler(rows, 48, n_steps=50, neighbours=True, **of),
    }
    for name, sampler in samplers.items():
        found[name] = np.concatenate(list(sampler))
    return found


@case("data/loading")
def _() -> Entries:
    cells, found = make_cells(), {}
    split = data.stratified_split([*codes_of(cells)], train_size=0.8)
    how: dict[str, Any] = {"batch_size": 24, "max_steps": 6, "seed": 2}
    loaded = data.ImageDataModule(data.ArraySource(cells.obsm[IMAGE_KEY]), *codes_of(cells), split, **how)
    for stage in ("train", "val"):
        batches = list(getattr(loaded, f"{stage}_dataloader")())
        for key in ("inputs", "y", "e"):
            found[f"{stage}/{key}"] = torch.cat([batch[key] for batch in batches])
    return found


@case("data/resize_images")
def _() -> Entries:
    return {
        f"{dtype} {size}": data.resize_images(images_of(make_cells(8, dtype=dtype)), size)
        for dtype in ("uint8", "uint16", "float32")
        for size in (8, 11, 24)
    }


@case("data/infer_environments")
def _() -> Entries:
    found: Entries = {}
    wells = make_wells()
    for name, of in {
        "images": data.infer_environments(small_screen(), "gene", 3, seed=1),
        "known": data.infer_environments(make_cells(), "gene", 2, e_key="plate", control="gene_0"),
        "table": data.infer_environments(wells, "compound", 2, fit=np.arange(wells.n_obs) % 4 > 0),
    }.items():
        found |= prefixed(name, {"labels": of.labels.astype(str).to_numpy(), "axes": of.axes, "gain": of.gain})
    return found


@case("data/read_profiles")
def _() -> Entries:
    rng = np.random.default_rng(0)
    columns = [f"{part}_AreaShape_{name}" for part in ("Cells", "Cytoplasm", "Nuclei") for name in ("Area", "Form")]
    with tempfile.TemporaryDirectory() as folder:
        paths, found = [], {}
        for number in range(2):
            frame = pd.DataFrame({"Metadata_Plate": f"P{number}", "Metadata_Well": [f"A{i:02}" for i in range(12)]})
            frame = frame.assign(Metadata_Gene=[f"gene_{i % 4}" for i in range(12)])
            frame[columns] = rng.normal(size=(12, len(columns)))
            if number:
                frame.loc[3, columns[2]] = np.nan
            paths.append(Path(folder) / f"plate_{number}.csv")
            frame.to_csv(paths[-1], index=False)
        found = prefixed("one", of_anndata(data.read_profiles(paths[0])))
        return found | prefixed("several", of_anndata(data.read_profiles(paths)))


@case("data/simulated_screen")
def _() -> Entries:
    found: Entries = {}
    for name, how in {
        "small": {"n_cells": 300, "image_size": 16},
        "confounded": {"n_cells": 300, "image_size": 16, "confounding": 0.7, "seed": 4},
        "hard": datasets.HARD_SCREEN | {"n_cells": 800},
        "hard, other plates": datasets.HARD_SCREEN | {"n_cells": 900, "n_wells": 72, "plate_wells": 24, "seed": 1},
    }.items():
        screen = datasets.simulated_screen(**how)
        found |= prefixed(name, of_anndata(screen))
        truth = screen.uns["truth"]
        for key in ("phenotypes", "wells", "strengths", "network"):
            found |= prefixed(f"{name}/{key}", of_frame(truth[key]))
    found["HARD_SCREEN"] = np.array([f"{key}={value}" for key, value in datasets.HARD_SCREEN.items()])
    return found


@case("data/simulated_profiles")
def _() -> Entries:
    found: Entries = {}
    other: dict[str, Any] = {"n_plate_maps": 2, "one_layout": False, "interaction": 0.3, "gain_effect": 0.2, "seed": 2}
    for name, how in {"default": {}, "other": other | {"cells_per_well": 3}}.items():
        wells = datasets.simulated_profiles(40, 4, n_controls=16, n_features=16, **how)
        found |= prefixed(name, of_anndata(wells))
        for key in ("effects", "network") + (("oracle",) if name == "default" else ()):
            found |= prefixed(f"{name}/{key}", of_frame(wells.uns["truth"][key]))
    return found


@case("data/colored_digits")
def _() -> Entries:
    return of_anndata(datasets.colored_digits()) | prefixed("seed", of_anndata(datasets.colored_digits(seed=3)))


# ---- networks and losses --------------------------------------------------------------------------------------------


def batch(n: int = 64, d: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an embedding, labels and environments."""
    g = torch.Generator().manual_seed(seed)
    y, e = torch.randint(6, (n,), generator=g), torch.randint(4, (n,), generator=g)
    z = torch.randn(n, d, generator=g) + y[:, None] * torch.randn(d, generator=g) + e[:, None] * 0.3
    return torch.nn.functional.normalize(z, dim=1), y, e


def with_gradient(loss: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> Entries:
    z = z.clone().requires_grad_()
    value = loss(z)
    value.sum().backward()
    return {"value": value.detach(), "gradient": z.grad}


@case("nn/losses")
def _() -> Entries:
    z, y, e = batch()
    found: Entries = {}
    contrastive = nn.supervised_contrastive_loss
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "contrastive": lambda z: contrastive(z, y),
        "contrastive smoothed": lambda z: contrastive(z, y, smoothing=2 / 3, temperature=0.2),
        "contrastive sum": lambda z: contrastive(z, y, reduction="sum"),
        "contrastive anchors": lambda z: contrastive(z, y, anchors=e > 0),
        "listing": lambda z: nn.invariance_loss(z, e),
        "formula": lambda z: nn.invariance_loss(z, e, reduction="formula", include_self=False),
        "listing given": lambda z: nn.invariance_loss(z, e, log_normaliser=nn.log_normaliser(z)),
        "log_normaliser": lambda z: nn.log_normaliser(z, temperature=0.3),
        "log_normaliser of others": lambda z: nn.log_normaliser(z, include_self=False),
        "statistic": lambda z: nn.invariance_statistic([z, z**2], e, y),
        "statistic of columns": lambda z: nn.invariance_statistic([z], [e, y // 2], y),
    }
    for name, loss in losses.items():
        found |= prefixed(name, with_gradient(loss, z))
    for dtype in (torch.float64, torch.bfloat16):
        found[f"contrastive {dtype}"] = contrastive(z.to(dtype), y).double()
    return found


@case("nn/explained_variance")
def _() -> Entries:
    z, y, e = batch()
    found: Entries = {}
    for partners in ("within", "across"):
        each = explained(z, e, y, partners=partners)
        found |= {f"groups/{partners}/{i}": value for i, value in enumerate(each)}
    found["effective_rank"] = nn.effective_rank(z)
    return found


def inputs(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@case("nn/encoders")
def _() -> Entries:
    found: Entries = {}
    settings: list[tuple[str, tuple[int, ...], str]] = [
        *(("small", (3, 20, 20), norm) for norm in ("batch", "instance", "group")),
        ("resnet18", (3, 32, 32), "batch"),
        ("linear", (12,), "batch"),
        ("mlp", (12,), "batch"),
    ]
    for encoder, shape, norm in settings:
        torch.manual_seed(0)
        block = build_block(encoder, shape, 12 if encoder == "linear" else 5, norm=norm)
        found |= prefixed(f"block {encoder} {norm}", of_weights(block))
        torch.manual_seed(0)
        network = nn.build_encoder(encoder, shape[0], of_features=len(shape) == 1, norm=norm)
        x = inputs((6, *shape))
        found |= prefixed(f"{encoder} {norm}/train", with_gradient(network, x))
        with torch.no_grad():
            found[f"{encoder} {norm}/eval"] = network.eval()(x)
            found[f"block {encoder} {norm}/eval"] = _embedding(block.eval()(x))
    return found


def _embedding(out: Any) -> torch.Tensor:
    """Return the embedding from the output of a block: the tensor, or the last of several."""
    return out if isinstance(out, torch.Tensor) else next(value for value in reversed(list(out)) if value is not None)


@case("nn/Preprocess")
def _() -> Entries:
    found: Entries = {}
    for dtype, how in (
        ("uint8", {}),
        ("uint8", {"intensity": "arcsinh", "image_size": 8}),
        ("uint16", {}),
        ("uint16", {"intensity": "scale", "standardize": False}),
        ("float32", {"image_size": (12, 8)}),
    ):
        name = " ".join([dtype, *(f"{key}={value}" for key, value in how.items())])
        images = torch.from_numpy(images_of(make_cells(40, dtype=dtype)))
        preprocess: Any = nn.Preprocess((2, 16, 16), dtype, **how)
        if how.get("standardize", True):
            preprocess.fit([images[:20], images[20:]])
        found |= prefixed(name, of_weights(preprocess) | {"out": preprocess.eval()(images)})
    preprocess = nn.Preprocess((2, 16, 16), "uint8", standardize=False, augment=True).train()
    images = torch.from_numpy(images_of(make_cells(40)))
    found["augmented"] = preprocess(images, torch.Generator().manual_seed(3))
    return found


@case("nn/tables")
def _() -> Entries:
    wells, found = make_wells(), {}
    x = torch.from_numpy(np.asarray(wells.X))
    controls = (wells.obs["compound"] == "DMSO").to_numpy()
    for name, given in {"all": None, "controls": controls}.items():
        scaling = nn.FeatureScaling(12, clip=3.0)
        scaling.fit([x[:50], x[50:]], given)
        found |= prefixed(f"scaling {name}", of_weights(scaling) | {"out": scaling.eval()(x)})
    codes = wells.obs["compound"].cat.codes.to_numpy()
    positions = wells.obs["well"].cat.codes.to_numpy()
    kinds: tuple[Any, ...] = ("within", "controls", "lda", "plda")
    for kind in kinds:
        for name, how in {"default": {}, "few": {"n_components": 4, "regularization": 0.3}}.items():
            transform = nn.InputTransform(12, kind, **how)
            transform.fit(scaling.eval()(x).numpy(), codes, controls, positions)
            found |= prefixed(f"{kind} {name}", of_weights(transform) | {"out": transform(x)})
    return found


@case("nn/AdditiveDecoder")
def _() -> Entries:
    found: Entries = {}
    shapes: dict[str, tuple[int, ...]] = {"image": (2, 16, 12), "features": (10,)}
    likelihoods: tuple[Any, ...] = ("gaussian", "bernoulli")
    for name, shape in shapes.items():
        for likelihood in likelihoods:
            torch.manual_seed(0)
            decoder: Any = nn.AdditiveDecoder((5, 3), shape, width=8, likelihood=likelihood)
            z, x = (inputs((6, 5)), inputs((6, 3), 1)), torch.sigmoid(inputs((6, *shape), 2))
            loss = decoder.negative_log_likelihood(x, *z)
            loss.sum().backward()
            each = {"out": decoder(*z).detach(), "mean": decoder.mean(*z).detach(), "loss": loss.detach()}
            norms = [p.grad.norm() for p in decoder.parameters() if p.grad is not None]
            found |= prefixed(f"{name} {likelihood}", each | of_weights(decoder) | {"gradients": torch.stack(norms)})
    return found


# ---- freezing and checking ------------------------------------------------------------------------------------------


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    value = np.asarray(value)
    return np.ascontiguousarray(value.astype(str) if value.dtype.kind not in "fiub" else value)


def _digest(value: np.ndarray) -> str:
    raw = "\0".join(value.ravel().tolist()).encode() if value.dtype.kind == "U" else value.tobytes()
    kind = "text" if value.dtype.kind == "U" else value.dtype.str
    return sha256(f"{kind}{value.shape}".encode() + raw).hexdigest()


def _some(value: np.ndarray) -> np.ndarray:
    """Return evenly spaced values of an array; checksums in place of text."""
    flat = value.ravel()
    chosen = flat[np.unique(np.linspace(0, flat.size - 1, min(flat.size, N_VALUES)).astype(int))] if flat.size else flat
    if value.dtype.kind == "U":
        return np.array([zlib.crc32(text.encode()) for text in chosen.tolist()], dtype=np.float64)
    return chosen.astype(np.float64)


Kept = dict[str, tuple[str, str, np.ndarray]]


def computed(names: list[str], failed: list[str]) -> Kept:
    """Return the kind, the digest and some values of each entry of the given cases."""
    found: Kept = {}
    for name in names:
        begin = time.perf_counter()
        try:
            for key, value in CASES[name]().items():
                array = _array(value)
                kind = "text" if array.dtype.kind == "U" else str(array.dtype)
                found[f"{name}/{key}"] = (f"{kind}{array.shape}", _digest(array)[:32], _some(array))
        except Exception:  # noqa: BLE001 if one case fails, the other cases are still checked
            failed.append(name)
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
        print(f"# {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return found


def kept(part: str) -> Kept:
    with np.load(KEPT / f"{part}.npz") as file:
        values = np.split(file["values"], np.cumsum(file["sizes"])[:-1])
        rows = zip(*(file[column].tolist() for column in ("names", "kinds", "digests")), values, strict=True)
        return {name: (kind, digest, some) for name, kind, digest, some in rows}


def keep(part: str, entries: Kept) -> None:
    columns = {"names": list(entries)}
    columns["kinds"], columns["digests"], values = (list(column) for column in zip(*entries.values(), strict=True))
    arrays = {name: np.array(column) for name, column in columns.items()}
    flat: list[np.ndarray] = values
    KEPT.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        KEPT / f"{part}.npz", **arrays, values=np.concatenate(flat), sizes=np.array([len(v) for v in flat])
    )


def difference(before: tuple[str, str, np.ndarray], now: tuple[str, str, np.ndarray]) -> str:
    """Describe the difference between two entries."""
    if before[:2] == now[:2]:
        return "same to the bit"
    if before[0] != now[0] and before[2].shape != now[2].shape:
        return f"was {before[0]}, is {now[0]}"
    moved = f"was {before[0]}, is {now[0]}; " if before[0] != now[0] else ""
    if now[0].startswith("text"):
        return f"{moved}{np.sum(before[2] != now[2])} of {len(now[2])} texts looked at differ"
    apart = np.abs(now[2] - before[2])
    alike = (before[2] == now[2]) | (np.isnan(before[2]) & np.isnan(now[2]))
    apart[alike] = 0  # also for infinite values
    largest = f"{np.nan_to_num(apart, nan=np.inf).max():.3g}" if len(apart) else "none"
    return f"{moved}differs by {largest} at most ({np.sum(~alike)} of {len(apart)} values looked at, " + (
        f"of size {np.nanmax(np.abs(before[2])):.3g})" if len(apart) else "none)"
    )


def check(names: list[str], verbose: bool) -> int:
    """Print differences; return exit status 1 if anything differs."""
    failed: list[str] = []
    entries = computed(names, failed)
    golden: Kept = {}
    for part in dict.fromkeys(name.split("/")[0] for name in names):
        golden |= kept(part)
    bad = 0
    for name in names:
        if name in failed:
            continue
        before = {k: value for k, value in golden.items() if k.startswith(f"{name}/")}
        now = {key: value for key, value in entries.items() if key.startswith(f"{name}/")}
        said = {key: difference(before[key], now[key]) if key in now else "MISSING" for key in before}
        differing = {key: text for key, text in said.items() if text != "same to the bit"}
        bad += len(differing)
        for key, text in (said if verbose else differing).items():
            print(f"  {key}: {text}")
        new = f", {len(now.keys() - before.keys())} new" if now.keys() - before.keys() else ""
        print(f"{name}: {len(said) - len(differing)} of {len(said)} same to the bit{new}", flush=True)
    print(f"{bad} entries differ, {len(failed)} cases failed" if bad or failed else "all same to the bit")
    return int(bool(bad or failed))


def freeze(names: list[str]) -> int:
    failed: list[str] = []
    for part in dict.fromkeys(name.split("/")[0] for name in names):
        chosen = [name for name in names if name.split("/")[0] == part]
        entries = computed(chosen, failed)
        if (KEPT / f"{part}.npz").exists():  # keep the stored entries of other cases
            known = {key: value for key, value in kept(part).items() if "/".join(key.split("/")[:2]) not in chosen}
            known = {key: value for key, value in known.items() if "/".join(key.split("/")[:2]) in CASES}
            entries = known | entries
        keep(part, entries)
        print(f"{part}: {len(entries)} entries, {(KEPT / f'{part}.npz').stat().st_size // 1000} kB")
    return int(bool(failed))


# ---- timings --------------------------------------------------------------------------------------------------------


class Clock(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.process_time())


def best(function: Callable[[], Any], n: int = 5) -> float:
    found = []
    for _ in range(n):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return round(min(found), 6)


def timings() -> dict[str, float]:
    """Return CPU seconds, the minimum of five runs, since other processes may be running."""
    found: dict[str, float] = {}
    screen = small_screen(1500, image_size=32)
    wells = datasets.simulated_profiles(200, 8, n_controls=32, n_features=128)
    keys: dict[str, Any] = {"y_key": "perturbation", "e_key": "plate", "control": "control"}
    runs: dict[str, tuple[AnnData, dict[str, Any], dict[str, Any]]] = {
        "small, 32 pixels": (screen, CELLS, {"encoder": "small"}),
        "linear, 128 features": (wells, keys, {"encoder": "linear"}),
    }
    for name, (cells, of, settings) in runs.items():
        clock = Clock()
        how = {"max_steps": 7, "batch_size": 256, CALLBACKS: [clock], "train_size": 1.0}
        model = trained(SCBDModel, cells, of, settings, **how)
        found[f"step of 256: {name}"] = round(float(np.diff(clock.ends).min()), 6)
        rows = np.arange(512)
        found[f"embed 512: {name}"] = best(lambda m=model, r=rows: m.get_latent_representation(indices=r))
    z, y, e = batch(512, 64)
    found["contrastive loss, 512 x 64"] = best(lambda: with_gradient(lambda z: nn.supervised_contrastive_loss(z, y), z))
    found["invariance loss, 512 x 64"] = best(lambda: with_gradient(lambda z: nn.invariance_loss(z, e), z))
    found["statistic, 512 x 64"] = best(lambda: with_gradient(lambda z: nn.invariance_statistic([z], e, y), z))
    scored = scored_screen()
    how = {"y_key": "gene", "e_key": "well", "guide_key": "sgRNA", "n_neighbors": 30} | OF_GENES
    how["net"] = scored.uns["truth"]["network"]
    found["benchmark, 900 cells"] = best(lambda: metrics.benchmark(scored, {"pixels": "X_pixels"}, **how))
    return found


def chosen_cases(asked: list[str]) -> Iterator[str]:
    for name in CASES:
        if not asked or any(name == each or name.startswith(f"{each}/") for each in asked):
            yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--list", action="store_true", help="print parts and cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="also name each entry that is the same")
    asked = parser.parse_args()
    print(f"# {Path(scbd.__file__).parent}", file=sys.stderr)
    names = list(chosen_cases(asked.parts))
    if not names:
        parser.error(f"there is no part {' '.join(asked.parts)}: see --list")
    if asked.list:
        print("\n".join(names))
        return 0
    if asked.time:
        print(json.dumps(timings(), indent=1))
        return 0
    return check(names, asked.verbose) if asked.check else freeze(names)


if __name__ == "__main__":
    sys.exit(main())
