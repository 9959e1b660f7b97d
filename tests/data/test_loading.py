from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scbd.data import ArraySource, ImageDataModule, Split
from scbd.data._loading import BatchLoader, copy_to_device, read_tensor
from scbd.data._sources import IMAGE_DTYPES
from scbd.nn import Groups


def module(n: int = 60, n_labels: int = 3, **kwargs) -> tuple[ImageDataModule, np.ndarray]:
    images = np.arange(n, dtype="uint16")[:, None, None, None] * np.ones((1, 2, 4, 4), dtype="uint16")
    y = np.arange(n) % n_labels
    split = Split(train=np.arange(40), validation=np.arange(40, n))
    return ImageDataModule(ArraySource(images), y, y // 2, split, **kwargs), y


def test_train_dataloader_batches_have_images_and_codes_of_the_same_cells():
    data, y = module(batch_size=8, max_steps=12)
    batches = list(data.train_dataloader())
    assert len(batches) == 12
    for batch in batches:
        assert batch["inputs"].dtype == torch.uint16
        assert batch["inputs"].shape == (8, 2, 4, 4)
        rows = batch["inputs"][:, 0, 0, 0].numpy()
        assert rows.max() < 40
        np.testing.assert_array_equal(batch["y"], y[rows])
        np.testing.assert_array_equal(batch["e"], y[rows] // 2)


def test_transfer_batch_to_device_keeps_groups_of_codes(monkeypatch):
    data, _ = module(batch_size=8, max_steps=2)
    batch = next(iter(data.train_dataloader()))
    pairs = Groups.of(batch["y"]).cross(Groups.of(batch["e"]))
    monkeypatch.setattr("scbd.nn._groups.np.unique", None)  # counting again would fail
    for device in ("cpu", "meta"):
        moved = data.transfer_batch_to_device(batch, torch.device(device), 0)
        assert {value.device.type for value in moved.values()} == {device}
        found = Groups.of(moved["y"]).cross(Groups.of(moved["e"]))
        np.testing.assert_array_equal(found.codes, pairs.codes)
        assert found.index.device.type == device


def test_image_data_module_int8_codes_become_int64():
    """Codes of few categories are int8 in pandas, in which pairs of cells cannot be counted."""
    source, codes = ArraySource(np.zeros((6, 1, 4, 4), dtype="uint8")), np.arange(6, dtype="int8") % 2
    batch = ImageDataModule(source, codes, codes, Split(np.arange(6)), batch_size=4).example_batch()
    assert batch["y"].dtype == batch["e"].dtype == torch.int64


def test_val_dataloader_each_pass_yields_equal_batches_of_validation_cells():
    data, _ = module(batch_size=8)
    loader = data.val_dataloader()
    assert isinstance(loader, BatchLoader)
    passes = [torch.cat([batch["inputs"][:, 0, 0, 0] for batch in loader]).numpy() for _ in range(2)]
    np.testing.assert_array_equal(passes[0], passes[1])
    assert passes[0].min() >= 40
    assert len(passes[0]) == 16
    np.testing.assert_array_equal(data.example_batch()["inputs"][:, 0, 0, 0].numpy(), passes[0][:8])


@pytest.mark.parametrize("perturbations", [None, 4])
def test_matched_dataloader_batches_have_labels_of_validation_batches(perturbations):
    data, _ = module(batch_size=8, perturbations_per_batch=perturbations)
    loaders: list[Any] = [data.val_dataloader(), data.matched_dataloader()]
    of_validation, of_training = map(list, loaders)
    assert len(of_validation) == len(of_training) == 2
    for new, known in zip(of_validation, of_training, strict=True):
        np.testing.assert_array_equal(new["y"], known["y"])
        assert known["inputs"].numpy().max() < 40 <= new["inputs"].numpy().min()
    again = list(loaders[1])
    np.testing.assert_array_equal(again[0]["inputs"], of_training[0]["inputs"])


def test_val_dataloader_no_validation_cells_returns_empty_list():
    data, _ = module(n=40, batch_size=8)
    assert data.val_dataloader() == data.matched_dataloader() == []
    assert len(data.example_batch()["y"]) == 8


@pytest.mark.parametrize(
    ("n_labels", "batch_size", "asked", "used"),
    [
        (3, 24, "auto", None),  # shuffling gives eight cells per perturbation
        (5, 30, "auto", 3),  # shuffling would give six
        (25, 40, "auto", None),  # perturbations have too few cells
        (3, 8, 2, 2),
        (20, 8, None, None),
    ],
)
def test_image_data_module_perturbations_per_batch_auto_is_chosen(n_labels, batch_size, asked, used):
    data, _ = module(n_labels=n_labels, batch_size=batch_size, perturbations_per_batch=asked)
    assert data.perturbations_per_batch == used
    batch = next(iter(data.train_dataloader()))
    assert len(batch["y"]) == batch_size
    if used:
        assert len(batch["y"].unique()) <= -(-batch_size // (batch_size // used)) + 1


def test_image_data_module_few_cells_default_batch_has_all_cells():
    data, _ = module()
    assert data.batch_size == 40
    assert data.steps_per_epoch == 1


def on_disk(path: Path, images: np.ndarray) -> ArraySource:
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=images.dtype, shape=images.shape)
    mapped[:] = images
    return ArraySource(mapped)


def test_image_data_module_neighbours_auto_is_true_for_mixed_rows_on_disk(tmp_path):
    images = np.arange(240, dtype="uint8")[:, None, None, None] * np.ones((1, 1, 2, 2), dtype="uint8")
    disk, memory = on_disk(tmp_path / "i.npy", images), ArraySource(images)
    rng = np.random.default_rng(0)
    y, e, guide = np.repeat(np.arange(6), 40), rng.integers(3, size=240), rng.integers(2, size=240)
    in_turn = np.arange(240) % 40 // 10
    settings: dict[str, Any] = {"batch_size": 24, "perturbations_per_batch": 3, "max_steps": 9}
    cases: list[tuple[ArraySource, np.ndarray, dict[str, Any], bool]] = [
        (disk, e, {}, True),
        (memory, e, {}, False),  # scattered rows are read as fast
        (disk, in_turn, {}, False),  # rows are sorted by well
        (disk, e, {"mixed_by": [guide]}, True),
        (disk, e, {"mixed_by": [guide, in_turn]}, False),  # rows are sorted by plate
        (disk, e, {"preload": "device"}, False),
        (disk, e, {"neighbours": False}, False),
        (memory, e, {"neighbours": True}, True),
    ]
    for source, wells, kwargs, neighbours in cases:
        data = ImageDataModule(source, y, wells, Split(train=np.arange(240)), **settings, **kwargs)
        assert data.neighbours is neighbours
        pairs = 0
        for batch in data.train_dataloader():
            rows = batch["inputs"][:, 0, 0, 0].numpy().astype(int).reshape(3, 8)
            assert all(len(set(y[row])) == 1 for row in rows)
            pairs += ((rows[:, 1::2] - rows[:, ::2]) % 40 == 1).sum()
        assert bool(pairs == 9 * 3 * 4) is neighbours


@pytest.mark.parametrize(("source", "neighbours"), [("memory", "auto"), ("disk", True)])
def test_image_data_module_mixed_by_not_needed_is_not_consumed(source, neighbours, tmp_path):
    """For millions of cells, computing the codes of all columns takes long."""
    images = np.ones((60, 1, 2, 2), dtype="uint8")
    images_of = {"memory": ArraySource(images), "disk": on_disk(tmp_path / "i.npy", images)}

    def codes():
        raise AssertionError
        yield

    y = np.repeat(np.arange(6), 10)
    split = Split(train=np.arange(60))
    data = ImageDataModule(images_of[source], y, y, split, batch_size=8, neighbours=neighbours, mixed_by=codes())
    assert data.neighbours is (neighbours is True)


@pytest.mark.parametrize("neighbours", [False, True])
def test_val_dataloader_batches_have_no_single_cell(neighbours):
    n = 400
    images, y = np.zeros((n, 1, 2, 2), dtype="uint8"), np.arange(n) % 20
    split = Split(train=np.arange(200), validation=np.arange(200, n))
    settings: dict[str, Any] = {"batch_size": 64, "perturbations_per_batch": 30, "neighbours": neighbours}
    data = ImageDataModule(ArraySource(images), y % 12, y, split, **settings)
    loader = data.val_dataloader()
    assert isinstance(loader, BatchLoader)
    for batch in loader:
        assert batch["y"].unique(return_counts=True)[1].min() > 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 64), ("perturbations_per_batch", "all"), ("preload", "gpu"), ("neighbours", "some")],
)
def test_image_data_module_invalid_setting_raises(name, value):
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        module(**{name: value})


ROWS = [np.array([7, 3, 3, 19]), slice(4, 9), np.array([], dtype=int)]


def images_of(dtype: str, n: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, (n, 2, 3, 5)).astype(dtype)


@pytest.mark.parametrize("dtype", IMAGE_DTYPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_read_tensor_array_or_device_copy_returns_requested_rows(dtype, rows):
    images = images_of(dtype)
    images[3] = np.iinfo(dtype).max if dtype.startswith("u") else -1.5
    resident = copy_to_device(ArraySource(images), torch.device("cpu"))
    for source in (resident, ArraySource(images)):
        np.testing.assert_array_equal(read_tensor(source, rows).numpy(), images[rows])


def test_copy_to_device_reads_in_blocks(monkeypatch):
    asked = []

    class Source(ArraySource):
        def read(self, rows, out=None):
            asked.append(rows)
            return super().read(rows, out)

    images = images_of("uint8")
    monkeypatch.setattr("scbd.data._loading._COPY_BYTES", 7 * images[0].nbytes)
    resident = copy_to_device(Source(images), torch.device("cpu"))
    assert asked == [slice(0, 7), slice(7, 14), slice(14, 21)]
    np.testing.assert_array_equal(resident.numpy(), images)
    monkeypatch.setattr("scbd.data._loading._COPY_BYTES", images[0].nbytes // 2)  # less than one image
    resident = copy_to_device(Source(images[:3]), torch.device("cpu"))
    assert asked[3:] == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_copy_to_device_too_large_images_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    with pytest.raises(ValueError, match="all inputs take 0.0 GiB, cuda:0 has 0.0 GiB free: leave preload out"):
        copy_to_device(ArraySource(images_of("float32")), torch.device("cuda:0"))
