from __future__ import annotations

import math
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import variance as naive

from scbd.nn import explained_variance, invariance_statistic
from scbd.nn._explained_variance import BatchDesign, ExplainedVariance, Partners, environment_effects, estimate_effects

both = pytest.mark.parametrize("partners", ["within", "across"])


def codes(n: int, highest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, highest), min_size=n, max_size=n)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels and environments of any size, codes with gaps and below zero, features of any scale."""
    n = draw(st.integers(2, 14))
    # few codes, or most cells have no partner to be compared with
    e, y = (torch.tensor([2 * code - 2 for code in draw(codes(n, draw(st.integers(0, 3))))]) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    features = torch.randn(n, draw(st.integers(1, 5)), dtype=torch.float64, generator=generator)
    return features * 10.0 ** draw(st.integers(-2, 3)) + draw(st.integers(-3, 3)), e, y


@both
@given(batch=batches())
@settings(max_examples=50)
def test_explained_variance_share_equals_loop_over_cells(batch, partners):
    features, e, y = batch
    expected = naive.explained_variance(features, e, y, partners)
    torch.testing.assert_close(explained_variance(features, e, y, partners=partners).share, expected)


@both
@given(batch=batches())
def test_explained_variance_error_equals_loop_over_pairs(batch, partners):
    features, e, y = batch
    expected = naive.error(features, e, y, partners)
    torch.testing.assert_close(
        explained_variance(features, e, y, partners=partners).error, expected, atol=1e-7, rtol=1e-6
    )


def effects(n: int, n_labels: int, n_environments: int, strength: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Features made of labels' means, environments' effects within labels, and noise of variance one."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(n_labels, (n,), generator=generator)
    e = torch.randint(n_environments, (n,), generator=generator)
    means, effect = (torch.randn(n_labels, width, 8, generator=generator) for width in (1, n_environments))
    effect = strength * (effect - effect.mean(1, keepdim=True))
    return means[y, 0] + effect[y, e] + torch.randn(n, 8, generator=generator), e, y


def of_design(features: torch.Tensor, design: BatchDesign) -> dict[Partners, ExplainedVariance]:
    """By both pairings, of a design that is made once for many draws: that takes longer than what is computed of it."""
    found = estimate_effects([features], design)
    freedom = [torch.tensor(pairing.freedom_of_one) for pairing in design.pairings]
    each = zip(get_args(Partners), *(values[:, 0] for values in found), freedom, strict=True)
    return {name: ExplainedVariance(*values) for name, *values in each}


@both
def test_estimate_effects_design_can_be_reused(partners):
    """As the tests below have it."""
    features, e, y = effects(64, 4, 3, 0.5, 0)
    expected = explained_variance(features, e, y, partners=partners)
    torch.testing.assert_close(
        tuple(of_design(features, BatchDesign(e, y))[partners]), tuple(expected), check_dtype=False
    )


@pytest.mark.parametrize(("n_labels", "n_environments"), [(1, 2), (10, 2), (10, 34), (60, 8)])
def test_explained_variance_of_noise_is_unbiased(n_labels, n_environments):
    draws = (effects(256, n_labels, n_environments, 0.0, seed) for seed in range(200))
    found = [of_design(features, BatchDesign(e, y)) for features, e, y in draws]
    for partners in get_args(Partners):
        shares = torch.stack([one[partners].share for one in found])
        assert abs(shares.mean()) < 4 * shares.std() / math.sqrt(200)
        assert shares.std() > 0


@pytest.mark.parametrize(
    ("n", "n_labels", "n_environments", "n_features"),
    [(128, 10, 2, 8), (512, 10, 2, 64), (512, 64, 34, 64), (256, 1, 2, 300), (300, 20, 5, 8)],
)
def test_explained_variance_error_equals_sd_over_random_environments(n, n_labels, n_environments, n_features):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(n_labels, (n,), generator=generator)
    e = torch.randint(n_environments, (n,), generator=generator)
    mixing = torch.randn(n_features, n_features, generator=generator) * torch.logspace(0, -2, n_features)
    means = 2 * torch.randn(n_labels, n_features, generator=generator)
    features = means[y] + torch.randn(n, n_features, generator=generator) @ mixing
    found = []
    for _ in range(200):
        drawn = e.clone()
        for label in range(n_labels):
            rows = torch.nonzero(y == label)[:, 0]
            drawn[rows] = e[rows[torch.randperm(len(rows), generator=generator)]]
        found.append(of_design(features, BatchDesign(drawn, y)))
    for partners, one in of_design(features, BatchDesign(e, y)).items():
        scatter = torch.stack([drawn[partners].share for drawn in found]).std()
        torch.testing.assert_close(one.error, scatter, rtol=0.2, atol=0)


def test_invariance_statistic_of_noise_has_same_scale_in_every_design():
    scatter = []
    for n, n_labels, n_environments in ((64, 4, 2), (256, 10, 2), (256, 30, 34)):
        draws = [effects(n, n_labels, n_environments, 0.0, seed) for seed in range(150)]
        values = torch.stack([invariance_statistic([f, 100 * f], e, y) for f, e, y in draws])
        scatter.append(float(values.std()))
    # the average of two that are nearly independent
    assert all(0.5 < sd < 1.0 for sd in scatter), scatter


def test_explained_variance_share_equals_simulated_share():
    features, e, y = effects(8000, 4, 5, 0.5, 0)
    groups = [[features[(y == label) & (e == place)].mean(0) for place in range(5)] for label in range(4)]
    between = torch.stack([torch.stack(row).var(0, correction=0) for row in groups]).mean(0)
    expected = (between / features.var(0)).mean()
    # less what eighty partners a group cannot tell
    torch.testing.assert_close(explained_variance(features, e, y).share, expected, rtol=0.05, atol=0)


def test_explained_variance_single_label_within_equals_across():
    features, e, y = effects(60, 1, 4, 0.5, 0)
    within, across = (explained_variance(features, e, y, partners=p) for p in ("within", "across"))
    torch.testing.assert_close(tuple(within), tuple(across))


def test_explained_variance_common_effect_has_smaller_error_across_labels():
    generator = torch.Generator().manual_seed(0)
    y, e = (torch.randint(n, (512,), generator=generator) for n in (56, 34))
    means, common = (torch.randn(n, 8, generator=generator) for n in (56, 34))
    features = means[y] + 0.3 * common[e] + torch.randn(512, 8, generator=generator)
    within, across = (explained_variance(features, e, y, partners=p) for p in ("within", "across"))
    assert across.share / across.error > 4 * within.share / within.error > 0


@both
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_explained_variance_scaled_features_gives_same_share(scale, partners):
    features, e, y = effects(200, 5, 3, 0.5, 0)
    expected = explained_variance(features, e, y, partners=partners)
    one = features.clone()
    one[:, 0] *= scale
    for scaled in (features * scale, one):
        ours = explained_variance(scaled, e, y, partners=partners)
        torch.testing.assert_close(tuple(ours), tuple(expected), rtol=1e-3, atol=1e-5)


def test_explained_variance_has_no_gradient_along_scale():
    features, e, y = effects(200, 5, 3, 0.5, 0)
    scale = torch.ones((), requires_grad=True)
    explained_variance(features * scale, e, y).share.backward()
    assert scale.grad is not None
    assert abs(scale.grad) < 1e-6


def test_explained_variance_within_detects_opposite_effects():
    y, e = torch.arange(400) % 10, torch.arange(400) // 10 % 2
    shade = torch.where(e == 0, y, 9 - y).float()[:, None]  # the same distribution in both, and the same mean
    assert explained_variance(shade, e, y).share > 0.9
    assert abs(explained_variance(shade, e, torch.zeros_like(y)).share) < 0.01
    assert abs(explained_variance(shade, e, y, partners="across").share) < 0.01  # bright here and dark there cancel
    assert abs(explained_variance(y.float()[:, None], e, y).share) < 1e-6  # all explained by the label


@pytest.mark.parametrize(
    ("y", "e"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [0, 0, 1, 1]),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
    ],
    ids=["one environment", "no partner", "no partner of the label", "environment and label are one"],
)
def test_invariance_statistic_no_pairs_is_zero(y, e):
    features = torch.randn(4, 3).requires_grad_()
    value = invariance_statistic([features, features], torch.tensor(e), torch.tensor(y))
    value.backward()
    torch.testing.assert_close(value.detach(), torch.zeros(()))
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


def test_invariance_statistic_without_pairs_within_labels_uses_pairs_across():
    """A compound has one well on each plate: none has a partner of its own label and plate."""
    y, e = torch.arange(60) % 20, torch.arange(60) // 20
    features = torch.randn(60, 8, generator=torch.manual_seed(0)) + 2 * e[:, None]
    within, across = (explained_variance(features, e, y, partners=p) for p in ("within", "across"))
    assert within.error == 0 < across.error
    # not an average with a zero
    torch.testing.assert_close(invariance_statistic([features], e, y), across.share / across.error)


def arrayed(edge: float, plate_effect: float, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Twelve plates of 96 compounds, each with a layout of its own: features, plate, position, compound."""
    generator = torch.Generator().manual_seed(seed)
    plate, place = torch.arange(12).repeat_interleave(96), torch.arange(96).repeat(12)
    compound = torch.cat([torch.randperm(96, generator=generator) for _ in range(12)])
    row, column = place // 12, place % 12
    is_edge = (row % 7 == 0) | (column % 11 == 0)
    means, plates, noise = (torch.randn(n, 16, generator=generator) for n in (96, 12, len(plate)))
    direction = 4 * torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    features = means[compound] + noise + plate_effect * plates[plate] + edge * is_edge[:, None] * direction
    return features, plate, place, compound


def test_invariance_statistic_plates_and_positions_are_averaged():
    """A cross of the two holds one compound, once: nothing can be told of it."""
    features, plate, place, y = arrayed(edge=1.0, plate_effect=0.5)
    each = [float(invariance_statistic([features], e, y)) for e in (plate, place, 96 * plate + place)]
    assert each[0] > 50 and each[1] > 10 and each[2] == 0
    assert float(invariance_statistic([features], [plate, place], y)) == pytest.approx((each[0] + each[1]) / 2)
    freedom = [float(explained_variance(features, e, y, partners="across").freedom) for e in (plate, place)]
    assert 10 < freedom[0] <= 11 and 60 < freedom[1] <= 95


def test_explained_variance_fixed_positions_are_compared_by_controls():
    features, _, place, _ = arrayed(edge=1.0, plate_effect=0.0)
    y = place.clamp(max=80)  # the last, on sixteen positions, is that of the controls
    controls = y == 80
    of_all = explained_variance(features, place, y, partners="across").freedom
    of_controls = explained_variance(features[controls], place[controls], y[controls], partners="across").freedom
    torch.testing.assert_close(of_all, of_controls)
    assert 10 < of_all <= 15


def test_explained_variance_of_noise_on_plates_varies_by_its_error():
    found = []
    for seed in range(60):
        features, *environments, y = arrayed(0.0, 0.0, seed)
        of = [explained_variance(features, e, y, partners="across") for e in environments]
        found.append([float(x.share / x.error) for x in of])
    scores = torch.tensor(found)
    assert ((scores.std(0) - 1).abs() < 0.3).all()
    assert (scores.mean(0).abs() < 0.4).all()


@given(batch=batches())
def test_invariance_statistic_sequence_of_one_environment_equals_environment(batch):
    features, e, y = batch
    values, gradients = [], []
    for given_as in (e, [e]):
        x = features.clone().requires_grad_()
        value = invariance_statistic([x, x**3], given_as, y)
        gradients += torch.autograd.grad(value, x)
        values.append(value)
    assert torch.equal(values[0], values[1])
    assert torch.equal(gradients[0], gradients[1])


@given(batch=batches(), others=codes(14, 2))
def test_invariance_statistic_several_environments_is_mean_of_resolvable(batch, others):
    features, e, y = batch
    columns = [e, torch.tensor(others)[: len(e)], torch.arange(len(e))]  # of the last, nothing can be
    each = [invariance_statistic([features], column, y) for column in columns]
    told = [
        any(explained_variance(features, c, y, partners=p).freedom > 0 for p in get_args(Partners)) for c in columns
    ]
    expected = sum(each, torch.zeros(())) / max(1, sum(told))
    torch.testing.assert_close(invariance_statistic([features], columns, y), expected.to(features))


@both
@given(batch=batches())
def test_explained_variance_freedom_equals_squared_norm_of_form(batch, partners):
    features, e, y = batch
    found = explained_variance(features, e, y, partners=partners).freedom
    torch.testing.assert_close(found, naive._form(e, y, partners).square().sum(), atol=1e-6, rtol=1e-6)


def test_explained_variance_constant_feature_is_finite():
    features = torch.cat([torch.randn(20, 2), torch.full((20, 1), 7.0)], 1).requires_grad_()
    invariance_statistic([features], torch.arange(20) % 2, torch.arange(20) % 3).backward()
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


def test_invariance_statistic_feature_of_rounding_errors_has_finite_gradient():
    """One direction of a whitened table was rounding of 1e-19, whose gradient was no number."""
    features = torch.randn(20, 3) * torch.tensor([1.0, 0.1, 1e-19])
    features.requires_grad_()
    invariance_statistic([features], torch.arange(20) % 2, torch.arange(20) % 3).backward()
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


@pytest.mark.parametrize("e", [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2]], ids=["told", "environment and label are one"])
def test_invariance_statistic_nan_features_give_nan(e):
    features = torch.randn(6, 3)
    features[1] = torch.nan
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    assert torch.isnan(invariance_statistic([features], torch.tensor(e), y))


def test_explained_variance_confounded_design_under_autocast_is_zero():
    """Rounded to bfloat16, terms that cancel left a variance below zero."""
    features, e, y = torch.randn(4, 8), torch.tensor([0, 1, 1, 1]), torch.tensor([2, 3, 0, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        share, error, freedom = explained_variance(features, e, y, partners="across")
    assert abs(share) < 1e-6 and error == 0 == freedom


def test_explained_variance_half_precision_is_computed_in_float32():
    features, e, y = effects(64, 3, 2, 0.5, 0)
    half, full = (explained_variance(f, e, y) for f in (features.bfloat16(), features.bfloat16().float()))
    assert half.share.dtype == half.error.dtype == torch.float32
    torch.testing.assert_close(tuple(half), tuple(full))


def test_explained_variance_gradients_equal_finite_differences():
    features, e, y = effects(10, 2, 2, 0.5, 0)
    for partners in get_args(Partners):
        assert torch.autograd.gradcheck(
            lambda f, p=partners: explained_variance(f, e, y, partners=p).share, features.double().requires_grad_()
        )


def test_explained_variance_invalid_arguments_raise():
    codes: Any = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"features must be \(B, D\) for 4 environments and labels, got \(4,\)"):
        explained_variance(torch.zeros(4), codes, codes)
    with pytest.raises(ValueError, match=r"environments and labels must both be \(B,\), got \(3,\) and \(4,\)"):
        explained_variance(torch.zeros(4, 2), codes[:3], codes)
    with pytest.raises(ValueError, match="the batch holds 1, give it at least 2"):
        explained_variance(torch.zeros(1, 2), codes[:1], codes[:1])
    with pytest.raises(ValueError, match="environments is an empty sequence"):
        invariance_statistic([torch.zeros(4, 2)], [], codes)
    with pytest.raises(ValueError, match="partners='all' is not known"):
        explained_variance(torch.zeros(4, 2), codes, codes, partners=cast("Partners", "all"))


def dependent(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labels and environments of a batch of real plate maps: a share of the cells whose label gives the plate away."""
    y, e = rng.integers(10, size=512), rng.integers(4, size=512)
    if kind == "only controls on all plates":
        return y, np.where(y == 0, e, y % 4)
    return y, np.where(rng.random(512) < float(kind), y % 4, e)


@pytest.mark.parametrize("spread", [1.0, 10.0], ids=["alike labels", "one label of ten times the spread"])
@pytest.mark.parametrize("kind", ["0", "0.5", "0.8", "0.9", "0.97", "only controls on all plates"])
def test_explained_variance_confounded_design_varies_by_its_error(kind, spread):
    """It was a twentieth of one where the design was confounded, and three where one label scattered more."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3):
        y, e = dependent(kind, rng)
        wide = torch.tensor(np.where(y == 1, spread, 1.0)[:, None])
        design = BatchDesign(torch.tensor(e), torch.tensor(y))
        found += [of_design(torch.tensor(rng.normal(size=(512, 16))) * wide, design) for _ in range(40)]
    for partners in get_args(Partners):
        in_errors = torch.stack([one[partners].share / one[partners].error for one in found])
        assert abs(in_errors.mean()) < 4 * in_errors.std() / math.sqrt(len(found))
        assert 0.75 < in_errors.std() < 1.2


def drawn(n: int, n_y: int, n_e: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and environments that know nothing of each other, some of them rare."""
    generator = torch.manual_seed(seed)
    y = (n_y * torch.rand(n, generator=generator) ** 1.5).long()
    return y, torch.randint(n_e, (n,), generator=generator)


@pytest.mark.parametrize("partners", ["within", "across"])
@pytest.mark.parametrize(("n", "n_y", "n_e"), [(60, 4, 2), (48, 12, 5), (80, 3, 20), (40, 30, 4)])
def test_pairing_gain_equals_value_for_environment_columns(n, n_y, n_e, partners):
    y, e = drawn(n, n_y, n_e, 0)
    found = BatchDesign(e, y).pairings[get_args(Partners).index(partners)].gain
    torch.testing.assert_close(found, float(naive.gain(e, y, partners)), rtol=1e-5, atol=1e-4)


def simulated(n: int, n_y: int, n_e: int, main: float, interaction: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Features of which environments explain shares, alike for all labels and each label by itself."""
    y, e = drawn(n, n_y, n_e, seed)
    shift, own = torch.randn(n_e, 16), torch.randn(n_y, n_e, 16)
    shift, own = shift - shift.mean(0), own - own.mean((0, 1))
    shift, own = (x / x.flatten(0, -2).std(0, correction=0) for x in (shift, own))
    rest = (1 - main - interaction) ** 0.5 * torch.randn(n, 16)
    return main**0.5 * shift[e] + interaction**0.5 * own[y, e] + rest, e, y


@pytest.mark.parametrize("n", [256, 2048])
@pytest.mark.parametrize(("main", "interaction"), [(0.3, 0.0), (0.0, 0.3), (0.2, 0.2)])
def test_environment_effects_interaction_equals_simulated_interaction(n, main, interaction):
    """With the same size in batches of any."""
    batches = [simulated(n, 8, 4, main, interaction, seed) for seed in range(8)]
    found = torch.stack([environment_effects([f], e, y).interaction for f, e, y in batches]).mean()
    # what labels differ in is part of the variance, and what chance may do is taken off
    assert float(found) == pytest.approx(0.75 * interaction, abs=0.05 if interaction else 0.02)


def test_environment_effects_interaction_of_noise_is_zero():
    blind = [environment_effects([f], e, y) for f, e, y in (simulated(512, 40, 8, 0, 0, s) for s in range(40))]
    assert float(torch.stack([x.interaction for x in blind]).mean()) < 0.01


def test_environment_effects_interaction_is_maximum():
    f, e, y = simulated(512, 8, 4, 0.1, 0.3, 0)
    other = torch.randint(3, (512,))
    noise = torch.randn(512, 8)
    both = environment_effects([f, noise], [e, other], y)
    assert both.interaction == environment_effects([f], e, y).interaction  # the largest
    torch.testing.assert_close(both.embedding_statistic, invariance_statistic([noise], [e, other], y))
    torch.testing.assert_close(both.statistic, invariance_statistic([f, noise], [e, other], y))


def test_environment_effects_only_statistic_has_gradient():
    f, e, y = simulated(64, 4, 2, 0.1, 0.3, 0)
    found = environment_effects([f.requires_grad_()], e, y)
    assert found.statistic.requires_grad
    assert not found.interaction.requires_grad and not found.embedding_statistic.requires_grad


def test_environment_effects_no_pairs_are_zero():
    e = torch.arange(8).repeat_interleave(4)
    of_labels = environment_effects([torch.randn(32, 4)], e, e)  # each label its own environment
    of_one_point = environment_effects([torch.ones(32, 4)], e % 2, torch.arange(32) % 3)
    for found in (of_labels, of_one_point):
        assert [float(x) for x in found] == [0, 0, 0]


def test_explained_variance_floating_point_environments_raise():
    features, y = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"environments are torch.float32: .*levels"):
        invariance_statistic([features], y.float(), y)
