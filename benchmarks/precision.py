"""Does bfloat16 harm what is learned? Trained results over seeds, and their curves.

bfloat16 moves the gradient of the first step by a quarter, so no comparison of single steps can answer this. Three
arms with the same seeds: float32 in the library's own convolutions, float32 as scbd computes it (the same mathematics,
another order of summation), bfloat16. The first two tell how far runs of one seed drift apart anyway.

python benchmarks/precision.py [--out results/precision] [--tasks digits screen resnet18] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import scvi
import torch
from anndata import AnnData
from torch import nn

import scbd
from scbd.experiments import _demo as demo
from scbd.nn.small_maps import SmallMapConv2d

ARMS = {"float32, plain": "32-true", "float32": "32-true", "bfloat16": "bf16-mixed"}


def plain(model: scbd.SCBDModel) -> None:
    """Back to the library's convolutions and layout."""
    for module in model.module.modules():
        if isinstance(module, SmallMapConv2d):
            module.__class__ = nn.Conv2d
    model.module.to(memory_format=torch.contiguous_format)


def digits(seed: int, prepare: Callable, precision: str, **settings: Any) -> tuple[scbd.SCBDModel, dict[str, float]]:
    """The demo: coloured digits, tested on white ones."""
    adata = scbd.datasets.colored_digits(seed=seed)
    model = make(adata, "digit", "environment", seed, **demo.SETTINGS | {"alpha": 20.0} | settings.get("model", {}))
    prepare(model)
    model.train(seed=seed, precision=precision, **demo.TRAINING | settings.get("training", {}))
    scores = demo.score_digits(adata, model)
    return model, {key: scores[key] for key in ("r_c in", "r_c white", "z_c white", "e from z_c", "supervised_c")}


def resnet18(seed: int, prepare: Callable, precision: str) -> tuple[scbd.SCBDModel, dict[str, float]]:
    """The same digits through ResNet-18, where bfloat16 rounds through many more layers."""
    return digits(seed, prepare, precision, model={"encoder": "resnet18"}, training={"max_steps": 300})


def screen(seed: int, prepare: Callable, precision: str) -> tuple[scbd.SCBDModel, dict[str, float]]:
    """A simulated screen: does z_c know the complex, and not the well?"""
    adata = scbd.datasets.simulated_screen(
        4000, image_size=32, n_complexes=6, genes_per_complex=2, effect_size=1.5, seed=seed
    )
    model = make(adata, "gene", "well", seed, encoder="small", alpha=1.0)
    prepare(model)
    model.train(
        seed=seed, precision=precision, max_steps=400, batch_size=512, lr=1e-3, load_best=False, accelerator="cpu"
    )
    scores = {}
    for block in "cs":
        embedding = model.get_latent_representation(block=block)
        for label in ("complex", "well"):
            scores[f"{label} F1 from z_{block}"] = scbd.metrics.label_probe(embedding, adata.obs[label])["f1"]
    return model, scores | {"supervised_c": model.health["supervised_c"]}


def make(adata: AnnData, y_key: str, e_key: str, seed: int, **settings: Any) -> scbd.SCBDModel:
    scvi.settings.seed = seed
    scbd.SCBDModel.setup_anndata(adata, y_key=y_key, e_key=e_key)
    return scbd.SCBDModel(adata, **settings)


TASKS: dict[str, Callable] = {"digits": digits, "screen": screen, "resnet18": resnet18}


def run(task: str, arm: str, seed: int) -> dict[str, Any]:
    model, scores = TASKS[task](seed, plain if "plain" in arm else lambda model: None, ARMS[arm])
    curve = model.history["train_loss"]["train_loss"]
    return {"scores": scores, "curve": {"step": curve.index.tolist(), "loss": curve.tolist()}}


def table(results: dict[str, Any]) -> pd.DataFrame:
    """Mean ± sd over seeds for each arm, and the differences from float32 at the same seed."""
    rows = [
        {"task": task, "arm": arm, "seed": seed, "score": score, "value": value}
        for (task, arm, seed), result in ((tuple(json.loads(key)), value) for key, value in results.items())
        for score, value in result["scores"].items()
    ]
    wide = pd.DataFrame(rows).pivot(index=["task", "score", "seed"], columns="arm", values="value")[list(ARMS)].dropna()
    for arm in ("float32, plain", "bfloat16"):
        wide[f"{arm} − float32"] = wide[arm] - wide["float32"]
    grouped = wide.groupby(["task", "score"], sort=False)
    shown = grouped.mean().map("{:.3f}".format) + " ± " + grouped.std().map("{:.3f}".format)
    return shown.assign(seeds=grouped.size())


def plot(results: dict[str, Any], path: Path) -> None:
    """Training loss of every run."""
    tasks = list(dict.fromkeys(json.loads(key)[0] for key in results))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 3.4), squeeze=False, layout="constrained")
    styles = dict(zip(ARMS, ("#999999", "#0072B2", "#D55E00"), strict=True))
    for task, axis in zip(tasks, axes[0], strict=True):
        for key, result in results.items():
            of_task, arm, seed = json.loads(key)
            if of_task == task:
                curve = pd.Series(result["curve"]["loss"], result["curve"]["step"]).rolling(5, min_periods=1).mean()
                axis.plot(curve, color=styles[arm], lw=1, ls="--" if arm == "bfloat16" else "-", label=arm)
        axis.set(title=task, xlabel="step")
    axes[0, 0].set_ylabel("training loss (mean of 5 records)")
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    axes[0, 0].legend(handles.values(), handles.keys(), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/precision"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    # seeds outermost: whenever it is stopped, the arms have had the same
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for arm in ARMS:
                key = json.dumps([task, arm, seed])
                if key not in results:
                    results[key] = run(task, arm, seed)
                    path.write_text(json.dumps(results))
    print(table(results).to_string())
    plot(results, arguments.out / "curves.png")


if __name__ == "__main__":
    main()
