"""Several columns as environment: side by side, or crossed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from anndata import AnnData
from conftest import make_cells
from sklearn.metrics import adjusted_rand_score
from small_models import QUICK, assert_same, weights

import scbd
from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.datasets import simulated_profiles
from scbd.metrics import label_probe

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
SEVERAL = ["plate", "row"]
IMAGES, Y, E = torch.randint(0, 255, (24, 2, 16, 16)).byte(), torch.arange(24) % 2, torch.arange(24) // 2 % 4


def plates(n: int = 96) -> AnnData:
    """Cells in two rows of two plates."""
    cells = make_cells(n)
    cells.obs["row"] = [f"row_{i // 3 % 2}" for i in range(n)]
    return cells


def make(cells: AnnData | None = None, e_key: Any = SEVERAL, e_columns: Any = None, **kwargs: Any) -> SCBDModel:
    cells = plates() if cells is None else cells
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(cells, y_key="gene", e_key=e_key, e_columns=e_columns)
    return SCBDModel(cells, **{"encoder": "small", "n_latent": 6, **kwargs})


def columns_of(model: SCBDModel, e: torch.Tensor) -> list[torch.Tensor]:
    """Codes of plate and row as the names of the crossed environments have them."""
    names = [model.registry_["field_registries"]["e"]["state_registry"]["categories"][code].split(" × ") for code in e]
    return [torch.from_numpy(np.unique(column, return_inverse=True)[1]) for column in zip(*names, strict=True)]


def test_z_c_is_to_know_none_and_z_s_to_tell_all():
    model = make(alpha=0.5, smoothing=0)
    losses, inputs = model.module(IMAGES, Y, E), model.module.preprocess(IMAGES)
    z_c, passed = model.module.content.watched(inputs)
    each = columns_of(model, E)
    expected = scbd.nn.invariance_statistic([*passed, z_c], each, Y)
    torch.testing.assert_close(losses.parts["invariance_c"], expected)
    z_s = model.module.style(inputs)
    of_each = [scbd.nn.supervised_contrastive_loss(z_s, column) for column in each]
    torch.testing.assert_close(losses.parts["supervised_s"], sum(of_each) / 2)
    supervised = losses.parts["supervised_c"] + losses.parts["supervised_s"]
    torch.testing.assert_close(losses.loss, supervised + 0.5 * expected)


def test_contrastive_forms_are_the_mean_over_columns():
    model = make(alpha=1.0, invariance="mean", style_target="ye")
    losses, inputs = model.module(IMAGES, Y, E), model.module.preprocess(IMAGES)
    z_c, z_s = model.module.content(inputs), model.module.style(inputs)
    each = [scbd.nn.invariance_loss(z_c, column, reduction="mean") for column in columns_of(model, E)]
    torch.testing.assert_close(losses.parts["invariance_c"], sum(each) / 2)
    # the pair is with all of where a cell was
    torch.testing.assert_close(losses.parts["supervised_s"], scbd.nn.supervised_contrastive_loss(z_s, 4 * Y + E))


def test_crossed_columns_are_as_one_column_of_their_pairs():
    cells = plates()
    cells.obs["both"] = cells.obs["plate"].astype(str) + " × " + cells.obs["row"]
    crossed, one = make(cells, e_columns="crossed", alpha=0.1), make(cells, "both", alpha=0.1)
    for model in (crossed, one):
        model.train(**QUICK)
    assert_same(weights(crossed), weights(one))
    assert "4 environments (plate × row)" in repr(crossed)
    apart = make(cells, alpha=0.1)
    apart.train(**QUICK)
    assert not torch.equal(apart.module.content.projection[-1].weight, one.module.content.projection[-1].weight)
    assert "environments side by side: 2 of plate, 2 of row" in repr(apart)


def test_a_saved_model_knows_what_its_columns_are(tmp_path):
    for e_columns in ("side_by_side", "crossed"):
        make(e_columns=e_columns).save(tmp_path / e_columns)
    apart, crossed = (SCBDModel.load(tmp_path / name, plates()) for name in ("side_by_side", "crossed"))
    assert crossed.module.covariates is None
    assert apart.module.covariates is not None and len(apart.module.covariates) == 4
    # an older scbd did not say, and crossed them
    old = make()
    del old.registry_["setup_args"]["e_columns"]
    old.save(tmp_path / "old")
    for data in (False, plates()):
        SCBDModel.load(tmp_path / "old", data).save(tmp_path / "again", overwrite=True)
        loaded = SCBDModel.load(tmp_path / "again", data)
        assert loaded.module.covariates is None
        assert "4 environments (plate × row)" in repr(loaded)


def test_new_environments_are_learned_from():
    model = make()
    new = plates()
    new.obs["row"] = new.obs["row"].replace("row_1", "row_2")
    model.adata = new
    model.train(**QUICK)
    assert model.module.covariates is not None
    assert model.module.covariates.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [1, 2]]
    assert np.isfinite(model.history["train_loss"].to_numpy(dtype=float)).all()


def test_a_run_is_resumed_with_the_columns_it_was_begun_with(tmp_path):
    make().train(**QUICK, checkpoint_dir=tmp_path)
    again = QUICK | {"max_steps": 8, "checkpoint_dir": tmp_path, "ckpt_path": "last"}
    with pytest.raises(ValueError, match="other settings .e_columns: 'side_by_side' → None"):
        make(e_columns="crossed").train(**again)
    make().train(**again)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="e_columns='both' is not known: use 'side_by_side', or 'crossed'"):
        make(e_columns="both")
    how: dict[str, Any] = {"y_key": "gene", "e_key": SEVERAL}
    with pytest.raises(ValueError, match="ERMModel takes one environment per cell: use e_columns='crossed'"):
        ERMModel.setup_anndata(plates(), **how, e_columns="side_by_side")
    cells = plates()
    for e_columns in (None, "crossed"):  # the same
        ERMModel.setup_anndata(cells, **how, e_columns=e_columns)
        assert "4 environments (plate × row)" in repr(ERMModel(cells, encoder="small"))


@pytest.fixture(scope="module")
def arrayed() -> AnnData:
    """One compound a well, in a layout of its own on each of 32 plates, whose edges and gradients are all alike."""
    how: dict[str, Any] = {"one_layout": False, "n_features": 48, "effect_size": 1.0, "well_effect": 0.0}
    wells = simulated_profiles(64, 32, position_effect=2.5, **how)
    wells.obs["split"] = np.where(wells.obs["plate"].cat.codes < 16, "train", "test")
    return wells


def train(wells: AnnData, e_key: Any, e_columns: Any = None, *, max_steps: int, **kwargs: Any) -> SCBDModel:
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(wells, "perturbation", e_key, e_columns=e_columns, control="control")
    model = SCBDModel(wells, **kwargs)
    model.train(max_steps=max_steps, batch_size=1024, split="split", enable_progress_bar=False, accelerator="cpu")
    return model


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_a_linear_z_s_begins_with_plates_and_positions(arrayed):
    """Of their cross there is one well each, of which nothing can be learned."""
    model = train(arrayed, ["plate", "well"], encoder="linear", max_steps=1)
    z_s = model.get_latent_representation(block="s")
    assert label_probe(z_s, arrayed.obs["plate"])["f1"] > 0.85
    assert label_probe(z_s, arrayed.obs["well"])["f1"] > 0.05  # by chance .01
    with pytest.raises(ValueError, match="Each of the 1536 training cells has a label of its own"):
        train(arrayed, ["plate", "well"], "crossed", encoder="linear", max_steps=1)


def test_plate_and_position_are_both_forgotten(arrayed):
    """On plates that nobody saw. To forget the plate alone leaves the position."""
    new = arrayed[arrayed.obs["split"] == "test"].copy()
    plate, well = {}, {}
    for name, e_key in (("plate", "plate"), ("both", ["plate", "well"])):
        model = train(arrayed, e_key, encoder="mlp", n_latent=16, alpha=0.05, style_target=None, max_steps=40)
        z_c = model.get_latent_representation(new)
        plate[name], well[name] = (label_probe(z_c, new.obs[key])["f1"] for key in ("plate", "well"))
    assert label_probe(new.X, new.obs["plate"])["f1"] > 0.8  # by chance .06
    assert plate["plate"] < 0.15 and plate["both"] < 0.15
    assert well["plate"] > 0.05 and well["both"] < 0.02  # by chance .01


def bright_days(n: int = 96) -> AnnData:
    """Every other cell was photographed on a brighter day that nobody wrote down."""
    cells = make_cells(n)
    images = cells.obsm["single_cell_images"].astype(int)
    cells.obs["day"] = [f"day_{i % 2}" for i in range(n)]
    images[1::2, 1] += 100
    cells.obsm["single_cell_images"] = np.clip(images, 0, 255).astype("uint8")
    return cells


def test_environments_that_nobody_wrote_down_are_inferred():
    cells = bright_days()
    SCBDModel.setup_anndata(cells, y_key="gene", infer_environments=2)
    inferred = cells.obs["inferred_environment"]
    assert adjusted_rand_score(cells.obs["day"], inferred) == 1
    model = SCBDModel(cells, encoder="small", n_latent=6)
    setup = model.registry_["setup_args"]
    assert setup["e_key"] == "inferred_environment" and setup["infer_environments"] is None
    model.train(**QUICK)
    # new cells need none
    new = make_cells(12, seed=3)
    assert model.get_latent_representation(new).shape == (12, 6) and "inferred_environment" not in new.obs
    model.adata = new
    with pytest.raises(KeyError, match="has no 'inferred_environment' .* share no names .* infer once"):
        model.train(max_steps=1)


def test_inferred_environments_stand_beside_known_ones():
    cells = bright_days()
    for _ in range(2):  # setting up again does not take the inferred for known ones
        SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", infer_environments=2)
        assert adjusted_rand_score(cells.obs["day"], cells.obs["inferred_environment"]) == 1
        model = SCBDModel(cells, encoder="small", n_latent=6)
        assert model.registry_["setup_args"]["e_key"] == ["well", "inferred_environment"]
        assert model.module.covariates is not None and model.module.covariates.shape[1] == 2
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well", infer_environments=2)
    assert ERMModel(cells, encoder="small").registry_["setup_args"]["e_columns"] == "crossed"


def test_neither_known_nor_inferred():
    with pytest.raises(ValueError, match="e_key=None: name the column of obs .* or give infer_environments=2"):
        SCBDModel.setup_anndata(make_cells(), y_key="gene")
    with pytest.raises(ValueError, match="n_environments=1: give"):
        SCBDModel.setup_anndata(make_cells(), y_key="gene", infer_environments=1)
