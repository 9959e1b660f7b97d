"""Draw the pictures of docs/gallery.md by the code of that page: python docs/images/gallery.py"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
import scvi
from PIL import Image

import scbd

DOCS = Path(__file__).parents[1]
# what the page begins with; half of the cells are trained on, the others are drawn
BEGIN = """
adata = scbd.datasets.simulated_screen(4000, n_wells=12, image_size=32)
scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well", control="nontargeting")
model = scbd.SCBDModel(adata, encoder="small")
model.train(max_steps=100, batch_size=256, train_size=0.5)
"""


def main() -> None:
    scvi.settings.seed = 0
    known = {"scbd": scbd}
    exec(BEGIN, known)
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    for code, name in re.findall(r"```python\n(.*?)```\n(?:\n!\[.*?\]\(images/(.*?)\))?", page, re.DOTALL):
        exec(code, known)
        if name:
            path = DOCS / "images" / name
            path.parent.mkdir(exist_ok=True)
            plt.savefig(path, dpi=90)
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a smaller file
        plt.close("all")


if __name__ == "__main__":
    main()
