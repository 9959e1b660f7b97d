"""Arguments of ``train``: wrong ones get a sentence before any work, those of scvi-tools an answer."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import QUICK, assert_same, make_model, weights

from scbd import SCBDModel
from scbd.data import Split
from scbd.model._arguments import _ELSEWHERE

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


@pytest.fixture(scope="module")
def model() -> SCBDModel:
    return make_model()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"max_steps": "10"}, "max_steps='10': give a whole number, 1 or larger"),
        ({"max_steps": None, "max_epochs": 1.5}, "max_epochs=1.5: give a whole number, 1 or larger"),
        ({"max_steps": None, "max_epochs": 0}, "max_epochs=0: give"),
        ({"max_steps": True}, "max_steps=True: give"),
        ({"max_epochs": 2}, "max_steps or max_epochs, not both"),
        ({"batch_size": 24.0}, "batch_size=24.0: give a whole number, 2 or larger"),
        ({"perturbations_per_batch": 0}, "perturbations_per_batch=0: give"),
        ({"validate_every": 0}, "validate_every=0: give"),
        ({"early_stopping_patience": 0}, "early_stopping_patience=0: give"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or larger"),
        ({"lr": -1e-3}, "lr=-0.001: give a number, 0 or larger"),
        ({"lr": float("nan")}, "lr=nan: give"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1': give"),
        ({"train_size": "0.9"}, "train_size='0.9': give a number from 0 to 1"),
        ({"plan_kwargs": {"lr": -1}}, "lr=-1: give"),
        ({"plan_kwargs": {"n_steps_alpha_warmup": 1.5}}, "n_steps_alpha_warmup=1.5: give"),
        (
            {"precision": "foo"},
            "precision='foo' would leave other weights than float32: use one of auto, 32-true, bf16",
        ),
        ({"precision": "64-true"}, "precision='64-true' would leave"),
        ({"precision": "bf16-true"}, "precision='bf16-true' would leave"),
        ({"limit_train_batches": 5}, "limit_train_batches=5 is no argument here: the same .* use max_steps"),
        ({"limit_train_batches": 1}, "limit_train_batches=1 is no"),
        ({"num_sanity_val_steps": 2}, "num_sanity_val_steps=2 is no argument here: nothing is validated before"),
        ({"limit_val_batches": 0, "load_best": True}, "load_best looks at validation cells, and limit_val_batches=0"),
        ({"limit_val_batches": 0.0, "early_stopping": True}, "early_stopping looks at validation cells, and limit"),
        ({"enable_checkpointing": True}, "enable_checkpointing=True needs a place: give checkpoint_dir"),
        ({"max_step": 3}, r"train\(\) has no argument 'max_step': did you mean 'max_steps'"),
        ({"gradient_clip": 1}, r"train\(\) has no argument 'gradient_clip': did you mean 'gradient_clip_val'"),
        ({"colour": "red"}, r"train\(\) has no argument 'colour', and neither has lightning.pytorch.Trainer"),
        ({"plan_kwargs": {"warmup": 3}}, "plan_kwargs has no argument 'warmup'"),
        (
            {"plan_kwargs": {"reduce_lr_on_plateau": True}},
            "reduce_lr_on_plateau=True is no argument here: the learning",
        ),
        ({"use_gpu": True}, "use_gpu=True is no argument here: use accelerator='gpu'"),
        ({"check_val_every_n_epoch": 1}, "use validate_every, in steps"),
        ({"datasplitter_kwargs": {"shuffle_set_split": False}}, r"give split=scbd.data.Split\("),
        ({"shuffle_set_split": False}, r"give split=scbd.data.Split\("),
        ({"early_stopping_monitor": "elbo_validation"}, "'validation_loss' is watched"),
        ({"early_stopping_min_delta": 0.1}, "EarlyStopping"),
        ({"datamodule": object()}, "the data are those of setup_anndata"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(model, how, said):
    before = weights(model)
    with pytest.raises((TypeError, ValueError), match=said):
        model.train(**QUICK | how)
    assert_same(weights(model), before)
    assert not model.is_trained
    assert not model.module.preprocess.fitted


def test_arguments_of_scvi_tools_that_ask_for_what_is_done_are_taken():
    for asked in ({name: values[0] for name, (values, _) in _ELSEWHERE.items() if values},):
        plan = {name: asked.pop(name) for name in ("reduce_lr_on_plateau", "optimizer")}
        model = make_model()
        model.train(**QUICK | {"max_steps": 1}, **asked, plan_kwargs=plan, train_size=None, seed=None)
        assert model.training_settings_["steps"] == 1


def test_rates_may_be_given_as_scvi_tools_takes_them():
    model = make_model()
    model.train(**QUICK | {"max_steps": np.int64(1)}, plan_kwargs={"lr": 0.5, "weight_decay": 0.25})
    assert model.training_settings_["lr"] == 0.5 and model.training_settings_["weight_decay"] == 0.25
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_the_length_of_a_run_has_a_name(model):
    """The first argument of scvi-tools' train is max_epochs: a copied line would train for steps in place of epochs."""
    for method in (model.train, model.train_decoder):
        with pytest.raises(TypeError, match="positional argument"):
            method(400)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"batch_size": 200}, "batch_size=200 is larger than the 85 cells"),
        ({"max_epochs": 2}, "max_steps or max_epochs, not both"),
        ({"max_steps": 0}, "max_steps=0: give a whole number, 1 or larger"),
        ({"split": "fold"}, "no column 'fold' to split by"),
        ({"train_size": 1.0, "early_stopping": True}, "there are no validation cells"),
        ({"split": 0.9}, "split must be a scbd.data.Split or a column of obs, got float"),
        ({"split": Split(train=np.arange(90, 120))}, "The split names row 119, there are 96 cells"),
    ],
)
def test_bad_training_settings_are_said_before_any_work(kwargs, said):
    model = make_model()
    before = weights(model)
    with pytest.raises((ValueError, KeyError, TypeError), match=said):
        model.train(**QUICK | kwargs)
    after = weights(model)
    assert_same({k: before[k] for k in before if "weight" in k}, {k: after[k] for k in after if "weight" in k})
    assert not model.is_trained
