"""Whether z_c is alive at the end of training."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, make_model
from torch import nn

import scbd
from scbd import SCBDModel
from scbd.metrics import label_probe
from scbd.model._health import means_differ, measure_health
from scbd.model._interfaces import ReferenceBatches
from scbd.nn import Groups


class Noise(nn.Module):
    """An encoder whose features have nothing to do with the images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(images), 6)


def test_health_collapsed_embedding_warns(cells):
    model = make_model(cells, alpha=100.0)
    torch.nn.init.zeros_(model.module.content.projection[-1].weight)
    with pytest.warns(UserWarning, match="z_c has collapsed.* with alpha=10, and with its other arguments"):
        model.train(**QUICK | {"lr": 0.0})
    assert model.health["collapsed"] == 1 and model.health["spread"] < 0.05
    assert "COLLAPSED" in repr(model)


def weak_screen(effect: float) -> AnnData:
    """Cells whose brightness differs far more within genes than between them, if there."""
    cells = make_cells(600)
    rng = np.random.default_rng(0)
    images = 100 + rng.normal(0, 20, (600, 2, 16, 16)) + rng.normal(0, 30, (600, 1, 1, 1))
    images += effect * cells.obs["gene"].cat.codes.to_numpy()[:, None, None, None]
    cells.obsm["single_cell_images"] = np.clip(images, 0, 255).astype("uint8")
    return cells


def trained_weakly(effect: float, alpha: float) -> tuple[SCBDModel, list[str]]:
    """A model, and what was said of it."""
    model = make_model(weak_screen(effect), alpha=alpha, style_target=None, smoothing=2 / 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.train(**QUICK | {"max_steps": 12, "batch_size": 100, "lr": 1e-3}, train_size=0.5)
    return model, [str(warning.message) for warning in said]


def test_health_small_variance_with_different_means_does_not_warn():
    model, said = trained_weakly(effect=12, alpha=1e-4)
    assert model.health["spread"] < 0.025 and model.health["collapsed"] == 0 and not said


def test_health_collapse_with_small_alpha_advises_more_training():
    model, said = trained_weakly(effect=0, alpha=1e-4)
    assert model.health["collapsed"] == 1
    assert len(said) == 1 and "alpha" not in said[0] and "model.train()" in said[0]


def test_health_collapse_with_large_alpha_advises_smaller_alpha():
    _, said = trained_weakly(effect=0, alpha=100.0)
    # a call with alpha alone would lose the user's other arguments, such as the preset
    assert len(said) == 1 and "alpha=10" in said[0] and "SCBDModel(" not in said[0]


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_means_differ_compares_with_permuted_labels(scale):
    rng, labels = np.random.default_rng(0), Groups(torch.arange(200) % 20)
    noise = torch.from_numpy(rng.normal(size=(200, 5)))
    shift = torch.from_numpy(rng.normal(size=(20, 5)))[labels.labels]
    assert means_differ(scale * (noise + shift), labels)
    # nothing, a point, rounding of a point, and what is no number
    for nothing in (noise, torch.ones(200, 5), 1 + 1e-7 * (noise + shift), torch.full((200, 5), torch.nan)):
        assert not means_differ(scale * nothing, labels)


def test_health_uninformative_embedding_warns_without_collapse():
    model = make_model(alpha=0, encoder=Noise())
    with pytest.warns(UserWarning, match="z_c has learned to distinguish few"):
        model.train(**QUICK)
    assert model.health["collapsed"] == 0 and model.health["learned_c"] <= 0 and model.health["spread"] > 0.1


def test_health_few_distinguished_perturbations_do_not_warn():
    """Three of forty are told apart, twice as often as by chance; the loss of the others is above that of a point."""
    rng = np.random.default_rng(0)
    drug, values = rng.integers(40, size=2000), rng.normal(size=(2000, 20)).astype(np.float32)
    values[drug < 3, 0] += 6 * (drug[drug < 3] + 1)
    obs = pd.DataFrame({"drug": drug, "plate": rng.integers(2, size=2000)}).astype(str)
    cells = AnnData(values, obs=obs.set_index(obs.index.astype(str)))
    SCBDModel.setup_anndata(cells, y_key="drug", e_key="plate", layer="X")
    model = SCBDModel(cells, encoder="linear")
    model.train(**QUICK | {"max_steps": 20, "batch_size": 256})  # without a warning
    assert model.health["spread"] > 0.5 and model.health["supervised_c"] > model.health["ceiling"]
    assert label_probe(model.get_latent_representation(), cells.obs["drug"])["accuracy"] > 1.5 / 40


def test_health_informative_embedding_does_not_warn():
    model = make_model(alpha=0, smoothing=0, augment=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(**QUICK | {"max_steps": 40, "lr": 1e-3})
    assert model.health["collapsed"] == 0
    assert 0.5 < model.health["spread"] <= 1
    assert 1.5 <= model.health["effective_rank"] <= 6
    assert model.health["supervised_c"] < model.health["ceiling"]
    assert "alive" in repr(model)


@pytest.mark.filterwarnings("ignore:z_c has")
def test_health_many_controls_do_not_lower_learned_c():
    """Six wells in ten are controls, as where all of DMSO is kept: nothing tells them apart from each other."""
    learned = []
    for control in ("DMSO", None):
        wells = make_wells(n_compounds=12, n_controls=18, n_features=20)
        SCBDModel.setup_anndata(wells, "compound", "plate", control=control)
        model = SCBDModel(wells, smoothing=0)
        model.train(max_steps=20, enable_progress_bar=False, accelerator="cpu", train_size=1.0)
        learned.append(model.health["learned_c"])
    assert learned[0] > 0.5 > 0 > learned[1]


def test_health_environment_c_equals_invariance_statistic():
    cells = make_cells()
    SCBDModel.setup_anndata(cells, "gene", "well")
    module = SCBDModel(cells, encoder="small", n_latent=6).module.eval()
    images = torch.from_numpy(cells.obsm["single_cell_images"][:24])
    y, e = torch.arange(24) % 2, torch.arange(24) // 2 % 3
    batch = {"inputs": images, "y": y, "e": e}
    images[e == 1] //= 4  # a shade of a well, which z_c does not see
    codes = e[:, None].numpy()
    module.estimate_environment_statistics(ReferenceBatches(lambda: [images], codes, np.ones_like(codes, dtype=bool)))
    z_c = module.content(module.prepare(images, e).within).detach()
    assert (z_c - module.content(module.preprocess(images))).abs().max() > 1e-3
    expected = scbd.nn.invariance_statistic([z_c], e, y)
    assert measure_health(module, batch, lambda: True, "")[0]["environment_c"] == pytest.approx(
        float(expected), abs=1e-5
    )


def shaded_cells(*, reverses: bool, n: int = 480) -> AnnData:
    """Noisy images whose brightness increases with the gene; in the second well, it decreases if ``reverses``."""
    rng = np.random.default_rng(0)
    gene, well = np.arange(n) % 4, np.arange(n) // 4 % 2
    shade = np.where((well == 1) & reverses, 3 - gene, gene)
    images = 30 * shade[:, None, None, None] + 40 * well[:, None, None, None] + rng.normal(60, 8, (n, 1, 16, 16))
    obs = pd.DataFrame({"gene": [f"gene_{code}" for code in gene], "well": [f"well_{code}" for code in well]})
    obs.index = obs.index.astype(str)
    return AnnData(obs=obs, obsm={"single_cell_images": images.clip(0, 255).astype(np.uint8)})


@pytest.mark.parametrize("reverses", [False, True])
def test_train_environments_change_meaning_of_features_warns_with_preset(reverses):
    cells = shaded_cells(reverses=reverses)
    SCBDModel.setup_anndata(cells, "gene", "well")
    messages = []
    for preset in ("screen", "domain_generalization"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SCBDModel(cells, encoder="small", preset=preset).train(**QUICK)
        messages.append([str(found.message) for found in caught if "change the meaning" in str(found.message)])
    assert [len(found) for found in messages] == [reverses, 0]
    assert not reverses or "preset='domain_generalization'" in messages[0][0]
