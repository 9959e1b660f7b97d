from __future__ import annotations

import numpy as np
import pytest
import torch

from scbd.nn import Preprocess, random_orientation


@pytest.mark.parametrize(
    ("dtype", "intensity", "expected"),
    [
        ("uint8", "auto", lambda x: x / 255),
        ("uint16", "auto", np.arcsinh),
        ("uint16", "scale", lambda x: x / 65535),
        ("float32", "auto", lambda x: x),
        ("float16", "none", lambda x: x),
        ("uint8", "arcsinh", np.arcsinh),
    ],
)
def test_intensity(dtype, intensity, expected):
    images = np.random.default_rng(0).integers(0, 200, (3, 2, 5, 5)).astype(dtype)
    ours = Preprocess((2, 5, 5), dtype, intensity=intensity, standardize=False)(torch.from_numpy(images))
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), expected(images.astype(np.float64)), rtol=1e-6)


def test_intensities_undo_the_standardisation():
    images = torch.randint(0, 256, (5, 2, 8, 8), dtype=torch.uint8)
    preprocess = Preprocess((2, 8, 8), "uint8")
    preprocess.fit([images])
    torch.testing.assert_close(preprocess.intensities(preprocess(images)), images / 255)


@pytest.mark.parametrize("standardize", [True, False])
def test_intensities_are_scaled_again_and_left_as_they_are(standardize):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (9, 2, 5, 5)).astype("uint8"))
    ours = Preprocess((2, 5, 5), "uint8", standardize=standardize)
    ours.fit([images])
    intensities = ours.intensities(ours(images))
    before = intensities.clone()
    torch.testing.assert_close(ours.scaled(intensities), ours(images), atol=1e-5, rtol=1e-5)
    assert torch.equal(intensities, before)


def test_statistics_are_those_of_all_pixels_and_are_saved():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 5000, (30, 3, 8, 8)).astype("uint16"))
    ours = Preprocess((3, 8, 8), "uint16")
    assert not ours.fitted
    ours.fit(images.view(torch.int16).view(torch.uint16)[i : i + 7] for i in range(0, 30, 7))
    pixels = np.arcsinh(images.numpy().astype(np.float64))
    np.testing.assert_allclose(ours.mean.flatten(), pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(ours.sd.flatten(), pixels.std((0, 2, 3)), rtol=1e-6)
    again = Preprocess((3, 8, 8), "uint16")
    again.load_state_dict(ours.state_dict())
    assert again.fitted
    torch.testing.assert_close(again(images), ours(images))


@pytest.mark.parametrize("standardize", [True, False])
def test_large_batches_are_looked_up_and_equal_to_the_bit(standardize):
    """Whole batches come from a table of all values; a single image does not."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 2**16, (70, 3, 32, 32)).astype("uint16"))
    ours = Preprocess((3, 32, 32), "uint16", standardize=standardize).eval()
    one_by_one = lambda: torch.cat([ours(image[None]) for image in images])
    assert ours._worth_a_table(images)
    assert not ours._worth_a_table(images[:1])
    assert torch.equal(ours(images), one_by_one())
    before = ours(images)
    # new statistics make a new table
    ours.mean += torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    assert torch.equal(ours(images), one_by_one())
    assert torch.equal(ours(images), before) != standardize
    assert ours(images).is_contiguous(memory_format=torch.channels_last)
    assert "table" not in " ".join(ours.state_dict())


def test_an_empty_channel_stays_at_zero():
    images = torch.zeros(4, 2, 6, 6, dtype=torch.uint8)
    images[:, 0] = torch.arange(36).view(6, 6)
    ours = Preprocess((2, 6, 6), "uint8")
    ours.fit([images])
    assert torch.equal(ours(images)[:, 1], torch.zeros(4, 6, 6))
    assert ours(images)[:, 0].std() > 0.5


def test_a_channel_of_one_value_is_not_divided_by_rounding():
    """Its variance is a difference of equal numbers, and not always exactly zero."""
    values = 0.5 + torch.rand(60, generator=torch.Generator().manual_seed(0)).view(1, 60, 1, 1)
    ours = Preprocess((60, 37, 37), "float32")
    ours.fit([values.repeat(11, 1, 37, 37)])
    assert ours(values.repeat(1, 1, 37, 37) + 1e-3).abs().max() < 2e-3


@pytest.mark.parametrize("unit", [1e-12, 1e-8, 1.0, 1e4])
def test_the_unit_of_an_image_does_not_matter(unit):
    """What is a channel of one value is told by its own size."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 5, 5, generator=generator)
    images[:, 1] = 0.7 * (1 + 1e-7 * torch.randn(8, 5, 5, generator=generator))
    images[:, 2] = 0
    plain, scaled = Preprocess((3, 5, 5), "float32"), Preprocess((3, 5, 5), "float32")
    plain.fit([images])
    scaled.fit([images * unit])
    assert scaled.sd[1:].flatten().tolist() == [1, 1]
    torch.testing.assert_close(scaled(images * unit)[:, 0], plain(images)[:, 0], rtol=1e-4, atol=1e-4)
    assert plain(images)[:, 0].std() > 0.9


def test_resizing_keeps_flat_images_flat_and_means():
    images = torch.full((2, 1, 100, 80), 51, dtype=torch.uint8)
    ours = Preprocess((1, 100, 80), "uint8", image_size=(40, 32), standardize=False)
    torch.testing.assert_close(ours(images), torch.full((2, 1, 40, 32), 0.2))
    ramp = torch.linspace(0, 250, 64).round().to(torch.uint8).expand(1, 1, 64, 64)
    small = Preprocess((1, 64, 64), "uint8", image_size=16, standardize=False)(ramp)
    assert float(small.mean()) == pytest.approx(float(ramp.float().mean()) / 255, abs=2e-3)


def test_augmentation_only_in_training_and_reproducibly():
    ours = Preprocess((1, 4, 4), "uint8", standardize=False, augment=True)
    images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).repeat(64, 1, 1, 1)
    turned = [ours(images, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*turned)
    assert not torch.equal(turned[0], ours(images, torch.Generator().manual_seed(4)))
    assert torch.equal(ours.eval()(images), images / 255)


@pytest.mark.parametrize(("shape", "n_orientations"), [((4, 4), 8), ((4, 6), 4)])
def test_all_orientations_occur_and_no_other(shape, n_orientations):
    image = torch.arange(shape[0] * shape[1]).float().view(1, 1, *shape)
    found = {
        tuple(x.flatten().tolist())
        for x in random_orientation(image.repeat(400, 1, 1, 1), torch.Generator().manual_seed(0))
    }
    assert len(found) == n_orientations
    square = image[0, 0]
    if n_orientations == 8:
        dihedral = {tuple(torch.rot90(y, k).flatten().tolist()) for y in (square, square.T) for k in range(4)}
        assert found == dihedral


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="intensity='log' is not known: use one of auto, scale, arcsinh, none"):
        Preprocess((1, 4, 4), "uint8", intensity="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image_size must be a positive number"):
        Preprocess((1, 4, 4), "uint8", image_size=0)
    with pytest.raises(ValueError, match="would squash images of 4 × 20 pixels"):
        Preprocess((1, 4, 20), "uint8", image_size=4)
    assert Preprocess((1, 4, 20), "uint8").output_shape == (1, 4, 20)
    with pytest.raises(ValueError, match="NaN or infinite pixels, from which no channel's mean can be learned"):
        Preprocess((1, 4, 4), "float32").fit([torch.full((2, 1, 4, 4), torch.nan)])
    with pytest.raises(ValueError, match="given no images"):
        Preprocess((1, 4, 4), "uint8").fit([])
