"""Which cells are learned from, and files that are none of ours, or would do harm."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.small_models import QUICK, make_model

from scbd import SCBDModel
from scbd.data import ArraySource, write_screen
from scbd.data._sources import FEATURES, IMAGES
from scbd.model._training_cells import draw_training_sample, label_column_codes

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


@pytest.mark.parametrize("of_features", [True, False])
def test_draw_training_sample_keeps_labels_of_cells(monkeypatch, of_features):
    monkeypatch.setattr("scbd.model._training_cells._MAX_SAMPLED_ROWS", 20)
    monkeypatch.setattr("scbd.model._training_cells._MAX_SAMPLED_IMAGES", 20)
    monkeypatch.setattr("scbd.model._training_cells._CELLS_READ_AT_ONCE", 7)
    cell = np.arange(90)
    values = cell.astype(np.float32)[:, None] if of_features else cell.astype(np.uint8)[:, None, None, None]
    rows, controls = cell[cell % 3 > 0], cell % 10 == 1
    source = ArraySource(values, kind=FEATURES if of_features else IMAGES)
    sample = draw_training_sample(source, rows, cell + 100, cell + 200, controls, cell + 300, seed=1)
    drawn = torch.cat(list(sample.batches())).flatten().numpy().astype(int)
    assert len(list(sample.batches())) > 1  # read as often as it is asked for
    assert set(drawn) <= set(rows) and len(set(drawn)) == len(drawn)
    there = np.isin(rows[controls[rows]], drawn)
    assert there.all() and 20 <= len(drawn) < 30 if of_features else not there.all() and len(drawn) == 20
    assert sample.controls is not None and sample.positions is not None
    np.testing.assert_array_equal(sample.y, drawn + 100)
    np.testing.assert_array_equal(sample.e, drawn + 200)
    np.testing.assert_array_equal(sample.controls, controls[drawn])
    np.testing.assert_array_equal(sample.positions, drawn + 300)


def test_label_column_codes_yields_columns_with_few_values():
    n = 40
    obs = pd.DataFrame(
        {
            "guide": pd.Categorical(np.arange(n) % 3),
            "plate": ["a", None] * (n // 2),
            "row": np.arange(n) // 10,
            "control": np.arange(n) < 5,
            "cell": [f"cell {i}" for i in range(n)],
            "number": np.arange(n),
            "area": np.linspace(0, 1, n),
            "day": pd.Timestamp("2026-01-01"),
        }
    )
    obs = pd.concat([obs, obs[["row"]]], axis=1)  # a name that is there twice
    found = list(label_column_codes(obs))
    assert [len(np.unique(codes)) for codes in found] == [3, 2, 4, 2, 4]
    assert all(codes.min() >= 0 for codes in found)
    np.testing.assert_array_equal(found[1] == 0, obs["plate"].isna())


@pytest.mark.parametrize("mixed", [True, False])
def test_neighbours_auto_requires_every_label_to_be_mixed(cells, tmp_path, mixed):
    cells.obs["guide"] = np.random.default_rng(1).integers(4, size=cells.n_obs).astype(str)
    screen = write_screen(tmp_path / "screen.zarr", cells, y_key="gene")
    if not mixed:  # as if the table had been sorted by gene and guide
        order = np.lexsort([screen.obs["guide"], screen.obs["gene"]])
        screen.obs["guide"] = screen.obs["guide"].to_numpy()[order]
    model = make_model(screen)
    how: dict[str, Any] = QUICK | {"perturbations_per_batch": 3}
    model.train(**how)
    assert model.training_settings_["neighbours"] is mixed


def test_load_damaged_file_raises(trained, tmp_path):
    """A bit of a weight that a disk has flipped would change what cells are embedded as, and nothing would say so."""
    trained.save(tmp_path / "model")
    path = tmp_path / "model" / "model.pt"
    content = bytearray(path.read_bytes())
    weight = trained.module.content.projection[0].weight.detach().numpy().tobytes()
    content[content.index(weight) + 3] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        SCBDModel.load(tmp_path / "model", adata=False)


def test_load_other_file_raises(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        SCBDModel.load(tmp_path / "nothing")
    path = tmp_path / "model" / "model.pt"
    trained.save(tmp_path / "model")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        SCBDModel.load(tmp_path / "model")
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    path.write_bytes(whole)
    saved = torch.load(path, weights_only=False)
    saved["attr_dict"]["format_"] = 99
    torch.save(saved, path)
    with pytest.raises(ValueError, match="format 99"):
        SCBDModel.load(tmp_path / "model")
    saved["attr_dict"]["registry_"]["model_name"] = "IVAEModel"
    torch.save(saved, path)
    with pytest.raises(ValueError, match="IVAEModel"):
        SCBDModel.load(tmp_path / "model")


def test_load_version_0_1_loads_or_raises(trained, cells, tmp_path):
    """Continuous covariates are the reason that is given."""
    path = tmp_path / "model" / "model.pt"
    trained.save(tmp_path / "model")
    saved = torch.load(path, weights_only=False)
    setup = saved["attr_dict"]["registry_"]["setup_args"]
    setup["continuous_covariate_keys"] = None
    saved["attr_dict"]["init_params_"]["kwargs"]["module_kwargs"]["positives"] = "all"  # by name, the default
    torch.save(saved, path)
    attached, later = SCBDModel.load(tmp_path / "model", cells), SCBDModel.load(tmp_path / "model", adata=False)
    later.adata = cells
    for model in (attached, later):
        np.testing.assert_allclose(model.get_latent_representation(), trained.get_latent_representation(cells))
    attached.save(tmp_path / "again")
    SCBDModel.load(tmp_path / "again", cells)
    setup["continuous_covariate_keys"] = ["time"]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"continuous_covariate_keys=\['time'\].*train a new model.*qcut"):
        SCBDModel.load(tmp_path / "model", cells)


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_load_hostile_model_runs_no_code(trained, tmp_path):
    trained.save(tmp_path / "model")
    path, harm = tmp_path / "model" / "model.pt", tmp_path / "harm"
    for place in ("attr_dict", "model_state_dict"):
        saved = torch.load(path, weights_only=False)
        saved[place]["extra_"] = Harm(harm)
        torch.save(saved, path)
        with pytest.raises(ValueError, match=r"model.pt holds Python objects \(posix.mkdir\).*allow_pickle=True"):
            SCBDModel.load(tmp_path / "model")
        trained.save(tmp_path / "model", overwrite=True)
    torch.save({"attr_dict": Harm(harm)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    assert not harm.exists()


def test_resume_hostile_checkpoint_runs_no_code(tmp_path):
    model, harm = make_model(), tmp_path / "harm"
    model.train(**QUICK, checkpoint_dir=tmp_path / "run")
    path = tmp_path / "run" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    torch.save(state | {"extra": Harm(harm)}, path)
    with pytest.raises(ValueError, match=r"last.ckpt holds Python objects \(posix.mkdir\)"):
        make_model().train(**QUICK | {"max_steps": 9}, checkpoint_dir=tmp_path / "run", resume=True)
    assert not harm.exists()
