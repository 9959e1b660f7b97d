from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.dataset_files import write_idx

from scbd.datasets import colored_digits, colored_mnist
from scbd.datasets._digits import _MNIST, colorize, read_idx


@pytest.fixture(scope="module")
def mnist(tmp_path_factory) -> Path:
    """Write files in MNIST's layout: each picture has a spot at full intensity and one random pixel of its own."""
    folder, rng = tmp_path_factory.mktemp("mnist"), np.random.default_rng(0)
    for part, n in (("train", 3000), ("t10k", 200)):
        images = np.zeros((n, 28, 28), dtype=np.uint8)
        images[:, 13:15, 13:15] = 255
        images[np.arange(n), rng.integers(28, size=n), rng.integers(28, size=n)] = rng.integers(1, 255, n)
        images[:, 14, 14] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", rng.integers(10, size=n))
    return folder


def test_colorize_digits_and_environments_returns_colours_of_the_paper():
    grey = np.ones((6, 1, 1))
    digits = np.array([0, 3, 9, 0, 3, 9])
    environments = np.array(["red"] * 3 + ["green"] * 3)
    colors = colorize(grey, digits, environments)[:, :, 0, 0] / 255
    expected = [(1, 0, 0), (1, 0.3, 0.3), (1, 0.9, 0.9), (0.9, 1, 0.9), (0.6, 1, 0.6), (0, 1, 0)]
    np.testing.assert_allclose(colors, expected, atol=1 / 255)
    np.testing.assert_array_equal(colorize(grey[:1] / 2, digits[:1], np.array(["white"]))[0, :, 0, 0], [128] * 3)


def check_colored_digits(cells) -> None:
    images = cells.obsm["single_cell_images"]
    assert images.dtype == np.uint8
    assert images.shape[1:] == (3, 32, 32)
    test = (cells.obs["split"] == "test").to_numpy()
    assert (cells.obs["environment"].to_numpy()[test] == "white").all()
    assert set(cells.obs["environment"][~test]) == {"red", "green"}
    assert (images[test][:, 0] == images[test][:, 1]).all()
    # colour alone predicts the digit in training
    brightest = images[~test].max((2, 3))
    keys = pd.DataFrame(brightest).groupby(cells.obs["digit"].to_numpy()[~test], observed=True).mean()
    assert len(keys.drop_duplicates()) == 10


def test_colored_digits_seed_determines_split_and_images():
    cells = colored_digits()
    check_colored_digits(cells)
    assert cells.obs["split"].value_counts().to_dict() == {"train": 1100, "test": 400, "validation": 297}
    assert list(cells.var_names) == ["red", "green", "blue"]
    other = colored_digits(seed=1)
    assert not other.obs["split"].equals(cells.obs["split"])
    assert np.array_equal(colored_digits().obsm["single_cell_images"], cells.obsm["single_cell_images"])


def test_colored_mnist_sizes_given_returns_requested_numbers(mnist):
    cells = colored_mnist(mnist, n_train=500, n_test=150)
    check_colored_digits(cells)
    assert cells.obs["split"].value_counts().to_dict() == {"train": 400, "test": 150, "validation": 100}
    other = colored_mnist(mnist, n_train=500, n_test=150, seed=1)
    assert not np.array_equal(other.obsm["single_cell_images"], cells.obsm["single_cell_images"])
    with pytest.raises(ValueError, match="There are 3,000 train digits, but 70,000 were requested"):
        colored_mnist(mnist, n_train=70_000)
    with pytest.raises(ValueError, match="There are 200 t10k digits, but 0 were requested"):
        colored_mnist(mnist, n_test=0)


def test_colored_mnist_real_files_returns_colored_digits(shared):
    cells = colored_mnist(shared / "mnist", n_train=500, n_test=200)
    check_colored_digits(cells)
    with pytest.raises(ValueError, match="There are 60,000 train digits"):
        colored_mnist(shared / "mnist", n_train=70_000)


def test_colored_mnist_environments_imbalance_and_digits_are_as_requested(mnist):
    cells = colored_mnist(mnist, n_train=3000, n_test=200, n_environments=5, imbalance=0.6, n_digits=4)
    obs, images = cells.obs, cells.obsm["single_cell_images"]
    assert set(obs["digit"]) == {"0", "1", "2", "3"} and 0.3 < len(obs) / 3200 < 0.5
    seen = obs["split"] != "test"
    assert set(obs["environment"][seen]) == {f"hue_{k}" for k in range(5)} and set(obs["environment"][~seen]) == {
        "white"
    }
    sizes = obs["environment"][seen].value_counts()[lambda n: n > 0]
    assert sizes.max() > 1.5 * sizes.min()
    # each digit of an environment has one colour, and no two of them share a colour
    colors = pd.DataFrame(images[seen].max((2, 3)), obs.index[seen]).groupby(
        [obs["environment"][seen].astype(str), obs["digit"][seen].astype(str)]
    )
    median = colors.median()
    assert (colors.max() == colors.min()).all(axis=None)
    assert len(median.drop_duplicates()) == 20
    sizes = colored_mnist(mnist, n_train=3000, n_test=20, n_environments=3).obs["environment"].value_counts()
    assert sizes.drop("white").between(980, 1010).all()


@pytest.mark.parametrize("wrong", [{"n_environments": 1}, {"imbalance": -1}, {"n_digits": 1}, {"n_digits": 11}])
def test_colored_mnist_number_out_of_range_raises(tmp_path, wrong):
    with pytest.raises(ValueError, match="give at least 2 environments"):
        colored_mnist(tmp_path, **wrong)


def test_colored_mnist_authors_protocol_is_equal_for_every_seed(mnist):
    one, other = (colored_mnist(mnist, protocol="authors", seed=seed) for seed in (0, 1))
    images, obs = one.obsm["single_cell_images"], one.obs
    pd.testing.assert_frame_equal(obs, other.obs)
    np.testing.assert_array_equal(images, other.obsm["single_cell_images"])
    assert images.dtype == np.float32 and images.min() == 0 and images.max() == 1
    assert obs["split"].value_counts().to_dict() == {"train": 2400, "validation": 600, "test": 200}
    labels = read_idx(mnist / "train-labels-idx1-ubyte.gz")
    np.testing.assert_array_equal(obs["digit"].astype(int)[:3000], labels)  # in the order of the files
    seen = obs["environment"][:3000]
    assert seen.eq("red").mean() == pytest.approx(0.5, abs=0.05) and (obs["environment"][3000:] == "white").all()
    # pixels at full intensity have exactly the colour of their digit and environment
    ink = images[:3000].max((2, 3))
    shade = np.where(seen == "red", labels / 10, (9 - labels) / 10)
    np.testing.assert_allclose(ink[:, 2], shade, atol=1e-6)
    np.testing.assert_array_equal(images[3000:, 0], images[3000:, 2])
    white = colored_mnist(mnist, protocol="authors", colored=False).obsm["single_cell_images"]
    np.testing.assert_array_equal(white[:, 0], images.max(1))


def test_colored_mnist_authors_protocol_with_sizes_raises(mnist):
    with pytest.raises(ValueError, match=r"one fixed data set of all digits: drop n_train=500, n_digits=4\."):
        colored_mnist(mnist, protocol="authors", n_train=500, n_digits=4)
    with pytest.raises(ValueError, match="protocol='published' is not known: use 'balanced', 'authors'"):
        colored_mnist(mnist, protocol="published")  # type: ignore[arg-type]


def test_colored_mnist_uncoloured_has_equal_labels_and_brightness(mnist):
    colored, white = (colored_mnist(mnist, n_train=50, n_test=20, colored=c) for c in (True, False))
    pd.testing.assert_frame_equal(white.obs, colored.obs)
    images = white.obsm["single_cell_images"]
    assert (images == images[:, :1]).all()
    np.testing.assert_array_equal(images.max(1), colored.obsm["single_cell_images"].max(1))


def test_mnist_checksums_real_files_match(shared):
    import hashlib

    for name, checksum in _MNIST.items():
        assert checksum == "md5:" + hashlib.md5((shared / "mnist" / name).read_bytes()).hexdigest()


def test_colored_mnist_small_files_returns_all_digits(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (50, 28, 28)).astype("uint8"), np.arange(50, dtype="uint8") % 10
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    np.testing.assert_array_equal(read_idx(tmp_path / "train-images-idx3-ubyte.gz"), images)
    cells = colored_mnist(tmp_path)
    check_colored_digits(cells)
    assert cells.n_obs == 100


def test_colored_mnist_without_path_downloads_with_checksums(tmp_path, monkeypatch):
    """Without a path, each file is fetched with its checksum."""
    asked = {}

    def fetch(url, *, checksum, folder, licence):
        assert url.startswith("https://") and folder == "mnist"
        name = url.rsplit("/", 1)[1]
        asked[name] = checksum
        return tmp_path / name

    monkeypatch.setattr("scbd.datasets._digits.download_cached", fetch)
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((5, 28, 28), dtype="uint8"))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(5, dtype="uint8"))
    assert colored_mnist().n_obs == 10
    assert asked == _MNIST


def test_colored_mnist_missing_or_broken_files_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks train-images-idx3-ubyte\.gz.*four official MNIST files"):
        colored_mnist(tmp_path)
    path = tmp_path / "x.gz"
    write_idx(path, np.zeros((4, 28, 28), dtype="uint8"))
    whole = path.read_bytes()
    for broken in (b"text", whole[: len(whole) // 2], gzip.compress(gzip.decompress(whole)[:500])):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is not a gzipped IDX file of bytes, or is truncated"):
            read_idx(path)
