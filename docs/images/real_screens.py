"""Draw real_screens.png, crops of real pooled screens beside simulated ones, and print the numbers of real_screens.md.

    python docs/images/real_screens.py FOLDER [BBBC021]

FOLDER holds ten crops of Funk et al. (2022) that Genentech/set-dino publishes (Apache-2.0), as ``funk_crops.npz``
(``images``, ``channels``), and 185 of PERISCOPE from the repository of its authors (BSD-3), as
``periscope_hela_dmem_crops_5x100x100.npz`` (``X``, ``channels``).

BBBC021 is a folder with crops of that image set (Caie et al., 2010, CC BY 3.0), cut by mikkelnrasmussen/
deep_learning_project: ``bbbc021_many_plates.npz`` (``images``, square roots of intensities as uint8) and
``bbbc021_many_plates_obs.csv``. With it, the variation of brightness between weeks, plates, wells and cells is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from anndata import AnnData
from matplotlib import pyplot as plt
from PIL import Image
from scipy import ndimage

import scbd

# red, green and blue of the picture; by the first it is told what of a crop is filled, by the last where nuclei are
COLOURS = {
    "Funk et al.": ["F-actin", "microtubule", "DNA"],
    "PERISCOPE": ["Phalloidin", "ER", "DNA"],
    "simulated": ["F-actin", "microtubules", "DNA"],
    "simulated, neighbours=5": ["F-actin", "microtubules", "DNA"],
}


def screens(folder: Path) -> dict[str, AnnData]:
    """Crops of each."""
    funk = np.load(folder / "funk_crops.npz")
    periscope = np.load(folder / "periscope_hela_dmem_crops_5x100x100.npz")
    found = [cells(funk["images"], funk["channels"]), cells(periscope["X"], periscope["channels"])]
    found += [scbd.datasets.simulated_screen(2000, neighbours=number) for number in (0, 5)]
    return dict(zip(COLOURS, found, strict=True))


def cells(images: np.ndarray, channels: np.ndarray) -> AnnData:
    obs = pd.DataFrame(index=np.arange(len(images)).astype(str))
    return AnnData(obs=obs, var=pd.DataFrame(index=channels), obsm={"single_cell_images": images})


def in_units(screen: AnnData) -> np.ndarray:
    """Images from 0 to 1, the largest that there can be."""
    images = screen.obsm["single_cell_images"]
    return images.astype(np.float32) / (255 if images.dtype == np.uint8 else 1)


def smooth(images: np.ndarray) -> np.ndarray:
    sd = images.shape[-1] / 48
    return ndimage.gaussian_filter(images, (0,) * (images.ndim - 2) + (sd, sd))


def middle(images: np.ndarray) -> np.ndarray:
    """Mean of the middle third of each crop, which is the cell and little else."""
    third = images.shape[-1] // 3
    return images[..., third:-third, third:-third].mean((-2, -1))


def background(images: np.ndarray) -> float:
    """The darkest pixel but one in a hundred, once smoothed."""
    return float(np.percentile(smooth(images), 1))


def neighbours(dna: np.ndarray) -> np.ndarray:
    """Nuclei of each crop beside the one in the middle: half as bright, and a tenth as large, or more.

    Those that touch count as one.
    """
    found = []
    for image in smooth(dna):
        side = len(image)
        centre = slice(4 * side // 10, 6 * side // 10)
        low = np.percentile(image, 5)
        labels, _ = ndimage.label(image > (low + np.median(image[centre, centre])) / 2)
        area = np.bincount(labels.ravel())
        cell = labels[side // 2, side // 2]
        least = 0.1 * (area[cell] if cell else np.median(area[1:]))
        found.append((np.delete(area, [0, cell]) > least).sum())
    return np.array(found)


def of_channel(images: np.ndarray) -> dict[str, float]:
    """What a table says of one channel; levels in percent of the middle of a typical cell."""
    low, cell = background(images), middle(images)
    dark = smooth(images) < np.percentile(smooth(images), 10)
    steps = np.diff(images, axis=-1)[dark[..., 1:] & dark[..., :-1]]
    return {
        "pixels 0 (%)": 100 * (images == 0).mean(),
        "saturated (%)": 100 * (images >= 1).mean(),
        "background (%)": 100 * low / np.median(cell),
        "noise (%)": 100 * steps.std() / np.sqrt(2) / np.median(cell),
        "CV between cells": (cell - low).std() / (cell - low).mean(),
    }


def of_screen(images: np.ndarray, channels: list[str], named: list[str]) -> dict[str, float]:
    """What a table says of a screen."""
    actin, dna = (images[:, channels.index(named[place])] for place in (0, -1))
    low = background(actin)
    quarter = low + 0.25 * (middle(smooth(actin)) - low)
    bright = np.log([np.maximum(middle(one) - background(one), 1e-3) for one in images.swapaxes(0, 1)])
    among = np.corrcoef(bright)[np.triu_indices(len(bright), 1)]
    count = neighbours(dna)
    return {
        "cells": len(images),
        "neighbours": count.mean(),
        "crops with any (%)": 100 * (count > 0).mean(),
        "crop filled (%)": 100 * (smooth(actin) > quarter[:, None, None]).mean(),
        "correlation of channels": among.mean(),
    }


def read_bbbc021(folder: Path) -> AnnData:
    """Read crops of BBBC021, with the intensities of the camera instead of their square roots."""
    with np.load(folder / "bbbc021_many_plates.npz") as arrays:
        roots = arrays["images"].transpose(0, 3, 1, 2) / np.float32(255)
    screen = cells(30_000 * roots**2 + 200, np.array(["DNA", "tubulin", "actin"]))
    table = pd.read_csv(folder / "bbbc021_many_plates_obs.csv", dtype=str, keep_default_na=False)
    screen.obs = table.set_index(screen.obs_names)
    return screen


def brightness_deviations(screen: AnnData, groups: list[str]) -> pd.DataFrame:
    """Compute standard deviations of log brightness between nested groups, and between the cells of the last group.

    Brightness is the mean of a crop. Half the mean squared difference of two cells estimates the variance of everything
    that the two cells do not share. The variance between wells, for example, is this value for cells of one plate and
    different wells, minus the value for cells of one well. A negative variance is returned as a negative deviation.
    """
    brightness = np.log(screen.obsm["single_cell_images"].mean((2, 3), dtype=np.float64))
    one, other = np.triu_indices(len(brightness), 1)
    n_shared, same = np.zeros(len(one), int), np.ones(len(one), bool)
    for group in groups:
        codes = pd.factorize(screen.obs[group])[0]
        same &= codes[one] == codes[other]
        n_shared += same
    half = (brightness[one] - brightness[other]) ** 2 / 2
    variances = np.stack([half[n_shared == n].mean(0) for n in range(len(groups) + 1)])
    variances[:-1] -= variances[1:]
    deviations = np.sign(variances) * np.sqrt(np.abs(variances))
    return pd.DataFrame(deviations, [*groups, "cell"], screen.var_names)


def print_brightness_deviations(folder: Path) -> None:
    """Print the variation of brightness in BBBC021 and in simulated screens, for all cells and for controls."""
    groups = ["plate", "well"]
    found = {"BBBC021": (read_bbbc021(folder), "compound", "DMSO", ["week", *groups])}
    for name, how in (("simulated", {"n_wells": 36}), ("simulated, hard", scbd.datasets.HARD_SCREEN)):
        found[name] = (scbd.datasets.simulated_screen(2000, **how), "gene", "nontargeting", groups)
    for name, (screen, label, control, nested) in found.items():
        for kind, chosen in (("all", screen), ("controls", screen[(screen.obs[label] == control).to_numpy()].copy())):
            print(f"\n{name}, {kind}: {chosen.n_obs} cells")
            deviations = brightness_deviations(chosen, nested)
            variances = deviations * deviations.abs()
            print(deviations.round(2).to_string(), "\npercent of the variance")
            print((100 * variances / variances.sum()).round().to_string())


def draw(found: dict[str, AnnData], path: Path, n: int = 10) -> None:
    """A row of cells for each, in colour, one below the other."""
    rows = []
    for name, screen in found.items():
        chosen = np.random.default_rng(1).choice(screen.n_obs, n, replace=False)
        axes = scbd.pl.cells(coloured(screen, name, chosen), rows=range(n))
        figure = axes[0, 0].figure
        axes[0, 0].set_ylabel("")
        figure.suptitle(name, x=0.01, ha="left", fontsize="medium")
        figure.savefig(path, dpi=90)
        plt.close(figure)
        rows.append(np.asarray(Image.open(path).convert("RGB")))
    width = min(row.shape[1] for row in rows)
    sheet = Image.fromarray(np.concatenate([row[:, :width] for row in rows]))
    sheet.quantize(128).save(path, optimize=True)


def coloured(screen: AnnData, name: str, rows: np.ndarray) -> AnnData:
    """Three channels of some cells."""
    places = [list(screen.var_names).index(channel) for channel in COLOURS[name]]
    return cells(screen.obsm["single_cell_images"][rows][:, places], np.array(COLOURS[name]))


if __name__ == "__main__":
    found = screens(Path(sys.argv[1]))
    draw(found, Path(__file__).with_suffix(".png"))
    by_screen, by_channel = {}, {}
    for name, screen in found.items():
        images, channels = in_units(screen), list(screen.var_names)
        by_screen[name] = of_screen(images, channels, COLOURS[name])
        by_channel |= {(name, channel): of_channel(images[:, at]) for at, channel in enumerate(channels)}
    for rows in (by_screen, by_channel):
        print(pd.DataFrame.from_dict(rows, orient="index").round(2).to_string())
    if len(sys.argv) > 2:
        print_brightness_deviations(Path(sys.argv[2]))
