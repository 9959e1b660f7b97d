from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells

from scbd import cross_fit
from scbd.datasets import simulated_profiles
from scbd.metrics import aggregate, perturbation_effects, replicate_retrieval, retrieval
from scbd.model import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
QUIET: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu"}
WELLS: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "control": "DMSO", "max_steps": 4, **QUIET}
CELLS: dict[str, Any] = {"y_key": "gene", "e_key": "well", "control": "gene_0", "n_folds": 3, **QUIET} | {
    "model_kwargs": {"encoder": "small", "n_latent": 6},
    "max_steps": 3,
    "batch_size": 16,
}


@pytest.fixture
def models(monkeypatch):
    """Collect each model once it is trained."""
    found: list[SCBDModel] = []
    train = SCBDModel.train

    def train_and_record(self, **training):
        train(self, **training)
        found.append(self)

    monkeypatch.setattr(SCBDModel, "train", train_and_record)
    return found


@pytest.mark.parametrize(("make", "how"), [(make_wells, WELLS | {"position_key": "well"}), (make_cells, CELLS)])
def test_cross_fit_models_embed_only_perturbations_unseen_in_training(models, make, how):
    adata = make()
    y, names = adata.obs[how["y_key"]].to_numpy(), adata.obs_names
    found = cross_fit(adata, **how)
    control = found.obs[how["y_key"]] == how["control"]
    of_fold = [set(part) for _, part in found.obs[how["y_key"]].groupby(found.obs["scbd_fold"], observed=True)]
    assert len(models) == len(of_fold) == how.get("n_folds", 5)
    # one model embeds each perturbation; every model embeds the same held-out controls
    assert sorted(found.obs_names[~control]) == sorted(names[y != how["control"]])
    assert sum(len(fold - {how["control"]}) for fold in of_fold) == len(set(y)) - 1
    kept_out = {name.split(" fold ")[0] for name in found.obs_names[control]}
    assert control.sum() == len(kept_out) * len(models)
    assert 0.3 < len(kept_out) / (y == how["control"]).sum() < 0.7
    for model, fold in zip(models, of_fold, strict=True):
        learned = np.concatenate([model.train_indices, model.validation_indices])
        assert set(y[learned]) == {*y} - fold | {how["control"]} and not kept_out & {*names[learned]}
    if "position_key" in how:
        trained = adata.obs["well"].to_numpy()[models[0].train_indices]
        assert not {*found.obs["well"][control]} & {*trained}
    # embeddings of the last fold are those of the last model
    last = (found.obs["scbd_fold"] == str(len(models) - 1)).to_numpy()
    rows = names.get_indexer([name.split(" fold ")[0] for name in found.obs_names[last]])
    z = models[-1].get_latent_representation(indices=rows)
    np.testing.assert_allclose(found.obsm["X_scbd_c"][last], z, atol=1e-5)


def test_cross_fit_fold_in_e_key_metrics_compare_within_folds(monkeypatch):
    """Embeddings that encode only the fold have no significant effects once the fold is part of the environment."""
    points = iter(np.eye(4, dtype=np.float32))
    monkeypatch.setattr(
        SCBDModel, "get_latent_representation", lambda self, indices: np.tile(next(points), (len(indices), 1))
    )
    monkeypatch.setattr("scbd._workflows.cross_fit.train_or_load", lambda model, *args, **how: model)
    wells = make_wells(n_compounds=8, n_controls=8)
    wells.obs["scbd_split"] = "train"  # a column of an earlier run
    found = cross_fit(wells, **WELLS | {"n_folds": 4, "position_key": "well"})
    how: dict[str, Any] = {"y_key": "compound", "control": "DMSO", "n_permutations": 200}
    apart = perturbation_effects(found, "X_scbd_c", e_key=["scbd_fold", "plate"], **how)
    with pytest.warns(UserWarning, match="obs\\['scbd_fold'\\] names 4 models"):
        mixed = perturbation_effects(found, "X_scbd_c", e_key="plate", **how)
    assert (apart["magnitude_q"] == 1).all() and (mixed["magnitude_q"] < 0.05).all()
    position: dict[str, Any] = {"e_key": ["scbd_fold", "plate"], "position_key": ["scbd_fold", "well"]}
    replicates = replicate_retrieval(found, "X_scbd_c", **position, **how)  # without a warning
    assert len(replicates.table) == 8 and replicates.mean_average_precision == pytest.approx(replicates.chance)
    # controls of a position are retrieved within a fold: from the three plates other than the query's
    assert (replicates.floor_table["n_positives"] == 3).all()


def test_metrics_rows_of_several_models_warns():
    wells = make_wells()
    wells.obs["scbd_fold"] = np.arange(wells.n_obs) % 2
    wells.obs["target"] = wells.obs["compound"].astype(str).str[-1]
    how: dict[str, Any] = {"y_key": "compound", "control": "DMSO", "n_permutations": 20}
    gene: dict[str, Any] = {"gene_key": "compound", "control": "DMSO"}
    compare: list[Callable[[AnnData], object]] = [
        lambda rows: aggregate(rows, "X", **gene),
        lambda rows: retrieval(rows, "X", label_key="target", **how),
        lambda rows: perturbation_effects(rows, "X", **how),
        lambda rows: replicate_retrieval(rows, "X", e_key="plate", **how),
        lambda rows: replicate_retrieval(rows, "X", e_key=["scbd_fold", "plate"], position_key="well", **how),
    ]
    one = wells[wells.obs["scbd_fold"] == 0].copy()
    for compared in compare:
        with pytest.warns(UserWarning, match="are unrelated"):
            compared(wells)
        compared(one)  # without a warning


def test_cross_fit_inert_perturbations_are_not_significant():
    size: dict[str, Any] = {"n_controls": 12, "n_features": 24, "active": 0.5, "one_layout": False, "seed": 3}
    wells = simulated_profiles(24, 4, **size, effect_size=1.0)
    keys: dict[str, Any] = {"y_key": "perturbation", "control": "control"}
    model = {"encoder": "linear"}
    found = cross_fit(wells, **keys, e_key="plate", n_folds=3, model_kwargs=model, max_steps=20, **QUIET)
    effects = perturbation_effects(found, "X_scbd_c", **keys, e_key=["scbd_fold", "plate"], n_permutations=400)
    called = effects.index[effects["magnitude_q"] < 0.05]
    active = set(wells.uns["truth"]["network"]["target"])
    assert len(active & set(called)) >= 10 and len(set(called) - active) <= 1


def test_cross_fit_interrupted_resumes_with_equal_result(tmp_path, models, monkeypatch):
    how: dict[str, Any] = WELLS | {"n_folds": 3, "max_steps": 2}
    whole = cross_fit(make_wells(), **how)
    assert len(models) == 3
    stop = SCBDModel.train

    def train_once_then_interrupt(self, **training):
        if len(models) == 4:
            raise KeyboardInterrupt
        stop(self, **training)

    with monkeypatch.context() as patch:
        patch.setattr(SCBDModel, "train", train_once_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            cross_fit(make_wells(), **how, out=tmp_path)
    found = cross_fit(make_wells(), **how, out=tmp_path)
    assert len(models) == 6  # three without `out`, one before the interruption and two after it
    pd.testing.assert_frame_equal(found.obs, whole.obs)
    np.testing.assert_allclose(found.obsm["X_scbd_c"], whole.obsm["X_scbd_c"], atol=1e-5)
    with pytest.raises(ValueError, match="fold-0.* other"):
        cross_fit(make_wells(), **how | {"seed": 1}, out=tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_folds": 1}, "n_folds=1"),
        ({"n_folds": 14}, "n_folds=14, 13 perturbations"),
        ({"control": "PBS"}, "PBS"),
        ({"position_key": "half"}, "There are 2 positions"),
        ({"control": "few"}, "There are 3 controls"),
        ({"split": "part"}, "split"),
        ({"train_size": 0.5}, "train_size"),
        ({"resume": True}, "resume"),
        ({"setup_kwargs": {"y_key": "plate"}}, "y_key"),
        ({"setup_kwargs": {"control": "DMSO"}}, "control"),
        ({"model_kwargs": {"encoder": object()}}, "encoder"),
    ],
)
def test_cross_fit_invalid_settings_raises_before_training(monkeypatch, settings, named):
    monkeypatch.setattr(SCBDModel, "train", None)
    wells = make_wells()
    wells.obs["half"] = np.where(np.arange(wells.n_obs) % 2, "a", "b")
    wells.obs["compound"] = wells.obs["compound"].astype(str)
    wells.obs.loc[wells.obs_names[[0, 20, 40]], "compound"] = "few"
    with pytest.raises(ValueError, match=named):
        cross_fit(wells, **WELLS | settings)


def test_cross_fit_split_arguments_none_equal_defaults():
    none: dict[str, Any] = dict.fromkeys(("split", "train_size", "validation_size"))
    found, expected = (cross_fit(make_wells(), **WELLS | {"n_folds": 2} | more) for more in (none, {}))
    np.testing.assert_array_equal(found.obsm["X_scbd_c"], expected.obsm["X_scbd_c"])


def test_cross_fit_too_few_perturbations_for_folds_raises():
    with pytest.raises(ValueError, match="n_folds=2, 3 perturbations"):
        cross_fit(make_cells(), **CELLS | {"n_folds": 2})
