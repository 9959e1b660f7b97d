from __future__ import annotations

import pytest
import torch
from reference import variance as naive

from scbd.nn import Numbers, environment_effects, invariance_statistic
from scbd.nn._design import Design


def drawn(n: int, n_y: int, n_e: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and environments that know nothing of each other, some of them rare."""
    generator = torch.manual_seed(seed)
    y = (n_y * torch.rand(n, generator=generator) ** 1.5).long()
    return y, torch.randint(n_e, (n,), generator=generator)


@pytest.mark.parametrize("partners", ["within", "across"])
@pytest.mark.parametrize(("n", "n_y", "n_e"), [(60, 4, 2), (48, 12, 5), (80, 3, 20), (40, 30, 4)])
def test_gain_is_what_columns_of_the_environment_add(n, n_y, n_e, partners):
    y, e = drawn(n, n_y, n_e, 0)
    found = Design(e, y).circles[0][partners].gain
    torch.testing.assert_close(found.double(), naive.gain(e, y, partners), rtol=1e-5, atol=1e-4)


def test_gain_of_numbers_is_what_their_terms_add():
    y, _ = drawn(60, 4, 2, 0)
    numbers = torch.linspace(0, 1, 60)
    found = Design(Numbers(numbers), y).circles[0]["across"].gain
    torch.testing.assert_close(found.double(), naive.gain(numbers, y, "across"), rtol=1e-5, atol=1e-4)


def test_what_an_order_does_to_each_label_is_interaction():
    y, time = torch.arange(512) % 4, torch.linspace(-1, 1, 512)
    noise = torch.randn(512, 8, generator=torch.manual_seed(0))
    alike, differently = noise + 2 * time[:, None], noise + 2 * (time * (2 * (y % 2) - 1))[:, None]
    found = [float(environment_effects([f], Numbers(time), y).interaction) for f in (alike, differently)]
    assert found[0] < 0.01 and found[1] > 0.4


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
def test_interaction_is_told_from_what_happens_to_all_labels(n, main, interaction):
    """With the same size in batches of any."""
    batches = [simulated(n, 8, 4, main, interaction, seed) for seed in range(8)]
    found = torch.stack([environment_effects([f], e, y).interaction for f, e, y in batches]).mean()
    # what labels differ in is part of the variance, and what chance may do is taken off
    assert float(found) == pytest.approx(0.75 * interaction, abs=0.05 if interaction else 0.02)


def test_chance_is_no_interaction():
    blind = [environment_effects([f], e, y) for f, e, y in (simulated(512, 40, 8, 0, 0, s) for s in range(40))]
    assert float(torch.stack([x.interaction for x in blind]).mean()) < 0.01


def test_of_several_representations_and_environments():
    f, e, y = simulated(512, 8, 4, 0.1, 0.3, 0)
    other = torch.randint(3, (512,))
    noise = torch.randn(512, 8)
    both = environment_effects([f, noise], [e, other], y)
    assert both.interaction == environment_effects([f], e, y).interaction  # the largest
    torch.testing.assert_close(both.of_last, invariance_statistic([noise], [e, other], y))
    torch.testing.assert_close(both.statistic, invariance_statistic([f, noise], [e, other], y))


def test_gradients_flow_through_the_statistic_alone():
    f, e, y = simulated(64, 4, 2, 0.1, 0.3, 0)
    found = environment_effects([f.requires_grad_()], e, y)
    assert found.statistic.requires_grad
    assert not found.interaction.requires_grad and not found.of_last.requires_grad


def test_nothing_is_told_where_nothing_can_be():
    e = torch.arange(8).repeat_interleave(4)
    of_labels = environment_effects([torch.randn(32, 4)], e, e)  # each label its own environment
    of_one_point = environment_effects([torch.ones(32, 4)], e % 2, torch.arange(32) % 3)
    for found in (of_labels, of_one_point):
        assert [float(x) for x in found] == [0, 0, 0]
