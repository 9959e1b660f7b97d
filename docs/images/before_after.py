"""Draw before_after.png, pixels and z_c of cells that were not learned from: python docs/images/before_after.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import scanpy as sc
import scvi
from anndata import AnnData
from PIL import Image

import scbd

EMBEDDINGS = {"Before: pixels": "X_pixel_pca", "After: z_c": "X_scbd_c"}
LABELS = {"by protein complex": "complex", "by plate": "plate"}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7b3294", "#a6761d")


def new_cells() -> AnnData:
    """Cells that the model was not trained on, with both embeddings."""
    scvi.settings.seed = 0
    adata = scbd.datasets.simulated_screen(
        20_000, image_size=32, n_complexes=8, genes_per_complex=3, n_wells=34, effect_size=1.2, well_effect=1.5
    )
    scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    model = scbd.SCBDModel(adata, encoder="small", style_target=None)
    model.train(max_steps=500, batch_size=512, lr=1e-3, train_size=0.8)
    new = adata[model.validation_indices].copy()
    new.obsm["X_scbd_c"] = model.get_latent_representation(new)
    new.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(new, n_components=64)
    for key in EMBEDDINGS.values():
        sc.pp.neighbors(new, use_rep=key, metric="cosine", random_state=0)
        sc.tl.umap(new, random_state=0)
        new.obsm[f"{key}_umap"] = new.obsm["X_umap"]
    return new


def draw(new: AnnData, path: Path) -> None:
    """Four panels that can be read on a phone: large words, no legend, for the caption says what a colour is."""
    order = np.random.default_rng(0).permutation(new.n_obs)  # no label on top of all others
    with plt.rc_context({"font.size": 24, "axes.linewidth": 1.2}):
        figure, axes = plt.subplots(2, 2, figsize=(10, 9.2), layout="constrained")
        for row, (name, key) in enumerate(EMBEDDINGS.items()):
            for column, (label, obs) in enumerate(LABELS.items()):
                ax = axes[row, column]
                values = new.obs[obs].astype(str).to_numpy()[order]
                known = sorted(set(values) - {"none"})
                palette = {"none": "#c8c8c8"} | dict(zip(known, COLOURS, strict=False))
                points = new.obsm[f"{key}_umap"][order]
                ax.scatter(*points.T, s=7, c=[palette[value] for value in values], linewidths=0, rasterized=True)
                ax.set(xticks=[], yticks=[])
                if row == 0:
                    ax.set_title(label, fontsize=24)
                if column == 0:
                    ax.set_ylabel(name)
        figure.savefig(path, dpi=100)
        plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a quarter of the size


if __name__ == "__main__":
    new = new_cells()
    draw(new, Path(__file__).with_suffix(".png"))
    for y_key, e_key in (("gene", "well"), ("complex", "plate")):  # the numbers of the caption
        print(scbd.metrics.benchmark(new, EMBEDDINGS, y_key=y_key, e_key=e_key).T.to_string())
