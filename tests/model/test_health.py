"""Whether z_c is alive at the end of training, and what to do where it is not."""

from __future__ import annotations

import logging
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from small_models import QUICK, make_model
from torch import nn

from scbd import SCBDModel
from scbd.metrics import label_probe
from scbd.model._health import environment_left


class Noise(nn.Module):
    """An encoder whose features have nothing to do with the images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(images), 6)


def test_a_collapsed_embedding_warns_and_names_the_remedy():
    model = make_model(alpha=1e4, invariance="listing", smoothing=0)
    remedy = r"\. alpha 10000 is too high for batches of 48: try invariance='variance' .* or about 1000\."
    with pytest.warns(UserWarning, match=f"z_c has collapsed .*{remedy}"):
        model.train(**QUICK | {"max_steps": 200, "lr": 3e-3, "batch_size": 48}, load_best=False)
    assert model.health["collapsed"] == 1
    assert model.health["spread"] < 0.05
    assert "COLLAPSED" in repr(model)


def test_an_embedding_that_tells_nothing_warns_without_being_a_point():
    model = make_model(alpha=0, encoder=Noise())
    with pytest.warns(UserWarning, match=r"z_c has learned to tell few .*: it has -\d+% of .* \(spread 0\.[1-9]"):
        model.train(**QUICK)
    assert model.health["collapsed"] == 0 and model.health["learned_c"] <= 0


@pytest.mark.parametrize(
    ("alpha", "remedy"),
    [(0, r"no invariance to blame \(alpha 0\): raise lr"), (0.5, r"alpha 0.5 is too high .* 'auto', or about 0.01")],
)
def test_the_remedy_depends_on_what_is_to_blame_after_the_length_of_the_run(cells, alpha, remedy):
    model = make_model(cells, alpha=alpha)
    torch.nn.init.zeros_(model.module.content.projection[-1].weight)
    with pytest.warns(UserWarning, match=rf"z_c has collapsed .* First train for longer: \d+ steps? may .*{remedy}"):
        model.train(**QUICK | {"lr": 0.0})


def test_a_linear_map_of_single_cells_is_told_of_another_encoder():
    """More steps and a higher rate, as the warning had it, left the same warning."""
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"drug": rng.integers(8, size=800), "plate": rng.integers(2, size=800)}).astype(str)
    cells = AnnData(rng.normal(size=(800, 6)).astype(np.float32), obs=obs.set_index(obs.index.astype(str)))
    SCBDModel.setup_anndata(cells, y_key="drug", e_key="plate", layer="X")
    with pytest.warns(
        UserWarning, match="few .* Of single cells, encoder='mlp' learns more .* If many cells are controls"
    ):
        SCBDModel(cells).train(**QUICK | {"batch_size": 64})


def test_memorised_cells_are_told_from_an_embedding_that_tells_nothing():
    """Labels that images do not show are told of training cells all the same."""
    noise = make_cells()
    noise.obs["gene"] = np.random.default_rng(0).permutation(noise.obs["gene"])
    model = make_model(noise, alpha=0, smoothing=0, style_target=None)
    said = r"few perturbations of validation cells apart, .* memorised the training cells: .* \d+% .* augment=True"
    with pytest.warns(UserWarning, match=said):
        model.train(**QUICK | {"max_steps": 300, "lr": 3e-3, "batch_size": 48}, validate_every=300)


def test_an_embedding_that_tells_a_few_of_many_is_not_said_to_have_learned_nothing():
    """Three of forty are told apart, twice as often as by chance; the loss of the others is above that of a point."""
    rng = np.random.default_rng(0)
    drug, values = rng.integers(40, size=2000), rng.normal(size=(2000, 20)).astype(np.float32)
    values[drug < 3, 0] += 6 * (drug[drug < 3] + 1)
    obs = pd.DataFrame({"drug": drug, "plate": rng.integers(2, size=2000)}).astype(str)
    cells = AnnData(values, obs=obs.set_index(obs.index.astype(str)))
    SCBDModel.setup_anndata(cells, y_key="drug", e_key="plate", layer="X")
    model = SCBDModel(cells, encoder="linear")
    with pytest.warns(UserWarning, match="few .* Whether some are told apart, scbd.metrics.label_probe") as caught:
        model.train(**QUICK | {"max_steps": 20, "batch_size": 256})
    assert not any("nothing" in str(warning.message) for warning in caught)
    assert model.health["spread"] > 0.5 and model.health["supervised_c"] > model.health["ceiling"]
    assert label_probe(model.get_latent_representation(), cells.obs["drug"])["accuracy"] > 1.5 / 40


def test_a_living_embedding_does_not_warn():
    model = make_model(alpha=0, smoothing=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(**QUICK | {"max_steps": 40, "lr": 1e-3})
    assert model.health["collapsed"] == 0
    assert 0.5 < model.health["spread"] <= 1
    assert 1.5 <= model.health["effective_rank"] <= 6
    assert model.health["supervised_c"] < model.health["ceiling"]
    assert "alive" in repr(model)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_run_without_a_logged_step_is_judged():
    """Where z_c tells nothing, the warning asks what was logged of training cells."""
    model = make_model(alpha=0, encoder=Noise())
    with pytest.warns(UserWarning, match="z_c has learned to tell few perturbations apart"):
        model.train(**QUICK | {"max_steps": 5}, log_every_n_steps=50, validate_every=5)
    assert "train_loss" not in model.history


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
@pytest.mark.parametrize(
    ("shown", "alpha", "told"), [(1, "auto", True), (0, "auto", False), (1, 0.0, False)], ids=["left", "blind", "asked"]
)
def test_environments_that_auto_left_are_told_of(caplog, shown, alpha, told):
    rng, cells = np.random.default_rng(0), make_cells(400)
    wells = cells.obs["well"].cat.codes.to_numpy()
    cells.obsm["X"] = shown * np.eye(3)[wells].repeat(2, axis=1) + rng.normal(size=(400, 6)) / 10
    cells.obs["gene"] = rng.permutation(cells.obs["gene"].astype(str))  # labels say nothing
    SCBDModel.setup_anndata(cells, "gene", "well", obsm_key="X")
    model = SCBDModel(cells, encoder="mlp", alpha=alpha, style_target=None)
    with caplog.at_level(logging.WARNING, logger="scbd"):
        model.train(**QUICK | {"max_steps": 5})
    assert (model.health["environment_c"] > 5) == bool(shown)
    assert ("z_c still shows its environments" in caplog.text) == told


@given(ended=st.floats(0, 0.05))
def test_alphas_to_compare_are_above_that_of_auto(ended):
    health = {"collapsed": 0.0, "environment_c": 9.0, "final_alpha": ended}
    told = environment_left(health, SimpleNamespace(alpha_rule="auto"))  # type: ignore[arg-type]
    one, two = (float(found) for found in re.findall(r"alpha=([\d.]+\d)", told))
    assert ended < one < two
