"""Numbers beside the environment: rows, columns, the time, counts of cells."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
import torch
from anndata import AnnData
from conftest import make_cells
from small_models import QUICK, assert_same, weights

import scbd
from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.metrics import label_probe
from scbd.model._health import measure
from scbd.nn import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
COVARIATES = ["time", "column"]
IMAGES, Y, E = torch.randint(0, 255, (24, 2, 16, 16)).byte(), torch.arange(24) % 2, torch.arange(24) // 2 % 3
NUMBERS = torch.stack([torch.arange(24) * 7 % 24, torch.arange(24) // 5], 1)


def cells_in_time(n: int = 96) -> AnnData:
    """Cells with a time of their own, in twelve columns."""
    cells, rng = make_cells(n), np.random.default_rng(1)
    return with_numbers(cells, time=rng.permutation(n) / 7, column=rng.integers(1, 13, n))


def with_numbers(cells: AnnData, **columns: Any) -> AnnData:
    cells = cells.copy()
    cells.obs = cells.obs.assign(**columns)
    return cells


def set_up(cells: AnnData, keys: Any = COVARIATES, e_key: Any = "well", **kwargs: Any) -> None:
    scvi.settings.seed = 0
    SCBDModel.setup_anndata(cells, "gene", e_key, continuous_covariate_keys=keys, **kwargs)


def make(cells: AnnData | None = None, keys: Any = COVARIATES, e_key: Any = "well", **kwargs: Any) -> SCBDModel:
    cells = cells_in_time() if cells is None else cells
    set_up(cells, keys, e_key)
    return SCBDModel(cells, **{"encoder": "small", "n_latent": 6, "alpha": 0.1, **kwargs})


def test_z_c_is_to_know_none_and_z_s_does_not_hear_of_them():
    model = make(alpha=0.5, smoothing=0)
    losses, inputs = model.module(IMAGES, Y, E, numbers=NUMBERS), model.module.preprocess(IMAGES)
    z_c, passed = model.module.content.watched(inputs)
    expected = scbd.nn.invariance_statistic([*passed, z_c], [E, *map(Numbers, NUMBERS.T)], Y)
    torch.testing.assert_close(losses.parts["invariance_c"], expected)
    of_e = scbd.nn.supervised_contrastive_loss(model.module.style(inputs), E)
    torch.testing.assert_close(losses.parts["supervised_s"], of_e)
    torch.testing.assert_close(losses.loss, losses.parts["supervised_c"] + of_e + 0.5 * expected)
    without = model.module(IMAGES, Y, E)
    torch.testing.assert_close(
        without.parts["invariance_c"], scbd.nn.invariance_statistic([*passed, z_c], E, Y), rtol=0, atol=0
    )


def test_health_asks_for_them():
    module = make().module.eval()
    batch = {"inputs": IMAGES, "y": Y, "e": E}
    z_c = module.embed(IMAGES, "c", "embedding").detach()
    without = scbd.nn.invariance_statistic([z_c], E, Y)
    beside = scbd.nn.invariance_statistic([z_c], [E, *map(Numbers, NUMBERS.T)], Y)
    for given, expected in ((batch, without), (batch | {"numbers": NUMBERS}, beside)):
        assert measure(module, given)[0]["environment_c"] == pytest.approx(float(expected), abs=1e-5)


def test_batches_hold_the_order_of_what_is_attached():
    cells = cells_in_time()
    model = make(cells)
    seen: list[dict[str, torch.Tensor]] = []
    forward = model.module.forward

    def watched(inputs: torch.Tensor, y: torch.Tensor, e: torch.Tensor, **kwargs: Any) -> Any:
        seen.append({"inputs": inputs, **kwargs})
        return forward(inputs, y, e, **kwargs)

    model.module.forward = watched  # type: ignore[method-assign]
    model.train(**QUICK)
    image = {cells.obsm["single_cell_images"][i].tobytes(): i for i in range(cells.n_obs)}
    for batch in seen:
        rows = [image[one.numpy().tobytes()] for one in batch["inputs"]]
        for column, places in zip(COVARIATES, batch["numbers"].T, strict=True):
            values = cells.obs[column].to_numpy()
            np.testing.assert_array_equal(places, np.searchsorted(np.unique(values), values[rows]))


def test_the_scale_is_of_no_matter_and_what_it_was_without_stays():
    cells = cells_in_time()
    changed = with_numbers(cells, time=np.exp(cells.obs["time"]), column=-3.0 * cells.obs["column"])
    trained = [make(cells), make(changed), make(cells, keys=None), make(make_cells(), keys=None)]
    for model in trained:
        model.train(**QUICK)
    one, other, without, before = map(weights, trained)
    assert_same(without, before)
    assert not torch.equal(one["content.projection.2.weight"], without["content.projection.2.weight"])
    # turned round, odd terms change their sign, and rounding
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


def test_saved_models_know_their_columns(tmp_path):
    model = make()
    model.train(**QUICK)
    model.save(tmp_path / "model")
    for data in (False, cells_in_time()):
        loaded = SCBDModel.load(tmp_path / "model", data)
        assert "numbers time, column" in repr(loaded)
    assert loaded.registry_["setup_args"]["continuous_covariate_keys"] == COVARIATES
    np.testing.assert_array_equal(loaded.adata_manager.get_from_registry("numbers"), loaded.adata.obs[COVARIATES])
    loaded.train(**QUICK)
    assert np.isfinite(loaded.health["environment_c"])
    # an older scbd did not ask
    old = make(keys=None)
    del old.registry_["setup_args"]["continuous_covariate_keys"]
    old.save(tmp_path / "old")
    SCBDModel.load(tmp_path / "old", make_cells()).train(**QUICK)


def test_new_cells_are_embedded_without_numbers_and_trained_with_them():
    model = make()
    model.train(**QUICK)
    for new in (make_cells(30, seed=1), with_numbers(make_cells(30, seed=1), time=np.nan, column="A")):
        assert model.get_latent_representation(new).shape == (30, 6)
        model.adata = new
        error: Any = (KeyError, ValueError)
        with pytest.raises(error, match=r"obs has no 'time'|obs\['time'\] has no finite value for 30 of 30"):
            model.train(**QUICK)
    model.adata = with_numbers(make_cells(30, seed=1), time=np.arange(30.0) * 1e6, column=np.arange(30))
    model.train(**QUICK)


def test_a_run_is_resumed_with_the_numbers_it_was_begun_with(tmp_path):
    make().train(**QUICK, checkpoint_dir=tmp_path)
    again = QUICK | {"max_steps": 8, "checkpoint_dir": tmp_path, "ckpt_path": "last"}
    with pytest.raises(ValueError, match="continuous_covariate_keys: 'time, column' → None"):
        make(keys=None).train(**again)
    cells = cells_in_time()
    with pytest.raises(ValueError, match="labels"):
        make(with_numbers(cells, time=cells.obs["time"][::-1].to_numpy())).train(**again)
    make().train(**again)


def test_a_decoder_is_trained_beside():
    model = make()
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    model.train_decoder(**QUICK, width=4, joint=True)
    assert model.history is not None and "train_reconstruction" in model.history


def test_what_cannot_be_is_said():
    cells = cells_in_time()
    cells.obs["date"] = "2024-01-01"
    for keys, error, sentence in (
        ("Time", KeyError, "obs has no 'Time'"),
        ([], ValueError, "An empty list"),
        (3, TypeError, "name or a list of names, got 3"),
        ("date", TypeError, r"obs\['date'\] holds no numbers"),
        ("gene", TypeError, r"obs\['gene'\] holds no numbers"),
        (["time", "well"], ValueError, "'well' is in both e_key and continuous_covariate_keys"),
    ):
        with pytest.raises(error, match=sentence):
            set_up(cells, keys)
    with pytest.raises(ValueError, match=r"obs\['time'\] has no finite value for 1 of 96 cells \(rows 0\)"):
        set_up(with_numbers(cells, time=np.where(np.arange(96) == 0, np.nan, 1.0 * np.arange(96))))
    with pytest.raises(ValueError, match=r"Every cell has the same obs\['time'\] \(2\)"):
        set_up(with_numbers(cells, time=2))
    with pytest.raises(ValueError, match="ERMModel takes one environment per cell, which is a label: leave continuous"):
        ERMModel.setup_anndata(cells, "gene", "well", continuous_covariate_keys="time")
    with pytest.raises(ValueError, match=r"takes labels as environments, not numbers \(time, column\)"):
        make(cells, invariance="mean")
    assert "numbers time" in repr(make(cells, keys=["time", "time"]))


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_a_quantity_as_environment_is_warned_of():
    cells = cells_in_time()
    with pytest.warns(
        UserWarning, match="e_key='time' makes an environment of each of 96 numbers in 96 cells.*instead of"
    ):
        set_up(cells, keys=None, e_key=["well", "time"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up(with_numbers(cells, column=cells.obs["column"] % 3 + 0.5), keys=None, e_key=["well", "column"])


def test_perturbations_that_tell_the_time_are_warned_of():
    cells = cells_in_time()
    cells = cells[cells.obs["gene"].isin(["gene_0", "gene_1"])].copy()
    order, within = cells.obs["gene"].cat.codes.to_numpy(), np.arange(cells.n_obs)
    with pytest.warns(UserWarning, match=r"y and 'time' are confounded: .* [0-9]+% of what can change with 'time'"):
        set_up(with_numbers(cells, time=100 * order + within))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up(with_numbers(cells, time=order + within))


def plates(shape: str) -> AnnData:
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
def test_a_gradient_over_columns_is_forgotten(shape):
    """On plates that nobody saw. To forget the plate alone leaves it, as to forget nothing does."""
    wells = plates(shape)
    new = wells[wells.obs["split"] == "test"].copy()
    told, f1 = {}, {}
    for name, alpha, keys in (("nothing", 0.0, None), ("plate", 0.05, None), ("both", 0.05, "column")):
        scvi.settings.seed = 0
        SCBDModel.setup_anndata(wells, "compound", "plate", continuous_covariate_keys=keys)
        model = SCBDModel(wells, encoder="mlp", n_latent=16, alpha=alpha, style_target=None)
        model.train(max_steps=40, batch_size=1024, split="split", enable_progress_bar=False, accelerator="cpu")
        z_c = model.get_latent_representation(new)
        told[name], f1[name] = determination(z_c, new), label_probe(z_c, new.obs["compound"])["f1"]
    assert min(told["nothing"], told["plate"]) > 0.2
    assert told["both"] < 0.05
    assert f1["both"] > 0.9 * f1["nothing"]


def determination(z_c: np.ndarray, wells: AnnData) -> float:
    """Share of the variance of the place that a linear map tells at equal compound, on the second half of the wells."""
    apart = z_c - pd.DataFrame(z_c).groupby(wells.obs["compound"].to_numpy()).transform("mean").to_numpy()
    place, half = wells.obs["place"].to_numpy(), len(apart) // 2
    fit = np.linalg.lstsq(apart[:half], place[:half] - place[:half].mean(), rcond=None)[0]
    return float(1 - np.var(place[half:] - apart[half:] @ fit) / np.var(place[half:]))
