from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import digamma, polygamma
from scipy.stats import median_abs_deviation

from scbd._shared.linear_maps import random_rotation
from scbd.nn import FeatureScaling, InputTransform, Preprocess
from scbd.nn._environment_scaling import ChannelSums, EnvironmentScaling, Moments, align
from scbd.nn._image_preprocessing import random_orientation


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
def test_preprocess_intensity_transforms_values(dtype, intensity, expected):
    images = np.random.default_rng(0).integers(0, 200, (3, 2, 5, 5)).astype(dtype)
    ours = Preprocess((2, 5, 5), dtype, intensity=intensity, standardize=False)(torch.from_numpy(images))
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), expected(images.astype(np.float64)), rtol=1e-6)


def test_preprocess_intensities_undo_standardisation():
    images = torch.randint(0, 256, (5, 2, 8, 8), dtype=torch.uint8)
    preprocess = Preprocess((2, 8, 8), "uint8")
    preprocess.fit([images])
    torch.testing.assert_close(preprocess.intensities(preprocess(images)), images / 255)


@pytest.mark.parametrize("standardize", [True, False])
def test_preprocess_scaled_undoes_intensities_on_a_copy(standardize):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (9, 2, 5, 5)).astype("uint8"))
    ours = Preprocess((2, 5, 5), "uint8", standardize=standardize)
    ours.fit([images])
    intensities = ours.intensities(ours(images))
    before = intensities.clone()
    torch.testing.assert_close(ours.scaled(intensities), ours(images), atol=1e-5, rtol=1e-5)
    assert torch.equal(intensities, before)


def test_preprocess_fit_stores_moments_of_all_pixels():
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
def test_preprocess_table_gives_identical_images(standardize):
    """Whole batches come from a table of all values; a single image does not."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 2**16, (70, 3, 32, 32)).astype("uint16"))
    ours = Preprocess((3, 32, 32), "uint16", standardize=standardize).eval()
    one_by_one = lambda: torch.cat([ours(image[None]) for image in images])
    assert ours._is_table_faster(images)
    assert not ours._is_table_faster(images[:1])
    assert torch.equal(ours(images), one_by_one())
    before = ours(images)
    # new statistics make a new table
    ours.mean += torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    assert torch.equal(ours(images), one_by_one())
    assert torch.equal(ours(images), before) != standardize
    assert ours(images).is_contiguous(memory_format=torch.channels_last)
    assert "table" not in " ".join(ours.state_dict())


def test_preprocess_empty_channel_stays_zero():
    images = torch.zeros(4, 2, 6, 6, dtype=torch.uint8)
    images[:, 0] = torch.arange(36).view(6, 6)
    ours = Preprocess((2, 6, 6), "uint8")
    ours.fit([images])
    assert torch.equal(ours(images)[:, 1], torch.zeros(4, 6, 6))
    assert ours(images)[:, 0].std() > 0.5


def test_preprocess_constant_channel_is_not_divided_by_rounding():
    """Its variance is a difference of equal numbers, and not always exactly zero."""
    values = 0.5 + torch.rand(60, generator=torch.Generator().manual_seed(0)).view(1, 60, 1, 1)
    ours = Preprocess((60, 37, 37), "float32")
    ours.fit([values.repeat(11, 1, 37, 37)])
    assert ours(values.repeat(1, 1, 37, 37) + 1e-3).abs().max() < 2e-3


@pytest.mark.parametrize("unit", [1e-12, 1e-8, 1.0, 1e4])
def test_preprocess_unit_of_images_has_no_effect(unit):
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


def test_preprocess_resizing_keeps_constant_images_and_means():
    images = torch.full((2, 1, 100, 80), 51, dtype=torch.uint8)
    ours = Preprocess((1, 100, 80), "uint8", image_size=(40, 32), standardize=False)
    torch.testing.assert_close(ours(images), torch.full((2, 1, 40, 32), 0.2))
    ramp = torch.linspace(0, 250, 64).round().to(torch.uint8).expand(1, 1, 64, 64)
    small = Preprocess((1, 64, 64), "uint8", image_size=16, standardize=False)(ramp)
    assert float(small.mean()) == pytest.approx(float(ramp.float().mean()) / 255, abs=2e-3)


def test_preprocess_augments_only_in_training_and_reproducibly():
    ours = Preprocess((1, 4, 4), "uint8", standardize=False, augment=True)
    images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).repeat(64, 1, 1, 1)
    turned = [ours(images, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*turned)
    assert not torch.equal(turned[0], ours(images, torch.Generator().manual_seed(4)))
    assert torch.equal(ours.eval()(images), images / 255)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(9, 2, 6, 6), (9, 3, 4, 7), (1, 1, 5, 5)])
def test_random_orientation_equals_flips_of_single_images(shape, layout):
    images = torch.randn(shape).to(memory_format=layout)
    found = random_orientation(images, torch.Generator().manual_seed(0))
    choices = torch.rand(3, len(images), generator=torch.Generator().manual_seed(0)) < 0.5
    for image, turned, (across, down, transposed) in zip(images, found, choices.T.tolist(), strict=True):
        expected = image.flip([axis for axis, wanted in ((-1, across), (-2, down)) if wanted])
        square = shape[2] == shape[3]
        torch.testing.assert_close(turned, expected.mT if transposed and square else expected, rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "n_orientations"), [((4, 4), 8), ((4, 6), 4)])
def test_random_orientation_draws_all_orientations(shape, n_orientations):
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


def test_preprocess_invalid_input_raises():
    with pytest.raises(ValueError, match="intensity='log' is not known: use 'auto', 'scale', 'arcsinh', 'none'"):
        Preprocess((1, 4, 4), "uint8", intensity="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image_size must be a positive number"):
        Preprocess((1, 4, 4), "uint8", image_size=0)
    with pytest.raises(ValueError, match="would squash images of 4 × 20 pixels"):
        Preprocess((1, 4, 20), "uint8", image_size=4)
    assert Preprocess((1, 4, 20), "uint8").output_shape == (1, 4, 20)
    with pytest.raises(ValueError, match="NaN or infinite pixels, from which no mean of a channel can be estimated"):
        Preprocess((1, 4, 4), "float32").fit([torch.full((2, 1, 4, 4), torch.nan)])
    with pytest.raises(ValueError, match="given no images"):
        Preprocess((1, 4, 4), "uint8").fit([])


def table(n: int = 300, f: int = 4, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, f)) * [1, 10, 0.1, 1000] + [0, 5, -3, 1e4]).astype(np.float32)


def batches(features: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in np.array_split(features, 7)]


def test_feature_scaling_uses_median_and_mad():
    features = table()
    scaling = FeatureScaling(4, clip=None)
    assert not scaling.fitted
    scaling.fit(batches(features))
    assert scaling.fitted
    mad = median_abs_deviation(features, axis=0, scale="normal")
    expected = (features - np.median(features, axis=0)) / mad
    np.testing.assert_allclose(scaling(torch.from_numpy(features)).numpy(), expected, rtol=1e-3, atol=1e-3)


def test_feature_scaling_enough_controls_are_the_reference():
    features, controls = table(), np.arange(300) < 20
    features[~controls] *= 3
    scaling = FeatureScaling(4, clip=None)
    scaling.fit(batches(features), controls)
    np.testing.assert_allclose(scaling.mean.numpy(), np.median(features[controls], axis=0), rtol=1e-6)
    few = FeatureScaling(4, clip=None)
    few.fit(batches(features), np.arange(300) < 15)
    np.testing.assert_allclose(few.mean.numpy(), np.median(features, axis=0), rtol=1e-6)


def test_feature_scaling_clips_outliers_and_sets_constants_to_zero():
    features = table()
    features[0, 0], features[:, 1] = 1e6, 7
    features[:, 2] = 0
    features[:10, 2] = 5  # mostly one value: its MAD is 0
    scaling = FeatureScaling(4, clip=20)
    scaling.fit(batches(features))
    scaled = scaling(torch.from_numpy(features)).numpy()
    assert scaled[0, 0] == 20 and not scaled[:, 1].any() and 0 < scaled[0, 2] < 20
    new = torch.from_numpy(features)
    new[:, 1] = 8  # constant in training, and not now
    assert not scaling(new)[:, 1].any()
    back = scaling.intensities(scaling(new))
    torch.testing.assert_close(back[1:, 0], new[1:, 0], rtol=1e-4, atol=1e-4)
    assert (back[:, 1] == 7).all()


def test_feature_scaling_rounding_does_not_count_as_variation():
    features = table()
    features[:, 1] = np.float32(0.7) * (1 + 1e-7 * (np.arange(300) % 3))
    scaling = FeatureScaling(4)
    scaling.fit(batches(features))
    assert scaling.sd[1] == 0 and not scaling(torch.from_numpy(features))[:, 1].any()
    assert all(value.isfinite().all() for value in scaling.state_dict().values())


def test_feature_scaling_features_without_resolvable_variation_raise():
    """In 32 bits nothing is left of them, and all cells would be one point."""
    with pytest.raises(ValueError, match="No feature varies among training cells by more than 32 bits can tell"):
        FeatureScaling(4).fit(batches((table() + 1e12).astype(np.float32)))


@pytest.mark.parametrize("n_far", [0, 1, 3])
def test_feature_scaling_some_features_without_resolvable_variation_are_logged(n_far, caplog):
    features = torch.from_numpy(table()).double()
    features[:, :n_far] += 1e10
    scaling = FeatureScaling(4)
    scaling.fit([features])
    assert (scaling.sd == 0).sum() == n_far
    do, are = ("does", "is") if n_far == 1 else ("do", "are")
    said = f"{n_far} of 4 features {do} not vary among training cells"
    assert (said in caplog.text and f"and {are} excluded" in caplog.text) == bool(caplog.text) == (n_far > 0)


def test_feature_scaling_feature_constant_among_controls_is_scaled_by_all_cells(caplog):
    features, controls = table(), np.arange(300) < 20
    features[controls, 2] = 5
    scaling = FeatureScaling(4, clip=None)
    scaling.fit(batches(features), controls)
    assert scaling.mean[2] == 5
    mad = median_abs_deviation(features[:, 2], scale="normal")
    np.testing.assert_allclose(scaling.sd[2].item(), mad, rtol=1e-3)
    assert "1 feature does not vary among controls" in caplog.text
    FeatureScaling(4).fit(batches(features), np.arange(300) < 3)
    assert "3 of them are controls, and scaling by controls takes 16" in caplog.text


def test_feature_scaling_infinite_value_becomes_nan():
    scaling = FeatureScaling(4)
    scaling.fit(batches(table()))
    scaled = scaling(torch.tensor([[np.inf, -np.inf, 0.0, 1e9]]))
    assert scaled[0, :2].isnan().all() and scaled[0, 3] == 20


def test_feature_scaling_without_standardize_returns_raw_features():
    scaling = FeatureScaling(4, standardize=False)
    features = torch.from_numpy(table()).double()
    assert scaling.fitted and torch.equal(scaling(features), features.float())
    assert torch.equal(scaling.intensities(features), features)


def test_feature_scaling_invalid_input_raises():
    for clip in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="clip="):
            FeatureScaling(4, clip=clip)
    scaling = FeatureScaling(4)
    with pytest.raises(ValueError, match="was given no features"):
        scaling.fit([])
    features = table()
    features[3, 1] = np.nan
    with pytest.raises(ValueError, match="missing or infinite features"):
        scaling.fit(batches(features))


def labelled(n_labels: int = 20, n: int = 30, f: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels differ in two directions, cells within a label mostly in another."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n_labels), n)
    features = rng.normal(size=(n_labels * n, f))
    features[:, 0] += 3 * rng.normal(size=n_labels)[labels]
    features[:, 1] += 2 * rng.normal(size=n_labels)[labels]
    features[:, 2] *= 10
    return features.astype(np.float32), labels


def naive_within(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    centred = np.concatenate([features[labels == u] - features[labels == u].mean(0) for u in np.unique(labels)])
    return centred.T @ centred / (len(features) - len(np.unique(labels)))


def mapped(transform: InputTransform, features: np.ndarray) -> np.ndarray:
    return transform(torch.from_numpy(features)).numpy()


def test_input_transform_lda_has_at_most_labels_minus_one_directions():
    """Beyond, directions are of noise, and would be as long as those of labels."""
    features, labels = labelled(n_labels=4, f=8)
    transform = InputTransform(8, "lda")
    transform.fit(features, labels)
    assert mapped(transform, features)[:, :3].std(0).min() > 0.1 and not mapped(transform, features)[:, 3:].any()


@pytest.mark.parametrize("kind", ["lda", "plda"])
def test_input_transform_equal_label_means_is_within(kind):
    """Plates that were standardised one by one have one mean: nothing but rounding, which is no direction."""
    features, labels = labelled(n_labels=4, f=8)
    means = np.stack([features[labels == u].mean(0) for u in range(4)])
    features -= means[labels]
    transform, within = InputTransform(8, kind), InputTransform(8, "within")
    transform.fit(features, labels)
    within.fit(features, labels)
    one, other = (mapped(t, features) for t in (transform, within))
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1), rtol=1e-4)


def test_input_transform_singular_covariance_raises():
    features, labels = labelled(f=8)
    features[:, 5] = 0
    for kind in ("within", "controls", "plda"):
        transform = InputTransform(8, kind, regularization=0)
        with pytest.raises(ValueError, match="regularization=0: the covariance has no inverse"):
            transform.fit(features, labels, controls=labels == 0)


@given(seed=st.integers(0, 100), f=st.integers(3, 9))
def test_input_transform_within_whitens_variation_within_labels(seed, f):
    features, labels = labelled(f=f, seed=seed)
    transform = InputTransform(f, "within", regularization=0)
    transform.fit(features, labels)
    white = mapped(transform, features).astype(np.float64)
    np.testing.assert_allclose(naive_within(white, labels), np.eye(f), atol=1e-3)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-3)


def test_input_transform_controls_whitens_controls():
    features, labels = labelled()
    controls = labels == 0
    transform = InputTransform(8, "controls", regularization=0)
    transform.fit(features, labels, controls)
    white = mapped(transform, features[controls])
    np.testing.assert_allclose(np.cov(white, rowvar=False), np.eye(8), atol=1e-3)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-4)  # centred on controls


def test_input_transform_discriminants_keep_differences_between_labels():
    features, labels = labelled()
    for kind in ("lda", "plda"):
        transform = InputTransform(8, kind, n_components=2, regularization=0.01)
        transform.fit(features, labels)
        found = mapped(transform, features)
        means = np.stack([found[labels == u].mean(0) for u in range(20)])
        assert (means.var(0) / naive_within(found, labels).diagonal() > 2).all()


def test_input_transform_plda_weights_survive_scaling_of_axes():
    """As a probe, or scanpy, scales them: where few directions of many tell of labels, these still count for more."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), 6)
    features = rng.normal(size=(180, 40)).astype(np.float32)
    features[:, :3] += 2 * rng.normal(size=(30, 3))[labels]
    transform = InputTransform(40, "plda")
    transform.fit(features, labels)
    found = mapped(transform, features)
    scaled = found / found.std(0)
    told = [np.square(np.linalg.norm(z, axis=1)).mean() for z in (found, scaled)]
    apart = [
        np.square(np.stack([z[labels == label].mean(0) for label in range(30)])).sum(1).mean() / total
        for z, total in zip((found, scaled), told, strict=True)
    ]
    assert apart[1] > 0.9 * apart[0] > 0.3


def test_input_transform_positions_of_controls_are_whitened():
    rng = np.random.default_rng(0)
    n_plates, n_positions = 6, 16
    place = rng.normal(size=(n_positions, 1)) * np.array([[4.0, 0, 0, 0, 0, 0]])
    features = (place + rng.normal(size=(n_plates, n_positions, 6))).reshape(-1, 6).astype(np.float32)
    positions = np.tile(np.arange(n_positions), n_plates)
    controls = positions < 8
    labels = np.where(controls, 0, positions)  # a compound is a position
    sizes = {}
    for weight in (0.0, 3.0):
        transform = InputTransform(6, "within", position_weight=weight)
        transform.fit(features, labels, controls, positions)
        means = np.stack([mapped(transform, features[positions == p]).mean(0) for p in range(8, n_positions)])
        sizes[weight] = means.var(0).sum()
    assert sizes[3.0] < 0.5 * sizes[0.0]


def test_input_transform_unfitted_is_identity_and_fitted_is_saved():
    features, labels = labelled()
    transform = InputTransform(8, n_components=3)
    np.testing.assert_array_equal(mapped(transform, features), features[:, :3])
    assert not transform.fitted
    transform.fit(features, labels)
    other = InputTransform(8, n_components=3)
    other.load_state_dict(transform.state_dict())
    assert other.fitted
    np.testing.assert_array_equal(mapped(other, features), mapped(transform, features))


def test_input_transform_invalid_arguments_raise():
    features, labels = labelled()
    with pytest.raises(ValueError, match="whitening='zca' is not known: use 'within', 'controls', 'lda', 'plda'"):
        InputTransform(8, "zca")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"n_components=9 \(n_latent of a linear encoder\): there are 8 features.*at most 8"
    ):
        InputTransform(8, n_components=9)
    with pytest.raises(ValueError, match="regularization=-1"):
        InputTransform(8, regularization=-1)
    with pytest.raises(ValueError, match="Each of the 600 training cells has a label of its own"):
        InputTransform(8).fit(features, np.arange(600))
    with pytest.raises(ValueError, match="whitening='plda' learns what labels differ in"):
        InputTransform(8).fit(features, np.zeros(600))
    with pytest.raises(ValueError, match="fewer than two among the training cells"):
        InputTransform(8, "controls").fit(features, labels, np.zeros(600, dtype=bool))


@pytest.mark.parametrize("kind", ["within", "controls", "lda", "plda"])
@pytest.mark.parametrize("n_components", [4, 30, 45])
def test_input_transform_few_rows_gives_same_map(monkeypatch, kind, n_components):
    """It is learned among the directions in which rows differ: a wide table took minutes."""
    features, labels = labelled(n_labels=9, n=4, f=100)
    known = {"controls": labels < 3, "positions": np.tile(np.arange(4), 9)}
    new = labelled(n_labels=5, n=2, f=100, seed=1)[0]
    seen: list[int] = []
    decompose = np.linalg.eigh

    def watched(matrix):
        seen.append(len(matrix))
        return decompose(matrix)

    monkeypatch.setattr(np.linalg, "eigh", watched)
    few = InputTransform(100, kind, n_components=n_components)
    few.fit(features, labels, **known)
    assert max(seen) == max(36, n_components)
    monkeypatch.setattr("scbd.nn._input_transform.span_of_rows", lambda *_: None)
    full = InputTransform(100, kind, n_components=n_components)
    full.fit(features, labels, **known)
    assert max(seen) == 100
    told = 8 if kind in ("lda", "plda") else 35  # as many axes as labels, or rows, differ in; the others are any
    for cells in (features, new):
        z = [mapped(transform, cells) for transform in (few, full)]
        if kind == "plda":  # along its axes, before these are turned
            z = [one @ random_rotation(n_components).T for one in z]
        one, other = (np.abs(each[:, :told]) for each in z)
        np.testing.assert_allclose(one, other, atol=1e-3 * other.max())


def summed(values: torch.Tensor, groups: torch.Tensor | None = None, n_groups: int = 1, batch: int = 7) -> Moments:
    sums = ChannelSums(n_groups)
    for start in range(0, len(values), batch):
        part = slice(start, start + batch)
        sums.add(values[part], None if groups is None else groups[part])
    return sums.moments()


def exact(mean, variance) -> Moments:
    """Of so many cells that there is no sampling error."""
    mean, variance = (torch.tensor(part, dtype=torch.float64) for part in (mean, variance))
    return Moments(mean, variance, torch.zeros_like(mean), torch.zeros_like(mean))


@given(shape=st.sampled_from([(30, 3), (30, 3, 4, 5)]), seed=st.integers(0, 99), n_groups=st.integers(1, 5))
def test_moments_are_those_of_cells_within_groups(shape, seed, n_groups):
    """Sums over batches beside the naive form: loops over groups and cells."""
    rng = np.random.default_rng(seed)
    groups = np.arange(30) % n_groups
    values = rng.normal(2, 3, shape) + 5 * groups.reshape(-1, *[1] * (len(shape) - 1))
    found = summed(torch.from_numpy(values), torch.from_numpy(groups), n_groups)
    pixels = values.reshape(30, 3, -1)
    cells = pixels.mean(2)
    within_cells = pixels.var(2).mean(0)
    among = np.zeros(3)
    scatter = np.zeros(3)
    for group in range(n_groups):
        chosen = groups == group
        centre = cells[chosen].mean(0)
        among += ((cells[chosen] - centre) ** 2).sum(0)
        distances = ((pixels[chosen] - centre[None, :, None]) ** 2).mean(2)
        scatter += ((distances - distances.mean(0)) ** 2).sum(0)
    freedom = 30 - n_groups
    np.testing.assert_allclose(found.mean, cells.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variance, within_cells + among / freedom, rtol=1e-4)
    np.testing.assert_allclose(found.mean_error, among / freedom / 30, rtol=1e-4)
    of_log = polygamma(1, freedom / 2) + (digamma(freedom / 2) - np.log(freedom / 2)) ** 2
    least = (among / freedom) ** 2 * of_log
    np.testing.assert_allclose(found.variance_error, np.maximum(scatter / 30 / freedom, least), rtol=1e-3)


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]])
def test_cells_nearly_alone_in_their_groups_are_one_group(groups):
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    alone, together = summed(values, torch.tensor(groups), 6), summed(values)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


def test_of_no_cells_there_are_no_moments():
    with pytest.raises(ValueError, match="There are no cells"):
        ChannelSums().moments()


@given(seed=st.integers(0, 99))
def test_aligned_values_have_the_mean_and_variance_of_the_reference(seed):
    rng = np.random.default_rng(seed)
    reference, new = (
        exact(rng.normal(size=4), rng.uniform(0.5, 2, 4)),
        exact(rng.normal(size=4), rng.uniform(0.5, 2, 4)),
    )
    shift, ratio = align(reference, new)
    torch.testing.assert_close((new.mean - shift) / ratio, reference.mean)
    torch.testing.assert_close(new.variance / ratio**2, reference.variance)


def test_without_scale_means_alone_are_aligned():
    reference, new = exact([0.0, 1.0], [1.0, 1.0]), exact([2.0, 3.0], [4.0, 4.0])
    shift, ratio = align(reference, new, scale=False)
    assert ratio.tolist() == [1, 1]
    torch.testing.assert_close(new.mean - shift, reference.mean)


def test_channels_that_do_not_vary_stay():
    shift, ratio = align(exact([0.0, 1.0], [1.0, 0.0]), exact([2.0, 5.0], [4.0, 1.0]))
    assert (shift[1], ratio[1]) == (0, 1)
    torch.testing.assert_close((shift[0], ratio[0]), (torch.tensor(2.0).double(), torch.tensor(2.0).double()))
    nothing = align(exact([0.0], [0.0]), exact([3.0], [1.0]))
    assert (nothing.shift.item(), nothing.ratio.item()) == (0, 1)


def test_few_cells_that_differ_by_chance_change_little():
    """Twenty cells of the same kind: unshrunk, the mean would move by 1 / sqrt(20) = .22 on the average."""
    generator = torch.Generator().manual_seed(0)
    reference = summed(torch.randn(20_000, 256, generator=generator))
    few = align(reference, summed(torch.randn(20, 256, generator=generator)))
    assert few.shift.square().mean().sqrt() < 0.07
    assert few.ratio.log().square().mean().sqrt() < 0.07
    moved = align(reference, summed(torch.randn(20, 256, generator=generator) + 2))
    torch.testing.assert_close(moved.shift.mean(), torch.tensor(2.0).double(), atol=0.1, rtol=0)


@given(n_groups=st.sampled_from([1, 2, 8]), size=st.integers(2, 6), seed=st.integers(0, 99))
def test_cells_that_are_too_few_for_a_variance_leave_it(n_groups, size, seed):
    """Of two cells a variance may be anything, and of pairs their distances from the mean are the same."""
    generator = torch.Generator().manual_seed(seed)
    reference = summed(torch.randn(2_000, 256, generator=generator))
    groups = torch.arange(n_groups).repeat_interleave(size)
    few = summed(torch.randn(len(groups), 256, generator=generator), groups, n_groups)
    found = align(reference, few).ratio
    assert found.log().square().mean().sqrt() < 0.2
    assert found.min() > 0.5


def environment_values(rng, n=400, n_channels=3, pixels=()):
    """Values of two environments that differ in mean and scale."""
    codes = rng.integers(2, size=n)
    values = rng.normal(size=(n, n_channels, *pixels)) * (1 + codes.reshape(-1, *[1] * (1 + len(pixels))))
    return torch.from_numpy(values + 3 * codes.reshape(-1, *[1] * (1 + len(pixels)))).float(), torch.from_numpy(codes)


@pytest.mark.parametrize("pixels", [(), (4, 4)])
@pytest.mark.parametrize("scale", [True, False])
def test_environments_are_brought_to_what_is_common(pixels, scale):
    values, codes = environment_values(np.random.default_rng(0), pixels=pixels)
    scaling = EnvironmentScaling(3, scale=scale)
    used = torch.arange(400) % 2 == 0
    scaling.learn(lambda: values.split(64), codes[:, None], used[:, None])
    found = scaling(values, codes[:, None])
    flat, before = (part.transpose(0, 1).flatten(2) if pixels else part.T[:, :, None] for part in (found, values))
    within = torch.stack([before[:, used & (codes == e)].flatten(1).var(1) for e in (0, 1)])
    for e in (0, 1):
        own, was = flat[:, used & (codes == e)].flatten(1), before[:, used & (codes == e)].flatten(1)
        torch.testing.assert_close(own.mean(1), before[:, used].flatten(1).mean(1), atol=0.06, rtol=0)
        torch.testing.assert_close(own.std(1), within.mean(0).sqrt() if scale else was.std(1), atol=0.02, rtol=0.08)


def test_of_few_cells_an_environment_says_little():
    """Two cells of an environment whose mean is 3 away, beside four hundred of one: half of it is sampling."""
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.normal(size=(402, 8))).float()
    values[400:] += torch.tensor([[1.0], [-1.0]])
    codes = torch.tensor([0] * 400 + [1] * 2)[:, None]
    scaling = EnvironmentScaling(8)
    scaling.learn(lambda: [values], codes, torch.ones_like(codes, dtype=torch.bool))
    raw = (values[400:].mean(0) - values[:400].mean(0)).abs().mean()
    assert scaling.shift[1].abs().mean() < 0.5 * raw
    assert scaling.n_cells.tolist() == [400, 2]


def test_columns_of_environments_come_one_after_the_other():
    rng = np.random.default_rng(2)
    codes = torch.from_numpy(rng.integers(3, size=(3_000, 2)))
    effects = torch.tensor([[0.0, 2.0, -1.0], [0.5, -3.0, 1.0]])
    values = (
        torch.from_numpy(rng.normal(size=(3_000, 1))) + sum(effects[k, codes[:, k]][:, None] for k in (0, 1))
    ).float()
    scaling = EnvironmentScaling(1, 2)
    used = torch.ones_like(codes, dtype=torch.bool)
    scaling.learn(lambda: values.split(1000), codes, used)
    found = scaling(values, codes)
    for column in (0, 1):
        means = torch.stack([found[codes[:, column] == code].mean() for code in range(3)])
        assert means.max() - means.min() < 0.1
    one = EnvironmentScaling(1, 2)
    one.learn(lambda: values.split(1000), codes, used & torch.tensor([True, False]))
    torch.testing.assert_close(
        one(values, codes), one(values, torch.stack([codes[:, 0], -torch.ones(3_000).long()], 1))
    )


def test_environments_that_were_not_learned_stay_and_those_that_were_stay_learned():
    values, codes = environment_values(np.random.default_rng(3))
    scaling, every = EnvironmentScaling(3), torch.ones(400, 1, dtype=torch.bool)
    torch.testing.assert_close(scaling(values, codes[:, None]), values)
    scaling.learn(lambda: [values[:200]], codes[:200, None], every[:200])
    first = scaling.shift[:2].clone()
    for strange in (-1, 2, 7):
        unknown = torch.full((400, 1), strange)
        torch.testing.assert_close(scaling(values, unknown), values)
        assert not scaling.known(unknown).any()
    later = codes[200:, None] + 1  # 1 is known, 2 is new
    scaling.learn(lambda: [values[200:]], later, every[200:])
    torch.testing.assert_close(scaling.shift[:2], first)
    assert scaling.known(torch.tensor([[0], [1], [2], [3]])).flatten().tolist() == [True, True, True, False]
    again = EnvironmentScaling(3)
    again.load_state_dict(scaling.state_dict())
    torch.testing.assert_close(again(values[200:], later), scaling(values[200:], later))
