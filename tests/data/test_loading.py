from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scbd.data import ArraySource, BatchLoader, ImageDataModule, Split


def module(n: int = 60, n_labels: int = 3, **kwargs) -> tuple[ImageDataModule, np.ndarray]:
    images = np.arange(n, dtype="uint16")[:, None, None, None] * np.ones((1, 2, 4, 4), dtype="uint16")
    y = np.arange(n) % n_labels
    split = Split(train=np.arange(40), validation=np.arange(40, n))
    return ImageDataModule(ArraySource(images), y, y // 2, split, **kwargs), y


def test_batches_keep_images_and_labels_together_as_integers():
    data, y = module(batch_size=8, max_steps=12)
    batches = list(data.train_dataloader())
    assert len(batches) == 12
    for batch in batches:
        assert batch["images"].dtype == torch.uint16
        assert batch["images"].shape == (8, 2, 4, 4)
        rows = batch["images"][:, 0, 0, 0].numpy()
        assert rows.max() < 40
        np.testing.assert_array_equal(batch["y"], y[rows])
        np.testing.assert_array_equal(batch["e"], y[rows] // 2)


def test_validation_is_the_same_each_time_and_of_validation_cells():
    data, _ = module(batch_size=8)
    loader = data.val_dataloader()
    assert isinstance(loader, BatchLoader)
    passes = [torch.cat([batch["images"][:, 0, 0, 0] for batch in loader]).numpy() for _ in range(2)]
    np.testing.assert_array_equal(passes[0], passes[1])
    assert passes[0].min() >= 40
    assert len(passes[0]) == 16
    np.testing.assert_array_equal(data.example_batch()["images"][:, 0, 0, 0].numpy(), passes[0][:8])


def test_without_validation_cells():
    data, _ = module(n=40, batch_size=8)
    assert data.val_dataloader() == []
    assert len(data.example_batch()["y"]) == 8


@pytest.mark.parametrize(
    ("n_labels", "batch_size", "asked", "used"),
    [
        (3, 24, "auto", None),  # eight partners by plain shuffling
        (5, 30, "auto", 3),  # six: draw perturbations instead
        (25, 40, "auto", None),  # single cells cannot fill such batches
        (3, 8, 2, 2),
        (20, 8, None, None),
    ],
)
def test_how_batches_are_drawn(n_labels, batch_size, asked, used):
    data, y = module(n_labels=n_labels, batch_size=batch_size, perturbations_per_batch=asked)
    assert data.perturbations_per_batch == used
    batch = next(iter(data.train_dataloader()))
    assert len(batch["y"]) == batch_size
    if used:
        assert len(batch["y"].unique()) <= -(-batch_size // (batch_size // used)) + 1


def test_default_batch_is_all_cells_of_a_small_table():
    data, _ = module()
    assert data.batch_size == 40
    assert data.steps_per_epoch == 1


def test_bad_settings_are_said_before_any_work():
    with pytest.raises(ValueError, match="batch_size=64 is larger than the 40 cells"):
        module(batch_size=64)
    with pytest.raises(ValueError, match="perturbations_per_batch must be a number, None or 'auto', got 'all'"):
        module(perturbations_per_batch="all")
    with pytest.raises(ValueError, match="preload='gpu' is not known: use 'device'"):
        module(preload="gpu")


def test_neighbours_are_drawn_from_disks_that_hold_them(tmp_path):
    images = np.lib.format.open_memmap(tmp_path / "i.npy", mode="w+", dtype="uint8", shape=(120, 1, 2, 2))
    images[:] = np.arange(120)[:, None, None, None]
    y, e = np.repeat(np.arange(6), 20), np.random.default_rng(0).integers(3, size=120)
    settings: dict[str, Any] = {"batch_size": 12, "perturbations_per_batch": 3, "max_steps": 9}
    cases: list[tuple[ArraySource, np.ndarray, dict[str, Any], bool]] = [
        (ArraySource(images), e, {}, True),
        (ArraySource(np.array(images)), e, {}, False),  # memory reads any rows
        (ArraySource(images), np.arange(120) % 20 // 5, {}, False),  # well after well
        (ArraySource(images), e, {"preload": "device"}, False),
        (ArraySource(images), e, {"neighbours": False}, False),
        (ArraySource(np.array(images)), e, {"neighbours": True}, True),
    ]
    for source, wells, kwargs, neighbours in cases:
        data = ImageDataModule(source, y, wells, Split(train=np.arange(120)), **settings, **kwargs)
        assert data.neighbours is neighbours
        stretches = 0
        for batch in data.train_dataloader():
            rows = batch["images"][:, 0, 0, 0].numpy().astype(int).reshape(3, 4)
            assert all(len(set(y[row])) == 1 for row in rows)
            stretches += sum((np.diff(row) % 20 == 1).all() for row in rows)
        assert bool(stretches == 27) is neighbours
    with pytest.raises(ValueError, match="neighbours='some' is not known: use True, False or 'auto'"):
        module(neighbours="some")
