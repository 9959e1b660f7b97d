from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from scbd.nn import _log_sums, invariance_loss, log_normaliser, supervised_contrastive_loss


def naive(z: torch.Tensor, temperature: float, labels: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The whole matrix, masked, row by row."""
    logits = z @ z.T / temperature
    others = ~torch.eye(len(z), dtype=torch.bool)
    if labels is None:
        masks = [others]
    else:
        same = labels[:, None] == labels[None, :]
        masks = [same & others, ~same]
    return tuple(torch.logsumexp(logits.masked_fill(~mask, -torch.inf), 1) for mask in masks)


def unit(n: int, d: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, tuple[int, int], int]:
    """Batches smaller than a tile, of whole tiles and of torn ones; nothing, some or all kept for the way back."""
    tile = draw(st.tuples(st.integers(1, 9), st.integers(1, 12)).filter(lambda t: t[1] >= t[0]))
    return draw(st.integers(2, 40)), tile, draw(st.sampled_from([0, 500, 10**6]))


@given(tilings(), st.booleans(), st.integers(0, 1000))
def test_any_tiling_equals_the_whole_matrix(tiling, split, seed):
    n, tile, kept = tiling
    labels = torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(seed)) if split else None
    z = unit(n, 3, seed).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_log_sums, "_TILE", {"cpu": tile})
        patch.setattr(_log_sums, "_KEPT_BYTES", kept)
        ours = _log_sums.log_sums(z, 0.1, labels)
        expected = naive(z, 0.1, labels)
        weights = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        gradients = []
        for parts in (ours, expected):
            # an anchor without partners has no finite sum and takes no gradient
            total = sum(torch.where(torch.isfinite(part), part, 0.0) @ weights for part in parts)
            assert isinstance(total, torch.Tensor)
            gradients.append(torch.autograd.grad(total, z)[0] if total.requires_grad else torch.zeros_like(z))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients[0], gradients[1].nan_to_num(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.1, 0.026, 0.024, 0.011, 0.004])
def test_low_temperatures_keep_their_digits(temperature):
    """Opposite vectors are exp(-500) of equal ones at 0.004; exp(90) of equal ones at 0.011 is beyond float32."""
    z = unit(5, 4, 0)
    z = torch.cat([z, z[:1], -z[:1]]).float()
    (ours,) = _log_sums.log_sums(z, temperature)
    (expected,) = naive(z.double(), temperature, None)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-5)


def test_two_opposite_points_at_the_lowest_temperature():
    z = torch.tensor([[1.0], [-1.0]])
    (ours,) = _log_sums.log_sums(z, 0.003)
    torch.testing.assert_close(ours, torch.full((2,), -1 / 0.003))


def test_the_matrix_is_never_whole():
    """Neither pass allocates anything near B × B, whichever of its tensors one looks at."""
    z = unit(3000, 8, 0).float().requires_grad_()
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    with Watch():
        log_normaliser(z).sum().backward()
    assert max(largest) <= 128 * 2048


@pytest.mark.parametrize("include_self", [True, False])
def test_two_losses_share_one_normaliser(include_self):
    z, y, e = unit(50, 8, 0).requires_grad_(), torch.arange(50) % 7, torch.arange(50) % 3
    shared = log_normaliser(z, include_self=include_self)
    together = supervised_contrastive_loss(z, y, include_self=include_self, log_normaliser=shared)
    together = together + 3 * invariance_loss(z, e, include_self=include_self, log_normaliser=shared)
    apart = supervised_contrastive_loss(z, y, include_self=include_self)
    apart = apart + 3 * invariance_loss(z, e, include_self=include_self)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (together, apart)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_a_second_derivative_is_refused_rather_than_wrong():
    z = unit(6, 3, 0).requires_grad_()
    (first,) = torch.autograd.grad(log_normaliser(z).sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
