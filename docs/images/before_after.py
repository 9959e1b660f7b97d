"""Draw before_after.png, pixels and z_c of cells that were not learned from: python docs/images/before_after.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import scvi
from PIL import Image

import scbd

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
axes = scbd.pl.umap_blocks(
    new, ["complex", "plate"], blocks={"Before: pixels (64 PCs)": "X_pixel_pca", "After: z_c": "X_scbd_c"}
)
picture = Path(__file__).with_suffix(".png")
axes[0, 0].figure.savefig(picture, dpi=110)
Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)  # a quarter of the size
frame = scbd.metrics.benchmark(new, {"pixels": "X_pixel_pca", "z_c": "X_scbd_c"}, y_key="gene", e_key="well")
print(frame.to_string())
plt.close("all")
