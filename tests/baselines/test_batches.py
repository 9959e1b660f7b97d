"""Batches that know environments, as the data modules make them: for a stage, and for ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scbd.baselines._batches import AlternatingBatches, EnvironmentBatches
from scbd.data import ArraySource, BatchLoader, ImageDataModule, Split

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


def test_only_training_batches_are_of_one_environment_each():
    """Which stage it is was told by whether its rows were the very array of the training rows, and no copy."""
    data = make(AlternatingBatches)
    assert all(len(seen) == 1 for seen in environments_in(data.train_dataloader()))
    assert all(len(seen) > 1 for seen in environments_in(data.val_dataloader()))


def test_balanced_batches_are_for_both_stages():
    data = make(EnvironmentBatches)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert all(len(seen) == 3 for seen in environments_in(loader))  # of eight cells each


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_all_environments_of_a_balanced_batch(world_size):
    data = make(EnvironmentBatches)
    shares = [list(data._sampler("train", 24, 6, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for pieces in zip(*shares, strict=True):
        counts = np.array([np.bincount(ENVIRONMENTS[piece], minlength=4) for piece in pieces])
        assert sorted(counts.sum(axis=0)) == [0, 8, 8, 8]
        assert (counts == counts[0]).all()


def test_every_rank_has_the_environment_of_the_turn():
    data = make(AlternatingBatches, pretrain_steps=2)
    shares = [list(data._sampler("train", 24, 10, rank=rank, world_size=2)) for rank in range(2)]
    for step, pieces in enumerate(zip(*shares, strict=True)):
        seen = {environment for piece in pieces for environment in ENVIRONMENTS[piece]}
        assert (len(seen) > 1) == (step < 4)  # two plain steps were asked for, a round has four
        assert {len(piece) for piece in pieces} == {12}


def test_batches_are_by_default_as_large_as_the_smallest_environment_allows():
    source, e = ArraySource(np.zeros((30, 1, 4, 4), dtype=np.uint8)), np.repeat([0, 1], [12, 18])
    data = EnvironmentBatches(source, np.zeros(30, dtype=np.int64), e, Split(train=np.arange(30)))
    assert data.batch_size == 24
    assert np.bincount(e[data.train_sampler.batch(0)]).tolist() == [12, 12]
