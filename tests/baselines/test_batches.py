"""Batches that know environments, as the data modules make them: for a stage, and for ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells

from scbd import SCBDModel, baselines
from scbd.baselines._batches import ControlPairedBatches, EnvironmentBalancedBatches, SingleEnvironmentBatches
from scbd.data import ArraySource, ImageDataModule, PerturbationSampler, Split
from scbd.data._loading import BatchLoader

ENVIRONMENTS = np.repeat(np.arange(4), [90, 60, 30, 60])


class Copies(Split):
    """Rows are copied whenever they are asked for."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.copy() if isinstance(value, np.ndarray) else value


def make(batches: type[ImageDataModule], **kwargs: Any) -> ImageDataModule:
    rows = np.random.default_rng(0).permutation(240)
    source = ArraySource(np.zeros((240, 1, 2, 2), dtype="uint8"))
    split = Copies(train=rows[:160], validation=rows[160:])
    return batches(source, np.arange(240) % 3, ENVIRONMENTS, split, batch_size=24, max_steps=12, **kwargs)


def environments_in(loader: Any) -> list[list[int]]:
    assert isinstance(loader, BatchLoader)
    return [sorted(set(batch["e"].tolist())) for batch in loader]


def test_single_environment_batches_only_training_has_one_environment():
    """Which stage it is was told by whether its rows were the very array of the training rows, and no copy."""
    data = make(SingleEnvironmentBatches)
    assert all(len(seen) == 1 for seen in environments_in(data.train_dataloader()))
    assert all(len(seen) > 1 for seen in environments_in(data.val_dataloader()))


def test_environment_balanced_batches_balance_both_stages():
    data = make(EnvironmentBalancedBatches)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert all(len(seen) == 3 for seen in environments_in(loader))  # of eight cells each


@pytest.mark.parametrize("world_size", [2, 4])
def test_environment_balanced_batches_every_rank_has_all_environments(world_size):
    data = make(EnvironmentBalancedBatches)
    shares = [list(data._sampler("train", 24, 6, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for pieces in zip(*shares, strict=True):
        counts = np.array([np.bincount(ENVIRONMENTS[piece], minlength=4) for piece in pieces])
        assert sorted(counts.sum(axis=0)) == [0, 8, 8, 8]
        assert (counts == counts[0]).all()


def test_single_environment_batches_every_rank_has_same_environment():
    data = make(SingleEnvironmentBatches, pretrain_steps=2)
    shares = [list(data._sampler("train", 24, 10, rank=rank, world_size=2)) for rank in range(2)]
    for step, pieces in enumerate(zip(*shares, strict=True)):
        seen = {environment for piece in pieces for environment in ENVIRONMENTS[piece]}
        assert (len(seen) > 1) == (step < 4)  # two plain steps were asked for, a round has four
        assert {len(piece) for piece in pieces} == {12}


def of_sizes(sizes: list[int], batch_size: int | None = None) -> tuple[ImageDataModule, np.ndarray]:
    e = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    n = len(e)
    source, split = ArraySource(np.zeros((n, 1, 4, 4), dtype=np.uint8)), Split(train=np.arange(n))
    return EnvironmentBalancedBatches(
        source, np.zeros(n, dtype=np.int64), e, split, batch_size=batch_size, max_steps=5
    ), e


def test_environment_balanced_batches_small_environment_is_repeated():
    """Batches of 9 were made of 803 cells, or a batch of 64 was refused, and a single cell was never drawn."""
    data, e = of_sizes([400, 400, 3, 1])
    assert data.batch_size == 804
    for batch in data.train_sampler:
        assert np.bincount(e[batch]).tolist() == [201] * 4
    data, e = of_sizes([500, 500, 3], batch_size=64)
    for batch in data.train_sampler:
        assert sorted(np.bincount(e[batch])) == [20, 22, 22]
        large = batch[e[batch] < 2]
        assert len(set(large)) == len(large)  # only those of the small one are there twice
        assert set(batch[e[batch] == 2]) == set(np.flatnonzero(e == 2))


def test_environment_balanced_batches_large_environments_equal_perturbation_sampler():
    data, e = of_sizes([40, 60, 50], batch_size=24)
    plain = PerturbationSampler(np.arange(150), 24, labels=e, perturbations_per_batch=3, n_steps=5, seed=data.seed)
    np.testing.assert_array_equal(list(data.train_sampler), list(plain))


@pytest.mark.parametrize("batch_size", [2, 3, 5, 24])
@pytest.mark.parametrize("sizes", [[1, 1, 30], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [40], [1] * 30])
def test_environment_balanced_batches_any_sizes_fill_batch(sizes, batch_size):
    data, _ = of_sizes(sizes, batch_size=batch_size)
    assert {len(batch) for batch in data.train_sampler} == {batch_size}


@pytest.mark.filterwarnings("ignore:z_c has")
@pytest.mark.parametrize("kind", [SCBDModel, baselines.ERMModel, baselines.VAEModel, baselines.IVAEModel])
@pytest.mark.parametrize("asked", ["auto", 2, None])
def test_baselines_batches_are_shuffled_by_default(kind: Any, asked, monkeypatch):
    """And what is said of a run is what was done."""
    cells, seen = make_cells(160, (2, 32, 32)), []
    kind.setup_anndata(cells, y_key="gene", e_key="well")
    model = kind(cells, **({} if kind in (baselines.VAEModel, baselines.IVAEModel) else {"encoder": "small"}))
    batch = BatchLoader.batch

    def spy(self: BatchLoader, rows: np.ndarray) -> dict[str, torch.Tensor]:
        found = batch(self, rows)
        seen.append(len(found["y"].unique()))
        return found

    monkeypatch.setattr(BatchLoader, "batch", spy)
    how: dict[str, Any] = {"train_size": 1.0, "accelerator": "cpu", "enable_progress_bar": False}
    model.train(max_steps=3, batch_size=16, perturbations_per_batch=asked, **how)
    drawn = {"auto": 2 if kind is SCBDModel else None}.get(asked, asked)
    assert model.training_settings_["perturbations_per_batch"] == drawn
    assert (max(seen) == 2) == (drawn == 2)


@pytest.mark.parametrize("batches", [EnvironmentBalancedBatches, SingleEnvironmentBatches, ControlPairedBatches])
def test_custom_batches_perturbations_per_batch_raises(batches: Any):
    how = {"control": 0} if batches is ControlPairedBatches else {}
    assert make(batches, **how).perturbations_per_batch is None
    with pytest.raises(ValueError, match="perturbations_per_batch=3: this model draws its batches"):
        make(batches, perturbations_per_batch=3, **how)
