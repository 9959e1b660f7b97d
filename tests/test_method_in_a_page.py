"""Compare the notebook that writes the method in plain torch with the package, on the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells, run_cells
from torch.nn import functional as F

import scbd


@pytest.fixture(scope="module")
def page() -> Any:
    """Names that the first code cell defines."""
    # the first cell must not need scbd: if it does, nothing is defined
    return run_cells("method_in_a_page", lambda number, source: number == 1 or "scbd" in source)


@pytest.mark.parametrize("seed", range(3))
def test_losses_of_page_are_equal_to_package(page, seed):
    generator = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(32, 8, dtype=torch.float64, generator=generator), dim=1)
    labels = torch.randint(5, (32,), generator=generator)
    for name in ("supervised_contrastive_loss", "invariance_loss"):
        torch.testing.assert_close(getattr(page, name)(z, labels), getattr(scbd.nn, name)(z, labels))


@pytest.mark.filterwarnings("ignore:z_c")  # a few steps, for equal numbers and not for a good embedding
def test_train_of_page_embeddings_are_equal_to_package(page, monkeypatch):
    """Both start from the weights of the package, and train on its batches."""
    n_steps, size, alpha = 8, 32, 0.1
    cells = make_cells()
    scbd.SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    published: dict[str, Any] = {
        "invariance": "listing",
        "smoothing": 0,
        "set_size": 1,
        "include_self": True,
        "augment": False,
    }
    model = scbd.SCBDModel(cells, encoder="small", n_latent=64, alpha=alpha, standardize=False, **published)
    blocks = [model.module.content, model.module.style]
    start = [{name: value.clone() for name, value in block.state_dict().items()} for block in blocks]

    def block(*args: Any) -> Any:
        made = page.Block(*args)
        made.load_state_dict(start.pop(0))
        return made

    batches: list[np.ndarray] = []
    shuffle = scbd.data.ShuffleSampler.__iter__

    def record_batches(self: Any) -> Iterator[np.ndarray]:
        for rows in shuffle(self):
            batches.append(rows)
            yield rows

    monkeypatch.setattr(scbd.data.ShuffleSampler, "__iter__", record_batches)
    how: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu", "train_size": 1.0, "seed": 0}
    how |= {"plan_kwargs": {"lr_decay": False}, "perturbations_per_batch": None}
    model.train(max_steps=n_steps, batch_size=size, lr=1e-3, **how)
    batches = batches[:n_steps]
    images = torch.from_numpy(cells.obsm["single_cell_images"]).float() / 255
    y, e = (torch.from_numpy(cells.obs[key].cat.codes.to_numpy().astype(int)) for key in ("gene", "well"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(page.train.__globals__, "Block", block)
        content, style = page.train(images, y, e, batches, alpha)
    for name, found in zip("cs", (content, style), strict=True):
        with torch.no_grad():
            ours = found(images).numpy()
        np.testing.assert_allclose(model.get_latent_representation(block=name), ours, atol=1e-3)
