from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
from conftest import make_plates

from scbd.data import ArraySource, Crops
from scbd.data.stores._conversion import Conversion
from scbd.data.stores._plan import screen_plan

AS_THEY_ARE = Conversion(None, np.dtype("uint8"), None)


def test_plan_and_digest_take_little_beside_the_table(monkeypatch):
    """Of 26 million cells each hundred bytes are 2.6 GB."""
    n = 20_000
    for module in ("_digests", "stores._plan"):
        monkeypatch.setattr(f"scbd.data.{module}._HASHED", n // 20)
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(index=np.array([f"cell_{row}" for row in range(n)], dtype=object))
    for name, size in {"gene": 50, "well": 20, "tile": 30}.items():
        obs[name] = pd.Categorical.from_codes(rng.integers(0, size, n), [f"{name}_{code}" for code in range(size)])
    crops = Crops(ArraySource(np.zeros((n, 1, 1, 1), "uint8")), obs, ["dna"])
    screen_plan([crops], "gene", AS_THEY_ARE, None, 0).settings()  # what libraries keep
    tracemalloc.start()
    plan = screen_plan([crops], "gene", AS_THEY_ARE, None, 0)
    plan.settings()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.obs) == n and peak < 100 * n


def test_what_makes_another_screen_has_another_digest():
    def digest(plates, y_key="gene", scale=None, seed=0):
        crops = [Crops(ArraySource(p.obsm["single_cell_images"]), p.obs, ["a", "b"], "plate") for p in plates]
        convert = Conversion(None, np.dtype("uint8"), None if scale is None else np.array([scale, scale]))
        return screen_plan(crops, y_key, convert, None, seed).settings()["digest"]

    plates = make_plates(dtype="uint8")
    others = make_plates(dtype="uint8")
    others[2].obsm["single_cell_images"] ^= 1
    named = make_plates(dtype="uint8")
    named[0].obs_names = [f"other_{name}" for name in named[0].obs_names]
    found = [
        digest(plates),
        digest(plates[::-1]),
        digest(others),
        digest(named),
        digest(plates, "well"),
        digest(plates, seed=1),
        digest(plates, scale=(0, 1)),
        digest(plates, scale=(0, 2)),
    ]
    assert len(set(found)) == len(found)
    assert digest(make_plates(dtype="uint8")) == found[0]
