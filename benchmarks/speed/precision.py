"""Does bfloat16 harm what is learned? Trained results over seeds, and their curves.

bfloat16 moves the gradient of the first step by a quarter, so no comparison of single steps can answer this. Three
arms with the same seeds: float32 in the library's own convolutions, float32 as scbd computes it (the same mathematics,
another order of summation), bfloat16. The first two tell how far runs of one seed drift apart anyway.

python benchmarks/speed/precision.py [--seeds 3] [--tasks digits screen] [--smoke]

Runs that are already in precision.json are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import scvi
import torch
from _compare import machine
from _scale import SMOKE, Scale
from anndata import AnnData
from step import library_convolutions

import scbd
from scbd._workflows import demo as demo

Outcome = tuple[scbd.SCBDModel, dict[str, float]]
Settings = dict[str, Any]

RESULTS = Path(__file__).parent / "precision.json"
ARMS = {"float32, plain": "32-true", "float32": "32-true", "bfloat16": "bf16-mixed"}


def plain(model: scbd.SCBDModel) -> None:
    """Back to the library's convolutions and layout."""
    library_convolutions(model.module)
    model.module.to(memory_format=torch.contiguous_format)


def digits(scale: Scale, seed: int, prepare: Callable, precision: str, model: Settings, training: Settings) -> Outcome:
    """The demo: coloured digits, tested on white ones."""
    adata = scbd.datasets.colored_digits(seed=seed)[:: scale.of(1, 9)].copy()
    trained = make(adata, "digit", "environment", seed, **demo.DIGITS_MODEL | {"alpha": 20.0} | model)
    prepare(trained)
    trained.train(
        seed=seed, precision=precision, **demo.DIGITS_TRAINING | {"max_steps": 600, "online_head": True} | training
    )
    scores = demo.score_model(adata, trained)
    return trained, {key: scores[key] for key in ("r_c in", "r_c white", "z_c white", "e from z_c", "supervised_c")}


def screen(scale: Scale, seed: int, prepare: Callable, precision: str, model: Settings, training: Settings) -> Outcome:
    """A simulated screen: does z_c know the complex, and not the well?"""
    adata = scbd.datasets.simulated_screen(
        scale.of(4000, 200), image_size=32, n_complexes=6, genes_per_complex=2, effect_size=1.5, seed=seed
    )
    trained = make(adata, "gene", "well", seed, **{"encoder": "small", "alpha": 1.0} | model)
    prepare(trained)
    settings = {"max_steps": 400, "batch_size": 512, "lr": 1e-3, "load_best": False, "accelerator": "cpu"}
    trained.train(seed=seed, precision=precision, **settings | training)
    scores = {}
    for block in "cs":
        embedding = trained.get_latent_representation(block=block)
        for label in ("complex", "well"):
            scores[f"{label} F1 from z_{block}"] = scbd.metrics.label_probe(embedding, adata.obs[label])["f1"]
    return trained, scores | {"supervised_c": trained.health["supervised_c"]}


def make(adata: AnnData, y_key: str, e_key: str, seed: int, **settings: Any) -> scbd.SCBDModel:
    scvi.settings.seed = seed
    scbd.SCBDModel.setup_anndata(adata, y_key=y_key, e_key=e_key)
    return scbd.SCBDModel(adata, invariance="listing", smoothing=0.0, **settings)


# through ResNet-18, bfloat16 rounds in many more layers
TASKS: dict[str, tuple[Callable[..., Outcome], Settings, Settings]] = {
    "digits": (digits, {}, {}),
    "screen": (screen, {}, {}),
    "digits, resnet18": (digits, {"encoder": "resnet18"}, {"max_steps": 300}),
    "screen, resnet18": (screen, {"encoder": "resnet18"}, {"max_steps": 200, "batch_size": 256, "lr": 3e-4}),
}


def run(task: str, arm: str, seed: int, scale: Scale) -> dict[str, Any]:
    learn, model, training = TASKS[task]
    training = training | scale.of({}, {"max_steps": 2, "batch_size": 64})
    trained, scores = learn(scale, seed, plain if "plain" in arm else lambda model: None, ARMS[arm], model, training)
    curve = trained.history["train_loss"]["train_loss"]
    return {"scores": scores, "curve": {"step": curve.index.tolist(), "loss": [round(loss, 4) for loss in curve]}}


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}


def result() -> dict[str, Any]:
    """Mean ± sd over seeds of each arm, and the differences from float32 at the same seed."""
    results = read()
    rows = [
        {"task": task, "arm": arm, "seed": seed, "score": score, "value": value}
        for (task, arm, seed), outcome in ((json.loads(key), value) for key, value in results["runs"].items())
        for score, value in outcome["scores"].items()
    ]
    wide = pd.DataFrame(rows).pivot(index=["task", "score", "seed"], columns="arm", values="value")[list(ARMS)].dropna()
    for arm in ("float32, plain", "bfloat16"):
        wide[f"{arm} − float32"] = wide[arm] - wide["float32"]
    grouped = wide.groupby(["task", "score"], sort=False)
    # as many digits as every numpy agrees in: a half would go up with one, and down with another
    shown = grouped.mean().round(9).map("{:.3f}".format) + " ± " + grouped.std().map("{:.3f}".format)
    shown = shown.assign(seeds=grouped.size().astype(str)).reset_index()
    return results | {"table": shown.to_dict("records")}


def plot(path: Path) -> None:
    """Training loss of every run."""
    import matplotlib.pyplot as plt

    runs = read()["runs"]
    tasks = list(dict.fromkeys(json.loads(key)[0] for key in runs))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 3.4), squeeze=False, layout="constrained")
    colors = dict(zip(ARMS, ("#999999", "#0072B2", "#D55E00"), strict=True))
    for task, axis in zip(tasks, axes[0], strict=True):
        for key, outcome in runs.items():
            of_task, arm, _ = json.loads(key)
            if of_task == task:
                curve = pd.Series(outcome["curve"]["loss"], outcome["curve"]["step"]).rolling(5, min_periods=1).mean()
                axis.plot(curve, color=colors[arm], lw=1, ls="--" if arm == "bfloat16" else "-", label=arm)
        axis.set(title=task, xlabel="step")
    axes[0, 0].set_ylabel("training loss (mean of 5 records)")
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    axes[0, 0].legend(handles.values(), handles.keys(), frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="two steps each, to see that everything runs")
    arguments = parser.parse_args()
    scale = SMOKE if arguments.smoke else Scale()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    # seeds outermost: whenever it is stopped, the arms have had the same
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for arm in ARMS:
                results, key = read(), json.dumps([task, arm, seed])
                if key not in results["runs"]:
                    results["runs"][key] = run(task, arm, seed, scale)
                    results |= {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
                    RESULTS.write_text(json.dumps(results) + "\n")
    print(pd.DataFrame(result()["table"]).to_string(index=False))


if __name__ == "__main__":
    main()
