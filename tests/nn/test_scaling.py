"""One scale for all features, and no value beyond all measure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import median_abs_deviation

from scbd.nn import FeatureScaling


def table(n: int = 300, f: int = 4, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, f)) * [1, 10, 0.1, 1000] + [0, 5, -3, 1e4]).astype(np.float32)


def batches(features: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in np.array_split(features, 7)]


def test_scale_is_that_of_median_and_mad():
    features = table()
    scaling = FeatureScaling(4, clip=None)
    assert not scaling.fitted
    scaling.fit(batches(features))
    assert scaling.fitted
    mad = median_abs_deviation(features, axis=0, scale="normal")
    expected = (features - np.median(features, axis=0)) / mad
    np.testing.assert_allclose(scaling(torch.from_numpy(features)).numpy(), expected, rtol=1e-3, atol=1e-3)


def test_scale_is_that_of_controls_where_they_are_enough():
    features, controls = table(), np.arange(300) < 20
    features[~controls] *= 3
    scaling = FeatureScaling(4, clip=None)
    scaling.fit(batches(features), controls)
    np.testing.assert_allclose(scaling.mean.numpy(), np.median(features[controls], axis=0), rtol=1e-6)
    few = FeatureScaling(4, clip=None)
    few.fit(batches(features), np.arange(300) < 15)
    np.testing.assert_allclose(few.mean.numpy(), np.median(features, axis=0), rtol=1e-6)


def test_outliers_are_clipped_and_constants_zero():
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


def test_rounding_is_no_variation():
    features = table()
    features[:, 1] = np.float32(0.7) * (1 + 1e-7 * (np.arange(300) % 3))
    scaling = FeatureScaling(4)
    scaling.fit(batches(features))
    assert scaling.sd[1] == 0 and not scaling(torch.from_numpy(features))[:, 1].any()
    assert all(value.isfinite().all() for value in scaling.state_dict().values())


def test_features_that_are_far_larger_than_they_vary_are_refused():
    """In 32 bits nothing is left of them, and all cells would be one point."""
    with pytest.raises(ValueError, match="No feature varies among training cells by more than 32 bits can tell"):
        FeatureScaling(4).fit(batches((table() + 1e12).astype(np.float32)))


@pytest.mark.parametrize("n_far", [0, 1, 3])
def test_some_that_are_far_larger_than_they_vary_are_not_left_out_without_a_word(n_far, caplog):
    features = torch.from_numpy(table()).double()
    features[:, :n_far] += 1e10
    scaling = FeatureScaling(4)
    scaling.fit([features])
    assert (scaling.sd == 0).sum() == n_far
    said = f"{n_far} of 4 features do not vary among training cells, or by no more than 32 bits can tell"
    assert (said in caplog.text) == bool(caplog.text) == (n_far > 0)


def test_what_controls_do_not_vary_in_is_scaled_by_all(caplog):
    features, controls = table(), np.arange(300) < 20
    features[controls, 2] = 5
    scaling = FeatureScaling(4, clip=None)
    scaling.fit(batches(features), controls)
    assert scaling.mean[2] == 5
    mad = median_abs_deviation(features[:, 2], scale="normal")
    np.testing.assert_allclose(scaling.sd[2].item(), mad, rtol=1e-3)
    assert "1 features do not vary among controls" in caplog.text
    FeatureScaling(4).fit(batches(features), np.arange(300) < 3)
    assert "3 of them are controls, and it takes 16" in caplog.text


def test_an_infinite_value_is_no_outlier():
    scaling = FeatureScaling(4)
    scaling.fit(batches(table()))
    scaled = scaling(torch.tensor([[np.inf, -np.inf, 0.0, 1e9]]))
    assert scaled[0, :2].isnan().all() and scaled[0, 3] == 20


def test_left_as_they_are():
    scaling = FeatureScaling(4, standardize=False)
    features = torch.from_numpy(table()).double()
    assert scaling.fitted and torch.equal(scaling(features), features.float())
    assert torch.equal(scaling.intensities(features), features)


def test_bad_input_is_said():
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
