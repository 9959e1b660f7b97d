"""SCBDModel as its users meet it: both blocks, several environments, and features."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
import torch
from anndata import AnnData
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, assert_same, make_model, weights

import scbd
from scbd import SCBDModel
from scbd.corrections import standardize_by_environment
from scbd.data import open_screen
from scbd.datasets import simulated_profiles
from scbd.metrics import label_probe
from scbd.model._interfaces import PreparedInputs
from scbd.nn._encoders import on_sphere

# a few steps leave BatchNorm's statistics unsettled and z_c squeezed
pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
IMAGES, Y, E = torch.randint(0, 255, (24, 2, 16, 16)).byte(), torch.arange(24) % 2, torch.arange(24) // 2 % 3
WELLS: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "control": "DMSO", "position_key": "well"}
WHOLE: dict[str, Any] = QUICK | {"train_size": 1.0, "batch_size": None}


def cells_in_plates(n: int = 96) -> AnnData:
    """Cells in two rows of two plates."""
    cells = make_cells(n)
    cells.obs = cells.obs.assign(row=[f"row_{i // 3 % 2}" for i in range(n)])
    return cells


def make(cells: AnnData | None = None, setup: dict[str, Any] | None = None, **kwargs: Any) -> SCBDModel:
    cells = cells_in_plates() if cells is None else cells
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(cells, **{"y_key": "gene", "e_key": "well"} | (setup or {}))
    return SCBDModel(cells, **{"encoder": "small", "n_latent": 6, "alpha": 0.1, **kwargs})


def of_wells(wells: AnnData | None = None, setup: dict[str, Any] = WELLS, **kwargs: Any) -> SCBDModel:
    wells = make_wells() if wells is None else wells
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(wells, **setup)
    return SCBDModel(wells, **kwargs)


def test_scbd_model_five_lines_train_and_embed(trained):
    z_c, z_s = trained.get_latent_representation(), trained.get_latent_representation(block="s")
    assert z_c.shape == z_s.shape == (96, 6)
    assert z_c.dtype == np.float32
    as_it_is = trained.get_latent_representation(center=None)
    for z in (as_it_is, z_s):
        np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-5)
    left = trained.results_.offsets.state["shift"][trained.adata.obs["well"].cat.codes]
    assert np.abs(left).max() > 1e-3
    np.testing.assert_allclose(z_c, as_it_is - left, atol=1e-6)
    assert not np.allclose(z_c, z_s)
    assert trained.get_latent_representation(representation="intermediate").shape == (96, 256)


def test_train_z_c_predicts_perturbation_and_z_s_environment():
    cells = make_cells(200)
    model = make_model(cells, alpha=0.0)
    model.train(**QUICK | {"max_steps": 60, "lr": 2e-3, "batch_size": 100})
    for block, column in (("c", "gene"), ("s", "well")):
        z, label = model.get_latent_representation(block=block), cells.obs[column]
        predicted = scbd.metrics.predict_labels(z, label, z, classifier="nearest_mean")
        assert (predicted == label).mean() > 0.9


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("positives", "All cells of the same perturbation"),
        ("intensty", "'intensity'"),
        ("Whitening", "'whitening'"),
        ("depth", "'depth'"),
    ],
)
def test_scbd_model_unknown_arguments_raise(given, named):
    with pytest.raises(TypeError, match=named):
        make(None, None, **{given: 1})


def columns_of(model: SCBDModel, e: torch.Tensor) -> list[torch.Tensor]:
    """Codes of plate and row as the names of the crossed environments have them."""
    names = [model._registered("e")["categories"][code].split(" × ") for code in e]
    return [torch.from_numpy(np.unique(column, return_inverse=True)[1]) for column in zip(*names, strict=True)]


def told_of_environments(model: SCBDModel, codes: torch.Tensor) -> PreparedInputs:
    """What a model makes of images when it knows their environments, of each column, all of whose cells differ."""
    scaling: Any = model.module.preprocess.environments
    rng = torch.Generator().manual_seed(0)
    n_codes = int(codes.max()) + 1
    differs = torch.randn(n_codes, codes.shape[1], 2, generator=rng)
    values = torch.randn(512, 2, generator=rng)
    of_values = torch.randint(n_codes, (512, codes.shape[1]), generator=rng)
    for column in range(codes.shape[1]):
        values += differs[of_values[:, column], column]
    scaling.learn(lambda: [values], of_values, torch.ones_like(of_values, dtype=torch.bool))
    whole = model.module.preprocess(IMAGES)
    assert (scaling(whole, codes) - whole).abs().mean() > 0.1
    return PreparedInputs(whole, scaling(whole, codes))


def test_separate_columns_losses_are_computed_per_column():
    """Each column by itself."""
    model = make(None, {"e_key": ["plate", "row"]}, alpha=0.5, smoothing=0, augment=False)
    labels = columns_of(model, E)
    prepared = told_of_environments(model, torch.stack(labels, 1))
    losses = model.module(IMAGES, Y, E)
    h, passed = model.module.content.forward_with_intermediates(prepared.within)
    expected = scbd.nn.invariance_statistic([*passed, on_sphere(h)], labels, Y)
    torch.testing.assert_close(losses.parts["invariance_c"], expected)
    z_s = model.module.style(prepared.whole)
    of_each = [scbd.nn.supervised_contrastive_loss(z_s, column, include_self=False) for column in labels]
    torch.testing.assert_close(losses.parts["supervised_s"], sum(of_each) / len(of_each))
    supervised = losses.parts["supervised_c"] + losses.parts["supervised_s"]
    torch.testing.assert_close(losses.loss, supervised + 0.5 * expected)


def test_separate_columns_contrastive_invariance_is_mean_over_columns():
    how: dict[str, Any] = {"alpha": 1.0, "invariance": "listing", "style_target": "ye", "augment": False}
    model = make(None, {"e_key": ["plate", "row"]}, **how)
    labels = columns_of(model, E)
    prepared = told_of_environments(model, torch.stack(labels, 1))
    losses = model.module(IMAGES, Y, E)
    z_c, z_s = model.module.content(prepared.within), model.module.style(prepared.whole)
    each = [scbd.nn.invariance_loss(z_c, column, include_self=False) for column in labels]
    torch.testing.assert_close(losses.parts["invariance_c"], sum(each) / 2)
    # the pair is with all of where a cell was
    of_pairs = scbd.nn.supervised_contrastive_loss(z_s, 3 * Y + E, include_self=False)
    torch.testing.assert_close(losses.parts["supervised_s"], of_pairs)


def test_crossed_columns_equal_single_column_of_pairs():
    cells = cells_in_plates()
    cells.obs["both"] = cells.obs["plate"].astype(str) + " × " + cells.obs["row"]
    several = {"e_key": ["plate", "row"]}
    crossed, one, apart = (make(cells, s) for s in (several | {"e_columns": "crossed"}, {"e_key": "both"}, several))
    for model in (crossed, one, apart):
        model.train(**QUICK)
    assert_same(weights(crossed), weights(one))
    assert not torch.equal(apart.module.content.projection[-1].weight, one.module.content.projection[-1].weight)
    assert "4 environments (plate × row)" in repr(crossed)
    assert "side by side: 2 of plate, 2 of row" in repr(apart)


def test_separate_columns_are_saved_and_new_environments_are_added(tmp_path):
    for e_columns in ("side_by_side", "crossed"):
        make(None, {"e_key": ["plate", "row"], "e_columns": e_columns}).save(tmp_path / e_columns)
    crossed, apart = (SCBDModel.load(tmp_path / name, cells_in_plates()) for name in ("crossed", "side_by_side"))
    assert crossed.module.covariates is None and apart.module.covariates is not None
    new = cells_in_plates()
    new.obs["row"] = new.obs["row"].replace("row_1", "row_2")
    apart.adata = new
    apart.train(**QUICK)
    assert apart.module.covariates.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [1, 2]]


def test_resume_with_other_e_columns_raises(tmp_path):
    setup = {"e_key": ["plate", "row"]}
    how: dict[str, Any] = QUICK | {"checkpoint_dir": tmp_path, "plan_kwargs": {"lr_decay": False}}
    make(None, setup).train(**how)
    again = how | {"max_steps": 8, "resume": True}
    with pytest.raises(ValueError, match="e_columns"):
        make(None, setup | {"e_columns": "crossed"}).train(**again)
    make(None, setup).train(**again)


def on_new_plates(wells: AnnData, setup: dict[str, Any], alpha: float, **settings: Any) -> np.ndarray:
    """z_c of the plates that were not trained on."""
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(wells, **setup)
    model = SCBDModel(wells, encoder="mlp", n_latent=16, alpha=alpha, style_target=None, **settings)
    model.train(max_steps=40, batch_size=1024, split="split", enable_progress_bar=False, accelerator="cpu")
    return model.get_latent_representation(wells[wells.obs["split"] == "test"])


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_separate_columns_remove_plate_and_position_on_new_plates():
    """One compound a well, in a layout of its own a plate. To forget the plate alone leaves the position."""
    how: dict[str, Any] = {"one_layout": False, "n_features": 48, "effect_size": 1.0, "well_effect": 0.0}
    wells = simulated_profiles(64, 32, position_effect=2.5, **how)
    wells.obs["split"] = np.where(wells.obs["plate"].cat.codes < 16, "train", "test")
    new, f1 = wells.obs[wells.obs["split"] == "test"], {}
    for e_key in ("plate", ["plate", "well"]):
        setup = {"y_key": "perturbation", "e_key": e_key, "control": "control"}
        z_c = on_new_plates(wells, setup, 0.05, standardize_by=None)  # all of it is to be learned
        f1[len(e_key)] = [label_probe(z_c, new[column])["f1"] for column in ("plate", "well")]
    one, both = f1[len("plate")], f1[2]
    assert one[0] < 0.15 and both[0] < 0.15
    assert one[1] > 0.05 and both[1] < 0.02  # by chance .01
    # of their cross there is one well each, of which nothing can be learned
    with pytest.raises(ValueError, match="environment of its own"):
        of_wells(wells, setup | {"e_columns": "crossed"}, encoder="linear").train(**WHOLE)


def columns_that_differ(shape: str) -> AnnData:
    """Features of 24 compounds, anew over 24 columns on each of 24 plates, whose columns differ in one direction."""
    rng, wells = np.random.default_rng(0), 192
    plate, column = np.repeat(np.arange(24), wells), np.tile(np.arange(24), 24 * 8)
    compound = np.concatenate([rng.permutation(wells) % 24 for _ in range(24)])
    z = (column - 11.5) / 11.5
    place = z if shape == "gradient" else 1.5 * (z**2 - 1 / 3)
    means, of_plate, noise = (rng.normal(size=(n, 12)) for n in (24, 24, len(plate)))
    direction = rng.normal(size=12)
    x = means[compound] + 0.5 * of_plate[plate] + noise + 3 * np.outer(place, direction / np.linalg.norm(direction))
    obs = {"compound": compound, "plate": plate, "column": column, "place": place}
    table = pd.DataFrame(obs, index=[str(i) for i in range(len(plate))])
    table["split"] = np.where(plate < 12, "train", "test")
    return AnnData(x.astype(np.float32), obs=table)


@pytest.mark.parametrize("shape", ["gradient", "edges and middle"])
def test_levels_of_number_in_e_key_remove_gradient_on_new_plates(shape):
    """By the recipe for a number: five levels as environments. To forget the plate alone leaves the gradient."""
    wells = columns_that_differ(shape)
    wells.obs["column_bin"] = pd.qcut(wells.obs["column"], 5).astype(str)
    new, left, f1 = wells.obs[wells.obs["split"] == "test"], {}, {}
    both = ["plate", "column_bin"]
    for name, alpha, e_key in (("nothing", 0.0, "plate"), ("plate", 0.05, "plate"), ("both", 0.05, both)):
        setup = {"y_key": "compound", "e_key": e_key}
        z_c = on_new_plates(wells, setup, alpha)
        left[name], f1[name] = determination(z_c, new), label_probe(z_c, new["compound"])["f1"]
    assert min(left["nothing"], left["plate"]) > 0.2
    assert left["both"] < 0.05
    assert f1["both"] > 0.9 * f1["nothing"]


def determination(z_c: np.ndarray, obs: pd.DataFrame) -> float:
    """Share of the variance of the place that a linear map tells at equal compound, on the second half of the wells."""
    apart = z_c - pd.DataFrame(z_c).groupby(obs["compound"].to_numpy()).transform("mean").to_numpy()
    place, half = obs["place"].to_numpy(), len(apart) // 2
    fit = np.linalg.lstsq(apart[:half], place[:half] - place[:half].mean(), rcond=None)[0]
    return float(1 - np.var(place[half:] - apart[half:] @ fit) / np.var(place[half:]))


def test_linear_encoder_starts_as_identity_of_transformed_features():
    model = of_wells()
    model.train(**WHOLE | {"max_steps": 1, "lr": 0.0})
    r = model.get_latent_representation(representation="intermediate")
    scaled = model.module.preprocess(torch.from_numpy(model.adata.X))
    plate = model.adata.obs["plate"].cat.codes.to_numpy(copy=True)
    environments: Any = model.module.preprocess.environments
    within = environments(scaled, torch.from_numpy(plate).long()[:, None])
    np.testing.assert_allclose(r, model.module.content.transform(within).numpy(), atol=1e-5)
    r_s = model.get_latent_representation(block="s", representation="intermediate")
    np.testing.assert_allclose(r_s, model.module.style.transform(scaled).numpy(), atol=1e-5)
    z_c, z_s = (model.get_latent_representation(block=block, center=None) for block in "cs")
    np.testing.assert_allclose(z_c, r / np.linalg.norm(r, axis=1, keepdims=True), atol=1e-5)

    def share(z: np.ndarray) -> float:
        return float(np.stack([z[plate == p].mean(0) for p in range(4)]).var(0).sum() / z.var(0).sum())

    assert share(z_s) > 2 * share(z_c)  # which starts from environments


def test_train_feature_constant_among_controls_succeeds():
    wells = make_wells()
    controls = (wells.obs["compound"] == "DMSO").to_numpy()
    wells.X[controls, 3] = 0  # foci that only treated cells have
    wells.X[:, 4] = np.where(np.arange(72) < 40, 1, np.nextafter(np.float32(1), 2))  # rounding
    model = of_wells(wells)
    model.train(**WHOLE)
    scaled = model.module.preprocess(torch.from_numpy(wells.X)).numpy()
    assert not scaled[controls, 3].any() and 0.5 < scaled[~controls, 3].std() < 2 and not scaled[:, 4].any()
    assert np.isfinite(model.get_latent_representation()).all()


@pytest.mark.parametrize("encoder", ["linear", "mlp", torch.nn.Linear(10, 5)], ids=["linear", "mlp", "module"])
@pytest.mark.parametrize("whitening", ["auto", "within", "controls", "lda", "plda", None])
@pytest.mark.filterwarnings("ignore:position_key is not used")
def test_train_any_encoder_and_whitening_succeeds(encoder, whitening):
    model = of_wells(encoder=encoder, whitening=whitening)
    model.train(**WHOLE | {"max_steps": 2})
    assert np.isfinite(model.get_latent_representation()).all()
    kind = {"linear": "plda", "mlp": "within"}.get(str(encoder)) if whitening == "auto" else whitening
    assert getattr(model.module.content.transform, "kind", None) == kind


def test_train_features_without_plate_differences_keeps_rank_of_z_s():
    """Their means are the same, and the encoder of z_s has no difference of plates to start from."""
    wells = make_wells()
    wells.layers["standardized"] = standardize_by_environment(wells.X, wells.obs["plate"])
    model = of_wells(wells, WELLS | {"layer": "standardized"})
    model.train(**WHOLE)
    z_s = model.get_latent_representation(block="s", center=None)
    assert np.isfinite(z_s).all() and np.linalg.matrix_rank(z_s) > 3


def test_train_features_z_c_predicts_compounds_and_not_plates():
    wells = make_wells(n_compounds=20, n_plates=6, n_features=20)
    model = of_wells(wells)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(enable_progress_bar=False, accelerator="cpu")
    compound, plate = wells.obs["compound"].to_numpy(), wells.obs["plate"].to_numpy()

    def nearest(x: np.ndarray) -> tuple[float, float]:
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        similar = x @ x.T
        np.fill_diagonal(similar, -np.inf)
        known = compound != "DMSO"
        chosen = similar[known].argmax(1)
        return float((compound[chosen] == compound[known]).mean()), float((plate[chosen] == plate[known]).mean())

    (raw_compound, raw_plate), (found_compound, found_plate) = (
        nearest(x) for x in (wells.X, model.get_latent_representation())
    )
    assert found_compound > 0.85 > raw_compound and found_plate < 0.5 < raw_plate


def test_train_memory_mapped_features_gives_equal_model(tmp_path):
    wells = make_wells()
    model = of_wells(wells)
    model.train(**WHOLE)
    z = model.get_latent_representation()
    wells.uns.clear()
    wells.write_h5ad(tmp_path / "wells.h5ad")
    mapped = open_screen(tmp_path / "wells.h5ad", layer="X")
    np.testing.assert_array_equal(model.get_latent_representation(mapped), z)


@pytest.mark.parametrize("validation_size", [None, 0.25])
def test_linear_encoder_validates_only_if_requested(validation_size):
    model = of_wells()
    model.train(**QUICK | {"max_steps": 1, "validation_size": validation_size})
    held = len(model.validation_indices)
    assert len(model.train_indices) + held == 72 and (0 < held < 36 if validation_size else not held)


def cells_of_genes(n_genes: int):
    """Three cells of each gene in each of two wells."""
    n = 6 * n_genes
    obs = pd.DataFrame({"gene": np.arange(n) % n_genes, "well": np.arange(n) // n_genes % 2}).astype(str)
    images = np.random.default_rng(0).integers(0, 255, (n, 2, 16, 16)).astype("uint8")
    return AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"single_cell_images": images})


@pytest.mark.parametrize(
    ("n_genes", "settings", "size"),
    [(29, {}, 1), (30, {}, 4), (30, {"set_size": 2}, 2)],
)
def test_set_size_auto_many_perturbations_uses_sets(n_genes, settings, size):
    cells = cells_of_genes(n_genes)
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    assert SCBDModel(cells, encoder="small", **settings).module.set_size == size


@pytest.mark.parametrize(("encoder", "size"), [("linear", 1), ("mlp", 4)])
def test_set_size_auto_linear_encoder_uses_single_cells(encoder, size):
    cells = cells_of_genes(30)
    cells.obsm["X"] = cells.obsm.pop("single_cell_images")[:, 0, :2].reshape(cells.n_obs, -1).astype("float32")
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", obsm_key="X")
    assert SCBDModel(cells, encoder=encoder).module.set_size == size


@pytest.mark.filterwarnings("ignore:y and e are confounded")
@pytest.mark.parametrize(
    ("n_genes", "control", "expected"), [(4, None, 0), (4, "gene_0", 2 / 3), (30, None, 2 / 3), (30, "gene_0", 2 / 3)]
)
def test_smoothing_auto_is_0_for_classes_and_positive_for_screens(n_genes, control, expected):
    cells = make_cells(120)
    cells.obs["gene"] = pd.Categorical([f"gene_{code % n_genes}" for code in range(120)])
    SCBDModel.setup_anndata(cells, "gene", "plate", control=control)
    assert SCBDModel(cells, encoder="small").module.smoothing == expected
    assert SCBDModel(cells, encoder="small", smoothing=0.5).module.smoothing == 0.5
