from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import variance as naive

from scbd.nn import Numbers, explained_variance, invariance_statistic
from scbd.nn._design import Partners

both = pytest.mark.parametrize("partners", get_args(Partners))


@st.composite
def batches(draw: st.DrawFn, most_values: int = 30) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, numbers with ties, and labels of any size."""
    n = draw(st.integers(2, 14))
    t = draw(st.lists(st.integers(-3, draw(st.integers(-3, most_values - 4))), min_size=n, max_size=n))
    y = draw(st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=n, max_size=n))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    features = torch.randn(n, draw(st.integers(1, 5)), dtype=torch.float64, generator=generator)
    return features, torch.tensor(t), torch.tensor(y)


def of(features: torch.Tensor, t: torch.Tensor, y: torch.Tensor, partners: Partners = "across") -> Any:
    return explained_variance(features, Numbers(t), y, partners=partners)


@both
@given(batch=batches())
@settings(max_examples=50)
def test_equals_the_loop_over_cells(batch, partners):
    features, t, y = batch
    found = of(features, t, y, partners)
    expected = naive.explained_variance(features, t.double(), y, partners)
    torch.testing.assert_close(found.share, expected, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(found.error, naive.error(features, t.double(), y, partners), atol=1e-7, rtol=1e-6)
    freedom = naive._form(t.double(), y, partners).square().sum()
    torch.testing.assert_close(found.freedom, freedom, atol=1e-9, rtol=1e-6)


@given(t=st.lists(st.floats(-1e6, 1e6) | st.integers(0, 3), min_size=1, max_size=40))
def test_terms_are_orthonormal_and_rise_with_the_order(t):
    numbers = Numbers(torch.tensor(t, dtype=torch.float64))
    products, n_values = numbers.terms.T @ numbers.terms, len(set(t))
    assert numbers.terms.shape == (len(t), 4) and len(numbers) == len(t)
    assert numbers.terms.sum(0).abs().max() < 1e-9
    assert (products - products.diagonal().diag()).abs().max() < 1e-9
    assert products.diagonal().tolist() == pytest.approx([float(k < n_values) for k in range(1, 5)])
    first = numbers.terms[:, 0][numbers.values.argsort()]
    assert (first.diff() >= -1e-12).all()


@both
@given(batch=batches())
def test_only_the_order_counts(batch, partners):
    features, t, y = batch
    changed = t.double().exp() - 7
    torch.testing.assert_close(tuple(of(features, t, y, partners)), tuple(of(features, changed, y, partners)))


@both
@given(batch=batches(most_values=5), more=st.integers(1, 3))
def test_of_few_values_it_is_that_of_their_labels(batch, more, partners):
    features, t, y = batch
    # a value of one cell is no group
    features, t, y = (torch.cat([x] * (more + 1)) for x in batch)
    generator = torch.Generator().manual_seed(0)
    features = features + torch.randn(features.shape, dtype=torch.float64, generator=generator)
    expected = explained_variance(features, t, y, partners=partners)
    torch.testing.assert_close(tuple(of(features, t, y, partners)), tuple(expected), atol=1e-6, rtol=1e-4)


def columns(kind: str, generator: torch.Generator, n: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and numbers of a batch."""
    y = torch.randint(24, (n,), generator=generator)
    t = torch.randint(24, (n,), generator=generator).float()
    if kind == "time of each cell":
        t = torch.randn(n, generator=generator).exp()
    elif kind == "two thirds follow the label":
        t = torch.where(torch.rand(n, generator=generator) < 2 / 3, y.float(), t)
    elif kind == "eight cells a label":
        y = torch.arange(n) // 8
    return y, t


@pytest.mark.parametrize("spread", [1.0, 10.0], ids=["alike labels", "one label of ten times the spread"])
@pytest.mark.parametrize("kind", ["columns", "time of each cell", "two thirds follow the label", "eight cells a label"])
@both
def test_the_unit_is_a_standard_error_whatever_the_design(kind, spread, partners):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(150):
        y, t = columns(kind, generator)
        wide = torch.where(y == 1, spread, 1.0)[:, None]
        found.append(of(torch.randn(512, 16, generator=generator) * wide, t, y, partners))
    in_errors = torch.stack([one.share / one.error for one in found])
    assert abs(in_errors.mean()) < 4 / math.sqrt(150)
    assert 0.8 < in_errors.std() < 1.2


@pytest.mark.parametrize("kind", ["gradient", "edges and middle"])
def test_finds_twice_as_much_as_columns_without_an_order(kind):
    """And the share of the variance is right. Times that no two cells share tell nothing as labels."""
    generator = torch.Generator().manual_seed(0)
    ordered, labels, shares = [], [], []
    for _ in range(40):
        y, t = columns("columns", generator)
        z = (t - 11.5) / 6.92
        effect = z if kind == "gradient" else (z**2 - 1) / 0.89
        features = torch.randn(512, 8, generator=generator) + 0.18 * effect[:, None]
        found, by_label = of(features, t, y), explained_variance(features, t.long(), y, partners="across")
        ordered.append(found.share / found.error)
        labels.append(by_label.share / by_label.error)
        shares.append(found.share)
    assert torch.stack(ordered).mean() > 2 * torch.stack(labels).mean() > 2
    assert float(torch.stack(shares).mean()) == pytest.approx(0.18**2 / (1 + 0.18**2), rel=0.15)
    each = torch.arange(512)
    assert explained_variance(features, each, y, partners="across").freedom == 0
    assert of(features, each, y).freedom > 3


def test_stands_beside_environments_without_an_order():
    generator = torch.Generator().manual_seed(0)
    y, t = columns("columns", generator)
    plate = torch.randint(4, (512,), generator=generator)
    features = torch.randn(512, 8, generator=generator) + 0.1 * t[:, None]
    of_t, of_plate = (invariance_statistic([features], e, y) for e in (Numbers(t), plate))
    within, across = (of(features, t, y, partners) for partners in get_args(Partners))
    torch.testing.assert_close(of_t, (within.share / within.error + across.share / across.error) / 2)
    torch.testing.assert_close(invariance_statistic([features], [plate, Numbers(t)], y), (of_t + of_plate) / 2)
    # where nothing can be told of it, it is left out
    torch.testing.assert_close(invariance_statistic([features], [plate, Numbers(0 * t)], y), of_plate)


def test_within_labels_it_sees_what_means_the_opposite_in_two_of_them():
    generator = torch.Generator().manual_seed(0)
    y, t = torch.arange(512) % 2, torch.rand(512, generator=generator)
    features = torch.randn(512, 4, generator=generator) + 2 * torch.where(y == 0, t, -t)[:, None]
    within, across = (of(features, t, y, partners) for partners in get_args(Partners))
    assert within.share > 10 * within.error and abs(across.share) < 3 * across.error
    assert 7 < within.freedom < 8 and 3.9 < across.freedom < 4


@both
def test_gradients_are_those_of_the_formula(partners):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(12, 3, dtype=torch.float64, generator=generator).requires_grad_()
    t, y = torch.rand(12, generator=generator), torch.arange(12) % 3
    assert torch.autograd.gradcheck(lambda f: of(f, t, y, partners).share, features)


def test_half_precision_is_computed_in_float32():
    y, t = columns("columns", torch.Generator().manual_seed(0))
    features = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = of(features, t, y)
    torch.testing.assert_close(tuple(found), tuple(of(features.float(), t, y)))


def test_bad_input_gets_a_sentence():
    features, y = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"Numbers are \(B,\), one a cell, got \(4, 2\)"):
        Numbers(features)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="2 of 4 numbers are NaN or infinite: leave these cells out"):
            Numbers(torch.tensor([0.0, bad, 1.0, bad]))
    with pytest.raises(ValueError, match=r"environments and labels must both be \(B,\), got \(3,\) and \(4,\)"):
        invariance_statistic([features], Numbers(y[:3]), y)
    with pytest.raises(ValueError, match=r"environments are torch.float32: .* as scbd.nn.Numbers\(environments\)"):
        invariance_statistic([features], y.float(), y)


def test_ties_share_their_mean_rank():
    numbers = Numbers(torch.tensor([5.0, 1.0, 5.0, 9.0]))
    ranks = np.array([2.5, 1, 2.5, 4]) - 2.5
    np.testing.assert_allclose(numbers.terms[:, 0], ranks / np.linalg.norm(ranks), atol=1e-12)
