"""Arguments and attributes that models lack: errors name what is public, and what to use in place of scvi-tools'."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
from conftest import make_cells
from helpers.small_models import QUICK, make_model

from scbd import SCBDModel
from scbd.baselines import ERMModel, FishModel, VAEModel
from scbd.model import ImageModel
from scbd.model._arguments import REPLACEMENTS, UnavailableAttribute, constructor_names, keyword_names
from scbd.model._train import TRAINER_ARGUMENTS

MODELS: list[Any] = [SCBDModel, ERMModel, VAEModel]


def public_methods(cls: type) -> list[str]:
    """Methods of a model that scbd defines."""
    owners = [base for base in cls.__mro__ if base.__module__.startswith("scbd")]
    found = {
        name for owner in owners for name, value in vars(owner).items() if not isinstance(value, UnavailableAttribute)
    }
    return sorted(n for n in found if not n.startswith("_") and inspect.isroutine(inspect.getattr_static(cls, n)))


def with_methods() -> list[tuple[Any, str]]:
    return [(cls, name) for cls in MODELS for name in public_methods(cls)]


@pytest.mark.parametrize(("cls", "method"), with_methods(), ids=lambda one: getattr(one, "__name__", one))
def test_public_method_unknown_argument_raises_without_private_class_name(cls, method):
    model = cls.__new__(cls)
    with pytest.raises(TypeError) as raised:
        getattr(model, method)(no_such_argument=1)
    assert str(raised.value).startswith(f"{cls.__name__}.{method} has no argument 'no_such_argument'.")


def test_public_methods_include_inherited_methods():
    assert {"setup_anndata", "train", "load", "reconstruct"} <= set(public_methods(VAEModel))


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("setup_anndata", {"labels_key": "gene", "batch_key": "well"}, ["'labels_key': use y_key", "use e_key"]),
        ("setup_anndata", {"y_key": "gene", "e_key": "well", "size_factor_key": "n"}, ["leave it out"]),
        ("setup_anndata", {"y_kye": "gene"}, ["Did you mean 'y_key'"]),
        ("setup_anndata", {"alpha": 1}, [r"SCBDModel\(adata, alpha=…\)"]),
        ("train", {"shuffle_set_split": False}, ["use split"]),
        ("train", {"early_stopping_monitor": "elbo_validation"}, ["validation_loss"]),
        ("train", {"n_epochs_kl_warmup": 10}, ["n_steps_alpha_warmup"]),
        ("train", {"lr_decay": False}, [r"train\(plan_kwargs=\{'lr_decay': …\}\)"]),
        ("train", {"check_val_every_n_epochs": 3}, ["Did you mean 'check_val_every_n_epoch'"]),
        ("train_decoder", {"datasplitter_kwargs": {}}, ["use split"]),
        ("train_decoder", {"max_step": 2}, ["Did you mean 'max_steps'"]),
        ("get_latent_representation", {"give_mean": True, "mc_samples": 5}, ["'give_mean'", "'mc_samples'"]),
        ("predict", {"soft": True}, ["return_proba=True"]),
        ("minify_adata", {"minified_data_type": "latent_posterior"}, ["leave it out"]),
        ("save", {"dir_path": "folder", "overwrit": True}, ["Did you mean 'overwrite'"]),
        ("load", {"dir_path": "folder", "use_gpu": True}, ["use accelerator and device"]),
    ],
)
def test_unknown_argument_of_scvi_tools_raises_with_replacement(method, given, expected):
    args = (make_cells(),) if method == "setup_anndata" else ()
    with pytest.raises(TypeError) as raised:
        getattr(SCBDModel.__new__(SCBDModel), method)(*args, **given)
    for part in expected:
        assert re.search(part, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda model: model.setup_anndata(make_cells()), "SCBDModel.setup_anndata: .*'y_key'"),
        (lambda model: model.swap_blocks([0]), "SCBDModel.swap_blocks: .*'style'"),
        (lambda model: model.train(400), "SCBDModel.train: too many positional arguments.* max_epochs"),
        (lambda model: model.minify_adata("latent_posterior"), "SCBDModel.minify_adata: too many positional"),
        (lambda model: type(model).train(max_steps=2), "train belongs to a model"),
    ],
)
def test_missing_or_surplus_argument_raises_with_name_of_public_method(call, expected):
    with pytest.raises(TypeError, match=expected):
        call(SCBDModel.__new__(SCBDModel))


@pytest.mark.parametrize("cls", MODELS)
def test_constructor_unknown_argument_raises_with_name_of_model(cls):
    cells = make_cells()
    cls.setup_anndata(cells, y_key="gene", e_key="well")
    with pytest.raises(TypeError, match=f"{cls.__name__} has no argument 'n_hidden'.*encoder"):
        cls(cells, n_hidden=128)


@pytest.mark.parametrize("method", [name for name in REPLACEMENTS if name.islower() and hasattr(SCBDModel, name)])
def test_replacements_explain_absent_arguments_and_name_existing_ones(method):
    known = set(inspect.signature(getattr(SCBDModel, method)).parameters)
    if method.startswith("train"):
        known |= {*keyword_names(SCBDModel.train), *TRAINER_ARGUMENTS}
    assert not known & set(REPLACEMENTS[method])
    known |= set(constructor_names(SCBDModel.traits.plan))
    for remedy in REPLACEMENTS[method].values():
        if named := re.match(r"use (\w+)", remedy):
            assert named[1] in known or hasattr(SCBDModel, named[1]), remedy


def test_constructor_names_of_subclass_include_arguments_of_base():
    assert {"lr_decay", "meta_lr"} <= set(constructor_names(FishModel.traits.plan))


def test_explain_arguments_keeps_signature_of_method():
    assert list(inspect.signature(SCBDModel.setup_anndata).parameters)[:3] == ["adata", "y_key", "e_key"]
    assert inspect.signature(SCBDModel.predict).return_annotation == "np.ndarray"
    cells = make_cells()
    SCBDModel.setup_anndata(cells, "gene", "well")
    # scvi-tools records what it finds among the local variables of setup_anndata
    recorded = SCBDModel(cells, encoder="small").registry["setup_args"]
    assert set(recorded) == set(inspect.signature(SCBDModel.setup_anndata).parameters) - {"adata", "kwargs"}


@pytest.mark.filterwarnings("ignore:z_c has")
def test_warnings_point_to_line_of_user():
    def warned_at(call) -> set[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert caught
        return {warning.filename for warning in caught}

    cells = make_cells()
    cells.obs["well"] = cells.obs["gene"].astype(str) + " well"
    assert warned_at(lambda: SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")) == {__file__}
    model = make_model()
    model.train(**QUICK)
    assert warned_at(lambda: model.train(**QUICK, seed=1, train_size=0.5)) == {__file__}


# ---- attributes of scvi-tools' models


ABSENT = [n for n, value in vars(ImageModel).items() if isinstance(value, UnavailableAttribute) and n != "init_params_"]


@pytest.mark.parametrize("name", ABSENT)
def test_unavailable_attribute_of_scvi_tools_raises_with_remedy(name):
    for owner in (SCBDModel, SCBDModel.__new__(SCBDModel)):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"SCBDModel has no '{name}': .*[.]$"):
            getattr(owner, name)


def test_unavailable_attributes_include_query_methods():
    assert {"load_query_data", "prepare_query_anndata", "convert_legacy_save", "get_normalized_expression"} <= {*ABSENT}
