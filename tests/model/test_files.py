"""Models that are saved and loaded, and files that are none."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from conftest import make_cells
from small_models import QUICK, make_model

from scbd import SCBDModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_save_and_load(trained, tmp_path):
    expected = trained.get_latent_representation()
    trained.save(tmp_path / "model", save_anndata=True)
    assert sorted(os.listdir(tmp_path / "model")) == ["adata.h5ad", "model.pt"]
    assert os.listdir(tmp_path) == ["model"]
    for adata in (None, make_cells()):
        loaded = SCBDModel.load(tmp_path / "model", adata)
        np.testing.assert_array_equal(loaded.get_latent_representation(), expected)
    assert loaded.is_trained
    assert loaded.history["train_loss"].equals(trained.history["train_loss"])
    assert loaded.health == trained.health
    assert repr(loaded) == repr(trained)
    loaded.train(**QUICK)  # a loaded model trains on, in training mode
    assert not np.array_equal(loaded.get_latent_representation(), expected)


def test_a_norm_by_name_is_saved_as_a_name(tmp_path):
    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder="small", norm="group")
    model.train(**QUICK)
    model.save(tmp_path / "model")
    loaded = SCBDModel.load(tmp_path / "model", cells)  # no Python object in it
    np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())
    for block in (loaded.module.content, loaded.module.style):
        assert sum(isinstance(module, torch.nn.GroupNorm) for module in block.modules()) == 4
    assert model.training_settings_["precision"] == "32-true"


def test_a_damaged_model_is_not_loaded(trained, tmp_path):
    """A bit of a weight that a disk has flipped would change what cells are embedded as, and nothing would say so."""
    trained.save(tmp_path / "model")
    path = tmp_path / "model" / "model.pt"
    content = bytearray(path.read_bytes())
    weight = trained.module.content.projection[0].weight.detach().numpy().tobytes()
    content[content.index(weight) + 3] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.pt is damaged \(its part .* is not what was written\)"):
        SCBDModel.load(tmp_path / "model", adata=False)


def test_rows_of_the_training_go_with_the_cells_that_are_attached(trained):
    rows = trained.train_indices
    trained.adata = make_cells()[:60].copy()
    with pytest.warns(UserWarning, match="train_indices are rows of the table that the model was trained on"):
        assert trained.train_indices is rows
    trained.adata = make_cells()
    assert trained.train_indices is rows


def test_rows_of_the_training_are_not_handed_out_for_other_cells_without_a_word(trained, tmp_path, caplog):
    trained.save(tmp_path / "model")
    same = SCBDModel.load(tmp_path / "model", make_cells())
    np.testing.assert_array_equal(same.validation_indices, trained.validation_indices)
    shuffled = make_cells()[np.random.default_rng(0).permutation(96)].copy()
    for other in (shuffled, make_cells()[:60].copy()):
        loaded = SCBDModel.load(tmp_path / "model", other)
        for name in ("train_indices", "validation_indices", "test_indices"):
            with pytest.warns(UserWarning, match=f"{name} are rows of the table that the model was trained on"):
                np.testing.assert_array_equal(getattr(loaded, name), getattr(trained, name))
        caplog.clear()
        loaded.train(**QUICK)
        assert "the split is a new one, and cells that were trained on may be validated on" in caplog.text
        assert len(loaded.train_indices) < other.n_obs  # of the cells attached, now
    caplog.clear()
    other.obs["part"] = np.resize(["train", "train", "validation"], other.n_obs)
    SCBDModel.load(tmp_path / "model", other).train(**QUICK, split="part")
    assert "the split is a new one" not in caplog.text


@pytest.mark.parametrize("how", ["subset", "sorted"])
@pytest.mark.parametrize("loaded", [False, True])
def test_cells_that_are_taken_out_in_place_are_others(trained, tmp_path, how, loaded):
    """As scanpy's filters do: the model holds the same table, and other cells."""
    model = trained
    if loaded:
        trained.save(tmp_path / "model")
        model = SCBDModel.load(tmp_path / "model", make_cells())
    rows = model.train_indices
    model.adata.obs_names = [f"new name of {name}" for name in model.adata.obs_names]
    assert model.train_indices is rows
    model.adata._inplace_subset_obs(np.arange(96)[::-1] if how == "sorted" else np.arange(96) > 5)
    with pytest.warns(UserWarning, match="train_indices are rows of the table that the model was trained on"):
        assert model.train_indices is rows
    model.adata = make_cells()
    assert model.train_indices is rows


def test_load_without_data(trained, tmp_path):
    trained.save(tmp_path / "model")
    model = SCBDModel.load(tmp_path / "model", adata=False)
    new = make_cells(7, seed=3)
    np.testing.assert_array_equal(model.get_latent_representation(new), trained.get_latent_representation(new))
    assert "no data attached" in repr(model)
    with pytest.raises(ValueError, match="loaded without data: pass adata"):
        model.get_latent_representation()
    model.save(tmp_path / "again")
    again = SCBDModel.load(tmp_path / "again")
    np.testing.assert_array_equal(again.get_latent_representation(new), model.get_latent_representation(new))


def test_load_with_cells_that_have_no_labels_or_new_ones(trained, tmp_path):
    trained.save(tmp_path / "model")
    new = make_cells(7, seed=3)
    expected = trained.get_latent_representation(new)
    bare = new.copy()
    bare.obs = bare.obs[[]]
    np.testing.assert_array_equal(SCBDModel.load(tmp_path / "model", bare).get_latent_representation(), expected)
    new.obs["well"] = ["well_8", "well_9", *["well_0"] * 5]
    loaded = SCBDModel.load(tmp_path / "model", new)
    np.testing.assert_array_equal(loaded.get_latent_representation(), expected)
    assert loaded.summary_stats["n_e"] == 3  # those that it learned from


def test_saving_over_a_model(trained, tmp_path):
    trained.save(tmp_path / "model")
    with pytest.raises(FileExistsError, match="already exists: choose another directory, or pass overwrite=True"):
        trained.save(tmp_path / "model")
    trained.save(tmp_path / "model", overwrite=True)
    assert os.listdir(tmp_path) == ["model"]


def test_files_that_are_no_saved_model(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no saved model at"):
        SCBDModel.load(tmp_path / "nothing")
    path = tmp_path / "model" / "model.pt"
    trained.save(tmp_path / "model")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is no saved scbd model, or is truncated"):
        SCBDModel.load(tmp_path / "model")
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="is no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    path.write_bytes(whole)
    saved = torch.load(path, weights_only=False)
    saved["attr_dict"]["format_"] = 99
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"saved by a newer scbd \(format 99, this one reads 1\): upgrade"):
        SCBDModel.load(tmp_path / "model")
    saved["attr_dict"]["registry_"]["model_name"] = "IVAEModel"
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"holds a IVAEModel, not a SCBDModel: load it with IVAEModel\.load"):
        SCBDModel.load(tmp_path / "model")


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_model_runs_no_code(trained, tmp_path):
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
    with pytest.raises(ValueError, match="is no saved scbd model"):
        SCBDModel.load(tmp_path / "model")
    assert not harm.exists()


def test_a_hostile_checkpoint_runs_no_code(tmp_path):
    model, harm = make_model(), tmp_path / "harm"
    model.train(**QUICK, checkpoint_dir=tmp_path / "run")
    path = tmp_path / "run" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    torch.save(state | {"extra": Harm(harm)}, path)
    with pytest.raises(ValueError, match=r"last.ckpt holds Python objects \(posix.mkdir\)"):
        make_model().train(**QUICK | {"max_steps": 9}, checkpoint_dir=tmp_path / "run", ckpt_path="last")
    assert not harm.exists()
