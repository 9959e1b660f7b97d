"""Presets of SCBDModel."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, assert_same, weights

from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.model._presets import PRESETS

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


@pytest.fixture
def cells():
    cells = make_cells()
    SCBDModel.setup_anndata(cells, "gene", "well")
    return cells


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_sets_arguments_that_are_not_given(cells, preset):
    model = SCBDModel(cells, "small", preset=preset, temperature=0.2)
    given = {**model.init_params_["non_kwargs"], **model.init_params_["kwargs"]["module_kwargs"]}
    assert given["encoder"] == "small" and given["temperature"] == 0.2
    expected = {name: value for name, value in PRESETS[preset].model.items() if name != "encoder"}
    assert {name: given[name] for name in expected} == expected


def test_preset_given_argument_overrides(cells):
    model = SCBDModel(cells, encoder="small", preset="paper", alpha=192, include_self=False, augment=True)
    assert model.module.alpha == 192 and not model.module.include_self and model.module.preprocess.augment
    assert model.module.invariance == "listing"
    assert "paper: invariance='listing'" in repr(model) and "alpha=1" not in repr(model)


def test_preset_all_settings_given_is_described(cells):
    given: dict[str, Any] = {"standardize": True, "standardize_by": "auto", "augment": True, "n_latent": 4}
    model = SCBDModel(cells, preset="domain_generalization", **given, style_target="e", smoothing=0)
    assert "domain_generalization: all of its settings are replaced" in repr(model)


class OwnArguments(SCBDModel):
    """Model with a preset, whose constructor does not have the arguments of SCBDModel."""

    def __init__(self, adata: Any = None, registry: Any = None, **kwargs: Any) -> None:
        super().__init__(adata, registry=registry, preset="domain_generalization", **kwargs)
        self.init_params_ = self._get_init_params(locals())


class OwnERM(ERMModel):
    """Classifier whose constructor has no encoder."""

    def __init__(self, adata: Any = None, registry: Any = None) -> None:
        super().__init__(adata, "small", registry)
        self.init_params_ = self._get_init_params(locals())


def test_preset_of_subclass_with_own_constructor_applies(cells, tmp_path):
    OwnArguments.setup_anndata(cells, "gene", "well")
    model = OwnArguments(cells, encoder="small")
    assert model._training_defaults["batch_size"] == 1_024 and model._training_defaults["lr"] == 1e-3
    assert "domain_generalization: standardize=False" in repr(model) and "small →" in repr(model)
    model.train(**QUICK)
    model.save(tmp_path / "model")
    assert repr(OwnArguments.load(tmp_path / "model", cells)) == repr(model) == repr(copy.deepcopy(model))
    OwnERM.setup_anndata(cells, "gene", "well")
    assert OwnERM(cells)._training_defaults["max_steps"] == 300 and "network   small" in repr(OwnERM(cells))


def test_preset_screen_equals_no_preset(cells):
    assert "preset" not in repr(SCBDModel(cells))
    signature = inspect.signature(SCBDModel).parameters
    assert signature["preset"].default == "screen" and signature["alpha"].default == "auto"


def test_preset_sets_training_that_is_not_given(cells):
    model = SCBDModel(cells, encoder="small", preset="paper")
    model.train(**{name: value for name, value in QUICK.items() if name != "lr"})
    assert model.training_settings_["length"] is None  # a constant learning rate
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 1e-4  # 1e-3 without the preset
    model = SCBDModel(cells, encoder="small", preset="domain_generalization")
    model.train(
        **{name: value for name, value in QUICK.items() if name not in ("batch_size", "max_steps")}, max_steps=1
    )
    assert model.training_settings_["batch_size"] == len(model.train_indices)
    assert model._training_defaults["max_steps"] == 1_500


def test_preset_is_saved_with_model(cells, tmp_path):
    model = SCBDModel(cells, encoder="small", preset="domain_generalization", n_latent=6)
    model.train(**QUICK)
    model.save(tmp_path / "model")
    loaded = SCBDModel.load(tmp_path / "model", cells)
    assert loaded.init_params_ == model.init_params_ and repr(loaded) == repr(model)
    assert_same(weights(loaded), weights(model))


def test_preset_unknown_name_raises(cells):
    with pytest.raises(ValueError, match="preset='generalization' is not known: use 'screen', 'domain_generalization'"):
        SCBDModel(cells, preset="generalization")  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["domain_generalization", "paper"])
def test_preset_of_images_with_features_raises(preset):
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", layer="X", control="DMSO")
    with pytest.raises(ValueError, match="is for images"):
        SCBDModel(wells, preset=preset)
